"""Rows of different length in one tensor: padding, and which columns of a transformers cache belong to which row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def on_device(values: Sequence, device: torch.device, dtype: torch.dtype = torch.long) -> torch.Tensor:
    """Numbers as a tensor on `device`; the host does not wait for the copy."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def padded(rows: Sequence[Sequence[int] | torch.Tensor], device: torch.device) -> torch.Tensor:
    """Ids `[rows, n]`, padded with 0 on the right to the longest row.

    >>> padded([[5, 6], [7]], torch.device("cpu")).tolist()
    [[5, 6], [7, 0]]
    """
    longest = max(map(len, rows))
    if any(isinstance(row, torch.Tensor) for row in rows):
        each = [row.to(device) if isinstance(row, torch.Tensor) else on_device(row, device) for row in rows]
        return torch.stack([torch.nn.functional.pad(row, (0, longest - len(row))) for row in each])
    return on_device([[*row, *[0] * (longest - len(row))] for row in rows], device)


def tail(values: torch.Tensor, rows: Sequence[Sequence[int] | torch.Tensor], last: Sequence[int]) -> list[torch.Tensor]:
    """For each row its last `last[i]` entries of `values` `[rows, m, ...]`; its last column ends the longest row."""
    longest, m = max(map(len, rows)), values.shape[1]
    ends = [len(row) - longest + m for row in rows]
    return [value[end - k : end] if k else value[:0] for value, end, k in zip(values, ends, last, strict=True)]


class AlignedCacheRows:
    """Which columns of a transformers cache hold the tokens of each row.

    The tokens of a row are in neighbouring columns, and before a pass all rows end in the last column.  So the distance
    of two columns is the distance of their tokens, which relative positions and sliding windows need.  AlignedCacheRows
    left of a row are masked.  A rollback only changes numbers.  The next pass aligns the columns again, which also
    drops columns that no row needs, so memory does not grow with rejected tokens.
    """

    def __init__(self, rows: int):
        self.lengths = [0] * rows
        self._ends = [0] * rows  # the column after a row's last token

    def align(self, cache: Any) -> None:
        """Move every row to the end of `cache`, which then has as many columns as the longest row has tokens."""
        longest = max(self.lengths)
        if {cache.get_seq_length(), *self._ends} == {longest}:
            return
        columns = torch.tensor(self._ends)[:, None] - longest + torch.arange(longest)
        index = columns.clamp(min=0)[:, None, :, None]
        for layer in cache.layers:
            for name in ("keys", "values"):
                if (held := getattr(layer, name)) is not None:
                    index = index.to(held.device)  # moves once, unless the layers are on several devices
                    setattr(layer, name, held.gather(2, index.expand(-1, held.shape[1], -1, held.shape[3])))
        self._ends = [longest] * len(self._ends)

    def in_step(self, columns: int) -> bool:
        """Whether all rows are equally long and the cache, with this many columns, holds only their tokens."""
        return {*self.lengths, *self._ends} == {columns}

    def extend_all(self, n: int) -> None:
        """Append `n` tokens to each row; the rows must be in step."""
        self.lengths = [held + n for held in self.lengths]
        self._ends = list(self.lengths)

    def extend(self, counts: Sequence[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `counts[i]` tokens, padded on the right, to aligned columns.

        Returns the mask `[rows, columns]` and the positions `[rows, n]`.  Only the columns left of a row are masked,
        since no token sees columns to its right.  So padding sees at least itself, also with a window, and never
        becomes NaN.
        """
        begin, n = max(self.lengths), max(counts)
        before = on_device(self.lengths, device)[:, None]
        self.lengths = [held + count for held, count in zip(self.lengths, counts, strict=True)]
        after = on_device(self.lengths, device)[:, None]
        seen = torch.arange(begin + n, device=device) >= begin - before
        # padding repeats the row's last position, so as not to exceed the model's context
        positions = (before + torch.arange(n, device=device)).minimum(after - 1).clamp(min=0)
        self._ends = [begin + count for count in counts]
        return seen.long(), positions

    def rollback(self, lengths: Sequence[int]) -> None:
        self._ends = [
            end - (held - length) for end, held, length in zip(self._ends, self.lengths, lengths, strict=True)
        ]
        self.lengths = list(lengths)

    def select(self, rows: Sequence[int]) -> None:
        self.lengths, self._ends = [self.lengths[i] for i in rows], [self._ends[i] for i in rows]
