"""What chapter 03 rests on: the power that is planned is the power that is there."""

import numpy as np
import pytest

from specdec_lib.audit.gof import power_at, required_samples
from specdec_lib.models import Pair
from specdec_lib.studies.preserved import RealAudit, simulated_power, worst_shift
from specdec_lib.verify.mutants import MUTANTS
from tests.tiny import tiny_model

PROBS = np.array([0.3, 0.2, 0.2, 0.1, 0.1, 0.06, 0.03, 0.008, 0.002])


def test_the_worst_shift_has_the_total_variation_that_is_asked():
    assert abs(worst_shift(PROBS, 0.1) - PROBS).sum() / 2 == pytest.approx(0.1)
    assert worst_shift(PROBS, 0.1).sum() == pytest.approx(1)
    assert simulated_power(PROBS, 0.1, 8, 1e-3) == 0  # one bin holds everything


@pytest.mark.parametrize(("effect", "samples"), [(0.1, 600), (0.05, 3_000), (0.05, 1_500)])
def test_simulated_power_is_the_planned_one(effect, samples):
    """2,000 runs: four standard deviations of a share are at most 0.045; 60 % of the samples give less power."""
    found = simulated_power(PROBS, effect, samples, 1e-3, repeats=2_000)
    planned = power_at(PROBS, samples, 1e-3, effect)
    assert found > planned - 0.045  # planned for what the pooled bin may hide as well, so never below
    assert found > power_at(PROBS, int(0.6 * samples), 1e-3, effect) + 0.045
    assert simulated_power(PROBS, 0.0, samples, 0.01, repeats=2_000) == pytest.approx(0.01, abs=0.01)


def test_a_real_audit_passes_the_rule_and_finds_a_fault_larger_than_its_effect():
    """Level 1e-3, power 0.95 for 0.1."""
    pair = Pair(*(tiny_model("llama", range(46), seed, {}) for seed in (0, 1)))
    checked = RealAudit(pair, [[5, 9, 17], [3, 8]])
    plan = {"effect": 0.1, "level": 1e-3, "power": 0.95, "seed": 0}
    fault = MUTANTS["everything accepted"].rule
    assert checked.probs(0).sum() == pytest.approx(1) and len(checked.probs(0)) <= 64
    assert checked.size(fault) > 0.1
    right, wrong = checked.run(**plan), checked.run(fault, **plan)
    assert (right.exit_status, wrong.exit_status) == (0, 1)
    assert right.samples == sum(required_samples(checked.probs(i), 0.1, 5e-4, 0.95) for i in range(2))
