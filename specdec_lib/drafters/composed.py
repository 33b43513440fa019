"""Several drafters, the first that has a proposal wins: lookup where the text repeats itself, a model elsewhere.

Who proposes is decided by the prefix alone, so each proposal keeps the law that its own drafter reports.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from ..errors import SpecdecError
from .base import Draft, Drafter, DraftSession, Sampling


@dataclass(frozen=True)
class ComposedDrafter:
    """Ask the drafters in turn; take the first draft that is not empty.

    Args:
        drafters: for example `[PromptLookupDrafter(min_ngram=3, max_ngram=6), ModelDrafter(model)]`.

    >>> from specdec_lib.drafters import NGramDrafter, PromptLookupDrafter
    >>> drafter = ComposedDrafter([PromptLookupDrafter(min_ngram=2), NGramDrafter.fit([[8, 9, 9]])])
    >>> session = drafter.start(vocabulary=10)
    >>> session.propose([1, 2, 3, 1, 2], 1, Sampling(), Random(0)).tokens  # "1 2" occurred before
    [3]
    >>> session.propose([1, 2, 3, 1, 8], 1, Sampling(), Random(0)).tokens  # "1 8" did not
    [9]
    """

    drafters: tuple[Drafter, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "drafters", tuple(self.drafters))
        if not self.drafters:
            raise SpecdecError("a composed drafter needs at least one drafter, got none")

    def start(self, vocabulary: int) -> ComposedSession:
        return ComposedSession([drafter.start(vocabulary) for drafter in self.drafters])


class ComposedSession:
    def __init__(self, sessions: list[DraftSession]):
        self.sessions = sessions

    def propose(self, prefix: list[int], gamma: int, sampling: Sampling, random: Random) -> Draft:
        for session in self.sessions:
            draft = session.propose(prefix, gamma, sampling, random)
            if draft.tokens:
                return draft
        return Draft([])
