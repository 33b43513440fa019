"""From a target to a draft: its text, the training, the measurement, the folder.

Each step goes on from where it was interrupted: missing shards are written, the training resumes from its last
checkpoint, the target's answers to the benchmark are kept.  What cannot work is said before the first long step.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..bench.prompts import load_prompts
from ..drafters import SharedVocabularyDrafter
from ..drafters.on_disk import local_folder, read_manifest, target_hash, write_draft
from ..environment import versions
from ..errors import SpecdecError, first_line
from ..files import held, restore_folder
from ..models import Pair, load_model, load_tokenizer
from ..models.fast import FastLlama
from ..models.pair import PACKAGED, device_and_dtype, refuse_remote_code, resolve
from ..paths import home
from ..validate import number, unwrapped, whole
from . import features, ngram
from .evaluate import encode, evaluate_draft, target_answers
from .folder import TEXT, TextFolder
from .needs import check_needs
from .progress import Board
from .table import embedding_table
from .text import LENGTH, ROWS, Turns
from .tokenizer import OwnText, ordinary, own_table, smallest, tokenizer_of
from .train import Recipe, Text, at_answers, build, entry_table, evaluate, fast_bfloat16, train
from .unseen import rows_with, split

KINDS = ("model", "features", "tokenizer", "ngram")
FEATURE_STEPS = 3  # tokens that a draft on the target's features goes further while it trains


@dataclass(frozen=True)
class Job:
    """What to make.

    Attributes:
        out: folder of the draft; its name is the draft's.
        target: `"packaged"`, a model folder or a hub id.
        kind: `"model"`; `"features"` for one layer on the target's hidden states; `"tokenizer"` for a model with a
            tokenizer of its own; or `"ngram"` for a table, which the attributes from `layers` to `rate` do not concern.
        tokens: of the target's text to train on.
        layers, width, heads: shape of the draft.
        shortlist: how many tokens it can propose: of the target's, or of its own tokenizer.
        passes: over the text.
        batch: rows a step.
        rate: peak learning rate.
        budget: minutes for text and training, at most half of them for the text; None sets no limit.
        device: `"cpu"`, `"cuda"`, `"cuda:1"`; None takes the GPU if there is one.
        dtype: in which the target writes; None takes bfloat16 where that is quick, else float32.
        seed: of everything.
        work: folder of text, checkpoints and answers, for one target; None is `data/text`.
        prompts: what to measure on, as `load_prompts` takes it; None takes the packaged ones.
        max_new_tokens: length of the answers that are measured on.
        rows, length: of a shard of text.
        every: seconds between checkpoints.
        trust_remote_code: run Python code that comes with the target.
    """

    out: str | Path
    target: str = PACKAGED
    kind: str = "model"
    tokens: int = 1_000_000
    layers: int = 2
    width: int = 256
    heads: int = 4
    shortlist: int = 8192
    passes: float = 10.0
    batch: int = Recipe.batch
    rate: float = Recipe.rate
    budget: float | None = None
    device: str | None = None
    dtype: str | None = None
    seed: int = 0
    work: str | Path | None = None
    prompts: str | Path | None = None
    max_new_tokens: int = 64
    rows: int = ROWS
    length: int = LENGTH
    every: float = 60.0
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise SpecdecError(f"unknown kind of draft {self.kind!r}: use one of {', '.join(KINDS)}")
        if self.kind == "features" and self.layers != 1:
            raise SpecdecError(f"a draft on the target's features has one layer, not {self.layers}: use layers 1")
        for name in ("tokens", "layers", "width", "heads", "shortlist", "batch", "max_new_tokens", "rows", "length"):
            object.__setattr__(self, name, whole(name, getattr(self, name), least=1))
        for name in ("passes", "rate", *(["budget"] if self.budget is not None else [])):
            number(name, getattr(self, name), 0, open_low=True)
            object.__setattr__(self, name, unwrapped(getattr(self, name)))
        if self.width % (2 * self.heads):
            raise SpecdecError(
                f"the width {self.width} must be a multiple of 2 x {self.heads} heads: change one of them"
            )

    @property
    def recipe(self) -> Recipe:
        """Of the training; its length follows from the text's."""
        tokens = round(self.tokens * self.passes)
        steps = FEATURE_STEPS if self.kind == "features" else 1
        return Recipe(
            self.layers, self.width, self.heads, self.shortlist, tokens, self.batch, self.rate, self.seed, steps
        )


@dataclass
class Ready:
    """What is known once the job has been checked."""

    job: Job
    device: str
    folder: str  # of the target
    hash: str
    config: Any
    tokenizer: Any
    turns: Turns
    context: int
    text: TextFolder
    prompts: list = field(default_factory=list)

    @property
    def watched(self) -> list[int]:
        """The layers of the target that a draft on its features reads."""
        return features.watched_layers(self.config.get_text_config().num_hidden_layers)

    @property
    def run(self) -> Path:
        """The folder of this training: the same job finds it again, another one does not.

        To another job belongs what goes elsewhere, what has other rows to leave out or what has other minutes.
        """
        job = self.job
        identity = [asdict(job.recipe), self.hash, job.tokens, job.rows, job.length]
        identity += [str(Path(job.out).absolute()), [prompt.messages for prompt in self.prompts], job.budget]
        digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:8]
        name = f"{job.layers}x{job.width}" if job.kind == "model" else f"{job.kind}-{job.width}"
        return self.text.path / "runs" / f"{name}-{digest}"


def distill(job: Job, board: Board | None = None) -> dict:
    """Make a draft; returns its manifest, as `write_draft` wrote it.

    Raises:
        SpecdecError: before any long step, for input that cannot be used, or a run of this job that is going on.
    """
    board = board or Board()
    ready = prepare(job)
    with held(ready.run, "the run folder"):
        return make(ready, board)


def make(ready: Ready, board: Board) -> dict:
    """All steps of a job that has been checked; returns the draft's manifest."""
    job = ready.job
    shards = write_text(ready, board)
    if job.kind == "features":
        with held(ready.text.path, TEXT, board.say), board.step("the target reads its text") as tick:
            features.write_features(
                ready.folder, shards, ready.watched, ready.device, ready.text.note["dtype"], tick,
                job.trust_remote_code,
            )  # fmt: skip
    train_text, held_out, left_out = read_text(ready, shards, board)
    story: dict[str, Any] = {
        "target": Path(job.target).name if Path(job.target).exists() else str(job.target),
        "target_hash": ready.hash,
        "text": {
            "tokens": train_text.tokens.numel(),
            "held_out_tokens": held_out.tokens.numel(),
            "rows_left_out": left_out,
            "seconds": round(ready.text.seconds),
            "seed": job.seed,
            "dtype": ready.text.note["dtype"],
        },
        "versions": versions(),
    }
    tokenizer = None
    if job.kind == "ngram":
        with board.step("fitting the n-gram table"):
            draft, trials = ngram.choose(train_text, held_out)
        story["trials"] = trials
        scored: Any = draft
    else:
        if job.kind == "tokenizer":
            tokenizer = tokenizer_of(ready.run, train_text, job.shortlist, ready.tokenizer)
            train_text, held_out = (OwnText(t, tokenizer, ready.tokenizer) for t in (train_text, held_out))
        draft, training = train_model(ready, train_text, held_out, board, tokenizer)
        story |= {"recipe": asdict(job.recipe), "training": training}
        scored = draft if job.kind == "features" else FastLlama(draft)
        if tokenizer is not None:
            scored = SharedVocabularyDrafter(scored, tokenizer, ready.tokenizer)
    del train_text, held_out
    story["benchmark"] = measure(ready, scored, board)
    written = write_draft(job.out, draft, story, tokenizer)
    board.say(summary(job.out, written))
    return written


def prepare(job: Job) -> Ready:
    """Check the job against target, machine and folders, and refuse what cannot work."""
    from transformers import AutoConfig

    where, _ = device_and_dtype(job.device, job.dtype)
    out = Path(job.out)
    restore_folder(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        read_manifest(out)  # anything but a draft is left alone
    prompts = load_prompts(job.prompts)
    source = resolve(job.target)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=job.trust_remote_code)
    except Exception as error:
        refuse_remote_code(job.target, error, job.trust_remote_code)
        raise SpecdecError(f"cannot read the configuration of {job.target}: {first_line(error)}") from error
    if config.is_encoder_decoder:
        raise SpecdecError(f"{job.target} has an encoder, and a draft learns from a decoder alone: name another target")
    tokenizer = load_tokenizer(job.target, trust_remote_code=job.trust_remote_code)
    turns = Turns.of(tokenizer)
    model = config.get_text_config()
    limit = getattr(model, "max_position_embeddings", None) or 1 << 30
    shortest = len(turns.start) + len(turns.to_assistant) + 2
    if not shortest <= job.length <= limit:
        raise SpecdecError(f"rows of {job.length} tokens do not suit {job.target}: use {shortest} to {limit}")
    if job.kind == "ngram" and model.vocab_size > 1 << 16:
        raise SpecdecError(
            f"an n-gram table takes up to 65,536 tokens, {job.target} has {model.vocab_size}: use a model"
        )
    if job.kind == "tokenizer" and job.shortlist < (least := smallest(tokenizer)):
        raise SpecdecError(f"a tokenizer for {job.target} has at least {least} tokens: use a larger shortlist")
    for prompt in prompts:
        if (ids := len(encode(tokenizer, prompt))) + job.max_new_tokens > limit:
            raise SpecdecError(
                f"the prompt {prompt.id} of {ids} tokens and {job.max_new_tokens} new ones exceed the target's "
                f"context of {limit}: leave it out, or lower max_new_tokens"
            )
    work = Path(job.work) if job.work is not None else home() / "text"
    check_needs(job, config, where, work)
    folder = local_folder(job.target)
    identity = target_hash(job.target)
    default = "bfloat16" if fast_bfloat16(where.type) else "float32"
    text = TextFolder(work, identity, job.seed, job.rows, job.length, job.dtype, default)
    return Ready(job, str(where), folder, identity, config, tokenizer, turns, limit, text, prompts)


def write_text(ready: Ready, board: Board) -> list[Path]:
    """The shards, those that were missing included."""
    job, text = ready.job, ready.text
    count = text.shards_for(job.tokens)
    if missing := text.missing(count):
        board.say(f"text: {len(missing)} of {count} shards of {job.rows} x {job.length} tokens to write in {text.path}")
    limit = math.inf if job.budget is None else job.budget * 60 / 2
    with board.step("the target writes") as tick:
        return text.write(
            ready.folder, ready.tokenizer, count, ready.device, limit, tick, job.trust_remote_code, board.say
        )


def read_text(ready: Ready, shards: list[Path], board: Board) -> tuple[Text, Text, int]:
    """Text to train on, text to measure on, and how many rows were left out for what they share with a prompt."""
    train_shards, held_out_shards = split(shards)
    kind = features.FeatureText if ready.job.kind == "features" else Text
    train_text, held_out = (kind(s, ready.turns.header, ready.turns.ends) for s in (train_shards, held_out_shards))
    contents = [message["content"] for prompt in ready.prompts for message in prompt.messages]
    prompts = [ready.tokenizer(text, add_special_tokens=False)["input_ids"] for text in contents]
    seen = torch.from_numpy(rows_with(train_text.tokens.numpy(), prompts))
    train_text.keep(~seen)
    for name, text in (("train on", train_text), ("measure on", held_out)):
        if not text.answering.any():
            raise SpecdecError(f"the text holds no answer to {name}: use more tokens, or longer rows")
    left_out = int(seen.sum())
    board.say(
        f"text: {train_text.tokens.numel():,} tokens to train on, {held_out.tokens.numel():,} held out; "
        f"{left_out} rows left out because they share 12 tokens with a benchmark prompt"
    )
    return train_text, held_out, left_out


def train_model(ready: Ready, text: Text, held_out: Text, board: Board, tokenizer: Any = None) -> tuple[Any, dict]:
    """The trained draft, with weights that float16 can hold, and the story of its training.

    Args:
        text, held_out: in the target's tokens, or in those of `tokenizer`, the draft's own.
    """
    job, recipe = ready.job, ready.job.recipe
    table = embedding_table(ready.folder)
    special, ends = ready.config.get_text_config(), ready.turns.ends
    if tokenizer is not None:
        table, special = own_table(table, tokenizer, ready.tokenizer), tokenizer
        ends = Turns.of(tokenizer).ends
    end = ends[0] if special.eos_token_id is None else special.eos_token_id
    settings = {
        "bos_token_id": special.bos_token_id,
        "eos_token_id": end,
        "pad_token_id": special.pad_token_id if special.pad_token_id is not None else np.ravel(end)[0].item(),
        "max_position_embeddings": ready.context,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    counts = expected_counts(text, len(table))
    shortlist = choose_shortlist(counts, recipe.shortlist, [*ends, *np.ravel(end)])
    if job.kind == "features":
        said: Any = features.at_answers
        width = ready.config.get_text_config().hidden_size
        model: Any = features.build(recipe, shortlist, table, settings, ready.watched, width)
    else:
        said, model = at_answers, build(recipe, shortlist, table, settings)
    board.say(f"draft: {sum(p.numel() for p in model.parameters()):,} parameters; its run is {ready.run}")

    def report(entry: dict) -> None:
        said = ", ".join(f"{name} {entry[name]:.3f}" for name in ("loss", "overlap", "agreement"))
        board.say(f"{entry['tokens']:,} tokens in {entry['seconds']} s; on held-out text: {said}")

    seconds = math.inf if job.budget is None else max(job.budget * 60 - ready.text.seconds, job.budget * 30)
    with board.step("training") as tick:
        curve = train(
            recipe, model, lambda: text, held_out, ready.run, report, seconds, job.every, ready.device, tick,
            said,
        )  # fmt: skip
    model.half().float()
    entries = entry_table(model)
    rows = text.answering.any(1).nonzero()[:, 0]
    text.keep(rows[:: max(len(rows) // len(held_out), 1)])  # a sample as large as the held-out text
    scores = {
        "on_training_text": evaluate(model, text, entries, said=said),
        "on_held_out_text": evaluate(model, held_out, entries, said=said),
    }
    return (model if tokenizer is None else ordinary(model)).eval(), {
        "device": ready.device,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": curve[-1]["tokens"],
        "seconds": curve[-1]["seconds"],
        "coverage": round(float(counts[model.shortlist.cpu()].sum() / counts.sum()), 4),
        **{name: rounded(score) for name, score in scores.items()},
        "curve": [rounded(entry) for entry in curve],
    }


def expected_counts(text: Text, vocabulary: int) -> torch.Tensor:
    """How often each token is to be expected in the answers, float64 `[vocabulary]`.

    The tokens that are there count, and with their probabilities those that the target might have written.
    """
    counts = torch.bincount(text.tokens[text.answering], minlength=vocabulary).double()
    labels = text.ids[text.answering].split(8192), text.logprobs[text.answering].split(8192)
    for ids, logprobs in zip(*labels, strict=True):
        counts.index_add_(0, ids.long().flatten(), logprobs.double().exp().flatten())
    return counts


def choose_shortlist(counts: torch.Tensor, size: int, always: list[int]) -> np.ndarray:
    """The `size` tokens of the largest counts, those of `always` among them, ascending.

    >>> choose_shortlist(torch.tensor([0.0, 5.0, 2.0, 9.0]), 3, always=[0]).tolist()
    [0, 1, 3]
    """
    rank = counts.clone()
    rank[torch.tensor(always)] = torch.inf
    return rank.argsort(descending=True, stable=True)[:size].sort().values.numpy()


def measure(ready: Ready, draft: Any, board: Board) -> dict:
    """The draft on the benchmark's prompts."""
    job = ready.job
    target = load_model(ready.folder, ready.device, trust_remote_code=job.trust_remote_code)
    file = ready.text.path / f"answers-{ready.hash[:12]}-{job.max_new_tokens}-{job.seed}.jsonl"
    with board.step("the target answers the benchmark") as tick:
        pair = Pair(target, None, ready.tokenizer)
        answers = target_answers(pair, ready.prompts, file, job.max_new_tokens, job.seed, tick)
    start = time.monotonic()
    with board.step("measuring the draft") as tick:
        result = evaluate_draft(target, draft, answers, tick)
    return result | {"max_new_tokens": job.max_new_tokens, "seconds": round(time.monotonic() - start)}


def rounded(entry: dict) -> dict:
    return {name: round(value, 4) for name, value in entry.items()}


def summary(out: str | Path, manifest: dict) -> str:
    result = manifest["benchmark"]
    kinds = ", ".join(f"{kind} {one['overlap']:.2f}/{one['agreement']:.2f}" for kind, one in result["kinds"].items())
    return (
        f"{out}: {manifest['bytes'] / 1e6:.1f} MB; on the benchmark's prompts overlap {result['overlap']:.3f} at "
        f"temperature 1, greedy agreement {result['agreement']:.3f} ({kinds})"
    )
