"""Token-wise verification: Algorithm 1 of Leviathan, Kalman, Matias (arXiv 2211.17192).

Each draft token, in order, is kept with probability `min(1, p(x) / q(x))`; the first one that is not kept ends
the round, and the token that replaces it comes from what the draft covered too little, `max(p - q, 0)`.
Derived in `notebooks/01_acceptance_rule`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..distributions import Array, overlap, residual


def at(laws: Array, x: Sequence[int]) -> list:
    """`[laws[0][x_1], laws[1][x_2], ...]` as plain numbers (floats or fractions)."""
    return laws[list(range(len(x))), list(x)].tolist() if len(x) else []


def number(a):
    """A float or a fraction from an array's entry, whichever of the three kinds the array is."""
    return a.item() if hasattr(a, "item") else a


def keep(p_x, q_x):
    """`a = min(1, p(x) / q(x))`: the probability of keeping one draft token.

    A token with `q(x) = 0` cannot have been drawn; the value for it is 0, so that a drafter that reports a wrong
    law cannot smuggle it in.

    >>> from fractions import Fraction as F
    >>> str(keep(F(1, 4), F(1, 2))), str(keep(F(1, 2), F(1, 4)))
    ('1/2', '1')
    """
    if q_x == 0:
        return 0
    return min(1, p_x / q_x)


def accepted(p: Array, q: Array, x: Sequence[int]) -> list:
    """`P(n) = a_1 ... a_n (1 - a_{n+1})` for `n < g`, and `a_1 ... a_g` for `n = g`.

    Args:
        p: target laws `[g + 1, V]`.
        q: draft laws `[g, V]`.
        x: the `g` draft tokens.

    Returns:
        `g + 1` numbers (floats or fractions) that sum to 1.

    >>> import numpy as np
    >>> accepted(np.array([[0.25, 0.75], [0.5, 0.5]]), np.array([[0.5, 0.5]]), [0])
    [0.5, 0.5]
    """
    law, kept = [], 1
    for a in map(keep, at(p, x), at(q, x)):
        law.append(kept * (1 - a))
        kept = kept * a
    return [*law, kept]


def correction(p: Array, q: Array, x: Sequence[int], n: int) -> Array:
    """`residual(p_{n+1}, q_{n+1})` after a rejection, `p_{g+1}` when all `g` draft tokens were kept.

    Args:
        p, q, x: as in `accepted`.
        n: how many draft tokens were accepted, `0 <= n <= g`.

    Returns:
        A law `[V]`.
    """
    return p[n] if n == len(x) else residual(p[n], q[n])


def expected_tokens(p: Array, q: Array, x: Sequence[int]) -> Any:
    """`1 + sum_n a_1 ... a_{n-1} sum_y min(p_n(y), q_n(y))`: what a round writes, told from its laws.

    The `n`-th term is `P(n or more are kept)` given the draft tokens before the `n`-th, which itself is summed over.
    The mean over rounds is that of `accepted + 1`, with less noise (Rao-Blackwell).

    Args:
        p, q, x: as in `accepted`.  The last draft token does not matter.

    >>> import numpy as np
    >>> expected_tokens(np.array([[0.25, 0.75]] * 3), np.array([[0.5, 0.5]] * 2), [0, 1])  # 1 + 3/4 + 1/2 3/4
    2.125
    """
    total, kept = 1, 1
    for n, a in enumerate(map(keep, at(p, x), at(q, x))):
        total = total + kept * number(overlap(p[n], q[n]))
        kept = kept * a
    return total
