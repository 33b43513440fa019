"""Block verification: Sun et al., "Block Verification Accelerates Speculative Decoding" (arXiv 2403.10444).

Token-wise verification forgets, at each position, how much better than needed the draft did before.  Here the
whole prefix carries one number, its *coverage*

    c_0 = 1,    c_i = min(1, c_{i-1} p_i(x_i) / q_i(x_i)),

which may recover after a bad token, and the *longest* prefix that passes its own coin is kept, whatever happened
to the shorter ones.  Never fewer tokens are accepted on average than by the token rule; at `g = 1` both are the
same.  Derived in `notebooks/09_beyond_the_paper`.

The residual changes with the rule: it is `max(c_n p - q, 0)`, not `max(p - q, 0)`.  Over a vocabulary of two
tokens the two are the same law after normalisation, so the published example cannot tell them apart; with three
tokens the second is wrong (`mutants`, "block rule, token residual").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..distributions import Array, normalise, overlap, positive_part
from .token import at, number


def coverage(p: Array, q: Array, x: Sequence[int]) -> list:
    """`[c_0, ..., c_g]`.  As in the token rule, a token with `q(x) = 0` counts as not covered at all.

    >>> import numpy as np
    >>> coverage(np.array([[0.25, 0.75]] * 3), np.array([[0.5, 0.5]] * 2), [0, 1])
    [1, 0.5, 0.75]
    """
    values: list = [1]
    for p_x, q_x in zip(at(p, x), at(q, x), strict=True):
        values.append(0 if q_x == 0 else min(1, values[-1] * p_x / q_x))
    return values


def uncovered(c, p: Array, q: Array):
    """`Z = sum_x max(c p(x) - q(x), 0)` as a plain number."""
    return number(positive_part(c * p - q).sum(-1))


def stay(c, z):
    """`h = Z / (Z + 1 - c)`, with 0/0 = 1: the probability that a prefix passes its coin."""
    return z / (z + 1 - c) if z + 1 - c else 1


def accepted(p: Array, q: Array, x: Sequence[int]) -> list:
    """`P(n) = h_n prod_{i > n} (1 - h_i)`, `h_i = Z_{i+1} / (Z_{i+1} + 1 - c_i)` for `i < g`, `h_g = c_g`.

    Args:
        p: target laws `[g + 1, V]`.
        q: draft laws `[g, V]`.
        x: the `g` draft tokens.

    Returns:
        `g + 1` numbers (floats or fractions) that sum to 1.

    The paper's example (its section 1), the expected number accepted over all drafts being 11/9 where the token
    rule has 10/9:

    >>> from fractions import Fraction as F
    >>> import numpy as np
    >>> p, q = np.array([[F(1, 3), F(2, 3)]] * 3), np.array([[F(2, 3), F(1, 3)]] * 2)
    >>> drafts = [(0, 0), (0, 1), (1, 0), (1, 1)]
    >>> str(sum(q[0, a] * q[1, b] * n * w for a, b in drafts for n, w in enumerate(accepted(p, q, (a, b)))))
    '11/9'
    """
    g = len(x)
    c = coverage(p, q, x)
    h = [stay(c[i], uncovered(c[i], p[i], q[i])) for i in range(g)] + [c[g]]
    h[0] = 1  # nothing accepted is what is left when no prefix passes
    law, missed = [], 1
    for passes in reversed(h):
        law.append(missed * passes)
        missed = missed * (1 - passes)
    return law[::-1]


def correction(p: Array, q: Array, x: Sequence[int], n: int) -> Array:
    """`max(c_n p_{n+1} - q_{n+1}, 0)` normalised after a rejection, `p_{g+1}` when the whole block was kept.

    Args:
        p, q, x: as in `accepted`.
        n: how many draft tokens were accepted, `0 <= n <= g`.

    Returns:
        A law `[V]`.  Where the residual is empty `n` has probability 0, and the target's law is returned.
    """
    if n == len(x):
        return p[n]
    excess = positive_part(coverage(p, q, x[:n])[n] * p[n] - q[n])
    return normalise(excess) if bool(excess.sum() > 0) else p[n]


def expected_tokens(p: Array, q: Array, x: Sequence[int]) -> Any:
    """`1 + sum_n sum_y min(c_{n-1} p_n(y), q_n(y))`: what a round writes, told from its laws.

    `P(n or more are kept)` given the first `n` draft tokens is their coverage `c_n`; the `n`-th term is its mean over
    the `n`-th token.  To be compared, round by round, with `token.expected_tokens`.

    Args:
        p, q, x: as in `accepted`.  The last draft token does not matter.

    >>> import numpy as np
    >>> expected_tokens(np.array([[0.25, 0.75]] * 3), np.array([[0.5, 0.5]] * 2), [0, 1])  # 1 + 3/4 + (1/8 + 3/8)
    2.25
    """
    return 1 + sum(number(overlap(c * p[n], q[n])) for n, c in enumerate(coverage(p, q, x)[:-1]))
