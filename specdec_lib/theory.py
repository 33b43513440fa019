"""The runtime analysis: what a draft gains, what it costs, and the terms that the theorem leaves out.

Letters of Leviathan, Kalman, Matias (arXiv 2211.17192v2): `alpha` is the acceptance rate, `gamma` the number of
draft tokens a round.  The unit of time is *one target pass over one position*; so `cost_coefficient` (c) is the
time of one draft pass, `v(n)` the time of a target pass over `n` positions, and prefill is counted in target
passes.  What a decoder adds to a pass (sampling, the rule, bookkeeping) is part of the pass that is timed.

* *Plain* functions take numbers or arrays `alpha`, `gamma`, `cost_coefficient` and broadcast them.
* *Extended* functions take `alphas` `[..., gamma]`: the chance that draft token `i` is accepted once the `i - 1`
  before it were.  Leading axes are texts, or any other batch, and broadcast with the other arguments.
* `verification_cost` is a number (any pass over two or more positions; one position costs 1), a table whose entry
  `n - 1` is `v(n)`, or a function of `n`.

Numbers give a float, arrays a float64 array.  `SpecdecError` is raised on an alpha outside [0, 1] (or NaN), a
negative cost, a gamma that is not a whole number >= 1.  Derived in `notebooks/05_cost_of_a_round`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .acceptance import (
    Number,
    acceptance_rates,
    block_efficiency_by_position,
    checked_array,
    pooled_alpha,
    repeat_alpha,
    survival,
    unwrapped,
    whole_numbers,
)
from .errors import SpecdecError


def _cost(cost: Number, name: str = "cost_coefficient") -> np.ndarray:
    return checked_array(name, cost, lambda a: (a >= 0) & (a < np.inf), "a finite number >= 0")


def verification_time(verification_cost: Any, positions: Number) -> np.ndarray:
    """`v(n)` for each entry of `positions`, in target passes over one position.

    >>> verification_time(1.2, [1, 2, 3]).tolist(), verification_time([1.0, 1.1, 1.3], 3).tolist()
    ([1.0, 1.2, 1.2], 1.3)
    """
    n = whole_numbers(positions, "the number of positions")
    if callable(verification_cost):
        times = np.vectorize(verification_cost, otypes=[float])(n)
    elif np.ndim(verification_cost) == 0:
        times = np.where(
            n == 1, 1.0, checked_array("verification_cost", verification_cost, np.isfinite, "a number > 0")
        )
    else:
        table = checked_array("verification_cost", verification_cost, np.isfinite, "v(1), v(2), ..., v(gamma + 1)")
        if table.ndim != 1 or n.max() > table.size:
            raise SpecdecError(
                f"v({n.max()}) is needed, verification_cost has shape {table.shape}: pass v(1), v(2), ..."
            )
        if abs(table[0] - 1) > 0.05:
            raise SpecdecError(f"v(1) is {table[0]} in verification_cost, not 1: divide by the time of one position")
        times = table[n - 1]
    return checked_array("verification_cost", times, lambda v: (v > 0) & (v < np.inf), "finite times > 0")


# -- the theorem and its neighbours --------------------------------------------------------------------


def block_efficiency(alpha: Number, gamma: Number) -> Any:
    """Expected tokens per target pass, `(1 - alpha^(gamma+1)) / (1 - alpha)`: equation (1).

    Counts the correction or bonus token, so it runs from 1 (alpha = 0) to `gamma + 1` (alpha = 1).

    >>> round(block_efficiency(0.8, 5), 2), block_efficiency([0.0, 1.0], 7).tolist()
    (3.69, [1.0, 8.0])
    """
    a, g = np.broadcast_arrays(acceptance_rates(alpha), whole_numbers(gamma))
    certain = a == 1
    other = np.where(certain, 0.5, a)
    with np.errstate(divide="ignore"):  # log 0 = -inf is the right limit; expm1 keeps the digits near alpha = 1
        tokens = -np.expm1((g + 1) * np.log(other)) / (1 - other)
    return unwrapped(np.where(certain, g + 1.0, tokens))


def improvement_factor(alpha: Number, gamma: Number, cost_coefficient: Number = 0, verification_cost: Any = 1.0) -> Any:
    """Expected speed against plain decoding, `block_efficiency / (gamma c + v(gamma + 1))`.

    With `v = 1` it is Theorem 3.8.  It assumes long texts; `extended_improvement_factor` does not.

    >>> improvement_factor([0.6, 0.7, 0.9], [2, 3, 10]).round(2).tolist()  # Table 1
    [1.96, 2.53, 6.86]
    >>> round(improvement_factor(0.75, 7, 0.02), 1)  # Table 4: T5-small, EnDe, T = 0
    3.2
    """
    time = whole_numbers(gamma) * _cost(cost_coefficient) + verification_time(
        verification_cost, whole_numbers(gamma) + 1
    )
    return unwrapped(block_efficiency(alpha, gamma) / time)


def operations_factor(alpha: Number, gamma: Number, operations_coefficient: Number = 0.0) -> Any:
    """Expected growth of arithmetic operations, `(gamma c^ + gamma + 1) / block_efficiency`: Theorem 3.11.

    `operations_coefficient` (c^) is the draft's operations per token relative to the target's (Definition 3.10).

    >>> operations_factor([0.6, 0.7, 0.9], [2, 3, 10]).round(2).tolist()  # Table 1
    [1.53, 1.58, 1.6]
    """
    spent = whole_numbers(gamma) * _cost(operations_coefficient, "operations_coefficient") + whole_numbers(gamma) + 1
    return unwrapped(spent / block_efficiency(alpha, gamma))


def drafting_helps(alpha: Number, cost_coefficient: Number) -> Any:
    """Whether some `gamma` makes Theorem 3.8 exceed 1: exactly when `alpha > c`.

    Corollary 3.9 states "if".  "Only if" holds too: at `alpha <= c` a draft of gamma tokens costs `gamma c` and
    brings `alpha + ... + alpha^gamma <= gamma alpha`.

    >>> drafting_helps([0.05, 0.2], 0.1).tolist()
    [False, True]
    """
    return unwrapped(acceptance_rates(alpha) > _cost(cost_coefficient))


def improvement_lower_bound(alpha: Number, cost_coefficient: Number) -> Any:
    """`(1 + alpha) / (1 + c)`: what gamma = 1 gives, hence no more than the best gamma gives (Corollary 3.9).

    >>> improvement_lower_bound(0.5, 0.0), round(improvement_lower_bound(0.75, 0.02), 2)
    (1.5, 1.72)
    """
    return unwrapped((1 + acceptance_rates(alpha)) / (1 + _cost(cost_coefficient)))


def oracle_block_efficiency(alpha: Number) -> Any:
    """`1 / (1 - alpha)`: tokens per target pass when an oracle ends each draft where it fails (section 3.5).

    >>> oracle_block_efficiency([0.2, 0.8, 1.0]).round(2).tolist()  # 0.2: the bigram of section 3.6
    [1.25, 5.0, inf]
    """
    return oracle_improvement_factor(alpha, 0.0)


def oracle_improvement_factor(alpha: Number, cost_coefficient: Number) -> Any:
    """`1 / (1 - alpha + c alpha)`: the oracle's speed if it pays for the `alpha / (1 - alpha)` tokens that it keeps.

    For `c <= 1` no fixed gamma does better.  The paper states a gain over the best fixed gamma of up to about 60 %;
    with this cost it is at most 55 % on the grid of Figure 3, continued to alpha = 0.95:

    >>> best = improvement_factor(0.95, optimal_gamma(0.95, 0.05), 0.05)
    >>> round(oracle_improvement_factor(0.95, 0.05) / best - 1, 3)
    0.554
    """
    a = acceptance_rates(alpha)
    with np.errstate(divide="ignore", over="ignore"):
        return unwrapped(np.divide(1.0, (1 - a) + _cost(cost_coefficient) * a))


def optimal_gamma(
    alpha: Number, cost_coefficient: Number, verification_cost: Any = 1.0, longest: int | None = None
) -> Any:
    """The draft length with the largest `improvement_factor`, exactly; 0 if none beats plain decoding.

    If `v` is a number, one more draft token pays while its acceptance probability exceeds its cost at the current
    speed, `alpha^(gamma+1) > c * factor(gamma)`.  The left side falls, and once it is smaller it stays smaller.  So the
    first gamma that fails this test is the maximiser.  At c = 0, or at alpha = 1 with `c < v`, every gamma passes: give
    `longest` there.  A table bounds the search by its length; for a function `v` give `longest`.  Both are searched
    completely, because their factor may have several maxima.

    >>> optimal_gamma(0.9, [0.01, 0.02, 0.05, 0.1]).tolist()  # Figure 3, right end
    [24, 19, 13, 10]
    >>> optimal_gamma(0.5, [0.01, 0.02, 0.05, 0.1]).tolist(), optimal_gamma(0.05, 0.1)  # left end; not worth it
    ([5, 4, 3, 2], 0)
    """
    a, c = np.broadcast_arrays(acceptance_rates(alpha), _cost(cost_coefficient))
    limit = np.inf if longest is None else int(whole_numbers(longest, "longest"))
    if not callable(verification_cost) and np.ndim(verification_cost) == 0:
        v = float(verification_time(verification_cost, 2))
        if longest is None and np.any(((c == 0) & (a > 0)) | ((a == 1) & (c < v))):
            raise SpecdecError("no draft length is the best at cost_coefficient 0 or alpha 1: give the longest allowed")
        pays = lambda g: (a ** (g + 1.0) > c * improvement_factor(a, g, c, v)) & (g < limit)  # noqa: E731
        gamma = _first_that_fails(pays, a.shape)
    else:
        limit = min(limit, np.inf if callable(verification_cost) else np.size(verification_cost) - 1)
        if limit == np.inf:
            raise SpecdecError("verification_cost is a function, which sets no longest draft: give longest")
        candidates = np.arange(1, int(whole_numbers(limit, "the longest draft that verification_cost covers")) + 1)
        gamma = 1 + np.argmax(improvement_factor(a[..., None], candidates, c[..., None], verification_cost), -1)
    return unwrapped(np.where(improvement_factor(a, gamma, c, verification_cost) > 1, gamma, 0))


def _first_that_fails(holds: Callable[[np.ndarray], np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """For each entry the first whole number >= 1 for which `holds` is false; it is false for all larger ones, too.

    >>> _first_that_fails(lambda n: n < [3, 1, 1_000_000], (3,)).tolist()
    [3, 1, 1000000]
    """
    low, high = (
        np.zeros(shape, int),
        np.ones(shape, int),
    )  # it holds at `low` (or `low` is 0); `high` grows until it fails
    while np.any(more := holds(high)):
        low, high = np.where(more, high, low), np.where(more, 2 * high, high)
    while np.any(high - low > 1):
        middle = np.where(high - low > 1, (low + high) // 2, high)
        held = holds(middle)
        low, high = np.where(held, middle, low), np.where(held, high, middle)
    return high


# -- what the theorem leaves out -----------------------------------------------------------------------


def _round_costs(alphas: Number, cost_coefficient: Number, verification_cost: Any) -> np.ndarray:
    """`[..., gamma + 1]`: the time of a round that drafts `g = 0..gamma` tokens, `g c + v(g + 1)`."""
    drafts = np.arange(survival(alphas).shape[-1])
    return _cost(cost_coefficient)[..., None] * drafts + verification_time(verification_cost, drafts + 1)


def _expected_total(alphas: Number, costs: np.ndarray, tokens: Number) -> Any:
    """E(tokens), where E(n) is the expected sum of `costs[..., g]` over the rounds that write n tokens.

    With n tokens left a round drafts `g = min(gamma, n - 1)`, since the correction or bonus token comes on top; with
    probability `P(k)` it writes k tokens and leaves `n - k`: `E(n) = costs(g) + sum_{k=1}^{g+1} P(k) E(n - k)`.
    """
    s, wanted = survival(alphas), whole_numbers(tokens, "tokens")
    totals = np.zeros((*np.broadcast_shapes(s.shape[:-1], costs.shape[:-1]), wanted.max() + 1))
    for n in range(1, totals.shape[-1]):
        g = min(s.shape[-1] - 1, n - 1)
        probs = s[..., : g + 1].copy()  # P(k) = S_{k-1} - S_k, and P(g + 1) = S_g
        probs[..., :-1] -= s[..., 1 : g + 1]
        totals[..., n] = costs[..., g] + (probs * totals[..., n - 1 - g : n][..., ::-1]).sum(-1)
    shape = np.broadcast_shapes(totals.shape[:-1], wanted.shape)
    totals = np.broadcast_to(totals, (*shape, totals.shape[-1]))
    return unwrapped(np.take_along_axis(totals, np.broadcast_to(wanted, shape)[..., None], -1)[..., 0])


def expected_rounds(alphas: Number, tokens: Number) -> Any:
    """Expected number of target passes to write exactly `tokens` tokens; the last drafts are cut to what is left.

    Exact, by a recursion over the tokens left.  Assumes independent acceptances, equal or not.  At alpha = 1 it is
    `ceil(tokens / (gamma + 1))`, at alpha = 0 it is `tokens`.

    >>> expected_rounds([0.5], [1, 2, 3]).tolist()  # E(2) = 1 + 0.5 E(1), E(3) = 1 + 0.5 E(2) + 0.5 E(1)
    [1.0, 1.5, 2.25]
    """
    return _expected_total(alphas, np.ones(survival(alphas).shape[-1]), tokens)


def expected_time(alphas: Number, tokens: Number, cost_coefficient: Number, verification_cost: Any = 1.0) -> Any:
    """Expected time, in target passes, to write exactly `tokens` tokens with drafts; without prefill.

    Plain decoding takes `tokens`.  For several texts add the times, not the ratios.

    >>> expected_time([0.5], 2, 0.1)  # a round with one draft token, then with 0.5 a round without one
    1.6
    """
    return _expected_total(alphas, _round_costs(alphas, cost_coefficient, verification_cost), tokens)


def extended_improvement_factor(
    alphas: Number,
    cost_coefficient: Number,
    verification_cost: Any = 1.0,
    tokens: Number | None = None,
    prefill_target: Number = 0.0,
    prefill_draft: Number = 0.0,
) -> Any:
    """Theorem 3.8 with `v(n)`, acceptance by position, finite length and prefill.

    `(P_target + N) / (P_target + P_draft + expected_time(N))`, and for `tokens=None` its limit for long texts,
    `block_efficiency_by_position / (gamma c + v(gamma + 1))`.

    Args:
        tokens: N >= 1, new tokens written by rounds: one less if the decoder's prefill yields the first token.
        prefill_target, prefill_draft: time before the first round, in target passes.  Add a loading time here, divided
            among the texts that it serves.

    >>> alphas = repeat_alpha(0.75, 7)
    >>> round(extended_improvement_factor(alphas, 0.02), 2)
    3.16
    >>> extended_improvement_factor(alphas, 0.02, 1.0, [8, 32, 128], prefill_target=4, prefill_draft=1).round(2)
    array([1.5 , 2.3 , 2.87])
    """
    if tokens is None:
        time = _round_costs(alphas, cost_coefficient, verification_cost)[..., -1]
        return unwrapped(block_efficiency_by_position(alphas) / time)
    before, extra = _cost(prefill_target, "prefill_target"), _cost(prefill_draft, "prefill_draft")
    drafted = before + extra + expected_time(alphas, tokens, cost_coefficient, verification_cost)
    return unwrapped((before + whole_numbers(tokens, "tokens")) / drafted)


def extended_optimal_gamma(
    alphas: Number, cost_coefficient: Number, verification_cost: Any = 1.0, **finite_terms: Any
) -> Any:
    """The draft length with the largest `extended_improvement_factor`; 0 if none beats plain decoding.

    All of `1..alphas.shape[-1]` are tried: `alphas` says nothing about longer drafts, and a draft of `tokens` or more
    is cut anyway.  `finite_terms`: `tokens` and the prefills, as in `extended_improvement_factor`.

    >>> alphas = repeat_alpha(0.8, 20)
    >>> extended_optimal_gamma(alphas, 0.05), extended_optimal_gamma(alphas, 0.05, tokens=6)
    (8, 5)
    >>> extended_optimal_gamma(alphas, 0.05, lambda n: 1 + 0.1 * (n - 1))  # verification is not free
    5
    """
    lengths = range(1, survival(alphas).shape[-1])
    a = np.asarray(alphas, float)
    factors = [
        extended_improvement_factor(a[..., :g], cost_coefficient, verification_cost, **finite_terms) for g in lengths
    ]
    table = np.stack([np.ones(np.shape(factors[0])), *map(np.asarray, factors)], -1)
    return unwrapped(np.argmax(table, -1))


def break_even_tokens(
    alphas: Number, cost_coefficient: Number, verification_cost: Any = 1.0, prefill_draft: Number = 0.0
) -> Any:
    """The number of new tokens from which on drafting pays for the draft's prefill and loading.

    None, or infinity in arrays, if it does not within 4096 tokens.  The target's own prefill is paid either way.

    >>> alphas = repeat_alpha(0.75, 7)
    >>> break_even_tokens(alphas, 0.02, prefill_draft=10.0), break_even_tokens(alphas, [0.02, 0.5, 2.0])
    (16, array([ 2., inf, inf]))
    """
    n = np.arange(1, 4097)
    survival(alphas)  # checks them
    per_length = np.asarray(alphas, float)[..., None, :], n, _cost(cost_coefficient)[..., None]
    times = expected_time(*per_length, verification_cost) + _cost(prefill_draft, "prefill_draft")[..., None]
    last_loss = np.where(times >= n, n, 0).max(-1)
    found = np.where(last_loss < 4096, last_loss + 1.0, np.inf)
    if found.ndim:
        return found
    return int(found) if found < np.inf else None


def batch_improvement_factor(alphas: Number, cost_coefficient: Number, verification_cost: Any = 1.0) -> Any:
    """Throughput of a batch whose rows accept independently: `mean_b block_efficiency_b / (gamma c + v(gamma+1))`.

    All rows share the time of a round.  c and v are measured at this batch size, against one plain step of the batch.

    Args:
        alphas: `[..., B, gamma]`, one row for each text of the batch.

    >>> round(batch_improvement_factor([[0.9, 0.9], [0.1, 0.1]], 0.05), 2)  # (2.71 + 1.11) / 2 / 1.1
    1.74
    """
    if np.ndim(alphas) < 2:
        raise SpecdecError("alphas must be [batch, gamma]: one row per text")
    time = _round_costs(alphas, cost_coefficient, verification_cost)[..., -1]
    return unwrapped(np.mean(block_efficiency_by_position(alphas), -1) / time)


def roofline_verification_cost(positions: Number, critical_positions: Number, batch: Number = 1) -> Any:
    """`v(n)` when a pass takes the longer of reading the weights and computing: `max(1, nB/n*) / max(1, B/n*)`.

    `critical_positions` (n*) is the number of positions for which both take equally long: (bytes of weights /
    bandwidth) / (operations per position / arithmetic rate).  Up to n* positions in all rows together, verification is
    free.

    >>> roofline_verification_cost([1, 6, 12], 8), roofline_verification_cost(6, 8, batch=16)
    (array([1. , 1. , 1.5]), 6.0)
    """
    n, b = whole_numbers(positions, "positions"), whole_numbers(batch, "batch")
    critical = checked_array("critical_positions", critical_positions, lambda x: x > 0, "a number > 0")
    return unwrapped(np.maximum(1, n * b / critical) / np.maximum(1, b / critical))


@dataclass(frozen=True)
class Prediction:
    """The prediction of the theorem and of the extended model.

    Attributes:
        gamma: draft length.
        alpha: the acceptance rate that the theorem was given; pooled if it was measured by position.
        block_efficiency, extended_block_efficiency: expected tokens per target pass, in each of the two models.
        factors: the improvement factor as the terms are added one by one, "theorem" first.
    """

    gamma: int
    alpha: float
    block_efficiency: float
    extended_block_efficiency: float
    factors: dict[str, float]

    @property
    def theorem(self) -> float:
        """Theorem 3.8."""
        return self.factors["theorem"]

    @property
    def extended(self) -> float:
        """All terms together."""
        return list(self.factors.values())[-1]


def predict(
    alpha: Number,
    gamma: int,
    cost_coefficient: float,
    verification_cost: Any = 1.0,
    tokens: int | None = None,
    prefill_target: float = 0.0,
    prefill_draft: float = 0.0,
) -> Prediction:
    """Predicted speed for one measured setting, by the theorem and by the extended model.

    Args:
        alpha: a number, or `[>= gamma]` by draft position (the first `gamma` are used).
        others: as in `extended_improvement_factor`; without `tokens` a long text is assumed.

    >>> p = predict([0.7, 0.8, 0.9], 3, 0.05, [1.0, 1.1, 1.15, 1.2], tokens=32, prefill_target=3, prefill_draft=1)
    >>> {name: round(factor, 2) for name, factor in p.factors.items()}  # doctest: +NORMALIZE_WHITESPACE
    {'theorem': 2.49, 'verification cost': 2.12, 'acceptance by position': 2.05, 'last rounds': 2.0, 'prefill': 1.75}
    """
    length = int(whole_numbers(gamma))
    alphas = repeat_alpha(alpha, length) if np.ndim(alpha) == 0 else acceptance_rates(alpha)[:length]
    if alphas.shape != (length,):
        raise SpecdecError(f"alpha has shape {np.shape(alpha)}, gamma is {length}: pass a number or one per position")
    mean = pooled_alpha(alphas)
    costs = (cost_coefficient, verification_cost)
    factors = {
        "theorem": improvement_factor(mean, length, cost_coefficient),
        "verification cost": improvement_factor(mean, length, *costs),
        "acceptance by position": extended_improvement_factor(alphas, *costs),
    }
    if tokens is not None:
        factors["last rounds"] = extended_improvement_factor(alphas, *costs, tokens)
        factors["prefill"] = extended_improvement_factor(alphas, *costs, tokens, prefill_target, prefill_draft)
    extended = block_efficiency_by_position(alphas) if tokens is None else tokens / expected_rounds(alphas, tokens)
    return Prediction(length, mean, block_efficiency(mean, length), extended, factors)
