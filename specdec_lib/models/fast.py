"""A Llama-family forward pass with few, large operations, for decoding one or a few positions at a time.

`transformers` runs about forty small operations a layer; for a 135 M model on a CPU they cost more time
than the matrix products.  Here a layer has sixteen: query, key and value in one product, gate and up in
another, keys and values written in place into a preallocated cache.  On a CPU the weights are laid out once
for oneDNN (`pack`) instead of at each call, so that verifying six positions costs little more than
one: the memory-bound regime that the runtime analysis of the paper assumes.

The result equals that of transformers' model up to float32 rounding (`tests/test_session.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from ..errors import SpecdecError, first_line

log = logging.getLogger(__name__)


def packed_linears_available(dtype: torch.dtype = torch.float32) -> bool:
    """Whether `PackedLinear` can lay out weights of `dtype` for oneDNN here (float32 or bfloat16, x86 CPU builds)."""
    return dtype in (torch.float32, torch.bfloat16) and _can_pack(dtype)


@cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Tries it, once for each dtype: oneDNN refuses bfloat16 if the processor lacks an instruction set."""
    try:
        weight = torch.ops.mkldnn._reorder_linear_weight(torch.ones(16, 16, dtype=dtype), PackedLinear.ROWS)
        torch.ops.mkldnn._linear_pointwise(torch.ones(1, 16, dtype=dtype), weight, None, "none", [], "")
    except (AttributeError, RuntimeError) as error:  # no such operator in this torch, or the operator refuses
        log.warning(
            "oneDNN lays out no %s weights here (%s): torch's own linear layers run instead, about half as fast",
            str(dtype).removeprefix("torch."),
            first_line(error),
        )
        return False
    return True


class PackedLinear:
    """`y = x W^T + b` with W reordered once for oneDNN; a plain `F.linear` if `packed_linears_available` is false."""

    ROWS = 8  # the number of rows that the layout is chosen for: a draft of 7 and its bonus position

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, pack: bool = True):
        self.shape = tuple(weight.shape)
        self.bias = bias
        self.packed = pack and weight.device.type == "cpu" and packed_linears_available(weight.dtype)
        self.weight = weight.contiguous()
        if self.packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, self.ROWS)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


class Cache:
    """Keys and values of one batch, `[layers, batch, kv_heads, capacity, head_dim]`, written in place.

    After `capture_hidden` it also keeps the hidden states of the `captured_layers` at each position, in `features`
    `[batch, capacity, len(captured_layers), width]`.  The capacity at least doubles when it is exceeded, so a cache may
    start small.
    """

    def __init__(self, layers: int, batch: int, kv_heads: int, capacity: int, head_dim: int, like: torch.Tensor):
        shape = (layers, batch, kv_heads, capacity, head_dim)
        self.keys = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.values = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.length = 0
        self.captured_layers: tuple[int, ...] = ()
        self.features = self.keys.new_zeros(batch, capacity, 0, 0)

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    def capture_hidden(self, layers: Sequence[int], width: int) -> None:
        """From now on keep the hidden states `[width]` after these layers; the last layer's after the final norm.

        Layers that were captured before stay: `features` holds the layers of all calls, in the order of
        `captured_layers`.
        """
        self.captured_layers += tuple(k for k in dict.fromkeys(layers) if k not in self.captured_layers)
        old = self.features
        self.features = self.keys.new_zeros(self.keys.shape[1], self.capacity, len(self.captured_layers), width)
        if old.shape[2]:
            self.features[:, :, : old.shape[2]] = old

    def record_hidden(self, layers: int, x: torch.Tensor, at: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Keep hidden states `x` [batch, n, width] after `layers` layers, if they are captured; `at` as in `write`."""
        for k, captured in enumerate(self.captured_layers):
            if captured != layers:
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
        """Make room for `needed` positions; what is stored stays."""
        if needed <= self.capacity:
            return
        capacity = max(needed, 2 * self.capacity)
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros(*old.shape[:3], capacity, old.shape[4])
            new[:, :, :, : self.length] = old[:, :, :, : self.length]
            setattr(self, name, new)
        features = self.features.new_zeros(self.features.shape[0], capacity, *self.features.shape[2:])
        features[:, : self.length] = self.features[:, : self.length]
        self.features = features

    def select_rows(self, rows: list[int]) -> None:
        """Go on with these rows only."""
        index = torch.tensor(rows, dtype=torch.long, device=self.keys.device)
        self.keys, self.values = self.keys.index_select(1, index), self.values.index_select(1, index)
        self.features = self.features.index_select(0, index)


FAMILIES = ("llama", "qwen2", "shortlist_llama")
PLAIN = (torch.nn.Linear, torch.nn.Embedding, torch.nn.ModuleList, torch.nn.RMSNorm, torch.nn.SiLU)
MODULES_OF_PLAIN = (  # where the other classes of these families come from
    "transformers.activations",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "specdec_lib.models.shortlist",
    "specdec_lib.models.feature_draft",
)


def altered(model: torch.nn.Module) -> str | None:
    """The first part of `model` that its weights do not tell of: an adapter, a quantised layer, a subclass, a hook.

    None if every part is as transformers builds it.
    """
    if getattr(model.config, "quantization_config", None):
        return "quantised weights"
    for name, module in model.named_modules():
        kind, what = type(module), name or "the model"
        if kind not in PLAIN and kind.__module__ not in MODULES_OF_PLAIN:
            return f"{what} is a {kind.__module__}.{kind.__qualname__}"
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        # hooks that transformers leaves after `output_hidden_states` change nothing
        if any(not getattr(hook, "__module__", "").startswith("transformers.utils.") for hook in hooks):
            return f"{what} has a forward hook"
        own = vars(module).get("forward")
        if own is not None and getattr(own, "__func__", None) is not kind.forward:
            return f"{what} has a forward pass of its own"
    for name, weight in model.named_parameters():
        if type(weight).__module__.partition(".")[0] != "torch" or not weight.is_floating_point():
            return f"{name} is a {type(weight).__module__}.{type(weight).__qualname__} of {weight.dtype}"
    if len({weight.dtype for weight in model.parameters()}) > 1:
        return "weights of several dtypes"
    return None


def unsupported(model: Any, families: Sequence[str] = FAMILIES) -> str | None:
    """Why `FastLlama` cannot stand in for this transformers model; None if it can."""
    config = model.config
    if config.model_type not in families:
        return f"model type {config.model_type}"
    if reason := altered(model):
        return reason
    if len({weight.device for weight in model.parameters()}) > 1:
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


def _joined(projections: Iterable[torch.nn.Linear], pack: bool, release: bool) -> PackedLinear:
    """Linear layers of one input as a single product; with `release` their weights are taken out of them."""
    weights = [p.weight.detach() for p in projections]
    biases = [p.bias.detach() for p in projections if p.bias is not None]
    if release:
        for projection in projections:
            projection.weight = None  # type: ignore[assignment]
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    del weights
    return PackedLinear(weight, torch.cat(biases) if biases else None, pack)


class FastLlama:
    """Inference-only Llama / Qwen2 forward pass built from a `transformers` model's weights.

    Args:
        model: a `LlamaForCausalLM` or `Qwen2ForCausalLM` without sliding window.
        pack: lay the linear weights out for oneDNN (CPU only).
        release: take the weights out of `model`, layer by layer, so that they are never held twice; it cannot run
            afterwards.

    Attributes:
        prefill_chunk: the most positions that run at once.  A longer text is read in pieces of this size, so that
            what attention sees needs a mask of `prefill_chunk` rows, not of one for each position of the text.

    Raises:
        SpecdecError: for a model that `unsupported` gives a reason against.
    """

    families: ClassVar[Sequence[str]] = FAMILIES
    prefill_chunk: int = 512

    def __init__(self, model: Any, pack: bool = True, release: bool = False):
        config = model.config
        if reason := unsupported(model, self.families):
            raise SpecdecError(f"this model cannot run as {type(self).__name__} ({reason}): give it to Pair as it is")
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
            self.layers.append(
                (
                    layer.input_layernorm.weight.detach(),
                    _joined([attention.q_proj, attention.k_proj, attention.v_proj], pack, release),
                    _joined([attention.o_proj], pack, release),
                    layer.post_attention_layernorm.weight.detach(),
                    _joined([mlp.gate_proj, mlp.up_proj], pack, release),
                    _joined([mlp.down_proj], pack, release),
                )
            )
        self.head = _joined([model.get_output_embeddings()], pack, release)
        self.shortlist = getattr(model, "shortlist", None)  # the tokens that the head scores; None for all
        self.token_index = getattr(model, "token_index", None)  # the embedding that each token is read as
        self._rope_source = model.model.rotary_emb
        self._rotary = self._table(256)

    def _table(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(length, device=self.device)[None]
        cos, sin = self._rope_source(self.embedding[:1, None], positions)
        half = self.head_dim // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)  # includes the sign of rotate_half
        return cos[0], sin[0]

    def _rope(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines `[>= length, head_dim]` of the positions; the table doubles when a text is longer."""
        table = self._rotary  # read once: another thread may replace it by a longer one
        if len(table[0]) < length:
            table = self._rotary = self._table(max(length, 2 * len(table[0])))
        return table

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def new_cache(self, batch: int, capacity: int) -> Cache:
        return Cache(len(self.layers), batch, self.kv_heads, capacity, self.head_dim, self.embedding)

    def hidden(
        self, ids: torch.Tensor, cache: Cache, layers: int | None = None, starts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Feed `ids` [batch, n] after what the cache holds; returns final hidden states [batch, n, width].

        With `layers` only that many first layers run: the other layers' keys and values are not written.
        With `starts` [batch] each row has its own length, at most `cache.length`; its ids are written after that.
        """
        x = self.embedding[ids if self.token_index is None else self.token_index[ids]]
        return self.forward_embeds(x, cache, layers, starts)

    def forward_embeds(
        self, x: torch.Tensor, cache: Cache, layers: int | None = None, starts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As `hidden`, from embeddings `x` [batch, n, width]."""
        if x.shape[1] == 0:
            return x
        cache.reserve(cache.length + x.shape[1])
        parts = []
        for part in x.split(self.prefill_chunk, 1):
            parts.append(self._pass(part, cache, layers, starts))
            starts = None if starts is None else starts + part.shape[1]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _pass(self, x: torch.Tensor, cache: Cache, layers: int | None, starts: torch.Tensor | None) -> torch.Tensor:
        """As `forward_embeds`, for at most `prefill_chunk` positions, for which the cache has room."""
        batch, n, _ = x.shape
        start, end = cache.length, cache.length + n
        cosines, sines = self._rope(end)
        heads, kv, dim = self.heads, self.kv_heads, self.head_dim
        group, half = heads // kv, dim // 2
        at = mask = None
        if starts is None:
            cos, sin = cosines[start:end, None], sines[start:end, None]
            if n > 1:  # query j of the block sees everything up to its own position
                mask = torch.ones(n, end, dtype=torch.bool, device=x.device).tril(start).repeat(group, 1)
        else:
            places = starts[:, None] + torch.arange(n, device=x.device)
            at = torch.arange(batch, device=x.device)[:, None], places
            cos, sin = cosines[places][:, :, None], sines[places][:, :, None]
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
                cache.record_hidden(i + 1, x, at)
        x = F.rms_norm(x, (x.shape[-1],), self.final_norm, self.eps)
        cache.record_hidden(len(self.layers), x, at)
        cache.length = end
        return x

    def logits(self, ids: torch.Tensor, cache: Cache, last: int = 1) -> torch.Tensor:
        """Feed `ids` [batch, n]; returns the logits after the last `last` of them, `[batch, last, vocabulary]`."""
        hidden = self.hidden(ids, cache)
        if last == 0:
            return hidden.new_zeros(ids.shape[0], 0, self.config.vocab_size)
        return self.lm_head(hidden[:, hidden.shape[1] - last :])

    def lm_head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[..., vocabulary]` of final hidden states `[..., width]`."""
        scores = self.head(hidden)
        if self.shortlist is None:
            return scores
        full = scores.new_full((*scores.shape[:-1], self.config.vocab_size), float("-inf"))
        full[..., self.shortlist] = scores
        return full
