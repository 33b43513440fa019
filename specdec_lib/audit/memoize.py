"""A model that runs once for each prefix, for audits that decode thousands of texts after the same context.

The decoder runs unchanged for every sample: it drafts, feeds, verifies, draws and rolls back.  Only the pass over a
known prefix is replaced by the logits of the first time.  This makes an audit affordable on a real model, where a pass
takes about ten milliseconds.  It cannot detect a model that gives the same prefix other logits the second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..drafters import ComposedDrafter, ModelDrafter
from ..drafters.model import common_prefix_length
from ..errors import SpecdecError
from ..models.fast import FastLlama
from ..models.pair import Pair, vocabulary_size
from ..models.session import open_session

MOST_LOGITS = 50_000_000  # in memory: 200 MB, a thousand prefixes of a model with 49,152 tokens


class MemoCache:
    """The cache of a `MemoizedModel`: the tokens of a text.  The first `length` count, the rest was rolled back."""

    def __init__(self, model: MemoizedModel, capacity: int) -> None:
        self.model, self.capacity = model, capacity
        self.ids: list[int] = []
        self.length = 0

    def capture_hidden(self, layers: Sequence[int], width: int) -> None:
        """As `models.fast.Cache.capture_hidden`."""
        self.model.capture_hidden(layers)

    def append(self, ids: torch.Tensor) -> list[int]:
        """Append `ids` `[1, n]`; returns the whole text."""
        self.ids = self.ids[: self.length] + ids[0].tolist()
        self.length = len(self.ids)
        return self.ids

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """The layers of the columns of `features`."""
        return self.model.captured_layers

    @property
    def features(self) -> torch.Tensor:
        """The hidden states of the text's tokens, as a `Cache` after `capture_hidden` has them."""
        return torch.stack([self.model.states[tuple(self.ids[: end + 1])] for end in range(self.length)])[None]


class MemoizedModel(FastLlama):
    """Takes the place of a model in a session; one text at a time.

    For a session it is a `FastLlama`.  It holds a model and returns its earlier results for known prefixes; other
    attributes are the model's.

    Args:
        model: a `FastLlama` or a transformers causal model.

    Attributes:
        passes: how often the model itself ran.
        states: the hidden states of captured layers after each prefix, for a drafter that reads them.
        early: the hidden states after the first layers only, at the end of a prefix, for an early exit.
    """

    def __init__(self, model: Any):
        self.model, self.config = model, model.config
        self.generation_config = getattr(model, "generation_config", None)
        self.passes = 0
        self._most = MOST_LOGITS // vocabulary_size(model)  # prefixes
        self._session = open_session(model)
        self._held: list[int] = []  # the tokens that `_session` holds
        self._known: dict[tuple[int, ...], torch.Tensor] = {}
        self.states: dict[tuple[int, ...], torch.Tensor] = {}
        self.early: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}
        self.captured_layers: tuple[int, ...] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["model"], name)

    @property
    def layers(self) -> list:  # type: ignore[override]
        if not isinstance(self.model, FastLlama):
            raise SpecdecError(
                "a draft that reads its target's layers needs a target that runs as FastLlama (Llama or Qwen2, loaded "
                "with load_pair): use another draft"
            )
        return self.model.layers

    def capture_hidden(self, layers: Sequence[int]) -> None:
        if not set(layers) <= set(self.captured_layers):
            self._forget()
            self._session.capture_hidden(layers)  # type: ignore[attr-defined]
            self.captured_layers = self._session.cache.captured_layers  # type: ignore[attr-defined]

    @property
    def device(self) -> torch.device:
        return self._session.device

    def new_cache(self, batch: int, capacity: int) -> Any:
        if batch != 1:
            raise ValueError(f"a memoized model takes one text at a time, not {batch}")
        return MemoCache(self, capacity)

    def logits(self, ids: torch.Tensor, cache: Any, last: int = 1) -> torch.Tensor:
        """As `FastLlama.logits`, for a batch of 1."""
        text = cache.append(ids)
        prefixes = [tuple(text[:end]) for end in range(len(text) - last + 1, len(text) + 1)]
        new = range(len(text) - ids.shape[1] + 1, len(text) + 1) if self.captured_layers else range(0)
        if any(p not in self._known for p in prefixes) or any(tuple(text[:end]) not in self.states for end in new):
            self._ask(text, prefixes)
        if last == 0:
            return torch.zeros(1, 0, vocabulary_size(self), device=self.device)
        return torch.stack([self._known[prefix] for prefix in prefixes])[None]

    def hidden(self, ids: torch.Tensor, cache: Any, layers: int, starts: None = None) -> torch.Tensor:  # type: ignore[override]
        """As `FastLlama.hidden` of the first `layers` layers, for a batch of 1."""
        text, n = cache.append(ids), ids.shape[1]
        keys = [(layers, tuple(text[:end])) for end in range(len(text) - n + 1, len(text) + 1)]
        if any(key not in self.early for key in keys):
            if len(self.early) + n > self._most:
                self._forget()
            before = text[: len(text) - n + 1]
            common = min(common_prefix_length(self._held, before), len(before) - 1)
            self._session.rollback(common)
            held = self._session.cache  # type: ignore[attr-defined]
            rest = torch.tensor([text[common:]], device=self.device)
            self.early.update(zip(keys, self.model.hidden(rest, held, layers)[0, -n:].clone(), strict=True))
            held.length = common  # the other layers have not read the rest
            del self._held[common:]
            self.passes += 1
        return torch.stack([self.early[key] for key in keys])[None]

    def lm_head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.lm_head(hidden)

    def _ask(self, text: list[int], prefixes: list[tuple[int, ...]]) -> None:
        """Run the model over the tokens of `text` that its session lacks; store states, and logits after `prefixes`."""
        if len(self._known) + len(prefixes) > self._most:
            self._forget()
        before = text[: len(prefixes[0])] if prefixes else text
        common = min(common_prefix_length(self._held, before), len(before) - 1)
        self._session.rollback(common)
        rest = torch.tensor([text[common:]], device=self.device)
        rows = self._session.feed(rest, last=len(prefixes))[0]
        self._held = list(text)
        self._known.update((prefix, row.clone()) for prefix, row in zip(prefixes, rows, strict=True))
        if self.captured_layers:
            states = self._session.cache.features[0]  # type: ignore[attr-defined]
            self.states.update((tuple(text[: end + 1]), states[end].clone()) for end in range(common, len(text)))
        self.passes += 1

    def _forget(self) -> None:
        self._known.clear()
        self.states.clear()
        self.early.clear()
        self._session.rollback(0)
        self._held = []


def memoized(pair: Pair) -> Pair:
    """The pair with its models memoized; a drafter without a model stays as it is."""
    return Pair(MemoizedModel(pair.target), _memoized(pair.draft), pair.tokenizer, pair.description)


def _memoized(draft: Any) -> Any:
    if isinstance(draft, ComposedDrafter):
        return replace(draft, drafters=[_memoized(part) for part in draft.drafters])
    if isinstance(draft, ModelDrafter):
        return ModelDrafter(MemoizedModel(draft.model), draft.confidence)
    return MemoizedModel(draft) if hasattr(draft, "config") else draft
