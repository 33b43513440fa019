"""Several drafters, the first that has a proposal wins: lookup where the text repeats itself, a model elsewhere.

Who proposes is decided by the prefix alone, so each proposal keeps the law that its own drafter reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from ..errors import SpecdecError
from ..models.batch import Batch
from .base import Draft, DraftBatch, Drafter, DraftSession, Sampling, reads_target, start_rows


@dataclass(frozen=True)
class ComposedDrafter:
    """Ask the drafters in turn; take the first draft that is not empty.

    Args:
        drafters: for example `[PromptLookupDrafter(min_ngram=2, max_ngram=6), ModelDrafter(model)]`.
        longest: how many tokens each proposes at most, whatever gamma is; None sets no limit.  A lookup costs nothing
            and may propose many, each token of a model costs a pass.

    >>> from specdec_lib.drafters import NGramDrafter, PromptLookupDrafter
    >>> drafter = ComposedDrafter([PromptLookupDrafter(min_ngram=2), NGramDrafter.fit([[8, 9, 9]])], [None, 2])
    >>> session = drafter.start(vocabulary=10)
    >>> session.propose([1, 2, 3, 1, 2], 1, Sampling(), Random(0)).tokens  # "1 2" occurred before
    [3]
    >>> session.propose([1, 2, 3, 1, 8], 3, Sampling(), Random(0)).tokens  # "1 8" did not
    [9, 9]
    """

    drafters: Sequence[Drafter]
    longest: Sequence[int | None] | None = None

    def __post_init__(self) -> None:
        if not self.drafters:
            raise SpecdecError("a composed drafter needs at least one drafter, got none")
        limits = self.limits
        if len(limits) != len(self.drafters) or any(n is not None and n < 1 for n in limits):
            raise SpecdecError(
                f"longest must have a number >= 1 or None for each of {len(self.drafters)} drafters, got {limits}"
            )

    @property
    def limits(self) -> Sequence[int | None]:
        return self.longest or [None] * len(self.drafters)

    @property
    def certain(self) -> bool:
        return all(getattr(drafter, "certain", False) for drafter in self.drafters)

    @property
    def confidence(self) -> float:
        """The largest of its drafters' thresholds."""
        return max(getattr(drafter, "confidence", 0.0) for drafter in self.drafters)

    @property
    def reads_target(self) -> bool:
        return any(reads_target(drafter) for drafter in self.drafters)

    @property
    def one_text(self) -> bool:
        return any(getattr(drafter, "one_text", False) for drafter in self.drafters)

    def start(self, vocabulary: int) -> ComposedSession:
        return ComposedSession([drafter.start(vocabulary) for drafter in self.drafters], self.limits)

    def start_batch(self, rows: int, vocabulary: int) -> ComposedBatch:
        return ComposedBatch([start_rows(drafter, rows, vocabulary) for drafter in self.drafters], self.limits)

    def start_on(self, target: Batch, vocabulary: int) -> ComposedBatch:
        """As `start_batch`, for drafters that read the target."""
        rows = len(target.lengths)
        return ComposedBatch([start_rows(drafter, rows, vocabulary, target) for drafter in self.drafters], self.limits)

    def with_confidence(self, threshold: float) -> ComposedDrafter:
        """The threshold goes to those of the drafters that have a confidence."""
        drafters = [d.with_confidence(threshold) if hasattr(d, "with_confidence") else d for d in self.drafters]
        if all(a is b for a, b in zip(drafters, self.drafters, strict=True)):
            raise SpecdecError("none of these drafters knows a confidence that a threshold could end a draft by")
        return ComposedDrafter(drafters, self.longest)


class ComposedSession:
    def __init__(self, sessions: list[DraftSession], limits: Sequence[int | None]):
        self.sessions, self.limits = sessions, limits

    def propose(self, prefix: list[int], gamma: int, sampling: Sampling, random: Random) -> Draft:
        for session, limit in zip(self.sessions, self.limits, strict=True):
            draft = session.propose(prefix, min(gamma, limit or gamma), sampling, random)
            if draft.tokens:
                return draft
        return Draft([])


class ComposedBatch:
    def __init__(self, batches: list[DraftBatch], limits: Sequence[int | None]):
        self.batches, self.limits = batches, limits

    def propose(
        self, prefixes: list[list[int]], gammas: list[int], samplings: list[Sampling], randoms: list[Random]
    ) -> list[Draft]:
        drafts = [Draft([]) for _ in prefixes]
        for batch, limit in zip(self.batches, self.limits, strict=True):
            wanted = [0 if d.tokens else min(gamma, limit or gamma) for d, gamma in zip(drafts, gammas, strict=True)]
            if any(n > 0 for n in wanted):
                found = batch.propose(prefixes, wanted, samplings, randoms)
                drafts = [a if a.tokens else b for a, b in zip(drafts, found, strict=True)]
        return drafts

    def keep(self, rows: list[int]) -> None:
        for batch in self.batches:
            batch.keep(rows)
