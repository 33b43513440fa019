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
def sigterm_interrupts() -> Iterator[None]:
    """Inside, SIGTERM raises `Terminated`; of the main thread alone, since no other may set handlers.

    Further ones are not heeded: `timeout` sends two, to the process and to its group.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(*_: Any) -> None:
        signal.signal(signal.SIGTERM, lambda *_: None)
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
