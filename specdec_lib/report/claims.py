"""The claims ledger: what the literature says, what was found here, and how far the finding can be trusted.

A notebook calls `claim` once for each statement.  The statements themselves stand in the YAML file beside the notebook
(`chapters.py`).  The runner gathers the ledgers of all notebooks with `collect` into `claims.json` and `claims.md`, the
table that a referee reads first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from ..errors import SpecdecError
from ..files import write_text
from .chapters import declared_claim
from .folder import results_folder

KINDS = {
    "proved": "a proof in the text, or all of a finite set enumerated in exact arithmetic",
    "checked exactly": "instances, in exact arithmetic or token by token",
    "tested": "a statistical test with a stated level and power",
    "measured": "paired measurements with an interval",
    "quoted": "a published number, not checked here",
}
"""The kinds in the order of trust."""

COLOURS = {"holds": "#027a4e", "does not hold": "#b3261e", "undecided": "#8a6100", "quoted": "#0b57a4"}
"""The verdicts, and the colour of each one's card."""


@dataclass(frozen=True)
class Claim:
    """One row of the ledger; the last expression of a notebook cell shows it as a small card.

    Attributes:
        id: short name, unique over all notebooks.
        statement: one sentence that can be true or false.
        source: where it is stated (paper and section, or the notebook's own derivation).
        kind: one of `KINDS`.
        verdict: `holds`, `does not hold`, `undecided`, or `quoted` for a number that is not checked here.
        predicted, measured: numbers, or short texts such as `"3/4"`.
        interval: `(low, high)` around `measured`.
        must_hold: whether the whole run fails where the claim does not hold.
        note: what a reader must know about this verdict.
    """

    id: str
    statement: str
    source: str
    kind: str
    verdict: str
    predicted: Any = None
    measured: Any = None
    interval: tuple | None = None
    must_hold: bool = True
    note: str = ""

    @property
    def numbers(self) -> str:
        """`measured 0.62 [0.58, 0.66], predicted 0.64`."""
        found = measured_text(self.measured, self.interval)
        parts = [f"measured {found}"] * bool(found)
        parts += [f"predicted {number(self.predicted)}"] * (self.predicted is not None)
        return ", ".join(parts)

    @property
    def details(self) -> str:
        return ". ".join(
            filter(None, [self.numbers, self.note.rstrip("."), f"{self.kind.capitalize()}; {self.source}"])
        )

    def __repr__(self) -> str:
        return f"{self.verdict.upper()}: {self.statement}\n  {self.details}"

    def _repr_html_(self) -> str:
        style = f"border-left:4px solid {COLOURS[self.verdict]};padding:.2em .8em;margin:.3em 0"
        words = f"<b>{self.verdict.capitalize()}:</b> {escape(self.statement)}"
        return f'<div style="{style}">{words}<br><small>{escape(self.details)}</small></div>'


_ledger: dict[str, Claim] = {}


def claim(
    id: str,
    statement: str | None = None,
    *,
    holds: bool | None = None,
    measured: Any = None,
    interval: Iterable | None = None,
    above: float | None = None,
    below: float | None = None,
    within: Iterable | None = None,
    predicted: Any = None,
    note: str = "",
    source: str | None = None,
    kind: str | None = None,
    must_hold: bool | None = None,
) -> Claim:
    """Enter one claim into the ledger of the running notebook and show its verdict.

    Statement, source, kind and `must_hold` come from the YAML file beside the notebook; a notebook elsewhere gives them
    here.  By hand nothing is written and a cell may be run again.  Under the runner each id is used once.

    Args:
        id: as in the YAML file.
        holds: the verdict of what is proved, checked or tested; of a test, None where it decided nothing.
        measured: the number that was found.
        interval: `(low, high)` around it.  A measured claim without one is undecided.
        above, below, within: one of them, the numbers for which a measured claim holds: it holds if all of the interval
            is there, does not hold if none of it is, and is undecided else.
        predicted: what was to be expected; of a measured claim those numbers, unless given.
        note: what a reader must know about this verdict.
        must_hold: whether the whole run fails where it does not; by default, unless it is measured or quoted.

    Raises:
        SpecdecError: an id that no YAML file has, without a statement, source and kind; an unknown kind; no verdict, or
            two; an id that is taken; an interval that is not `(low, high)`, two numbers.

    >>> where = {"source": "Corollary 3.9", "kind": "measured"}
    >>> claim("draft-pays", "The draft is faster than no draft", measured=1.31, interval=(1.24, 1.38), above=1, **where)
    HOLDS: The draft is faster than no draft
      measured 1.31 [1.24, 1.38], predicted above 1. Measured; Corollary 3.9
    >>> claim("too-few", "So it is here", measured=1.04, interval=(0.98, 1.1), above=1, **where).verdict
    'undecided'
    """
    if statement is None:
        entry = declared_claim(id)
        statement, source, kind = (entry[name] for name in ("statement", "source", "kind"))
        must_hold = entry.get("must_hold", must_hold)
        predicted = entry.get("predicted") if predicted is None else predicted
    if kind not in KINDS:
        raise SpecdecError(f"claim {id!r}: unknown kind {kind!r}, use one of {', '.join(KINDS)}")
    if source is None:
        raise SpecdecError(f"claim {id!r} has a statement and no source: give source=, where it is stated")
    bounds = None if interval is None else checked_interval(id, interval)
    where = {"above": above, "below": below, "within": within}
    asked = {name: value for name, value in where.items() if value is not None}
    row = Claim(
        id=id,
        statement=statement,
        source=source,
        kind=kind,
        verdict=verdict_of(id, kind, holds, interval, asked),
        predicted=plain(next((wanted(*each) for each in asked.items()), None) if predicted is None else predicted),
        measured=plain(measured),
        interval=bounds,
        must_hold=kind not in ("measured", "quoted") if must_hold is None else must_hold,
        note=note,
    )
    folder = results_folder()
    if id in _ledger and (folder or _ledger[id].statement != statement):
        raise SpecdecError(f"claim {id!r} is already in this notebook's ledger: give each claim an id of its own")
    _ledger[id] = row
    if folder:
        write_text(folder / "claims.json", to_json([asdict(c) for c in _ledger.values()]))
    return row


def verdict_of(id: str, kind: str, holds: Any, interval: Any, asked: dict[str, Any]) -> str:
    """The verdict: what is measured is decided by its interval alone, all else by `holds`."""
    given = [*asked, *["holds"] * (holds is not None)]
    if kind == "quoted" and given:
        raise SpecdecError(f"claim {id!r} is quoted, so it has no verdict: leave out {', '.join(given)}")
    if len(given) > 1:
        raise SpecdecError(f"claim {id!r}: the verdict comes from one of {', '.join(given)}: leave out the others")
    if asked and kind != "measured":
        raise SpecdecError(
            f"claim {id!r} is {kind}: give holds=True or holds=False, {given[0]}= is for what is measured"
        )
    if kind == "quoted":
        return "quoted"
    if asked:
        return "undecided" if interval is None else by_interval(interval, *next(iter(asked.items())))
    if holds is None and kind in ("proved", "checked exactly"):
        raise SpecdecError(f"claim {id!r}: a {kind} claim needs a verdict, holds=True or holds=False")
    if holds is None or (kind == "measured" and interval is None):
        return "undecided"
    return "holds" if holds else "does not hold"


def by_interval(interval: Any, name: str, bound: Any) -> str:
    """Whether all of an interval lies `above`, `below` or `within` a bound, or none of it.

    >>> [by_interval(i, "above", 1) for i in [(1.1, 1.3), (0.9, 1.3), (0.8, 0.9)]]
    ['holds', 'undecided', 'does not hold']
    """
    low, high = interval
    least, most = {"above": (bound, math.inf), "below": (-math.inf, bound)}.get(name) or bound
    if least < low and high < most:
        return "holds"
    return "does not hold" if high <= least or low >= most else "undecided"


def wanted(name: str, bound: Any) -> str:
    """`above 1`, `within [0.9, 1.1]`."""
    return f"{name} [{', '.join(map(number, bound))}]" if name == "within" else f"{name} {number(bound)}"


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
    write_text(results / "claims.json", to_json({"summary": summary(rows), "claims": rows}))
    write_text(results / "claims.md", markdown(rows))
    return rows


def summary(rows: list[dict]) -> str:
    """How many hold, do not, and are undecided; a quoted number counts in none.

    >>> summary([{"verdict": "holds"}, {"verdict": "undecided"}, {"verdict": "quoted"}])
    '1 of 2 claims holds on this machine; 1 is undecided.'
    """
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in COLOURS}
    held, failed, open_ = counts["holds"], counts["does not hold"], counts["undecided"]
    text = f"{held} of {held + failed + open_} claims hold{'s' * (held == 1)} on this machine"
    text += f"; {failed} do{'es' * (failed == 1)} not" * bool(failed)
    return text + f"; {open_} {'is' if open_ == 1 else 'are'} undecided" * bool(open_) + "."


def broken(rows: list[dict]) -> list[dict]:
    """The claims that must hold and do not."""
    return [row for row in rows if row["must_hold"] and row["verdict"] == "does not hold"]


def markdown(rows: list[dict]) -> str:
    """The referee's table, after the one sentence that sums it up."""
    lines = [summary(rows), ""]
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
