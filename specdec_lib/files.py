"""Files: written whole or not at all, their digests; folders that one process at a time may write to, or that are
replaced as a whole.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


def write_text(path: Path, text: str) -> None:
    """Write through a temporary file and one rename: a reader sees the old text or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def json_text(value: Any) -> str:
    """JSON of any numbers."""
    return json.dumps(finite(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """The value with NaN and infinity as None: JSON has no word for them.

    >>> finite({"a": [float("nan"), 1.0], "b": {"c": float("inf")}})
    {'a': [None, 1.0], 'b': {'c': None}}
    """
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, content: dict) -> None:
    """A manifest or another JSON file that people read, written whole or not at all."""
    write_text(path, json.dumps(content, indent=2, sort_keys=True, default=str) + "\n")


def sha256(path: Path) -> str:
    """The SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
