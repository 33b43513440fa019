"""Text from tokens that arrive one at a time, without decoding the whole text again for each token.

`decode(a + b)` is not always `decode(a) + decode(b)`: a character may be spread over several tokens, the first space of
a text may be left out, spaces before punctuation may be removed.  So text is final only when no later token can change
it.  The rest is decoded behind a known token, the anchor, and the anchor's own text is cut off.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

UNFINISHED = "\ufffd"  # what a tokenizer writes for bytes that are not a character, or not yet
BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")  # a byte's token, in a tokenizer with byte fallback
# where `clean_up_tokenization_spaces` may still remove a space: " .", " ' ", " n't", " 've", " 're" and the like
UNTIDY = re.compile(r"( |'|(?<!\w)[nvr])\Z")


def never(token: int) -> bool:
    return False


@dataclass(frozen=True)
class Detokenizer:
    """Decodes tokens to text, and says how it does that.

    Attributes:
        decode: the text of a list of ids.
        tidies: whether it removes spaces before punctuation (`clean_up_tokenization_spaces`).
        skipped: ids that it may leave out.
        is_byte: whether an id is one byte of a character.  A byte that does not fit makes all bytes next to it
            unreadable, even those that formed a character before.
    """

    decode: Callable[[list[int]], str]
    tidies: bool = False
    skipped: frozenset[int] = frozenset()
    is_byte: Callable[[int], bool] = never

    @classmethod
    def of(cls, tokenizer: Any) -> Detokenizer:
        """The text of new tokens as users see it, without special tokens."""
        return cls(
            lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
            bool(getattr(tokenizer, "clean_up_tokenization_spaces", False)),
            frozenset(getattr(tokenizer, "all_special_ids", ())),
            bytes_of(tokenizer),
        )

    def __call__(self, ids: list[int]) -> str:
        return self.decode(ids)

    def keeps(self, text: str, token: int) -> bool:
        """Whether `text`, which ends with `token`, is final: no later token can change it."""
        if text.endswith(UNFINISHED) or self.is_byte(token):
            return False
        return not (self.tidies and UNTIDY.search(text))


NO_TEXT = Detokenizer(lambda ids: "")  # for a pair without a tokenizer


def bytes_of(tokenizer: Any) -> Callable[[int], bool]:
    """A function that says whether a token of `tokenizer` is named like a byte, `<0x0A>`."""
    return lambda token: bool(BYTE.fullmatch(tokenizer.convert_ids_to_tokens(token) or ""))


class GrowingText:
    """The text of tokens that are added to it, equal to decoding all of them at once.

    For each added token a few tokens are decoded; more only while a run of tokens stays open: bytes that form no
    character yet, and spaces that may still be removed.

    Attributes:
        open: the end of the text that a later token may still change.

    >>> names = ["a", "b", " ", "."]
    >>> text = GrowingText(Detokenizer(lambda ids: "".join(names[i] for i in ids).replace(" .", "."), tidies=True))
    >>> [(text.add([token]), text.open) for token in (0, 1, 2, 3, 0)]
    [('a', ''), ('b', ''), ('', ' '), ('.', ''), ('a', '')]
    """

    def __init__(self, detokenizer: Detokenizer):
        self.detokenizer = detokenizer
        self.open = ""
        self._tail: list[int] = []  # the tokens of the open text
        self._anchor: list[int] = []  # a token whose text is known; it stands for all text before it
        self._before = ""  # its text

    def add(self, tokens: Iterable[int]) -> str:
        """Append tokens; returns the text that became final."""
        return "".join([self._one(token) for token in tokens])

    def _one(self, token: int) -> str:
        decode = self.detokenizer
        if token in decode.skipped and not decode([token]):
            return ""
        self._tail.append(token)
        text = decode(self._anchor + self._tail)
        new = text[len(self._before) :]
        # some tokenizers write nothing for half a character
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
