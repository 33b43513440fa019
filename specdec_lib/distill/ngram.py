"""The n-gram draft: what the target most often found most probable after the last few tokens of its answers.

Votes are the target's most probable next tokens, not the ones that it happened to draw: the draft proposes one
token for certain, and it is the mode that it should hit.
"""

from __future__ import annotations

import numpy as np

from ..drafters import NGramDrafter
from ..drafters.ngram import most_frequent
from ..errors import SpecdecError
from .train import Text

LARGEST = 8_000_000  # bytes
ORDERS, MIN_COUNTS = (2, 3, 4), (1, 2, 3, 5, 8)


def choose(text: Text, held_out: Text, largest: int = LARGEST) -> tuple[NGramDrafter, list[dict]]:
    """The table that agrees best with the target on the held-out answers, among those of at most `largest` bytes.

    Returns:
        The table, and what was tried: order, min_count, bytes, agreement.
    """
    best: tuple[NGramDrafter, float] | None = None
    trials: list[dict] = []
    for order in ORDERS:
        for min_count in MIN_COUNTS:
            table = prune(fit(text, order, min_count))
            size = sum(array.nbytes for pair in table.tables for array in pair)
            agreed = agreement(table, held_out)
            trials.append({"order": order, "min_count": min_count, "bytes": size, "agreement": round(agreed, 4)})
            if size <= largest and (best is None or agreed > best[1]):
                best = table, agreed
    if best is None:
        raise SpecdecError(f"no n-gram table of this text fits into {largest} bytes: allow more")
    return best[0], trials


def fit(text: Text, order: int, min_count: int = 1) -> NGramDrafter:
    """Count the answers' votes.

    Args:
        text: the target's.
        order: length of the longest n-gram, its last token included, 1 to 4.
        min_count: contexts seen less often than this are dropped (the empty one never).
    """
    tokens, answering = text.tokens.numpy(), text.answering.numpy()
    votes = text.ids[..., 0].long().numpy()
    tables = []
    for size in range(order):
        first = max(size - 1, 0)  # the first position that `size` tokens end at
        here = answering[:, first:]
        tables.append(most_frequent(_keys(tokens, size)[here], votes[:, first:][here], min_count if size else 1))
    return NGramDrafter(tables)


def prune(table: NGramDrafter) -> NGramDrafter:
    """The same table without the contexts that say what the context one token shorter says anyway.

    >>> table = NGramDrafter.fit([[1, 2, 3, 1, 2, 3, 4, 2, 5]], order=3)
    >>> [len(keys) for keys, _ in table.tables], [len(keys) for keys, _ in prune(table).tables]
    ([1, 4, 5], [1, 2, 1])
    """
    tables = [table.tables[0]]
    for size in range(1, table.order):
        keys, tokens = table.tables[size]
        shorter = _look_up(table, size - 1, keys)
        tables.append((keys[tokens != shorter], tokens[tokens != shorter]))
    return NGramDrafter(tables)


def predictions(table: NGramDrafter, tokens: np.ndarray) -> np.ndarray:
    """What the table proposes after each position of `tokens` `[rows, length]`; the same shape."""
    result = np.full(tokens.shape, int(table.tables[0][1][0]))
    for size in range(1, table.order):
        found = _look_up(table, size, _keys(tokens, size))
        result[:, size - 1 :] = np.where(found >= 0, found, result[:, size - 1 :])
    return result


def agreement(table: NGramDrafter, text: Text) -> float:
    """The share of the answers' positions where the table proposes the target's most probable token."""
    agree = predictions(table, text.tokens.numpy()) == text.ids[..., 0].long().numpy()
    return float(agree[text.answering.numpy()].mean())


def _keys(tokens: np.ndarray, size: int) -> np.ndarray:
    """The packed `size` tokens that end at each position from `size - 1` on, `[rows, length - size + 1]`."""
    keys = np.zeros((len(tokens), tokens.shape[1] - max(size - 1, 0)), np.uint64)
    for i in range(size):
        keys = keys << np.uint64(16) | tokens[:, i : i + keys.shape[1]].astype(np.uint64)
    return keys


def _look_up(table: NGramDrafter, size: int, keys: np.ndarray) -> np.ndarray:
    """What follows the last `size` tokens of each key; -1 where the table does not know that context."""
    known, tokens = table.tables[size]
    keys = keys & np.uint64((1 << 16 * size) - 1)
    if not len(known):
        return np.full(keys.shape, -1)
    index = np.searchsorted(known, keys).clip(max=len(known) - 1)
    return np.where(known[index] == keys, tokens[index].astype(int), -1)
