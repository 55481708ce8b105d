"""The attention backends against a float64 softmax written as a loop."""

import dataclasses
import math

import pytest
import torch

import model as model_file
from model import GPT, GPTConfig, KVCache, attention, causal_mask
from tests import reference

# (T, S): a whole sequence, a chunk behind a cache, one token behind a cache, one token
SHAPES = [(9, 9), (4, 9), (8, 9), (1, 9), (2, 2), (1, 1)]
CONFIG = GPTConfig(vocab_size=70, block_size=32, n_layer=2, n_head=2, n_embd=32)


def softmax_loop(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Query t of T sees the keys 0 .. S - T + t of S; one dot product at a time, in float64."""
    q, k, v = (t.detach().double() for t in (q, k, v))
    B, nh, T, hs = q.shape
    S = k.size(2)
    out = torch.zeros(B, nh, T, v.size(3), dtype=torch.float64)
    for b in range(B):
        for h in range(nh):
            for t in range(T):
                keys = range(S - T + t + 1)
                scores = [scale * float(q[b, h, t].dot(k[b, h, s])) for s in keys]
                weights = [math.exp(score - max(scores)) for score in scores]
                for s in keys:
                    out[b, h, t] += weights[s] / sum(weights) * v[b, h, s]
    return out


def random_qkv(T: int, S: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(T * 100 + S)
    return [
        torch.randn(2, 3, n, 8, dtype=torch.float64, generator=generator).to(dtype)
        for n in (T, S, S)
    ]


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize(("T", "S"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_backend_equals_the_softmax_loop(backend, T, S, dtype):
    # nanoGPT#398, nanochat#826: a second path with another mask
    q, k, v = random_qkv(T, S, dtype)
    y = attention(q, k, v, scale=0.7, backend=backend)
    assert y.dtype == dtype and y.shape == q.shape
    atol = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 4e-2}[dtype]
    torch.testing.assert_close(y.double(), softmax_loop(q, k, v, 0.7), rtol=0, atol=atol)


def test_mask_is_aligned_at_the_last_key():
    assert causal_mask(2, 5, torch.device("cpu")).int().tolist() == [
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1],
    ]


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("pos_emb", ["learned", "rope", "rove", "rove_no_inverse", "none"])
def test_causality(backend, pos_emb):
    config = dataclasses.replace(CONFIG, pos_emb=pos_emb)
    model = reference.randomise(GPT(config, attn_backend=backend)).double()
    ids = torch.randint(70, (1, 12), generator=torch.Generator().manual_seed(0))
    before = model(ids)
    for t in range(12):
        changed = ids.clone()
        changed[0, t] = (changed[0, t] + 1) % 70
        difference = (model(changed) - before)[0].abs().amax(-1)
        assert (difference[:t] < 1e-12).all()
        assert (difference[t:] > 1e-5).all()  # and every later token hears of it


@pytest.mark.parametrize("pos_emb", ["rope", "rove"])
def test_backends_agree_in_the_whole_model(pos_emb):
    config = dataclasses.replace(CONFIG, pos_emb=pos_emb, yarn_factor=4.0)
    ids = torch.randint(70, (2, 32), generator=torch.Generator().manual_seed(0))
    logits = [reference.randomise(GPT(config, attn_backend=b))(ids) for b in ("eager", "sdpa")]
    torch.testing.assert_close(*logits, rtol=0, atol=2e-4)


def test_asking_for_flash_without_the_package_is_an_error(monkeypatch):
    monkeypatch.setattr(model_file, "flash_attn_func", None)
    with pytest.raises(ValueError, match=r"'flash' needs the package flash-attn .*requirements"):
        GPT(CONFIG, attn_backend="flash")


def test_an_unknown_backend_is_an_error():
    # or a typing error would quietly run the slow one
    with pytest.raises(ValueError, match="attn_backend.*'flsh'.*eager"):
        GPT(CONFIG, attn_backend="flsh")


@pytest.fixture
def flash_stand_in(monkeypatch):
    """A stand-in for the package flash-attn, NOT its kernel: it holds the call to what the real
    function documents (names, layout, dtypes) and computes the result in float64."""
    calls = []

    def flash_attn_func(
        q,
        k,
        v,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
    ):
        (B, T, nh, hs), (_, S, _, _) = q.shape, k.shape
        assert k.shape == v.shape == (B, S, nh, hs)
        assert (nh, hs) == (2, 16), "not (batch, tokens, heads, head size)"
        assert q.dtype == k.dtype == v.dtype == torch.bfloat16, "fp16 or bf16, all the same"
        assert all(t.stride(-1) == 1 for t in (q, k, v)), "the last dimension must be contiguous"
        assert causal is True and dropout_p == 0.0 and window_size == (-1, -1)
        assert isinstance(softmax_scale, float) and not return_attn_probs
        calls.append((T, S))
        y = softmax_loop(*(t.transpose(1, 2) for t in (q, k, v)), softmax_scale)
        return y.transpose(1, 2).to(q.dtype).contiguous()

    monkeypatch.setattr(model_file, "flash_attn_func", flash_attn_func)
    return calls


@pytest.mark.parametrize("pos_emb", ["learned", "rope", "rove"])
def test_flash_call_with_a_stand_in(flash_stand_in, pos_emb):
    config = dataclasses.replace(CONFIG, pos_emb=pos_emb)
    ids = torch.randint(70, (1, 7), generator=torch.Generator().manual_seed(0))
    logits = []
    for backend in ("eager", "flash"):
        model = reference.randomise(GPT(config, attn_backend=backend), 0.1).bfloat16()
        cache = KVCache(config, 1, 7, dtype=torch.bfloat16)
        parts = [model(part, kv_cache=cache) for part in ids.split([4, 2, 1], dim=1)]
        logits.append(torch.cat([model(ids), *parts], 1).float())
        calls = list(flash_stand_in)
    assert calls == [s for shape in ((4, 4), (2, 6), (1, 7), (7, 7)) for s in [shape] * 2]
    torch.testing.assert_close(*logits, rtol=0, atol=0.1)
    assert logits[0].std() > 0.3  # so that the tolerance means something


@pytest.mark.parametrize("pos_emb", ["rope", "rove"])
def test_flash_stand_in_under_autocast(flash_stand_in, pos_emb):
    # training on a GPU: fp32 weights, bf16 autocast; rotated q, k, v must come out alike
    config = dataclasses.replace(CONFIG, pos_emb=pos_emb)
    ids = torch.randint(70, (1, 6), generator=torch.Generator().manual_seed(0))
    losses = []
    for backend in ("eager", "flash"):
        with torch.autocast("cpu", torch.bfloat16):
            loss = GPT(config, attn_backend=backend)(ids, ids)
        assert loss.dtype == torch.float32
        losses.append(loss.detach())
    assert len(flash_stand_in) == config.n_layer
    torch.testing.assert_close(*losses, rtol=0, atol=1e-2)


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_without_the_inverse_the_position_stays_in_the_output(factor):
    """The ablation: sum_j A_ij R_j v_j as it is, in float64, and it does depend on where it stands
    (Su Jianlin's comparison has it too; it trains to a worse loss)."""
    config = GPTConfig(70, 16, 2, 2, 16, "rove_no_inverse", yarn_factor=factor)
    model = reference.randomise(GPT(config)).double()
    ids = torch.randint(70, (12,), generator=torch.Generator().manual_seed(0))
    expected = reference.logits(model.state_dict(), config, ids)
    torch.testing.assert_close(model(ids[None])[0], expected, rtol=0, atol=1e-4)
    rove = GPT(dataclasses.replace(config, pos_emb="rove")).double()
    rove.load_state_dict(model.state_dict())
    assert (rove(ids[None])[0] - expected)[1:].abs().amax(1).min() > 0.01
