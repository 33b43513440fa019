"""The tiny T5 pair in `data/t5`: how it was trained on the synthetic translation task, and how to do it again.

    python -m specdec_lib.studies.tiny_t5 [FOLDER]      both models, one CPU core, under an hour

Each model learns by itself from the grammar's translations, as the checkpoints of the paper's T5 experiments learned
from their data: the draft is no student of the target.  The loss is cross-entropy under teacher forcing.  Data are a
function of the recipe's seed and the step, so an interrupted run goes on from its checkpoint as if nothing had been.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..distill.train import checkpoint, restore
from ..files import sha256, write_json
from ..models.pair import load_tokenizer, load_transformers
from ..paths import MANIFEST, TINY_T5, home
from .translation import HELD_OUT, Sentence, sentences, vocabulary

FOLDER = TINY_T5
TARGET, DRAFT = FOLDER / "target", FOLDER / "draft"
PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"  # ids 0, 1, 2, as T5 has them
WARMUP, DECAY = 200, 0.3  # steps at the start, share of the steps at the end


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what is trained.

    Attributes:
        layers: of the encoder, which runs once a source.
        decoder_layers: of the decoder, which runs at each step; not more than `layers`, or transformers' own `generate`
            makes its cache too small.
        width, heads: of the model; the feed-forward layer is gated and twice as wide, as in T5 v1.1.
        steps, batch: training steps, and sentences in each.
        rate: peak learning rate.
        seed: of initialisation and data.
    """

    layers: int
    decoder_layers: int
    width: int
    heads: int
    steps: int
    batch: int = 32
    rate: float = 1e-3
    seed: int = 0


RECIPES = {
    "target": Recipe(layers=4, decoder_layers=4, width=128, heads=4, steps=2400, rate=7e-4),
    "draft": Recipe(layers=4, decoder_layers=1, width=64, heads=2, steps=2600, rate=1.2e-3),
}


def make_tokenizer() -> Any:
    """One token a word, and an end token after every text.

    >>> tokenizer = make_tokenizer()
    >>> ids = tokenizer("the old dog .")["input_ids"]
    >>> ids[-1], tokenizer.decode(ids, skip_special_tokens=True)
    (1, 'the old dog .')
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {word: i for i, word in enumerate([PAD, END, UNKNOWN, *vocabulary()])}
    inner = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    inner.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, ids[END])])  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=PAD, eos_token=END, unk_token=UNKNOWN)


def build(recipe: Recipe, words: int) -> Any:
    """A fresh T5 of a vocabulary of `words` tokens."""
    from transformers import T5Config, T5ForConditionalGeneration

    settings: dict[str, Any] = dict(
        vocab_size=words,
        d_model=recipe.width,
        d_kv=recipe.width // recipe.heads,
        d_ff=2 * recipe.width,
        num_layers=recipe.layers,
        num_decoder_layers=recipe.decoder_layers,
        num_heads=recipe.heads,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    config = T5Config(**settings)
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(recipe.seed)
        return T5ForConditionalGeneration(config)


def encoded(tokenizer: Any, given: list[Sentence], rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """Sources and one drawn translation of each, as T5 takes them for training."""
    source = tokenizer([s.english for s in given], padding=True, return_tensors="pt")
    labels = tokenizer([s.german(rng) for s in given], padding=True, return_tensors="pt")["input_ids"]
    return {
        "input_ids": source["input_ids"],
        "attention_mask": source["attention_mask"],
        "labels": labels.masked_fill(labels == 0, -100),
    }


def rate_at(recipe: Recipe, step: int) -> float:
    """The learning rate: up over the warm-up, level, and down to 0 over the last part."""
    return recipe.rate * min(1.0, (step + 1) / WARMUP, (recipe.steps - step) / (DECAY * recipe.steps))


def train(
    recipe: Recipe, model: Any, tokenizer: Any, folder: Path, report: Callable[[dict], object], every: float = 60.0
) -> list[dict]:
    """Train `model` in place, from a checkpoint in `folder` if there is one; returns the learning curve."""
    folder.mkdir(parents=True, exist_ok=True)
    optimiser = torch.optim.AdamW(model.parameters(), lr=recipe.rate, betas=(0.9, 0.98), weight_decay=0.01)
    state: dict[str, Any] = {"step": 0, "seconds": 0.0, "curve": []} | restore(folder, model, [optimiser])
    started = saved = time.monotonic()
    before = state["seconds"]
    losses: list[float] = []
    model.train()
    for step in range(state["step"], recipe.steps):
        given = list(islice(sentences([recipe.seed, step]), recipe.batch))
        loss = model(**encoded(tokenizer, given, np.random.default_rng([recipe.seed, step, 1]))).loss
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimiser.param_groups:
            group["lr"] = rate_at(recipe, step)
        optimiser.step()
        losses.append(float(loss.detach()))
        if time.monotonic() - saved > every or step + 1 == recipe.steps:
            saved = time.monotonic()
            state["step"], state["seconds"] = step + 1, before + saved - started
            state["curve"].append({"step": step + 1, "loss": round(float(np.mean(losses)), 4)})
            losses.clear()
            checkpoint(folder, model, [optimiser], state)
            report(state["curve"][-1] | {"seconds": round(state["seconds"])})
    return state["curve"]


@torch.inference_mode()
def evaluate(model: Any, tokenizer: Any, n: int = 200, seed: int = 1) -> dict[str, float]:
    """On `n` held-out sentences: loss, and the share whose greedy translation is one that the grammar can write."""
    model.eval()
    given = list(islice(sentences([seed], held_out=True), n))
    inputs = encoded(tokenizer, given, np.random.default_rng([seed, 1]))
    loss = float(model(**inputs).loss)
    source = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    texts = tokenizer.batch_decode(
        model.generate(**source, max_new_tokens=128, do_sample=False), skip_special_tokens=True
    )
    right = sum(s.is_translation(text) for s, text in zip(given, texts, strict=True))
    return {"sentences": n, "loss": round(loss, 4), "right": right / n}


def write(folder: Path, model: Any, tokenizer: Any, recipe: Recipe, curve: list[dict]) -> dict:
    """Write weights in float16, configuration, tokenizer and manifest; returns the manifest.

    What the manifest measures is the model as it is read back.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tied = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    half = {name: t.half().contiguous() for name, t in model.state_dict().items() if name not in tied}
    save_file(half, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.dtype = torch.float32  # half the bytes on disk; a CPU computes in float32 all the same
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = folder / "tokenizer_config.json"  # transformers 5 writes a class that earlier releases do not know
    write_json(settings, json.loads(settings.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"})
    files = {}
    for path in sorted(set(folder.iterdir()) - {folder / MANIFEST}):
        path.chmod(0o644)  # safetensors writes for its owner alone
        files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    content = {
        "task": f"synthetic: translation.py's toy English to toy German; 1 sentence in {HELD_OUT} is held out",
        "recipe": asdict(recipe),
        "parameters": sum(t.numel() for t in half.values()),
        "curve": curve,
        "held_out": evaluate(load_transformers(folder, device="cpu"), load_tokenizer(folder)),
        "files": files,
        "versions": {"python": platform.python_version()} | {p: version(p) for p in ("torch", "transformers")},
    }
    write_json(folder / MANIFEST, content)
    return content


def main(folder: Path = FOLDER, recipes: dict[str, Recipe] | None = None, runs: Path | None = None) -> None:
    """Train and write every model of `recipes` that is not finished; None are the `RECIPES`."""
    tokenizer = make_tokenizer()
    for name, recipe in (recipes or RECIPES).items():
        model = build(recipe, len(tokenizer))
        work = (runs or home() / "text" / "runs") / f"t5-{name}-{recipe.layers}-{recipe.decoder_layers}x{recipe.width}"
        curve = train(recipe, model, tokenizer, work, lambda entry, name=name: print(name, entry, flush=True))  # type: ignore[misc]
        print(name, write(folder / name, model, make_tokenizer(), recipe, curve)["held_out"], flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
