"""How sure can we be? Of two checkpoints, of two methods, and of many claims at once.

1. Documents, or the items of a benchmark, vary and the checkpoints are fixed: `paired_difference`,
   `paired_items`. This says nothing about other training seeds, so nothing about a method: `scope`.
2. Training seeds vary and the documents are fixed: `seed_interval`. Both vary: `widen`.
3. A family of claims that was declared beforehand: `judge` gives a `Verdict` on each, and the
   sentence that goes with it.

How well each of them holds what it promises is measured in docs/statistics.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor, inf, log, log10

import numpy as np
from scipy import stats

N_RESAMPLES = 10_000
ALPHA = 0.05
FEWEST_DOCUMENTS = 6  # with 5 the smallest p of 2^5 signs, two-sided, is 2/32 > 0.05
FEWEST_SEEDS = 6  # for a p over seeds, for the same reason


# -----------------------------------------------------------------------------
# documents


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
    """Or items, for `paired_items`."""

    @property
    def told(self) -> bool:
        """Is there a difference for these checkpoints? Interval and test must both say so: with a
        handful of documents the bootstrap alone is too easily convinced."""
        return self.difference.excludes_zero and self.p <= ALPHA


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

    It is narrow: of 95 % intervals over 8, 16 and 40 documents 88, 92 and 93 % hold, and 91 % over
    100 whose tails are heavy (docs/statistics.md). Documents must have nothing to do with another.

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
    _check_same("documents", first_documents, second_documents)
    first, second = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if not len(first) == len(second) == len(first_documents):
        raise ValueError(
            f"{len(first)} and {len(second)} sums for {len(first_documents)} documents"
        )
    difference = second - first
    interval = bootstrap_interval(
        difference, counts, level=level, n_resamples=n_resamples, seed=seed
    )
    p = sign_flip_p(difference, n_resamples=n_resamples, seed=seed)
    return Paired(interval, p, len(difference))


def sign_flip_p(differences: np.ndarray, *, n_resamples: int = N_RESAMPLES, seed: int = 0) -> float:
    """Two-sided p of the sign-flip permutation test on the sum of paired differences, (n,).

    If the two were alike, each difference could as well have had the other sign. scipy tries all
    2^n signs if n_resamples allows (n <= 13), and else counts the data as one of the draws.
    """
    result = stats.permutation_test(
        (np.asarray(differences, np.float64),),
        lambda d, axis=-1: d.sum(axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=n_resamples,
        batch=1000,
        rng=np.random.default_rng(seed),
    )
    return float(result.pvalue)


def scope(seeds_per_arm: int) -> str:
    """What an interval over documents speaks about. It never speaks about the method: for that
    the spread between training seeds must be in it."""
    if seeds_per_arm < 1:
        raise ValueError(f"seeds_per_arm ({seeds_per_arm}) must be at least 1")
    if seeds_per_arm == 1:
        return "for these checkpoints (one training seed)"
    return f"for these checkpoints ({seeds_per_arm} training seeds, each pair by itself)"


# -----------------------------------------------------------------------------
# items of a benchmark


def paired_items(
    first: Mapping[str, np.ndarray],
    second: Mapping[str, np.ndarray],
    *,
    first_items: Mapping[str, Sequence[str]],
    second_items: Mapping[str, Sequence[str]],
    weights: Mapping[str, float] | None = None,
    level: float = 0.95,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> Paired:
    """Second minus first of sum over tasks of weight * (mean over the task's items).

    first, second: per task (n,) values of its items: 1 and 0 for right and wrong, or an NLL.
    first_items, second_items: per task what identifies each item (a hash, an index). weights: as
    `core_weights` gives them for CORE; None is the plain mean over tasks, as RULER's categories
    are. The tasks are given and their items drawn at random: the bootstrap draws within each task,
    and the sign-flip test flips items. Items are taken as independent draws, which those about one
    passage (SQuAD, CoQA) and CORE's two HellaSwags, the same items twice, are not quite.

    Raises ValueError if tasks, items or weights do not match, or a task has fewer than two items.
    """
    _check_same("tasks", list(first), list(second))
    if weights is None:
        weights = {task: 1 / len(first) for task in first}
    if not first or set(weights) != set(first):
        raise ValueError(f"weights are for {sorted(weights)}, results for {sorted(first)}")
    rng = np.random.default_rng(seed)
    value, n_items = 0.0, 0
    drawn, flipped = np.zeros(n_resamples), np.zeros(n_resamples)
    for task in first:
        _check_same(f"items of {task}", first_items[task], second_items[task])
        a, b = np.asarray(first[task], np.float64), np.asarray(second[task], np.float64)
        n = len(first_items[task])
        if a.shape != (n,) or b.shape != (n,) or n < 2:
            raise ValueError(f"{task}: {a.shape} and {b.shape} values for {n} items, at least two")
        if not np.isfinite(b - a).all():
            raise ValueError(f"{task}: values must be finite")
        means, flips = _draw_items(b - a, n_resamples, rng)
        value += weights[task] * float((b - a).mean())
        drawn += weights[task] * means
        flipped += weights[task] * flips
        n_items += n
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2]).tolist()
    # the data count as one of the draws; a tie must not hang on the order of a sum
    p = (1 + (np.abs(flipped) >= abs(value) * (1 - 1e-9)).sum()) / (1 + n_resamples)
    return Paired(Interval(value, low, high), float(p), n_items)


def core_weights(baselines: Mapping[str, float]) -> dict[str, float]:
    """Weights that turn differences of accuracy into one of CORE, the mean over tasks of
    (accuracy - baseline) / (1 - baseline), with baselines as fractions (DCLM, arXiv 2406.11794).
    """
    return {task: 1 / (1 - baseline) / len(baselines) for task, baseline in baselines.items()}


def _draw_items(
    d: np.ndarray, n_resamples: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(n_resamples,) means of d drawn with replacement, and means of d with random signs."""
    n = len(d)
    values, counts = np.unique(d, return_counts=True)
    if len(values) <= 16:  # right or wrong: all that matters is how often each value is drawn
        means = rng.multinomial(n, counts / n, n_resamples) @ values / n
        plus = rng.binomial(counts, 0.5, (n_resamples, len(counts)))
        return means, (2 * plus - counts) @ values / n
    means, flips = np.empty(n_resamples), np.empty(n_resamples)
    for i in range(0, n_resamples, 500):  # bounds the memory
        rows = slice(i, min(i + 500, n_resamples))
        shape = rows.stop - rows.start, n
        means[rows] = d[rng.integers(0, n, shape)].mean(1)
        flips[rows] = (2.0 * rng.integers(0, 2, shape, np.int8) - 1) @ d / n
    return means, flips


# -----------------------------------------------------------------------------
# seeds


def seed_interval(differences: Sequence[float], *, level: float = 0.95) -> Interval:
    """Paired t interval over training seeds: what the method does, on these documents.

    differences: (S,) second minus first, a pair of trainings of equal seed each. It speaks of
    other seeds of this recipe, data and evaluation set; all seeds see the same documents, so how
    much the answer would move with others is not in it: see `widen`. Exact if the differences are
    normal, whatever their spread, and cautious if their tails are heavy; of log-normal ones 84 %
    hold instead of 95. Seeds without any spread (two counts that agree by chance) say nothing
    about it, and the interval is infinite.

    Raises ValueError for one seed: it is never enough.
    """
    d = np.asarray(differences, np.float64)
    if d.ndim != 1 or len(d) < 2 or not np.isfinite(d).all():
        raise ValueError(f"{d.tolist()}: finite differences of at least two seeds are needed")
    if _alike(d):
        return Interval(float(d.mean()), -inf, inf)
    half = stats.t.ppf((1 + level) / 2, len(d) - 1) * d.std(ddof=1) / np.sqrt(len(d))
    return Interval(float(d.mean()), float(d.mean() - half), float(d.mean() + half))


def seed_p(differences: Sequence[float]) -> float | None:
    """p of the paired t test over seeds; None with fewer than FEWEST_SEEDS.

    It is the t test's and not the sign-flip test's, since it belongs to `seed_interval`, and since
    2^6 signs have no p below 0.03: corrected for two claims that could never be small. `judge`
    asks the sign-flip test as well, which needs no normal distribution.
    """
    if len(differences) < FEWEST_SEEDS:
        return None
    if _alike(differences):
        return 1.0
    t = np.mean(differences) / np.std(differences, ddof=1) * np.sqrt(len(differences))
    return float(2 * stats.t.sf(abs(t), len(differences) - 1))


def _alike(differences: Sequence[float]) -> bool:
    """No spread, but for rounding: 0.3 - 0.2 and 0.2 - 0.1 are not the same float."""
    return bool(np.ptp(differences) <= 1e-9 * np.abs(differences).max())


def widen(seeds: Interval, documents: Sequence[Interval]) -> Interval:
    """An interval over seeds and documents, from the one over seeds and each seed's over documents.

    Both vary, crossed: every seed is tested on every document. The two distances from the value are
    legs of a right triangle and its long side is the new one ("square and add", Zou and Donner
    2008, Stat. Med. 27). Documents move all seeds together, so their leg is the mean over the
    seeds, which the mean's own cannot exceed: at worst too wide, but for what the bootstrap lacks.
    """
    below = np.mean([i.value - i.low for i in documents])
    above = np.mean([i.high - i.value for i in documents])
    return Interval(
        seeds.value,
        float(seeds.value - np.hypot(seeds.value - seeds.low, below)),
        float(seeds.value + np.hypot(seeds.high - seeds.value, above)),
    )


# -----------------------------------------------------------------------------
# claims


@dataclass(frozen=True)
class Claim:
    """One comparison, declared before its numbers are seen."""

    method: str
    """The second arm, "RoVE"; differences are second minus first."""
    quantity: str
    """ "perplexity", "CORE", "the NLL of RULER's NIAH" """
    where: str
    """ "at 2048", or nothing."""
    per_seed: tuple[Paired | float, ...]
    """Per seed what `paired_difference` or `paired_items` found, or a difference alone where there
    are no items (the validation loss)."""
    unit: str = "%"
    """"%" if the differences are in nats and said as a ratio of perplexities; else what stands
    behind the number ("nats", "points"), or nothing."""

    def __post_init__(self) -> None:
        if not self.per_seed:
            raise ValueError(f"{self.quantity} {self.where}: a claim needs at least one seed")

    @property
    def differences(self) -> list[float]:
        """(S,) second minus first."""
        return [s.difference.value if isinstance(s, Paired) else float(s) for s in self.per_seed]

    @property
    def p(self) -> float | None:
        """Over seeds from six seeds on, over documents for one seed; before any correction."""
        if len(self.per_seed) > 1:
            return seed_p(self.differences)
        return self.per_seed[0].p if isinstance(self.per_seed[0], Paired) else None


@dataclass(frozen=True)
class Verdict:
    """What can be said of a claim. `judge` makes them, for all claims of a family together."""

    claim: Claim
    difference: Interval
    """Over seeds; over documents if there is one seed."""
    everything: Interval | None
    """Over seeds and documents, 95 % and never corrected; None for one seed or if there are no
    documents."""
    p: float | None
    """Corrected for the family."""
    family: int
    """How many claims were made together."""
    told: bool
    """Is there a difference? About the method if there are several seeds."""

    @property
    def seeds(self) -> int:
        return len(self.claim.per_seed)

    def size(self) -> tuple[str, str]:
        """Of a difference that is told: ("41 %", "[35, 47]") or, from twice the perplexity on,
        ("3.1 times", "[2.5, 3.9]")."""
        if self.is_factor:
            ratio = self.difference.exp()
            return f"{ratio.value:.3g} times", f"[{ratio.low:.3g}, {ratio.high:.3g}]"
        value, *ends = self._shown(self.difference)
        digits = decimals(*ends, told=True)
        low, high = (f"{x:.{digits}f}" for x in sorted(map(abs, ends)))
        return f"{abs(value):.{digits}f}{self._unit}", f"[{low}, {high}]"

    def ends(self, interval: Interval) -> str:
        """ " [−0.4 %, +0.9 %]", or nothing if there is no such interval."""
        low, high = self._shown(interval)[1:]
        if not np.isfinite([low, high]).all():
            return ""
        digits = decimals(low, high)
        # few seeds and many claims: such an interval may end at a million per cent
        forms = (f"+.{digits}f" if abs(x) < 1e4 else "+.0e" for x in (low, high))
        low, high = (f"{x:{form}}{self._unit}" for x, form in zip((low, high), forms, strict=True))
        return f" [{low}, {high}]".replace("-", "−")

    @property
    def is_factor(self) -> bool:
        """A perplexity at least twice as high is said as a factor, not in per cent."""
        return self.claim.unit == "%" and self.difference.value >= log(2)

    @property
    def lower(self) -> bool:
        return self.difference.value < 0

    @property
    def reserve(self) -> str:
        """What stands behind a difference that other documents might not show."""
        if not self.told or not self.everything or self.everything.excludes_zero:
            return ""
        return f", on these documents; others may say otherwise{self.ends(self.everything)}"

    @property
    def _unit(self) -> str:
        return f" {self.claim.unit}" if self.claim.unit else ""

    def _shown(self, interval: Interval) -> list[float]:
        """[value, low, high] in the claim's unit."""
        with np.errstate(over="ignore"):
            x = np.array([interval.value, interval.low, interval.high])
            return (100 * np.expm1(x) if self.claim.unit == "%" else x).tolist()

    def words(self) -> str:
        """One sentence, without the full stop: "RoVE lowers perplexity at 2048 by 41 % [35, 47],
        3 seeds", or "no difference in perplexity can be told at 512 [-0.4 %, +0.9 %], 3 seeds".
        """
        claim = self.claim
        where = f" {claim.where}" if claim.where else ""
        end = "" if self.seeds == 1 else f", {self.seeds} seeds"
        if self.p is not None:
            end += f", p = {self.p:.2g}"
        start = f"{scope(1)}, " if self.seeds == 1 else ""
        if not self.told:
            between = self.ends(self.difference)
            if self.seeds > 1 and not np.isfinite(self.difference.low):
                end += ", which agree exactly and so have no spread to judge by"
            return f"{start}no difference in {claim.quantity} can be told{where}{between}{end}"
        amount, between = self.size()
        if self.seeds == 1:
            way = "lower" if self.lower else "as high" if self.is_factor else "higher"
            what = f"{claim.method}'s {claim.quantity}{where}"
            return f"{start}{what} is {amount} {way} {between}{end}"
        by = "to" if self.is_factor else "by"
        way = "lowers" if self.lower else "raises"
        return (
            f"{claim.method} {way} {claim.quantity}{where} {by} {amount} {between}{end}"
            f"{self.reserve}"
        )


def judge(claims: Sequence[Claim]) -> list[Verdict]:
    """A verdict on each of a family of claims. Give all that were declared, and only those.

    The chance that any of them is called a difference without being one is at most 5 %:
    - one seed: the `Paired` of its documents, p by Holm; it speaks of the checkpoints only;
    - 2 to 5 seeds: `seed_interval`, without p. Bonferroni: at level 1 - 0.05 / claims, so that all
      intervals hold together with 95 %; there is a difference if it excludes zero;
    - from 6 seeds on: the 95 % `seed_interval` with `seed_p` corrected by Holm; there is a
      difference if that is at most 0.05 and the exact sign-flip test over seeds, by itself, also
      says so. With six seeds all of them must agree.
    """
    verdicts = []
    # a claim without a p counts in the family as one that is never rejected by it
    corrected = holm([1.0 if claim.p is None else claim.p for claim in claims])
    for claim, p in zip(claims, corrected, strict=True):
        d, n, everything = claim.differences, len(claim.per_seed), None
        if n == 1 and isinstance(claim.per_seed[0], Paired):
            difference = claim.per_seed[0].difference
            told = claim.per_seed[0].told and p <= ALPHA
        elif n == 1:
            difference, told = Interval(d[0], -inf, inf), False
        elif n < FEWEST_SEEDS:
            difference = seed_interval(d, level=1 - ALPHA / len(claims))
            told = difference.excludes_zero
        else:
            difference = seed_interval(d, level=1 - ALPHA)
            told = p <= ALPHA and sign_flip_p(np.array(d)) <= ALPHA
        if n > 1 and all(isinstance(s, Paired) for s in claim.per_seed):
            everything = widen(seed_interval(d), [s.difference for s in claim.per_seed])
        corrected_p = None if claim.p is None else p
        verdicts.append(Verdict(claim, difference, everything, corrected_p, len(claims), told))
    return verdicts


def correction(verdicts: Sequence[Verdict]) -> str:
    """How the verdicts of a family were corrected for being many, in words."""
    n = len(verdicts)
    if n == 1:
        return "One claim, declared beforehand, so nothing to correct for."
    parts = [f"{n} claims were declared beforehand and are corrected together"]
    if any(1 < v.seeds < FEWEST_SEEDS for v in verdicts):
        parts.append(
            f"intervals over fewer than {FEWEST_SEEDS} seeds are widened so that all {n} hold at"
            " once with 95 % (Bonferroni)"
        )
    if any(v.p is not None for v in verdicts):
        parts.append("p values are corrected by Holm's method; the intervals beside them are not")
    return "; ".join(parts) + "."


def holm(p: Sequence[float]) -> list[float]:
    """p values of a family, corrected so that any false rejection at all has the chance that one
    had alone, however they depend on each other (Holm 1979, Scand. J. Stat. 6)."""
    order = np.argsort(p)
    steps = np.asarray(p, np.float64)[order] * np.arange(len(p), 0, -1)
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(np.maximum.accumulate(steps), 1)
    return corrected.tolist()


def decimals(low: float, high: float, *, told: bool = False) -> int:
    """How many an interval and its value are written with: they show the first digit of a quarter
    of it, and of one that excludes zero no end becomes 0; four at most."""
    sizes = [(high - low) / 4, *((low, high) if told else ())]
    smallest = min((abs(size) for size in sizes if size), default=1)
    return min(4, max(0, -floor(log10(smallest))))


def _checked(sums: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    sums, counts = np.asarray(sums, np.float64), np.asarray(counts, np.float64)
    if sums.ndim != 1 or sums.shape != counts.shape:
        raise ValueError(f"one sum and one count per document: {sums.shape} and {counts.shape}")
    if len(sums) < 2:
        raise ValueError(f"{len(sums)} documents: at least two are needed")
    if not (np.isfinite(sums).all() and (counts > 0).all()):
        raise ValueError("sums must be finite and counts positive")
    return sums, counts


def _check_same(what: str, first: Sequence[str], second: Sequence[str]) -> None:
    if list(first) != list(second):
        same = len(set(first) & set(second))
        raise ValueError(
            f"a paired comparison needs the same {what} in the same order: {same} are common to "
            f"the {len(first)} of the first and the {len(second)} of the second"
        )
