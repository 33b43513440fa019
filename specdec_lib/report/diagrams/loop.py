"""The pictures of chapter 02: one pass over several positions, one round, the cache before and after a rollback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TEXT, DRAFT, KEPT, REFUSED, TARGET, UNTESTED = "#ECECEC", "#F6DDB0", "#BFE6D6", "#F5C6A5", "#BFDCF0", "#F7F7F7"
INK = "#222222"


def sheet(width: float, height: float) -> tuple[Figure, Axes]:
    """A white sheet, one unit of the axes for each 0.72 inches, without axes."""
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(figsize=(0.72 * width, 0.72 * height), facecolor="white")
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    axes.set_aspect("equal")
    return fig, axes


def box(axes: Axes, x: float, y: float, words: str, colour: str, width: float = 1.3, dashed: bool = False) -> None:
    """A box of height 0.7 with its lower left corner at `(x, y)`."""
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0,rounding_size=0.08"
    edge = {"edgecolor": "#777777", "linewidth": 1, "linestyle": "--" if dashed else "-"}
    axes.add_patch(FancyBboxPatch((x, y), width, 0.7, boxstyle=style, facecolor=colour, **edge))
    axes.text(x + width / 2, y + 0.35, words, ha="center", va="center", fontsize=9, color=INK)


def note(axes: Axes, x: float, y: float, words: str, **how: object) -> None:
    axes.text(x, y, words, va="center", fontsize=9, color=INK, **{"ha": "left", **how})  # type: ignore[arg-type]


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "#777777", "linewidth": 1.1})


def shown(word: str) -> str:
    """A token as it is written into a box: line ends and blanks are visible."""
    return (word.replace("\n", "⏎").strip() or "␣").replace("$", r"\$")[:11]


def scoring_pass(text: Sequence[str], guess: Sequence[str], best: Sequence[str]) -> Figure:
    """One pass of the target over a text and a guess behind it.

    Args:
        text: its last tokens are drawn.
        guess: `g` tokens.
        best: the target's choice after the text and after each guessed token, `g + 1` tokens.
    """
    before, step = list(text)[-3:], 1.5
    places = [3 + step * i for i in range(len(before) + len(guess))]
    fig, axes = sheet(places[-1] + 2, 4.3)
    right = next((i for i, (a, b) in enumerate(zip(guess, best, strict=False)) if a != b), len(guess))
    axes.set_title(f"One pass, {len(best)} answers: the target agrees with {right} of {len(guess)} guessed tokens")
    for i, (x, word) in enumerate(zip(places, [*before, *guess], strict=True)):
        guessed = i - len(before)
        box(axes, x, 0.3, shown(word), TEXT if guessed < 0 else DRAFT)
        row = guessed + 1
        arrow(axes, (x + 0.65, 1.05), (x + 0.65, 1.5))
        if row >= 0:
            colour = KEPT if row < right else TARGET if row == right else UNTESTED
            arrow(axes, (x + 0.65, 2.35), (x + 0.65, 2.8))
            box(axes, x, 2.85, shown(best[row]), colour, dashed=row > right)
    box(axes, 3, 1.55, "target: one forward pass, each position sees what is left of it", "#DDDDDD", places[-1] - 1.7)
    note(axes, 2.8, 0.65, "text and guess", ha="right")
    note(axes, 2.8, 3.2, "best next token", ha="right")
    note(axes, places[len(before) - 1], 3.85, "agrees (green), the target's own (blue), of no use (dashed)")
    return fig


def round_picture(draft: Sequence[str], ratios: Sequence[float], kept: int, last: str) -> Figure:
    """One round: the draft, the acceptance probability of each token, what became of it, and the target's token.

    Args:
        draft: `g` tokens.
        ratios: `min(1, p(x) / q(x))` of each.
        kept: how many were kept.
        last: the token after them.
    """
    step = 1.9
    fig, axes = sheet(3 + step * (len(draft) + 1), 4)
    source = "the bonus token" if kept == len(draft) else "a token from what is left of p"
    axes.set_title(f"This round keeps {kept} of {len(draft)} draft tokens and adds {source}")
    rows = ("1. draft proposes", "2. target scores", "3. verify")
    for y, words in zip((3, 1.9, 0.8), rows, strict=True):
        note(axes, 0, y + 0.35, words)
    for i, (word, ratio) in enumerate(zip(draft, ratios, strict=True)):
        x = 2.8 + step * i
        box(axes, x, 3, shown(word), DRAFT)
        arrow(axes, (x + 0.65, 2.95), (x + 0.65, 2.65))
        box(axes, x, 1.9, f"keep: {ratio:.2f}", "white")
        arrow(axes, (x + 0.65, 1.85), (x + 0.65, 1.55))
        fate = ("kept", KEPT) if i < kept else ("refused", REFUSED) if i == kept else ("never tested", UNTESTED)
        box(axes, x, 0.8, fate[0], fate[1], dashed=i > kept)
    x = 2.8 + step * kept
    box(axes, x, 0, shown(last), TARGET)
    note(axes, x + 1.4, 0.35, "written by the target")
    return fig


def cache_rollback(text: Sequence[str], draft: Sequence[str], kept: int, last: str) -> Figure:
    """What the target's cache holds before and after the rollback.

    Args:
        text: the last tokens of the text before the round.
        draft: `g` tokens, which the pass fed after them.
        kept: how many were kept.
        last: the token after them, which is in the text and not in the cache.
    """
    step, before = 1.5, [*text, *draft]
    length = len(text) + kept
    fig, axes = sheet(3.4 + step * (len(before) + 1), 3.5)
    gone = len(draft) - kept
    axes.set_title(
        f"The cache forgets {gone} refused or untested token{'s' * (gone != 1)}; the last token is not read yet"
    )
    note(axes, 0, 2.75, "cache after the pass")
    note(axes, 0, 1.65, "cache after forget")
    note(axes, 0, 0.55, "text")
    for i, word in enumerate(before):
        x = 3.2 + step * i
        accepted = len(text) <= i < length
        colour = TEXT if i < len(text) else KEPT if accepted else REFUSED
        box(axes, x, 2.4, shown(word), colour)
        if i < length:
            box(axes, x, 1.3, shown(word), colour)
            box(axes, x, 0.2, shown(word), colour)
        else:
            note(axes, x + 0.65, 1.65, "✕", ha="center")
    box(axes, 3.2 + step * length, 0.2, shown(last), TARGET, dashed=True)
    note(axes, 3.2 + step * length + 1.4, 0.55, "fed in the next round")
    return fig
