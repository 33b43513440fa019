"""The options of a call, checked in one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from inspect import Parameter, signature
from typing import Any, TypeVar

from .. import validate
from ..errors import SpecdecError
from ..processing import as_processors
from ..sampling import SamplingParams
from .results import Round
from .stopping import as_tuple

Door = TypeVar("Door", bound=Callable[..., Any])


@dataclass(frozen=True)
class DecodeOptions:
    """The options of `generate` and `generate_plain`.

    Attributes:
        max_new_tokens: >= 0; exactly this many unless the text ends before.  None decodes to the end of the target's
            context.
        temperature, top_k, top_p, min_p: see `SamplingParams`; the same for target and draft.
        seed: random seed.  Text `i` draws from its own stream `(seed, i)`, so it does not depend on the other texts.
            The same seed gives the same text; plain decoding with that seed gives another text.
        eos: ids that end a text; None uses the model's, `[]` decodes to `max_new_tokens`.
        on_round: called after each round, for example to show it.
        min_new_tokens: end-of-sequence ids have probability 0 before this many new tokens.  Stop strings and criteria
            may still end a text earlier, as in transformers.
        stop: strings that end a text.  Searched in the new text after each token, also across tokens; `texts` stop
            before the string, `tokens` with the token that completes it.
        criteria: transformers' `StoppingCriteria`, one or a list, or functions like them; called after each new token.
        processors: transformers' logits processors, one or a list, or functions like them; see `processing`.  They
            change the target's distribution and a draft model's.  For an encoder-decoder they and the criteria
            see what transformers shows them: the decoder's start token and the output, not the source.
        logprobs: record `Generation.logprobs` and `Generation.scores`.
        on_text: called with `(row, text)` when text becomes final; the pieces joined are the row's text.
        batch_size: how many prompts are decoded together.  Each accepts, rolls back and ends on its own; up to float
            rounding, its text is that of batch size 1.
    """

    max_new_tokens: int | None = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0
    eos: Sequence[int] | None = None
    on_round: Callable[[Round], None] | None = None
    min_new_tokens: int = 0
    stop: str | Sequence[str] | None = None
    criteria: Any = None
    processors: Any = None
    logprobs: bool = False
    on_text: Callable[[int, str], None] | None = None
    batch_size: int = 1

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "min_new_tokens": validate.whole("min_new_tokens", self.min_new_tokens),
            "batch_size": validate.whole("batch_size", self.batch_size, 1),
            "seed": validate.seed(self.seed),
            "logprobs": validate.flag("logprobs", self.logprobs),
            "processors": None if self.processors is None else as_processors(self.processors),
        }
        if self.max_new_tokens is not None:
            checked["max_new_tokens"] = validate.whole("max_new_tokens", self.max_new_tokens)
        if self.eos is not None:
            checked["eos"] = tuple(
                validate.whole("eos", one, remedy="give ids, [] for none") for one in as_tuple(self.eos)
            )
        for name in ("on_round", "on_text"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise SpecdecError(f"{name} must be a function, got {validate.shown(getattr(self, name))}")
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        _ = self.params  # checks them

    @classmethod
    def of(cls, door: str, given: dict[str, Any]) -> DecodeOptions:
        """From keyword arguments of the function named `door`; a `TypeError` names an unknown one."""
        names = [f.name for f in fields(cls)]
        if unknown := [name for name in given if name not in names]:
            raise TypeError(f"{door}() has no option {unknown[0]!r}: it takes {', '.join(names)}")
        return cls(**given)

    @classmethod
    def shown(cls, door: Door) -> Door:
        """Show the options that a function takes as `**options` in its signature."""
        own = signature(door)
        named = [p for p in own.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
        mine = [p for p in signature(cls).parameters.values() if p.name not in own.parameters]
        kept = [*named, *(p.replace(kind=Parameter.KEYWORD_ONLY) for p in mine)]
        door.__signature__ = own.replace(parameters=kept)  # type: ignore[attr-defined]
        return door

    @property
    def params(self) -> SamplingParams:
        """How tokens are sampled, processors included."""
        return SamplingParams(self.temperature, self.top_k, self.top_p, self.min_p, self.processors or ())
