"""Block verification: Sun et al., "Block Verification Accelerates Speculative Decoding" (arXiv 2403.10444).

Token-wise verification forgets, at each position, by how much the draft was better than needed before.  Here the
whole prefix carries one number, its *coverage*

    c_0 = 1,    c_i = min(1, c_{i-1} p_i(x_i) / q_i(x_i)),

which may recover after a bad token.  Each prefix has its own coin, and the *longest* prefix that passes is kept, even
if shorter ones did not pass.  On average it accepts at least as many tokens as the token rule; at `g = 1` both rules
are the same.  Derived in `notebooks/12_beyond_the_paper`.

The residual changes with the rule: it is `max(c_n p - q, 0)`, not `max(p - q, 0)`.  With a
vocabulary of two tokens both give the same distribution after normalisation, so the published example cannot tell them
apart; with three tokens the second is wrong (`mutants`, "block rule, token residual").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..distributions import Array, joined, minimum, overlap, positive_part, products, reverse, total, where
from .token import as_numbers, gather_probs, next_draft_probs, take_row, to_scalar


def coverage(p: Array, q: Array, x: Sequence[int]) -> Array:
    """`[c_0, ..., c_g]`.  As in the token rule, a token with `q(x) = 0` counts as not covered at all.

    >>> import numpy as np
    >>> coverage(np.array([[0.25, 0.75]] * 3), np.array([[0.5, 0.5]] * 2), [0, 1]).tolist()
    [1.0, 0.5, 0.75]
    """
    p_x, q_x = gather_probs(p, x), gather_probs(q, x)
    ratio = p_x / (q_x + (q_x == 0)) * (q_x > 0)
    c = joined(1, ratio[:0])  # c_0
    for i in range(len(x)):
        c = joined(c, minimum(c[-1:] * ratio[i : i + 1], 1 + 0 * c[-1:]))
    return c


def uncovered(c: Array, p: Array, q: Array) -> Array:
    """`Z_i = sum_x max(c_i p_{i+1}(x) - q_{i+1}(x), 0)` for `c` `[m]`, `p` and `q` `[m, V]`."""
    return positive_part(c[:, None] * p - q).sum(-1)


def pass_prob(c: Array, z: Array) -> Array:
    """`h = Z / (Z + 1 - c)`, with 0/0 = 1: the probability that a prefix passes its coin, elementwise."""
    rest = z + 1 - c
    return where(rest == 0, 1 + 0 * rest, z / (rest + (rest == 0)))


def accepted(p: Array, q: Array, x: Sequence[int]) -> Any:
    """`P(n) = h_n prod_{i > n} (1 - h_i)`, `h_i = Z_i / (Z_i + 1 - c_i)` for `i < g`, `h_g = c_g`.

    Args:
        p: target distributions `[g + 1, V]`.
        q: draft distributions `[g, V]`.
        x: the `g` draft tokens; a tensor `[g]` where `p` is one.

    Returns:
        `g + 1` numbers that sum to 1: a list of floats or fractions, or a tensor where `p` is one.

    The paper's example (its section 1): the expected number of accepted tokens is 11/9, and 10/9 for the token rule:

    >>> from fractions import Fraction as F
    >>> import numpy as np
    >>> p, q = np.array([[F(1, 3), F(2, 3)]] * 3), np.array([[F(2, 3), F(1, 3)]] * 2)
    >>> drafts = [(0, 0), (0, 1), (1, 0), (1, 1)]
    >>> str(sum(q[0, a] * q[1, b] * n * w for a, b in drafts for n, w in enumerate(accepted(p, q, (a, b)))))
    '11/9'
    """
    g = len(x)
    c = coverage(p, q, x)
    h = joined(pass_prob(c[:g], uncovered(c[:g], p[:g], q[:g])), c[g:])
    # n = 0 means that no prefix passes, so h_0 counts as 1
    missed = products(1 - reverse(h[1:]))  # the probability that no prefix of g, g - 1, ... tokens passes
    return as_numbers(reverse(joined(reverse(h[1:]), 1) * joined(1, missed)))


def correction(p: Array, q: Array, x: Sequence[int], n: Any) -> Array:
    """`max(c_n p_{n+1} - q_{n+1}, 0)` normalised after a rejection, `p_{g+1}` when the whole block was kept.

    Args:
        p, q, x: as in `accepted`.
        n: how many draft tokens were accepted, `0 <= n <= g`; a tensor `[]` where `p` is one.

    Returns:
        A distribution `[V]`.  Where the residual is empty `n` has probability 0, and the target's is returned.
    """
    # after the whole block nothing is subtracted: c p normalised is p
    p_next, q_next, c = take_row(p, n), next_draft_probs(p, q, x, n), take_row(coverage(p, q, x), n)
    excess = positive_part(c * p_next - q_next)
    left = total(excess)
    return where(left > 0, excess / (left + (left == 0)), p_next)


def expected_tokens(p: Array, q: Array, x: Sequence[int]) -> Any:
    """`1 + sum_n sum_y min(c_{n-1} p_n(y), q_n(y))`: tokens of a round, computed from its distributions.

    `P(at least n are kept)`, given the first `n` draft tokens, is their coverage `c_n`; the `n`-th term is its mean
    over the `n`-th token.  Compare it round by round with `token.expected_tokens`.

    Args:
        p, q, x: as in `accepted`.  The last draft token does not matter.

    >>> import numpy as np
    >>> expected_tokens(np.array([[0.25, 0.75]] * 3), np.array([[0.5, 0.5]] * 2), [0, 1])  # 1 + 3/4 + (1/8 + 3/8)
    2.25
    """
    g = len(x)
    return 1 + to_scalar(overlap(coverage(p, q, x)[:g, None] * p[:g], q[:g]).sum(-1))
