"""The pictures of chapters 02 and 03: what the hand-written loop does on a real text, and a round as a tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .canvas import INK, Canvas, visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ...exact import TabularModel

WIDE, STEP = 0.86, 0.98  # of a box, and from box to box, in inches


def short(token: str) -> str:
    """A token as it fits a box.

    >>> short(" understanding"), short("$5")
    ('underst…', '\\\\$5')
    """
    seen = visible(token)
    return (seen if len(seen) <= 8 else seen[:7] + "…").replace("$", r"\$")


def scoring(text: Sequence[str], guess: Sequence[str], best: Sequence[str]) -> Figure:
    """One pass of the target over a text and a guess behind it.

    Args:
        text: its last three tokens are drawn.
        guess: `g` tokens.
        best: the target's choice after the text and after each guessed token, `g + 1` tokens.
    """
    before = list(text)[-3:]
    agreed = next((i for i, pair in enumerate(zip(guess, best, strict=False)) if pair[0] != pair[1]), len(guess))
    title = f"One pass gives {len(best)} answers: the target agrees with {agreed} of {len(guess)} guessed tokens."
    start = 1.45
    card = Canvas(start + STEP * (len(before) + len(guess)) + 0.3, 2.7, title)
    fed = card.row([short(t) for t in before], start, 0.65, "prompt", WIDE, STEP - WIDE)
    fed += card.row([short(t) for t in guess], start + STEP * len(before), 0.65, "draft", WIDE, STEP - WIDE)
    sees = "target: one forward pass; each position sees only what is left of it"
    middle = card.token((fed[0].left + fed[-1].right) / 2, 1.25, sees, "target", fed[-1].right - fed[0].left)
    for i, box in enumerate(fed):
        card.arrow(box.top, (box.x, middle.bottom[1]))
        row = i - len(before) + 1
        if row >= 0:
            role = "accepted" if row < agreed else "untested" if row > agreed else "correction"
            out = card.token(box.x, 1.85, short(best[row]), role, WIDE)
            card.arrow((box.x, middle.top[1]), out.bottom)
    card.label(1.3, 0.65, "text and guess", colour=INK, align="right")
    card.label(1.3, 1.85, "best next token", colour=INK, align="right")
    first = fed[len(before) - 1]
    if agreed:
        card.bracket(first.left, first.left + STEP * agreed - STEP + WIDE, 2.12, "agrees", "above", "accepted")
    card.label(first.x + STEP * agreed, 2.2, "its own token", colour="correction", size=8.5)
    if agreed < len(guess):
        card.label(fed[-1].x + 0.1, 2.2, "of no use", size=8.5)
    card.bracket(fed[0].left, first.right, 0.4, "… text")
    card.bracket(fed[len(before)].left, fed[-1].right, 0.4, "guess")
    return card.figure


def one_round(draft: Sequence[str], keep: Sequence[float], kept: int, last: str) -> Figure:
    """One round: the draft, the chance that each token is kept, what became of it, and the target's own token.

    Args:
        draft: `g` tokens.
        keep: `min(1, p(x) / q(x))` of each.
        kept: how many were kept.
        last: the token after them.
    """
    whole = kept == len(draft)
    source = "the bonus token, drawn from p" if whole else "a token drawn from what is left of p"
    start, step = 2.35, 1.15
    title = f"The round keeps {kept} of {len(draft)} draft tokens and adds {source}."
    card = Canvas(start + step * (len(draft) + 1) + 0.6, 2.75, title)
    fates = ["accepted"] * kept + ["refused"] * (not whole) + ["untested"] * (len(draft) - kept - 1)
    words = {"accepted": "kept", "refused": "refused", "untested": "not tested"}
    heights = (2.0, 1.45, 0.9, 0.35)
    lines = ("1. the draft proposes", "2. chance to keep it", "3. the coin's verdict", "4. the text goes on with")
    for y, line in zip(heights, lines, strict=True):
        card.label(0.2, y, line, colour=INK, align="left")
    for i, (token, chance, fate) in enumerate(zip(draft, keep, fates, strict=True)):
        x = start + WIDE / 2 + step * i
        boxes = [card.token(x, heights[0], short(token), "draft", WIDE)]
        if fate == "untested":
            boxes.append(card.token(x, heights[2], "not tested", "untested", WIDE))
        else:
            boxes.append(card.token(x, heights[1], f"{chance:.2f}", "target", WIDE))
            card.arrow(boxes[-2].bottom, boxes[-1].top)
            boxes.append(card.token(x, heights[2], words[fate], "accepted" if fate == "accepted" else "plain", WIDE))
        card.arrow(boxes[-2].bottom, boxes[-1].top)
        if fate == "accepted":
            card.token(x, heights[3], short(token), "accepted", WIDE)
    card.token(start + WIDE / 2 + step * kept, heights[3], short(last), "bonus" if whole else "correction", WIDE)
    return card.figure


def rollback(text: Sequence[str], draft: Sequence[str], kept: int, last: str) -> Figure:
    """What the target's cache holds before and after the rollback.

    Args:
        text: the last tokens of the text before the round.
        draft: `g` tokens, which the pass fed after them.
        kept: how many were kept.
        last: the token after them, which is in the text and not in the cache.
    """
    start, gone = 2.05, len(draft) - kept
    title = f"The cache forgets {gone} of {len(draft)} draft tokens; the text's last token has not been read yet."
    card = Canvas(start + STEP * (len(text) + max(len(draft), kept + 1)) + 0.3, 1.95, title)
    roles = ["prompt"] * len(text) + ["accepted"] * kept
    held = [short(token) for token in [*text, *draft]]
    lines = ("cache after the pass", "cache after forget", "the text now")
    for y, line in zip((1.4, 0.9, 0.4), lines, strict=True):
        card.label(0.2, y, line, colour=INK, align="left")
        full = y == 1.4
        shown = held if full else held[: len(roles)]
        card.row(shown, start, y, roles + ["refused"] * gone * full, WIDE, STEP - WIDE)
    card.token(start + STEP * len(roles) + WIDE / 2, 0.4, short(last), "correction" if gone else "bonus", WIDE)
    return card.figure


def round_tree(target: TabularModel, draft: TabularModel, letters: Sequence[str]) -> Figure:
    """One step of the recursion over a round: the first draft token, kept or refused, and what follows, in fractions.

    Computed by the two functions of the token rule.  An arrow is as wide as its probability.

    Args:
        target, draft: tabular models.
        letters: a name for each token.
    """
    from ...verify.token import accepted, correction

    n = len(letters)
    p, q = target.law(()), draft.law(())
    card = Canvas(
        9.3, 0.62 + 0.45 * 2 * n, "One step of a round: for each token, what is kept and what replaces add up to p."
    )
    root = card.token(0.75, (card.top + 0.1) / 2, "prefix", "prompt", 0.8)
    unit = (card.top - 0.1) / (2 * n)

    def join(a: Any, b: Any, weight: Any, caption: str) -> None:
        card.arrow(a.east, b.west, caption, width=0.6 + 5 * float(weight), size=8)

    for x in range(n):
        if q[x] == 0:
            continue
        y = card.top - unit * (2 * x + 1)
        drawn = card.token(2.5, y, letters[x], "draft", 0.5)
        join(root, drawn, q[x], f"q = {q[x]}")
        refused, kept = accepted(p[None], q[None], [x])
        yes, no = y + unit / 2, y - unit / 2
        if kept:
            end = card.token(4.6, yes, f"kept: {letters[x]}", "accepted", 0.95)
            join(drawn, end, q[x] * kept, f"{kept}")
            card.label(5.4, yes, f"{letters[x]}: {q[x] * kept}, then a round of one draft token fewer", 9, INK, "left")
        if refused:
            end = card.token(4.6, no, letters[x], "refused", 0.95)
            join(drawn, end, q[x] * refused, f"{refused}")
            rest = correction(p[None], q[None], [x], 0)
            ends = ", ".join(f"{letters[y]}: {q[x] * refused * rest[y]}" for y in range(n) if rest[y])
            card.label(5.4, no, f"{ends} from max(p − q, 0); the round ends", 9, INK, "left")
    return card.figure
