"""Who proposes.  A drafter returns tokens *and the laws they were truly drawn from*: losslessness rests on it."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Protocol

import torch

from ..distributions import one_hot, warp
from ..errors import SpecdecError


@dataclass(frozen=True)
class Sampling:
    """How a law is made from logits; the same for target and draft, as in the paper's experiments.

    Attributes:
        temperature: >= 0; 0 decodes greedily.
        top_k, top_p, min_p: truncations, None for none.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

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
        """The laws `[g, V]`, on the device and in the dtype of `like` `[>= g, V]`."""
        g = len(self.tokens)
        if self.laws is not None:
            return self.laws
        return one_hot(torch.tensor(self.tokens, device=like.device, dtype=torch.long), like[:g])


class DraftSession(Protocol):
    """A drafter at work on one text."""

    def propose(self, prefix: list[int], gamma: int, sampling: Sampling, random: Random) -> Draft:
        """At most `gamma` tokens to follow `prefix`, which extends the prefix of the call before."""
        ...


class Drafter(Protocol):
    """Anything that can start a draft session for a text of the given target vocabulary."""

    def start(self, vocabulary: int) -> DraftSession: ...
