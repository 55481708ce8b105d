"""Statistics on synthetic documents whose truth is known."""

import itertools

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
