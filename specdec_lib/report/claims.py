"""The claims ledger: what the literature says, what was found here, and how far the finding can be trusted.

A notebook calls `claim` once for each statement.  The runner gathers the ledgers of all notebooks with `collect`
into `claims.json` and `claims.md`, the table that a referee reads first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import SpecdecError
from ..files import write_text
from .folder import results_folder

KINDS = {
    "proved": "exact arithmetic, no sampling",
    "tested": "a statistical test with a stated level and power",
    "measured": "paired measurements with an interval",
    "quoted": "a published number, not checked here",
}
"""The kinds in the order of trust."""


@dataclass(frozen=True)
class Claim:
    """One row of the ledger; the last expression of a notebook cell shows it as one line.

    Attributes:
        id: short name, unique in its notebook.
        statement: one sentence that can be true or false.
        source: where it is stated (paper and section, or the notebook's own derivation).
        kind: `proved`, `tested`, `measured` or `quoted`.
        holds: the verdict; None for a quoted number, which is neither held nor failed.
        predicted, measured: numbers, or short texts such as `"3/4"`.
        interval: `(low, high)` around `measured`.
        must_hold: whether a failure fails the whole run.
        note: what a reader must know about this verdict.
    """

    id: str
    statement: str
    source: str
    kind: str
    holds: bool | None
    predicted: Any = None
    measured: Any = None
    interval: tuple | None = None
    must_hold: bool = True
    note: str = ""

    @property
    def verdict(self) -> str:
        return "quoted" if self.holds is None else "holds" if self.holds else "does not hold"

    def _line(self, verdict: str) -> str:
        found = measured_text(self.measured, self.interval)
        parts = [f"measured {found}"] * bool(found)
        parts += [f"predicted {number(self.predicted)}"] * (self.predicted is not None)
        return (
            verdict
            + (f" — {', '.join(parts)}" if parts else "")
            + (f" ({self.kind})" if self.holds is not None else "")
        )

    def __repr__(self) -> str:
        return self._line(self.verdict)

    def _repr_markdown_(self) -> str:
        return self._line(f"**{self.verdict}**")


_ledger: dict[str, Claim] = {}


def claim(
    id: str,
    statement: str,
    *,
    source: str,
    kind: str,
    holds: bool | None,
    predicted: Any = None,
    measured: Any = None,
    interval: Iterable | None = None,
    must_hold: bool = True,
    note: str = "",
) -> Claim:
    """Enter one claim into the ledger of the running notebook and show its verdict.

    By hand nothing is written and a cell may be run again.  Under the runner each id is used once.

    Raises:
        SpecdecError: an unknown kind; no verdict on a claim that is not quoted; an id that is taken; an interval
            that is not `(low, high)`, two numbers.

    >>> claim("alpha", "the acceptance rate is the overlap", source="Theorem 3.5", kind="measured", holds=True,
    ...       predicted=0.64, measured=0.62, interval=(0.58, 0.66))
    holds — measured 0.62 [0.58, 0.66], predicted 0.64 (measured)
    """
    if kind not in KINDS:
        raise SpecdecError(f"claim {id!r}: unknown kind {kind!r}, use one of {', '.join(KINDS)}")
    if kind != "quoted" and holds is None:
        raise SpecdecError(f"claim {id!r}: a {kind} claim needs a verdict, holds=True or holds=False")
    bounds = None if interval is None else checked_interval(id, interval)
    row = Claim(
        id=id,
        statement=statement,
        source=source,
        kind=kind,
        holds=None if kind == "quoted" else bool(holds),
        predicted=plain(predicted),
        measured=plain(measured),
        interval=bounds,
        must_hold=must_hold and kind != "quoted",
        note=note,
    )
    folder = results_folder()
    if id in _ledger and (folder or _ledger[id].statement != statement):
        raise SpecdecError(f"claim {id!r} is already in this notebook's ledger: give each claim an id of its own")
    _ledger[id] = row
    if folder:
        write_text(folder / "claims.json", to_json([asdict(c) for c in _ledger.values()]))
    return row


def checked_interval(id: str, interval: Any) -> tuple:
    """`(low, high)` as plain values; a bound may be infinite, and is never NaN."""
    try:
        low, high = interval
        if low <= high:  # no NaN is
            return plain(low), plain(high)
    except (TypeError, ValueError):
        pass
    raise SpecdecError(
        f"claim {id!r}: the interval must be (low, high), two numbers, got {interval}: leave out one that is not known"
    )


def collect(results: str | Path, notebooks: Iterable[str] | None = None) -> list[dict]:
    """Gather `claims/<notebook>.json` of a results folder into its `claims.json` and `claims.md`.

    Args:
        results: the folder.
        notebooks: whose ledgers count, by stem; what others left, before they were renamed or dropped, does not.
            None counts all that are there.

    Returns:
        The rows, each with its `notebook`, by trust and then by notebook.
    """
    results = Path(results)
    wanted = None if notebooks is None else set(notebooks)
    rows = [
        {"notebook": path.stem, **row}
        for path in sorted(results.glob("claims/*.json"))
        if wanted is None or path.stem in wanted
        for row in json.loads(path.read_text(encoding="utf-8"))
    ]
    rows.sort(key=lambda row: (list(KINDS).index(row["kind"]), row["notebook"]))
    held, counted = count(rows)
    write_text(results / "claims.json", to_json({"held": held, "counted": counted, "claims": rows}))
    write_text(results / "claims.md", markdown(rows))
    return rows


def count(rows: list[dict]) -> tuple[int, int]:
    """`(held, counted)`; a quoted number counts in neither."""
    verdicts = [row["holds"] for row in rows if row["kind"] != "quoted"]
    return sum(verdicts), len(verdicts)


def broken(rows: list[dict]) -> list[dict]:
    """The claims that must hold and do not."""
    return [row for row in rows if row["must_hold"] and row["holds"] is False]


def markdown(rows: list[dict]) -> str:
    """The referee's table, after the one sentence that sums it up."""
    held, counted = count(rows)
    lines = [f"{held} of {counted} claims hold on this machine.", ""]
    for row in broken(rows):
        lines += [f"Must hold and does not: `{row['id']}` ({row['notebook']}).", ""]
    lines += ["Kinds, by trust: " + "; ".join(f"{kind} ({meaning})" for kind, meaning in KINDS.items()) + ".", ""]
    heads = ["id", "statement", "source", "predicted", "measured", "kind", "verdict", "must hold", "notebook"]
    lines += [table_row(heads), table_row(["---"] * len(heads))]
    for row in rows:
        entry = Claim(**{key: value for key, value in row.items() if key != "notebook"})
        lines.append(
            table_row(
                [
                    f"`{entry.id}`",
                    entry.statement,
                    entry.source,
                    number(entry.predicted),
                    measured_text(entry.measured, entry.interval),
                    entry.kind,
                    entry.verdict + (f" ({entry.note})" if entry.note else ""),
                    "yes" if entry.must_hold else "no",
                    row["notebook"],
                ]
            )
        )
    return "\n".join(lines) + "\n"


# -- numbers and text ----------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """A value that JSON can hold: numpy and torch numbers become Python's, fractions and the rest become text.

    >>> from fractions import Fraction
    >>> plain(Fraction(3, 4)), plain(float("nan"))
    ('3/4', 'nan')
    """
    if hasattr(value, "item"):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else str(value)


def number(value: Any) -> str:
    """Three significant digits, whole numbers in full.

    >>> number(0.61803), number(12345.6), number(40), number("3/4"), number(None)
    ('0.618', '12,346', '40', '3/4', '')
    """
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def measured_text(measured: Any, interval: Iterable | None) -> str:
    """`0.62 [0.58, 0.66]`."""
    bounds = "" if interval is None else f" [{', '.join(number(x) for x in interval)}]"
    return (number(measured) + bounds).strip()


def table_row(cells: list[str]) -> str:
    # A bar inside a cell, as in P(x | y), would open a new column.
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def to_json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"
