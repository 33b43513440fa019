"""Rules that change the output on purpose, each with the distribution that it really samples from.

A function of the parameter makes the rule, which is a verifier like any other:

| rule | distribution of the output |
|---|---|
| `lenience(l)` | no token above `p(x) / l`; the rest depends on a residual that the paper leaves open |
| `lenience_greedy(l)` | temperature 0: one text, each token with at least `l` times the largest probability |
| `ensemble(w)`, `ensemble(w, bonus="none")` | exactly the mixture `w p + (1 - w) q` |
| `ensemble(w, bonus="target")` | the mixture at drafted positions, `p` at the bonus: depends on where blocks end |
| `typical()` | no closed form: it depends on what was drafted |

Each rule decides about one draft token at a time, so it is two functions of the distributions at one position: the
probability that a token is kept, and the distribution that replaces a rejected one.  The verifier and the distribution
of the written token (`LossyVerifier.law`) follow from these two.

A relaxed rule has a price.  At a drafted position a kept token is the written token, so with `v` the distribution of
the written token

    acceptance  <=  overlap(v, q)  <=  overlap(p, q) + TV(p, v):

the gain in acceptance over the exact rule is at most the total variation from the target.  `ensemble`, and `lenience`
with the residual `"p-q"`, reach this bound; for the others the total variation is larger.

Derived in `notebooks/11_lossy_on_purpose`; `tests/test_verify.py` computes each distribution in fractions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..distributions import Array, is_torch, joined, maximum, one_hot, residual, stacked, total, where
from ..errors import SpecdecError
from . import Verifier
from .token import acceptance_prob, count_probs, gather_probs, next_draft_probs, take_row, to_scalar

RESIDUALS = ("p-q", "p-lq")
BONUSES = ("mixture", "target", "none")


@dataclass(frozen=True)
class LossyVerifier(Verifier):
    """A rule that decides token by token, with its two functions at one drafted position.

    Attributes:
        keeps: `(p, q) -> [V]`, the probability of keeping each token, from the two distributions `[V]` at its position.
        replaces: `(p, q) -> [V]`, the distribution of the token that replaces a rejected one.
    """

    keeps: Callable[[Array, Array], Array]
    replaces: Callable[[Array, Array], Array]

    def acceptance(self, p: Array, q: Array) -> Any:
        """The probability that a draft token is kept, `sum_x q(x) a(x)`."""
        return to_scalar((q * self.keeps(p, q)).sum(-1))

    def law(self, p: Array, q: Array) -> Array:
        """The distribution `[V]` of the token that is written at a drafted position: `q a + (1 - sum q a) r`.

        >>> rule = lenience(0.5)
        >>> rule.law(np.array([0.25, 0.75]), np.array([0.75, 0.25])).tolist()
        [0.5, 0.5]
        """
        kept = q * self.keeps(p, q)
        return kept + (1 - kept.sum(-1)) * self.replaces(p, q)


def in_order(kept: Callable[[Array, Array, Sequence[int]], Array]) -> Callable[[Array, Array, Sequence[int]], Any]:
    """The `accepted` of a rule that keeps draft token i with probability `kept(p, q, x)[i]`, given those before it."""
    return lambda p, q, x: count_probs(kept(p, q, x))


def token_by_token(keeps: Callable[[Array, Array], Array]) -> Callable[[Array, Array, Sequence[int]], Any]:
    """The `accepted` of a rule from its keeping probabilities at each position, `(p [g, V], q [g, V]) -> [g, V]`."""
    return in_order(lambda p, q, x: gather_probs(keeps(p[: len(x)], q[: len(x)]), x))


def if_else(condition: Any, a: Array, b: Array) -> Array:
    """`a` if the condition holds, else `b`; if the condition is a tensor, without waiting for it."""
    return where(condition, a, b) if is_torch(condition) else a if condition else b


def point_mass(token: Any, like: Array) -> Array:
    """The point mass `[V]` on a token."""
    if is_torch(like) and not is_torch(token):
        token = like.new_tensor(token).long()
    return one_hot(token, like)


def argmax_mass(p: Array) -> Array:
    """The point mass on the most probable token."""
    return one_hot(p.argmax(-1), p)


# -- lenience ------------------------------------------------------------------------------------------


def check_lenience(l: Any) -> None:  # noqa: E741
    if not 0 < l <= 1:
        raise SpecdecError(f"lenience must be in (0, 1], got {l}: 1 is the exact rule, smaller is more lenient")


def lenience(l: Any, residual_of: str = "p-q") -> LossyVerifier:  # noqa: E741
    """Keep a draft token with `min(1, p(x) / (l q(x)))`: Leviathan et al., appendix A.5.

    No token is emitted with probability above `p(x) / l`.  The paper does not say which distribution replaces a
    rejected token.  Two readings respect the bound, and they give different output distributions:

    * `"p-q"`: `max(p - q, 0)`, the residual of the exact rule.  The total variation from the target equals the gain in
      acceptance, which is the least that any rule can reach;
    * `"p-lq"`: `max(p - l q, 0)`, the residual of the comparison that was made.  It adds mass to tokens that were
      drafted too often already, and is farther from the target at the same acceptance.

    Args:
        l: lenience in (0, 1]; 1 is the token rule.
        residual_of: one of `RESIDUALS`.

    >>> lenience(0.5).accepted(np.array([[0.25, 0.75]] * 2), np.array([[0.75, 0.25]]), [0])[1].__round__(3)
    0.667
    """
    check_lenience(l)
    if residual_of not in RESIDUALS:
        raise SpecdecError(f"unknown residual {residual_of!r} for lenience: use one of {', '.join(RESIDUALS)}")
    scale = l if residual_of == "p-lq" else 1

    def keeps(p: Array, q: Array) -> Array:
        return acceptance_prob(p, l * q)

    def replaces(p: Array, q: Array) -> Array:
        return residual(p, scale * q)

    def correction(p: Array, q: Array, x: Sequence[int], n: Any) -> Array:
        return replaces(take_row(p, n), next_draft_probs(p, q, x, n))

    return LossyVerifier(
        name=f"lenience({l}, {residual_of})",
        accepted=token_by_token(keeps),
        correction=correction,
        lossless=l == 1,
        source="Leviathan et al., arXiv 2211.17192, appendix A.5",
        keeps=keeps,
        replaces=replaces,
        on_device=True,
    )


def lenience_greedy(l: Any) -> LossyVerifier:  # noqa: E741
    """For greedy texts: keep a draft token while `p(x) >= l max p`; correct with the target's best token.

    `p` is the target's distribution at temperature 1; with a point mass as `p`, every `l` is the greedy rule.  The
    paper prints `<=`, under which `l = 1` would accept everything; its own table (alpha = 0.75 at `l = 1`) needs `>=`
    (Leviathan et al., appendix A.5).

    >>> p = np.array([[0.4, 0.6], [0.1, 0.9], [0.5, 0.5]])
    >>> lenience_greedy(0.5).accepted(p, p[:2], [0, 0])
    [0, 1, 0]
    """
    check_lenience(l)

    def keeps(p: Array, q: Array) -> Array:
        if l == 1:
            return argmax_mass(p)  # the first of equal maxima, as in greedy decoding
        return 1 * (p >= l * maximum(p))

    source = "Leviathan et al., arXiv 2211.17192, appendix A.5"
    return corrected_by_argmax(f"lenience_greedy({l})", keeps, l == 1, source, at_zero=True)


def corrected_by_argmax(
    name: str,
    keeps: Callable[[Array, Array], Array],
    lossless: bool,
    source: str,
    at_zero: bool = False,
) -> LossyVerifier:
    """A rule whose next token, after a rejection or a whole draft, is the target's most probable one."""

    def replaces(p: Array, q: Array) -> Array:
        return argmax_mass(p)

    def correction(p: Array, q: Array, x: Sequence[int], n: Any) -> Array:
        return argmax_mass(take_row(p, n))

    accepted = token_by_token(keeps)
    return LossyVerifier(
        name,
        accepted,
        correction,
        lossless,
        source,
        keeps,
        replaces,
        greedy_from_target_probs=at_zero,
        on_device=at_zero,
    )


# -- ensemble ------------------------------------------------------------------------------------------


def ensemble(w: Any, bonus: str = "mixture") -> LossyVerifier:
    """Verify against the mixture `v = w p + (1 - w) q`: DIVERSE, arXiv 2604.07622.

    A draft token is kept with `min(1, v(x) / q(x))`, which is `1 - w + w p(x) / q(x)` up to 1; the residual
    `max(v - q, 0)` is `w max(p - q, 0)`, the usual residual after normalisation.

    * `bonus="mixture"`: the token after the draft is drawn from `v`, too.  The output distribution is exactly that of
      the model `v`, at total variation `(1 - w) TV(p, q)` per token.  `q` must have `g + 1` rows: the draft's
      distribution at one more position.
    * `bonus="none"`: the same output distribution without that row.  A round ends with its last draft token, kept (it
      counts as the token that follows) or replaced, so it writes at most `g` tokens.  A round without a draft has no
      mixture; its token is drawn from the target.
    * `bonus="target"`: that token is drawn from `p`, as `transformers` does with `assistant_ensemble_weight`
      (transformers issue 45865).  The output distribution is neither p nor v, and changes with gamma.

    Args:
        w: weight of the target in [0, 1]; 1 is the token rule.
        bonus: one of `BONUSES`.

    >>> p, q = np.array([[0.25, 0.75]] * 2), np.array([[0.5, 0.5]] * 2)
    >>> ensemble(0.5).accepted(p, q, [0])
    [0.25, 0.75]
    >>> ensemble(0.5, "none").accepted(p, q, [0]), ensemble(0.5, "none").correction(p, q, [0], 0).tolist()
    ([1.0, 0.0], [0.75, 0.25])
    """
    if not 0 <= w <= 1:
        raise SpecdecError(f"ensemble weight must be in [0, 1], got {w}: 1 is the target alone, 0 the draft alone")
    if bonus not in BONUSES:
        raise SpecdecError(f"unknown bonus {bonus!r} for ensemble: use one of {', '.join(BONUSES)}")

    def mixture(p: Array, q: Array) -> Array:
        return w * p + (1 - w) * q

    def keeps(p: Array, q: Array) -> Array:
        return acceptance_prob(mixture(p, q), q)

    def accepted(p: Array, q: Array, x: Sequence[int]) -> list:
        a = gather_probs(keeps(p[: len(x)], q[: len(x)]), x)
        # kept or replaced, the last token counts as the one that follows
        return count_probs(joined(a[:-1], 0) if bonus == "none" and len(x) else a)

    def correction(p: Array, q: Array, x: Sequence[int], n: Any) -> Array:
        g, p_next = len(x), take_row(p, n)
        if bonus == "mixture":
            if len(q) == g:
                raise SpecdecError(
                    "ensemble with its bonus from the mixture needs the draft's distribution after its last token: "
                    "pass q with g + 1 rows, or use bonus='none' or bonus='target'"
                )
            q_next = take_row(q, n)
            return if_else(n < g, residual(p_next, q_next), mixture(p_next, q_next))
        q_next = next_draft_probs(p, q, x, n)
        replaced = residual(p_next, q_next)  # after a whole draft p itself
        if bonus == "target" or not g:
            return replaced
        # the last draft token, kept or replaced, counts as the token that follows
        drafted = point_mass(x[g - 1], p_next)
        a = total(keeps(p[g - 1], q[g - 1]) * drafted)
        return if_else(n == g - 1, (1 - a) * replaced + a * drafted, replaced)

    source = "DIVERSE, arXiv 2604.07622"
    return LossyVerifier(
        f"ensemble({w}, {bonus})",
        accepted,
        correction,
        w == 1,
        source,
        keeps,
        residual,
        needs_bonus_draft_probs=bonus == "mixture",
        on_device=True,
    )


# -- typical acceptance --------------------------------------------------------------------------------


def typical_threshold(p: Array, epsilon: Any, delta: Any) -> Any:
    """`min(epsilon, delta exp(-H(p)))`: a token is typical if its probability exceeds this."""
    positive = p[p > 0]
    if not is_torch(positive):
        positive = positive.astype(float)
    logarithm = positive.log() if is_torch(positive) else np.log(positive)
    return min(epsilon, delta * math.exp(float((positive * logarithm).sum())))


def typical(epsilon: Any = 0.09, delta: Any = 0.3) -> LossyVerifier:
    """Keep a draft token while `p(x) > min(epsilon, delta exp(-H(p)))`: Medusa, arXiv 2401.10774.

    The draft's distribution is not used, and the token that follows is the target's most probable one, as in Medusa's
    `evaluate_posterior` and `generate_candidates` (which have these defaults).  So the samples follow the draft's
    distribution restricted to typical tokens, not a distribution of the target.

    The entropy is a float, but the decision is yes or no, so exact arithmetic stays exact.

    Args:
        epsilon: in (0, 1]; a token of more than this probability is always typical.
        delta: > 0; the flatter the distribution, the less probable a typical token may be.

    >>> p = np.array([[0.9, 0.1], [0.95, 0.05], [0.5, 0.5]])
    >>> typical().accepted(p, p[:2], [1, 1])
    [0, 1, 0]
    """
    if not (0 < epsilon <= 1 and delta > 0):
        raise SpecdecError(f"typical acceptance needs epsilon in (0, 1] and delta > 0, got {epsilon} and {delta}")

    def keeps(p: Array, q: Array) -> Array:
        if p.ndim == 1:
            return 1 * (p > typical_threshold(p, epsilon, delta))
        rows = [keeps(p[i], q[i]) for i in range(len(p))]
        return stacked(rows) if rows else p

    return corrected_by_argmax(f"typical({epsilon}, {delta})", keeps, False, "Medusa, arXiv 2401.10774")
