"""A trace for people: which tokens were drafted and kept, which were refused, what replaced them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

from ..decode import Generation, Round

# kind -> (rich style, CSS, colour-free brackets)
KINDS = {
    "accepted": ("green", "color:#027a4e", ("", "")),
    "rejected": ("red strike", "color:#b3261e;text-decoration:line-through", ("{-", "-}")),
    "correction": ("bold blue", "color:#0b57a4;font-weight:bold", ("[", "]")),
    "bonus": ("cyan", "color:#0b57a4", ("[", "]")),
}


@dataclass(frozen=True)
class Piece:
    """A run of text of one kind: accepted, rejected, correction (after a rejection) or bonus (after a full draft)."""

    kind: str
    text: str


class Renderer:
    """Turns the rounds of one row into pieces, one after the other; characters of several tokens stay whole."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.shown = ""

    def _advance(self, tokens: list[int]) -> str:
        self.tokens += tokens
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        if text.endswith("\ufffd"):  # a character whose last byte is still to come
            return ""
        new, self.shown = text[len(self.shown) :], text
        return new

    def pieces(self, done: Round) -> list[Piece]:
        result = []
        if accepted := self._advance(done.emitted[: done.kept]):
            result.append(Piece("accepted", accepted))
        if done.rejected:
            refused = self.tokenizer.decode([done.drafted[done.accepted]])
            result.append(Piece("rejected", refused))
        if last := self._advance(done.emitted[done.kept :]):
            result.append(Piece("correction" if done.rejected else "bonus", last))
        return result


def pieces(trace: Iterable[Round], tokenizer: Any) -> Iterator[list[Piece]]:
    """The pieces of each round of one row."""
    renderer = Renderer(tokenizer)
    for done in trace:
        yield renderer.pieces(done)


def to_plain(piece: Piece) -> str:
    """Colour-free form: accepted text as it is, `{-refused-}`, `[correction]`.

    >>> to_plain(Piece("rejected", " blue"))
    '{- blue-}'
    """
    before, after = KINDS[piece.kind][2]
    return f"{before}{piece.text}{after}"


def to_html(out: Generation, tokenizer: Any, row: int = 0) -> str:
    """One row of a generation as a block of HTML, one line a round, with a key."""
    lines = []
    trace = [r for r in out.trace if r.row == row]
    for done, parts in zip(trace, pieces(trace, tokenizer), strict=True):
        spans = "".join(
            f'<span style="{KINDS[p.kind][1]}">{escape(p.text).replace(chr(10), "&#9166;")}</span>' for p in parts
        )
        lines.append(f'<span style="color:#777">{done.kept}/{len(done.drafted)}</span> {spans}')
    key = ", ".join(f'<span style="{css}">{kind}</span>' for kind, (_, css, _) in KINDS.items())
    body = "\n".join(lines)
    return (
        f'<div style="font-size:90%">One line a target pass; kept/drafted, then {key}.</div>'
        f'<pre style="white-space:pre-wrap;line-height:1.5">{body}</pre>'
    )
