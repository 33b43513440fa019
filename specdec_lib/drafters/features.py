"""Drafts from the target's own hidden states: a small layer goes on from what the target has just computed.

The target's pass leaves the hidden states of every token but the text's last; a draft model of its own would have to
find all of that anew.  See `models.feature_draft` for the network, EAGLE (arXiv 2401.15077) for the idea.
"""

from __future__ import annotations

from random import Random

import torch

from ..errors import SpecdecError
from ..models.batch import Batch, FastBatch, OneRow, padded
from ..models.fast import Cache
from ..models.feature_draft import FastFeatureDraft, FeatureDraft
from ..models.session import FastSession
from .base import Draft, DraftBatch, DraftSession, RowByRow, Sampling
from .model import Drawing, check_confidence


class FeatureDrafter:
    """Draws each token from the law of a `FeatureDraft`, in the session of its target.

    Args:
        model: a `FeatureDraft`, or a `FastFeatureDraft` made of one.
        confidence: as in `ModelDrafter`.
    """

    reads_target = True

    def __init__(self, model: FeatureDraft | FastFeatureDraft, confidence: float = 0.0):
        self.model = model if isinstance(model, FastFeatureDraft) else FastFeatureDraft(model)
        self.confidence = check_confidence(confidence)

    def start(self, vocabulary: int) -> DraftSession:
        raise SpecdecError(
            "this draft reads its target's hidden states: give it to generate with Pair(target, draft), "
            "or use a draft model of its own"
        )

    def start_on(self, target: Batch, vocabulary: int) -> DraftBatch:
        session = target.session if isinstance(target, OneRow) else target
        if not isinstance(session, (FastSession, FastBatch)) or not hasattr(session.model, "layers"):
            raise SpecdecError(
                "a draft on the target's features needs a target that runs as FastLlama (Llama or Qwen2, loaded with "
                "load_pair): use another draft"
            )
        config, model = self.model.config, session.model
        depth, width = len(model.layers), model.config.hidden_size
        if width != config.target_width or max(config.watched) > depth or vocabulary != config.vocab_size:
            raise SpecdecError(
                f"this draft reads a target of width {config.target_width}, {max(config.watched)} layers and "
                f"{config.vocab_size} tokens, not one of {width}, {depth} and {vocabulary}: use a draft of this target"
            )
        session.watch(config.watched)
        if isinstance(session, FastSession):
            return RowByRow([FeatureDraftSession(self, session)])
        return FeatureDraftBatch(self, session)

    def with_confidence(self, threshold: float) -> FeatureDrafter:
        return FeatureDrafter(self.model, threshold)


class FeatureDraftSession:
    """Drafts for one text.  The draft's cache is one shorter than the target's: it starts from pairs of tokens."""

    def __init__(self, drafter: FeatureDrafter, target: FastSession):
        self.model, self.confidence, self.target = drafter.model, drafter.confidence, target
        self.cache = self.model.new_cache(1, target.cache.capacity)

    def propose(self, prefix: list[int], gamma: int, sampling: Sampling, random: Random) -> Draft:
        read = len(prefix) - 1  # tokens whose hidden states the target has
        if gamma < 1 or read < 1:
            return Draft([])
        held = self.cache.length = min(self.cache.length, read - 1)
        drawing = Drawing(prefix, gamma, sampling, random, self.confidence)
        states = self.model.states(self.target.cache.features[:, held:read])
        state = self._step(states, prefix[held + 1 :])
        wanted = drawing.step(self.model.scores(state)[0, 0])
        while wanted:
            state = self._step(state, drawing.tokens[-1:])
            wanted = drawing.step(self.model.scores(state)[0, 0])
        self.cache.length = read  # what was read of the draft's own states is forgotten
        return drawing.draft()

    def _step(self, states: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        ids = torch.tensor([tokens], device=self.model.device)
        return self.model.step(states, ids, self.cache)[:, -1:]


class FeatureDraftBatch:
    """Drafts for several rows at once, in one pass a token."""

    def __init__(self, drafter: FeatureDrafter, target: FastBatch):
        self.model, self.confidence, self.target = drafter.model, drafter.confidence, target
        rows = len(target.lengths)
        self.cache: Cache = self.model.new_cache(rows, target.cache.capacity)
        self.lengths = [0] * rows

    def propose(
        self, prefixes: list[list[int]], gammas: list[int], samplings: list[Sampling], randoms: list[Random]
    ) -> list[Draft]:
        drawings = [Drawing(*each, self.confidence) for each in zip(prefixes, gammas, samplings, randoms, strict=True)]
        device = self.model.device
        each_row = torch.arange(len(drawings), device=device)
        read = [len(prefix) - 1 for prefix in prefixes]
        held = [max(min(n, r - 1), 0) for n, r in zip(self.lengths, read, strict=True)]
        new = [d.prefix[n + 1 :] if d.gamma > 0 and r > 0 else [] for d, n, r in zip(drawings, held, read, strict=True)]
        if not any(new):
            return [Draft([]) for _ in drawings]
        self.lengths = [r if ids else n for r, n, ids in zip(read, held, new, strict=True)]
        features = self.target.cache.features
        places = torch.tensor(held, device=device)[:, None] + torch.arange(max(map(len, new)), device=device)
        states = self.model.states(features[each_row[:, None], places.clamp(max=features.shape[1] - 1)])
        while any(new):
            ids, _ = padded(new, device)
            self.cache.length = max(held)
            out = self.model.step(states, ids, self.cache, torch.tensor(held, device=device))
            held = [n + len(ids) for n, ids in zip(held, new, strict=True)]
            states = out[each_row, [max(len(ids), 1) - 1 for ids in new]][:, None]
            scores = self.model.scores(states)[:, 0]
            new = [
                drawing.tokens[-1:] if ids and drawing.step(scores[i]) else []
                for i, (ids, drawing) in enumerate(zip(new, drawings, strict=True))
            ]
        return [drawing.draft() for drawing in drawings]

    def keep(self, rows: list[int]) -> None:
        self.cache.keep(rows)
        self.lengths = [self.lengths[i] for i in rows]
