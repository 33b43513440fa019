"""A target and who drafts for it, by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .drafters import PromptLookupDrafter
from .models import Pair, load_model, load_tokenizer
from .models.drafts import is_draft, load_draft, packaged_drafts, read_manifest, target_hash
from .models.pair import PACKAGED, resolve


def load_pair(
    target: str | os.PathLike = PACKAGED, draft: Any = None, device: str | None = None, dtype: Any = None
) -> Pair:
    """Load a target and who drafts for it.

    Args:
        target: `"packaged"`, a model folder, or a hub id (resolved only when named).
        draft: a drafter, a model in memory, a folder, a hub id, or the name of a packaged draft.  None takes the
            packaged draft that measured fastest for the packaged target, and prompt lookup for any other target.
        device: `"cpu"`, `"cuda"`, `"cuda:1"`; None takes the GPU if there is one.
        dtype: `"float32"`, `"bfloat16"`, ...; None means float32 on a CPU, bfloat16 on a GPU.

    Raises:
        SpecdecError: for what is no model, a draft of another target or vocabulary, a device that is not there.
    """
    packaged = packaged_drafts()
    if draft is None:
        name = fastest(packaged) if str(target) == PACKAGED else None
        draft, label = (packaged[name], name) if name else (PromptLookupDrafter(), "prompt lookup")
    elif isinstance(draft, (str, os.PathLike)):
        label = str(draft)
        draft = packaged.get(label, draft)
    else:
        label = type(draft).__name__
    if isinstance(draft, (str, os.PathLike)):
        resolve(draft)  # a name that cannot be right is refused before the target is loaded
        if is_draft(draft):
            draft = load_draft(draft, target_hash(target), device, dtype)
        else:
            draft = load_model(draft, device, dtype)
    model = load_model(target, device, dtype)
    return Pair(model, draft, load_tokenizer(target), description=f"target {target}, draft {label}")


def fastest(drafts: dict[str, Path]) -> str | None:
    """The draft with the best speed-up measured at temperatures 0 and 1, as its manifest keeps it; None if none has."""
    speeds = {name: read_manifest(folder).get("speed", {}).get("speedup") for name, folder in drafts.items()}
    measured = {name: sum(by.values()) for name, by in speeds.items() if by}
    return max(measured, key=lambda name: measured[name]) if measured else None
