"""Ratios and intervals that are what they say, costs, and predictions by hand."""

import json
import random
import subprocess

import numpy as np
import pytest
import torch

from specdec_lib.bench import costs as module
from specdec_lib.bench import small
from specdec_lib.bench.costs import (
    CostMeter,
    Costs,
    Estimate,
    footprint,
    median,
    outside_seconds,
    pass_seconds,
    rounds_with_room,
)
from specdec_lib.bench.prompts import Prompt
from specdec_lib.bench.speed import ratio_of_totals
from specdec_lib.decode import Round
from specdec_lib.drafters import Drafter, SamplingParams
from specdec_lib.drafters.base import Draft
from specdec_lib.errors import SpecdecError
from specdec_lib.models import open_session
from specdec_lib.theory import expected_time, improvement_factor

IDS = torch.tensor([[5, 9, 17, 3, 8, 30, 12, 7, 25, 6, 11, 14]])


# -- ratios and intervals ------------------------------------------------------------------------------


def test_a_speed_is_a_ratio_of_totals_not_a_mean_of_ratios():
    assert ratio_of_totals([9.0, 1.0], [1.0, 1.0]).value == 5.0  # here the two agree
    assert ratio_of_totals([9.0, 1.0], [3.0, 1.0]).value == 2.5  # the mean of the ratios is 2


def test_the_interval_covers_the_ratio_of_the_means_and_not_the_mean_of_the_ratios():
    draw = np.random.default_rng(0)
    covered = mutant_covered = 0
    for trial in range(400):
        b = draw.lognormal(0, 0.5, 24)  # a short text is sped up more than a long one
        a = (1.5 + 1.5 * np.exp(-2 * b)) * b * draw.lognormal(0, 0.1, 24)
        r = ratio_of_totals(a, b, seed=trial, resamples=500)
        covered += r.low <= RATIO_OF_MEANS <= r.high
        mutant_covered += r.low <= MEAN_OF_RATIOS <= r.high
    assert 0.91 <= covered / 400 <= 0.99
    assert mutant_covered / 400 < 0.8


_b = np.random.default_rng(1).lognormal(0, 0.5, 1_000_000)
_factor, _mean_noise = 1.5 + 1.5 * np.exp(-2 * _b), np.exp(0.005)
RATIO_OF_MEANS = float((_factor * _b).mean() / _b.mean() * _mean_noise)
MEAN_OF_RATIOS = float(_factor.mean() * _mean_noise)


def test_an_interval_of_the_median_covers_whatever_the_law():
    draws = np.random.default_rng(0).lognormal(0, 2, (1000, 15))
    found = [median(x) for x in draws]
    assert 0.95 <= np.mean([e.low <= 1 <= e.high for e in found]) <= 0.98  # 0.965 with a deviation of 0.006


def test_no_interval_from_too_few():
    assert ratio_of_totals([2.0] * 5, [1.0] * 5) == Estimate(2.0)
    assert ratio_of_totals([2.0] * 6, [1.0] * 6) == Estimate(2.0, 2.0, 2.0)
    assert median([1.0] * 5) == Estimate(1.0) and median([1.0] * 6) == Estimate(1.0, 1.0, 1.0)


# -- costs and prediction ------------------------------------------------------------------------------


def a_round(drafted, accepted, seconds=10.0, target=6.0, draft=3.0):
    return Round(0, [7] * drafted, accepted, [7] * accepted + [9], [], [], drafted, draft, target, seconds)


def costs_of(gamma, v, c, overhead=0.0, plain=0.0, prefill=(0.0, 0.0)):
    estimates = [Estimate(x) for x in v]
    return Costs(gamma, Estimate(0.1), estimates, Estimate(c), Estimate(plain), Estimate(overhead), *prefill)


def test_the_theorem_gets_alpha_and_c_and_the_terms_come_one_by_one():
    # 4 rounds of 2 drafted: 2, 1, 0, 2 accepted; alpha = 5 of 7 tested, by position 3/4 and 2/3; 9 tokens
    trace = [a_round(2, 2), a_round(2, 1), a_round(2, 0), a_round(2, 2)]
    found = costs_of(2, [1, 1.2, 1.5], 0.1).predict(trace, [12])
    assert found.alpha == pytest.approx(5 / 7)
    assert found.factors["theorem"] == pytest.approx(improvement_factor(5 / 7, 2, 0.1))
    assert found.factors["verification cost"] == pytest.approx(improvement_factor(5 / 7, 2, 0.1, 1.5))
    assert found.factors["acceptance by position"] == pytest.approx((1 + 3 / 4 + 3 / 4 * 2 / 3) / (0.2 + 1.5))
    assert found.factors["outside the models"] == pytest.approx(found.factors["prefill"])


def test_time_outside_the_models_is_charged_to_both_loops():
    trace = [a_round(2, 2), a_round(2, 0)] * 3
    costs = costs_of(2, [1, 1.2, 1.5], 0.1, overhead=0.3, plain=0.25, prefill=(4.0, 1.0))
    alphas, unit = [1 / 2, 1.0], 1.25
    time = expected_time(alphas, 16, 0.1 / unit, [1, 1.5 / unit, 1.8 / unit])
    by_hand = (4 / unit + 16) / (5 / unit + time)
    assert costs.predict(trace, [16]).factors["outside the models"] == pytest.approx(by_hand)


def test_what_a_drafter_did_not_propose_is_refused_and_not_checked():
    trace = [a_round(2, 2), a_round(0, 0)] * 3
    found = costs_of(2, [1, 1.5, 2], 0.0).predict(trace, [16])
    assert found.alpha == pytest.approx(6 / 9)
    # a round costs v(3) or v(1), by halves, and gives 3 or 1 tokens
    assert found.factors["acceptance by position"] == pytest.approx(2 / 1.5)


def test_only_rounds_with_room_for_gamma_tokens_tell_the_acceptance():
    trace = [a_round(2, 2), a_round(1, 1), a_round(2, 0), a_round(2, 0), a_round(1, 0), a_round(0, 0)]
    assert rounds_with_room(trace, 2, [5, 4]) == [trace[0], trace[2], trace[3]]


def test_a_drafter_that_never_proposes_is_predicted_to_gain_nothing():
    found = costs_of(3, [1, 1.1, 1.2, 1.3], 0.0).predict([a_round(0, 0)] * 8, [8])
    assert found.theorem == 1 and found.extended == pytest.approx(1)


def test_time_outside_the_models():
    trace = [a_round(2, 1), a_round(0, 0, seconds=8.0)]
    assert outside_seconds(trace) == [1.0, 0.0]
    assert outside_seconds(trace, [4.0, 5.0, 5.5]) == [1.5, 1.0]  # on a GPU, by the number of positions


def test_passes_are_timed_over_the_lengths_asked_for_and_leave_the_session_as_it_was(contest):
    session = open_session(contest.pair.target)
    session.feed(IDS, last=0)
    fed = []
    real = session.feed
    session.feed = lambda ids, last: fed.append((ids.shape[1], last)) or real(ids, last)
    seconds = pass_seconds(session, [1, 2, 5], random.Random(0))
    assert sorted(fed) == [(1, 1), (2, 2), (5, 5)] and session.length == IDS.shape[1]
    assert len(seconds) == 3 and min(seconds) > 0


def test_the_meter_needs_a_text(contest):
    meter = CostMeter(contest.bare, 2, SamplingParams())
    with pytest.raises(SpecdecError, match="nothing was measured"):
        meter.costs([], [])


def test_each_draft_has_its_own_cost_beside_the_same_passes(contest, monkeypatch):
    clock = [0.0]

    class Slow(Drafter):
        """A token takes so many seconds; of everything that is timed one more goes by."""

        def __init__(self, seconds):
            self.seconds = seconds

        def start(self, vocabulary):
            return self

        def propose(self, prefix, gamma, sampling, random):
            clock[0] += self.seconds * gamma
            return Draft([7] * gamma)

    def tick():
        clock[0] += 1.0
        return clock[0]

    monkeypatch.setattr(module, "perf_counter", tick)
    meter = CostMeter(
        contest.bare, 4, SamplingParams(), drafts={"slow": Slow(3.0), "quick": Slow(0.5), "free": Slow(0.0)}
    )
    meter.measure(IDS[0].tolist(), [5, 6, 7, 8])
    rounds = [a_round(4, 4)]
    found = {name: meter.costs(rounds, rounds, name).cost_coefficient.value for name in meter.drafts}
    assert found == {"slow": 3.25, "quick": 0.75, "free": 0.25}  # of a draft of four, one tick is the clock's


def test_the_meter_on_a_prompt_as_long_as_the_context(contest):
    meter = CostMeter(contest.bare, 2, SamplingParams(1.0))
    meter.measure([5] * 512, [])
    assert len(meter.passes[0]) == 8 and meter.passes[0][0] > 0


def test_memory_and_loading_are_measured_in_processes_of_their_own(target_folder, draft_folder):
    held = torch.zeros(1 << 27)  # 512 MiB that are this process's own
    held += 1
    found = footprint(str(target_folder), str(draft_folder), 2, repeats=1)
    for name in ("plain", "drafted"):
        assert 0 < found[name]["resident_mib"] <= found[name]["peak_mib"] + 1
    assert min(found["loading"].values()) > 0
    import psutil

    assert found["plain"]["peak_mib"] < psutil.Process().memory_info().rss / 2**20


def test_a_footprint_that_fails_says_why(monkeypatch):
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="Traceback ...\nMemoryError: no room\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(SpecdecError, match="MemoryError: no room"):
        footprint("packaged", "lookup", 2, repeats=1)


# -- the small benchmarks ------------------------------------------------------------------------------


def test_the_small_benchmarks_are_written(contest, tmp_path, monkeypatch):
    monkeypatch.setattr(small, "load_pair", lambda: contest.pair)
    monkeypatch.setattr(small, "load_prompts", lambda **_: [Prompt("a", "a", [{"role": "user", "content": "abc abc"}])])
    monkeypatch.setattr(small, "import_seconds", lambda: Estimate(0.3))
    small.main(tmp_path / "small.json")
    found = json.loads((tmp_path / "small.json").read_text())
    assert found["overhead_per_round"]["1"]["drafted"]["value"] > 0
    assert found["within_goals"]["import_seconds"] is False
    assert found["environment"]["cpu"]["model"]


def test_the_import_is_timed_in_a_new_process():
    assert small.import_seconds(1).value > 0
