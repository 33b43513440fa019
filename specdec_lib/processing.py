"""Logits processors: penalties, bans, forced tokens and masks, as transformers defines them.

A processor is a function `(input_ids [1, n], scores [1, V]) -> scores [1, V]` of the text so far and the logits of the
next token.  In a block of draft tokens each position has its own history: the text and the draft tokens before it.
Processors come before temperature and truncation, as in transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from .errors import SpecdecError

Processor: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# These keep state from call to call, which is wrong once a draft token is rejected, or need a second batch.
STATEFUL = {
    "ClassifierFreeGuidanceLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
}


def as_processors(given: Any) -> tuple[Processor, ...]:
    """One processor, a list of them (such as a `LogitsProcessorList`) or None, checked."""
    if given is None:
        return ()
    processors = tuple(given) if isinstance(given, Iterable) else (given,)
    for one in processors:
        name = type(one).__name__
        if not callable(one):
            raise SpecdecError(
                f"a logits processor is a function of (input_ids, scores), got {one!r}: "
                "give transformers' LogitsProcessor or a function like them"
            )
        if name in STATEFUL:
            raise SpecdecError(
                f"{name} is not a function of the text so far, as drafting needs: use it with transformers' generate"
            )
    return processors


@dataclass(frozen=True)
class NoEndBefore:
    """The processor of `min_new_tokens`: no end-of-sequence token before position `length` of the text.

    Like transformers' `MinNewTokensLengthLogitsProcessor`, but it works on the device of its input: draft and target
    may be on different ones.
    """

    length: int
    ends: tuple[int, ...]

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[-1] < self.length:
            scores[:, list(self.ends)] = float("-inf")
        return scores


def process(processors: Sequence[Processor], ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The processed logits `[V]` of the token after the text `ids` `[n]`, in at least float32."""
    scores = logits[None].to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    for processor in processors:
        scores = processor(ids[None], scores)
    return scores[0]


def process_block(
    processors: Sequence[Processor],
    prefix: Sequence[int],
    draft: Sequence[int],
    logits: torch.Tensor,
    possible: Callable[[torch.Tensor, int], bool],
) -> torch.Tensor:
    """The processed logits `[g + 1, V]` of a block; each position has its own history.

    Args:
        prefix: the text before the draft.
        draft: `g` draft tokens.
        logits: `[g + 1, V]`, raw.
        possible: `(processed logits [V], draft token) -> ` whether the verifier may keep the token.  Positions after a
            token that cannot be kept are never used and stay raw: a grammar may have no answer for such a text.
    """
    ids = torch.tensor([*prefix, *draft], device=logits.device)
    rows = list(logits.to(torch.promote_types(logits.dtype, torch.float32)))
    for i in range(len(rows)):
        rows[i] = process(processors, ids[: len(prefix) + i], logits[i])
        if not bool(rows[i].max() > float("-inf")):
            raise SpecdecError(
                f"the processors leave no token to follow {len(prefix) + i} tokens of text: allow at least one"
            )
        if i < len(draft) and not possible(rows[i], draft[i]):
            break
    return torch.stack(rows)
