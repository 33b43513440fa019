"""One audit: sample sizes, bins, verdicts in words, and that bad input never passes."""

import numpy as np
import pytest
import torch

from specdec_lib.audit.audit import audit
from specdec_lib.audit.gof import goodness_of_fit, holm, pool
from specdec_lib.errors import SpecdecError

SKEW = np.array([0.5, 0.3, 0.1, 0.05, 0.03, 0.01, 0.006, 0.003, 0.0009, 0.0001])


# -- bins and small samples ----------------------------------------------------------------------------


def test_bins_come_from_the_law_and_hide_what_they_say():
    bins = pool(SKEW, 1_000)
    assert bins.law.min() * 1_000 >= 10
    assert bins.hidden == pytest.approx(0.01)  # the last four share a bin: 0.006 + 0.003 + 0.0009 + 0.0001
    assert np.bincount(bins.label, SKEW) == pytest.approx(bins.law)
    moved = SKEW.copy()
    moved[[6, 7]] = moved[[7, 6]]  # a deviation within the bin: the bins cannot tell
    assert bins.count(moved * 1e6).tolist() == bins.count(SKEW * 1e6).tolist()


def test_drawn_and_summed_small_sample_tests_agree(monkeypatch):
    counts, law = [4, 1, 3, 0], [0.25, 0.25, 0.3, 0.2]
    exact = goodness_of_fit(counts, law)
    monkeypatch.setattr("specdec_lib.audit.gof.ENUMERATED", 0)
    drawn = goodness_of_fit(counts, law, seed=1)
    assert (exact.method, drawn.method) == ("exact multinomial", "Monte-Carlo multinomial")
    assert drawn.p_value == pytest.approx(exact.p_value, abs=0.015)


def test_an_excluded_outcome_refutes():
    assert goodness_of_fit([500, 500, 1], [0.5, 0.5, 0.0]).p_value == 0
    greedy = audit(lambda n, seed: np.zeros(n, int), [1.0, 0.0], effect=0.05)
    assert greedy.exit_status == 0
    assert greedy.samples == 90  # 0.95^90 < 0.01 <= 0.95^89
    leaks = lambda n, seed: (np.random.default_rng(seed).random(n) < 0.05).astype(int)  # noqa: E731
    assert audit(leaks, [1.0, 0.0], effect=0.05).exit_status == 1


def test_holm_by_hand():
    assert holm([0.04, 0.001, 0.03]) == pytest.approx([0.06, 0.003, 0.06])


# -- bad input -----------------------------------------------------------------------------------------


def fair(n, seed):
    return np.random.default_rng(seed).integers(0, 4, n)


@pytest.mark.parametrize(
    ("law", "message"),
    [
        ([0.5, 0.4], "sums to 0.9"),
        ([0.5, 0.7, -0.2], "negative probability"),
        ([0.5, float("nan")], "NaN"),
        ([float("inf"), 0.5], "sums to inf"),
        ([], "list of probabilities"),
        ([[0.5, 0.5]], "list of probabilities"),
        ({(): 0.5, (1,): 0.5}, "none empty"),
        ({0: 0.5, (0,): 0.5}, "twice"),
        ({"a": 1.0}, "tuples of token ids"),
        (lambda context: [1.0], "no contexts"),
        ({(0,): "half", (1,): 0.5}, "list of numbers"),
        ({(0,): None, (1,): 1.0}, "NaN|list of numbers"),
        ([[0.5], [0.25, 0.25]], "list of numbers"),
        (["a", "b"], "list of numbers"),
        (None, "list of probabilities"),
    ],
)
def test_what_is_no_law(law, message):
    with pytest.raises(SpecdecError, match=message):
        audit(fair, law)


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (lambda n, seed: fair(n, seed)[:-1], "asked for 16 outcomes and returned 15"),
        (lambda n, seed: fair(n, seed) / 4, "must return token ids"),
        (lambda n, seed: fair(n * 2, seed).reshape(n, 2), "1 to 1 token ids"),
        (lambda n, seed: fair(n, seed).reshape(n, 1, 1), "must return token ids"),
        (lambda n, seed: [()] * n, "returned \\(\\)"),
        (lambda n, seed: ["a"] * n, "returned \\('a',\\)"),
        (lambda n, seed: 3, "not int"),
        (lambda n, seed: fair(n, None), "the same seed gave other outcomes"),
        (lambda n, seed: fair(n, 0), "five seeds gave the same outcomes"),
        (lambda n, seed: [[[i]] for i in fair(n, seed).tolist()], r"returned \(\[\d\],\)"),
        (lambda n: fair(n, 0), "called as sampler\\(n, seed\\), and its parameters do not fit: too many"),
        (lambda n, seed, context: fair(n, seed), "do not fit: missing a required argument: 'context'"),
        (None, "a NoneType is no function"),
        (fair(16, 0), "a ndarray is no function"),
    ],
)
def test_what_is_no_sampler(sampler, message):
    with pytest.raises(SpecdecError, match=message):
        audit(sampler, [0.25] * 4)


@pytest.mark.parametrize("setting", [{"level": 0}, {"effect": 1}, {"power": 1.5}, {"effect": "0.1"}])
def test_shares(setting):
    with pytest.raises(SpecdecError, match=f"{next(iter(setting))} must lie strictly between 0 and 1"):
        audit(fair, [0.25] * 4, **setting)


@pytest.mark.parametrize("budget", [0, -5, 0.5, True, "many"])
def test_budgets(budget):
    with pytest.raises(SpecdecError, match="budget must be a whole number >= 1"):
        audit(fair, [0.25] * 4, budget=budget)


@pytest.mark.parametrize("seed", [-1, 0.5, None])
def test_seeds(seed):
    with pytest.raises(SpecdecError, match="seed must be a whole number"):
        audit(fair, [0.25] * 4, seed=seed)


def test_a_budget_that_is_too_small_is_never_a_pass():
    few = audit(fair, [0.25] * 4, budget=1_000)
    assert few.exit_status == 2
    assert few.sentence.startswith("inconclusive: 1,000 samples see a deviation of 0.02")
    assert f"{few.needed:,} samples are needed" in few.sentence
    assert audit(fair, [0.25] * 4, budget=few.needed).exit_status == 0
    assert audit(fair, [0.4, 0.2, 0.2, 0.2], budget=1_000).exit_status == 1  # but it may find something
    with pytest.raises(SpecdecError, match="without any"):
        audit(lambda n, seed, c: fair(n, seed), lambda c: [0.25] * 4, contexts=[0, 1], budget=1)
    with pytest.raises(SpecdecError, match="more than 1,000,000,000 samples"):
        audit(fair, [0.25] * 4, effect=1e-6)


def test_support_that_differs_is_found():
    law = {(0, 1): 0.5, (1,): 0.5}
    beyond = lambda n, seed: [[(0, 1), (1, 0)][i] for i in fair(n, seed) % 2]  # noqa: E731 - runs past its end
    assert audit(beyond, law, effect=0.3).exit_status == 1


def test_contexts_are_told_apart():
    laws = [[0.25] * 4, [0.4, 0.2, 0.2, 0.2]]
    verdict = audit(lambda n, seed, i: fair(n, seed), lambda i: laws[i], contexts=[0, 1], effect=0.15)
    assert verdict.exit_status == 1 and verdict.worst == 1
    assert "in context 2 at" in verdict.sentence


@pytest.mark.parametrize(
    ("law", "effect"),
    [(torch.full((4,), 0.25), 0.1), (torch.full((4,), 0.25, requires_grad=True), np.float32(0.1))],
    ids=["tensor", "tensor with a gradient, float32 effect"],
)
def test_what_torch_and_numpy_give_is_taken(law, effect):
    def sampler(n, seed):
        return list(torch.randint(4, (n, 1), generator=torch.Generator().manual_seed(seed)))

    assert audit(sampler, law, effect=effect).exit_status == 0
