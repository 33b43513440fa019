"""Where things are: the checkout, its data, what is fetched, what runs leave behind."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "data"
NOTEBOOKS = ROOT / "notebooks"
DRAFTS, PAPER, PROMPTS, TINY_T5 = (DATA / name for name in ("drafts", "paper", "prompts", "t5"))
RESULTS = ROOT / "results"
FETCHED_OR_MADE = ("models", "text")  # of `data/`: what git ignores

PACKAGED_TARGET = "smollm2-135m-instruct"
MANIFEST = "manifest.json"


def home() -> Path:
    """Where models live: `$SPECDEC_HOME`, else `data/` of the checkout."""
    given = os.environ.get("SPECDEC_HOME")
    return Path(given).expanduser().resolve() if given else DATA


def packaged_target() -> Path:
    """The folder of the packaged target, whether it is there or not."""
    return home() / "models" / PACKAGED_TARGET


def data_folders(root: Path = ROOT) -> list[Path]:
    """The folders of `data/` that come with a checkout."""
    found = sorted((root / "data").glob("[!.]*"))
    return [path for path in found if path.is_dir() and path.name not in FETCHED_OR_MADE]
