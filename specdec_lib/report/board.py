"""What the person who waits sees: a live bar on a terminal, one line per notebook elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Board:
    """Shows the running notebook, its cells and its elapsed time; leaves a line for each one that has ended."""

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

    def __enter__(self) -> Board:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def started(self, stem: str, cells: int) -> Callable[[int], None]:
        """Announce a notebook; the function returned is to be called with the number of each cell that starts."""
        task = self.progress.add_task(f"{self.stems.index(stem) + 1}/{len(self.stems)} {stem}", total=cells)
        return lambda cell: self.progress.update(task, completed=min(cell, cells))

    def finished(self, stem: str, state: str, seconds: float, error: Sequence[str] = ()) -> None:
        """The line that stays."""
        for task in self.progress.task_ids:
            self.progress.remove_task(task)
        colour = {"ok": "green", "failed": "red"}.get(state, "dim")
        self.console.print(f"{stem:{self.width}}  [{colour}]{state:9}[/] {seconds:7.1f} s", soft_wrap=True)
        for line in error:
            self.console.print(f"    {line}", markup=False, soft_wrap=True)
