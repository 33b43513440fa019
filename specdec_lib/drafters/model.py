"""A draft model: the paper's drafter."""

from __future__ import annotations

from random import Random
from typing import Any

import torch

from ..distributions import inverse_cdf
from ..errors import SpecdecError
from ..models.batch import open_batch
from ..models.pair import context_length, is_encoder_decoder, vocabulary_size
from ..models.session import open_session
from ..processing import process
from .base import Draft, Drafter, Sampling


class ModelDrafter:
    """Draws each token from a smaller model's law, processed, sharpened and truncated exactly as the target's.

    Args:
        model: a `FastLlama` or a transformers causal language model of the target's tokenizer.  Its vocabulary may be
            padded to another size than the target's (Qwen's models have 151,936 or 152,064 rows for the same tokens).
        confidence: a draft ends after a token that the model gave less probability than this, at temperature 1.  The
            token itself is kept and verified: dropping it would change the output law (`verify.mutants`).
    """

    def __init__(self, model: Any, confidence: float = 0.0):
        self.model = model
        self.confidence = check_confidence(confidence)

    def start(self, vocabulary: int) -> ModelDraftSession:
        return ModelDraftSession(self.model, self.confidence, vocabulary)

    def start_batch(self, rows: int, vocabulary: int) -> ModelDraftBatch:
        return ModelDraftBatch(self.model, rows, self.confidence, vocabulary)

    def with_confidence(self, threshold: float) -> ModelDrafter:
        return ModelDrafter(self.model, threshold)


class ModelDraftSession:
    def __init__(self, model: Any, confidence: float, vocabulary: int):
        self.session = open_session(model)
        self.limits = Limits(model, vocabulary)
        self.confidence = confidence
        self.fed: list[int] = []  # the tokens that the session holds

    def propose(self, prefix: list[int], gamma: int, sampling: Sampling, random: Random) -> Draft:
        gamma = self.limits.length(prefix, gamma)
        if gamma < 1:
            return Draft([])
        drawing = Drawing(prefix, gamma, sampling, random, self.confidence)
        wanted = drawing.step(self.catch_up(prefix))
        while wanted:
            wanted = drawing.step(self.feed(drawing.tokens[-1:]))
        return drawing.draft()

    def catch_up(self, prefix: list[int]) -> torch.Tensor:
        """Drop what was rejected, feed what is new; the logits `[V]` that follow `prefix`."""
        common = in_common(self.fed, prefix)
        self.session.rollback(common)
        del self.fed[common:]
        return self.feed(prefix[common:])

    def feed(self, tokens: list[int]) -> torch.Tensor:
        self.fed += tokens
        return self.limits.fit(self.session.feed(torch.tensor([tokens], device=self.session.device))[0, -1])


class ModelDraftBatch:
    """Drafts for several rows at once, in one pass a token; a row does not see the others."""

    def __init__(self, model: Any, rows: int, confidence: float, vocabulary: int):
        self.batch = open_batch(model, rows)
        self.limits = Limits(model, vocabulary)
        self.confidence = confidence
        self.fed: list[list[int]] = [[] for _ in range(rows)]

    def propose(
        self, prefixes: list[list[int]], gammas: list[int], samplings: list[Sampling], randoms: list[Random]
    ) -> list[Draft]:
        drawings = [
            Drawing(prefix, self.limits.length(prefix, gamma), sampling, random, self.confidence)
            for prefix, gamma, sampling, random in zip(prefixes, gammas, samplings, randoms, strict=True)
        ]
        common = [in_common(fed, prefix) for fed, prefix in zip(self.fed, prefixes, strict=True)]
        self.batch.rollback(common)
        new = []
        for i, (n, drawing) in enumerate(zip(common, drawings, strict=True)):
            del self.fed[i][n:]
            new.append(drawing.prefix[n:] if drawing.gamma > 0 else [])
        while any(new):
            logits = self.batch.feed(new, [min(len(ids), 1) for ids in new])
            for i, ids in enumerate(new):
                self.fed[i] += ids
                new[i] = drawings[i].tokens[-1:] if ids and drawings[i].step(self.limits.fit(logits[i][-1])) else []
        return [drawing.draft() for drawing in drawings]

    def keep(self, rows: list[int]) -> None:
        """Go on with these rows only."""
        self.batch.keep(rows)
        self.fed = [self.fed[i] for i in rows]


class Limits:
    """What a draft model can read and say, beside a target of `vocabulary` tokens: the same ones, perhaps padded."""

    def __init__(self, model: Any, vocabulary: int):
        self.context, self.rows, self.vocabulary = context_length(model), vocabulary_size(model), vocabulary
        if is_encoder_decoder(model) and self.rows != vocabulary:
            raise SpecdecError(
                f"an encoder-decoder's vocabulary ({self.rows} tokens) does not fit the target's ({vocabulary}): "
                "use a draft of the target's vocabulary, or PromptLookupDrafter()"
            )

    def length(self, prefix: list[int], gamma: int) -> int:
        """The draft length after `prefix`: no more than the context has room for, 0 if a token cannot be read."""
        if self.rows < self.vocabulary and max(prefix) >= self.rows:
            return 0
        return min(gamma, self.context - len(prefix))

    def fit(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits `[vocabulary]` from `[rows]`: rows too many are dropped, tokens without a row have probability 0."""
        if self.rows == self.vocabulary:
            return logits
        more = max(self.vocabulary - self.rows, 0)
        return torch.nn.functional.pad(logits[: self.vocabulary], (0, more), value=float("-inf"))


def in_common(fed: list[int], prefix: list[int]) -> int:
    """How many tokens of `prefix`, less its last one, are what was fed."""
    common = min(len(fed), len(prefix) - 1)
    while fed[:common] != prefix[:common]:
        common -= 1
    return common


class Drawing:
    """One draft on its way: each step is given the logits that follow the text so far and draws a token from them."""

    def __init__(self, prefix: list[int], gamma: int, sampling: Sampling, random: Random, confidence: float = 0.0):
        self.prefix, self.gamma, self.sampling, self.random = prefix, gamma, sampling, random
        self.confidence = confidence
        self.tokens: list[int] = []
        self.laws: list[torch.Tensor] = []
        self.passes = 0

    def step(self, logits: torch.Tensor) -> bool:
        """Draw a token from `logits` `[V]`; whether one more is wanted after it."""
        self.passes += 1
        if self.sampling.processors:
            ids = torch.tensor([*self.prefix, *self.tokens], device=logits.device)
            logits = process(self.sampling.processors, ids, logits)
            if not bool(logits.max() > float("-inf")):  # all that the processors allow has probability 0 here
                return False
        if self.sampling.greedy:
            token = int(logits.argmax())
        else:
            self.laws.append(self.sampling.law(logits))
            token = inverse_cdf(self.laws[-1], self.random.random())
        self.tokens.append(token)
        if self.confidence and float(logits.softmax(-1)[token]) < self.confidence:
            return False
        return len(self.tokens) < self.gamma

    def draft(self) -> Draft:
        return Draft(self.tokens, torch.stack(self.laws) if self.laws else None, self.passes)


def check_confidence(threshold: float) -> float:
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 <= threshold <= 1:
        raise SpecdecError(
            f"a confidence threshold must lie in [0, 1], got {threshold!r}: 0 never ends a draft early, 0.4 is usual"
        )
    return threshold


def check_draft_model(model: Any) -> None:
    """Refuse a model that cannot draft text of its own tokens."""
    if hasattr(model, "config") and is_encoder_decoder(model):
        raise SpecdecError("an encoder-decoder cannot draft in other tokens: use a decoder-only draft")


def as_drafter(draft: Any) -> Drafter:
    """A drafter as it is; a model wrapped as one."""
    if hasattr(draft, "start"):
        return draft
    if hasattr(draft, "config"):
        return ModelDrafter(draft)
    raise SpecdecError(
        f"{type(draft).__name__} is no draft: give a model, a drafter such as PromptLookupDrafter(), or a folder's name"
    )
