"""Probability vectors: the same on torch, numpy and fractions, and the laws that the rule rests on."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_lib.distributions import (
    inverse_cdf,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    normalise,
    overlap,
    residual,
    softmax,
    temper,
    total_variation,
    warp,
)
from specdec_lib.errors import SpecdecError

weights = st.lists(st.integers(0, 6), min_size=2, max_size=6).filter(any)


def law(counts):
    return normalise(np.array([Fraction(c) for c in counts], dtype=object))


def floats(p):
    return np.array([float(x) for x in p])


@st.composite
def two_laws(draw):
    first = draw(weights)
    second = draw(st.lists(st.integers(0, 6), min_size=len(first), max_size=len(first)).filter(any))
    return law(first), law(second)


@given(two_laws())
@settings(derandomize=True, deadline=None)
def test_overlap_and_total_variation_sum_to_one(laws):
    p, q = laws
    assert overlap(p, q) + total_variation(p, q) == 1
    assert overlap(p, q) == overlap(q, p)


@given(two_laws())
@settings(derandomize=True, deadline=None)
def test_kept_and_redrawn_mass_make_up_the_target(laws):
    p, q = laws
    kept = np.minimum(p, q)
    assert list(kept + (1 - overlap(p, q)) * residual(p, q)) == list(p)


@given(two_laws(), st.sampled_from([1, 2, 3]), st.sampled_from([Fraction(1, 3), Fraction(3, 4)]))
@settings(derandomize=True, deadline=None)
def test_the_same_on_fractions_numpy_and_torch(laws, k, share):
    p, q = laws
    np_p, np_q = floats(p), floats(q)
    t_p, t_q = torch.tensor(np_p), torch.tensor(np_q)
    for function in (
        lambda x, y: residual(x, y),
        lambda x, y: keep_top_k(x, k),
        lambda x, y: keep_top_p(x, share if x.dtype == object else float(share)),
        lambda x, y: keep_min_p(x, share if x.dtype == object else float(share)),
        lambda x, y: temper(x, Fraction(1, 2) if x.dtype == object else 0.5),
        lambda x, y: temper(x, 0),
    ):
        exact = floats(function(p, q))
        # a rounding error may move a token across a threshold that it meets exactly; skip those
        if not np.isclose(exact, function(np_p, np_q)).all():
            ordered = np.sort(np_p)[::-1]
            edges = np.r_[ordered.cumsum() - float(share), ordered - float(share) * ordered[0]]
            assert np.isclose(edges, 0, atol=1e-12).any()
            continue
        np.testing.assert_allclose(function(np_p, np_q), exact, atol=1e-12)
        np.testing.assert_allclose(function(t_p, t_q).numpy(), exact, atol=1e-12)
        assert exact.sum() == pytest.approx(1)


def test_top_p_keeps_the_token_that_crosses_the_boundary():
    p = np.array([0.5, 0.3, 0.15, 0.05])
    assert (keep_top_p(p, 0.5) > 0).tolist() == [True, False, False, False]
    assert (keep_top_p(p, 0.51) > 0).tolist() == [True, True, False, False]


@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 4, "top_p": 0.8}])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_warp_is_what_transformers_samples_from(options, temperature):
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(5, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    steps = [TemperatureLogitsWarper(temperature)]
    steps += [TopKLogitsWarper(options["top_k"])] if "top_k" in options else []
    steps += [TopPLogitsWarper(options["top_p"])] if "top_p" in options else []
    steps += [MinPLogitsWarper(options["min_p"])] if "min_p" in options else []
    scores = logits
    for step in steps:
        scores = step(None, scores)
    torch.testing.assert_close(warp(logits, temperature, **options), scores.softmax(-1))


def test_minus_infinity_is_probability_zero():
    logits = torch.tensor([[0.0, float("-inf"), 1.0]])
    assert softmax(logits)[0, 1] == 0
    assert warp(logits, 0.5, top_k=2)[0, 1] == 0


@given(weights, st.floats(0, 1, exclude_max=True))
@settings(derandomize=True, deadline=None)
def test_a_token_of_probability_zero_is_never_drawn(counts, uniform):
    p = floats(law(counts))
    for array in (p, torch.tensor(p), torch.tensor(p, dtype=torch.float32)):
        for u in (uniform, 0.0, 1 - 2**-53):
            assert p[inverse_cdf(array, u)] > 0


def test_inverse_cdf_draws_the_law():
    p = np.array([0.2, 0.0, 0.5, 0.3])
    grid = (np.arange(1000) + 0.5) / 1000
    counts = np.bincount([inverse_cdf(torch.tensor(p), u) for u in grid], minlength=4)
    assert counts.tolist() == [200, 0, 500, 300]


def test_what_has_no_sum_cannot_be_normalised():
    with pytest.raises(SpecdecError, match="at least one entry must be positive"):
        normalise(np.zeros(3))


def test_exact_tempering_needs_a_whole_power():
    with pytest.raises(SpecdecError, match="needs a whole 1/temperature"):
        temper(law([1, 2]), Fraction(2, 3))
