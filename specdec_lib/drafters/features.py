"""Drafts from the target's hidden states: a small layer continues from what the target has just computed.

The target's pass yields the hidden states of every token but the text's last; a separate draft model would have to
compute such states itself.  See `models.feature_draft` for the network, EAGLE (arXiv 2401.15077) for the idea.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import torch

from ..errors import SpecdecError
from ..models.fast import FastLlama
from ..models.feature_draft import FastFeatureDraft, FeatureDraft
from ..models.rows import on_device, padded
from ..models.session import FastSession, Session
from ..sampling import SamplingParams
from .base import Draft, DraftBatch, Drafter, DraftSession
from .model import DraftSampler, check_confidence


class FeatureDrafter(Drafter):
    """Draws each token from the distribution of a `FeatureDraft`, in the session of its target.

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

    def start_batch(self, rows: int, vocabulary: int, target: Session | None = None) -> FeatureDrafts:
        if target is None:
            self.start(vocabulary)
        if not isinstance(target, FastSession) or not isinstance(target.model, FastLlama):
            raise SpecdecError(
                "a draft on the target's features needs a target that runs as FastLlama (Llama or Qwen2, loaded with "
                "load_pair): use another draft"
            )
        config, model = self.model.config, target.model
        depth, width = len(model.layers), model.config.hidden_size
        if width != config.target_width or max(config.watched) > depth or vocabulary != config.vocab_size:
            raise SpecdecError(
                f"this draft reads a target of width {config.target_width}, {max(config.watched)} layers and "
                f"{config.vocab_size} tokens, not one of {width}, {depth} and {vocabulary}: use a draft of this target"
            )
        target.capture_hidden(config.watched)
        return FeatureDrafts(self, target)

    def with_confidence(self, threshold: float) -> FeatureDrafter:
        return FeatureDrafter(self.model, threshold)


class FeatureDrafts(DraftBatch):
    """Drafts for the rows of the target's session, in one pass a token.

    The draft's cache is one position shorter than the target's, since it reads pairs of neighbouring tokens.  Positions
    computed from the draft's own states are dropped after each draft, and computed again from the target's states.
    """

    def __init__(self, drafter: FeatureDrafter, target: FastSession):
        self.model, self.confidence, self.target = drafter.model, drafter.confidence, target
        self.cache = self.model.new_cache(target.rows, target.cache.capacity)
        self.held = [0] * target.rows  # pairs that were read with the target's states

    def propose(
        self, prefixes: list[list[int]], gammas: list[int], params: list[SamplingParams], randoms: list[Random]
    ) -> list[Draft]:
        samplers = [
            DraftSampler(*each, self.confidence) for each in zip(prefixes, gammas, params, randoms, strict=True)
        ]
        read = [len(prefix) - 1 for prefix in prefixes]  # tokens whose hidden states the target has
        held = [max(min(n, r - 1), 0) for n, r in zip(self.held, read, strict=True)]
        new = [s.prefix[n + 1 :] if s.gamma > 0 and r > 0 else [] for s, n, r in zip(samplers, held, read, strict=True)]
        if not any(new):
            return [Draft([]) for _ in samplers]
        self.held = [r if ids else n for r, n, ids in zip(read, held, new, strict=True)]
        states = self.model.states(self._features(held, max(map(len, new))), self.target.cache.captured_layers)
        wanted: list[Any] = list(new)
        while any(map(len, wanted)):
            states = self._step(states, wanted, held)
            held = [n + len(ids) for n, ids in zip(held, wanted, strict=True)]
            scores = self.model.lm_head(states)[:, 0]
            more = [len(ids) > 0 and s.step(scores[i]) for i, (s, ids) in enumerate(zip(samplers, wanted, strict=True))]
            wanted = [s.last_token if go_on else [] for s, go_on in zip(samplers, more, strict=True)]
        return [sampler.draft() for sampler in samplers]

    def _features(self, held: list[int], n: int) -> torch.Tensor:
        """The target's hidden states of the `n` tokens after the `held` ones, `[rows, n, captured layers, width]`."""
        features = self.target.cache.features
        if len({*held}) == 1:
            return features[:, held[0] : held[0] + n]
        places = on_device(held, features.device)[:, None] + torch.arange(n, device=features.device)
        rows = torch.arange(len(held), device=features.device)[:, None]
        return features[rows, places.clamp(max=features.shape[1] - 1)]

    def _step(self, states: torch.Tensor, ids: list, held: list[int]) -> torch.Tensor:
        """The draft's state after the last of each row's `ids`, `[rows, 1, width]`."""
        tokens = padded(ids, self.model.device)
        self.cache.length = max(held)
        counts = [max(len(row), 1) for row in ids]
        if len({*held}) == 1 and len({*map(len, ids)}) == 1:
            return self.model.step(states, tokens, self.cache)[:, -1:]
        out = self.model.step(states, tokens, self.cache, on_device(held, tokens.device))
        last = on_device(counts, tokens.device) - 1
        return out[torch.arange(len(ids), device=tokens.device), last][:, None]

    def select_rows(self, rows: Sequence[int]) -> None:
        self.cache.select_rows(list(rows))
        self.held = [self.held[i] for i in rows]
