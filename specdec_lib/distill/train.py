"""Training a draft on the target's own text and soft labels.

The loss at one position is the cross-entropy `- sum_x p(x) log q(x)` over those of the target's most probable
tokens that the draft can propose.  In the last part of the run the loss is what decides speed, the probability of
rejection `1 - sum_x min(p(x), q(x))` (Theorem 3.5 of the paper), over the same tokens.  Only positions inside answers
count: there a draft works, and skipping the others saves a third of the time.
"""

from __future__ import annotations

import copy
import logging
import math
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file

from ..errors import SpecdecError, first_line
from ..models.shortlist import ShortlistLlamaConfig, ShortlistLlamaForCausalLM

log = logging.getLogger(__name__)

OVERLAP_PART = 0.3  # the share of the run, at its end, that trains on the overlap itself
DISCOUNT = 0.8  # what each further token of a draft counts: it is only needed where those before it were kept


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what is trained, apart from the text.

    Attributes:
        layers, width, heads: shape of the draft (head size `width / heads`, feed-forward 8/3 of the width).
        shortlist: how many tokens it can propose.
        tokens: training tokens in all (positions, repeats included).
        batch: rows a step.
        rate: peak learning rate.
        seed: of initialisation and order.
        steps: how many tokens the draft goes further than what it is given, while it trains; 1 for a model of its own.
    """

    layers: int
    width: int
    heads: int
    shortlist: int = 8192
    tokens: int = 10_000_000
    batch: int = 8
    rate: float = 5e-3
    seed: int = 0
    steps: int = 1


def build(recipe: Recipe, shortlist: np.ndarray, table: torch.Tensor, config: dict) -> ShortlistLlamaForCausalLM:
    """A fresh draft: its table is the target's embedding table `[V, width]` on its principal directions.

    Args:
        recipe: shape and seed.
        shortlist: ascending token ids, int64 `[S]`.
        table: the target's input embeddings `[V, W]`, float32.
        config: the target's special tokens, context and rotary base.
    """
    return shaped(ShortlistLlamaForCausalLM, ShortlistLlamaConfig, recipe, shortlist, table, config)


def shaped(
    kind: Any, configuration: Any, recipe: Recipe, shortlist: np.ndarray, table: torch.Tensor, config: dict
) -> Any:
    """A fresh draft of a kind, see `build`."""
    with torch.random.fork_rng([]):  # made on the CPU, whose generator alone is seeded
        torch.default_generator.manual_seed(recipe.seed)
        return _shaped(kind, configuration, recipe, shortlist, table, config)


def _shaped(
    kind: Any, configuration: Any, recipe: Recipe, shortlist: np.ndarray, table: torch.Tensor, config: dict
) -> Any:
    width = recipe.width
    model = kind(
        configuration(
            shortlist_size=len(shortlist),
            vocab_size=table.shape[0],
            hidden_size=width,
            intermediate_size=round(width * 8 / 3 / 32) * 32,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.heads,
            head_dim=width // recipe.heads,
            rms_norm_eps=1e-5,
            **config,
        )
    )
    index = torch.from_numpy(shortlist)
    centred = table - table[index].mean(0)
    _, _, directions = torch.pca_lowrank(centred[index], q=min(width, *centred[index].shape), center=False, niter=4)
    projected = centred @ directions
    projected = projected / projected[index].std()
    unit = torch.nn.functional.normalize(centred, dim=-1)
    nearest = torch.cat([(part @ unit[index].T).argmax(-1) for part in unit.split(4096)])
    nearest[index] = torch.arange(len(index))
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(std=0.02)
        model.model.embed_tokens.weight[:, : projected.shape[1]] = 0.05 * projected[index]
    model.set_shortlist(index, nearest)
    return model


class Text:
    """Shards of the target's text, all in memory.

    Attributes:
        tokens: int64 `[rows, length]`.
        ids, logprobs: `[rows, length, TOP]`, the target's most probable tokens after each position.
        answering: bool `[rows, length]`, where the next token belongs to an answer.
    """

    def __init__(self, shards: Sequence[Path], header: Sequence[int], end: int | Sequence[int]):
        parts = [load_file(path) for path in shards]
        join = lambda name: torch.cat([p[name] for p in parts])  # noqa: E731
        self.tokens = join("tokens").long()
        self.ids, self.logprobs = join("top_ids"), join("top_logprobs")
        self.answering = answer_positions(self.tokens, header, end)
        self.answering[:, -1] = False  # what follows the last token was not computed

    def __len__(self) -> int:
        return len(self.tokens)

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all rows but these, given as a bool mask or as indices."""
        for name in ("tokens", "ids", "logprobs", "answering"):
            setattr(self, name, getattr(self, name)[rows])


def answer_positions(tokens: torch.Tensor, header: Sequence[int], end: int | Sequence[int]) -> torch.Tensor:
    """Where the next token belongs to an answer: from the end of the answer's header to before an end token.

    An empty header says that all text is answer.

    >>> answer_positions(torch.tensor([[1, 8, 3, 5, 5, 2, 3, 1, 9]]), header=[1, 8, 3], end=2).int().tolist()
    [[0, 0, 1, 1, 1, 0, 0, 0, 0]]
    """
    ended = torch.isin(tokens, torch.as_tensor(end))
    if not header:
        return ~ended
    starts = torch.ones_like(tokens, dtype=torch.bool)
    for back, token in enumerate(reversed(header)):
        starts &= torch.roll(tokens, back, dims=1) == token
    starts[:, : len(header) - 1] = False
    state = torch.zeros(len(tokens), dtype=torch.bool)
    result = torch.zeros_like(starts)
    for t in range(tokens.shape[1]):
        state = starts[:, t] | (state & ~ended[:, t])  # a header of one token may be an end token as well
        result[:, t] = state
    return result


class Said(NamedTuple):
    """What the draft and the target say at `N` positions.

    Attributes:
        log_q: `[N, TOP]`, the draft's log-probabilities of the target's top tokens.
        p: `[N, TOP]`, the target's probabilities of them, 0 where the draft cannot propose the token.
        agree: bool `[N]`, whether both have the same most probable token.
    """

    log_q: torch.Tensor
    p: torch.Tensor
    agree: torch.Tensor


def at_answers(
    model: ShortlistLlamaForCausalLM, text: Text, rows: torch.Tensor, entry_of: torch.Tensor, steps: int = 1
) -> list[Said]:
    """What is said at the answers' positions of some rows; one list entry for each of `steps`, here always one."""
    hidden = model.hidden(text.tokens[rows].to(model.shortlist.device))
    return [compared(model, hidden, text, rows, slice(None), entry_of)]


def compared(
    model: ShortlistLlamaForCausalLM,
    hidden: torch.Tensor,
    text: Text,
    rows: torch.Tensor,
    positions: slice,
    entry_of: torch.Tensor,
) -> Said:
    """What the draft's final states `[rows, n, width]` say beside the target, at those of `n` positions that answer."""
    here, device = text.answering[rows, positions], hidden.device
    scores = model.lm_head(hidden[here.to(device)]).float()
    entries = entry_of[text.ids[rows, positions][here].long()].to(device)
    log_q = scores.gather(-1, entries.clamp(min=0)) - scores.logsumexp(-1, keepdim=True)
    p = torch.where(entries >= 0, text.logprobs[rows, positions][here].to(device).float().exp(), 0.0)
    return Said(log_q, p, scores.argmax(-1) == entries[:, 0])


def cross_entropy(log_q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """`- sum p log q` at each position."""
    return -(p * log_q).sum(-1)


def overlap(log_q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """`sum min(p, q)` at each position."""
    return torch.minimum(p, log_q.exp()).sum(-1)


def entry_table(model: ShortlistLlamaForCausalLM) -> torch.Tensor:
    """The shortlist entry of each token id, -1 where it has none; int64 `[V]`."""
    table = torch.full((model.config.vocab_size,), -1)
    table[model.shortlist.cpu()] = torch.arange(len(model.shortlist))
    return table


@torch.inference_mode()
def evaluate(
    model: Any, text: Any, entry_of: torch.Tensor, batch: int = 8, said: Callable[..., list[Said]] = at_answers
) -> dict[str, float]:
    """Loss, overlap and greedy agreement of a draft's first token on the answers of a text, under teacher forcing.

    The overlap counts the target's `TOP` tokens only, so it is a lower bound, close where they hold the mass.
    """
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64)
    for rows in torch.arange(len(text)).split(batch):
        (log_q, p, agree), *_ = said(model, text, rows, entry_of)
        parts = (cross_entropy(log_q, p), overlap(log_q, p), agree, torch.ones(len(p)))
        sums += torch.tensor([float(part.sum()) for part in parts])
    model.train()
    return dict(zip(("loss", "overlap", "agreement"), (sums[:3] / sums[3]).tolist(), strict=True))


def train(
    recipe: Recipe,
    model: Any,
    text: Callable[[], Any],
    held_out: Any,
    folder: Path,
    report: Callable[[dict], None],
    budget: float = math.inf,
    every: float = 60.0,
    device: str = "cpu",
    tick: Callable[[float], object] = lambda progress: None,
    said: Callable[..., list[Said]] = at_answers,
) -> list[dict]:
    """Train `model` in place; returns the learning curve.

    Args:
        text: gives the training text; called again at each pass, so that text written meanwhile joins in.
        folder: where checkpoints live; a finished or interrupted run goes on from there.
        report: called with each entry of the curve.
        budget: seconds; the schedule ends at whichever comes first, the recipe's tokens or the budget.
        every: seconds between checkpoints.
        tick: called at each step with the share of the run that is done.
        said: what draft and target say; of `recipe.steps` tokens in a row each counts `DISCOUNT` times the one before.

    A run that was interrupted and goes on over the same text ends in the weights of one that was not, if its
    schedule is by tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.device(device)).train()  # type: ignore[arg-type]
    optimisers = make_optimisers(model, recipe.rate)
    state: dict[str, Any] = {"seen": 0, "seconds": 0.0, "pass": 0, "position": 0, "curve": []}
    state |= restore(folder, model, optimisers)
    entry_of = entry_table(model)
    kind = torch.device(device).type
    started = time.monotonic() - state["seconds"]

    def record() -> None:
        state["seconds"] = time.monotonic() - started
        entry = {"tokens": state["seen"], "unique": data.tokens.numel(), "seconds": round(state["seconds"])}
        state["curve"].append(entry | evaluate(model, held_out, entry_of, said=said))
        checkpoint(folder, model, optimisers, state)
        report(state["curve"][-1])

    saved = time.monotonic()
    progress = 0.0
    while progress < 1:
        data = text()
        if not data.answering.any():
            raise SpecdecError("the text holds no answer to learn from: use longer rows, or more of them")
        order = torch.from_numpy(np.random.default_rng([recipe.seed, state["pass"]]).permutation(len(data)))
        for rows in order[state["position"] :].split(recipe.batch):
            progress = max(state["seen"] / recipe.tokens, (time.monotonic() - started) / budget)
            tick(min(progress, 1.0))
            if progress >= 1:
                break
            state["seen"] += data.tokens[rows].numel()
            state["position"] += len(rows)
            if data.answering[rows].any():
                warmup = min(1.0, state["seen"] / 50_000)
                for optimiser in optimisers:
                    for group in optimiser.param_groups:
                        group["lr"] = recipe.rate * warmup * (0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2)
                with torch.autocast(kind, dtype=torch.bfloat16, enabled=fast_bfloat16(kind)):
                    steps = said(model, data, rows, entry_of, recipe.steps)
                loss = torch.zeros(())
                for k, (log_q, p, _) in enumerate(steps):
                    one = 1 - overlap(log_q, p) if progress > 1 - OVERLAP_PART else cross_entropy(log_q, p)
                    loss = loss + DISCOUNT**k * (one.mean() if len(one) else 0)
                model.zero_grad(set_to_none=True)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                for optimiser in optimisers:
                    optimiser.step()
            if time.monotonic() - saved > every:
                record()
                saved = time.monotonic()
        else:
            state |= {"pass": state["pass"] + 1, "position": 0}
    if not state["curve"] or state["curve"][-1]["tokens"] != state["seen"]:
        record()
    return state["curve"]


def fast_bfloat16(kind: str) -> bool:
    """Whether bfloat16 is quicker than float32 on a device of this type; processors that lack it emulate it slowly."""
    if kind != "cpu":
        return True
    supported = (getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile"))
    return any(ask() for ask in supported if ask)


def make_optimisers(model: Any, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the table and the norms, both at AdamW's scale of step."""
    if not hasattr(torch.optim, "Muon"):
        raise SpecdecError(f"training needs torch 2.9 or later, this is {torch.__version__}: install a newer one")
    table = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not table]
    rest = [p for p in model.parameters() if not any(p is m for m in matrices)]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def checkpoint(folder: Path, model: torch.nn.Module, optimisers: list[torch.optim.Optimizer], state: dict) -> None:
    """Write a checkpoint beside the last one, then put it in its place; the last one is kept as `previous.pt`."""
    part, current, previous = folder / "checkpoint.part", folder / "checkpoint.pt", folder / "previous.pt"
    torch.save({"model": model.state_dict(), "optimisers": [o.state_dict() for o in optimisers], "state": state}, part)
    if current.exists():
        current.replace(previous)
    part.replace(current)


def restore(folder: Path, model: torch.nn.Module, optimisers: list[torch.optim.Optimizer]) -> dict:
    """Load the newest checkpoint that can be read; returns its state, empty for a fresh start."""
    parts: list[Any] = [model, *optimisers]
    fresh = copy.deepcopy([part.state_dict() for part in parts])
    for path in (folder / "checkpoint.pt", folder / "previous.pt"):
        if not path.exists():
            continue
        try:
            with zipfile.ZipFile(path) as archive:  # torch.load reads damaged numbers without a word
                if damaged := archive.testzip():
                    raise ValueError(f"damaged at {damaged}")
            held = torch.load(path, map_location="cpu", weights_only=True)
            for part, saved in zip(parts, (held["model"], *held["optimisers"]), strict=True):
                part.load_state_dict(saved)
            return held["state"]
        except Exception as error:  # whatever is wrong with the file, the one before it is the way on
            log.warning("the checkpoint %s cannot be used (%s): trying the one before it", path.name, first_line(error))
            for part, saved in zip(parts, fresh, strict=True):
                part.load_state_dict(saved)
    if (folder / "checkpoint.pt").exists():
        log.warning("no checkpoint can be used: training starts anew")
    return {}
