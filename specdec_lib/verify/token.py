"""Token-wise verification: Algorithm 1 of Leviathan, Kalman, Matias (arXiv 2211.17192).

Each draft token, in order, is kept with probability `min(1, p(x) / q(x))`; the first one that is not kept ends
the round, and the token that replaces it comes from what the draft covered too little, `max(p - q, 0)`.
Derived in `notebooks/01_acceptance_rule`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..distributions import Array, is_torch, joined, minimum, overlap, products, residual


def gather_probs(probs: Array, x: Any) -> Array:
    """`[probs[0][x_1], probs[1][x_2], ...]`, of the kind of `probs` `[>= g, V]`; tensors in float64.

    >>> import numpy as np
    >>> gather_probs(np.array([[0.25, 0.75], [0.5, 0.5]]), [1, 0]).tolist()
    [0.75, 0.5]
    """
    if is_torch(probs):
        import torch

        index = x if is_torch(x) else torch.tensor(x, dtype=torch.long).to(probs.device, non_blocking=True)
        return probs[: len(x)].gather(-1, index[:, None])[:, 0].double()
    return probs[list(range(len(x))), list(x)]


def take_row(rows: Array, n: Any) -> Array:
    """`rows[n]`; if `n` is a tensor `[]`, without waiting for the device."""
    return rows.index_select(0, n.reshape(1))[0] if is_torch(n) else rows[n]


def next_draft_probs(p: Array, q: Array, x: Sequence[int], n: Any) -> Array:
    """`q_{n+1}`, `[V]`; after the last of the `g` draft tokens 0, since nothing was drafted there."""
    g = len(x)
    if not is_torch(n):
        return q[n] if n < g else 0 * p[n]
    return take_row(q, n.clamp(max=g - 1)) * (n < g) if g else 0 * p[0]


def to_scalar(a: Any) -> Any:
    """A float or a fraction from an entry of a torch tensor, a numpy array or an array of fractions."""
    return a.item() if hasattr(a, "item") else a


def as_numbers(a: Array) -> Any:
    """The entries of a vector as a list of plain numbers; a tensor stays on its device."""
    return a if is_torch(a) else a.tolist()


def acceptance_prob(p_x: Any, q_x: Any) -> Any:
    """`a = min(1, p(x) / q(x))`: the probability of keeping one draft token, elementwise.

    A token with `q(x) = 0` cannot have been drawn; the value for it is 0, so that a drafter that reports wrong
    probabilities cannot smuggle it in.

    >>> from fractions import Fraction as F
    >>> str(acceptance_prob(F(1, 4), F(1, 2))), str(acceptance_prob(F(1, 2), F(1, 4)))
    ('1/2', '1')
    """
    return minimum(p_x, q_x) / (q_x + (q_x == 0))


def count_probs(a: Array) -> Any:
    """`P(n) = a_1 ... a_n (1 - a_{n+1})` for `n < g`, and `a_1 ... a_g` for `n = g`; `[g + 1]` numbers.

    Args:
        a: `[g]`, the probability that each draft token is kept, given that all before it were.

    >>> import numpy as np
    >>> count_probs(np.array([0.5, 0.5]))
    [0.5, 0.25, 0.25]
    """
    kept, refused = joined(1, products(a)), joined(1 - a, 1)
    return as_numbers(kept * refused)


def accepted(p: Array, q: Array, x: Sequence[int]) -> Any:
    """`P(n) = a_1 ... a_n (1 - a_{n+1})` for `n < g`, and `a_1 ... a_g` for `n = g`.

    Args:
        p: target distributions `[g + 1, V]`.
        q: draft distributions `[g, V]`.
        x: the `g` draft tokens; a tensor `[g]` where `p` is one.

    Returns:
        `g + 1` numbers that sum to 1: a list of floats or fractions, or a tensor where `p` is one.

    >>> import numpy as np
    >>> accepted(np.array([[0.25, 0.75], [0.5, 0.5]]), np.array([[0.5, 0.5]]), [0])
    [0.5, 0.5]
    """
    return count_probs(acceptance_prob(gather_probs(p, x), gather_probs(q, x)))


def correction(p: Array, q: Array, x: Sequence[int], n: Any) -> Array:
    """`residual(p_{n+1}, q_{n+1})`: after a rejection `max(p - q, 0)` normalised, after a whole draft `p` itself.

    Args:
        p, q, x: as in `accepted`.
        n: how many draft tokens were accepted, `0 <= n <= g`; a tensor `[]` where `p` is one.

    Returns:
        A distribution `[V]`.
    """
    if not is_torch(n) and n == len(x):
        return p[n]
    return residual(take_row(p, n), next_draft_probs(p, q, x, n))


def expected_tokens(p: Array, q: Array, x: Sequence[int]) -> Any:
    """`1 + sum_n a_1 ... a_{n-1} sum_y min(p_n(y), q_n(y))`: tokens of a round, computed from its distributions.

    The `n`-th term is `P(at least n are kept)` given the draft tokens before the `n`-th; the `n`-th token is summed
    over.  Over rounds it has the same mean as `accepted + 1`, with less noise (Rao-Blackwell).

    Args:
        p, q, x: as in `accepted`.  The last draft token does not matter.

    >>> import numpy as np
    >>> expected_tokens(np.array([[0.25, 0.75]] * 3), np.array([[0.5, 0.5]] * 2), [0, 1])  # 1 + 3/4 + 1/2 3/4
    2.125
    """
    g = len(x)
    if not g:
        return 1
    kept = joined(1, products(acceptance_prob(gather_probs(p, x), gather_probs(q, x)))[:-1])
    return 1 + to_scalar((kept * overlap(p[:g], q[:g])).sum(-1))
