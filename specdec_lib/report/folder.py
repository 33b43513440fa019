"""Where the running notebook leaves its results."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

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
