"""Where the running notebook leaves its results."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import SpecdecError

VARIABLE = "SPECDEC_RESULTS"


def results_folder() -> Path | None:
    """The folder of the running notebook, `$SPECDEC_RESULTS`; None by hand, where nothing is to be written.

    The runner gives each notebook a folder of its own, so that runs side by side never meet.
    """
    given = os.environ.get(VARIABLE)
    return Path(given) if given else None


def file_for(kind: str, name: str) -> Path | None:
    """`<folder>/<kind>/<name>`, its folder made; None by hand.  The name is checked in both cases."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name):
        raise SpecdecError(f"{name!r} cannot name a file of {kind}: use lower-case letters, digits, '-' and '_'")
    folder = results_folder()
    if folder is None:
        return None
    (folder / kind).mkdir(parents=True, exist_ok=True)
    return folder / kind / name
