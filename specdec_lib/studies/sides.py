"""Figure of what two decoders do with the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .both_sides import Finding

# word -> fill, ink, hatch
LOOKS = {
    "honoured": ("#CFE3F1", "#333333", ""),
    "refused": ("#EDEDED", "#333333", ""),
    "silently ignored": ("#F3C98B", "#333333", "//"),
    "breaks": ("#D55E00", "white", ""),
}


def frame(axes: Axes, rows: Sequence[str], columns: int) -> None:
    """Axes as a table: the rows' names on the left, the first at the top, room for the columns' heads above."""
    axes.set(xticks=range(columns), yticks=range(len(rows)))
    axes.set(xlim=(-0.5, columns - 0.5), ylim=(len(rows) - 0.5, -0.5))
    axes.set_yticklabels(rows, fontsize=9)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.grid(visible=False)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)


def draw_sides(axes: Axes, findings: Sequence[Finding], heads: tuple[str, str]) -> None:
    """One line a request, one column a side: pale where it is honoured or refused, loud where it is not.

    Args:
        axes: to draw in; make it some 0.28 inches high for each finding.
        findings: in the order of the lines.
        heads: what the two columns are called.
    """
    for y, finding in enumerate(findings):
        for x, outcome in enumerate((finding.theirs, finding.ours)):
            fill, ink, hatch = LOOKS[outcome.word]
            axes.bar(x, 0.88, 0.96, bottom=y - 0.44, color=fill, hatch=hatch, edgecolor="white", linewidth=0.8)
            axes.text(
                x, y, outcome.word, ha="center", va="center", fontsize=8.5, color=ink,
                weight="bold" if outcome.word == "breaks" else "normal",
                bbox={"facecolor": fill, "edgecolor": "none", "pad": 1} if hatch else None,
            )  # fmt: skip
    frame(axes, [finding.name for finding in findings], len(heads))
    axes.set_xticklabels(heads)
