"""An n-gram table with back-off: a draft at almost no cost.

For each context of `order - 1` tokens, the table holds the token that followed most often; for an unknown context,
shorter ones are tried, down to the empty one.  The draft is deterministic, so its distribution is a point mass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from random import Random

import numpy as np

from ..errors import SpecdecError
from ..sampling import SamplingParams
from .base import Draft, Drafter, DraftSession

_BITS = 16  # a context of up to three tokens is packed into one 64-bit key; larger vocabularies are refused


class NGramDrafter(Drafter):
    """Back-off n-gram table of orders 1 to `order` (at most 4).

    Args:
        tables: for each order k = 1, 2, ...: (sorted context keys uint64, following token uint16).

    >>> table = NGramDrafter.fit([[5, 6, 7, 5, 6, 7, 5, 6]], order=3)
    >>> table.start(vocabulary=10).propose([1, 5, 6], gamma=4, params=SamplingParams(), random=Random(0)).tokens
    [7, 5, 6, 7]
    """

    certain = True

    def __init__(self, tables: Sequence[tuple[np.ndarray, np.ndarray]]):
        self.tables = list(tables)

    @property
    def order(self) -> int:
        return len(self.tables)

    @classmethod
    def fit(cls, texts: Iterable[Sequence[int]], order: int = 4, min_count: int = 1) -> NGramDrafter:
        """Count the n-grams of texts (sequences of token ids).

        Args:
            texts: for example the target's own samples.
            order: length of the longest n-gram, with its last token, 1 to 4.
            min_count: contexts seen less often than this are dropped, except the empty one.
        """
        if not 1 <= order <= 4:
            raise SpecdecError(f"order must be 1 to 4, got {order}")
        arrays = [np.asarray(t, np.int64) for t in texts if len(t)]
        if not arrays:
            raise SpecdecError("an n-gram table needs text: every sequence is empty")
        if max(int(t.max()) for t in arrays) >= 1 << _BITS:
            raise SpecdecError(f"token ids must be below {1 << _BITS}: this table is made for smaller vocabularies")
        tables = []
        for size in range(order):
            keys = np.concatenate([_keys(t, size) for t in arrays])
            following = np.concatenate([t[size:] for t in arrays])
            tables.append(most_frequent(keys, following, min_count if size else 1))
        return cls(tables)

    def following(self, prefix: Sequence[int]) -> int:
        """The most frequent token after the longest known suffix of `prefix`."""
        for size in range(min(self.order - 1, len(prefix)), -1, -1):
            keys, tokens = self.tables[size]
            key = 0
            for token in prefix[len(prefix) - size :]:
                key = key << _BITS | token
            i = int(np.searchsorted(keys, np.uint64(key)))
            if i < len(keys) and int(keys[i]) == key:
                return int(tokens[i])
        raise AssertionError("the table of the empty context is never empty")

    def start(self, vocabulary: int) -> NGramSession:
        largest = max(int(tokens.max()) for _, tokens in self.tables if len(tokens))
        if largest >= vocabulary:
            raise SpecdecError(
                f"this n-gram table proposes token {largest}, outside the target's vocabulary of {vocabulary}: "
                "fit one on text of this target's tokenizer"
            )
        return NGramSession(self)

    def save(self, path: str | PathLike) -> None:
        """Write the table to a safetensors file."""
        from safetensors.numpy import save_file

        arrays = {}
        for size, (keys, tokens) in enumerate(self.tables):
            arrays[f"keys{size}"], arrays[f"tokens{size}"] = keys, tokens
        save_file(arrays, path)

    @classmethod
    def load(cls, path: str | PathLike) -> NGramDrafter:
        """Read a table that `save` wrote."""
        from safetensors.numpy import load_file

        if not Path(path).is_file():
            raise SpecdecError(f"there is no n-gram table {path}: make one with NGramDrafter.fit(...).save(path)")
        arrays = load_file(path)
        return cls([(arrays[f"keys{i}"], arrays[f"tokens{i}"]) for i in range(len(arrays) // 2)])


class NGramSession(DraftSession):
    """Looks up one token after the other."""

    def __init__(self, table: NGramDrafter):
        self.table = table

    def propose(self, prefix: list[int], gamma: int, params: SamplingParams, random: Random) -> Draft:
        tokens: list[int] = []
        recent = prefix[-(self.table.order - 1) :] if self.table.order > 1 else []
        for _ in range(gamma):
            tokens.append(self.table.following(recent + tokens))
        return Draft(tokens, certain=True)


def _keys(text: np.ndarray, size: int) -> np.ndarray:
    """The packed `size` tokens before each position from `size` on."""
    keys = np.zeros(max(len(text) - size, 0), np.uint64)
    for i in range(size):
        keys = keys << np.uint64(_BITS) | text[i : len(text) - size + i].astype(np.uint64)
    return keys


def most_frequent(keys: np.ndarray, following: np.ndarray, min_count: int) -> tuple[np.ndarray, np.ndarray]:
    """For each key that occurs at least `min_count` times the token that followed most often, sorted by key."""
    if len(keys) == 0:
        return keys, following.astype(np.uint16)
    order = np.lexsort((following, keys))
    keys, following = keys[order], following[order]
    starts = np.flatnonzero(np.r_[True, (keys[1:] != keys[:-1]) | (following[1:] != following[:-1])])
    counts = np.diff(np.r_[starts, len(keys)])
    keys, following = keys[starts], following[starts]
    best = np.lexsort((following, -counts, keys))  # for each key the largest count first, then the smaller id
    keys, following, counts = keys[best], following[best], counts[best]
    first = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]])
    totals = np.add.reduceat(counts, first)
    kept = first[totals >= min_count]
    return keys[kept], following[kept].astype(np.uint16)
