"""Several texts of different length in one model: each row feeds what it likes and rolls back on its own.

Positions are those of the row alone, and what a row rolls back is written over or dropped: memory does not grow with
refused tokens.
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
        """Go on with these rows only, in this order; a row may come more than once."""
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

    def watch(self, layers: Sequence[int]) -> None:
        """From now on keep the hidden states after so many layers, in `cache.features`."""
        self.cache.watch(layers, self.model.config.hidden_size)

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
        self.cache.keep(rows)
        self._hold([self.lengths[i] for i in rows])

    def _hold(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.cache.length = max(lengths, default=0)


class Columns:
    """Which columns of a transformers cache hold the tokens of each row.

    The tokens of a row stand in neighbouring columns, and before a pass all rows end in the last one.  So the distance
    of two columns is the distance of their tokens, which is what relative positions and sliding windows count.  What
    lies left of a row is masked.  Rolling back only moves numbers; putting the columns in order again, before the next
    pass, also drops those that no row needs, so that memory does not grow with refused tokens.
    """

    def __init__(self, rows: int):
        self.lengths = [0] * rows
        self._ends = [0] * rows  # the column after a row's last token

    def align(self, cache: Any) -> None:
        """Let every row end in the last column of `cache`, which gets as many columns as the longest row has tokens."""
        longest = max(self.lengths)
        if {cache.get_seq_length(), *self._ends} == {longest}:
            return
        columns = torch.tensor(self._ends)[:, None] - longest + torch.arange(longest)
        index = columns.clamp(min=0)[:, None, :, None]
        for layer in cache.layers:
            for name in ("keys", "values"):
                if (held := getattr(layer, name)) is not None:
                    shape = (-1, held.shape[1], -1, held.shape[3])
                    setattr(layer, name, held.gather(2, index.to(held.device).expand(shape)))
        self._ends = [longest] * len(self._ends)

    def extend(self, rows: Sequence[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `rows`, padded on the right, to aligned columns; mask `[batch, columns]`, positions `[batch, n]`.

        Only what is left of a row needs the mask: no token sees what is right of it.  So padding sees itself at least,
        also behind a window, and never becomes NaN.
        """
        begin, n = max(self.lengths), max(map(len, rows))
        before = torch.tensor(self.lengths, device=device)[:, None]
        self.lengths = [length + len(row) for length, row in zip(self.lengths, rows, strict=True)]
        after = torch.tensor(self.lengths, device=device)[:, None]
        seen = torch.arange(begin + n, device=device) >= begin - before
        # those of the row alone; its padding must not go beyond the model's context
        positions = (before + torch.arange(n, device=device)).minimum(after - 1).clamp(min=0)
        self._ends = [begin + len(row) for row in rows]
        return seen.long(), positions

    def rollback(self, lengths: Sequence[int]) -> None:
        self._ends = [
            end - (held - length) for end, held, length in zip(self._ends, self.lengths, lengths, strict=True)
        ]
        self.lengths = list(lengths)

    def keep(self, rows: list[int]) -> None:
        self.lengths, self._ends = [self.lengths[i] for i in rows], [self._ends[i] for i in rows]


class TransformersBatch:
    """Rows of any transformers decoder with a cache that can be cropped."""

    def __init__(self, model: Any, rows: int):
        self.session = TransformersSession(model)
        self.columns = Columns(rows)

    @property
    def lengths(self) -> list[int]:
        return self.columns.lengths

    @property
    def device(self) -> torch.device:
        return self.session.device

    @torch.inference_mode()
    def feed(self, rows: Sequence[list[int]], last: Sequence[int]) -> list[torch.Tensor]:
        if not any(rows):
            return [torch.empty(0)] * len(rows)
        self.columns.align(self.session.cache)
        ids, _ = padded(rows, self.device)
        seen, positions = self.columns.extend(rows, self.device)
        wanted = ids.shape[1] if any(last) else 1
        logits = self.session.run(ids, attention_mask=seen, position_ids=positions, logits_to_keep=wanted)
        return last_of(logits, rows, last)

    def rollback(self, lengths: Sequence[int]) -> None:
        self.columns.rollback(lengths)

    def keep(self, rows: list[int]) -> None:
        self.session.cache.batch_select_indices(torch.tensor(rows))
        self.columns.keep(rows)


def last_of(logits: torch.Tensor, rows: Sequence[list[int]], last: Sequence[int]) -> list[torch.Tensor]:
    """The logits `[last[i], V]` after the last tokens of each row, from those of rows padded on the right."""
    return [
        row_logits[len(row) - k : len(row)] if k else row_logits[:0]
        for row_logits, row, k in zip(logits, rows, last, strict=True)
    ]


def padded(rows: Sequence[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids `[batch, n]`, padded on the right, and which of them are real."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return ids, torch.arange(longest, device=device) < lengths[:, None]


def open_batch(model: Any, rows: int, capacity: int = 512) -> Batch:
    """An empty batch on a `FastLlama` or on a transformers model."""
    if isinstance(model, FastLlama):
        return FastBatch(model, rows, capacity)
    if getattr(model.config, "is_encoder_decoder", False):
        from .seq2seq import EncoderDecoderBatch

        return EncoderDecoderBatch(model, rows)
    return TransformersBatch(model, rows)
