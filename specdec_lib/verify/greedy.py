"""Greedy verification: keep draft tokens while they are what the target would write at temperature 0.

It is the token rule for point masses (`tests/test_verify.py` checks this in fractions).  This form needs only the
position of the maximum, so the decoder passes logits as `p`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..distributions import Array, argmax, is_torch, one_hot
from .token import count_probs, take_row


def accepted(p: Array, q: Array, x: Sequence[int]) -> Any:
    """The point mass on `n` = the length of the longest prefix with `x_i = argmax p_i`.

    Args:
        p: target distributions or logits `[g + 1, V]`.
        q: not used: only the token matters, not how it was drawn.
        x: the `g` draft tokens; a tensor `[g]` where `p` is one.

    >>> accepted(np.array([[0.1, 0.9], [0.6, 0.4], [0.5, 0.5]]), None, [1, 1])
    [0, 1, 0]
    """
    best = argmax(p[: len(x)])
    if is_torch(p):
        import torch

        return count_probs((best == torch.as_tensor(x, device=p.device)).int())
    return count_probs((best == np.asarray(x, best.dtype)).astype(int))


def correction(p: Array, q: Array, x: Sequence[int], n: Any) -> Array:
    """The point mass on the target's most probable token at position `n + 1`."""
    p_next = take_row(p, n)
    return one_hot(argmax(p_next), p_next)
