"""When a text ends, and what of it can be shown before it does.

All rules are asked after every single token, also within an accepted block, so a text is cut where decoding one
token at a time would cut it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .errors import SpecdecError

UNFINISHED = "\ufffd"  # what a tokenizer writes for bytes that are no character, or not one yet


def no_text(ids: list[int]) -> str:
    """What there is to show where there is no tokenizer."""
    return ""


def detokenizer(tokenizer: Any) -> Callable[[list[int]], str]:
    """From new tokens to text, special tokens left out."""
    return no_text if tokenizer is None else lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


@dataclass(frozen=True)
class Stopping:
    """What ends a text, besides its length.

    Attributes:
        ends: end-of-sequence ids.
        strings: the text ends with the token that completes one of them, and is shown up to it.
        criteria: transformers' `StoppingCriteria` or functions like them: `(ids [1, n], scores None) -> bool`, asked
            once for each new token, in order.
        decode: see `detokenizer`; needed for `strings`.
        device: where criteria get their ids.
    """

    ends: frozenset[int]
    strings: tuple[str, ...] = ()
    criteria: tuple[Callable[..., Any], ...] = ()
    decode: Callable[[list[int]], str] = no_text
    device: torch.device | str = "cpu"

    @classmethod
    def of(
        cls, tokenizer: Any, ends: Iterable[int], stop: Any = None, criteria: Any = None, device: Any = "cpu"
    ) -> Stopping:
        """Checked: `stop` is a string or a list of them, `criteria` one criterion or a list."""
        strings = as_tuple(stop)
        if bad := [s for s in strings if not isinstance(s, str) or not s]:
            raise SpecdecError(f"a stop string must be a text of at least one character, got {bad[0]!r}")
        if strings and tokenizer is None:
            raise SpecdecError("stop strings need a tokenizer: set Pair(tokenizer=...), or give ids in eos=[...]")
        hidden = [t for t in getattr(tokenizer, "all_special_tokens", []) for s in strings if t in s]
        if hidden:
            raise SpecdecError(
                f"a stop string holds {hidden[0]!r}, a special token, which texts do not show: give its id in eos=[...]"
            )
        rules = as_tuple(criteria)
        if unusable := [c for c in rules if not callable(c)]:
            raise SpecdecError(
                f"a stopping criterion is a function of (input_ids, scores), got {unusable[0]!r}: "
                "give transformers' StoppingCriteria or a function like them"
            )
        return cls(frozenset(ends), strings, rules, detokenizer(tokenizer), device)

    def reason(self, ids: Sequence[int], start: int) -> str | None:
        """Why the text `ids`, new from position `start` on, ends after its last token; None if it goes on."""
        found = "end token" if ids[-1] in self.ends else None
        if self.strings:
            text = self.decode(list(ids[start:]))
            if any(s in text for s in self.strings):
                found = found or "stop string"
        if self.criteria:
            tensor = torch.tensor([ids], device=self.device)
            # every criterion is asked at every token, as transformers does: some of them count
            answers = [bool(torch.as_tensor(c(tensor, None)).all()) for c in self.criteria]
            if any(answers):
                found = found or "criterion"
        return found

    def text(self, tokens: list[int]) -> str:
        """The text of new tokens, up to the first stop string."""
        text = self.decode(tokens)
        return text[: min((text.index(s) for s in self.strings if s in text), default=len(text))]


def as_tuple(given: Any) -> tuple:
    """None, one or several as a tuple.

    >>> as_tuple(None), as_tuple("ab"), as_tuple(["a", "b"])
    ((), ('ab',), ('a', 'b'))
    """
    if given is None:
        return ()
    return tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)


class TextStream:
    """The text of one row while it is written, in pieces whose join is the final text.

    A piece is held back while a later token could still change it: a character of several tokens, the beginning of
    a stop string, and the last word of a tokenizer that moves punctuation (`clean_up_tokenization_spaces`).

    >>> names = ["a", "b", "c", "d"]
    >>> stopping = Stopping(frozenset(), strings=("cd",), decode=lambda ids: "".join(names[i] for i in ids))
    >>> stream = TextStream(stopping)
    >>> [stream.piece(new) for new in ([0], [2], [1, 2])], stream.piece([3], last=True)
    (['a', '', 'cb'], '')
    """

    def __init__(self, stopping: Stopping, tidies: bool = False):
        self.stopping, self.tidies = stopping, tidies
        self.tokens: list[int] = []
        self.shown = 0

    def piece(self, tokens: Sequence[int], last: bool = False) -> str:
        """What can be shown once `tokens` have joined the text; all that is left if they are the `last`."""
        self.tokens += tokens
        text = self.stopping.text(self.tokens)
        if not last:
            text = self._settled(text)
        new = text[self.shown :]
        self.shown += len(new)
        return new

    def _settled(self, text: str) -> str:
        text = text.rstrip(UNFINISHED)
        if self.tidies:
            text = text[: max(text.rfind(" "), 0)]
        begun = (n for s in self.stopping.strings for n in range(1, len(s)) if text.endswith(s[:n]))
        return text[: len(text) - max(begun, default=0)]
