"""NLL of given tokens: one forward pass, then the head in chunks, logits only where scored.

All logits of a 16,384-token document over GPT-2's vocabulary would take 3.1 GiB in fp32, and the
softmax as much again. A chunk of 1,024 positions takes 0.2 GiB and gives the same numbers.
Sums over tokens are the caller's, in float64.

`token_nll` takes what has one shape. `score` takes rows of unequal length, for questions with
several answers: what the answers of a question have in common is read once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from model import GPT, KVCache
from nanorove.errors import UserError

CHUNK = 1024  # positions whose logits exist at the same time
MAX_TOKENS = 16384  # of a batch, padding included
MIN_SAVED = {"cpu": 128, "cuda": 4096}  # tokens of a prefix read once instead of n times, below
# which two more forward passes cost more than they save (on a GPU a short one costs as a long one)
MAX_MASK = 2**24  # entries of the mask that a continuation of a prefix needs: 64 MiB in fp32


@dataclass(frozen=True)
class Span:
    """Score ids[start:end], each token given all before it; 1 <= start <= end <= len(ids)."""

    ids: np.ndarray
    """(n,) integer."""
    start: int
    end: int

    def __post_init__(self) -> None:
        if not 1 <= self.start <= self.end <= len(self.ids):
            raise ValueError(f"cannot score {self.start}:{self.end} of {len(self.ids)} tokens")


@dataclass(frozen=True)
class Scored:
    """What the model says of a span."""

    nll: np.ndarray
    """(end - start,) float64, nats, from fp32 logits."""
    greedy: np.ndarray
    """(end - start,) bool: is the token the most likely one? On ties the lowest id is."""


@torch.inference_mode()
def token_nll(
    model: GPT, idx: torch.Tensor, targets: torch.Tensor, *, chunk: int = CHUNK
) -> torch.Tensor:
    """NLL in nats of each target: (B, K) fp32.

    idx: (B, T) int64, what the model reads. targets: (B, K) int64 with K <= T, the tokens that
    follow the last K positions of idx; the head runs on those positions alone.
    """
    B, K = targets.shape
    if idx.size(0) != B or K > idx.size(1):
        raise ValueError(f"{B} rows of {K} targets for {tuple(idx.shape)} tokens")
    hidden = model.hidden(idx)[:, idx.size(1) - K :]  # (B, K, C)
    nll, _ = hidden_scores(model, hidden.flatten(0, 1), targets.flatten(), chunk=chunk)
    return nll.view(B, K)


@torch.inference_mode()
def hidden_scores(
    model: GPT, hidden: torch.Tensor, targets: torch.Tensor, *, chunk: int = CHUNK
) -> tuple[torch.Tensor, torch.Tensor]:
    """From hidden states (N, C) and targets (N,): NLL (N,) fp32, and (N,) bool, is the target the
    most likely token (on ties the lowest id)?

    Logits and log-sum-exp are fp32 over the real vocabulary, also when the body ran in bf16
    under autocast: half-precision logits shift the loss (modded-nanogpt#133).
    """
    nll = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
    greedy = torch.empty(targets.shape, dtype=torch.bool, device=hidden.device)
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, len(targets), chunk):
            rows = slice(start, start + chunk)
            logits = model.head(hidden[rows].float()).float()  # (chunk, V)
            nll[rows] = F.cross_entropy(logits, targets[rows], reduction="none")
            greedy[rows] = logits.argmax(-1) == targets[rows]
    return nll, greedy


# -----------------------------------------------------------------------------
# rows of unequal length


def batches(groups: Sequence[Sequence[Span]], max_tokens: int = MAX_TOKENS) -> list[list[int]]:
    """Indices of the groups that go through the model together, the longest first.

    A batch has at most max_tokens, counted as rows times the longest; a larger group goes alone.
    """
    width = [max((span.end for span in group), default=0) for group in groups]
    order = sorted(range(len(groups)), key=lambda i: (-width[i], i))
    found: list[list[int]] = []
    for i in order:
        if found:
            rows = sum(len(groups[j]) for j in found[-1]) + len(groups[i])
            if rows * width[found[-1][0]] <= max_tokens:
                found[-1].append(i)
                continue
        found.append([i])
    return found


@torch.inference_mode()
def score(
    model: GPT, groups: Sequence[Sequence[Span]], *, dtype: str = "float32"
) -> list[list[Scored]]:
    """What the model says of every span, in the given order: one batch of `batches`.

    The spans of a group should share a prefix (a question and its answers): where that saves
    enough, it is read once and its keys and values serve all. The others are rows of one batch,
    padded on the right, where causal attention never looks. dtype "bfloat16" is autocast of the
    transformer; the head is always fp32. Raises UserError for a loss that is not finite, and
    ValueError for a span beyond the model's max_len.
    """
    device = next(model.parameters()).device
    answers: dict[tuple[int, int], Scored] = {}
    plain: list[tuple[int, int]] = []
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
        for g, group in enumerate(groups):
            rows = [(g, s) for s, span in enumerate(group) if span.start < span.end]
            spans = [group[s] for _, s in rows]
            shared = shared_prefix(spans, device)
            if not shared:
                plain += rows
                continue
            kind = torch.bfloat16 if dtype == "bfloat16" else torch.float32
            prefix = KVCache(model.config, 1, shared, device, kind)
            model.hidden(_padded([spans[0].ids[:shared]], device), prefix)
            answers |= zip(rows, _score_rows(model, spans, device, prefix), strict=True)
        spans = [groups[g][s] for g, s in plain]
        answers |= zip(plain, _score_rows(model, spans, device, None), strict=True)
    nothing = Scored(np.zeros(0), np.zeros(0, dtype=bool))
    return [[answers.get((g, s), nothing) for s in range(len(group))]
            for g, group in enumerate(groups)]  # fmt: skip


def shared_prefix(spans: Sequence[Span], device: torch.device) -> int:
    """How many tokens these spans begin with and should read once; 0 if that does not pay.

    Never the last token before a scored one: each row must have a position to score at.
    """
    if len(spans) < 2:
        return 0
    limit = min(span.start for span in spans) - 1
    ids = np.stack([span.ids[:limit] for span in spans])  # (rows, limit)
    differ = (ids != ids[0]).any(axis=0)
    shared = int(differ.argmax()) if differ.any() else limit
    longest = max(span.end for span in spans) - 1
    pays = shared * (len(spans) - 1) >= MIN_SAVED[device.type]
    return shared if pays and (longest - shared) * longest <= MAX_MASK else 0


class _Branches(KVCache):
    """The cache of one row, continued by many: a layer's keys and values are copied for them when
    it is that layer's turn, and forgotten after it."""

    def __init__(self, trunk: KVCache) -> None:
        self.trunk, self.pos = trunk, trunk.pos

    def append(
        self, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        old_k, old_v = (
            t[layer, :, :, : self.trunk.pos].expand(len(k), -1, -1, -1)
            for t in (self.trunk.k, self.trunk.v)
        )
        return torch.cat((old_k, k), dim=2), torch.cat((old_v, v), dim=2)


def _score_rows(
    model: GPT, spans: Sequence[Span], device: torch.device, prefix: KVCache | None
) -> list[Scored]:
    """Rows padded on the right, behind `prefix` if there is one; as many at once as MAX_TOKENS
    allows, and one at least."""
    found: list[Scored] = []
    read = prefix.pos if prefix is not None else 0
    longest = max((span.end - 1 for span in spans), default=1)
    step = max(1, MAX_TOKENS // longest)
    for first in range(0, len(spans), step):
        part = spans[first : first + step]
        idx = _padded([span.ids[read : span.end - 1] for span in part], device)  # (B, T)
        hidden = model.hidden(idx, None if prefix is None else _Branches(prefix))  # (B, T, C)
        # position t predicts token t + 1
        hidden = torch.cat(
            [
                row[s.start - 1 - read : s.end - 1 - read]
                for row, s in zip(hidden, part, strict=True)
            ]
        )
        targets = np.concatenate([span.ids[span.start : span.end] for span in part])
        targets = torch.from_numpy(targets.astype(np.int64)).to(device)
        nll, greedy = (t.cpu().numpy() for t in hidden_scores(model, hidden, targets))
        if not np.isfinite(nll).all():
            raise UserError("the model's loss is not finite: its training has diverged")
        ends = np.cumsum([span.end - span.start for span in part])[:-1]
        pieces = zip(np.split(nll.astype(np.float64), ends), np.split(greedy, ends), strict=True)
        found += [Scored(*piece) for piece in pieces]
    return found


def _padded(rows: Sequence[np.ndarray], device: torch.device) -> torch.Tensor:
    """(B, T) int64, T the longest row's."""
    idx = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
    for row, ids in zip(idx, rows, strict=True):
        row[: len(ids)] = ids
    return torch.from_numpy(idx).to(device)
