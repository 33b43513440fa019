"""A draft model: the paper's drafter."""

from __future__ import annotations

from random import Random
from typing import Any

import torch

from ..distributions import inverse_cdf
from ..errors import SpecdecError
from ..models.pair import context_length
from ..models.session import open_session
from .base import Draft, Drafter, Sampling


class ModelDrafter:
    """Draws each token from a smaller model's law, sharpened and truncated exactly as the target's.

    Args:
        model: a `FastLlama` or a transformers causal language model of the target's vocabulary.
    """

    def __init__(self, model: Any):
        self.model = model

    def start(self, vocabulary: int) -> ModelDraftSession:
        return ModelDraftSession(self.model)


class ModelDraftSession:
    def __init__(self, model: Any):
        self.session = open_session(model)
        self.context = context_length(model)
        self.fed: list[int] = []  # the tokens that the session holds

    def propose(self, prefix: list[int], gamma: int, sampling: Sampling, random: Random) -> Draft:
        gamma = min(gamma, self.context - len(prefix))
        if gamma < 1:
            return Draft([])
        logits = self._catch_up(prefix)
        tokens: list[int] = []
        laws = []
        while True:
            if sampling.greedy:
                token = int(logits.argmax())
            else:
                law = sampling.law(logits)
                token = inverse_cdf(law, random.random())
                laws.append(law)
            tokens.append(token)
            if len(tokens) == gamma:
                break
            logits = self._feed([token])
        return Draft(tokens, torch.stack(laws) if laws else None, passes=gamma)

    def _catch_up(self, prefix: list[int]) -> torch.Tensor:
        """Drop what was rejected, feed what is new; the logits `[V]` that follow `prefix`."""
        common = min(len(self.fed), len(prefix) - 1)
        while self.fed[:common] != prefix[:common]:
            common -= 1
        self.session.rollback(common)
        del self.fed[common:]
        return self._feed(prefix[common:])

    def _feed(self, tokens: list[int]) -> torch.Tensor:
        self.fed += tokens
        return self.session.feed(torch.tensor([tokens], device=self.session.device))[0, -1]


def as_drafter(draft: Any) -> Drafter:
    """A drafter as it is; a model wrapped as one."""
    if hasattr(draft, "start"):
        return draft
    if hasattr(draft, "config"):
        return ModelDrafter(draft)
    raise SpecdecError(
        f"{type(draft).__name__} is no draft: give a model, a drafter such as PromptLookupDrafter(), or a folder's name"
    )
