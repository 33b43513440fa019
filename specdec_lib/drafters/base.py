"""Who proposes.  A drafter returns tokens *and the laws they were truly drawn from*: losslessness rests on it."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

import torch

from ..distributions import one_hot, warp
from ..errors import SpecdecError
from ..processing import Processor


@dataclass(frozen=True)
class Sampling:
    """How a law is made from logits; the same for target and draft, as in the paper's experiments.

    Attributes:
        temperature: >= 0; 0 decodes greedily.
        top_k, top_p, min_p: truncations, None for none.
        processors: see `specdec_lib.processing`; they come first, and see the text so far.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    processors: tuple[Processor, ...] = ()

    def __post_init__(self) -> None:
        t = self.temperature
        if isinstance(t, bool) or not isinstance(t, (int, float)) or not 0 <= t < float("inf"):
            raise SpecdecError(
                f"temperature must be a number >= 0, got {t!r}: use 0 for greedy decoding, 1 for sampling"
            )
        if self.top_k is not None and (not isinstance(self.top_k, int) or self.top_k < 1):
            raise SpecdecError(
                f"top_k must be a whole number >= 1, got {self.top_k!r}: leave it out to keep all tokens"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise SpecdecError(f"top_p must lie in (0, 1], got {self.top_p!r}: leave it out to keep all tokens")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise SpecdecError(f"min_p must lie in [0, 1], got {self.min_p!r}: leave it out to keep all tokens")
        set_ones = [n for n in ("top_k", "top_p", "min_p") if getattr(self, n) is not None]
        if t == 0 and set_ones:
            raise SpecdecError(
                f"{set_ones[0]} changes nothing at temperature 0: leave it out, or set temperature above 0"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def law(self, logits: torch.Tensor) -> torch.Tensor:
        """Laws `[..., V]` from logits `[..., V]`, in float32 at least."""
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        return warp(logits, self.temperature, self.top_k, self.top_p, self.min_p)


@dataclass
class Draft:
    """Proposed tokens and their laws.

    Attributes:
        tokens: the proposed ids, at most gamma of them, perhaps none.
        laws: `[len(tokens), V]`, the law that each token was drawn from; None says that every token was certain
            (a point mass), as in a lookup or a greedy draft.
        passes: how often a draft model ran.
    """

    tokens: list[int]
    laws: torch.Tensor | None = None
    passes: int = 0

    def q(self, like: torch.Tensor) -> torch.Tensor:
        """The laws `[g, V]`, on the device of `like` `[>= g, V]`; point masses in its dtype."""
        g = len(self.tokens)
        if self.laws is not None:
            return self.laws.to(like.device)
        if g == 0:
            return like[:0]
        return one_hot(torch.tensor(self.tokens, device=like.device, dtype=torch.long), like[:g])


class DraftSession(Protocol):
    """A drafter at work on one text."""

    def propose(self, prefix: list[int], gamma: int, sampling: Sampling, random: Random) -> Draft:
        """At most `gamma` tokens to follow `prefix`, which extends the prefix of the call before."""
        ...


class Drafter(Protocol):
    """Anything that can start a draft session for a text of the given target vocabulary.

    Five more things, where a drafter has them:

    * `certain`: True where its drafts leave nothing to chance, at any temperature;
    * `start_batch(rows, vocabulary) -> DraftBatch`: drafts for several rows at once;
    * `with_confidence(threshold) -> Drafter`: one that stops after a token it was less sure of (`lengths.Confidence`);
    * `reads_target`: True where it drafts with what the target has computed; in place of `start` it has
      `start_on(target, vocabulary) -> DraftBatch`, where `target` is the `models.batch.Batch` of the call;
    * `one_text`: True where that batch may have one row only.
    """

    def start(self, vocabulary: int) -> DraftSession: ...


class DraftBatch(Protocol):
    """A drafter at work on several texts."""

    def propose(
        self, prefixes: list[list[int]], gammas: list[int], samplings: list[Sampling], randoms: list[Random]
    ) -> list[Draft]:
        """As `DraftSession.propose`, for each row; a row with `gamma` below 1 drafts nothing."""
        ...

    def keep(self, rows: list[int]) -> None:
        """Go on with these rows only."""
        ...


class RowByRow:
    """Draft sessions as a batch: one row after the other."""

    def __init__(self, sessions: list[DraftSession]):
        self.sessions = sessions

    def propose(
        self, prefixes: list[list[int]], gammas: list[int], samplings: list[Sampling], randoms: list[Random]
    ) -> list[Draft]:
        return [
            session.propose(prefix, gamma, sampling, random) if gamma > 0 else Draft([])
            for session, prefix, gamma, sampling, random in zip(
                self.sessions, prefixes, gammas, samplings, randoms, strict=True
            )
        ]

    def keep(self, rows: list[int]) -> None:
        self.sessions = [self.sessions[i] for i in rows]


class NoDrafts:
    """Plain decoding: nothing is proposed."""

    def propose(
        self, prefixes: list[list[int]], gammas: list[int], samplings: list[Sampling], randoms: list[Random]
    ) -> list[Draft]:
        return [Draft([]) for _ in prefixes]

    def keep(self, rows: list[int]) -> None: ...


def reads_target(drafter: Any) -> bool:
    """Whether a drafter works in its target's own session."""
    return getattr(drafter, "reads_target", False)


def start_rows(drafter: Any, rows: int, vocabulary: int, target: Any = None) -> DraftBatch:
    """A batch of a drafter's own where it has one and there is more than one row, else row by row.

    Args:
        target: the target's batch, for a drafter that reads it.
    """
    if reads_target(drafter) and target is not None:
        return drafter.start_on(target, vocabulary)
    if rows > 1 and hasattr(drafter, "start_batch"):
        return drafter.start_batch(rows, vocabulary)
    return RowByRow([drafter.start(vocabulary) for _ in range(rows)])
