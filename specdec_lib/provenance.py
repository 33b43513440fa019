"""What a result depends on, as digests: the library, the data, the models, the versions."""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

from .environment import versions
from .files import sha256
from .paths import MANIFEST, data_folders, packaged_target


def digest(*parts: Any) -> str:
    """One SHA-256 of anything that JSON can say."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def state_of(root: Path) -> dict[str, Any]:
    """All that a result of the checkout `root` depends on beside its notebook and its parameters."""
    manifest = packaged_target() / MANIFEST
    found = versions()
    return {
        "library": [*hashes(root / "specdec_lib", "*.py"), *hashes(root / "specdec_lib", "*.mplstyle")],
        "data": [(path.name, hashes(path)) for path in data_folders(root)],
        "models": manifest.read_text(encoding="utf-8") if manifest.exists() else None,
        "versions": [platform.python_version(), found.get("torch"), found.get("transformers")],
    }


def hashes(folder: Path, pattern: str = "*") -> list[tuple[str, str]]:
    """`(path, SHA-256)` of the files below a folder, hidden ones left out; none where there is no folder."""
    files = [(path.relative_to(folder), path) for path in sorted(folder.rglob(pattern)) if path.is_file()]
    shown = [(name, path) for name, path in files if not any(part.startswith(".") for part in name.parts)]
    return [(name.as_posix(), sha256(path)) for name, path in shown]
