"""The one place that knows how a model remembers a prefix: feed tokens, read logits, roll back."""

from __future__ import annotations

import torch

from .fast import FastLlama


class FastSession:
    """A prefix held by a `FastLlama`: its cache is written in place, so rolling back only moves a number."""

    def __init__(self, model: FastLlama, batch: int = 1, capacity: int = 256):
        self.model = model
        self.cache = model.new_cache(batch, capacity)

    @property
    def length(self) -> int:
        return self.cache.length

    @property
    def device(self) -> torch.device:
        return self.model.embedding.device

    @torch.inference_mode()
    def feed(self, ids: torch.Tensor, last: int = 1) -> torch.Tensor:
        if self.length + ids.shape[1] > self.cache.capacity:
            self.cache.reserve(2 * (self.length + ids.shape[1]))
        return self.model.logits(ids, self.cache, last)

    def rollback(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot roll back to length {length}: the session holds {self.length} tokens")
        self.cache.length = length
