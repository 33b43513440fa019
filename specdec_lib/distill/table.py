"""The target's table of input embeddings, read from its files alone: the rest of a large target fills the memory."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import safe_open

from ..models.pair import load_transformers


def embedding_table(folder: str | os.PathLike) -> torch.Tensor:
    """The input embeddings of the model in `folder`, float32 `[V, W]`.

    The whole model is loaded only where its files do not have them as they are: under another name, or quantised.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    weight = model.get_input_embeddings().weight
    names = [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is weight]
    names += [name.removeprefix(f"{model.base_model_prefix}.") for name in names]  # saved without its head
    whole = Path(folder) / "model.safetensors"
    for file in [whole] if whole.exists() else sorted(Path(folder).glob("model-*.safetensors")):
        with safe_open(file, "pt") as held:
            for name in set(names) & set(held.keys()):
                table = held.get_tensor(name)
                if table.shape == weight.shape and table.is_floating_point() and table.element_size() > 1:
                    return table.float()
    return load_transformers(folder, "cpu", "float32").get_input_embeddings().weight.detach().clone()
