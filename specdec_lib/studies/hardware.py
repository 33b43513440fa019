"""Where checking several positions is cheap: what a pass must do, what the machine can do, and what passes take.

A pass over `n` positions of each of `batch` rows computes and moves what `count` counts, exactly, from the model's
configuration.  A machine that did both at once and without loss would need

    max(bytes / bandwidth, operations / rate)

seconds: the roofline (Williams, Waterman and Patterson, *Roofline*, CACM 52(4), 2009).  `measure_machine` measures the
two rates, `time_passes` the passes, in turn with each other.  Derived in `notebooks/08_hardware`.

On a GPU every clock waits for the device; that path has not been run on one yet.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch

from ..bench.costs import Estimate, median, pass_seconds, synchronise
from ..errors import SpecdecError
from ..models.fast import PackedLinear
from ..models.pair import vocabulary_size
from ..models.session import open_session

# -- what a pass must do -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What one pass computes and moves, by part.

    Attributes:
        operations: of the matrix products, a multiplication and an addition each: `layers` (the linear layers),
            `attention` (scores and weighted values, masked ones included), `head` (the scores of all tokens).
        bytes: to and from memory, when nothing is moved twice: `weights` (of the linear layers and the head),
            `cache` (keys and values read and written), `logits` (written).
    """

    operations: dict[str, int]
    bytes: dict[str, int]

    @property
    def total_operations(self) -> int:
        return sum(self.operations.values())

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes.values())

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.total_operations / self.total_bytes


def count(config: Any, positions: int, batch: int = 1, context: int = 0, itemsize: int = 4) -> Work:
    """What a pass over `positions` new positions of each of `batch` rows must compute and move.

    Exact for the matrix products of a Llama or Qwen2 model.  Norms, activations and the lookup of embeddings are left
    out: they are well under a hundredth of it.

    Args:
        config: of the transformers model.
        positions: >= 1, all of them scored.
        batch: rows, >= 1.
        context: positions that the cache holds already, in each row.
        itemsize: bytes of a number: 4 in float32, 2 in bfloat16.

    Raises:
        SpecdecError: for a model of another family.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(model_type="llama", hidden_size=4, intermediate_size=6, num_hidden_layers=1,
    ...     num_attention_heads=2, num_key_value_heads=1, head_dim=2, vocab_size=10)
    >>> count(config, 3).operations  # 2 * 3 * (4 * 8 + 4 * 4 + 3 * 4 * 6), 2 * 2 * 3 * 2 * 2 * 3, 2 * 3 * 4 * 10
    {'layers': 720, 'attention': 144, 'head': 240}
    >>> count(config, 3).bytes  # 4 * (120 + 40), 4 * 2 * 2 * (3 + 3), 4 * 3 * 10
    {'weights': 640, 'cache': 96, 'logits': 120}
    """
    if config.model_type not in ("llama", "qwen2"):
        raise SpecdecError(
            f"operations are counted for Llama and Qwen2 models, this one is {config.model_type}: choose another target"
        )
    width, layers, vocabulary = config.hidden_size, config.num_hidden_layers, config.vocab_size
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or width // heads
    weights = width * dim * (heads + 2 * kv_heads) + heads * dim * width + 3 * width * config.intermediate_size
    rows, seen = batch * positions, context + positions
    return Work(
        operations={
            "layers": 2 * rows * layers * weights,
            "attention": 2 * rows * layers * 2 * heads * dim * seen,
            "head": 2 * rows * width * vocabulary,
        },
        bytes={
            "weights": itemsize * (layers * weights + width * vocabulary),
            "cache": itemsize * batch * layers * 2 * kv_heads * dim * (seen + positions),
            "logits": itemsize * rows * vocabulary,
        },
    )


# -- what the machine can do ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """The two rates of the roofline.

    Attributes:
        bandwidth: bytes a second, read from memory.
        rate: operations a second, of large matrix products.
    """

    bandwidth: Estimate
    rate: Estimate

    def seconds(self, work: Work) -> float:
        """The roofline: the least time in which this machine does `work`.

        >>> Machine(Estimate(10.0), Estimate(100.0)).seconds(Work({"layers": 500}, {"weights": 80}))
        8.0
        """
        return max(work.total_bytes / self.bandwidth.value, work.total_operations / self.rate.value)

    def critical_positions(self, itemsize: int = 4) -> float:
        """Where reading the weights and multiplying by them take equally long: n* of `roofline_verification_cost`.

        A weight is read once, `itemsize` bytes, and used in two operations a position: `itemsize rate / (2
        bandwidth)`.  The model has no part in it.

        >>> round(Machine(Estimate(2.039e12), Estimate(312e12)).critical_positions(2))  # NVIDIA A100 80GB SXM, bf16
        153
        """
        return itemsize * self.rate.value / (2 * self.bandwidth.value)


def measure_machine(
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    repeats: int = 9,
    megabytes: int = 256,
    width: int = 1536,
) -> Machine:
    """Measure both rates with the threads that torch uses; a few seconds.

    Each is taken in two ways, in turn, and the faster counts, since no single one is the fastest everywhere: memory is
    read by a sum and by the product of a matrix with one row, and matrices are multiplied as torch stores them and as
    `PackedLinear` lays them out.  On an AMD processor that is twice as fast as torch's own product.

    Args:
        device: where.
        dtype: of the matrix products.
        repeats: of each way; the median counts.
        megabytes: read at once; well above the caches.
        width: of the square matrices; well above what keeps the units busy.
    """
    where = torch.device(device)
    block, row = torch.ones(megabytes * 64, 4096, device=where), torch.ones(1, 4096, device=where)
    a, b = (torch.randn(width, width, device=where).to(dtype) for _ in range(2))
    read, multiply = PackedLinear(block), PackedLinear(b)
    ways = (block.sum, lambda: read(row), lambda: a @ b, lambda: multiply(a))

    def seconds(way: Callable[[], Any]) -> float:
        synchronise(where)
        start = perf_counter()
        way()
        synchronise(where)
        return perf_counter() - start

    with torch.inference_mode():
        for way in ways:
            way()
        taken = np.array([[seconds(way) for way in ways] for _ in range(repeats)])
    rates = [median(work / t) for work, t in zip([block.nbytes] * 2 + [2 * width**3] * 2, taken.T, strict=True)]
    return Machine(*(max(rates[i : i + 2], key=lambda e: e.value) for i in (0, 2)))


# -- what passes take ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """Passes of one model at one batch size over several numbers of positions, of which the first is 1."""

    model: Any
    batch: int
    positions: Sequence[int]

    def __post_init__(self) -> None:
        if self.batch < 1 or list(self.positions[:1]) != [1] or min(self.positions) < 1:
            raise SpecdecError(
                f"batch is {self.batch} and positions are {list(self.positions)}: give a batch >= 1, and positions "
                "of which the first is 1, the unit of the others"
            )


ONES = 3  # passes over one position in a sweep: the others are divided by their median


def time_passes(
    series: Mapping[Any, Series],
    context: int = 64,
    sweeps: int = 6,
    seed: int = 0,
    tick: Callable[[], Any] | None = None,
) -> dict[Any, np.ndarray]:
    """Time all series in turn: each sweep takes them, and the positions of each, in a new random order.

    Args:
        series: what to time, by any key.
        context: tokens in each row before the pass.
        sweeps: >= 1; 6 give an interval.  One more, which prepares each kind of pass, is not kept.
        seed: of the orders and of the text.
        tick: called after each sweep.

    Returns:
        Seconds by key, `[sweeps, len(positions)]`; the entries of a row were measured close in time, so that their
        ratios are paired.
    """
    order = random.Random(seed)
    sessions = {}
    for key, one in series.items():
        sessions[key] = open_session(one.model, one.batch, context + max(one.positions))
        size = vocabulary_size(one.model)
        ids = [[order.randrange(size) for _ in range(context)] for _ in range(one.batch)]
        if context:
            sessions[key].feed(torch.tensor(ids, device=sessions[key].device), last=0)
    found: dict[Any, list[list[float]]] = {key: [] for key in series}
    for _ in range(sweeps + 1):
        for key in order.sample(list(series), len(series)):
            one = series[key]
            seconds = pass_seconds(sessions[key], [1] * (ONES - 1) + list(one.positions), order, one.batch)
            found[key].append([float(np.median(seconds[:ONES])), *seconds[ONES:]])
        if tick is not None:
            tick()
    return {key: np.array(rows[1:]) for key, rows in found.items()}


def verification_costs(seconds: np.ndarray) -> list[Estimate]:
    """`v(n) = T(n) / T(1)` for each column of a series' times: the median of the paired ratios, with its interval.

    >>> [e.value for e in verification_costs(np.array([[2.0, 3.0], [4.0, 6.0], [2.0, 2.0]]))]
    [1.0, 1.5]
    """
    return [median(ratio) for ratio in (seconds / seconds[:, :1]).T]


def last_within(positions: Sequence[int], costs: Sequence[float], limit: float = 1.1) -> int:
    """The last of `positions` before `costs` first exceeds `limit`; 0 where the first does.

    >>> last_within([1, 2, 4, 8], [1.0, 1.05, 1.2, 1.09]), last_within([1, 2], [1.0, 1.0])
    (2, 2)
    """
    within = 0
    for n, cost in zip(positions, costs, strict=True):
        if cost > limit:
            break
        within = n
    return within
