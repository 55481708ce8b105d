"""The scoring core against full logits in float64, written out with loops."""

import copy
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from model import GPT, GPTConfig
from nanorove import scoring
from nanorove.errors import UserError
from nanorove.scoring import Span, batches, hidden_scores, score, shared_prefix, token_nll
from tests import reference
from tests.conftest import REPO

CONFIG = GPTConfig(vocab_size=61, block_size=16, n_layer=2, n_head=2, n_embd=32, pos_emb="rove")


@pytest.fixture
def model() -> GPT:
    model = GPT(CONFIG, max_len=64, seed=3).eval()
    with torch.no_grad():  # larger weights than the initial ones: logits that differ
        for p in model.parameters():
            p.mul_(4)
    return model


def in_float64(model: GPT, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
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
    torch.testing.assert_close(nll.double(), in_float64(model, idx, targets), rtol=0, atol=1e-5)


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
    plain, plain_greedy = hidden_scores(model, hidden, targets)
    with torch.autocast("cpu", torch.bfloat16):
        inside, greedy = hidden_scores(model, hidden, targets)
    assert torch.equal(plain, inside) and torch.equal(plain_greedy, greedy)


def test_no_graph_is_kept(model):
    idx = torch.zeros(1, 4, dtype=torch.int64)
    assert not token_nll(model, idx, idx).requires_grad


def test_more_targets_than_tokens_are_refused(model):
    idx = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="targets"):
        token_nll(model, idx, torch.zeros(1, 5, dtype=torch.int64))


# -----------------------------------------------------------------------------
# rows of unequal length

CPU = torch.device("cpu")


def make(pos_emb: str, block_size: int = 256) -> GPT:
    config = GPTConfig(61, block_size, n_layer=2, n_head=2, n_embd=32, pos_emb=pos_emb)
    return reference.randomise(GPT(config, seed=1), 0.25, seed=4).eval()


def tokens(n: int, seed: int) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, 61, n).astype(np.uint16)


def question(prefix: int, answers: list[int], seed: int) -> list[Span]:
    """Answers of these lengths behind one prompt, all their tokens scored."""
    prompt = tokens(prefix, seed)
    rows = [np.concatenate([prompt, tokens(n, seed + 1 + i)]) for i, n in enumerate(answers)]
    return [Span(row, prefix, len(row)) for row in rows]


def expected(model: GPT, span: Span) -> tuple[np.ndarray, np.ndarray]:
    """NLL and greedy from the slow model in float64, one row at a time, nothing shared."""
    ids = torch.from_numpy(span.ids[: max(1, span.end - 1)].astype(np.int64))
    logits = reference.logits(model.state_dict(), model.config, ids)
    nll, greedy = [], []
    for t in range(span.start, span.end):
        row = logits[t - 1].tolist()
        top = max(row)
        lse = top + math.log(math.fsum(math.exp(x - top) for x in row))
        nll.append(lse - row[span.ids[t]])
        greedy.append(row.index(top) == span.ids[t])
    return np.array(nll), np.array(greedy, dtype=bool)


def likely_tokens(model: GPT, span: Span) -> Span:
    """The same with every second scored token replaced by the most likely one."""
    ids = span.ids.copy()
    for t in range(span.start, span.end, 2):
        with torch.no_grad():
            ids[t] = int(model(torch.from_numpy(ids[:t].astype(np.int64))[None])[0, -1].argmax())
    return Span(ids, span.start, span.end)


@pytest.mark.parametrize("pos_emb", ["learned", "rope", "rove", "none"])
def test_groups_against_plain_rows_in_float64(pos_emb):
    """Shared and unshared prefixes, empty spans, empty groups, spans in the middle: all at once."""
    model = make(pos_emb)
    long = question(150, [3, 9, 1, 6], seed=0)
    long[1] = likely_tokens(model, long[1])
    short = question(5, [4, 7], seed=20)
    middle = [Span(tokens(90, 40), 30, 45), Span(tokens(7, 41), 1, 7)]
    empty = [Span(tokens(7, 41), 7, 7), Span(tokens(12, 42), 4, 9), Span(tokens(3, 43), 1, 1)]
    groups = [short, long, [], middle, empty]
    assert [shared_prefix(group, CPU) for group in (long, short, middle)] == [149, 0, 0]
    found = score(model, groups)
    assert [len(group) for group in found] == [2, 4, 0, 2, 3]
    greedy = 0
    for group, scored in zip(groups, found, strict=True):
        for span, got in zip(group, scored, strict=True):
            nll, most_likely = expected(model, span)
            assert got.nll.dtype == np.float64 and got.greedy.dtype == bool
            np.testing.assert_allclose(got.nll, nll, rtol=0, atol=2e-5)
            assert got.greedy.tolist() == most_likely.tolist()
            greedy += int(most_likely.sum())
    assert greedy >= 5  # of both kinds there are some


def test_a_shared_prefix_goes_through_the_model_once(monkeypatch):
    model = make("rove")
    read = []
    hidden = model.hidden
    monkeypatch.setattr(
        model, "hidden", lambda idx, cache=None: read.append(idx.shape) or hidden(idx, cache)
    )
    score(model, [question(200, [3, 5, 4], seed=0)])
    assert read == [(1, 199), (3, 5)]  # the last token of each answer is a target alone


def test_what_is_shared_ends_before_the_first_scored_position():
    """Each row keeps a position to score at, also where the answers begin alike."""
    row = tokens(200, 0)
    rows = [Span(row, 150, 200), Span(row.copy(), 190, 200), Span(row.copy(), 170, 171)]
    assert shared_prefix(rows, CPU) == 149
    apart = row.copy()
    apart[140] = (apart[140] + 1) % 61
    assert shared_prefix([Span(row, 150, 200), Span(apart, 150, 200)], CPU) == 140
    assert shared_prefix(rows[:1], CPU) == 0 and shared_prefix([], CPU) == 0
    model = make("rope")
    for span, got in zip(rows, score(model, [rows])[0], strict=True):
        np.testing.assert_allclose(got.nll, expected(model, span)[0], rtol=0, atol=2e-5)


def test_a_short_prefix_and_long_answers_are_not_worth_it():
    assert shared_prefix(question(20, [5, 5, 5, 5], seed=0), CPU) == 0  # 57 tokens saved
    # a mask of 5,000 x 10,000 would be larger than what it saves
    rows = [Span(np.arange(10_000) + i * (np.arange(10_000) >= 5000), 5001, 10_000) for i in (0, 1)]
    assert shared_prefix(rows, CPU) == 0
    rows = [Span(np.arange(10_000) + i * (np.arange(10_000) >= 9900), 9901, 10_000) for i in (0, 1)]
    assert shared_prefix(rows, CPU) == 9900


def test_learned_positions_up_to_their_end():
    model = make("learned", block_size=170)
    groups = [question(150, [21, 5], seed=0), [Span(tokens(171, 9), 1, 171)]]
    for group, scored in zip(groups, score(model, groups), strict=True):
        for span, got in zip(group, scored, strict=True):
            np.testing.assert_allclose(got.nll, expected(model, span)[0], rtol=0, atol=2e-5)
    for span in (Span(tokens(172, 0), 1, 172), Span(tokens(300, 0), 172, 173)):
        with pytest.raises(ValueError, match="more than max_len"):
            score(model, [[span]])


def test_what_follows_the_span_changes_nothing():
    model = make("rove")
    ids = tokens(80, 0)
    other = ids.copy()
    other[40:] = 3
    a, b = (score(model, [[Span(i, 20, 40)]])[0][0] for i in (ids, other))
    assert np.array_equal(a.nll, b.nll) and np.array_equal(a.greedy, b.greedy)


def test_many_rows_are_read_in_parts(monkeypatch):
    """So that a question with a hundred long answers fits as well."""
    model = make("rove")
    groups = [question(150, [9, 3, 8, 2, 5], seed=0), question(4, [70, 60, 50], seed=9)]
    whole = score(model, groups)
    monkeypatch.setattr(scoring, "MAX_TOKENS", 200)
    sizes = []
    hidden = model.hidden
    monkeypatch.setattr(
        model, "hidden", lambda idx, cache=None: sizes.append(idx.shape) or hidden(idx, cache)
    )
    parts = score(model, groups)
    assert sizes == [(1, 149), *[(1, n) for n in (9, 3, 8, 2, 5)], (2, 73), (1, 53)]
    for a, b in zip(whole, parts, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_allclose(x.nll, y.nll, rtol=0, atol=2e-5)


def test_uniform_logits_score_ln_v_everywhere():
    model = make("rove")
    with torch.no_grad():
        model.transformer.wte.weight.zero_()
    groups = [question(150, [3, 9], seed=0), [Span(tokens(40, 5), 1, 40)]]
    for group in score(model, groups):
        for got in group:
            np.testing.assert_allclose(got.nll, math.log(61), rtol=0, atol=1e-6)
    (zero,), (one,) = score(
        model, [[Span(np.array([5, 0, 0]), 1, 3)], [Span(np.ones(3, int), 1, 3)]]
    )
    assert zero.greedy.all() and not one.greedy.any()  # the lowest id wins a tie


class Oracle(torch.nn.Module):
    """Knows that 7 t + 3 follows t, and that nothing else does."""

    config = GPTConfig(61, 256, 1, 1, 2)

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(1000 * torch.eye(61))

    def hidden(self, idx, cache=None):
        if cache is not None:
            cache.pos += idx.size(1)
        return self.weight[(7 * idx + 3) % 61]

    def head(self, x):
        return x


def test_an_oracle_scores_zero():
    row = [11]
    for _ in range(180):
        row.append((7 * row[-1] + 3) % 61)
    row = np.array(row)
    wrong = row.copy()
    wrong[175] = (wrong[175] + 1) % 61
    right, mistaken = score(Oracle(), [[Span(row, 170, 181), Span(wrong, 170, 181)]])[0]
    assert shared_prefix([Span(row, 170, 181), Span(wrong, 170, 181)], CPU) == 169
    assert right.nll.tolist() == [0.0] * 11 and right.greedy.all()
    assert mistaken.nll.tolist() == [0.0] * 5 + [1000.0, 1000.0] + [0.0] * 4


def test_a_loss_that_is_not_finite_is_refused():
    model = make("rove")
    with torch.no_grad():
        model.transformer.ln_f.bias[0] = math.nan
    for group in ([Span(tokens(9, 0), 3, 9)], question(200, [3, 4], seed=0)):
        with pytest.raises(UserError, match="not finite"):
            score(model, [group])


def test_bfloat16_is_of_the_body_alone():
    """modded-nanogpt#133: near the fp32 numbers, and the same with and without a shared prefix."""
    model = make("rove")
    group = question(150, [3, 9, 4], seed=0)
    full = score(model, [group])[0]
    half = score(model, [group], dtype="bfloat16")[0]
    alone = [score(model, [[span]], dtype="bfloat16")[0][0] for span in group]
    for f, h, a in zip(full, half, alone, strict=True):
        assert 1e-4 < abs(f.nll - h.nll).max() < 0.5
        np.testing.assert_allclose(h.nll, a.nll, rtol=0, atol=0.25)
        assert (h.nll.astype(np.float32) == h.nll).all()  # fp32, not bf16: that has 8 bits
        assert len(np.unique(h.nll * 2**10 % 1)) > 1


def test_a_span_must_lie_in_its_tokens():
    for start, end in ((0, 2), (3, 2), (1, 5)):
        with pytest.raises(ValueError, match=f"cannot score {start}:{end} of 4 tokens"):
            Span(np.arange(4), start, end)


def test_batches():
    """By hand: longest first, ties in order, rows times the longest up to the limit."""
    sizes = [[4, 3], [10], [4], [30, 5], [], [9, 9, 9]]  # widths 4, 10, 4, 30, 0, 9
    groups = [[Span(np.arange(n), 1, n) for n in group] for group in sizes]
    assert batches(groups, 40) == [[3], [1, 5], [0, 2, 4]]  # 60 alone; 10 * 4; then 4 * 3
    assert batches(groups, 39) == [[3], [1], [5], [0, 2, 4]]
    assert batches(groups, 1) == [[3], [1], [5], [0], [2], [4]]
    assert batches([], 40) == []
    # what lies behind a span is not read
    assert batches([[Span(np.arange(1000), 1, 20)], [Span(np.arange(20), 1, 20)]], 40) == [[0, 1]]


MEMORY = """
import resource, sys
import numpy as np, torch
from model import GPT, GPTConfig
from nanorove.scoring import Span, score
torch.set_num_threads(1)
"""

GROWTH = (
    MEMORY
    + """
model = GPT(GPTConfig(257, 512, 2, 2, 64, "rove")).eval()
rng = np.random.RandomState(0)
peaks = []
for i in range(300):
    prompt = rng.randint(0, 257, rng.randint(100, 300))
    rows = [np.concatenate([prompt, rng.randint(0, 257, rng.randint(1, 90))]) for _ in range(4)]
    score(model, [[Span(row, len(prompt), len(row)) for row in rows]])
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(peaks[99], peaks[-1])
"""
)

DOCUMENT = (
    MEMORY
    + """
model = GPT(GPTConfig(n_layer=2, pos_emb="rove"), max_len=16384).eval()
ids = np.random.RandomState(0).randint(0, 50257, 16384)
((scored,),) = score(model, [[Span(ids, 1, 16384)]])
assert len(scored.nll) == 16383
print(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
)


def peak_kib(program: str) -> list[int]:
    env = os.environ | {"PYTHONPATH": str(REPO)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [int(n) for n in done.stdout.split()]


def test_memory_is_flat_over_examples():
    """nanochat#427: HellaSwag grew with each example. Three hundred questions of random lengths
    need no more than one hundred."""
    after_100, after_300 = peak_kib(GROWTH)
    assert after_300 < 1.1 * after_100


@pytest.mark.slow
def test_a_document_of_16384_tokens_fits_in_2_5_gib():
    """At 124M, full logits alone would be 3.1 GiB. Ten more layers add weights and nothing else."""
    layer = 12 * 768**2 * 4 / 2**10  # KiB
    assert peak_kib(DOCUMENT)[1] + 10 * layer < 2.5 * 2**20
