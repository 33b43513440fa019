"""Counts against torch's own counter, rates by a clock of ours, passes that are left as they were found."""

from itertools import accumulate, chain, repeat

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from specdec_lib.bench.costs import Estimate
from specdec_lib.errors import SpecdecError
from specdec_lib.models import load_transformers, open_session
from specdec_lib.models.fast import FastLlama
from specdec_lib.studies import hardware
from specdec_lib.studies.hardware import (
    Machine,
    Series,
    Work,
    count,
    last_within,
    measure_machine,
    time_passes,
    verification_costs,
)
from specdec_lib.theory import roofline_verification_cost


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize(("positions", "batch", "context"), [(1, 1, 0), (5, 1, 7), (3, 4, 2)])
def test_operations_are_those_that_torch_counts(tiny_folder, kind, positions, batch, context):
    model = load_transformers(tiny_folder(kind), device="cpu")
    model.set_attn_implementation("eager")  # a fused attention hides its products from the counter
    session = open_session(model, batch)
    if context:
        session.feed(torch.ones(batch, context, dtype=torch.long), last=0)
    with FlopCounterMode(display=False) as counter:
        session.feed(torch.ones(batch, positions, dtype=torch.long), last=positions)
    work = count(model.config, positions, batch, context)
    assert work.total_operations == counter.get_total_flops()
    assert count(model.config, positions, batch, context + 1).total_operations != counter.get_total_flops()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("processor", ["this one", "without a bfloat16 layout"])
def test_bytes_are_those_that_the_tensors_have(tiny_folder, dtype, processor, request):
    if processor != "this one":
        request.getfixturevalue("no_bfloat16_layout")
    model = load_transformers(tiny_folder("llama"), device="cpu", dtype=dtype)
    linear = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    fast, batch, context, positions = FastLlama(model), 3, 4, 5
    cache = fast.new_cache(batch, context + positions)
    logits = fast.logits(torch.ones(batch, context + positions, dtype=torch.long), cache, last=positions)
    work = count(model.config, positions, batch, context, dtype.itemsize).bytes
    assert work["weights"] == sum(w.numel() * w.element_size() for w in linear)
    read = cache.keys.nbytes + cache.values.nbytes
    assert work["cache"] == read + read * positions // (context + positions)  # what is new is written, too
    assert work["logits"] == logits.nbytes


def test_the_roofline_of_the_weights_alone_is_that_of_the_theory():
    machine = Machine(bandwidth=Estimate(20e9), rate=Estimate(240e9))
    assert machine.critical_positions(4) == 24

    def seconds(positions, batch):
        return machine.seconds(Work({"layers": 2 * 1000 * positions * batch}, {"weights": 4 * 1000}))

    for batch in (1, 8, 64):
        ratios = [seconds(n, batch) / seconds(1, batch) for n in range(1, 65)]
        assert ratios == pytest.approx(roofline_verification_cost(np.arange(1, 65), 24, batch).tolist())


def test_long_contexts_make_checking_cheap_in_a_batch(tiny_folder):
    config = load_transformers(tiny_folder("llama"), device="cpu").config
    machine = Machine(bandwidth=Estimate(1.0), rate=Estimate(10.0))
    v = [
        machine.seconds(count(config, 4, 64, context)) / machine.seconds(count(config, 1, 64, context))
        for context in (8, 10_000)
    ]
    assert v[0] > 3 > v[1]


def test_rates_are_work_over_time_of_the_faster_way(monkeypatch):
    """With a clock on which the four ways take 4, 2, 8 and 16 seconds."""
    ends = accumulate(chain.from_iterable(repeat((0, 4, 0, 2, 0, 8, 0, 16))))
    monkeypatch.setattr(hardware, "perf_counter", lambda: float(next(ends)))
    machine = measure_machine(repeats=6, megabytes=1, width=16)
    assert machine.bandwidth == Estimate(2**20 / 2, 2**20 / 2, 2**20 / 2)
    assert machine.rate.value == 2 * 16**3 / 8


def test_rates_are_really_measured():
    machine = measure_machine(repeats=1, megabytes=4, width=64)
    assert 0 < machine.bandwidth.value < np.inf and machine.bandwidth.low is None
    assert 0 < machine.rate.value < np.inf


@pytest.fixture
def fast(tiny_folder):
    return FastLlama(load_transformers(tiny_folder("llama"), device="cpu"))


def test_every_pass_is_timed_in_each_sweep_and_nothing_is_left_behind(fast, monkeypatch):
    fed = []

    def pass_seconds(session, positions, order, batch):
        assert session.length == 5  # the context, and nothing that an earlier pass fed
        fed.append((batch, tuple(positions)))
        return real(session, positions, order, batch)

    real = hardware.pass_seconds
    monkeypatch.setattr(hardware, "pass_seconds", pass_seconds)
    ticks = []
    series = {"one": Series(fast, 1, [1, 2, 4]), "three": Series(fast, 3, [1, 6])}
    times = time_passes(series, context=5, sweeps=2, tick=lambda: ticks.append(0))
    assert {key: t.shape for key, t in times.items()} == {"one": (2, 3), "three": (2, 2)}
    assert all((t > 0).all() for t in times.values())
    assert sorted(fed) == sorted([(1, (1, 1, 1, 2, 4)), (3, (1, 1, 1, 6))] * 3)  # one sweep more than is kept
    assert len(ticks) == 3


def test_the_unit_is_the_median_of_three_passes_of_the_same_sweep(fast, monkeypatch):
    monkeypatch.setattr(hardware, "pass_seconds", lambda *_: [5.0, 2.0, 1.0, 8.0])
    times = time_passes({"one": Series(fast, 1, [1, 3])}, context=0, sweeps=6)["one"]
    assert times.tolist() == [[2.0, 8.0]] * 6
    assert verification_costs(times) == [Estimate(1.0, 1.0, 1.0), Estimate(4.0, 4.0, 4.0)]


def test_a_machine_that_slows_down_does_not_move_paired_ratios():
    slower = np.array([1.0, 1.5, 2.0, 4.0, 8.0, 16.0])[:, None]
    paired = verification_costs(slower * [0.02, 0.03])
    assert paired[1].value == paired[1].low == paired[1].high == pytest.approx(1.5)
    shuffled = np.hstack([slower * 0.02, slower[::-1] * 0.03])  # numerator and denominator of different sweeps
    assert verification_costs(shuffled)[1].high > 5


def test_where_checking_stops_being_free():
    assert last_within([1, 2, 4], [1.0, 1.5, 1.05]) == 1  # a dip later does not count
    assert last_within([1, 2, 4], [1.0, 1.5, 3.0], limit=2) == 2
    assert last_within([1], [1.2]) == 0


@pytest.mark.parametrize(
    ("batch", "positions"),
    [(0, [1, 2]), (1, [2, 3]), (1, []), (1, [1, 0])],
)
def test_series_that_have_no_unit_are_refused(batch, positions):
    with pytest.raises(SpecdecError, match="give a batch >= 1") as error:
        Series(None, batch, positions)
    assert "\n" not in str(error.value)


def test_other_families_are_refused(tiny_folder):
    config = load_transformers(tiny_folder("gpt2"), device="cpu").config
    with pytest.raises(SpecdecError, match="this one is gpt2: choose another target"):
        count(config, 1)
