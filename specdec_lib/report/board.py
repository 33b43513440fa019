"""What the person who waits sees: on a terminal a live bar a running notebook, and a line for each that has ended."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class Board:
    """Shows the running notebooks, their cells and elapsed times; leaves a line for each one that has ended."""

    def __init__(self, stems: Sequence[str]):
        self.stems = list(stems)
        self.width = max(map(len, stems), default=0)
        self.console = Console(highlight=False)
        self.live = self.console.is_terminal
        columns = [
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("cells"),
            TimeElapsedColumn(),
        ]
        self.progress = Progress(*columns, console=self.console, transient=True, disable=not self.live)
        self.bars: dict[str, TaskID] = {}

    def __enter__(self) -> Board:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def started(self, stem: str, cells: int) -> None:
        """Announce a notebook, again if it has to begin anew."""
        self._remove(stem)
        self.bars[stem] = self.progress.add_task(f"{self.stems.index(stem) + 1}/{len(self.stems)} {stem}", total=cells)

    def cell(self, stem: str, number: int) -> None:
        """A cell of a notebook starts; news that comes after the notebook's end is dropped."""
        if stem in self.bars:
            self.progress.update(self.bars[stem], completed=number)

    def finished(self, stem: str, state: str, seconds: float, error: Sequence[str] = ()) -> None:
        """The line that stays."""
        self._remove(stem)
        colour = {"ok": "green", "failed": "red"}.get(state, "dim")
        self.console.print(f"{stem:{self.width}}  [{colour}]{state:9}[/] {seconds:7.1f} s", soft_wrap=True)
        for line in error:
            self.say(f"    {line}")

    def say(self, line: str) -> None:
        self.console.print(line, markup=False, soft_wrap=True)

    def _remove(self, stem: str) -> None:
        if stem in self.bars:
            self.progress.remove_task(self.bars.pop(stem))
