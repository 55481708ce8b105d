"""token_nll against full logits in float64, written out with loops."""

import copy
import math

import pytest
import torch

from model import GPT, GPTConfig
from nanorove.scoring import hidden_nll, token_nll

CONFIG = GPTConfig(vocab_size=61, block_size=16, n_layer=2, n_head=2, n_embd=32, pos_emb="rove")


@pytest.fixture
def model() -> GPT:
    model = GPT(CONFIG, max_len=64, seed=3).eval()
    with torch.no_grad():  # larger weights than the initial ones: logits that differ
        for p in model.parameters():
            p.mul_(4)
    return model


def reference(model: GPT, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """All logits in float64, log-sum-exp over the real vocabulary, one position at a time."""
    double = copy.deepcopy(model).double()
    T, K = idx.size(1), targets.size(1)
    nll = torch.zeros(targets.shape, dtype=torch.float64)
    with torch.no_grad():
        for b in range(len(idx)):
            hidden = double.hidden(idx[b : b + 1])[0]
            for k in range(K):
                logits = hidden[T - K + k] @ double.transformer.wte.weight.T
                logits = logits[: model.config.vocab_size].tolist()
                top = max(logits)
                lse = top + math.log(math.fsum(math.exp(x - top) for x in logits))
                nll[b, k] = lse - logits[targets[b, k]]
    return nll


@pytest.mark.parametrize("K", [40, 7, 1])
@pytest.mark.parametrize("chunk", [1024, 7, 1])  # 7 divides neither 3 * 40 nor 3 * 7 evenly + 1
def test_against_full_logits_in_float64(model, K, chunk):
    generator = torch.Generator().manual_seed(0)
    idx = torch.randint(61, (3, 40), generator=generator)
    targets = torch.randint(61, (3, K), generator=generator)
    nll = token_nll(model, idx, targets, chunk=chunk)
    assert nll.shape == (3, K) and nll.dtype == torch.float32
    torch.testing.assert_close(nll.double(), reference(model, idx, targets), rtol=0, atol=1e-5)


def test_chunked_equals_unchunked(model):
    idx = torch.arange(64)[None] % 61
    whole = token_nll(model, idx, idx, chunk=64)
    for chunk in (1, 5, 48, 63):
        torch.testing.assert_close(
            token_nll(model, idx, idx, chunk=chunk), whole, rtol=0, atol=1e-5
        )


def test_only_a_chunk_of_logits_exists(model, monkeypatch):
    rows = []
    head = model.head
    monkeypatch.setattr(model, "head", lambda x: rows.append(len(x)) or head(x))
    idx = torch.zeros(2, 50, dtype=torch.int64)
    token_nll(model, idx, idx[:, :10], chunk=8)
    assert max(rows) <= 8 and sum(rows) == 2 * 10  # the other 80 positions never see the head


def test_uniform_logits_score_ln_of_the_real_vocabulary(model):
    with torch.no_grad():
        model.transformer.wte.weight.zero_()  # 64 rows, of which 61 are real
    idx = torch.zeros(1, 20, dtype=torch.int64)
    nll = token_nll(model, idx, idx)
    assert nll.double().mean().item() == pytest.approx(math.log(61), abs=1e-6)
    assert abs(math.log(64) - math.log(61)) > 0.04  # so the padding would be seen


def test_head_is_fp32_under_autocast(model):
    # modded-nanogpt#133: a loss from bf16 logits is another loss
    hidden = torch.randn(30, 32, generator=torch.Generator().manual_seed(1)) * 5
    targets = torch.arange(30)
    plain = hidden_nll(model, hidden, targets)
    with torch.autocast("cpu", torch.bfloat16):
        inside = hidden_nll(model, hidden, targets)
    assert torch.equal(plain, inside)


def test_no_graph_is_kept(model):
    idx = torch.zeros(1, 4, dtype=torch.int64)
    assert not token_nll(model, idx, idx).requires_grad


def test_more_targets_than_tokens_are_refused(model):
    idx = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="targets"):
        token_nll(model, idx, torch.zeros(1, 5, dtype=torch.int64))
