"""A draft model: the paper's drafter."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import torch

from .. import sampling, validate
from ..distributions import argmax
from ..errors import SpecdecError
from ..models.pair import is_encoder_decoder, vocabulary_size
from ..models.session import Session, open_session
from ..models.support import room
from ..processing import process
from ..sampling import SamplingParams, in_float32
from .base import Draft, DraftBatch, Drafter, DraftSession


class ModelDrafter(Drafter):
    """Draws each token from a smaller model's distribution, with the same processors, temperature and truncations.

    Args:
        model: a `FastLlama` or a transformers causal language model with the target's tokenizer.  Its vocabulary may be
            padded to another size than the target's (Qwen's models have 151,936 or 152,064 rows for the same tokens).
        confidence: a draft ends after a token with a probability below this, at temperature 1.  The token itself stays
            in the draft and is verified: dropping it would change the output distribution (`verify.mutants`).
    """

    def __init__(self, model: Any, confidence: float = 0.0):
        self.model = model
        self.confidence = check_confidence(confidence)

    @property
    def models(self) -> list[Any]:
        return [self.model]

    def start(self, vocabulary: int) -> DraftSession:
        return BatchAsSession(self.start_batch(1, vocabulary))

    def start_batch(self, rows: int, vocabulary: int, target: Session | None = None) -> ModelDrafts:
        return ModelDrafts(self.model, rows, self.confidence, vocabulary)

    def with_confidence(self, threshold: float) -> ModelDrafter:
        return ModelDrafter(self.model, threshold)


class BatchAsSession(DraftSession):
    """A batch of one text as a session."""

    def __init__(self, batch: DraftBatch):
        self.batch = batch

    def propose(self, prefix: list[int], gamma: int, params: SamplingParams, random: Random) -> Draft:
        return self.batch.propose([prefix], [gamma], [params], [random])[0]


class ModelDrafts(DraftBatch):
    """Drafts of a model for several texts at once, in one pass a token; texts do not affect each other."""

    def __init__(self, model: Any, rows: int, confidence: float, vocabulary: int):
        self.session = open_session(model, rows)
        self.limits = VocabularyLimits(model, vocabulary)
        self.confidence = confidence
        self.readers = [Reader() for _ in range(rows)]

    def propose(
        self, prefixes: list[list[int]], gammas: list[int], params: list[SamplingParams], randoms: list[Random]
    ) -> list[Draft]:
        samplers = [
            DraftSampler(prefix, self.limits.length(prefix, gamma), how, random, self.confidence)
            for prefix, gamma, how, random in zip(prefixes, gammas, params, randoms, strict=True)
        ]
        # roll back rejected tokens, and read the tokens written since
        held = [
            reader.sync(s.prefix) if s.gamma > 0 else length
            for reader, s, length in zip(self.readers, samplers, self.session.lengths, strict=True)
        ]
        self.session.rollback(held)
        new: list[Any] = [s.prefix[n:] if s.gamma > 0 else [] for s, n in zip(samplers, held, strict=True)]
        for reader, ids in zip(self.readers, new, strict=True):
            reader.read += ids
        while any(map(len, new)):
            logits = self.session.feed_rows(new, [min(len(ids), 1) for ids in new])
            for i, sampler in enumerate(samplers):
                more = len(new[i]) > 0 and sampler.step(self.limits.fit(logits[i][-1]))
                new[i] = sampler.last_token if more else []
        drafts = [sampler.draft() for sampler in samplers]
        for reader, draft in zip(self.readers, drafts, strict=True):
            reader.note(draft)
        return drafts

    def select_rows(self, rows: Sequence[int]) -> None:
        self.session.select_rows(rows)
        self.readers = [self.readers[i].copy() for i in rows]


class Reader:
    """The tokens of a text that a draft model's session holds, so that each round reads only new ones.

    Drafted tokens may be on a device; by the next round the loop has copied them to the host.

    Attributes:
        read: the tokens of the text that were read; the session also holds the drafted ones but the last, after them.
    """

    LOOKBACK = 10  # compared tokens, to see whether the text continues the one that was read

    def __init__(self, read: Sequence[int] = (), drafted: Draft | None = None):
        self.read = list(read)
        self.drafted = drafted or Draft([])

    def sync(self, prefix: list[int]) -> int:
        """With how many of the held tokens `prefix` begins; not counting its last, which is always read again.

        A text usually continues the last one, so only the end and the drafted tokens are compared.  If the end differs
        (a text that is encoded again may change there), all tokens are compared.
        """
        n = len(self.read)
        if self.read[-self.LOOKBACK :] == prefix[max(n - self.LOOKBACK, 0) : n]:
            drafted = self.drafted.bring_home()[:-1]  # the last one was never read
            kept = common_prefix_length(drafted, prefix[n:])
            self.read += drafted[:kept]
        else:
            del self.read[common_prefix_length(self.read, prefix) :]
        self.drafted = Draft([])
        del self.read[len(prefix) - 1 :]
        return len(self.read)

    def note(self, draft: Draft) -> None:
        """Remember the draft that follows the held tokens."""
        if len(draft):
            self.drafted = draft

    def copy(self) -> Reader:
        return Reader(self.read, self.drafted)


def common_prefix_length(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the longest common prefix of the lists `a` and `b`.

    >>> common_prefix_length([5, 6, 7], [5, 6, 8, 9])
    2
    """
    low, high = 0, min(len(a), len(b))
    while low < high:  # comparing slices is much faster than a loop over tokens
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class VocabularyLimits:
    """Fits a draft model to a target of `vocabulary` tokens: the same tokens, with another padding perhaps."""

    def __init__(self, model: Any, vocabulary: int):
        self.model, self.rows, self.vocabulary = model, vocabulary_size(model), vocabulary
        if is_encoder_decoder(model) and self.rows != vocabulary:
            raise SpecdecError(
                f"an encoder-decoder's vocabulary ({self.rows} tokens) does not fit the target's ({vocabulary}): "
                "use a draft of the target's vocabulary, or PromptLookupDrafter()"
            )

    def length(self, prefix: list[int], gamma: int) -> int:
        """The draft length after `prefix`: at most the room in the context; 0 if it lacks a token of `prefix`."""
        if self.rows < self.vocabulary and max(prefix) >= self.rows:
            return 0
        return min(gamma, room(self.model, prefix))

    def fit(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits `[vocabulary]` from `[rows]`: surplus rows are dropped, tokens without a row get probability 0."""
        if self.rows == self.vocabulary:
            return logits
        more = max(self.vocabulary - self.rows, 0)
        return torch.nn.functional.pad(logits[: self.vocabulary], (0, more), value=float("-inf"))


class DraftSampler:
    """Builds one draft: each step draws a token from the logits after the text so far.

    Tokens stay on the device of the logits, so no step waits for it, except for a confidence or a processor.
    """

    def __init__(self, prefix: list[int], gamma: int, params: SamplingParams, random: Random, confidence: float = 0.0):
        self.prefix, self.gamma, self.params, self.random = prefix, gamma, params, random
        self.confidence = confidence
        self.tokens: list[torch.Tensor] = []  # each int64 [1]
        self.probs: list[torch.Tensor] = []
        self.passes = 0

    @property
    def last_token(self) -> torch.Tensor:
        """The last drawn token, int64 `[1]`."""
        return self.tokens[-1]

    def step(self, logits: torch.Tensor) -> bool:
        """Draw a token from `logits` `[V]`; returns whether the draft goes on."""
        self.passes += 1
        if self.params.processors:
            ids = torch.cat([torch.tensor(self.prefix, device=logits.device), *self.tokens])
            logits = process(self.params.processors, ids, logits)
            if not bool(logits.max() > float("-inf")):  # the draft gives every allowed token probability 0
                return False
        if self.params.greedy:
            token = argmax(logits)
        else:
            self.probs.append(self.params.probs(logits))
            token = sampling.draw(self.probs[-1], self.random)
        self.tokens.append(torch.as_tensor(token, dtype=torch.long, device=logits.device).reshape(1))
        if self.confidence and float(in_float32(logits).softmax(-1)[token]) < self.confidence:
            return False
        return len(self.tokens) < self.gamma

    def draft(self) -> Draft:
        tokens: Any = torch.cat(self.tokens) if self.tokens else []
        return Draft(tokens, torch.stack(self.probs) if self.probs else None, passes=self.passes)


def check_confidence(threshold: float) -> float:
    return validate.number("a confidence threshold", threshold, 0, 1, remedy="0 never ends a draft early, 0.4 is usual")


def check_draft_model(model: Any) -> None:
    """Refuse a model that cannot draft text of its own tokens."""
    if not isinstance(model, Drafter) and is_encoder_decoder(model):
        raise SpecdecError("an encoder-decoder cannot draft in other tokens: use a decoder-only draft")


def as_drafter(draft: Any) -> Drafter:
    """A drafter as it is; a model wrapped in a `ModelDrafter`."""
    if isinstance(draft, Drafter):
        return draft
    if isinstance(draft, type) and issubclass(draft, Drafter):
        raise SpecdecError(f"{draft.__name__} is a class: give an instance, {draft.__name__}(...)")
    if hasattr(draft, "config") and not isinstance(draft, type):
        return ModelDrafter(draft)
    raise SpecdecError(
        f"{validate.shown(draft)} is not a draft: give a model, or a subclass of specdec_lib.Drafter such as "
        "PromptLookupDrafter()"
    )
