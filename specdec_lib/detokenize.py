"""Text from tokens that arrive one after the other, without decoding the whole text at each of them.

`decode(a + b)` is not always `decode(a) + decode(b)`: a character may be spread over several tokens, the first space of
a text may be left out, spaces before punctuation may be taken away.  So only what no later token can change is kept as
text.  What follows is decoded with a known token before it, the anchor, whose own text is then cut off.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

UNFINISHED = "\ufffd"  # what a tokenizer writes for bytes that are no character, or not one yet
BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")  # the name of a byte, in a tokenizer that spells unknown characters by bytes
# where `clean_up_tokenization_spaces` may yet take a space away: " .", " ' ", " n't", " 've", " 're" and the like
UNTIDY = re.compile(r"( |'|(?<!\w)[nvr])\Z")


def never(token: int) -> bool:
    return False


@dataclass(frozen=True)
class Detokenizer:
    """From tokens to text, and what is known of the way it is done.

    Attributes:
        decode: the text of a list of ids.
        tidies: whether it takes spaces away before punctuation (`clean_up_tokenization_spaces`).
        skipped: ids that it may leave out.
        is_byte: whether an id is a byte of a spelled-out character.  One byte that does not fit makes all those next to
            it unreadable, also those that were a character before it came.
    """

    decode: Callable[[list[int]], str]
    tidies: bool = False
    skipped: frozenset[int] = frozenset()
    is_byte: Callable[[int], bool] = never

    @classmethod
    def of(cls, tokenizer: Any) -> Detokenizer:
        """The text of new tokens as users see it: special tokens left out."""
        return cls(
            lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
            bool(getattr(tokenizer, "clean_up_tokenization_spaces", False)),
            frozenset(getattr(tokenizer, "all_special_ids", ())),
            bytes_of(tokenizer),
        )

    def __call__(self, ids: list[int]) -> str:
        return self.decode(ids)

    def keeps(self, text: str, token: int) -> bool:
        """Whether no token that follows can change `text`, which ends with `token`."""
        if text.endswith(UNFINISHED) or self.is_byte(token):
            return False
        return not (self.tidies and UNTIDY.search(text))


NO_TEXT = Detokenizer(lambda ids: "")  # where there is no tokenizer


def bytes_of(tokenizer: Any) -> Callable[[int], bool]:
    """Whether a token of `tokenizer` is named as a byte, `<0x0A>`."""
    return lambda token: bool(BYTE.fullmatch(tokenizer.convert_ids_to_tokens(token) or ""))


class GrowingText:
    """The text of tokens that are added to it, equal to decoding all of them at once.

    A few tokens are decoded for each one that is added.  More only within a run of tokens that stay open: bytes of no
    character, and spaces where they may be taken away.

    Attributes:
        open: what the text ends with and a later token may still change.

    >>> names = ["a", "b", " ", "."]
    >>> text = GrowingText(Detokenizer(lambda ids: "".join(names[i] for i in ids).replace(" .", "."), tidies=True))
    >>> [(text.add([token]), text.open) for token in (0, 1, 2, 3, 0)]
    [('a', ''), ('b', ''), ('', ' '), ('.', ''), ('a', '')]
    """

    def __init__(self, detokenizer: Detokenizer):
        self.detokenizer = detokenizer
        self.open = ""
        self._tail: list[int] = []  # the tokens of what is open
        self._anchor: list[int] = []  # a token whose text is known, standing for all that came before
        self._before = ""  # its text

    def add(self, tokens: Iterable[int]) -> str:
        """Append tokens; the text that became final by it."""
        return "".join([self._one(token) for token in tokens])

    def _one(self, token: int) -> str:
        decode = self.detokenizer
        if token in decode.skipped and not decode([token]):
            return ""
        self._tail.append(token)
        text = decode(self._anchor + self._tail)
        new = text[len(self._before) :]
        # a tokenizer may also write nothing for half a character
        if not new or new == self.open or not decode.keeps(text, token):
            self.open = new
            return ""
        own = decode([token])
        if own[-1:] == text[-1] and not own[-1].isspace():
            self._anchor, self._before = [token], own
        elif not self._anchor:
            self._anchor, self._before = self._tail, text
        self._tail, self.open = [], ""
        return new
