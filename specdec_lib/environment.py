"""The machine and the software of a run, as far as they bear on its numbers: no names, no paths."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .paths import ROOT

PACKAGES = (
    "torch", "transformers", "tokenizers", "safetensors", "accelerate", "gguf", "datasets",
    "numpy", "scipy", "pandas", "matplotlib", "seaborn", "papermill", "ipykernel",
)  # fmt: skip


def environment() -> dict:
    """CPU, memory, GPU, system, versions, threads, default dtype, BLAS, commit.

    Imports torch and numpy; well under a second when they are loaded.

    >>> sorted(environment())
    ['blas', 'commit', 'cpu', 'default_dtype', 'gpu', 'memory_gib', 'os', 'packages', 'python', 'threads']
    """
    import psutil
    import torch

    return {
        "cpu": {
            "model": cpu_model(),
            "cores": psutil.cpu_count(logical=False),
            "logical_cores": psutil.cpu_count(),
            "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count(),
        },
        "threads": {"torch": torch.get_num_threads(), "omp": os.environ.get("OMP_NUM_THREADS")},
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": gpu(),
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": versions(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "blas": blas(),
        "commit": commit(),
    }


def versions() -> dict[str, str]:
    """The installed packages among those that matter here; nothing is imported."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def cpu_model() -> str:
    """As the system names it; `platform.processor()` is empty on most Linux systems."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Model", "Hardware")):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    if platform.system() == "Darwin":
        return output_of("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    return platform.processor() or platform.machine()


def gpu() -> dict | None:
    """The first accelerator that torch can use, or None."""
    import torch

    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        return {
            "model": device.name,
            "count": torch.cuda.device_count(),
            "memory_gib": round(device.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
    if torch.backends.mps.is_available():
        return {"model": "Apple MPS", "count": 1}
    return None


def blas() -> dict[str, str]:
    """What multiplies matrices in torch and in numpy."""
    import numpy
    import torch

    found = numpy.show_config(mode="dicts")["Build Dependencies"]["blas"]  # type: ignore[call-overload]
    return {
        "torch": "mkl" if torch.backends.mkl.is_available() else "other",
        "numpy": f"{found.get('name', 'unknown')} {found.get('version', '')}".strip(),
    }


def commit() -> str | None:
    """The commit of the checkout that this library runs from, with `+changes` if the library differs; else None."""
    root = ROOT
    if not (root / ".git").exists():
        return None
    head = output_of("git", "-C", str(root), "rev-parse", "HEAD")
    changed = head and output_of(
        "git", "-C", str(root), "status", "--porcelain", "--", "specdec_lib", "notebooks", "data"
    )
    return f"{head}+changes" if changed else head or None


def output_of(*command: str) -> str:
    """What a command prints; empty when it fails or does not exist."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
