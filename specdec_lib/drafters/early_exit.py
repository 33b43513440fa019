"""Early exit: the target's own first layers draft for it, in the target's own cache.

The keys and values of the first `layers` layers are the same whether the rest of the model runs or not, so the
draft needs no cache of its own: it reads the target's cache, writes its positions after it, and the target's next pass
overwrites them.  Draft & verify (Zhang et al., arXiv 2309.08168), LayerSkip (Elhoushi et al.,
arXiv 2404.16710).
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar

from .. import validate
from ..errors import SpecdecError
from ..models.rows import on_device
from ..models.session import FastSession, Session
from ..sampling import SamplingParams
from .base import Draft, DraftBatch, Drafter, DraftSession
from .model import DraftSampler, check_confidence


@dataclass(frozen=True)
class EarlyExitDrafter(Drafter):
    """Draft with the target's first `layers` layers, its final norm and its output layer.

    The model and its configuration are never changed, not even while drafting.

    Args:
        layers: >= 1 and fewer than the target's layers.
        confidence: as in `ModelDrafter`.
    """

    layers: int
    confidence: float = 0.0
    reads_target: ClassVar[bool] = True
    one_text: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", validate.whole("layers", self.layers, 1))
        check_confidence(self.confidence)

    def start(self, vocabulary: int) -> DraftSession:
        raise SpecdecError("early exit drafts in its target's session: give it to generate with Pair(target, draft)")

    def start_batch(self, rows: int, vocabulary: int, target: Session | None = None) -> DraftBatch:
        if target is None:
            self.start(vocabulary)
        if not isinstance(target, FastSession):
            raise SpecdecError(
                "early exit needs a target that runs as FastLlama (Llama or Qwen2, loaded with load_pair): "
                "use another drafter"
            )
        depth = len(target.model.layers)
        if self.layers >= depth:
            raise SpecdecError(f"early exit after {self.layers} layers is not early: the target has {depth}")
        return DraftBatch([EarlyExitSession(target, self.layers, self.confidence)])

    def with_confidence(self, threshold: float) -> EarlyExitDrafter:
        return EarlyExitDrafter(self.layers, threshold)


class EarlyExitSession(DraftSession):
    """Drafts in the target's own session, and rolls it back afterwards."""

    def __init__(self, session: FastSession, layers: int, confidence: float):
        self.session, self.layers, self.confidence = session, layers, confidence

    def propose(self, prefix: list[int], gamma: int, params: SamplingParams, random: Random) -> Draft:
        held = self.session.length
        assert held == len(prefix) - 1, "the target's session holds all but the last token"
        sampler = DraftSampler(prefix, gamma, params, random, self.confidence)
        try:
            ids = on_device(prefix[-1:], self.session.device)
            while sampler.step(self.session.early(ids[None], self.layers)[0, -1]):
                ids = sampler.last_token
        finally:
            self.session.rollback(held)
        return sampler.draft()
