"""The base classes of drafters.  A drafter returns tokens *and the distributions that they were drawn from*.

Losslessness depends on it: the verifier divides by these probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

import torch

from ..distributions import one_hot
from ..errors import SpecdecError
from ..models.rows import on_device
from ..models.session import Session
from ..sampling import SamplingParams


@dataclass
class Draft:
    """Proposed tokens and the distributions they come from.

    Attributes:
        tokens: the proposed ids, 0 to gamma of them: a list, or an int64 tensor `[g]` on its device (a tensor on a CPU
            becomes a list).
        probs: float `[g, V]`, the distribution that each token was drawn from, on any device.
        certain: True if the draft is deterministic, as in a lookup: each distribution is a point mass, and `probs` is
            None.  At temperature 0 every draft may leave out `probs`.
        passes: how often a draft model ran.
    """

    tokens: Sequence[int] | torch.Tensor
    probs: torch.Tensor | None = None
    certain: bool = False
    passes: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.tokens, torch.Tensor) and self.tokens.device.type == "cpu":
            self.bring_home()

    def __len__(self) -> int:
        return len(self.tokens)

    def on(self, device: torch.device) -> torch.Tensor:
        """The tokens as a tensor `[g]` on `device`."""
        return self.tokens.to(device) if isinstance(self.tokens, torch.Tensor) else on_device(self.tokens, device)

    def probs_like(self, p: torch.Tensor) -> torch.Tensor:
        """The distributions `[g, V]` on the device of `p` `[>= g, V]`; point masses in its dtype."""
        if self.probs is not None:
            return self.probs.to(p.device)
        return one_hot(self.on(p.device), p[: len(self)]) if len(self) else p[:0]

    def bring_home(self) -> list[int]:
        """The tokens as a list; the host waits if they are on a device.  The draft keeps the list."""
        if isinstance(self.tokens, torch.Tensor):
            self.tokens = self.tokens.tolist()
        return list(self.tokens)


def bring_all_home(drafts: Sequence[Draft]) -> list[list[int]]:
    """The tokens of each draft as a list; the host waits once for all drafts together."""
    away = [draft for draft in drafts if isinstance(draft.tokens, torch.Tensor)]
    if away:
        flat = torch.cat([torch.as_tensor(draft.tokens) for draft in away]).tolist()
        for draft in away:
            draft.tokens, flat = flat[: len(draft)], flat[len(draft) :]
    return [draft.bring_home() for draft in drafts]


class DraftSession:
    """A drafter's state for one text."""

    def propose(self, prefix: list[int], gamma: int, params: SamplingParams, random: Random) -> Draft:
        """Propose at most `gamma` tokens to follow `prefix`.

        Args:
            prefix: the whole text so far, prompt included.  From call to call it only grows; another text needs a new
                session.
            gamma: >= 1.
            params: how to sample; at temperature 0 propose the most probable tokens.
            random: the text's own generator; `sampling.draw(probs, random)` draws a token.

        Returns:
            A `Draft`.  It may be shorter than `gamma`, or empty.
        """
        raise NotImplementedError


class DraftBatch:
    """A drafter's state for several texts.  The base class runs one session after the other.

    Args:
        sessions: one for each text.
    """

    def __init__(self, sessions: Sequence[DraftSession] = ()):
        self.sessions = list(sessions)

    def propose(
        self, prefixes: list[list[int]], gammas: list[int], params: list[SamplingParams], randoms: list[Random]
    ) -> list[Draft]:
        """As `DraftSession.propose`, for each text; a text with a gamma below 1 gets an empty draft."""
        return [
            session.propose(prefix, gamma, how, random) if gamma > 0 else Draft([])
            for session, prefix, gamma, how, random in zip(
                self.sessions, prefixes, gammas, params, randoms, strict=True
            )
        ]

    def select_rows(self, rows: Sequence[int]) -> None:
        """Go on with these texts, in this order; one may come more than once."""
        self.sessions = [self.sessions[i] for i in rows]


class Drafter:
    """Anything that proposes tokens.  A drafter of your own overrides `start`, and the defaults that do not fit.

    Attributes:
        certain: whether its drafts are deterministic at any temperature.
        reads_target: whether it drafts from results of the target; it then overrides `start_batch`.
        one_text: whether it can only draft for one text at a time.
        confidence: a draft ends after a token that was less probable than this; 0 switches this off.

    A drafter that always repeats the last token twice:

    >>> class Stutter(Drafter):
    ...     certain = True
    ...     def start(self, vocabulary):
    ...         return StutterSession()
    >>> class StutterSession(DraftSession):
    ...     def propose(self, prefix, gamma, params, random):
    ...         return Draft(prefix[-1:] * min(gamma, 2), certain=True)
    >>> Stutter().start(vocabulary=10).propose([5, 7], 4, SamplingParams(), Random(0)).tokens
    [7, 7]
    """

    certain: ClassVar[bool] = False
    reads_target: ClassVar[bool] = False
    one_text: ClassVar[bool] = False
    confidence: float = 0.0

    @property
    def models(self) -> list[Any]:
        """The models that it runs, without its target."""
        return []

    def start(self, vocabulary: int) -> DraftSession:
        """A session for one text; `vocabulary` is the target's number of tokens, and of columns of `Draft.probs`."""
        raise NotImplementedError

    def start_batch(self, rows: int, vocabulary: int, target: Session | None = None) -> DraftBatch:
        """Sessions for several texts.

        Args:
            rows: how many texts.
            vocabulary: the target's number of tokens.
            target: the target's session with as many rows, still empty; None if there is none.
        """
        return DraftBatch([self.start(vocabulary) for _ in range(rows)])

    def with_confidence(self, threshold: float) -> Drafter:
        """The drafter with another `confidence`; the draft-length policy `Confidence` asks for it."""
        raise SpecdecError(
            f"{type(self).__name__} has no confidence by which a threshold could end a draft: "
            "use another draft-length policy as gamma, or a draft model"
        )


def check_draft(draft: Any, drafter: Drafter, gamma: int, params: SamplingParams, vocabulary: int) -> None:
    """Refuse a draft that breaks the contract of `propose`, as far as its shape shows."""
    name = type(drafter).__name__
    if not isinstance(draft, Draft):
        raise SpecdecError(f"{name} must return a Draft, got a {type(draft).__name__}: return Draft(tokens, probs)")
    g, tokens = len(draft), draft.tokens
    if g > max(gamma, 0):
        raise SpecdecError(f"{name} drafted {g} tokens where {gamma} were asked for: return at most gamma tokens")
    if not isinstance(tokens, torch.Tensor) and (bad := [t for t in tokens if not 0 <= t < vocabulary]):
        raise SpecdecError(f"{name} drafted token {bad[0]}, outside the target's vocabulary of {vocabulary}")
    if draft.probs is None:
        if g and not (draft.certain or params.greedy):
            raise SpecdecError(
                f"{name} drafted at temperature {params.temperature:g} without probabilities: return Draft(tokens, "
                "probs) with what they were drawn from, or Draft(tokens, certain=True) if they are deterministic"
            )
    elif draft.certain or tuple(draft.probs.shape) != (g, vocabulary):
        given = "certain" if draft.certain else f"of shape {tuple(draft.probs.shape)}"
        raise SpecdecError(
            f"{name} drafted {g} tokens with probabilities {given}: they must have shape ({g}, {vocabulary}), "
            "a row for each token, and a certain draft has none"
        )
