"""A Llama-family forward pass with few, large operations, for decoding one or a few positions at a time.

`transformers` runs some forty small operations a layer; with a 135 M model on a CPU they cost more time
than the matrix products.  Here a layer is sixteen: query, key and value in one product, gate and up in
another, keys and values written in place into a preallocated cache.  On a CPU the weights are laid out once
for oneDNN (`pack`) instead of at each call, which is what makes checking six positions cost little more than
checking one: the memory-bound regime that the runtime analysis of the paper assumes.

The result equals the stock model's to float32 rounding; `tests/test_fast.py` holds it to that.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

log = logging.getLogger(__name__)


def packed_linears_available() -> bool:
    """True where torch has the oneDNN operators that `PackedLinear` uses (x86 CPU builds)."""
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


class PackedLinear:
    """`y = x W^T + b` with W reordered once for oneDNN; a plain `F.linear` where that operator is missing."""

    ROWS = 8  # the number of rows that the layout is chosen for: a draft of 7 and its bonus position

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, pack: bool = True):
        self.shape = tuple(weight.shape)
        self.bias = bias
        pack = pack and weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)
        self.packed = pack and packed_linears_available()
        if self.packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), self.ROWS)
        else:
            if pack:
                _warn_unpacked()
            self.weight = weight.contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


_warned = False


def _warn_unpacked() -> None:
    global _warned
    if not _warned:
        log.warning(
            "this torch has no oneDNN prepacked linear: the CPU pass falls back to torch's own, about half as fast"
        )
        _warned = True


class Cache:
    """Keys and values of one batch, `[layers, batch, kv_heads, capacity, head_dim]`, written in place.

    After `watch` it also keeps, in `features` `[batch, capacity, len(watched), width]`, what chosen layers gave at each
    position.
    """

    def __init__(self, layers: int, batch: int, kv_heads: int, capacity: int, head_dim: int, like: torch.Tensor):
        shape = (layers, batch, kv_heads, capacity, head_dim)
        self.keys = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.values = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.length = 0
        self.watched: tuple[int, ...] = ()
        self.features = self.keys.new_zeros(batch, capacity, 0, 0)

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    def watch(self, layers: Sequence[int], width: int) -> None:
        """From now on keep the hidden states `[width]` after so many layers; the last layer's after the final norm."""
        self.watched = tuple(layers)
        self.features = self.keys.new_zeros(self.keys.shape[1], self.capacity, len(layers), width)

    def note(self, layers: int, x: torch.Tensor, at: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Keep hidden states `x` [batch, n, width] after `layers` layers, if they are watched; `at` as in `write`."""
        for k, watched in enumerate(self.watched):
            if watched != layers:
                continue
            if at is None:
                self.features[:, self.length : self.length + x.shape[1], k] = x
            else:
                self.features[*at, k] = x

    def write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, at: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        """Store `[batch, n, kv_heads, head_dim]` after `length`, or `at` rows [batch, 1] and places [batch, n]."""
        if at is None:
            end = self.length + keys.shape[1]
            self.keys[layer, :, :, self.length : end] = keys.transpose(1, 2)
            self.values[layer, :, :, self.length : end] = values.transpose(1, 2)
        else:
            rows, places = at
            self.keys[layer, rows, :, places] = keys
            self.values[layer, rows, :, places] = values

    def reserve(self, needed: int) -> None:
        """Make room for `needed` positions, keeping what is there."""
        if needed <= self.capacity:
            return
        capacity = max(needed, 2 * self.capacity)
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = torch.zeros((*old.shape[:3], capacity, old.shape[4]), dtype=old.dtype, device=old.device)
            new[:, :, :, : self.length] = old[:, :, :, : self.length]
            setattr(self, name, new)
        features = self.features.new_zeros(self.features.shape[0], capacity, *self.features.shape[2:])
        features[:, : self.length] = self.features[:, : self.length]
        self.features = features

    def keep(self, rows: list[int]) -> None:
        """Go on with these rows only."""
        self.keys, self.values, self.features = self.keys[:, rows], self.values[:, rows], self.features[rows]


def unsupported(model: Any) -> str | None:
    """Why `FastLlama` cannot stand in for this transformers model; None if it can."""
    config = model.config
    if config.model_type not in ("llama", "qwen2", "shortlist_llama"):
        return f"model type {config.model_type}"
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        return "spread over several devices"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act}"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or []):
        return "sliding-window attention"
    if model.model.rotary_emb.rope_type not in ("default", "linear", "llama3", "yarn"):
        return f"rotary positions that change with the length ({model.model.rotary_emb.rope_type})"
    if any(m.bias is not None for n, m in model.named_modules() if n.endswith(("o_proj", "gate_proj", "down_proj"))):
        return "biases outside query, key and value"
    return None


class FastLlama:
    """Inference-only Llama / Qwen2 forward pass built from a `transformers` model's weights.

    Args:
        model: a `LlamaForCausalLM` or `Qwen2ForCausalLM` without sliding window.
        pack: lay the linear weights out for oneDNN (CPU only).
    """

    def __init__(self, model: Any, pack: bool = True):
        config = model.config
        self.config = config
        self.generation_config = getattr(model, "generation_config", None)
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.eps = config.rms_norm_eps
        self.embedding = model.get_input_embeddings().weight.detach()
        self.final_norm = model.model.norm.weight.detach()
        self.layers = []
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
            bias = torch.cat([p.bias.detach() for p in qkv]) if qkv[0].bias is not None else None
            self.layers.append(
                (
                    layer.input_layernorm.weight.detach(),
                    PackedLinear(torch.cat([p.weight.detach() for p in qkv]), bias, pack),
                    PackedLinear(attention.o_proj.weight.detach(), None, pack),
                    layer.post_attention_layernorm.weight.detach(),
                    PackedLinear(torch.cat([mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()]), None, pack),
                    PackedLinear(mlp.down_proj.weight.detach(), None, pack),
                )
            )
        self.head = PackedLinear(model.get_output_embeddings().weight.detach(), None, pack)
        self.shortlist = getattr(model, "shortlist", None)  # the tokens that the head scores; None means all
        self.token_index = getattr(model, "token_index", None)  # the embedding that each token is read as
        self._rope_source = model.model.rotary_emb
        self._cos = self._sin = torch.empty(0)
        self._rope(256)
        self.recorder: Any = None  # on a GPU, what replays short passes
        if self.device.type == "cuda":
            from .graphs import Recorder

            self.recorder = Recorder(self)

    def _rope(self, length: int) -> None:
        if len(self._cos) < length:
            positions = torch.arange(max(length, 256), device=self.embedding.device)[None]
            cos, sin = self._rope_source(self.embedding[:1, None], positions)
            half = self.head_dim // 2
            sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)  # the sign of rotate_half, folded in
            self._cos, self._sin = cos[0], sin[0]

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def new_cache(self, batch: int, capacity: int) -> Cache:
        return Cache(len(self.layers), batch, self.kv_heads, capacity, self.head_dim, self.embedding)

    def hidden(
        self, ids: torch.Tensor, cache: Cache, layers: int | None = None, starts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Feed `ids` [batch, n] after what the cache holds; returns final hidden states [batch, n, width].

        With `layers` only the first ones run: the other layers' keys and values of these positions are not written.
        With `starts` [batch] each row has its own length, at most `cache.length`: its ids are written from there on.
        """
        x = self.embedding[ids if self.token_index is None else self.token_index[ids]]
        return self.through(x, cache, layers, starts)

    def through(
        self, x: torch.Tensor, cache: Cache, layers: int | None = None, starts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As `hidden`, from embedded positions `x` [batch, n, width]."""
        batch, n, _ = x.shape
        if n == 0:
            return x
        start, end = cache.length, cache.length + n
        cache.reserve(end)
        self._rope(end)
        heads, kv, dim = self.heads, self.kv_heads, self.head_dim
        group, half = heads // kv, dim // 2
        at = mask = None
        if starts is None:
            cos, sin = self._cos[start:end, None], self._sin[start:end, None]
            if n > 1:  # query j of the block sees everything up to its own position
                mask = torch.ones(n, end, dtype=torch.bool, device=x.device).tril(start).repeat(group, 1)
        else:
            places = starts[:, None] + torch.arange(n, device=x.device)
            at = torch.arange(batch, device=x.device)[:, None], places
            cos, sin = self._cos[places][:, :, None], self._sin[places][:, :, None]
            seen = torch.arange(end, device=x.device) <= places[:, :, None]
            mask = seen.repeat(1, group, 1)[:, None]
        for i, (norm1, qkv, out, norm2, gate_up, down) in enumerate(self.layers[:layers]):
            y = qkv(F.rms_norm(x, (x.shape[-1],), norm1, self.eps)).view(batch, n, heads + 2 * kv, dim)
            qk = y[:, :, : heads + kv]
            qk = qk * cos + torch.cat([qk[..., half:], qk[..., :half]], -1) * sin
            cache.write(i, qk[:, :, heads:], y[:, :, heads + kv :], at)
            # the query heads that share a key head become extra rows of it
            q = (
                qk[:, :, :heads]
                .view(batch, n, kv, group, dim)
                .permute(0, 2, 3, 1, 4)
                .reshape(batch, kv, group * n, dim)
            )
            a = F.scaled_dot_product_attention(
                q, cache.keys[i, :, :, :end], cache.values[i, :, :, :end], attn_mask=mask
            )
            a = a.view(batch, kv, group, n, dim).permute(0, 3, 1, 2, 4).reshape(batch, n, heads * dim)
            x = x + out(a)
            g, u = gate_up(F.rms_norm(x, (x.shape[-1],), norm2, self.eps)).chunk(2, -1)
            x = x + down(F.silu(g) * u)
            if i + 1 < len(self.layers):
                cache.note(i + 1, x, at)
        x = F.rms_norm(x, (x.shape[-1],), self.final_norm, self.eps)
        cache.note(len(self.layers), x, at)
        cache.length = end
        return x

    def logits(self, ids: torch.Tensor, cache: Cache, last: int = 1) -> torch.Tensor:
        """Feed `ids` [batch, n]; returns the logits after the last `last` of them, `[batch, last, vocabulary]`."""
        hidden = self.hidden(ids, cache)
        if last == 0:
            return hidden.new_zeros(ids.shape[0], 0, self.config.vocab_size)
        return self.scores(hidden[:, hidden.shape[1] - last :])

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[..., vocabulary]` of final hidden states `[..., width]`."""
        scores = self.head(hidden)
        if self.shortlist is None:
            return scores
        full = scores.new_full((*scores.shape[:-1], self.config.vocab_size), float("-inf"))
        full[..., self.shortlist] = scores
        return full
