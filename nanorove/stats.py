"""How sure can we be? Intervals over documents for perplexity, for one model and for two.

The unit is the document: its tokens share a topic and a style, so they are no independent draws.
Everything here keeps the checkpoints fixed and asks what other documents would have said. It says
nothing about other training seeds, so nothing about a method: see `scope`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

N_RESAMPLES = 10_000
FEWEST_DOCUMENTS = 6  # with 5 the smallest p of 2^5 signs, two-sided, is 2/32 > 0.05


@dataclass(frozen=True)
class Interval:
    """A value with the ends of its confidence interval."""

    value: float
    low: float
    high: float

    def exp(self) -> "Interval":
        """From nats to perplexity, or from a difference in nats to a ratio of perplexities."""
        return Interval(*np.exp([self.value, self.low, self.high]).tolist())

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Paired:
    """Second minus first, on the same documents; p is that of the sign-flip permutation test."""

    difference: Interval
    p: float
    documents: int

    @property
    def told(self) -> bool:
        """Is there a difference for these checkpoints? Interval and test must both say so: with a
        handful of documents the bootstrap alone is too easily convinced."""
        return self.difference.excludes_zero and self.p <= 0.05


def ratio(sums: np.ndarray, counts: np.ndarray) -> float:
    """Token-weighted mean, sum(sums) / sum(counts): never a mean of per-document means.

    sums, counts: (D,), the summed NLL of each document and how many tokens it was summed over.
    """
    sums, counts = _checked(sums, counts)
    return float(sums.sum() / counts.sum())


def ratio_se(sums: np.ndarray, counts: np.ndarray) -> float:
    """Standard error of `ratio` by linearisation, for documents drawn at random (Cochran 1977,
    Sampling Techniques, section 6.3): sqrt(D/(D-1) sum (s_d - r n_d)^2) / sum n_d."""
    sums, counts = _checked(sums, counts)
    D = len(sums)
    residuals = sums - ratio(sums, counts) * counts
    return float(np.sqrt(D / (D - 1) * (residuals**2).sum()) / counts.sum())


def bootstrap_interval(
    sums: np.ndarray,
    counts: np.ndarray,
    *,
    level: float = 0.95,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """`ratio` with its percentile bootstrap interval: documents are drawn with replacement.

    Raises ValueError for fewer than two documents, which say nothing about the spread.
    """
    sums, counts = _checked(sums, counts)
    result = stats.bootstrap(
        (sums, counts),
        lambda s, n, axis=-1: s.sum(axis) / n.sum(axis),
        paired=True,  # one draw of documents for the sums and for the counts
        vectorized=True,
        n_resamples=n_resamples,
        batch=1000,
        confidence_level=level,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(ratio(sums, counts), float(result.low), float(result.high))


def paired_difference(
    first: np.ndarray,
    second: np.ndarray,
    counts: np.ndarray,
    *,
    first_documents: Sequence[str],
    second_documents: Sequence[str],
    level: float = 0.95,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> Paired:
    """Second minus first in nats per token, for two models that scored the same tokens.

    first, second, counts: (D,) summed NLL of each model and number of tokens, per document. The
    documents' difficulty cancels, so the interval is far narrower than two separate ones suggest.
    first_documents, second_documents: what identifies each document (a hash of its tokens); raises
    ValueError if the two lists differ, since then nothing is paired.
    """
    if list(first_documents) != list(second_documents):
        same = len(set(first_documents) & set(second_documents))
        raise ValueError(
            f"a paired comparison needs the same documents in the same order: {same} are common to "
            f"the {len(first_documents)} of the first and the {len(second_documents)} of the second"
        )
    first, second = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if not len(first) == len(second) == len(first_documents):
        raise ValueError(
            f"{len(first)} and {len(second)} sums for {len(first_documents)} documents"
        )
    difference = second - first
    interval = bootstrap_interval(
        difference, counts, level=level, n_resamples=n_resamples, seed=seed
    )
    # If the models were alike, each document's difference could as well have had the other sign.
    # scipy tries all 2^D signs if n_resamples allows, and else counts the data as one of the draws.
    p = stats.permutation_test(
        (difference,),
        lambda d, axis=-1: d.sum(axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=n_resamples,
        batch=1000,
        rng=np.random.default_rng(seed),
    ).pvalue
    return Paired(interval, float(p), len(difference))


def scope(seeds_per_arm: int) -> str:
    """What an interval over documents speaks about. It never speaks about the method: for that
    the spread between training seeds must be in it."""
    if seeds_per_arm < 1:
        raise ValueError(f"seeds_per_arm ({seeds_per_arm}) must be at least 1")
    if seeds_per_arm == 1:
        return "for these checkpoints (one training seed)"
    return f"for these checkpoints ({seeds_per_arm} training seeds, each pair by itself)"


def _checked(sums: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    sums, counts = np.asarray(sums, np.float64), np.asarray(counts, np.float64)
    if sums.ndim != 1 or sums.shape != counts.shape:
        raise ValueError(f"one sum and one count per document: {sums.shape} and {counts.shape}")
    if len(sums) < 2:
        raise ValueError(f"{len(sums)} documents: at least two are needed")
    if not (np.isfinite(sums).all() and (counts > 0).all()):
        raise ValueError("sums must be finite and counts positive")
    return sums, counts
