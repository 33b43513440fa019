"""Where alpha comes from: two distributions, or the rounds of a decoder.

`alpha` is Leviathan's acceptance rate (arXiv 2211.17192v2): the share of the tested draft tokens that
were accepted.  Tokens after the first rejection of a round were not tested; accepted per *drafted* is another number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from .distributions import Array, overlap
from .errors import SpecdecError
from .verify import Verifier

Number: TypeAlias = Any
"""A number, or an array (or nested sequence) of numbers."""


def checked_array(name: str, value: Number, holds: Callable[[np.ndarray], Any], wanted: str) -> np.ndarray:
    """`value` as a float64 array; an error names the first entry for which `holds` is false, and what is `wanted`."""
    try:
        array = np.asarray(value, float)
    except (TypeError, ValueError):
        raise SpecdecError(f"{name} is {value!r}: pass {wanted}") from None
    bad = ~np.asarray(holds(array), bool)  # a comparison with NaN is false, so NaN is bad everywhere
    if array.size == 0 or bad.any():
        raise SpecdecError(f"{name} is {array[bad].flat[0] if array.size else 'empty'}: pass {wanted}")
    return array


def acceptance_rates(alpha: Number, name: str = "alpha") -> np.ndarray:
    """`alpha` as an array of acceptance rates."""
    return checked_array(name, alpha, lambda a: (a >= 0) & (a <= 1), "an acceptance rate in [0, 1]")


def whole_numbers(count: Number, name: str = "gamma") -> np.ndarray:
    """`count` as an array of whole numbers >= 1."""
    array = checked_array(name, count, lambda g: (g >= 1) & (g == np.floor(g)) & (g < np.inf), "a whole number >= 1")
    return array.astype(int)


def unwrapped(array: Number) -> Any:
    """A float (or int) from an array of shape `[]`; any other array as it is."""
    array = np.asarray(array)
    return array.item() if array.ndim == 0 else array


# -- two distributions, and the rounds of a decoder -----------------------------------------------------


def acceptance_from_distributions(p: Array, q: Array, lenience: Any = 1) -> Any:
    """`alpha = E sum_x min(p(x) / l, q(x))`, the mean over the positions: Corollary 3.6, and A.5 for `l < 1`.

    Args:
        p, q: distributions of target and draft `[..., V]`: numpy, torch, or an object array of fractions.
        lenience: l in [0, 1].  1 is the lossless rule.  Below 1, a token may be emitted with probability up to
            `p(x) / l`.  0 accepts every token that the target can write.

    >>> from fractions import Fraction as F
    >>> p = np.array([F(1, 4), F(1, 6), F(5, 12), F(1, 6)])
    >>> q = np.array([F(8, 31), F(8, 31), F(8, 31), F(7, 31)])
    >>> str(acceptance_from_distributions(p, q)), str(acceptance_from_distributions(p, q, F(1, 2)))
    ('313/372', '1')
    """
    checked_array("lenience", lenience, lambda x: (x >= 0) & (x <= 1), "a number in [0, 1]")
    beta = overlap(p / lenience, q) if lenience else (q * (p > 0)).sum(-1)
    return beta.mean() if getattr(beta, "ndim", 0) else beta


def classical_rejection_rate(p: Array, q: Array) -> Any:
    """`E_{x~q} p(x) / (M q(x)) = 1 / M`, `M = max p / q`: how often classical rejection keeps a token (App. A.2).

    Never above `overlap(p, q)`, and 0 if the target can write a token that the draft cannot.  Shape `[...]`.

    >>> float(classical_rejection_rate(np.array([0.5, 0.5]), np.array([0.8, 0.2])))  # sum min(p, q) is 0.7
    0.4
    """
    p, q = np.asarray(p), np.asarray(q)
    # the smallest q / p over all tokens with p > 0; the 1 elsewhere is never smaller, since p and q both sum to 1
    return (np.where(p > 0, q, 1) / np.where(p > 0, p, 1)).min(-1)


@dataclass(frozen=True)
class AcceptanceEstimate:
    """`alpha` with an interval.

    Attributes:
        alpha: accepted / tested.
        low, high: the interval.
        accepted, tested: draft tokens; those after a rejection were not tested.
        effective: the number of independent tokens that would be as informative, at most `tested`.
    """

    alpha: float
    low: float
    high: float
    accepted: int
    tested: int
    effective: float


def acceptance_from_trace(
    accepted: Sequence[int], rejected: Sequence[int], texts: Sequence[Any] | None = None, level: float = 0.95
) -> AcceptanceEstimate:
    """`alpha = accepted / (accepted + rejected)` over rounds, with an interval that takes rounds as independent.

    The tokens of a round are not independent, so the interval is Wilson's at an *effective* number of tokens:
    the variance of the ratio estimator over n rounds, `n / (n - 1) sum_r (A_r - alpha T_r)^2 / T^2` (T_r tested,
    A_r accepted), divided by the binomial one, is the design effect (at least 1), and Student's t with `n - 1`
    degrees of freedom replaces the normal quantile (Korn and Graubard 1998; Dean and Pagano 2015).  If all or none were
    accepted, each round counts as one observation, so the interval never shrinks to a point.

    Args:
        accepted: draft tokens kept per round `[rounds]`.
        rejected: 1 for a round that rejected a tested token, else 0, `[rounds]`.
        texts: the text of each round.  Rounds of one text share its difficulty, so with `texts` the texts are taken as
            independent instead of the rounds.
        level: the confidence level, in (0, 1).

    >>> estimate = acceptance_from_trace([4, 0, 2, 4, 1, 3], [0, 1, 1, 0, 1, 1])
    >>> round(estimate.alpha, 3), round(estimate.low, 2), round(estimate.high, 2)  # 14 of 18
    (0.778, 0.47, 0.93)
    """
    from scipy.special import stdtrit

    kept, tested = _tested(accepted, rejected)
    checked_array("level", level, lambda x: (x > 0) & (x < 1), "a confidence level in (0, 1)")
    if texts is not None:
        if len(texts) != kept.size:
            raise SpecdecError(f"{len(texts)} texts for {kept.size} rounds: give the text of each round")
        _, text = np.unique(np.asarray(texts), return_inverse=True)
        kept, tested = np.bincount(text, kept), np.bincount(text, tested)
    kept, tested = kept[tested > 0], tested[tested > 0]
    units, total = tested.size, tested.sum()
    if units < 2:
        unit = "round" if texts is None else "text"
        raise SpecdecError(f"{units} {unit}(s) with a tested token: an interval needs at least 2")
    alpha = kept.sum() / total
    binomial = alpha * (1 - alpha) / total
    variance = units / (units - 1) * ((kept - alpha * tested) ** 2).sum() / total**2
    effective = total / max(1.0, variance / binomial) if binomial else float(units)
    t2 = stdtrit(units - 1, (1 + level) / 2) ** 2 / effective
    centre = (alpha + t2 / 2) / (1 + t2)
    half = np.sqrt(t2 * (alpha * (1 - alpha) + t2 / 4)) / (1 + t2)
    low, high = np.clip([centre - half, centre + half], 0, 1)
    return AcceptanceEstimate(float(alpha), float(low), float(high), int(kept.sum()), int(total), float(effective))


def _tested(accepted: Sequence[int], rejected: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Per round: accepted, and tested = accepted + rejected."""
    kept, refused = np.asarray(accepted), np.asarray(rejected)
    if kept.shape != refused.shape or kept.ndim != 1 or np.any(kept < 0) or not np.isin(refused, (0, 1)).all():
        raise SpecdecError("pass two lists of equal length: accepted >= 0 and rejected 0 or 1, one entry a round")
    if not np.any(kept + refused > 0):
        raise SpecdecError("no round tested a draft token: decode with a drafter, and more than one token")
    return kept, kept + refused


# -- what other rules would write ----------------------------------------------------------------------


def recording_verifier(
    rule: Verifier, functions: Sequence[Callable[[Array, Array, Sequence[int]], Any]], records: list[list]
) -> Verifier:
    """The same rule; in every round of a decoder it also records the value of some functions of `(p, q, x)`.

    This compares two rules on the same rounds.  Counting the tokens of two runs would add the noise of two texts.

    Args:
        rule: the rule that decodes, above temperature 0.
        functions: for example `verify.token.expected_tokens` and `verify.block.expected_tokens`.
        records: each round appends one list, with the value of each function.
    """

    def accepted(p: Array, q: Array, x: Sequence[int]) -> list:
        records.append([function(p, q, x) for function in functions])
        return rule.accepted(p, q, x)

    return replace(rule, accepted=accepted)


# -- acceptance by position ----------------------------------------------------------------------------


def acceptance_by_position(accepted: Sequence[int], rejected: Sequence[int]) -> np.ndarray:
    """`alphas[i]`: the share of the rounds that accepted draft token `i + 1`, of those that tested it.

    Arguments as in `acceptance_from_trace`.  The result ends with the last position that any round tested.

    >>> acceptance_by_position([2, 0, 1, 2], [0, 1, 1, 0]).round(3).tolist()
    [0.75, 0.667]
    """
    kept, tested = _tested(accepted, rejected)
    position = np.arange(1, tested.max() + 1)
    return (kept[:, None] >= position).sum(0) / (tested[:, None] >= position).sum(0)


def repeat_alpha(alpha: Number, gamma: int) -> np.ndarray:
    """The same acceptance at each of `gamma` draft positions: `[...]` to `alphas` `[..., gamma]`.

    >>> repeat_alpha(0.8, 3).tolist()
    [0.8, 0.8, 0.8]
    """
    a = acceptance_rates(alpha)
    return np.broadcast_to(a[..., None], (*a.shape, int(whole_numbers(gamma))))


def survival(alphas: Number) -> np.ndarray:
    """`S_i = alpha_1 ... alpha_i` for `i = 0..gamma`, `[..., gamma + 1]`: `P(n >= i)` of the accepted length n."""
    a = acceptance_rates(alphas, "alphas")
    if a.ndim == 0:
        raise SpecdecError("alphas is one number: pass one per draft position (`repeat_alpha(alpha, gamma)`)")
    return np.concatenate([np.ones((*a.shape[:-1], 1)), np.cumprod(a, -1)], -1)


def block_efficiency_by_position(alphas: Number) -> Any:
    """Expected tokens per target pass, `1 + sum_i alpha_1 ... alpha_i`; equation (1) if all are equal.

    Given `acceptance_by_position` of rounds that all drafted gamma tokens, this is exactly the mean number of tokens
    that they emitted; no independence is needed.

    >>> round(block_efficiency_by_position([0.9, 0.5]), 2)  # 1 + 0.9 + 0.45
    2.35
    """
    return unwrapped(survival(alphas).sum(-1))


def pooled_alpha(alphas: Number) -> Any:
    """Accepted over tested when the acceptance depends on the position: the alpha that goes into the theorem then.

    >>> round(pooled_alpha([0.9, 0.5]), 3)  # (0.9 + 0.45) accepted of (1 + 0.9) tested
    0.711
    """
    s = survival(alphas)
    return unwrapped(s[..., 1:].sum(-1) / s[..., :-1].sum(-1))
