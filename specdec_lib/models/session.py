"""A prefix and what a model remembers of it: feed tokens, read logits, roll back.

The only module that knows how transformers keeps its cache.  What it relies on, pinned by
`tests/test_session.py` on the oldest and the newest release that `pyproject.toml` admits:

* `DynamicCache(config=...)` fits the model, and its `crop(-n)` removes the last `n` positions;
* its `layers` hold `keys` and `values` `[batch, heads, n, dim]`, and `batch_select_indices` picks rows;
* a layer of it that keeps a sliding window can be a `DynamicLayer` that keeps all: the mask has the window, too;
* `forward` takes that cache as `cache=` (5.24 and later) or as `past_key_values=` (before).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ..errors import SpecdecError
from .fast import FastLlama


class Session(Protocol):
    """What a decoder needs of a model.  `length` counts the tokens fed and not rolled back."""

    @property
    def length(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def feed(self, ids: torch.Tensor, last: int = 1) -> torch.Tensor:
        """Append `ids` [batch, n]; return the logits after the last `last` of them, `[batch, last, V]`."""
        ...

    def rollback(self, length: int) -> None:
        """Forget everything after the first `length` tokens."""
        ...


def _check_rollback(length: int, held: int) -> None:
    if not 0 <= length <= held:
        raise ValueError(f"cannot roll back to length {length}: the session holds {held} tokens")


CACHES = ("cache", "past_key_values")


def cache_keyword(model: Any) -> str | None:
    """What the forward pass of a transformers model calls its cache; None where it takes none.

    Args:
        model: the model, or its forward pass.
    """
    names = arguments(model)
    return next((name for name in CACHES if name in names), None)


def arguments(model: Any) -> set[str]:
    """What the forward pass of a transformers model can be given by name.

    Where it hands on `**kwargs` and names no cache, as that of a wrapper, these are also the names of the forward pass
    behind it: of its base class, or of the first module inside that names a cache.

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


class FastSession:
    """A session on `FastLlama`: keys and values are written in place, so rolling back only moves a number."""

    def __init__(self, model: FastLlama, batch: int = 1, capacity: int = 512):
        self.model = model
        lent = model.recorder.lend(self, capacity) if model.recorder is not None and batch == 1 else None
        self.recorder = model.recorder if lent is not None else None
        self.cache = model.new_cache(batch, capacity) if lent is None else lent

    @property
    def length(self) -> int:
        return self.cache.length

    @property
    def device(self) -> torch.device:
        return self.model.device

    @torch.inference_mode()
    def feed(self, ids: torch.Tensor, last: int = 1) -> torch.Tensor:
        if self.recorder is not None and (logits := self.recorder.feed(ids)) is not None:
            return logits[:, ids.shape[1] - last :]
        return self.model.logits(ids, self.cache, last)

    def watch(self, layers: Sequence[int]) -> None:
        """From now on keep the hidden states after so many layers, in `cache.features`; before the first token."""
        if self.length:
            raise ValueError("the hidden states of what was fed are gone: watch an empty session")
        if self.recorder is not None:  # a recorded pass writes where it wrote when it was recorded
            self.recorder, self.cache = None, self.model.new_cache(1, self.cache.capacity)
        self.cache.watch(layers, self.model.config.hidden_size)

    @torch.inference_mode()
    def early(self, ids: torch.Tensor, layers: int) -> torch.Tensor:
        """Let the first `layers` layers alone read `ids` [batch, n]; the logits `[batch, n, V]` that they give."""
        return self.model.scores(self.model.hidden(ids, self.cache, layers))

    def rollback(self, length: int) -> None:
        _check_rollback(length, self.length)
        self.cache.length = length


def new_cache(model: Any) -> Any:
    """A transformers cache that can be rolled back to any length.

    A layer with a sliding window forgets what has left the window, and rolling back needs it again.  So these layers
    keep the whole text, as all others do, and the mask alone says how far they see.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    cache = DynamicCache(config=model.config)
    cache.layers = [DynamicLayer() if type(x) is DynamicSlidingWindowLayer else x for x in cache.layers]
    # a dummy has the keys and values of another layer
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
    """Where a model is given its ids; where accelerate keeps its first weights on disk, their device is no place."""
    device = model.device
    return torch.device(model._hf_hook.execution_device) if device.type == "meta" else device


def class_name(model: Any) -> str:
    """What to call a model in an error."""
    return type(uncompiled(model)).__name__


class TransformersSession:
    """A session on any transformers decoder with a cache that can be cropped."""

    def __init__(self, model: Any):
        self.model = model
        self.cache = new_cache(model)
        forward = uncompiled(model).forward
        keyword = cache_keyword(forward)
        if keyword is None:
            raise SpecdecError(
                f"{class_name(model)} takes no cache in its forward pass: use a decoder-only language model"
            )
        self._keyword = keyword
        self._known = set(inspect.signature(forward).parameters)

    @property
    def length(self) -> int:
        return self.cache.get_seq_length()

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    @torch.inference_mode()
    def feed(self, ids: torch.Tensor, last: int = 1) -> torch.Tensor:
        logits = self.run(ids, logits_to_keep=max(last, 1))
        return logits[:, logits.shape[1] - last :]

    def run(self, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        """One forward pass over `ids` [batch, n]; the logits `[batch, m, V]` that the model returns.

        Options that its `forward` has no name for are left out: `logits_to_keep` only saves work, and a model without
        `position_ids` finds positions from the attention mask.
        """
        known = {name: value for name, value in options.items() if name in self._known}
        return self.model(input_ids=ids, use_cache=True, **{self._keyword: self.cache}, **known).logits

    def rollback(self, length: int) -> None:
        _check_rollback(length, self.length)
        if length < self.length:
            self.cache.crop(length - self.length)


def open_session(model: Any, batch: int = 1, capacity: int = 512) -> Session:
    """An empty session on a `FastLlama` or on a transformers model."""
    if isinstance(model, FastLlama):
        return FastSession(model, batch, capacity)
    if getattr(model.config, "is_encoder_decoder", False):
        from .seq2seq import EncoderDecoderSession

        return EncoderDecoderSession(model, batch)
    return TransformersSession(model)
