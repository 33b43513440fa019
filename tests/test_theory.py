"""The runtime analysis: by the paper's numbers, by enumeration, by simulation, and by mutants that must fail.

Simulations are seeded.  They pass within 4 standard errors (level 6e-5 each), and for each there is a wrong formula
that the same simulation refutes.
"""

from __future__ import annotations

import math
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_lib import theory
from specdec_lib.acceptance import (
    acceptance_from_distributions,
    acceptance_from_trace,
    block_efficiency_by_position,
    pooled_alpha,
    repeat_alpha,
)
from specdec_lib.errors import SpecdecError
from specdec_lib.theory import (
    batch_improvement_factor,
    block_efficiency,
    break_even_tokens,
    drafting_helps,
    expected_rounds,
    expected_time,
    extended_improvement_factor,
    extended_optimal_gamma,
    improvement_factor,
    improvement_lower_bound,
    operations_factor,
    optimal_gamma,
    oracle_block_efficiency,
    oracle_improvement_factor,
    predict,
    roofline_verification_cost,
)

rates = st.floats(0, 1)
costs = st.floats(0, 2)
lengths = st.integers(1, 30)
quick = settings(max_examples=100, deadline=None)


# -- exact values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [1, 5, 100])
def test_limits_of_alpha_are_exact(gamma):
    assert block_efficiency(0, gamma) == 1
    assert block_efficiency(1, gamma) == gamma + 1
    assert improvement_factor(0, gamma, 0.5) == 1 / (1 + 0.5 * gamma)
    assert improvement_factor(1, gamma, 0.5) == (gamma + 1) / (1 + 0.5 * gamma)
    assert operations_factor(0, gamma) == gamma + 1
    assert operations_factor(1, gamma) == 1
    assert expected_rounds(repeat_alpha(0, gamma), 17) == 17
    assert expected_rounds(repeat_alpha(1, gamma), 17) == math.ceil(17 / (gamma + 1))
    assert pooled_alpha(repeat_alpha(0, gamma)) == 0
    assert pooled_alpha(repeat_alpha(1, gamma)) == 1


def test_limits_of_the_oracle():
    assert oracle_block_efficiency([0, 1]).tolist() == [1, math.inf]
    assert oracle_improvement_factor(1, [0, 0.25]).tolist() == [math.inf, 4]


@quick
@given(st.one_of(rates, st.floats(1e-16, 1e-3).map(lambda x: 1 - x)), lengths)
def test_block_efficiency_is_the_geometric_sum(alpha, gamma):
    exact = float(sum(Fraction(alpha) ** i for i in range(gamma + 1)))
    assert block_efficiency(alpha, gamma) == pytest.approx(exact, rel=1e-12)
    assert block_efficiency_by_position(repeat_alpha(alpha, gamma)) == pytest.approx(exact, rel=1e-12)


def test_arrays_broadcast():
    alpha, gamma, c = np.array([0.5, 0.9])[:, None, None], np.array([1, 2, 3])[:, None], np.array([0, 0.1, 0.2, 0.3])
    factors = improvement_factor(alpha, gamma, c)
    assert factors.shape == (2, 3, 4)
    assert factors[1, 2, 3] == improvement_factor(0.9, 3, 0.3)
    assert isinstance(improvement_factor(0.9, 3, 0.3), float)
    assert isinstance(optimal_gamma(0.9, 0.1), int)
    alphas = repeat_alpha([0.5, 0.9], 3)
    both = expected_time(alphas[:, None], [10, 20], 0.1)
    assert both.shape == (2, 2)
    assert both[1, 1] == expected_time(alphas[1], 20, 0.1)
    assert expected_time(alphas, [10, 20], [0.1, 0.2])[1] == expected_time(alphas[1], 20, 0.2)


# -- Corollary 3.9, the optimal draft length, the oracle -----------------------------------------------


@quick
@given(rates, costs, lengths)
def test_corollary_3_9_and_its_converse(alpha, c, gamma):
    if drafting_helps(alpha, c):
        bound = improvement_lower_bound(alpha, c)
        best = optimal_gamma(alpha, c, longest=60)
        reached = improvement_factor(alpha, best, c) if best else 1.0  # 0 only where alpha - c is lost in rounding
        assert reached >= bound * (1 - 1e-12)
        assert bound >= 1
        assert improvement_factor(alpha, 1, c) == pytest.approx(bound)
    else:
        assert improvement_factor(alpha, gamma, c) <= 1 + 1e-12


@quick
@given(st.floats(0, 0.99), st.floats(0.005, 2), st.floats(1, 3))
def test_optimal_gamma_searches_far_enough(alpha, c, v):
    gammas = np.arange(1, 3001)  # a draft of 3000 costs 15 target passes or more and yields at most 100 tokens
    factors = improvement_factor(alpha, gammas, c, v)
    best = optimal_gamma(alpha, c, v)
    reached = 1.0 if best == 0 else factors[best - 1]
    assert reached >= max(1.0, factors.max()) * (1 - 1e-14)
    assert best == 0 or best == 1 or factors[best - 2] < factors[best - 1] * (1 + 1e-14)


def test_optimal_gamma_under_a_cost_with_two_maxima():
    steps = [1.0, 1.0, 1.6, 1.6, 1.6, 1.6, 1.6, 1.6, 1.6, 1.6, 3.0]  # a kernel that works in tiles
    factors = improvement_factor(0.9, np.arange(1, 11), 0.01, steps)
    assert factors[0] > factors[1]  # climbing from 1 would stop at 1
    assert optimal_gamma(0.9, 0.01, steps) == 9 == np.argmax(factors) + 1
    assert optimal_gamma(0.9, 0.01, lambda n: steps[n - 1], longest=10) == 9
    assert optimal_gamma(0.9, 0.01, steps, longest=2) == 1
    assert extended_optimal_gamma(repeat_alpha(0.9, 10), 0.01, steps) == 9


def test_optimal_gamma_is_found_in_few_steps(monkeypatch):
    """Of a draft that is hardly ever wrong and costs hardly anything a million tokens are best: not a million steps."""
    calls = []
    factor = theory.improvement_factor
    monkeypatch.setattr(theory, "improvement_factor", lambda *args: (calls.append(args), factor(*args))[1])
    best = theory.optimal_gamma(0.999999, 1e-6)
    assert len(calls) < 60
    around = np.r_[best - 1000 : best + 1001]
    assert factor(0.999999, best, 1e-6) >= factor(0.999999, around, 1e-6).max() * (1 - 1e-14)
    grid = theory.optimal_gamma([0.999999, 0.5], 1e-6)
    assert grid.tolist() == [best, theory.optimal_gamma(0.5, 1e-6)]


def test_optimal_gamma_where_there_is_no_longest():
    for alpha, c in [(0.5, 0), (1, 0.5)]:
        with pytest.raises(SpecdecError, match="longest"):
            optimal_gamma(alpha, c)
    assert optimal_gamma(0.5, 0, longest=7) == 7
    assert optimal_gamma(1, 0.5, longest=7) == 7
    assert optimal_gamma(1, 2.0) == 0
    assert optimal_gamma(0, 0) == 0


def test_oracle_is_never_beaten_and_gains_about_what_the_paper_says():
    alpha, c = np.linspace(0.5, 0.95, 46)[:, None], np.array([0.01, 0.02, 0.05, 0.1])
    best = improvement_factor(alpha, optimal_gamma(alpha, c), c)
    gain = oracle_improvement_factor(alpha, c) / best - 1
    assert gain.min() > 0
    assert gain.max() == pytest.approx(0.554, abs=5e-4)
    assert np.unravel_index(gain.argmax(), gain.shape) == (45, 2)  # alpha = 0.95, c = 0.05


@quick
@given(rates, lengths, st.floats(0, 1))
def test_no_fixed_gamma_beats_the_oracle(alpha, gamma, c):
    assert improvement_factor(alpha, gamma, c) <= oracle_improvement_factor(alpha, c) * (1 + 1e-12)


# -- simulation of rounds ------------------------------------------------------------------------------


def accepted_in_rounds(alphas: np.ndarray, rounds: int, random: np.random.Generator) -> np.ndarray:
    """Coin by coin: the number of draft tokens accepted in each round."""
    return np.cumprod(random.random((rounds, alphas.shape[-1])) < alphas, axis=1).sum(1)


def simulate_texts(alphas, tokens, c, v, texts, random):
    """Rounds and time of `texts` texts of `tokens` tokens, written round by round."""
    left, rounds, time = np.full(texts, tokens), np.zeros(texts), np.zeros(texts)
    while (left > 0).any():
        going = left > 0
        drafted = np.minimum(alphas.shape[-1], left - 1)
        kept = np.minimum(accepted_in_rounds(alphas, texts, random), drafted)
        rounds += going
        time += going * (c * drafted + np.asarray(v)[np.maximum(drafted, 0)])
        left = np.where(going, left - kept - 1, 0)
    return rounds, time


def standard_errors(sample: np.ndarray, predicted: float) -> float:
    return abs(sample.mean() - predicted) / (sample.std(ddof=1) / math.sqrt(sample.size))


@pytest.mark.parametrize(("alpha", "gamma"), [(0.3, 2), (0.75, 7), (0.9, 10)])
def test_block_efficiency_against_simulated_rounds(alpha, gamma):
    random = np.random.default_rng(0)
    emitted = 1 + accepted_in_rounds(repeat_alpha(alpha, gamma), 40_000, random)
    assert standard_errors(emitted, block_efficiency(alpha, gamma)) < 4
    without_bonus = (1 - alpha**gamma) / (1 - alpha)
    assert standard_errors(emitted, without_bonus) > 4


@pytest.mark.parametrize("tokens", [1, 5, 23])
def test_finite_length_against_simulated_texts(tokens):
    alphas, c, v = np.array([0.6, 0.8, 0.9, 0.3]), 0.05, [1.0, 1.1, 1.15, 1.3, 1.4]
    rounds, time = simulate_texts(alphas, tokens, c, v, 40_000, np.random.default_rng(1))
    if tokens == 1:
        assert expected_rounds(alphas, 1) == expected_time(alphas, 1, c, v) == 1 == time.max()
        return
    assert standard_errors(rounds, expected_rounds(alphas, tokens)) < 4
    assert standard_errors(time, expected_time(alphas, tokens, c, v)) < 4
    assert standard_errors(rounds, tokens / block_efficiency_by_position(alphas)) > 4  # forgets the last rounds


def enumerated(alphas, tokens, c, v):
    """Expected (rounds, time) by following every outcome of every round."""
    if tokens == 0:
        return 0.0, 0.0
    drafted = min(len(alphas), tokens - 1)
    rounds, time, reach = 1.0, c * drafted + v[drafted], 1.0
    for kept in range(drafted + 1):
        stop = reach * (1 - alphas[kept]) if kept < drafted else reach
        later = enumerated(alphas, tokens - kept - 1, c, v)
        rounds, time = rounds + stop * later[0], time + stop * later[1]
        reach = reach * alphas[kept] if kept < drafted else 0.0
    return rounds, time


@settings(max_examples=25, deadline=None)
@given(st.lists(rates, min_size=1, max_size=4), st.integers(1, 8), costs)
def test_finite_length_against_enumeration(alphas, tokens, c):
    v = [1.0, 1.2, 1.3, 1.7, 2.0]
    rounds, time = enumerated(alphas, tokens, c, v)
    assert expected_rounds(alphas, tokens) == pytest.approx(rounds)
    assert expected_time(alphas, tokens, c, v) == pytest.approx(time)


# -- the extended model reduces to the theorem ---------------------------------------------------------


@quick
@given(rates, lengths, costs, st.floats(1, 3))
def test_equal_alphas_are_the_theorem(alpha, gamma, c, v):
    alphas = repeat_alpha(alpha, gamma)
    assert extended_improvement_factor(alphas, c, v) == pytest.approx(improvement_factor(alpha, gamma, c, v))
    assert pooled_alpha(alphas) == pytest.approx(alpha)


def test_long_texts_are_the_theorem():
    alphas = repeat_alpha(0.8, 5)
    limit = improvement_factor(0.8, 5, 0.05)
    gaps = abs(
        extended_improvement_factor(alphas, 0.05, tokens=[20, 200, 2000], prefill_target=3, prefill_draft=1) - limit
    )
    assert gaps[0] > 5 * gaps[1] > 25 * gaps[2]
    assert gaps[2] < 0.006 * limit


@quick
@given(st.floats(0.05, 0.95), st.floats(0.01, 0.5))
def test_extended_optimum_equals_the_plain_one(alpha, c):
    plain = optimal_gamma(alpha, c, longest=40)
    extended = extended_optimal_gamma(repeat_alpha(alpha, 40), c)
    value = lambda g: improvement_factor(alpha, g, c) if g else 1.0  # noqa: E731
    assert value(extended) == pytest.approx(value(plain), rel=1e-12)


def test_short_texts_want_short_drafts():
    alphas = repeat_alpha(0.9, 20)
    assert extended_optimal_gamma(alphas, 0.02) == optimal_gamma(0.9, 0.02) == 19
    for tokens in (2, 4, 8):
        best = extended_optimal_gamma(alphas, 0.02, tokens=tokens)
        assert 1 <= best < tokens  # a draft of `tokens` or more is cut anyway
    assert extended_optimal_gamma(alphas, 0.02, tokens=1) == 0
    assert extended_optimal_gamma(alphas, 0.02, tokens=8, prefill_draft=20) == 0


def test_break_even_is_where_the_factor_passes_one():
    alphas, c, v = np.array([0.7, 0.7, 0.6]), 0.1, [1, 1.1, 1.2, 1.3]
    n = break_even_tokens(alphas, c, v, prefill_draft=6.0)
    factor = extended_improvement_factor(alphas, c, v, [n - 1, n], prefill_target=2, prefill_draft=6.0)
    assert factor[0] <= 1 < factor[1]
    assert break_even_tokens([0.05, 0.05], 0.2) is None


def test_break_even_takes_arrays():
    alphas, costs, prefill = repeat_alpha([0.75, 0.5, 0.05], 7), np.array([[0.02], [0.05]]), [0.0, 10.0, 3.0]
    found = break_even_tokens(alphas, costs, 1.1, prefill)
    alone = [[break_even_tokens(a, c, 1.1, p) for a, p in zip(alphas, prefill, strict=True)] for c in (0.02, 0.05)]
    assert found.shape == (2, 3)
    assert found.tolist() == [[math.inf if one is None else one for one in row] for row in alone]
    assert math.isinf(found[0, 2]) and 2 < found[0, 1] < math.inf


def test_a_batch_is_the_mean_of_its_rows():
    rows = np.array([[0.9, 0.8], [0.2, 0.1], [0.5, 0.5]])
    mean = np.mean([extended_improvement_factor(row, 0.1, 1.2) for row in rows])
    assert batch_improvement_factor(rows, 0.1, 1.2) == pytest.approx(mean)
    lockstep = rows.min(0)  # if every row had to wait for the worst
    assert batch_improvement_factor(rows, 0.1, 1.2) > extended_improvement_factor(lockstep, 0.1, 1.2)


def test_roofline_ends_free_checking():
    assert roofline_verification_cost(np.arange(1, 9), 8).tolist() == [1] * 8
    full = roofline_verification_cost(6, 8, batch=[1, 2, 8, 64])
    assert full.tolist() == [1, 1.5, 6, 6]
    speed = [improvement_factor(0.8, 5, 0.05, v) for v in full]
    assert speed[0] > 1 > speed[-1]


def test_predict_adds_one_term_at_a_time():
    alphas, v = [0.6, 0.8, 0.9, 0.9, 0.9], [1, 1.1, 1.2, 1.3]
    p = predict(alphas, 3, 0.05, v, tokens=40, prefill_target=4, prefill_draft=2)
    used = alphas[:3]
    assert p.alpha == pooled_alpha(used)
    assert p.theorem == improvement_factor(p.alpha, 3, 0.05)
    assert p.factors["verification cost"] == improvement_factor(p.alpha, 3, 0.05, v)
    assert p.factors["acceptance by position"] == extended_improvement_factor(used, 0.05, v)
    assert p.factors["last rounds"] == extended_improvement_factor(used, 0.05, v, 40)
    assert p.extended == extended_improvement_factor(used, 0.05, v, 40, 4, 2)
    assert p.extended_block_efficiency == 40 / expected_rounds(used, 40)
    ideal = predict(0.75, 7, 0.02)
    assert ideal.extended == pytest.approx(ideal.theorem)
    assert predict(0.3, 4, 1.5).theorem < 1  # a draft slower than its target is a verdict, not an error


# -- bad input -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: block_efficiency(1.2, 3), "alpha is 1.2"),
        (lambda: block_efficiency(math.nan, 3), "alpha is nan"),
        (lambda: block_efficiency([0.5, -0.1], 3), "alpha is -0.1"),
        (lambda: block_efficiency("high", 3), "alpha is 'high'"),
        (lambda: block_efficiency([], 3), "alpha is empty"),
        (lambda: block_efficiency(0.5, 0), "gamma is 0"),
        (lambda: block_efficiency(0.5, 2.5), "gamma is 2.5"),
        (lambda: improvement_factor(0.5, math.nan, 0.1), "gamma is nan"),
        (lambda: improvement_factor(0.5, 3, -0.1), "cost_coefficient is -0.1"),
        (lambda: improvement_factor(0.5, 3, math.inf), "cost_coefficient is inf"),
        (lambda: improvement_factor(0.5, 3, 0.1, 0.0), "verification_cost is 0"),
        (lambda: improvement_factor(0.5, 3, 0.1, [1.0, 1.1]), r"v\(4\) is needed"),
        (lambda: improvement_factor(0.5, 1, 0.1, [0.021, 0.024]), r"v\(1\) is 0.021"),  # seconds
        (lambda: operations_factor(0.5, 3, -1), "operations_coefficient is -1"),
        (lambda: optimal_gamma(0.5, 0.1, lambda n: 1.0), "longest"),
        (lambda: optimal_gamma(0.5, 0.1, [1.0]), "is 0"),
        (lambda: expected_rounds(0.5, 10), "one per draft position"),
        (lambda: break_even_tokens(0.5, 0.1), "one per draft position"),
        (lambda: expected_rounds([], 10), "alphas is empty"),
        (lambda: expected_rounds([0.5], 0), "tokens is 0"),
        (lambda: extended_improvement_factor([0.5], 0.1, tokens=5, prefill_draft=-1), "prefill_draft is -1"),
        (lambda: batch_improvement_factor([0.5], 0.1), "one row per text"),
        (lambda: predict([0.5, 0.6], 3, 0.1), "gamma is 3"),
        (lambda: acceptance_from_distributions(np.ones(1), np.ones(1), 1.5), "lenience is 1.5"),
        (lambda: acceptance_from_trace([1], [1]), "at least 2"),
        (lambda: acceptance_from_trace([1, 2], [1, 2]), "0 or 1"),
        (lambda: acceptance_from_trace([0, 0], [0, 0]), "no round tested"),
        (lambda: acceptance_from_trace([1, 1], [1, 0], ["a"]), "the text of each round"),
        (lambda: acceptance_from_trace([1, 1], [1, 0], level=95), "level is 95"),
        (lambda: roofline_verification_cost(3, 0), "critical_positions is 0"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(SpecdecError, match=words) as error:
        call()
    assert "\n" not in str(error.value)


def test_the_theory_needs_numpy_only():
    heavy = ("torch", "scipy", "pandas", "transformers", "matplotlib")
    code = f"import sys, specdec_lib.theory; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
