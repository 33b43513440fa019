"""Prompt lookup: if the text repeats itself, propose what followed last time.

Prompt lookup decoding is by Apoorv Saxena (2023).  The draft is deterministic, so its distribution is a point mass.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from random import Random
from typing import ClassVar

from .. import validate
from ..errors import SpecdecError
from ..sampling import SamplingParams
from .base import Draft, Drafter, DraftSession


@dataclass(frozen=True)
class PromptLookupDrafter(Drafter):
    """Propose the continuation of the most recent earlier occurrence of the longest matching suffix.

    Args:
        max_ngram: the longest suffix that is looked up, in tokens.
        min_ngram: the shortest suffix.

    >>> session = PromptLookupDrafter(max_ngram=2).start(vocabulary=10)
    >>> session.propose([1, 2, 3, 4, 1, 2], gamma=3, params=SamplingParams(), random=Random(0)).tokens
    [3, 4, 1]
    """

    certain: ClassVar[bool] = True
    max_ngram: int = 3
    min_ngram: int = 1

    def __post_init__(self) -> None:
        for name in ("max_ngram", "min_ngram"):
            object.__setattr__(self, name, validate.whole(name, getattr(self, name), 1))
        if self.min_ngram > self.max_ngram:
            raise SpecdecError(f"prompt lookup needs min_ngram <= max_ngram, got {self.min_ngram} and {self.max_ngram}")

    def start(self, vocabulary: int) -> LookupSession:
        return LookupSession(self.max_ngram, self.min_ngram, vocabulary)


class LookupSession(DraftSession):
    """An index of the text's n-grams, which grows with the text."""

    def __init__(self, longest: int, shortest: int, vocabulary: int):
        self.vocabulary = vocabulary
        self.sizes = range(longest, shortest - 1, -1)
        self.after: dict[tuple[int, ...], int] = {}  # n-gram -> position after its last occurrence
        self.indexed = 0  # n-grams that end before this position are in `after`

    def propose(self, prefix: list[int], gamma: int, params: SamplingParams, random: Random) -> Draft:
        # index every n-gram that ends before the last token: the suffix must not find itself
        for end in range(self.indexed + 1, len(prefix)):
            for size in self.sizes:
                if size <= end:
                    self.after[tuple(prefix[end - size : end])] = end
        self.indexed = max(self.indexed, len(prefix) - 1)
        for size in self.sizes:
            if size <= len(prefix) and (start := self.after.get(tuple(prefix[-size:]))):
                found = prefix[start : start + gamma]
                # an encoder-decoder's start marker is not a token: the draft ends there
                return Draft(list(takewhile(lambda token: token < self.vocabulary, found)), certain=True)
        return Draft([])
