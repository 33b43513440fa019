"""Folders that one process at a time may write to, and folders that are replaced as a whole."""

from __future__ import annotations

import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import SpecdecError

LOCK, HOLDER = ".lock", ".held-by"


def host() -> str:
    """The name of this machine, in letters that a file name may have."""
    return re.sub(r"[^A-Za-z0-9.]", "_", platform.node()) or "unknown"


@contextmanager
def held(folder: Path, what: str, wait: Callable[[str], object] | None = None) -> Iterator[None]:
    """Hold the lock of a folder, which is made if need be; the system frees it when the process ends, however it ends.

    Args:
        folder: what only one process may write to.
        what: names it in a message, such as "the results folder".
        wait: is told who holds the lock before this waits for it; None refuses instead.

    Raises:
        SpecdecError: another process holds it, and who; or the disk of the folder has no locks.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(folder / LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            told = f"{what} {folder} is in use by {holder(folder)}"
            if wait is None:
                raise SpecdecError(f"{told}: wait until that has ended, or name another folder") from None
            wait(f"{told}: waiting for it")
            lock.acquire()
        (folder / HOLDER).write_text(
            f"process {os.getpid()} on {platform.node()} since {time.strftime('%Y-%m-%d %H:%M:%S')}", encoding="utf-8"
        )
    except (OSError, NotImplementedError) as error:
        raise SpecdecError(f"cannot lock {what} {folder} ({error}): use a folder on a local disk") from None
    try:
        yield
    finally:
        (folder / HOLDER).unlink(missing_ok=True)
        lock.release()


def holder(folder: Path) -> str:
    """Who holds the lock of a folder, as far as it has said so."""
    try:
        return (folder / HOLDER).read_text(encoding="utf-8") or "another process"
    except OSError:
        return "another process"


def replace_folder(made: Path, place: Path) -> None:
    """Put the folder `made` in the place of `place`.  The old one is kept as `.<name>-replaced` until that is done.

    A process killed between the two renames leaves no folder at `place`: `restore_folder` brings the old one back.
    """
    restore_folder(place)
    old = _aside(place)
    if place.exists():
        place.rename(old)
    made.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def restore_folder(place: Path) -> None:
    """Finish or undo what a killed `replace_folder` left; where it left nothing, do nothing."""
    old = _aside(place)
    if not old.exists():
        return
    if place.exists():
        shutil.rmtree(old, ignore_errors=True)
    else:
        old.rename(place)


def _aside(place: Path) -> Path:
    return place.with_name(f".{place.name}-replaced")
