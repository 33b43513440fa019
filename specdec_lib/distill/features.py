"""Training a draft on the target's hidden states (`models.feature_draft`).

The states of the text that is there already are computed once, shard by shard.  While it trains, the draft goes
several tokens further than the target has read from every position at once: at step `k` it reads the token after its
own state of step `k - 1`, as it will when it drafts, and each step's law is held to the target's.  Without that it
would be good at the first token of a draft and lost at the second ("training-time test", EAGLE-3, arXiv 2503.01840).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ..errors import SpecdecError
from ..models.feature_draft import FeatureDraft, FeatureDraftConfig
from ..models.pair import load_transformers
from .train import Said, Text, compared, shaped

BATCH = 8  # rows that the target reads at once


def watched_layers(depth: int) -> list[int]:
    """After how many of `depth` layers the states are read: a third, two thirds, all.

    >>> watched_layers(30), watched_layers(2)
    ([10, 20, 30], [1, 2])
    """
    return sorted({max(depth // 3, 1), max(2 * depth // 3, 1), depth})


def file_of(shard: Path) -> Path:
    """Where the states of a shard are kept.

    >>> file_of(Path("text-00007.safetensors")).name
    'features-00007.safetensors'
    """
    return shard.with_name(shard.name.replace("text", "features", 1))


def is_there(shard: Path, watched: Sequence[int]) -> bool:
    """Whether the states of a shard are there, of these layers."""
    try:
        with safe_open(file_of(shard), "pt") as held:
            return (held.metadata() or {}).get("watched") == str(list(watched))
    except Exception:  # missing, or torn: it is written again
        return False


@torch.inference_mode()
def write_features(
    target: str,
    shards: Sequence[Path],
    watched: Sequence[int],
    device: str,
    dtype: str,
    tick: Callable[[float], object] = lambda share: None,
    trust_remote_code: bool = False,
) -> None:
    """Write what is missing: `features` bfloat16 `[rows, length, len(watched), width]` beside each shard.

    Args:
        target: its name or folder.
        shards: of its text.
        watched: after how many layers; the last layer's are those after the final norm.
        device, dtype: where and in which numbers the target computes.
        tick: called with the share that is done.
        trust_remote_code: as in `load_pair`.
    """
    missing = [shard for shard in shards if not is_there(shard, watched)]
    model: Any = load_transformers(target, device, dtype, trust_remote_code=trust_remote_code) if missing else None
    for number, shard in enumerate(missing):
        parts = []
        rows = load_file(shard)["tokens"].long().split(BATCH)
        for done, ids in enumerate(rows):
            tick((number + done / len(rows)) / len(missing))
            out = model.base_model(input_ids=ids.to(device), output_hidden_states=True, use_cache=False)
            # the last of transformers' hidden states is the one after the final norm
            parts.append(torch.stack([out.hidden_states[k] for k in watched], 2).bfloat16().cpu())
        part = file_of(shard).with_suffix(".part")
        save_file({"features": torch.cat(parts)}, part, metadata={"watched": str(list(watched))})
        part.replace(file_of(shard))


class FeatureText(Text):
    """Shards of text with the target's states, `features` bfloat16 `[rows, length, watched, width]`."""

    def __init__(self, shards: Sequence[Path], header: Sequence[int], end: int | Sequence[int]):
        super().__init__(shards, header, end)
        start = 0
        for shard in shards:
            held = load_file(file_of(shard))["features"]
            if not start:  # one piece, filled in turn: joined at the end it would be in memory twice
                self.features = held.new_empty(len(self), *held.shape[1:])
            self.features[start : start + len(held)] = held
            start += len(held)

    def keep(self, rows: torch.Tensor) -> None:
        super().keep(rows)
        self.features = self.features[rows]


def build(
    recipe: Any, shortlist: Any, table: torch.Tensor, config: dict, watched: Sequence[int], target_width: int
) -> FeatureDraft:
    """A fresh draft, its table as in `train.build`."""
    if recipe.layers != 1:
        raise SpecdecError(f"a draft on the target's features has one layer, not {recipe.layers}: use layers=1")
    given = config | {"watched": list(watched), "target_width": target_width}
    return shaped(FeatureDraft, FeatureDraftConfig, recipe, shortlist, table, given)


def unrolled(model: FeatureDraft, features: torch.Tensor, tokens: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """The draft's states when it goes `steps` tokens further from every position at once.

    Args:
        features: the target's hidden states `[batch, n, len(watched), target_width]` of the first `n` tokens.
        tokens: `[batch, n + steps]`.

    Returns:
        For each step `k = 1..steps` the states `[batch, n, width]` that give the law of token `t + k + 1`, drafted
        when the target had read the tokens up to `t`.
    """
    layer, config = model.model.layers[0], model.config
    heads = config.num_attention_heads
    dim = config.hidden_size // heads
    batch, n = features.shape[:2]
    cos, sin = model.model.rotary_emb(model.read.weight, torch.arange(n + steps, device=features.device)[None])

    def turned(x: torch.Tensor, by: int) -> torch.Tensor:
        """Rotary positions of `[batch, heads, n, dim]`, the first at place `by`."""
        first, second = x.chunk(2, -1)
        return x * cos[:, by : by + n] + torch.cat([-second, first], -1) * sin[:, by : by + n]

    states = model.states(features)
    result: list[torch.Tensor] = []
    own: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys and values of the steps after the first
    for k in range(1, steps + 1):
        x = model.joined(states, tokens[:, k : k + n])
        y, attention = layer.input_layernorm(x), layer.self_attn
        q, key, value = (
            project(y).view(batch, n, heads, dim).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, key = turned(q, k - 1).to(value.dtype), turned(key, k - 1).to(value.dtype)
        if k == 1:
            read, said = key, value  # of what the target has read, the same at every step
            a = F.scaled_dot_product_attention(q, key, value, is_causal=True)
        else:
            own.append((key, value))
            unseen = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
            before = (q @ read.transpose(-1, -2)).float().masked_fill(unseen, float("-inf"))
            after = torch.stack([(q * key).sum(-1) for key, _ in own], -1).float()
            weights = (torch.cat([before, after], -1) / dim**0.5).softmax(-1).to(value.dtype)
            a = weights[..., :n] @ said
            for j, (_, value) in enumerate(own):
                a = a + weights[..., n + j, None] * value
        x = x + attention.o_proj(a.transpose(1, 2).reshape(batch, n, heads * dim))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        states = model.model.norm(x)
        result.append(states)
    return result


def at_answers(
    model: FeatureDraft, text: FeatureText, rows: torch.Tensor, entry_of: torch.Tensor, steps: int = 1
) -> list[Said]:
    """As `train.at_answers`, for each of `steps` tokens that the draft goes further."""
    device = model.shortlist.device
    n = text.tokens.shape[1] - steps
    features, tokens = text.features[rows][:, :n].to(device), text.tokens[rows].to(device)
    return [
        compared(model, states, text, rows, slice(k, k + n), entry_of)
        for k, states in enumerate(unrolled(model, features, tokens, steps), start=1)
    ]


@torch.inference_mode()
def drafted_logits(model: FeatureDraft, features: torch.Tensor, ids: Sequence[int], last: int, steps: int) -> list:
    """Logits of the draft's first, second, ... token under teacher forcing.

    Args:
        features: of all tokens but the last `[len(ids) - 1, len(watched), target_width]`.
        ids: a text of at least `last + 2` tokens.
        last: how many of its last tokens are looked at.

    Returns:
        For step `k` logits `[last - k + 1, V]`: of the tokens from the `k`-th of the last ones on, each drafted as the
        `k`-th of a draft.
    """
    n = len(ids) - 2
    padded = torch.tensor([[*ids, *[ids[-1]] * steps]], device=features.device)
    first = n - last  # the target has read up to this token when the first of the last ones is drafted
    result = []
    for k, states in enumerate(unrolled(model, features[None, :n], padded, steps), start=1):
        scores = model.lm_head(states[0, first : n - k + 1]).float()
        logits = scores.new_full((len(scores), model.config.vocab_size), float("-inf"))
        logits[:, model.shortlist] = scores
        result.append(logits)
    return result
