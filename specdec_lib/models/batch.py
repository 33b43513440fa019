"""Several texts of different length in one model: each row feeds what it likes and rolls back on its own.

No row is padded on the left, so that positions are those of the row alone, and what a row rolls back is written over
or squeezed out: memory does not grow with refused tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from .fast import FastLlama
from .session import Session, TransformersSession


class Batch(Protocol):
    """What a decoder needs of a model that reads several rows; `lengths` counts the tokens that each row holds."""

    @property
    def lengths(self) -> list[int]: ...

    @property
    def device(self) -> torch.device: ...

    def feed(self, rows: Sequence[list[int]], last: Sequence[int]) -> list[torch.Tensor]:
        """Append `rows[i]` (perhaps nothing) to row `i`; the logits `[last[i], V]` after the last of its tokens."""
        ...

    def rollback(self, lengths: Sequence[int]) -> None:
        """Forget, in each row, everything after its first `lengths[i]` tokens."""
        ...

    def keep(self, rows: list[int]) -> None:
        """Go on with these rows only."""
        ...


class OneRow:
    """A session as a batch of one, without the cost of a batch."""

    def __init__(self, session: Session):
        self.session = session

    @property
    def lengths(self) -> list[int]:
        return [self.session.length]

    @property
    def device(self) -> torch.device:
        return self.session.device

    def feed(self, rows: Sequence[list[int]], last: Sequence[int]) -> list[torch.Tensor]:
        return [self.session.feed(torch.tensor([rows[0]], device=self.session.device), last[0])[0]]

    def rollback(self, lengths: Sequence[int]) -> None:
        self.session.rollback(lengths[0])

    def keep(self, rows: list[int]) -> None: ...


class FastBatch:
    """Rows of a `FastLlama`: keys and values stand at the row's own positions, so rolling back only moves numbers."""

    def __init__(self, model: FastLlama, rows: int, capacity: int):
        self.model = model
        self.cache = model.new_cache(rows, capacity)
        self.lengths = [0] * rows

    @property
    def device(self) -> torch.device:
        return self.model.device

    @torch.inference_mode()
    def feed(self, rows: Sequence[list[int]], last: Sequence[int]) -> list[torch.Tensor]:
        if not any(rows):
            return [torch.empty(0)] * len(rows)
        ids, _ = padded(rows, self.device)
        starts = torch.tensor(self.lengths, device=self.device)
        hidden = self.model.hidden(ids, self.cache, starts=starts)
        wanted = [h[len(row) - k : len(row)] for h, row, k in zip(hidden, rows, last, strict=True)]
        self._hold([held + len(row) for held, row in zip(self.lengths, rows, strict=True)])
        if not any(last):
            return [hidden[0, :0]] * len(rows)
        return list(self.model.scores(torch.cat(wanted)).split(list(last)))

    def rollback(self, lengths: Sequence[int]) -> None:
        self._hold(list(lengths))

    def keep(self, rows: list[int]) -> None:
        self.cache.keys, self.cache.values = self.cache.keys[:, rows], self.cache.values[:, rows]
        self._hold([self.lengths[i] for i in rows])

    def _hold(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.cache.length = max(lengths, default=0)


class TransformersBatch:
    """Rows of any transformers decoder with a cache that can be cropped.

    Columns of the cache that belong to no token of a row are masked; where they become many they are squeezed out.
    """

    HOLES = 16  # columns more than the longest row needs, before they are squeezed out

    def __init__(self, model: Any, rows: int):
        self.session = TransformersSession(model)
        self.held = torch.zeros(rows, 0, dtype=torch.bool, device=self.device)  # which columns are tokens of the row

    @property
    def lengths(self) -> list[int]:
        return self.held.sum(1).tolist()

    @property
    def device(self) -> torch.device:
        return self.session.device

    @torch.inference_mode()
    def feed(self, rows: Sequence[list[int]], last: Sequence[int]) -> list[torch.Tensor]:
        if not any(rows):
            return [torch.empty(0)] * len(rows)
        ids, real = padded(rows, self.device)
        positions = self.held.sum(1, keepdim=True) + torch.arange(ids.shape[1], device=self.device)
        seen = torch.cat([self.held, real], 1)
        empty = ~seen.any(1)
        # a row that holds nothing yet still needs something to look at, or its padding would become NaN
        seen[empty, -ids.shape[1]] = True
        logits = self.session.run(
            ids,
            attention_mask=seen.long(),
            position_ids=positions.where(real, 0),
            logits_to_keep=ids.shape[1] if any(last) else 1,
        )
        seen[empty] = False
        self.held = seen
        return [
            logits[i, len(row) - k : len(row)] if k else logits[i, :0]
            for i, (row, k) in enumerate(zip(rows, last, strict=True))
        ]

    def rollback(self, lengths: Sequence[int]) -> None:
        order = self.held.cumsum(1)
        self.held = self.held & (order <= torch.tensor(lengths, device=self.device)[:, None])
        longest = max(lengths, default=0)
        if self.held.shape[1] > longest + self.HOLES:
            # tokens first, in their order: a stable sort of "is no token"
            columns = (~self.held).long().sort(dim=1, stable=True).indices[:, :longest]
            self.session.select(columns)
            self.held = self.held.gather(1, columns)

    def keep(self, rows: list[int]) -> None:
        self.session.cache.batch_select_indices(torch.tensor(rows, device=self.device))
        self.held = self.held[rows]


def padded(rows: Sequence[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids `[batch, n]`, padded on the right, and which of them are real."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return ids, torch.arange(longest, device=device) < lengths[:, None]


def open_batch(model: Any, rows: int, capacity: int = 512) -> Batch:
    """An empty batch on a `FastLlama` or on a transformers model."""
    return FastBatch(model, rows, capacity) if isinstance(model, FastLlama) else TransformersBatch(model, rows)
