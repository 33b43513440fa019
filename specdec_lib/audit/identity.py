"""Greedy identity: two texts of one target are the same, or part at a tie within rounding.

One pass over several positions sums in another order than several passes over one, so where the target's two best
tokens have nearly the same logit, float rounding decides.  Such a parting is no fault of the algorithm; it is
classified here, counted and reported, never hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..models.session import open_session

TIE = 1e-3  # logits; float32 rounding moves those of the packaged target by about 1e-4


@dataclass(frozen=True)
class Difference:
    """Where two texts part.

    Attributes:
        position: index of the first new token that differs.
        tokens: the two tokens there; None where a text has ended.
        gap: how much the better of the two exceeds the other in the target's logits; infinite where a text ended.
        tie: whether the gap is within rounding.
    """

    position: int
    tokens: tuple[int | None, int | None]
    gap: float
    tie: bool


def compare(
    target: Any, prompt: Sequence[int], first: Sequence[int], second: Sequence[int], tolerance: float = TIE
) -> Difference | None:
    """None if the two continuations of `prompt` are the same, else where they part and whether that is a tie.

    Args:
        target: the model that wrote both, a `FastLlama` or a transformers model.
        prompt: token ids.
        first, second: new token ids.
        tolerance: the largest gap in logits that counts as rounding.
    """
    if list(first) == list(second):
        return None
    shortest = min(len(first), len(second))
    position = next((i for i in range(shortest) if first[i] != second[i]), shortest)
    if position == shortest:
        ended = [t[position] if position < len(t) else None for t in (first, second)]
        return Difference(position, (ended[0], ended[1]), float("inf"), False)
    session = open_session(target)
    ids = torch.tensor([[*prompt, *first[:position]]], device=session.device)
    logits = session.feed(ids)[0, -1].double()
    a, b = first[position], second[position]
    gap = abs(float(logits[a] - logits[b]))
    best = float(logits.max())
    tie = gap <= tolerance and best - min(float(logits[a]), float(logits[b])) <= tolerance
    return Difference(position, (a, b), gap, tie)
