"""A KV cache changes how often something is computed, never what."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model import GPT, GPTConfig, KVCache
from tests import reference

CONFIG = GPTConfig(vocab_size=70, block_size=16, n_layer=2, n_head=2, n_embd=32)
CHUNKS = [[12], [1] * 12, [7, 1, 1, 1, 1, 1], [3, 4, 1, 4], [1, 11], [11, 1]]


def ids_of(B: int, T: int) -> torch.Tensor:
    return torch.randint(70, (B, T), generator=torch.Generator().manual_seed(T))


def cached(model: GPT, ids: torch.Tensor, chunks: list[int], dtype: torch.dtype) -> torch.Tensor:
    cache = KVCache(model.config, ids.size(0), ids.size(1), dtype=dtype)
    return torch.cat([model(part, kv_cache=cache) for part in ids.split(chunks, dim=1)], dim=1)


@torch.inference_mode()
@pytest.mark.parametrize("pos_emb", ["learned", "rope", "rove", "none"])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_chunks_and_single_steps_equal_the_full_pass(pos_emb, backend, chunks):
    config = dataclasses.replace(CONFIG, pos_emb=pos_emb)
    model = reference.randomise(GPT(config, attn_backend=backend))
    ids = ids_of(3, 12)
    torch.testing.assert_close(
        cached(model, ids, chunks, torch.float32), model(ids), rtol=0, atol=1e-4
    )
    model.double()
    torch.testing.assert_close(
        cached(model, ids, chunks, torch.float64), model(ids), rtol=0, atol=1e-11
    )


@torch.inference_mode()
@pytest.mark.parametrize(
    ("pos_emb", "factor"),
    [("rope", 1.0), ("rope", 4.0), ("rove", 1.0), ("rove", 4.0), ("none", 1.0)],
)
def test_beyond_the_trained_context(pos_emb, factor):
    # nanochat#514: the offset counts, not the length of the chunk
    config = dataclasses.replace(CONFIG, pos_emb=pos_emb, yarn_factor=factor)
    model = reference.randomise(GPT(config, max_len=5 * config.block_size)).double()
    ids = ids_of(1, 80)
    full = model(ids)
    for chunks in ([60] + [1] * 20, [20, 30, 30]):
        torch.testing.assert_close(
            cached(model, ids, chunks, torch.float64), full, rtol=0, atol=1e-10
        )
    expected = reference.logits(model.state_dict(), config, ids[0])
    torch.testing.assert_close(full[0], expected, rtol=0, atol=1e-5)


@torch.inference_mode()
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    n_head=st.integers(1, 3),
    half=st.integers(1, 4),
    pos_emb=st.sampled_from(["learned", "rope", "rove", "none"]),
    factor=st.sampled_from([1.0, 3.5]),
    backend=st.sampled_from(["eager", "sdpa"]),
)
def test_any_chunks_equal_the_full_pass(chunks, n_head, half, pos_emb, factor, backend):
    if pos_emb in ("learned", "none"):
        factor = 1.0
    config = GPTConfig(
        70, 16 if pos_emb != "learned" else 81, 2, n_head, 2 * half * n_head, pos_emb,
        yarn_factor=factor,
    )  # fmt: skip
    model = reference.randomise(GPT(config, max_len=81, attn_backend=backend)).double()
    ids = ids_of(2, sum(chunks))
    torch.testing.assert_close(
        cached(model, ids, chunks, torch.float64), model(ids), rtol=0, atol=1e-10
    )


def test_more_tokens_than_the_cache_holds():
    model = GPT(CONFIG)
    cache = KVCache(CONFIG, 1, 5)
    model(ids_of(1, 4), kv_cache=cache)
    stored = cache.k.clone()
    with pytest.raises(ValueError, match="6 tokens do not fit in a KV cache of 5"):
        model(ids_of(1, 2), kv_cache=cache)
    assert cache.pos == 4 and torch.equal(cache.k, stored)
    model(ids_of(1, 1), kv_cache=cache)  # the last place is there to be used
    assert cache.pos == 5


@pytest.mark.parametrize("pos_emb", ["learned", "rope", "rove", "none"])
def test_max_len_counts_the_tokens_in_the_cache(pos_emb):
    config = dataclasses.replace(CONFIG, pos_emb=pos_emb)
    model = GPT(config)
    cache = KVCache(config, 1, 40)
    model(ids_of(1, 15), kv_cache=cache)
    model(ids_of(1, 1), kv_cache=cache)
    with pytest.raises(ValueError, match=r"17 tokens are more than max_len \(16\)"):
        model(ids_of(1, 1), kv_cache=cache)


def test_cache_of_a_batch_keeps_the_rows_apart():
    model = reference.randomise(GPT(dataclasses.replace(CONFIG, pos_emb="rove"))).double()
    ids = ids_of(3, 9)
    together = cached(model, ids, [4, 1, 4], torch.float64)
    for row in range(3):
        alone = cached(model, ids[row : row + 1], [9], torch.float64)
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=1e-11)
