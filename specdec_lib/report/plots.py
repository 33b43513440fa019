"""Figures that more than one notebook draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..decode import Round

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# what became of a token of a round: colour, hatch, name
FATES = {
    "kept": ("#029E73", "", "draft token kept"),
    "last": ("#0173B2", "", "token of the target"),
    "rejected": ("#D55E00", "xx", "draft token refused"),
    "untested": ("#D9D9D9", "", "draft token never tested"),
}


def fates(done: Round) -> list[str]:
    """What became of each token of a round, in the order of the text, the target's own token in its place.

    >>> one = Round(0, [1, 2, 3], 1, [1, 9], [1.0] * 3, [1.0] * 3, 3, 0.0, 0.0, 0.0)
    >>> fates(one)
    ['kept', 'last', 'rejected', 'untested']
    """
    result = ["kept"] * done.kept
    if not done.trimmed or len(done.emitted) > done.accepted:
        result.append("last")
    result += ["rejected"] * done.rejected
    return result + ["untested"] * (len(done.drafted) - done.kept - done.rejected)


def draw_rounds(axes: Axes, trace: Sequence[Round], tokenizer: Any = None, limit: int = 40) -> None:
    """One column a target pass: what joined the text above the line, what was wasted below it.

    With a tokenizer each token is written into its box.
    """
    from matplotlib.patches import Patch

    trace = list(trace)[:limit]
    for column, done in enumerate(trace):
        up = down = 0
        drafted = iter(done.drafted[done.kept :])
        emitted = iter(done.emitted)
        for fate in fates(done):
            colour, hatch, _ = FATES[fate]
            joined = fate in ("kept", "last")
            level = up if joined else -1 - down
            up, down = up + joined, down + (not joined)
            axes.bar(column, 1, bottom=level, width=0.92, color=colour, hatch=hatch, edgecolor="white", linewidth=0.8)
            token = next(emitted if joined else drafted)
            if tokenizer is not None:
                word = tokenizer.decode([token]).replace("\n", "⏎").strip() or "␣"
                axes.text(
                    column,
                    level + 0.5,
                    word[:9],
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="black" if fate == "untested" else "white",
                    bbox=None
                    if fate in ("kept", "untested")
                    else {"facecolor": colour, "edgecolor": "none", "pad": 0.8},
                )
    axes.axhline(0, color="black", linewidth=1)
    axes.set_xlim(-0.6, len(trace) - 0.4)
    axes.set_xlabel("target pass")
    axes.set_ylabel("tokens: joined the text (up), wasted (down)")
    axes.grid(axis="x", visible=False)
    handles = [Patch(facecolor=c, hatch=h, edgecolor="white", label=name) for c, h, name in FATES.values()]
    axes.legend(handles=handles, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.16), fontsize=8)


def label_points(axes: Axes, points: Mapping[str, tuple[float, float]], colours: Mapping[str, str]) -> None:
    """A name for each point in a column right of the axes, joined to its point by a thin line."""
    low, high = axes.get_ylim()
    names = sorted(points, key=lambda name: points[name][1])
    heights = apart([(points[name][1] - low) / (high - low) for name in names])
    for name, height in zip(names, heights, strict=True):
        axes.annotate(
            name,
            points[name],
            (1.03, height),
            textcoords="axes fraction",
            va="center",
            color=colours[name],
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colours[name], "linewidth": 0.6, "alpha": 0.6, "shrinkB": 4},
        )


def apart(places: Sequence[float], gap: float = 0.07) -> list[float]:
    """Rising places moved as little upwards as keeps them `gap` apart, and then down, if the last is above 1.

    >>> [round(place, 2) for place in apart([0.1, 0.12, 0.5, 0.99], gap=0.1)]
    [0.1, 0.2, 0.5, 0.99]
    >>> [round(place, 2) for place in apart([0.95, 0.98], gap=0.1)]
    [0.9, 1.0]
    """
    found: list[float] = []
    for place in places:
        found.append(max(place, found[-1] + gap) if found else place)
    top = 1.0
    for i in reversed(range(len(found))):
        found[i] = min(found[i], top)
        top = found[i] - gap
    return found
