"""Statistics against SciPy, hand values and identities; no interval where there are too few problems."""

from __future__ import annotations

import math

import numpy as np
import pytest

from maieutic.evaluation import agreement, distributions, statistics

scipy_stats = pytest.importorskip("scipy.stats", reason="SciPy is the oracle of these tests")


def test_one_sample_a_problem_is_the_plain_error() -> None:
    x = np.random.default_rng(0).normal(size=40)
    assert statistics.clustered_se(list(x), range(40)) == pytest.approx(scipy_stats.sem(x), rel=1e-12)


def test_copies_of_a_problem_add_no_certainty() -> None:
    x = list(np.random.default_rng(1).normal(size=30))
    copied = [v for v in x for _ in range(8)]
    clustered = statistics.clustered_se(copied, [i for i in range(30) for _ in range(8)])
    naive = statistics.clustered_se(copied, range(240))
    assert clustered == pytest.approx(statistics.clustered_se(x, range(30)), rel=1e-12)
    assert clustered / naive == pytest.approx(math.sqrt(8 * (239 / 240) / (29 / 30)), rel=1e-9)


def test_opposite_samples_inside_problems_shrink_the_error() -> None:
    x = [1.0, -1.0] * 20
    assert statistics.clustered_se(x, [i // 2 for i in range(40)]) == 0.0
    assert statistics.clustered_se(x, range(40)) == pytest.approx(scipy_stats.sem(x))


def test_clustered_error_by_hand() -> None:
    # Clusters {1, 3}, {5}, mean 3: residual sums −2 and 2, SE = sqrt(2/1 · 8)/3.
    assert statistics.clustered_se([1, 3, 5], ["a", "a", "b"]) == pytest.approx(4 / 3)


def test_interval_covers_at_its_level() -> None:
    rng = np.random.default_rng(2)
    covered = 0
    for trial in range(200):
        means = rng.normal(size=40)
        values = np.repeat(means, 3) + rng.normal(scale=0.5, size=120)
        low, high = statistics.bootstrap_interval(
            list(values), np.repeat(range(40), 3).tolist(), resamples=400, seed=trial
        )
        covered += low <= 0 <= high
    assert 0.89 <= covered / 200 <= 0.99


def test_interval_agrees_with_scipy_without_clusters() -> None:
    x = np.random.default_rng(3).exponential(size=60)
    ours = statistics.bootstrap_interval(list(x), range(60), resamples=9_999)
    theirs = scipy_stats.bootstrap(
        (x,), np.mean, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    assert ours == pytest.approx((theirs.low, theirs.high), abs=0.02)


@pytest.mark.parametrize("problems", [1, 2, 9])
def test_too_few_problems_are_said_and_get_no_interval(problems: int) -> None:
    result = statistics.estimate([0.5] * problems * 2, [i // 2 for i in range(problems * 2)])
    assert (result.value, result.se, result.low, result.high) == (0.5, None, None, None)
    assert f"{problems} problem" in result.note and "too few" in result.note


def test_enough_problems_get_all_numbers() -> None:
    result = statistics.estimate([float(i % 2) for i in range(20)], range(20))
    assert result.value == 0.5 and result.note == ""
    assert result.se is not None and result.low is not None and result.high is not None
    assert result.low < 0.5 < result.high


def test_nothing_measured_is_not_zero() -> None:
    result = statistics.estimate([], [])
    assert math.isnan(result.value) and result.note == "nothing was measured"


def test_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        statistics.estimate([1.0, math.nan], [0, 1])


def test_equal_arms_differ_by_exactly_zero() -> None:
    arm = {i: v for i, v in enumerate(np.random.default_rng(4).normal(size=25))}
    got = statistics.paired_difference(arm, dict(arm))
    assert (got.value, got.se, got.low, got.high, got.p) == (0.0, 0.0, 0.0, 0.0, 1.0)


def test_pairing_sees_what_the_spread_of_problems_hides() -> None:
    rng = np.random.default_rng(5)
    a = {i: float(v) for i, v in enumerate(rng.normal(scale=10, size=30))}
    b = {i: v + 0.5 + 0.1 * float(rng.normal()) for i, v in a.items()}
    got = statistics.paired_difference(a, b)
    expected = scipy_stats.ttest_rel(list(b.values()), list(a.values()))
    assert got.value == pytest.approx(0.5, abs=0.1) and got.p is not None and got.p < 0.001
    assert got.value / (got.se or 1) == pytest.approx(expected.statistic, rel=1e-9)


def test_only_shared_problems_are_paired() -> None:
    got = statistics.paired_difference({i: 0.0 for i in range(12)}, {i: 1.0 for i in range(2, 20)})
    assert (got.value, got.pairs) == (1.0, 10)
    assert math.isnan(statistics.paired_difference({1: 0.0}, {2: 0.0}).value)


def test_sign_flips_against_scipy() -> None:
    d = [0.3, -0.1, 0.4, 0.2, 0.5, -0.2, 0.1]
    exact = scipy_stats.permutation_test(
        (d, [0.0] * 7), lambda x, y: np.mean(x - y), permutation_type="samples", n_resamples=np.inf
    )
    assert statistics.sign_flip_p(d) == pytest.approx(exact.pvalue)


def test_holm_by_hand() -> None:
    assert statistics.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert statistics.holm([0.9, 0.8]) == [1.0, 1.0]


@pytest.mark.parametrize("k,n", [(0, 10), (3, 10), (10, 10), (40, 60)])
def test_wilson_against_scipy(k: int, n: int) -> None:
    ours, theirs = statistics.wilson(k, n), scipy_stats.binomtest(k, n).proportion_ci(method="wilson")
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_win_rate_micro_and_macro() -> None:
    got = statistics.win_rate([1, 1, 1, 2], [0, 0, 1, 3], ["a", "a", "a", "b"])
    assert got.micro == 0.5 and got.macro == pytest.approx((2 / 3 + 0) / 2)
    assert (got.n, got.ties) == (4, 1)


# ---- distributions -------------------------------------------------------------------------------------------------------


def test_js_distance_against_scipy_and_identities() -> None:
    from scipy.spatial.distance import jensenshannon

    rng = np.random.default_rng(6)
    p, q, r = (list(rng.dirichlet(np.ones(13))) for _ in range(3))
    assert distributions.js_distance(p, q) == pytest.approx(jensenshannon(p, q, base=2), rel=1e-9)
    assert distributions.js_distance(p, q) == distributions.js_distance(q, p)
    assert distributions.js_divergence(p, p) == 0.0
    assert distributions.js_divergence([1, 0], [0, 1]) == 1.0
    assert distributions.js_distance(p, r) <= distributions.js_distance(p, q) + distributions.js_distance(
        q, r
    )


def test_js_divergence_is_entropy_of_the_mean_minus_mean_entropy() -> None:
    p, q = [0.5, 0.5, 0.0], [0.25, 0.25, 0.5]
    entropy = lambda d: scipy_stats.entropy(d, base=2)  # noqa: E731
    m = distributions.centroid([p, q])
    assert m == [0.375, 0.375, 0.25]
    assert distributions.js_divergence(p, q) == pytest.approx(entropy(m) - (entropy(p) + entropy(q)) / 2)


def test_what_is_no_distribution_is_refused() -> None:
    with pytest.raises(ValueError, match="not a distribution"):
        distributions.js_divergence([0.5, 0.6], [0.5, 0.5])
    with pytest.raises(ValueError, match="counts"):
        distributions.normalised([0, 0])


# ---- agreement -----------------------------------------------------------------------------------------------------------


def test_kappa_by_hand_and_against_sklearn() -> None:
    # 20 yes/yes, 5 yes/no, 10 no/yes, 15 no/no: p_o 0.7, p_e 0.5, κ 0.4.
    a = ["y"] * 25 + ["n"] * 25
    b = ["y"] * 20 + ["n"] * 5 + ["y"] * 10 + ["n"] * 15
    assert agreement.cohen_kappa(a, b) == pytest.approx(0.4)
    metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is the oracle")
    assert agreement.cohen_kappa(a, b) == pytest.approx(metrics.cohen_kappa_score(a, b))
    assert math.isnan(agreement.cohen_kappa(["y", "y"], ["y", "y"]))


def test_alpha_of_the_textbook_data() -> None:
    # Krippendorff (2011), "Computing Krippendorff's alpha-reliability", example with missing data.
    rows = ["12332141 2...", "12332241 25.3", ".3332342 251.", "12332441 251."]
    ratings = [[None if c == "." else float(c) for c in row.replace(" ", "")] for row in rows]
    assert agreement.krippendorff_alpha(ratings, "nominal") == pytest.approx(0.743, abs=5e-4)
    assert agreement.krippendorff_alpha(ratings, "ordinal") == pytest.approx(0.815, abs=5e-4)
    assert agreement.krippendorff_alpha(ratings, "interval") == pytest.approx(0.849, abs=5e-4)


def test_alpha_identities() -> None:
    assert agreement.krippendorff_alpha([["a", "b", "a"], ["a", "b", "a"]]) == 1.0
    assert math.isnan(agreement.krippendorff_alpha([["a", "a"], ["a", "a"]]))
    assert math.isnan(agreement.krippendorff_alpha([["a", None], [None, "b"]]))
