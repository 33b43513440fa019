"""Where alpha comes from: laws, coins, and the rounds of a decoder with tokens that are not independent.

Simulations are seeded and pass within 4 standard errors (level 6e-5).
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_lib.acceptance import (
    acceptance_by_position,
    acceptance_from_distributions,
    acceptance_from_trace,
    block_efficiency_by_position,
    classical_rejection_rate,
    pooled_alpha,
)
from specdec_lib.distributions import overlap
from specdec_lib.exact import Draft, accepted_law, random_pair
from specdec_lib.exact.models import stacked
from specdec_lib.verify import block, token


def standard_errors(sample: np.ndarray, predicted: float) -> float:
    return abs(sample.mean() - predicted) / (sample.std(ddof=1) / math.sqrt(sample.size))


def random_distributions(seed: int, positions: int = 20, vocabulary: int = 5) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.dirichlet(np.ones(vocabulary), positions), random.dirichlet(np.ones(vocabulary), positions)


def test_acceptance_from_distributions_is_what_coins_give():
    p, q = random_distributions(0)
    random = np.random.default_rng(1)
    position = random.integers(len(p), size=40_000)
    drafts = (random.random(40_000)[:, None] > q.cumsum(-1)[position]).sum(1)
    for lenience in (1.0, 0.5):
        ratio = p[position, drafts] / (lenience * q[position, drafts])
        kept = random.random(40_000) < ratio
        assert standard_errors(kept, acceptance_from_distributions(p, q, lenience)) < 4
    assert standard_errors(kept, acceptance_from_distributions(p, q)) > 4  # lenience changes alpha


def test_acceptance_from_distributions_takes_torch_and_ends_at_lenience_zero():
    import torch

    p, q = random_distributions(2)
    assert float(acceptance_from_distributions(torch.tensor(p), torch.tensor(q), 0.5)) == pytest.approx(
        acceptance_from_distributions(p, q, 0.5)
    )
    p[:, 0] = 0
    assert acceptance_from_distributions(p, q, 0) == pytest.approx(1 - q[:, 0].mean())
    assert acceptance_from_distributions(p, q, 1e-12) == pytest.approx(acceptance_from_distributions(p, q, 0))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10_000))
def test_classical_rejection_keeps_less(seed):
    p, q = random_distributions(seed, positions=1)
    rate = classical_rejection_rate(p, q)[0]
    bound = (p / q).max()
    assert rate == pytest.approx((q * p / (bound * q)).sum())
    assert rate <= overlap(p, q)[0] + 1e-12


def test_classical_rejection_needs_the_support():
    assert classical_rejection_rate(np.array([0.5, 0.5]), np.array([1.0, 0.0])) == 0
    assert classical_rejection_rate(np.array([1.0, 0.0]), np.array([0.25, 0.75])) == 0.25


def pooled_truth(alphas: np.ndarray, gamma: int) -> float:
    """Expected accepted over expected tested tokens when each entry of `alphas` is as likely."""
    powers = alphas[:, None] ** np.arange(gamma + 1)
    return powers[:, 1:].sum() / powers[:, :-1].sum()


def coverage(alphas, gamma, texts, rounds, with_texts, repetitions=300):
    """Share of 95 % intervals that hold the truth: by the library, by rounds, by tokens taken as independent.

    Each text draws one of `alphas` and keeps it for all its rounds.
    """
    random = np.random.default_rng(3)
    truth = pooled_truth(alphas, gamma)
    hits = np.zeros(3)
    for _ in range(repetitions):
        own = np.repeat(random.choice(alphas, texts), rounds)
        accepted = np.cumprod(random.random((own.size, gamma)) < own[:, None], axis=1).sum(1)
        rejected = (accepted < gamma).astype(int)
        labels = np.repeat(np.arange(texts), rounds)
        ours = acceptance_from_trace(accepted, rejected, labels if with_texts else None)
        by_round = acceptance_from_trace(accepted, rejected)
        half = 1.96 * math.sqrt(ours.alpha * (1 - ours.alpha) / ours.tested)
        hits += [
            ours.low <= truth <= ours.high,
            by_round.low <= truth <= by_round.high,
            ours.alpha - half <= truth <= ours.alpha + half,
        ]
    return hits / repetitions


def test_interval_covers_when_the_tokens_of_a_round_are_dependent():
    ours, _, tokens = coverage(np.array([0.1, 0.97]), gamma=12, texts=60, rounds=1, with_texts=False)
    assert 0.92 <= ours <= 0.98  # 300 repetitions at 0.95 have a standard error of 0.0126
    assert tokens < 0.90  # 4 standard errors below 0.95


def test_interval_covers_when_the_rounds_of_a_text_are_dependent():
    ours, rounds, tokens = coverage(np.linspace(0.4, 0.95, 12), gamma=5, texts=30, rounds=12, with_texts=True)
    assert 0.92 <= ours <= 0.98
    assert rounds < 0.85
    assert tokens < 0.85


def test_interval_covers_independent_tokens_and_never_shrinks_to_a_point():
    ours, _, _ = coverage(np.array([0.8]), gamma=5, texts=40, rounds=1, with_texts=False)
    assert 0.92 <= ours <= 0.99
    perfect = acceptance_from_trace([5] * 40, [0] * 40)
    assert (perfect.alpha, perfect.high, perfect.effective) == (1, 1, 40)
    assert 0.85 < perfect.low < 0.95
    nothing = acceptance_from_trace([0] * 40, [1] * 40)
    assert (nothing.alpha, nothing.low) == (0, 0)
    assert 0.05 < nothing.high < 0.15
    assert acceptance_from_trace([5, 0, 3], [0, 0, 1]).tested == 9  # a round that tested nothing says nothing


def test_acceptance_by_position_gives_back_the_emitted_tokens():
    accepted = np.array([0, 3, 1, 3, 2, 0, 3])
    alphas = acceptance_by_position(accepted, (accepted < 3).astype(int))
    assert alphas.tolist() == [5 / 7, 4 / 5, 3 / 4]
    assert block_efficiency_by_position(alphas) == pytest.approx(1 + accepted.mean())
    pooled = acceptance_from_trace(accepted, (accepted < 3).astype(int)).alpha
    assert pooled_alpha(alphas) == pytest.approx(pooled) == pytest.approx(12 / 16)


@pytest.mark.parametrize("kind", ["stochastic", "partial"])
def test_expected_tokens_average_to_the_exact_law_over_drafts(kind):
    target, small = random_pair(kind, 3, 2)
    rules = {"token": token, "block": block}
    found = {name: 0 for name in rules}
    for weight, x, q in Draft(small, small).blocks((), 3):
        p = stacked([target.law(x[:i]) for i in range(4)])
        for name, rule in rules.items():
            found[name] += weight * rule.expected_tokens(p, q, x)
    for name, tokens in found.items():
        assert tokens == 1 + sum(n * chance for n, chance in enumerate(accepted_law(name, target, small, 3)))
    assert found["block"] > found["token"]
