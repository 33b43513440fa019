"""Several drafters, the first that has a proposal wins: lookup where the text repeats itself, a model elsewhere.

Who proposes is decided by the prefix alone, so each proposal keeps the law that its own drafter reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from ..errors import SpecdecError
from ..models.session import Session
from ..sampling import SamplingParams
from .base import Draft, DraftBatch, Drafter, DraftSession
from .model import OneText, as_drafter


@dataclass(frozen=True)
class ComposedDrafter(Drafter):
    """Ask the drafters in turn; take the first draft that is not empty.

    Args:
        drafters: for example `[PromptLookupDrafter(min_ngram=2, max_ngram=6), ModelDrafter(model)]`.
        longest: how many tokens each proposes at most, whatever gamma is; None sets no limit.  A lookup costs nothing
            and may propose many, each token of a model costs a pass.

    >>> from specdec_lib.drafters import NGramDrafter, PromptLookupDrafter
    >>> drafter = ComposedDrafter([PromptLookupDrafter(min_ngram=2), NGramDrafter.fit([[8, 9, 9]])], [None, 2])
    >>> session = drafter.start(vocabulary=10)
    >>> session.propose([1, 2, 3, 1, 2], 1, SamplingParams(), Random(0)).tokens  # "1 2" occurred before
    [3]
    >>> session.propose([1, 2, 3, 1, 2, 3, 8], 3, SamplingParams(), Random(0)).tokens  # "3 8" did not
    [9, 9]
    """

    drafters: Sequence[Drafter]
    longest: Sequence[int | None] | None = None

    def __post_init__(self) -> None:
        if not self.drafters:
            raise SpecdecError("a composed drafter needs at least one drafter, got none")
        object.__setattr__(self, "drafters", [as_drafter(drafter) for drafter in self.drafters])
        limits = self.limits
        if len(limits) != len(self.drafters) or any(n is not None and n < 1 for n in limits):
            raise SpecdecError(
                f"longest must have a number >= 1 or None for each of {len(self.drafters)} drafters, got {limits}"
            )

    @property
    def limits(self) -> Sequence[int | None]:
        return self.longest or [None] * len(self.drafters)

    @property
    def certain(self) -> bool:  # type: ignore[override]
        return all(drafter.certain for drafter in self.drafters)

    @property
    def confidence(self) -> float:  # type: ignore[override]
        """The largest of its drafters' thresholds."""
        return max(drafter.confidence for drafter in self.drafters)

    @property
    def reads_target(self) -> bool:  # type: ignore[override]
        return any(drafter.reads_target for drafter in self.drafters)

    @property
    def one_text(self) -> bool:  # type: ignore[override]
        return any(drafter.one_text for drafter in self.drafters)

    @property
    def models(self) -> list[Any]:
        return [model for drafter in self.drafters for model in drafter.models]

    def start(self, vocabulary: int) -> DraftSession:
        return OneText(self.start_batch(1, vocabulary))

    def start_batch(self, rows: int, vocabulary: int, target: Session | None = None) -> ComposedDrafts:
        return ComposedDrafts([d.start_batch(rows, vocabulary, target) for d in self.drafters], self.limits)

    def with_confidence(self, threshold: float) -> ComposedDrafter:
        """The threshold goes to those of the drafters that have a confidence."""
        changed: list[Drafter] = []
        for drafter in self.drafters:
            try:
                changed.append(drafter.with_confidence(threshold))
            except SpecdecError:
                changed.append(drafter)
        if all(a is b for a, b in zip(changed, self.drafters, strict=True)):
            raise SpecdecError("none of these drafters knows a confidence that a threshold could end a draft by")
        return ComposedDrafter(changed, self.longest)


class ComposedDrafts(DraftBatch):
    """For each text the first of several drafts that is not empty."""

    def __init__(self, batches: list[DraftBatch], limits: Sequence[int | None]):
        self.batches, self.limits = batches, limits

    def propose(
        self, prefixes: list[list[int]], gammas: list[int], params: list[SamplingParams], randoms: list[Random]
    ) -> list[Draft]:
        drafts = [Draft([]) for _ in prefixes]
        for batch, limit in zip(self.batches, self.limits, strict=True):
            wanted = [0 if len(d) else min(gamma, limit or gamma) for d, gamma in zip(drafts, gammas, strict=True)]
            if any(n > 0 for n in wanted):
                found = batch.propose(prefixes, wanted, params, randoms)
                drafts = [a if len(a) else b for a, b in zip(drafts, found, strict=True)]
        return drafts

    def select_rows(self, rows: Sequence[int]) -> None:
        for batch in self.batches:
            batch.select_rows(rows)
