"""What is never trained on: every `HELD_OUT`-th shard, and whatever the target writes that is in a benchmark prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

HELD_OUT = 25
GRAM = 12  # tokens; shorter runs are phrases that anybody writes


def split(shards: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """Shards to train on, and shards to measure on.

    >>> train, held_out = split(Path(f"text-{index:05d}.safetensors") for index in range(27))
    >>> len(train), [path.stem for path in held_out]
    (25, ['text-00000', 'text-00025'])
    """
    shards = list(shards)
    held_out = [path for path in shards if int(path.stem.split("-")[-1]) % HELD_OUT == 0]
    return [path for path in shards if path not in held_out], held_out


def rows_with(tokens: np.ndarray, texts: Iterable[Sequence[int]], gram: int = GRAM) -> np.ndarray:
    """Which rows of `tokens` `[rows, length]` share a run of `gram` tokens with one of `texts`; bool `[rows]`.

    >>> rows_with(np.array([[1, 2, 3, 4], [4, 3, 2, 1]]), [[9, 2, 3, 4, 9]], gram=3).tolist()
    [True, False]
    """
    wanted = {tuple(text[i : i + gram]) for text in texts for i in range(len(text) - gram + 1)}
    found = np.zeros(len(tokens), bool)
    if not wanted or tokens.shape[1] < gram:
        return found
    candidates = np.isin(_hashes(tokens, gram), _hashes(np.array(sorted(wanted)), gram))
    for row, start in np.argwhere(candidates):
        found[row] |= tuple(tokens[row, start : start + gram].tolist()) in wanted
    return found


def _hashes(tokens: np.ndarray, gram: int) -> np.ndarray:
    """A 64-bit number for each run of `gram` tokens `[rows, length - gram + 1]`; equal runs have equal numbers."""
    windows = tokens.shape[1] - gram + 1
    result = np.zeros((len(tokens), windows), np.uint64)
    for i in range(gram):
        result = result * np.uint64(0x9E3779B97F4A7C15) + tokens[:, i : i + windows].astype(np.uint64)
    return result
