"""A session: a model with its cache, for one text or several, one row each.  Feed tokens, read logits, roll back.

Rows may have different lengths: each is fed and rolled back on its own.  One text is a session of one row.

Only the room `models/` knows transformers' cache API.  It relies on these facts, pinned by `tests/test_session.py` on
the oldest and the newest release that `pyproject.toml` allows:

* `DynamicCache(config=...)` fits the model, and its `crop(-n)` removes the last `n` positions;
* its `layers` hold `keys` and `values` `[batch, heads, n, dim]`, and `batch_select_indices` picks rows;
* a cache layer with a sliding window can be replaced by a `DynamicLayer`, which keeps all; the mask has the window;
* `forward` takes that cache as `cache=` (5.24 and later) or as `past_key_values=` (before).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from ..errors import SpecdecError
from .fast import FastLlama
from .rows import AlignedCacheRows, on_device, padded, tail

Ids: TypeAlias = Sequence[int] | torch.Tensor
"""Token ids: a list, or a tensor `[n]` on the session's device, such as drafted tokens."""


class Session:
    """A model with its cache: what a decoder needs of it.

    Attributes:
        lengths: how many tokens each row holds: fed and not rolled back.
    """

    lengths: list[int]

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def length(self) -> int:
        """How many tokens the longest row holds."""
        return max(self.lengths)

    @property
    def device(self) -> torch.device:
        """The device of ids and logits."""
        raise NotImplementedError

    def feed(self, ids: torch.Tensor, last: int = 1) -> torch.Tensor:
        """Append `ids` to rows of equal length.

        Args:
            ids: int64 `[rows, n]`, `n >= 1`, on `device`.
            last: for how many last tokens of each row logits are computed, 0 to `n`; fewer cost less.

        Returns:
            The logits after the last `last` tokens, `[rows, last, V]`, in the model's dtype.
        """
        raise NotImplementedError

    def feed_rows(self, rows: Sequence[Ids], last: Sequence[int]) -> list[torch.Tensor]:
        """Append `rows[i]`, which may be empty, to row `i`.

        Args:
            rows: for each row its new ids.
            last: for how many last tokens of each row logits are computed, 0 to `len(rows[i])`.

        Returns:
            For each row the logits after its last `last[i]` new tokens, `[last[i], V]`.
        """
        if not any(map(len, rows)):
            return [torch.empty(0, device=self.device)] * len(rows)
        if len({*map(len, rows)}) == 1 and len({*self.lengths}) == 1:
            most = max(last)
            logits = self.feed(padded(rows, self.device), most)
            return [row[most - k :] for row, k in zip(logits, last, strict=True)]
        return self._feed_ragged(rows, last)

    def _feed_ragged(self, rows: Sequence[Ids], last: Sequence[int]) -> list[torch.Tensor]:
        raise NotImplementedError

    def rollback(self, lengths: int | Sequence[int]) -> None:
        """In each row, forget everything after its first `lengths[i]` tokens; one number applies to all rows.

        Raises:
            ValueError: a row is shorter than that.
        """
        wanted = [lengths] * self.rows if isinstance(lengths, int) else list(lengths)
        if any(not 0 <= new <= held for new, held in zip(wanted, self.lengths, strict=True)):
            held = " and ".join(map(str, self.lengths))
            raise ValueError(f"cannot roll back to {lengths}: the session holds {held} tokens")
        if wanted != self.lengths:
            self._rollback(wanted)

    def _rollback(self, lengths: list[int]) -> None:
        raise NotImplementedError

    def select_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows, in this order; a row may come more than once."""
        raise NotImplementedError


CACHES = ("cache", "past_key_values")


def cache_keyword(model: Any) -> str | None:
    """The name of the cache argument in a transformers model's forward pass; None if it takes no cache.

    Args:
        model: the model, or its forward pass.
    """
    names = arguments(model)
    return next((name for name in CACHES if name in names), None)


def arguments(model: Any) -> set[str]:
    """The names of the arguments of a transformers model's forward pass.

    A wrapper's forward pass may take `**kwargs` and name no cache.  Then the names of the forward pass behind it count,
    too: that of its base class, or of the first module inside that names a cache.

    Args:
        model: the model, or its forward pass.
    """
    if not hasattr(model, "forward"):
        model, forward = getattr(model, "__self__", model), model
    else:
        model = uncompiled(model)
        forward = model.forward
    own = inspect.signature(forward).parameters
    if not own.keys().isdisjoint(CACHES) or all(p.kind is not p.VAR_KEYWORD for p in own.values()):
        return set(own)
    behind: list[Any] = [vars(kind)["forward"] for kind in type(model).__mro__ if "forward" in vars(kind)]
    if isinstance(model, torch.nn.Module):
        behind += [module.forward for module in model.modules() if module is not model]
    names = (inspect.signature(other).parameters.keys() for other in behind)
    return next((set(own) | set(found) for found in names if not found.isdisjoint(CACHES)), set(own))


class FastSession(Session):
    """A session on `FastLlama`: keys and values are at the row's own positions, so a rollback only changes numbers."""

    def __init__(self, model: FastLlama, rows: int = 1, capacity: int = 512):
        self.model = model
        self.cache = model.new_cache(rows, capacity)
        self.lengths = [0] * rows

    @property
    def device(self) -> torch.device:
        return self.model.device

    @torch.inference_mode()
    def feed(self, ids: torch.Tensor, last: int = 1) -> torch.Tensor:
        if len({*self.lengths}) > 1:
            raise ValueError(f"rows of different length {self.lengths} are fed with feed_rows")
        logits = self.model.logits(ids, self.cache, last)
        self._hold([held + ids.shape[1] for held in self.lengths])
        return logits

    @torch.inference_mode()
    def _feed_ragged(self, rows: Sequence[Ids], last: Sequence[int]) -> list[torch.Tensor]:
        starts = on_device(self.lengths, self.device)
        hidden = self.model.hidden(padded(rows, self.device), self.cache, starts=starts)
        self._hold([held + len(row) for held, row in zip(self.lengths, rows, strict=True)])
        wanted = tail(hidden, rows, last)
        return list(self.model.lm_head(torch.cat(wanted)).split(list(last))) if any(last) else wanted

    def capture_hidden(self, layers: Sequence[int]) -> None:
        """From now on keep the hidden states after these layers, in `cache.features`; before the first token."""
        if any(self.lengths):
            raise ValueError("the hidden states of what was fed are gone: capture them from the first token on")
        self.cache.capture_hidden(layers, self.model.config.hidden_size)

    @torch.inference_mode()
    def early(self, ids: torch.Tensor, layers: int) -> torch.Tensor:
        """Feed `ids` `[rows, n]` to the first `layers` layers only; returns the logits `[rows, n, V]` after them."""
        logits = self.model.lm_head(self.model.hidden(ids, self.cache, layers))
        self._hold([held + ids.shape[1] for held in self.lengths])
        return logits

    def _rollback(self, lengths: list[int]) -> None:
        self._hold(lengths)

    def select_rows(self, rows: Sequence[int]) -> None:
        self.cache.select_rows(list(rows))
        self._hold([self.lengths[i] for i in rows])

    def _hold(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.cache.length = max(lengths, default=0)


def new_cache(model: Any) -> Any:
    """A transformers cache that can be rolled back to any length.

    A cache layer with a sliding window drops what has left the window, but a rollback needs it again.  So here these
    layers keep the whole text, like all others, and only the mask limits what they see.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    cache = DynamicCache(config=model.config)
    cache.layers = [DynamicLayer() if type(x) is DynamicSlidingWindowLayer else x for x in cache.layers]
    # a DummyLayer uses the keys and values of another layer
    if any(type(x).__name__ not in ("DynamicLayer", "DummyLayer") for x in cache.layers):
        raise SpecdecError(
            f"{class_name(model)} keeps more than keys and values, such as a recurrent state, which cannot be rolled "
            "back here: use a model of full or sliding attention"
        )
    return cache


def uncompiled(model: Any) -> Any:
    """The model that torch.compile wraps, or the model itself."""
    return getattr(model, "_orig_mod", model)


def device_of(model: Any) -> torch.device:
    """The device of a model's input ids; if accelerate keeps weights on disk, the model's own device is `meta`."""
    device = model.device
    return torch.device(model._hf_hook.execution_device) if device.type == "meta" else device


def class_name(model: Any) -> str:
    """The name of a model in error messages."""
    return type(uncompiled(model)).__name__


class TransformersSession(Session):
    """A session on any transformers decoder with a cache that can be cropped.

    While all rows are equally long the cache holds only their tokens, and needs no mask.  Once lengths differ,
    `AlignedCacheRows` knows the columns of each row.
    """

    def __init__(self, model: Any, rows: int = 1):
        self.model = model
        self.cache = new_cache(model)
        self.columns = AlignedCacheRows(rows)
        keyword = cache_keyword(model)
        if keyword is None:
            raise SpecdecError(
                f"{class_name(model)} takes no cache in its forward pass: use a decoder-only language model"
            )
        self._keyword = keyword
        self._known = arguments(model)

    @property
    def lengths(self) -> list[int]:  # type: ignore[override]
        return self.columns.lengths

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    @torch.inference_mode()
    def feed(self, ids: torch.Tensor, last: int = 1) -> torch.Tensor:
        if not self.columns.in_step(self.cache.get_seq_length()):
            return torch.stack(self._feed_ragged(list(ids), [last] * len(ids)))
        logits = self._run(ids, logits_to_keep=max(last, 1))
        self.columns.extend_all(ids.shape[1])
        return logits[:, logits.shape[1] - last :]

    @torch.inference_mode()
    def _feed_ragged(self, rows: Sequence[Ids], last: Sequence[int]) -> list[torch.Tensor]:
        self.columns.align(self.cache)
        ids = padded(rows, self.device)
        seen, positions = self.columns.extend([len(row) for row in rows], self.device)
        wanted = ids.shape[1] if any(last) else 1
        logits = self._run(ids, attention_mask=seen, position_ids=positions, logits_to_keep=wanted)
        return tail(logits, rows, last)

    def _run(self, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        """One forward pass over `ids` `[rows, n]`; the logits `[rows, m, V]` that the model returns.

        Options that its `forward` does not take are left out: `logits_to_keep` only saves work, and a model without
        `position_ids` finds positions from the attention mask.
        """
        known = {name: value for name, value in options.items() if name in self._known}
        return self.model(input_ids=ids, use_cache=True, **{self._keyword: self.cache}, **known).logits

    def _rollback(self, lengths: list[int]) -> None:
        held = self.cache.get_seq_length()
        in_step = self.columns.in_step(held)
        self.columns.rollback(lengths)
        if in_step and len({*lengths}) == 1:
            self.cache.crop(lengths[0] - held)

    def select_rows(self, rows: Sequence[int]) -> None:
        if self.cache.get_seq_length():
            self.cache.batch_select_indices(on_device(rows, self.device))
        self.columns.select(rows)


def open_session(model: Any, rows: int = 1, capacity: int = 512) -> Session:
    """An empty session.

    Args:
        model: a `FastLlama` or a transformers model, decoder or encoder-decoder.
        rows: texts that are decoded together.
        capacity: positions to allocate at first; a `FastLlama` session grows when it needs more.
    """
    if isinstance(model, FastLlama):
        return FastSession(model, rows, capacity)
    if getattr(model.config, "is_encoder_decoder", False):
        from .seq2seq import EncoderDecoderSession

        return EncoderDecoderSession(model, rows)
    return TransformersSession(model, rows)
