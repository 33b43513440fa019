"""Greedy verification: keep the draft while it is what the target would have written at temperature 0.

The token rule under point masses is the same rule (`tests/test_verify.py` checks it in fractions); this form
needs only the position of the maximum, so the decoder passes logits for `p`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..distributions import Array, argmax, is_torch, one_hot
from .token import count_probs, take_row


def accepted(p: Array, q: Array, x: Sequence[int]) -> Any:
    """All the mass on `n` = the length of the longest prefix with `x_i = argmax p_i`.

    Args:
        p: target distributions or logits `[g + 1, V]`.
        q: not used: what matters is the token, not how it was found.
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
