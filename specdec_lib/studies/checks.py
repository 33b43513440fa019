"""Figures of what checks find: which check catches which fault, and how far an audited decoder is from its law."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from ..audit.audit import Verdict

CAUGHT, MISSED = "#CFE3F1", "#D55E00"


def by_survival(matrix: pd.DataFrame, checks: Sequence[str], controls: int) -> list[str]:
    """Row names in the order of the figure: faults that most checks miss first, small ones before large, controls last.

    Args:
        matrix: as `exact.kill.kill_matrix` returns it, the correct rules in its first `controls` rows.
        checks: its boolean columns.
        controls: how many rows are correct rules.
    """
    faults = matrix.iloc[controls:]
    order = faults.assign(found=faults[list(checks)].sum(axis=1)).sort_values(["found", "variation"]).index
    return [*order, *matrix.index[:controls]]


def draw_kills(axes: Axes, matrix: pd.DataFrame, checks: Mapping[str, str], controls: int) -> None:
    """The kill matrix as an annotated heat map: dark where a fault passes a check, pale where the check rejects it.

    Args:
        axes: to draw in; make it some 0.28 inches high for each row.
        matrix, controls: as in `by_survival`.
        checks: column of the matrix -> what to write above it; the first is the exact check, whose cells show the
            total variation.
    """
    import seaborn as sns
    from matplotlib.colors import ListedColormap

    rows = by_survival(matrix, list(checks), controls)
    faults = len(rows) - controls
    table = matrix.loc[rows, list(checks)].astype(bool)
    correct = [y >= faults for y in range(len(rows))]
    bad = table.eq(correct, axis=0)  # a fault that is not rejected, or a correct rule that is
    words = bad.astype(object)
    for x, check in enumerate(checks):
        sizes = matrix.loc[rows, "variation"].tolist() if x == 0 else [None] * len(rows)
        words[check] = [cell_word(not b, c, v) for b, c, v in zip(bad[check], correct, sizes, strict=True)]
    look = {"cmap": ListedColormap([CAUGHT, MISSED]), "vmin": 0, "vmax": 1, "cbar": False}
    sns.heatmap(bad.astype(int), annot=words, fmt="", linewidths=1.2, annot_kws={"fontsize": 8}, ax=axes, **look)
    found = matrix.iloc[controls:][list(checks)].sum()
    axes.set_xticklabels([f"{label}\n{found[check]} of {faults}" for check, label in checks.items()], fontsize=9)
    axes.set_yticklabels(rows, fontsize=9, rotation=0)
    axes.axhline(faults, color="black", linewidth=1.2)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.set(xlabel="", ylabel="")


def cell_word(good: bool, control: bool, variation: float | None) -> str:
    """What a cell says.

    >>> [cell_word(True, False, 0.0712), cell_word(True, False, 3e-8), cell_word(False, False, None)]
    ['0.071', '3e-08', 'missed']
    """
    if not good:
        return "false alarm" if control else "missed"
    if variation is None:
        return ""
    return "0" if control else f"{variation:.2g}"


@dataclass(frozen=True)
class Row:
    """One audited decoder of the figure.

    Attributes:
        name: as it is written beside its line.
        verdict: of the audit.
        noise: range of the observed total variation under a correct sampler, `audit.gof.noise`.
    """

    name: str
    verdict: Verdict
    noise: tuple[float, float]


def draw_audits(axes: Axes, rows: Sequence[Row]) -> None:
    """For each decoder the observed total variation, its confidence bound, what chance alone gives, and the effect.

    The dot is what was observed, the line ends at the bound, the grey bar is the range of correct samplers, the black
    tick is the effect that the audit was to see.  Verdict, p-value and samples stand on the right.
    """
    from matplotlib.patches import Patch

    colours = {0: "#0173B2", 1: MISSED, 2: "#949494"}
    markers = {0: "o", 1: "X", 2: "s"}
    for y, row in enumerate(rows):
        v = row.verdict
        colour = colours[v.exit_status]
        axes.barh(y, row.noise[1] - row.noise[0], left=row.noise[0], height=0.5, color="#D9D9D9")
        axes.plot([v.variation, v.bound], [y, y], color=colour, linestyle="-", linewidth=1.6)
        axes.plot(v.bound, y, marker="|", color=colour, markersize=9, markeredgewidth=1.6)
        axes.plot(v.variation, y, marker=markers[v.exit_status], color=colour, markersize=7)
        axes.plot([v.effect, v.effect], [y - 0.36, y + 0.36], color="black", linestyle="-", linewidth=2.2)
        axes.annotate(
            f"{v.outcome}  (p = {v.p_value:.2g}, {v.samples:,} samples)", (1.02, y), xycoords=("axes fraction", "data"),
            va="center", fontsize=9, color=colour, weight="bold" if v.exit_status == 1 else "normal",
        )  # fmt: skip
    axes.set(yticks=range(len(rows)), ylim=(len(rows) - 0.5, -0.5), xlabel="total variation from the expected law")
    axes.set_yticklabels([row.name for row in rows])
    axes.set_xlim(left=0)
    axes.grid(axis="y", visible=False)
    keys = [
        axes.plot([], [], marker="o", color="#333333", linestyle="-", label="observed, and the bound on the true one"
                  )[0],
        Patch(color="#D9D9D9", label="where 95 % of correct samplers are observed"),
        axes.plot([], [], marker="|", color="black", linestyle="none", markersize=11, markeredgewidth=2.2,
                  label="effect that the audit was to see")[0],
    ]  # fmt: skip
    axes.legend(handles=keys, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=1, fontsize=8.5)
