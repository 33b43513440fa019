"""Several drafters in order; the first with a proposal is used: a lookup if the text repeats itself, else a model.

The choice depends only on the prefix, so the distribution that the chosen drafter reports is right.
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
from .model import BatchAsSession, as_drafter


@dataclass(frozen=True)
class ComposedDrafter(Drafter):
    """Ask the drafters in order and take the first draft that is not empty.

    Args:
        drafters: for example `[PromptLookupDrafter(min_ngram=2, max_ngram=6), ModelDrafter(model)]`.
        longest: for each drafter the most tokens that it proposes, for any gamma; None sets no limit.  A lookup is free
            and may propose many tokens; each token of a model costs a pass.

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
        return BatchAsSession(self.start_batch(1, vocabulary))

    def start_batch(self, rows: int, vocabulary: int, target: Session | None = None) -> ComposedDrafts:
        return ComposedDrafts([d.start_batch(rows, vocabulary, target) for d in self.drafters], self.limits)

    def with_confidence(self, threshold: float) -> ComposedDrafter:
        """Sets the threshold of those drafters that have a confidence."""
        changed: list[Drafter] = []
        for drafter in self.drafters:
            try:
                changed.append(drafter.with_confidence(threshold))
            except SpecdecError:
                changed.append(drafter)
        if all(a is b for a, b in zip(changed, self.drafters, strict=True)):
            raise SpecdecError("none of these drafters has a confidence by which a threshold could end a draft")
        return ComposedDrafter(changed, self.longest)


class ComposedDrafts(DraftBatch):
    """For each text, the first draft that is not empty."""

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
