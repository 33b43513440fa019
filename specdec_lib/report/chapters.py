"""The YAML file beside each notebook: the sizes at which it runs, and the claims that it makes.

`notebooks/<stem>.yaml` has two keys.  `sizes` maps each profile to the parameters that differ from the defaults in the
notebook's `parameters` cell.  `claims` maps the id of each claim to its `statement`, `source` and `kind`, and perhaps
`must_hold` and `predicted`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ..errors import SpecdecError
from ..paths import NOTEBOOKS

NEEDED, OPTIONAL = ("statement", "source", "kind"), ("must_hold", "predicted")


def read_chapter(path: Path) -> dict[str, dict[str, Any]]:
    """`{"sizes": {profile: {name: value}}, "claims": {id: entry}}` of `notebooks/<stem>.yaml`.

    Raises:
        SpecdecError: the file is missing or no YAML, or holds anything but that.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecdecError(f"cannot read {path.name} ({error.strerror}): it stands beside the notebook") from None
    except yaml.YAMLError as error:
        raise SpecdecError(f"{path.name}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict) or not set(content) <= {"sizes", "claims"}:
        raise SpecdecError(f"{path.name}: must have the keys sizes and claims, and no others")
    found = {key: content.get(key) or {} for key in ("sizes", "claims")}
    for key, entries in found.items():
        if not isinstance(entries, dict) or not all(isinstance(each, dict | None) for each in entries.values()):
            raise SpecdecError(f"{path.name}: {key} must map names to mappings, as in `smoke: {{}}`")
    for id, entry in found["claims"].items():
        missing = [name for name in NEEDED if not isinstance((entry or {}).get(name), str)]
        unknown = sorted(set(entry or {}) - {*NEEDED, *OPTIONAL})
        if missing or unknown:
            what = f"no {missing[0]}" if missing else f"an unknown key, {unknown[0]}"
            raise SpecdecError(f"{path.name}: claim {id} has {what}: it needs {', '.join(NEEDED)}")
    found["sizes"] = {profile: given or {} for profile, given in found["sizes"].items()}
    return found


@cache
def declared_claims(folder: Path = NOTEBOOKS) -> dict[str, dict[str, Any]]:
    """The claims of all notebooks of a folder by id, each with its `notebook`.

    Raises:
        SpecdecError: two notebooks use one id.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.yaml")):
        for id, entry in read_chapter(path)["claims"].items():
            if id in found:
                raise SpecdecError(f"{path.name} and {found[id]['notebook']}.yaml both have a claim {id!r}: rename one")
            found[id] = {**entry, "notebook": path.stem}
    return found


def declared_claim(id: str) -> dict[str, Any]:
    """The entry of one claim."""
    entry = declared_claims().get(id)
    if entry is None:
        raise SpecdecError(
            f"claim {id!r} is in no YAML file of notebooks/: add it there, or give statement, source= and kind="
        )
    return entry
