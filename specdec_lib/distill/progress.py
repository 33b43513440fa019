"""What the person who waits sees: a bar with the time left on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 30


class Board:
    """Shows one step of the work at a time, on standard error."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)

    def say(self, line: str) -> None:
        """A line that stays."""
        self.console.print(line, markup=False, soft_wrap=True)

    @contextmanager
    def step(self, name: str) -> Iterator[Callable[[float], None]]:
        """Announce a step; the function yielded is to be called with the share of it that is done, 0 to 1."""
        columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()]
        live = self.console.is_terminal
        with Progress(*columns, TimeRemainingColumn(), console=self.console, transient=True, disable=not live) as bars:
            task = bars.add_task(name, total=1.0)
            last = time.monotonic()

            def done(share: float) -> None:
                nonlocal last
                bars.update(task, completed=share)
                if not live and time.monotonic() - last > SECONDS_BETWEEN_LINES:
                    last = time.monotonic()
                    self.say(f"{name}: {share:.0%}")

            yield done
