"""Drafts on disk: a folder with weights, configuration, and a manifest that names the target and the training.

    model.safetensors   a shortlist model in float16, or an ordinary model with its own tokenizer, or
    table.safetensors   an n-gram table
    config.json         the model's configuration
    tokenizer.json ...  the tokenizer of a model that has its own
    manifest.json       kind, target_hash, size and SHA-256 of each file, and a full record of the training

The packaged drafts are such folders under `data/drafts/`.  A draft works for the target whose text it learnt from.
With another target it would be accepted so rarely that it only costs time, so `load_draft` refuses it.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import SpecdecError, first_line
from ..files import held, replace_folder, restore_folder, sha256, write_json
from ..models import packaged
from ..models.feature_draft import FeatureDraft
from ..models.pair import PACKAGED, load_model, load_transformers, resolve
from ..models.shortlist import ShortlistLlamaForCausalLM
from ..paths import DRAFTS, MANIFEST

WEIGHTS, TABLE = "model.safetensors", "table.safetensors"


def packaged_drafts(*kinds: str) -> dict[str, Path]:
    """The folders of the drafts in the checkout, by name: all, or those of the given kinds."""
    found = {p.parent.name: p.parent for p in sorted(DRAFTS.glob(f"*/{MANIFEST}")) if not p.parent.name.startswith(".")}
    return {name: folder for name, folder in found.items() if not kinds or read_manifest(folder)["kind"] in kinds}


def is_draft(folder: str | os.PathLike) -> bool:
    """Whether `folder` holds a draft; the packaged target's manifest differs, it names no target."""
    manifest = Path(folder) / MANIFEST
    return manifest.is_file() and '"target_hash"' in manifest.read_text(encoding="utf-8")


def read_manifest(folder: str | os.PathLike) -> dict:
    """The manifest of the draft in `folder`, as `write_draft` wrote it."""
    try:
        manifest = json.loads((Path(folder) / MANIFEST).read_text(encoding="utf-8"))
        manifest["kind"], manifest["target_hash"], manifest["files"]
    except (OSError, ValueError, KeyError, TypeError):
        raise SpecdecError(
            f"{folder} is not a draft folder (it has no {MANIFEST} of a draft): make one with `specdec distill`"
        ) from None
    return manifest


def has_own_tokenizer(folder: str | os.PathLike) -> bool:
    """Whether the draft in `folder` has its own tokenizer, not the target's."""
    return read_manifest(folder)["kind"] == "tokenizer"


def target_hash(name: str | os.PathLike) -> str:
    """The SHA-256 of a target's weights, which identifies it: of the packaged target, a folder or a hub id.

    For a model in several files it is the SHA-256 of the list of their hashes.
    """
    if str(name) == PACKAGED:
        resolve(name)
        return packaged.weights_hash(packaged.folder())
    files = sorted(Path(local_folder(name)).glob("model*.safetensors"))
    if not files:
        raise SpecdecError(f"{name} has no model.safetensors: give a model that `save_pretrained` wrote")
    sums = [sha256(file) for file in files]
    return sums[0] if len(sums) == 1 else hashlib.sha256("\n".join(sums).encode()).hexdigest()


def local_folder(name: str | os.PathLike) -> str:
    """The folder of a target; the files of a hub id are downloaded unless they are in the hub's cache."""
    source = resolve(name)
    if Path(source).is_dir():
        return source
    from huggingface_hub import snapshot_download

    wanted = ["model*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
    try:
        return snapshot_download(source, allow_patterns=wanted, ignore_patterns="*/*")
    except Exception as error:  # hub and network raise many kinds; each means that the model cannot be had
        raise SpecdecError(
            f"cannot download {name} from the hub ({first_line(error)}): check the id, or give a folder"
        ) from error


def note_speed(folder: str | os.PathLike, name: str, speed: Mapping[str, Any]) -> None:
    """Write a measured speed into the manifest of the draft in `folder`.

    Args:
        folder: the draft's folder.
        name: what was measured: the draft alone (`"small"`) or behind another drafter (`"lookup+small"`).
        speed: `speedup` at each temperature, by which `load_pair` chooses, and other figures to keep.
    """
    with held(Path(folder).parent, "the drafts' folder", print):
        manifest = read_manifest(folder)
        manifest["speed"] = manifest.get("speed", {}) | {name: dict(speed)}
        write_json(Path(folder) / MANIFEST, manifest)


def write_draft(folder: str | os.PathLike, draft: Any, manifest: Mapping[str, Any], tokenizer: Any = None) -> dict:
    """Write a draft; the folder appears complete or not at all, and replaces an old draft.

    Args:
        folder: for example `data/drafts/small`.
        draft: a `ShortlistLlamaForCausalLM` or `FeatureDraft` (written in float16) or an `NGramDrafter`; with
            `tokenizer` a Llama.
        manifest: `target_hash` and other facts to keep; `kind`, `bytes` and `files` are added.
        tokenizer: the draft's own tokenizer, if its tokens are not the target's.

    Returns:
        The manifest as written.
    """
    folder = Path(folder)
    restore_folder(folder)
    if folder.exists() and any(folder.iterdir()):
        read_manifest(folder)  # refuses to replace a folder that is not a draft
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        if tokenizer is not None:
            kind = "tokenizer"
            _write_model(work, draft)
            tokenizer.save_pretrained(work)
        elif isinstance(draft, ShortlistLlamaForCausalLM):
            kind = "features" if isinstance(draft, FeatureDraft) else "model"
            _write_model(work, draft)
        else:
            kind = "ngram"
            draft.save(work / TABLE)
        files: dict[str, dict[str, Any]] = {}
        for path in sorted(work.iterdir()):
            path.chmod(0o644)  # safetensors makes files that only their owner can read
            files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
        content = {"kind": kind, "bytes": sum(f["bytes"] for f in files.values()), "files": files} | dict(manifest)
        write_json(work / MANIFEST, content)
        work.chmod(0o755)
        replace_folder(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return content


def _write_model(folder: Path, model: Any) -> None:
    from safetensors.torch import save_file

    tensors = {name: t for name, t in model.state_dict().items() if name != "lm_head.weight"}  # tied
    half = {name: t.half() if t.is_floating_point() else t.int() for name, t in tensors.items()}
    save_file({name: t.cpu().contiguous() for name, t in half.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = torch.float32  # the file has half the bytes; a CPU computes in float32
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


def load_draft(
    folder: str | os.PathLike, target_hash: str | None = None, device: str | None = None, dtype: Any = None
) -> Any:
    """The draft in `folder`: a `FastLlama`, a `FeatureDrafter` or an `NGramDrafter`, as `Pair(draft=...)` takes them.

    For a draft with its own tokenizer only the model is returned; `load_pair` wraps it for the target.

    Args:
        folder: a folder written by `write_draft`.
        target_hash: the hash of the target that it will draft for (`target_hash(name)`); None skips the check.
        device, dtype: as in `load_pair`.

    Raises:
        SpecdecError: no draft, a draft of another target, a damaged file.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if target_hash is not None and manifest["target_hash"] != target_hash:
        raise SpecdecError(
            f"the draft {folder.name} was made for the target {manifest['target_hash'][:12]}, the one loaded is "
            f"{target_hash[:12]}: use a draft of this target, or make one with `specdec distill`"
        )
    for name, file in manifest["files"].items():
        if not (folder / name).is_file() or sha256(folder / name) != file["sha256"]:
            raise SpecdecError(f"{folder / name} is damaged or missing: restore it, or run `specdec distill` again")
    if manifest["kind"] == "ngram":
        from . import NGramDrafter

        return NGramDrafter.load(folder / TABLE)
    if manifest["kind"] == "features":
        from . import FeatureDrafter

        return FeatureDrafter(load_transformers(folder, device, dtype))
    return load_model(folder, device, dtype)
