"""Greedy identity: two texts of one target are equal, or first differ at a tie within rounding.

One pass over several positions sums in another order than several passes over one position.  So if the target's two
best tokens have nearly the same logit, float rounding decides.  Such a difference is not a fault of the algorithm; it
is classified here, counted and reported, never hidden.

In float32 on a CPU identity is required: texts may differ only at a tie.  In bfloat16 and float16 rounding is three
digits coarser, and only the number of equal texts can be stated.  The control is the target as its own draft, which
proposes only what the target would write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..decode import generate, generate_plain
from ..errors import SpecdecError
from ..models.pair import Pair
from ..models.session import open_session
from ..prompts import as_list
from ..verify import Verifier

TIE = 1e-3  # logits; float32 rounding moves those of the packaged target by about 1e-4


@dataclass(frozen=True)
class Difference:
    """Where two texts first differ.

    Attributes:
        position: index of the first new token that differs.
        tokens: the two tokens there; None for a text that has ended.
        gap: the difference of the two tokens' logits under the target; infinite if a text has ended.
        tie: whether the gap is within rounding.
    """

    position: int
    tokens: tuple[int | None, int | None]
    gap: float
    tie: bool


def compare(
    target: Any, prompt: Sequence[int], first: Sequence[int], second: Sequence[int], tolerance: float = TIE
) -> Difference | None:
    """None if the two continuations of `prompt` are equal, else where they first differ and whether that is a tie.

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


def rounding(target: Any, prompt: Sequence[int], text: Sequence[int], positions: int = 6) -> float:
    """How much the gap between the target's two best tokens changes when a pass computes several positions.

    The largest change over the text, in logits.  No decoder is involved, only two ways to compute the same logits.

    Args:
        prompt, text: token ids; the gap is taken before each token of `text`.
        positions: positions a pass in the second way; the first way computes one.
    """
    gaps = []
    best: torch.Tensor | None = None
    for width in (1, positions):
        session = open_session(target, capacity=len(prompt) + len(text))
        if len(prompt) > 1:
            session.feed(torch.tensor([prompt[:-1]], device=session.device), last=0)
        ids = [prompt[-1], *text[:-1]]
        passes = [torch.tensor([ids[i : i + width]], device=session.device) for i in range(0, len(ids), width)]
        logits = torch.cat([session.feed(block, last=block.shape[1])[0].double() for block in passes])
        best = logits.topk(2).indices if best is None else best
        pair = logits.gather(1, best)
        gaps.append(pair[:, 0] - pair[:, 1])
    return float((gaps[0] - gaps[1]).abs().max())


@dataclass(frozen=True)
class Identity:
    """Greedy texts with and without a draft, side by side.

    Attributes:
        texts: how many were compared.
        tokens: how many tokens were equal, in each text up to the first difference.
        tolerance: the largest gap that counts as rounding.
        differences: the first difference of each text that differs.
    """

    texts: int
    tokens: int
    tolerance: float
    differences: list[Difference]

    @property
    def identical(self) -> int:
        return self.texts - len(self.differences)

    @property
    def ties(self) -> int:
        """Texts that differ at a tie of the target's two best tokens, within rounding."""
        return sum(d.tie for d in self.differences)

    @property
    def different(self) -> int:
        """Texts that differ elsewhere: a fault."""
        return len(self.differences) - self.ties

    @property
    def match_rate(self) -> float:
        """The share of texts that are equal in all tokens."""
        return self.identical / self.texts


def greedy_identity(
    pair: Pair,
    prompts: Any,
    gamma: int = 5,
    max_new_tokens: int = 64,
    tolerance: float | None = None,
    verifier: str | Verifier = "token",
    plain: Sequence[Sequence[int]] | None = None,
) -> Identity:
    """Decode each prompt greedily with and without the draft, and report where the texts differ.

    Args:
        pair: target and draft; `Pair(target, target)` is the control.
        prompts: as `generate` takes them.
        gamma, max_new_tokens, verifier: as `generate` takes them.
        tolerance: the largest gap in logits that counts as rounding.  None measures it on the texts that differ.
            There rounding has changed the sign of the gap, so the gap was at most what `rounding` finds, and the pass
            that measures the gap may change it once more.  So the tolerance is twice that, and at least `TIE`.
        plain: the texts of `generate_plain`, if they are known already, for example from the run of another draft.

    Raises:
        SpecdecError: no token to compare; plain texts of other prompts; what `generate` refuses.
    """
    if max_new_tokens < 1:
        raise SpecdecError(f"max_new_tokens is {max_new_tokens}: identity needs at least one token to compare")
    encoded = [pair.encode(prompt) for prompt in as_list(prompts)]
    drafted = generate(pair, encoded, gamma, max_new_tokens, verifier=verifier).tokens
    plain = generate_plain(pair, encoded, max_new_tokens).tokens if plain is None else plain
    if len(plain) != len(encoded):
        raise SpecdecError(f"{len(plain)} plain texts for {len(encoded)} prompts: give one of each, or none")
    texts = list(zip(encoded, plain, drafted, strict=True))
    if tolerance is None:
        moved = [rounding(pair.target, ids, a, gamma + 1) for ids, a, b in texts if list(a) != b]
        tolerance = max([TIE, *(2 * change for change in moved)])
    found = [compare(pair.target, ids, a, b, tolerance) for ids, a, b in texts]
    tokens = sum(len(text) if d is None else d.position for text, d in zip(plain, found, strict=True))
    return Identity(len(encoded), tokens, tolerance, [d for d in found if d is not None])
