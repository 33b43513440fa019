"""SIGTERM ends a long run as Ctrl-C does: what is done is kept, the rest is told."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Terminated(KeyboardInterrupt):
    """SIGTERM came: `timeout`, a batch system or a container asks the process to end."""


def exit_status(interrupt: KeyboardInterrupt) -> int:
    """130 after Ctrl-C, 143 after SIGTERM, as shells have it.

    >>> exit_status(KeyboardInterrupt()), exit_status(Terminated())
    (130, 143)
    """
    return 128 + (signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT)


@contextmanager
def sigterm_interrupts() -> Iterator[threading.Event]:
    """Inside, SIGTERM raises `Terminated` and sets the event; of the main thread alone, as no other may set handlers.

    Further ones are not heeded: `timeout` sends two, to the process and to its group.
    """
    came = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield came
        return

    def terminate(*_: Any) -> None:
        came.set()
        signal.signal(signal.SIGTERM, lambda *_: None)
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
