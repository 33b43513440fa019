"""Figure of what two decoders do with the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .checks import frame

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
