"""Disk and memory that a distillation needs, estimated from the configurations and compared with the machine."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from ..errors import SpecdecError, first_line
from .features import watched_layers
from .text import TOP

if TYPE_CHECKING:
    from .recipe import Job


def check_needs(job: Job, config: Any, device: torch.device, work: Path) -> None:
    """Say before the work starts that it would not fit."""
    disk, memory, gpu = needs(job, config, device)
    place = work
    while not place.exists():
        place = place.parent
    lack(disk, shutil.disk_usage(place).free, f"on the disk of {work}", "free some, or name another work folder")
    less = "use fewer tokens, a smaller target or a machine with more"
    lack(memory, psutil.virtual_memory().available, "of memory", less)
    if device.type == "cuda":
        lack(gpu, torch.cuda.mem_get_info(device)[0], f"of memory on {device}", less)


def lack(needed: float, free: float, what: str, remedy: str) -> None:
    if needed > free:
        raise SpecdecError(f"about {needed / 1e9:.1f} GB {what} are needed and {free / 1e9:.1f} GB are free: {remedy}")


def needs(job: Job, config: Any, device: torch.device) -> tuple[float, float, float]:
    """Bytes of disk, of main memory and of GPU memory, roughly and rather too many."""
    from transformers import AutoModelForCausalLM

    model = config.get_text_config()
    try:
        with torch.device("meta"):
            parameters = AutoModelForCausalLM.from_config(
                config, trust_remote_code=job.trust_remote_code
            ).num_parameters()
    except Exception as error:
        raise SpecdecError(
            f"{job.target} is no causal language model that transformers knows: {first_line(error)}"
        ) from error
    vocabulary, width = model.vocab_size, getattr(model, "hidden_size", 0)
    heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
    head_dim = getattr(model, "head_dim", None) or width // model.num_attention_heads
    cache = 2 * 2 * model.num_hidden_layers * job.rows * heads * job.length * head_dim
    logits = job.rows * vocabulary * 32
    writing = 2 * 2 * parameters + 2 * cache + logits  # twice: as loaded and as laid out; before and after it grows

    label = 2 + (2 if vocabulary <= 1 << 16 else 4)
    tokens = job.tokens * 1.1
    states = 2 * tokens * width * len(watched_layers(model.num_hidden_layers)) if job.kind == "features" else 0
    text = 2 * tokens * (9 + TOP * label) + states  # twice: the shards and what they are joined to
    size = min(job.shortlist, vocabulary)
    draft = size * job.width + job.layers * 12 * job.width**2
    training = 16 * draft + 20 * job.batch * job.length * size + 4 * vocabulary * (width + job.width)
    measuring = 2 * 4 * parameters

    disk = tokens * (3 + TOP * label) + states + 3 * 12 * draft
    if device.type == "cpu":
        return disk, max(writing, text + training, measuring), 0
    return disk, max(4 * parameters, text + 4 * vocabulary * width), max(writing, training, measuring)
