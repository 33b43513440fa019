"""The audit is audited: its level, its power and its bound, over thousands of seeded repetitions.

A correct sampler must be rejected as often as the level says, a wrong one of known total variation at least as often
as the power says.  The intervals are binomial, at 99.9 %; every test is seeded, so it gives the same result each time.
"""

import numpy as np
import pytest
from scipy.stats import binom, kstest

from specdec_lib.audit.audit import audit
from specdec_lib.audit.gof import goodness_of_fit, log_e_value, noise, power_at, required_samples, visible_effect
from specdec_lib.exact import constant_model, distance, target_law
from specdec_lib.studies.kill import P, Q, mutant_law
from specdec_lib.verify.mutants import MUTANTS

REPETITIONS = 2_000
LAWS = {
    "uniform": np.full(4, 0.25),
    "skew": np.array([0.5, 0.3, 0.1, 0.05, 0.03, 0.01, 0.006, 0.003, 0.0009, 0.0001]),
    "many": np.random.default_rng(0).dirichlet(np.full(27, 0.5)),
}


def sampler_of(law):
    """A fast sampler of one token, or of the outcomes of a dict."""
    if isinstance(law, dict):
        outcomes, weights = list(law), np.array([float(w) for w in law.values()])
        return lambda n, seed: [outcomes[i] for i in np.random.default_rng(seed).choice(len(outcomes), n, p=weights)]
    return lambda n, seed: np.random.default_rng(seed).choice(len(law), n, p=law)


@pytest.mark.parametrize("name", LAWS)
def test_level_of_the_test(name):
    """Over 2,000 samples from the law itself, the share of rejections lies in the binomial interval of the level."""
    law = LAWS[name]
    counts = np.random.default_rng(1).multinomial(400, law, REPETITIONS)
    p_values = np.array([goodness_of_fit(c, law).p_value for c in counts])
    for level in (0.05, 0.01):
        low, high = binom.interval(0.999, REPETITIONS, level)
        assert low <= (p_values <= level).sum() <= high


def test_p_values_of_a_correct_sampler_are_uniform():
    """Where there are many tables of counts, all p-values are as likely as each other, not only those at the level."""
    law = LAWS["many"]
    counts = np.random.default_rng(6).multinomial(20_000, law / law.sum(), REPETITIONS)
    p_values = [goodness_of_fit(c, law).p_value for c in counts]
    assert kstest(p_values, "uniform").pvalue > 1e-3
    wrong = counts.copy()
    wrong[:, 0] += 200  # one in a hundred too many
    assert kstest([goodness_of_fit(c, law).p_value for c in wrong], "uniform").pvalue < 1e-3


def test_level_of_the_audit():
    """The same of the whole procedure, seed by seed, over two contexts: Holm keeps the family's level.

    Two tests at 0.05 each: at least one of them rejects in 1 - 0.95^2 = 9.75 % of the runs.
    """
    laws = [LAWS["uniform"], np.array([0.4, 0.3, 0.2, 0.1])]
    samplers = [sampler_of(law) for law in laws]
    verdicts = [
        audit(
            lambda n, seed, i: samplers[i](n, seed), lambda i: laws[i], contexts=[0, 1],
            level=0.1, effect=0.2, power=0.9, seed=seed,
        )
        for seed in range(REPETITIONS)
    ]  # fmt: skip
    found = sum(v.exit_status == 1 for v in verdicts)
    low, high = binom.interval(0.999, REPETITIONS, 1 - 0.95**2)
    assert low <= found <= high
    assert {v.exit_status for v in verdicts} == {0, 1}


def test_power_at_the_least_favourable_shape_is_the_stated_one():
    """Half of the outcomes gain evenly, half lose: here the stated power is not a bound but the number itself."""
    law, effect, level, power = np.full(10, 0.1), 0.1, 0.01, 0.9
    samples = required_samples(law, effect, level, power)
    wrong = law + np.repeat([1, -1], 5) * effect / 5
    counts = np.random.default_rng(2).multinomial(samples, wrong, REPETITIONS)
    found = sum(goodness_of_fit(c, law).p_value <= level for c in counts)
    low, high = binom.interval(0.999, REPETITIONS, power)
    assert low <= found <= high


@pytest.mark.parametrize("name", ["resampled from p", "p and q swapped", "q taken as one", "bonus from q"])
def test_power_on_mutants_is_at_least_the_stated_one(name):
    """Wrong rules whose total variation is known exactly, two tokens at draft length 1."""
    target, draft = constant_model(P), constant_model(Q)
    wrong = mutant_law(MUTANTS[name], target, draft, gamma=1, length=2).sequences
    right = target_law(target, 2)
    variation = float(distance(wrong, right))
    assert variation > 0.03
    law, level, power = np.array([float(w) for w in right.values()]), 1e-3, 0.9
    samples = required_samples(law, variation, level, power)
    drawn = np.array([float(wrong.get(text, 0)) for text in right])
    counts = np.random.default_rng(3).multinomial(samples, drawn / drawn.sum(), 200)
    found = sum(goodness_of_fit(c, law).p_value <= level for c in counts)
    assert found >= binom.ppf(0.001, 200, power)
    assert audit(sampler_of(wrong), right, effect=variation, power=power).exit_status == 1
    assert audit(sampler_of(right), right, effect=variation, power=power).exit_status == 0


@pytest.mark.parametrize(
    ("outcomes", "effect", "published"),
    [(10, 0.05, 4_800), (10, 0.02, 30_000), (100, 0.05, 10_000), (100, 0.02, 64_000), (1_000, 0.05, 27_000)],
)
def test_sample_sizes(outcomes, effect, published):
    """Chi-squared, power 0.99 at level 0.001, a deviation spread evenly over a uniform law: computed independently."""
    samples = required_samples(np.full(outcomes, 1 / outcomes), effect, level=1e-3, power=0.99)
    assert samples == pytest.approx(published, rel=0.03)


def test_a_sample_size_is_the_smallest_that_suffices():
    law = LAWS["many"] / LAWS["many"].sum()
    samples = required_samples(law, 0.1, 1e-3, 0.9)
    assert visible_effect(law, samples, 1e-3, 0.9) <= 0.1 < visible_effect(law, samples - 1, 1e-3, 0.9)
    assert power_at(law, samples, 1e-3, 0.1) >= 0.9 > power_at(law, samples - 1, 1e-3, 0.1)


def test_the_bound_covers_the_true_variation():
    law = LAWS["skew"]
    wrong = np.roll(law, 1) * 0.1 + law * 0.9
    variation = abs(wrong - law).sum() / 2
    counts = np.random.default_rng(4).multinomial(2_000, wrong, REPETITIONS)
    bounds = np.array([goodness_of_fit(c, law).bound(0.1) for c in counts])
    assert (bounds >= variation).mean() >= 0.9
    assert np.median(bounds) < variation + 0.06  # and says something


def test_looking_early_keeps_the_level_and_stops():
    """A look after every one of 300 samples: the e-value crosses in at most `level` of 500 correct runs."""
    law, level, size = np.array([0.5, 0.3, 0.2]), 0.1, 300
    draws = np.random.default_rng(5).choice(3, p=law, size=(500, size))
    counts = np.cumsum(np.eye(3, dtype=int)[draws], axis=1)
    crossed = 0
    for run in counts:
        crossed += any(log_e_value(c, law, effect=0.1) >= np.log(1 / level) for c in run)
    assert crossed <= binom.ppf(0.999, 500, level)
    assert crossed > 0  # it does move

    wrong = audit(sampler_of([0.4, 0.2, 0.2, 0.2]), [0.25] * 4, sequential=True)
    assert wrong.exit_status == 1
    assert wrong.samples < wrong.needed / 10
    assert wrong.fits[-1].method == "e-value" and wrong.bound == 1
    right = audit(sampler_of([0.25] * 4), [0.25] * 4, effect=0.1, sequential=True)
    assert right.exit_status == 0
    assert right.samples == right.needed > required_samples([0.25] * 4, 0.1, 1e-3, 0.99)
    leaks = audit(sampler_of([0.99, 0.01]), [1.0, 0.0], effect=0.001, sequential=True)
    assert leaks.exit_status == 1 and leaks.samples < leaks.needed


def test_level_of_the_sequential_audit():
    law = np.array([0.6, 0.4])
    runs = [audit(sampler_of(law), law, level=0.1, effect=0.1, power=0.9, sequential=True, seed=s) for s in range(300)]
    assert 0 < sum(v.exit_status == 1 for v in runs) <= binom.ppf(0.999, 300, 0.1)


def test_noise_is_what_correct_samplers_show():
    law = np.full(10, 0.1)
    low, high = noise(law, samples=1_000, share=0.9)
    counts = np.random.default_rng(7).multinomial(1_000, law, REPETITIONS)
    inside = np.mean([low <= goodness_of_fit(c, law).variation <= high for c in counts])
    assert 0.87 < inside < 0.93
    assert noise(law, samples=100_000)[1] < low
