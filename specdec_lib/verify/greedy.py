"""Greedy verification: keep the draft while it is what the target would have written at temperature 0.

The token rule under point masses is the same law (`tests/test_verify.py` checks it in fractions); this form
needs only the position of the maximum, so the decoder may pass logits for `p`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..distributions import Array, one_hot


def accepted(p: Array, q: Array, x: Sequence[int]) -> list:
    """All the mass on `n` = the length of the longest prefix with `x_i = argmax p_i`.

    Args:
        p: target laws or logits `[g + 1, V]`.
        q: not used: what matters is the token, not how it was found.
        x: the `g` draft tokens.

    >>> import numpy as np
    >>> accepted(np.array([[0.1, 0.9], [0.6, 0.4], [0.5, 0.5]]), None, [1, 1])
    [0, 1, 0]
    """
    best = p.argmax(-1).tolist()
    n = next((i for i, token in enumerate(x) if best[i] != token), len(x))
    return [int(i == n) for i in range(len(x) + 1)]


def correction(p: Array, q: Array, x: Sequence[int], n: int) -> Array:
    """The point mass on the target's most probable token at position `n + 1`."""
    return one_hot(p[n].argmax(-1), p[n])
