"""Early exit: the target's own first layers draft for it, in the target's own cache.

The keys and values of the first `layers` layers are the same whether the rest of the model runs or not, so the
draft needs no memory of the prompt of its own: it reads the target's, writes its positions after it, and the
target's pass writes over them.  Draft & verify (Zhang et al., arXiv 2309.08168), LayerSkip (Elhoushi et al.,
arXiv 2404.16710).
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar

import torch

from ..errors import SpecdecError
from ..models.batch import Batch, OneRow
from ..models.session import FastSession
from .base import Draft, DraftBatch, DraftSession, RowByRow, Sampling
from .model import Drawing, check_confidence


@dataclass(frozen=True)
class EarlyExitDrafter:
    """Draft with the target's first `layers` layers, its final norm and its output layer.

    Nothing of the model or its configuration is changed, also while it drafts.

    Args:
        layers: >= 1 and fewer than the target has.
        confidence: as in `ModelDrafter`.
    """

    layers: int
    confidence: float = 0.0
    reads_target: ClassVar[bool] = True
    one_text: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.layers, bool) or not isinstance(self.layers, int) or self.layers < 1:
            raise SpecdecError(f"early exit needs a whole number of layers >= 1, got {self.layers!r}")
        check_confidence(self.confidence)

    def start(self, vocabulary: int) -> DraftSession:
        raise SpecdecError("early exit drafts in its target's session: give it to generate with Pair(target, draft)")

    def start_on(self, target: Batch, vocabulary: int) -> DraftBatch:
        session = target.session if isinstance(target, OneRow) else None
        if not isinstance(session, FastSession):
            raise SpecdecError(
                "early exit needs a target that runs as FastLlama (Llama or Qwen2, loaded with load_pair): "
                "use another drafter"
            )
        depth = len(session.model.layers)
        if self.layers >= depth:
            raise SpecdecError(f"early exit after {self.layers} layers is no shortcut: the target has {depth}")
        return RowByRow([EarlyExitSession(session, self.layers, self.confidence)])

    def with_confidence(self, threshold: float) -> EarlyExitDrafter:
        return EarlyExitDrafter(self.layers, threshold)


class EarlyExitSession:
    def __init__(self, session: FastSession, layers: int, confidence: float):
        self.session, self.layers, self.confidence = session, layers, confidence

    def propose(self, prefix: list[int], gamma: int, sampling: Sampling, random: Random) -> Draft:
        held = self.session.length
        assert held == len(prefix) - 1, "the target's session holds all but the last token"
        try:
            drawing = Drawing(prefix, gamma, sampling, random, self.confidence)
            wanted = drawing.step(self._feed(prefix[-1]))
            while wanted:
                wanted = drawing.step(self._feed(drawing.tokens[-1]))
            return drawing.draft()
        finally:
            self.session.rollback(held)

    def _feed(self, token: int) -> torch.Tensor:
        ids = torch.tensor([[token]], device=self.session.device)
        return self.session.early(ids, self.layers)[0, -1]
