"""When a text ends, and which part of it can be shown before that.

All rules are checked after every token, also within an accepted block, so a text ends where decoding one token at a
time would end it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..detokenize import NO_TEXT, Detokenizer, GrowingText
from ..errors import SpecdecError


@dataclass(frozen=True)
class Stopping:
    """What ends a text, besides its length.

    Attributes:
        ends: end-of-sequence ids.
        strings: the text ends with the token that completes one of them, and is shown up to it.
        criteria: transformers' `StoppingCriteria` or functions like them: `(ids [1, n], scores None) -> bool`, called
            once for each new token, in order.
        decode: from new tokens to text; needed for `strings`.
        device: the device of the ids that criteria get.
    """

    ends: frozenset[int]
    strings: tuple[str, ...] = ()
    criteria: tuple[Callable[..., Any], ...] = ()
    decode: Detokenizer = NO_TEXT
    device: torch.device | str = "cpu"

    @classmethod
    def of(
        cls, tokenizer: Any, ends: Iterable[int], stop: Any = None, criteria: Any = None, device: Any = "cpu"
    ) -> Stopping:
        """From arguments of a call, checked: `stop` is a string or a list, `criteria` one criterion or a list."""
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
        decode = NO_TEXT if tokenizer is None else Detokenizer.of(tokenizer)
        return cls(frozenset(ends), strings, rules, decode, device)

    def begin(self, prompt: Sequence[int]) -> EndCheck:
        """The `EndCheck` of one text."""
        return EndCheck(self, prompt)

    def text(self, tokens: list[int]) -> str:
        """The text of new tokens, up to the first stop string."""
        return self.until_string(self.decode(tokens))

    def until_string(self, text: str) -> str:
        """`text` up to the first stop string in it."""
        return text[: min((text.index(s) for s in self.strings if s in text), default=len(text))]


class EndCheck:
    """Checks one text after each new token, at a cost that does not grow with the text.

    >>> names = ["a", "b", "c"]
    >>> decode = Detokenizer(lambda ids: "".join(names[i] for i in ids))
    >>> stopping = Stopping(frozenset([2]), strings=("bb",), decode=decode)
    >>> check = stopping.begin([0])
    >>> [check.reason(token) for token in (1, 0, 1, 1)], check.reason(2)
    ([None, None, None, 'stop string'], 'end token')
    """

    def __init__(self, stopping: Stopping, prompt: Sequence[int]):
        self.stopping = stopping
        self._text = GrowingText(stopping.decode)
        self._recent = ""  # the end of the final text, in which a stop string may begin
        self._reach = max(map(len, stopping.strings), default=1) - 1
        self._length = len(prompt)
        if stopping.criteria:
            self._ids = torch.tensor([prompt], dtype=torch.long, device=stopping.device)

    def reason(self, token: int) -> str | None:
        """Append `token`; returns why the text ends with it, or None if it goes on."""
        rules = self.stopping
        found = "end token" if token in rules.ends else None
        if rules.strings and self._completes_a_string(token):
            found = found or "stop string"
        if rules.criteria:
            ids = self._ids_with(token)
            # call every criterion at every token, as transformers does: some count their calls
            answers = [bool(torch.as_tensor(c(ids, None)).all()) for c in rules.criteria]
            if any(answers):
                found = found or "criterion"
        return found

    def _completes_a_string(self, token: int) -> bool:
        final = self._recent + self._text.add([token])
        text = final + self._text.open
        self._recent = final[max(len(final) - self._reach, 0) :]
        return any(s in text for s in self.stopping.strings)

    def _ids_with(self, token: int) -> torch.Tensor:
        """The text's ids `[1, n]` with `token` appended; the memory doubles when it is full."""
        if self._length == self._ids.shape[1]:
            self._ids = torch.cat([self._ids, self._ids.new_zeros(1, max(self._length, 64))], 1)
        self._ids[0, self._length] = token
        self._length += 1
        return self._ids[:, : self._length]


def as_tuple(given: Any) -> tuple:
    """None, one or several as a tuple.

    >>> as_tuple(None), as_tuple("ab"), as_tuple(["a", "b"])
    ((), ('ab',), ('a', 'b'))
    """
    if given is None:
        return ()
    return tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)


class TextStream:
    """The text of one row while it is written, in pieces; joined they are the final text.

    Text is held back while a later token could still change it: the open text of `GrowingText`, and the beginning of a
    stop string.

    >>> names = ["a", "b", "c", "d"]
    >>> decode = Detokenizer(lambda ids: "".join(names[i] for i in ids))
    >>> stream = TextStream(Stopping(frozenset(), strings=("cd",), decode=decode))
    >>> [stream.piece(new) for new in ([0], [2], [1, 2])], stream.piece([3], last=True)
    (['a', '', 'cb'], '')
    """

    def __init__(self, stopping: Stopping):
        self.stopping = stopping
        self._text = GrowingText(stopping.decode)
        self._held = ""  # final text that is not shown yet

    def piece(self, tokens: Sequence[int], last: bool = False) -> str:
        """Append `tokens`; returns the text that can be shown, all of it if they are the `last` tokens."""
        self._held += self._text.add(tokens)
        if last:
            return self.stopping.until_string(self._held + self._text.open)
        new = self.stopping.until_string(self._held)
        begun = (n for s in self.stopping.strings for n in range(1, len(s)) if new.endswith(s[:n]))
        new = new[: len(new) - max(begun, default=0)]
        self._held = self._held[len(new) :]
        return new
