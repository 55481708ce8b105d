"""Statistics on synthetic documents, items and seeds whose truth is known.

The table of docs/statistics.md is what `pytest tests/test_stats.py -m slow -s` prints.
"""

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nanorove import stats


def draw(rng: np.random.Generator, D: int, mean: float = 3.0) -> tuple[np.ndarray, np.ndarray]:
    """D documents of unequal length whose true token-weighted mean NLL is `mean`."""
    counts = rng.integers(50, 400, D)
    return counts * (mean + rng.normal(0, 0.4, D)), counts


def test_ratio_weighs_tokens_and_not_documents():
    # transformers#34138: the mean of means would be 2.0 here, the token-weighted one is 1.2
    assert stats.ratio(np.array([90.0, 30.0]), np.array([90, 10])) == pytest.approx(1.2)


def test_standard_error_formula():
    sums, counts = np.array([10.0, 33.0, 44.0]), np.array([5, 10, 20])
    r = 87 / 35
    residuals = [10 - r * 5, 33 - r * 10, 44 - r * 20]
    expected = (3 / 2 * sum(e * e for e in residuals)) ** 0.5 / 35
    assert stats.ratio_se(sums, counts) == pytest.approx(expected, rel=1e-12)


def test_bootstrap_agrees_with_the_standard_error():
    sums, counts = draw(np.random.default_rng(1), 200)
    interval = stats.bootstrap_interval(sums, counts)
    half = 1.96 * stats.ratio_se(sums, counts)
    assert interval.high - interval.low == pytest.approx(2 * half, rel=0.06)
    assert interval.low < interval.value < interval.high


def test_bootstrap_against_a_plain_loop():
    sums, counts = draw(np.random.default_rng(2), 12)
    rng = np.random.default_rng(99)
    rs = []
    for _ in range(20_000):
        i = rng.integers(0, 12, 12)
        rs.append(sums[i].sum() / counts[i].sum())
    low, high = np.quantile(rs, [0.025, 0.975])
    interval = stats.bootstrap_interval(sums, counts)
    assert interval.low == pytest.approx(low, abs=0.02 * (high - low))
    assert interval.high == pytest.approx(high, abs=0.02 * (high - low))


def test_bootstrap_is_seeded():
    sums, counts = draw(np.random.default_rng(3), 30)
    assert stats.bootstrap_interval(sums, counts) == stats.bootstrap_interval(sums, counts)
    assert stats.bootstrap_interval(sums, counts) != stats.bootstrap_interval(sums, counts, seed=1)


def test_intervals_cover_the_truth():
    rng = np.random.default_rng(4)
    covered = 0
    for _ in range(300):
        interval = stats.bootstrap_interval(*draw(rng, 40), n_resamples=1000)
        covered += interval.low <= 3.0 <= interval.high
    # 95 % wanted; the percentile bootstrap of 40 documents is a little narrow, noise is 1.3 %
    assert 0.90 <= covered / 300 <= 0.98


def pair(
    rng: np.random.Generator, D: int, effect: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[str]]:
    """Two models on the same documents: shared difficulty, small differences of their own."""
    sums, counts = draw(rng, D)
    second = sums + counts * (effect + rng.normal(0, 0.05, D))
    return sums, second, counts, [str(i) for i in range(D)]


def test_paired_interval_is_narrower_than_two_unpaired_ones():
    first, second, counts, ids = pair(np.random.default_rng(5), 60, effect=0.03)
    paired = stats.paired_difference(
        first, second, counts, first_documents=ids, second_documents=ids
    ).difference
    a, b = stats.bootstrap_interval(first, counts), stats.bootstrap_interval(second, counts)
    assert paired.value == pytest.approx(b.value - a.value, abs=1e-12)
    unpaired_width = np.hypot(a.high - a.low, b.high - b.low)
    assert paired.high - paired.low < unpaired_width / 4
    assert paired.excludes_zero  # the effect of 0.03 is found ...
    assert a.low < b.value < a.high  # ... though either model lies in the other's interval


def test_sign_flip_p_value_is_exact_for_few_documents():
    first = np.zeros(6)
    second = np.array([1.0, 2.0, 3.0, 4.0, -0.5, 6.0])
    ids = list("abcdef")
    found = stats.paired_difference(
        first, second, np.ones(6), first_documents=ids, second_documents=ids
    )
    total = abs(second.sum())
    flips = [abs(np.dot(s, second)) for s in itertools.product([-1, 1], repeat=6)]
    assert found.p == pytest.approx(np.mean([f >= total - 1e-9 for f in flips]))
    assert found.documents == 6


def test_sign_flip_p_value_is_never_zero():
    first, second, counts, ids = pair(np.random.default_rng(6), 50, effect=1.0)
    found = stats.paired_difference(
        first, second, counts, first_documents=ids, second_documents=ids, n_resamples=999
    )
    assert 0 < found.p <= 2 / 1000


def test_false_positives_of_the_permutation_test():
    rng = np.random.default_rng(7)
    hits = 0
    for _ in range(300):
        first, second, counts, ids = pair(rng, 25, effect=0.0)
        p = stats.paired_difference(
            first, second, counts, first_documents=ids, second_documents=ids, n_resamples=400
        ).p
        hits += p <= 0.05
    assert hits / 300 <= 0.09  # 5 % wanted, noise 1.3 %


@pytest.mark.parametrize("other", [["a", "c"], ["b", "a"], ["a"]])
def test_other_documents_are_refused(other):
    with pytest.raises(ValueError, match="same documents"):
        stats.paired_difference(
            np.ones(2),
            np.ones(2),
            np.ones(2),
            first_documents=["a", "b"],
            second_documents=other,
        )


@pytest.mark.parametrize(
    "sums, counts", [([1.0], [1]), ([1.0, 2.0], [1, 0]), ([1.0, np.nan], [1, 1]), ([1.0, 2.0], [1])]
)
def test_what_cannot_be_computed_is_refused(sums, counts):
    with pytest.raises(ValueError):
        stats.bootstrap_interval(np.array(sums), np.array(counts))


def test_one_seed_is_never_said_to_be_about_the_method():
    for seeds in (1, 3):
        assert stats.scope(seeds).startswith("for these checkpoints")
        assert "significant" not in stats.scope(seeds)
    assert "one training seed" in stats.scope(1)
    with pytest.raises(ValueError):
        stats.scope(0)


# -----------------------------------------------------------------------------
# items


def items(
    first: dict[str, list[float]], second: dict[str, list[float]], **settings
) -> stats.Paired:
    ids = {task: [f"{task}{i}" for i in range(len(values))] for task, values in first.items()}
    return stats.paired_items(first, second, first_items=ids, second_items=ids, **settings)


def test_core_weights_by_hand():
    # accuracies 0.50 -> 0.75 at baseline 0.25, 0.2 -> 0.4 at 0, 1.0 -> 0.5 at 0.62: the centred
    # ones are (1/3, 0.2, 1) -> (2/3, 0.4, -12/38), and centring comes before the mean
    first = {"a": [1, 1, 0, 0], "b": [1, 0, 0, 0, 0], "c": [1, 1]}
    second = {"a": [1, 0, 1, 1], "b": [1, 0, 1, 0, 0], "c": [1, 0]}
    weights = stats.core_weights({"a": 0.25, "b": 0.0, "c": 0.62})
    found = items(first, second, weights=weights)
    expected = (2 / 3 + 0.4 - 12 / 38) / 3 - (1 / 3 + 0.2 + 1) / 3
    assert found.difference.value == pytest.approx(expected, rel=1e-12)
    assert found.documents == 11


def test_a_category_is_the_mean_of_task_means():
    found = items({"a": [1, 1], "b": [0] * 8}, {"a": [2, 4], "b": [1, 0] * 4})
    assert found.difference.value == pytest.approx((2.0 + 0.5) / 2)  # and not (4 + 4) / 10


@pytest.mark.parametrize("distinct", [False, True])
def test_items_are_drawn_within_their_task(distinct):
    """The spread against the textbook's: sum of w^2 s^2 / n, nothing of the tasks' own spread."""
    rng = np.random.default_rng(11)
    first = {t: rng.integers(0, 2, n).astype(float) for t, n in [("a", 60), ("b", 200), ("c", 90)]}
    second = {t: 1 - x if t == "c" else rng.integers(0, 2, len(x)) for t, x in first.items()}
    second["b"] = second["b"] + 3  # far from the others, as tasks are
    if distinct:
        second = {t: x + rng.normal(0, 0.5, len(x)) for t, x in second.items()}
    weights = {"a": 0.5, "b": 0.2, "c": 0.3}
    d = {t: second[t] - first[t] for t in first}
    se = math.sqrt(sum(weights[t] ** 2 * x.var() / len(x) for t, x in d.items()))
    found = items(first, second, weights=weights, n_resamples=20_000).difference
    assert found.value == pytest.approx(sum(weights[t] * x.mean() for t, x in d.items()))
    assert found.high - found.low == pytest.approx(2 * 1.96 * se, rel=0.04)
    assert (found.high + found.low) / 2 == pytest.approx(found.value, abs=0.15 * se)


@pytest.mark.parametrize("distinct", [False, True])
def test_items_sign_flip_p_against_all_signs(distinct):
    d = {"a": [1.0, 1.0, -1.0, 1.0], "b": [1.0, 1.0, 0.0, 1.0, 1.0]}
    if distinct:  # more than 16 values, so drawn one by one
        d = {"a": [0.3, 0.1, 0.5], "b": (np.arange(-7, 11) / 10 + 0.01).tolist()}
    weights = {"a": 0.7, "b": 0.3}
    found = items({t: [0.0] * len(x) for t, x in d.items()}, d, weights=weights, n_resamples=40_000)
    one = np.concatenate([weights[t] * np.array(x) / len(x) for t, x in d.items()])
    if distinct:
        signs = np.random.default_rng(1).choice([-1, 1], (200_000, len(one)))
    else:
        signs = np.array(list(itertools.product([-1, 1], repeat=len(one))))
    exact = np.mean(np.abs(signs @ one) >= abs(one.sum()) - 1e-12)
    assert found.p == pytest.approx(exact, abs=4 * math.sqrt(exact / 40_000))


def test_equal_answers_are_no_difference():
    found = items({"a": [1, 0, 1]}, {"a": [1, 0, 1]})
    assert found.difference == stats.Interval(0, 0, 0)
    assert found.p == 1
    assert not found.told


@pytest.mark.parametrize(
    "change, match",
    [
        ({"second_items": {"a": ["x", "z"], "b": ["x", "y"]}}, "same items of a"),
        ({"second_items": {"a": ["y", "x"], "b": ["x", "y"]}}, "same items of a"),
        ({"second": {"b": [1, 0], "a": [1, 0]}}, "same tasks"),
        ({"second": {"a": [1, 0, 1], "b": [1, 0]}}, "values for 2 items"),
        ({"second": {"a": [1, np.nan], "b": [1, 0]}}, "finite"),
        ({"weights": {"a": 1.0}}, "weights"),
    ],
)
def test_items_that_do_not_match_are_refused(change, match):
    values = {"a": [1, 0], "b": [0, 0]}
    ids = {"a": ["x", "y"], "b": ["x", "y"]}
    given = dict(first=values, second=values, first_items=ids, second_items=ids) | change
    with pytest.raises(ValueError, match=match):
        stats.paired_items(**given)


# -----------------------------------------------------------------------------
# seeds


# Student (1908), The probable error of a mean, table of the sleep gained; R prints for it
# t = 4.0621, df = 9, p-value = 0.002833, 95 % interval 0.7001142 2.4598858
SLEEP = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]


def test_students_own_example():
    found = stats.seed_interval(SLEEP)
    assert found.value == pytest.approx(1.58)
    assert (found.low, found.high) == pytest.approx((0.7001142, 2.4598858), abs=1e-6)
    assert stats.seed_p(SLEEP) == pytest.approx(0.002833, abs=5e-7)


def test_three_seeds_by_hand():
    # mean 2, s = 1, t_2 at 97.5 % is 4.302653
    found = stats.seed_interval([1.0, 2.0, 3.0])
    assert found.high - 2 == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)


def test_no_p_below_six_seeds():
    assert stats.seed_p(SLEEP[:5]) is None
    assert stats.seed_p(SLEEP[:6]) is not None


def test_seeds_without_spread_prove_nothing():
    assert stats.seed_interval([0.01, 0.01]) == stats.Interval(0.01, -math.inf, math.inf)
    assert stats.seed_p([0.01] * 6) == 1
    rounded = [0.3 - 0.2, 0.2 - 0.1, 0.4 - 0.3]
    assert len(set(rounded)) == 3
    assert not stats.seed_interval(rounded).excludes_zero
    assert not stats.judge([claim(*rounded * 2)])[0].told


@pytest.mark.parametrize("differences", [[], [0.3], [0.3, np.nan]])
def test_too_few_seeds_are_refused(differences):
    with pytest.raises(ValueError, match="at least two seeds"):
        stats.seed_interval(differences)


def test_widened_by_hand():
    # legs 3 and mean(4, 4) below, 5 and mean(10, 14) above
    documents = [stats.Interval(1, -3, 11), stats.Interval(-1, -5, 13)]
    found = stats.widen(stats.Interval(0, -3, 5), documents)
    assert (found.low, found.value, found.high) == pytest.approx((-5, 0, 13))


def test_holm_by_hand():
    # 0.005 * 4, 0.01 * 3, 0.03 * 2, and 0.04 may not come out below 0.06
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert stats.holm([0.7, 0.6]) == [1, 1]
    assert stats.holm([]) == []


# -----------------------------------------------------------------------------
# claims


def paired(value: float, half: float, p: float = 0.001) -> stats.Paired:
    return stats.Paired(stats.Interval(value, value - half, value + half), p, 100)


def claim(*per_seed: stats.Paired | float, unit: str = "%", where: str = "at 2048") -> stats.Claim:
    return stats.Claim("RoVE", "perplexity", where, per_seed, unit)


def say(*per_seed: stats.Paired | float, **settings: str) -> str:
    return stats.judge([claim(*per_seed, **settings)])[0].words()


def test_words():
    nats = np.log([0.59, 0.57, 0.61])
    # exp(mean +- 4.302653 s / sqrt(3)) of the three: 0.5897 in [0.542, 0.642]
    assert say(*nats) == "RoVE lowers perplexity at 2048 by 41 % [36, 46], 3 seeds"
    assert say(*-nats) == "RoVE raises perplexity at 2048 by 70 % [56, 84], 3 seeds"
    assert say(0.004, -0.003, 0.002, where="") == (
        "no difference in perplexity can be told [−0.8 %, +1.0 %], 3 seeds"
    )
    assert say(1.0, 2.0, 3.5, 2.0, 3.0, 2.5, unit="nats").startswith(
        "RoVE raises perplexity at 2048 by 2.3 nats [1.4, 3.3], 6 seeds, p = 0.0013"
    )
    assert say(0.5, 0.5) == (
        "no difference in perplexity can be told at 2048, 2 seeds, which agree exactly and so have"
        " no spread to judge by"
    )


def test_words_of_a_perplexity_twice_as_high():
    # 3 exp(-+ 4.302653 s / sqrt(3)) of the three: 3.00 in [2.76, 3.26]
    nats = np.log([2.9, 3.0, 3.1])
    assert say(*nats) == "RoVE raises perplexity at 2048 to 3 times [2.76, 3.26], 3 seeds"
    lead = "for these checkpoints (one training seed), "
    assert say(paired(math.log(3), 0.1)) == (
        f"{lead}RoVE's perplexity at 2048 is 3 times as high [2.71, 3.32], p = 0.001"
    )
    assert "to 3" not in say(*(2.9, 3.0, 3.1), unit="nats")


@pytest.mark.parametrize(
    "low, high, told, digits",
    [(35, 47, True, 0), (-4, 3, False, 0), (-0.9, 0.7, False, 1), (-0.2, -0.1, True, 2),
     (0.003, 0.8, True, 3), (0.003, 0.8, False, 1), (1e-9, 2e-9, True, 4), (0, 0, True, 0)],
)  # fmt: skip
def test_decimals(low, high, told, digits):
    assert stats.decimals(low, high, told=told) == digits


def test_words_never_round_an_end_to_zero():
    assert say(*(0.4 + 0.001 * np.array([-1, 0, 1]) * 160), unit="").endswith(
        "0.400 [0.003, 0.797], 3 seeds"
    )


def test_words_of_an_interval_without_use():
    assert (
        say(1.0, 2.0)
        == "no difference in perplexity can be told at 2048 [−99 %, +3e+05 %], 2 seeds"
    )


def test_a_claim_without_seeds_is_refused():
    with pytest.raises(ValueError, match="at least one seed"):
        claim()


def test_one_seed_speaks_of_its_checkpoints():
    lead = "for these checkpoints (one training seed), "
    assert say(paired(math.log(0.59), 0.05)) == (
        f"{lead}RoVE's perplexity at 2048 is 41 % lower [38, 44], p = 0.001"
    )
    assert say(paired(0.001, 0.05, p=0.4)) == (
        f"{lead}no difference in perplexity can be told at 2048 [−5 %, +5 %], p = 0.4"
    )
    assert say(-3.0) == f"{lead}no difference in perplexity can be told at 2048"


def test_other_documents_are_mentioned_where_they_matter():
    seeds = (-0.390, -0.391, -0.392)
    words = say(*(paired(x, 0.6) for x in seeds))
    # legs of the wide interval: t_2 0.001 / sqrt(3) over seeds, 0.6 over documents
    assert words.endswith(", on these documents; others may say otherwise [−63 %, +23 %]")
    assert "others may say otherwise" not in say(*(paired(x, 0.1) for x in seeds))


def test_a_family_of_few_seeds_is_bonferroni():
    family = [claim(1.0, 2.0, 3.0), claim(1.0, 1.1, 1.2)] + [claim(0.0, 1.0, -1.0)] * 8
    verdicts = stats.judge(family)
    # t_2 at 1 - 0.05 / 20 is 14.08905
    assert verdicts[1].difference.high == pytest.approx(1.1 + 14.08905 * 0.1 / math.sqrt(3))
    assert [v.told for v in verdicts] == [False, True] + [False] * 8
    assert not stats.judge(family[:1])[0].told
    assert all(v.p is None for v in verdicts)
    assert "Bonferroni" in stats.correction(verdicts)
    assert "Holm" not in stats.correction(verdicts)


def test_a_family_of_six_seeds_is_holm():
    family = [claim(*SLEEP)] + [claim(*(np.arange(10) - 4.0))] * 3
    verdicts = stats.judge(family)
    assert verdicts[0].p == pytest.approx(4 * 0.002833, abs=3e-6)
    assert [v.told for v in verdicts] == [True, False, False, False]
    # twenty claims: 20 * 0.0028 > 0.05, though the interval by itself excludes zero
    verdict = stats.judge(family[:1] + family[1:2] * 19)[0]
    assert verdict.difference.excludes_zero
    assert verdict.words().startswith("no difference in perplexity can be told")
    assert "Holm" in stats.correction([verdict] * 20)
    assert "nothing to correct" in stats.correction(verdicts[:1])


def test_six_seeds_must_agree():
    d = [10.0, 10.0, 10.0, 10.0, 10.0, -0.5]
    assert stats.seed_p(d) < 0.05
    assert not stats.judge([claim(*d)])[0].told  # 4 of 64 signs are as extreme


def test_documents_of_a_family_are_corrected():
    family = [claim(paired(1.0, 0.5, p=0.02)), claim(paired(1.0, 0.5, p=0.03))]
    assert [v.p for v in stats.judge(family)] == [0.04, 0.04]
    assert not stats.judge(family + [claim(paired(0.1, 0.5, p=0.4))])[0].told


def test_the_word_for_it_is_never_used():
    for seeds in (1, 3, 8):
        assert "significant" not in say(*(paired(1 + i / 100, 0.01) for i in range(seeds)))


# -----------------------------------------------------------------------------
# simulations: is 95 % 95 %, and does nothing come of nothing?


Say = Callable[[np.random.Generator, int], tuple[float, float, float, bool]]
"""One experiment, with so many bootstrap draws: truth, low, high, was a difference told?"""

CORE_ITEMS = dict(  # of the tasks: number of items, accuracy of a GPT-2, baseline (nanochat#550)
    hellaswag=(10042, 0.31, 0.25),
    jeopardy=(2117, 0.05, 0.0),
    arc_easy=(2376, 0.41, 0.25),
    copa=(100, 0.62, 0.5),
    piqa=(1838, 0.62, 0.5),
    lambada=(5153, 0.32, 0.0),
    winograd=(273, 0.60, 0.5),
    dyck=(1000, 0.15, 0.0),
    lsat=(230, 0.24, 0.2),
    operators=(210, 0.14, 0.0),
    copy_logic=(32, 0.06, 0.0),
    boolq=(3270, 0.55, 0.62),
)


def shape(rng: np.random.Generator, kind: str, size: tuple[int, ...] | int) -> np.ndarray:
    """Noise of mean 0: normal, heavy tails (Student, 2.5 degrees) or skewed (log-normal)."""
    if kind == "normal":
        return rng.normal(size=size)
    if kind == "heavy":
        return rng.standard_t(2.5, size)
    return rng.lognormal(0, 1, size) - math.exp(0.5)


def documents(D: int, kind: str = "normal", counts: str = "similar", group: int = 1) -> Say:
    """No difference between two checkpoints; `group` documents each have a part in common."""

    def once(rng: np.random.Generator, draws: int) -> tuple[float, float, float, bool]:
        n = rng.integers(50, 400, D) if counts == "similar" else 1 + rng.lognormal(5, 1.5, D) // 1
        noise = shape(rng, kind, D)
        if group > 1:
            noise += np.repeat(shape(rng, kind, D // group), group)
        ids = [str(i) for i in range(D)]
        base = n * rng.normal(3, 0.4, D)
        found = stats.paired_difference(
            base,
            base + n * 0.05 * noise,
            n,
            first_documents=ids,
            second_documents=ids,
            n_resamples=draws,
            seed=int(rng.integers(2**31)),
        )
        return 0.0, found.difference.low, found.difference.high, found.told

    return once


def core(effect: float = 0.0, largest: int = 100_000) -> Say:
    """Two models that agree on most items; the second gains `effect` in CORE on average."""
    sizes = {task: min(n, largest) for task, (n, _, _) in CORE_ITEMS.items()}
    weights = stats.core_weights({task: b for task, (_, _, b) in CORE_ITEMS.items()})
    ids = {task: range(n) for task, n in sizes.items()}
    gain = effect / sum(weights.values())

    def once(rng: np.random.Generator, draws: int) -> tuple[float, float, float, bool]:
        first, second = {}, {}
        for task, (_, accuracy, _) in CORE_ITEMS.items():
            right = rng.random(sizes[task]) < accuracy
            # of the right ones some are lost, of the wrong ones as many gained, and the effect
            change = 0.2 * min(accuracy, 1 - accuracy)
            lost = rng.random(sizes[task]) < change / accuracy
            gained = rng.random(sizes[task]) < (change + gain) / (1 - accuracy)
            first[task] = right.astype(float)
            second[task] = np.where(right, ~lost, gained).astype(float)
        found = stats.paired_items(
            first,
            second,
            first_items=ids,
            second_items=ids,
            weights=weights,
            n_resamples=draws,
            seed=int(rng.integers(2**31)),
        )
        return effect, found.difference.low, found.difference.high, found.told

    return once


def ruler(n: int, tasks: int, kind: str = "normal") -> Say:
    """No difference in NLL between two checkpoints, n samples of each task."""
    ids = {f"niah{t}": range(n) for t in range(tasks)}

    def once(rng: np.random.Generator, draws: int) -> tuple[float, float, float, bool]:
        first = {task: rng.gamma(4, 1, n) for task in ids}
        second = {task: x + 0.5 * shape(rng, kind, n) for task, x in first.items()}
        found = stats.paired_items(
            first,
            second,
            first_items=ids,
            second_items=ids,
            n_resamples=draws,
            seed=int(rng.integers(2**31)),
        )
        return 0.0, found.difference.low, found.difference.high, found.told

    return once


def seeds(S: int, kind: str = "normal", common: float = 0.0, effect: float = 0.0) -> Say:
    """Differences of S pairs of trainings, of spread 1; `common` is the spread they share."""

    def once(rng: np.random.Generator, draws: int) -> tuple[float, float, float, bool]:
        d = effect + shape(rng, kind, S) + common * rng.normal()
        verdict = stats.judge([claim(*d)])[0]
        return effect, verdict.difference.low, verdict.difference.high, verdict.told

    return once


def crossed(S: int, D: int, seed: float, document: float, both: float, wide: bool) -> Say:
    """S seeds on the same D documents, and the truth for other seeds and other documents: spreads
    of the seeds, of the documents (shared by all seeds) and of what is neither's alone."""

    def once(rng: np.random.Generator, draws: int) -> tuple[float, float, float, bool]:
        d = seed * rng.normal(size=(S, 1)) + document * rng.normal(size=D)
        d = d + both * rng.normal(size=(S, D))
        n = rng.integers(50, 400, D)
        intervals = [stats.bootstrap_interval(n * x, n, n_resamples=draws) for x in d]
        pairs = [stats.Paired(interval, 1.0, D) for interval in intervals]
        verdict = stats.judge([claim(*pairs)])[0]
        interval = verdict.everything if wide else verdict.difference
        return 0.0, interval.low, interval.high, interval.excludes_zero

    return once


def families(S: int, m: int, kind: str = "normal", shared: float = 0.0, true: int = 0) -> Say:
    """m claims, S seeds, `true` of them with a large effect; told if any of the others is, and
    covered if all intervals cover. `shared` is the correlation between claims."""

    def once(rng: np.random.Generator, draws: int) -> tuple[float, float, float, bool]:
        noise = math.sqrt(1 - shared) * shape(rng, kind, (m, S))
        noise += math.sqrt(shared) * shape(rng, kind, S)
        effects = np.where(np.arange(m) < true, 30.0, 0.0)
        verdicts = stats.judge([claim(*row) for row in noise + effects[:, None]])
        low = max(v.difference.low - e for v, e in zip(verdicts, effects, strict=True))
        high = min(v.difference.high - e for v, e in zip(verdicts, effects, strict=True))
        return 0.0, low, high, any(v.told for v in verdicts[true:])

    return once


def document_families(D: int, m: int) -> Say:
    """m claims about one pair of checkpoints each."""

    def once(rng: np.random.Generator, draws: int) -> tuple[float, float, float, bool]:
        ids = [str(i) for i in range(D)]
        n = rng.integers(50, 400, D)
        pairs = [
            stats.paired_difference(
                0 * n,
                n * rng.normal(size=D),
                n,
                first_documents=ids,
                second_documents=ids,
                n_resamples=draws,
            )
            for _ in range(m)
        ]
        verdicts = stats.judge([claim(p) for p in pairs])
        low = max(v.difference.low for v in verdicts)
        return 0.0, low, min(v.difference.high for v in verdicts), any(v.told for v in verdicts)

    return once


def simulate(once: Say, n: int, seed: int = 0, draws: int = 300) -> tuple[float, float]:
    """Share of n experiments whose interval covers the truth, and that tell a difference."""
    rng = np.random.default_rng(seed)
    found = [once(rng, draws) for _ in range(n)]
    covers = [low <= truth <= high for truth, low, high, _ in found]
    return float(np.mean(covers)), float(np.mean([told for *_, told in found]))


def noise(rate: float, n: int) -> float:
    """3.3 standard errors of a share: one test in a thousand would fail by chance."""
    return 3.3 * math.sqrt(rate * (1 - rate) / n)


@pytest.mark.parametrize(
    "once",
    [
        documents(40),
        documents(40, "heavy", counts="unequal"),
        ruler(30, 4),
        core(largest=200),
        seeds(2),
        seeds(3),
        seeds(6),
        seeds(6, "heavy"),
    ],
)
def test_nothing_comes_of_nothing(once):
    """1,000 experiments in which there is no difference."""
    _, told = simulate(once, 1000)
    assert told <= 0.05 + noise(0.05, 1000)


@pytest.mark.parametrize(
    "once, least, most",
    [
        (documents(60), 0.93, 0.95),  # the bootstrap is a little narrow
        (ruler(60, 4), 0.93, 0.95),
        (core(effect=0.02, largest=500), 0.93, 0.95),
        (seeds(2), 0.95, 0.95),
        (seeds(3, effect=0.3), 0.95, 0.95),
        (seeds(6), 0.95, 0.95),
        (crossed(3, 30, 0.3, 1, 1, wide=True), 0.95, 1),
    ],
)
def test_intervals_hold_what_they_promise(once, least, most):
    covers, _ = simulate(once, 400, seed=1)
    assert least - noise(0.95, 400) <= covers <= most + noise(0.95, 400)


@pytest.mark.parametrize(
    "once",
    [
        families(3, 5),
        families(6, 5, shared=0.9),
        families(6, 5, true=2),
        document_families(16, 3),
    ],
)
def test_nothing_comes_of_nothing_in_a_family(once):
    _, any_told = simulate(once, 1000, seed=2)
    assert any_told <= 0.05 + noise(0.05, 1000)


def test_simultaneous_intervals_hold_together():
    covers, _ = simulate(families(3, 5), 1000, seed=3)
    assert 0.95 - noise(0.95, 1000) <= covers <= 0.97 + noise(0.95, 1000)


def power(S: int, m: int, effect: float, n: int) -> float:
    """Share of n experiments in which an effect of so many spreads is found among m claims, the
    others of which show nothing."""
    rows = np.random.default_rng(5).normal(effect, 1, (n, S))
    others = [claim(*(-1.0) ** np.arange(S))] * (m - 1)
    return float(np.mean([stats.judge([claim(*row), *others])[0].told for row in rows]))


def test_effects_are_found():
    assert simulate(core(effect=0.04, largest=500), 100)[1] > 0.9
    # by the non-central t distribution 0.97, 0.97 and 0.93, and with six seeds all must agree
    assert power(3, 1, 6, 300) > 0.9
    assert power(6, 1, 2, 300) > 0.85
    assert power(6, 10, 3, 300) > 0.8


TABLE: list[tuple[str, str, Say, int]] = [
    ("documents", "8", documents(8), 1000),
    ("documents", "16", documents(16), 1000),
    ("documents", "40", documents(40), 1000),
    ("documents", "100", documents(100), 1000),
    (
        "documents",
        "40, token counts unequal (1 to 80 times the median)",
        documents(40, counts="unequal"),
        1000,
    ),
    ("documents", "16, heavy tails", documents(16, "heavy"), 1000),
    ("documents", "100, heavy tails", documents(100, "heavy"), 1000),
    ("documents", "16, skewed", documents(16, "skewed"), 1000),
    ("documents", "100, skewed", documents(100, "skewed"), 1000),
    ("documents", "100, skewed, token counts unequal", documents(100, "skewed", "unequal"), 1000),
    ("documents", "100 in 20 groups that have half of it in common", documents(100, group=5), 1000),
    ("items", "8 tasks of 20, NLL", ruler(20, 8), 1000),
    ("items", "8 tasks of 100, NLL", ruler(100, 8), 1000),
    ("items", "8 tasks of 20, NLL, skewed", ruler(20, 8, "skewed"), 1000),
    ("items", "8 tasks of 100, NLL, heavy tails", ruler(100, 8, "heavy"), 1000),
    ("items", "CORE, 12 tasks of at most 100", core(largest=100), 1000),
    ("items", "CORE, 12 whole tasks", core(), 1000),
    ("items", "CORE, 12 whole tasks, effect 0.02", core(effect=0.02), 1000),
    ("seeds", "2", seeds(2), 4000),
    ("seeds", "3", seeds(3), 4000),
    ("seeds", "6", seeds(6), 4000),
    ("seeds", "10", seeds(10), 4000),
    ("seeds", "3, heavy tails", seeds(3, "heavy"), 4000),
    ("seeds", "6, heavy tails", seeds(6, "heavy"), 4000),
    ("seeds", "3, skewed", seeds(3, "skewed"), 4000),
    ("seeds", "6, skewed", seeds(6, "skewed"), 4000),
    ("seeds", "6, with as much again in common", seeds(6, common=1.0), 4000),
    (
        "seeds, asked about other documents",
        "3 on 30",
        crossed(3, 30, 0.1, 1, 0.3, wide=False),
        1000,
    ),
    (
        "seeds, asked about other documents",
        "6 on 30",
        crossed(6, 30, 0.1, 1, 0.3, wide=False),
        1000,
    ),
    (
        "seeds, asked about other documents",
        "6 on 100",
        crossed(6, 100, 0.1, 1, 0.3, wide=False),
        1000,
    ),
    ("seeds, widened", "3 on 30", crossed(3, 30, 0.1, 1, 0.3, wide=True), 1000),
    ("seeds, widened", "6 on 30", crossed(6, 30, 0.1, 1, 0.3, wide=True), 1000),
    ("seeds, widened", "6 on 100", crossed(6, 100, 0.1, 1, 0.3, wide=True), 1000),
    (
        "seeds, widened",
        "2 on 30, seeds and documents alike",
        crossed(2, 30, 0.2, 1, 1, wide=True),
        1000,
    ),
    ("seeds, widened", "3 on 30, seeds alone differ", crossed(3, 30, 1, 0, 0.3, wide=True), 1000),
    ("10 claims", "one seed, 16 documents", document_families(16, 10), 500),
    ("10 claims", "3 seeds", families(3, 10), 1000),
    ("10 claims", "3 seeds, claims correlated 0.9", families(3, 10, shared=0.9), 1000),
    ("10 claims", "3 seeds, skewed", families(3, 10, "skewed"), 1000),
    ("10 claims", "6 seeds", families(6, 10), 1000),
    ("10 claims", "6 seeds, claims correlated 0.9", families(6, 10, shared=0.9), 1000),
    ("10 claims", "6 seeds, 5 of the claims true", families(6, 10, true=5), 1000),
    ("10 claims", "6 seeds, heavy tails", families(6, 10, "heavy"), 1000),
    ("10 claims", "6 seeds, skewed", families(6, 10, "skewed"), 1000),
]


@pytest.mark.slow
def test_the_tables_of_the_documentation():
    """Prints docs/statistics.md's two tables, and fails where they are not what is printed."""
    lines = []
    for what, setting, once, n in TABLE:
        covers, told = simulate(once, n, seed=4, draws=500)
        lines.append(f"| {what} | {setting} | {covers:.1%} | {told:.1%} |")
        print(lines[-1], flush=True)
    for S, m in itertools.product((2, 3, 5, 6, 10), (1, 10)):
        found = " | ".join(f"{power(S, m, effect, 500):.0%}" for effect in (1, 2, 3, 5, 10))
        lines.append(f"| {S} | {m} | {found} |")
        print(lines[-1], flush=True)
    text = (Path(__file__).parent.parent / "docs" / "statistics.md").read_text(encoding="utf-8")
    assert [line for line in lines if line not in text] == []
