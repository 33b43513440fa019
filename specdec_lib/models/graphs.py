"""On a GPU: short passes recorded once as CUDA graphs, then replayed.

A small draft's pass is a few hundred kernels of a few microseconds; launching them one by one takes longer than
running them.  A recorded graph is launched at once.  It needs the same shapes and addresses each time, so the pass
attends to the whole cache, masks what lies after each position, and reads its place in the text from a tensor.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable

import torch

from ..errors import first_line
from .fast import Cache, FastLlama

log = logging.getLogger(__name__)


class FixedPass:
    """A pass over `n` positions of one text whose shapes do not depend on how long the text is.

    Args:
        model: any device; only on a GPU is the pass recorded.
        cache: of one row; of the capacity that the pass is for.
        n: positions.
    """

    def __init__(self, model: FastLlama, cache: Cache, n: int):
        self.model, self.cache = model, cache
        self.capacity = cache.capacity
        self.ids = torch.zeros(1, n, dtype=torch.long, device=model.device)
        self.start = torch.zeros(1, dtype=torch.long, device=model.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        if model.device.type == "cuda":
            self._record()

    def _record(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # what is made on first use must not be made while recording
            for _ in range(2):
                self._run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.logits = self._run()
        self.graph = graph

    def _run(self) -> torch.Tensor:
        self.cache.length = self.capacity - self.ids.shape[1]  # attend to all of it; the mask hides what is not there
        return self.model.scores(self.model.hidden(self.ids, self.cache, starts=self.start))

    def __call__(self, ids: torch.Tensor, length: int) -> torch.Tensor:
        """Feed `ids` [1, n] after `length` positions; the logits `[1, n, V]`, valid until the next call."""
        self.ids.copy_(ids)
        self.start.fill_(length)
        if self.graph is None:
            self.logits = self._run()
        else:
            self.graph.replay()
        self.cache.length = length + ids.shape[1]
        return self.logits


class Recorder:
    """The recorded passes of a model and the one cache that they work on; a session borrows both.

    Recording takes as long as some passes, so it is not done anew for each text.  A second session at the same time
    gets nothing and runs as on any device.
    """

    LONGEST = 16  # positions; longer passes fill the GPU, so that launching is no longer what takes the time

    def __init__(self, model: FastLlama):
        self.model = model
        self.cache = model.new_cache(1, 1)
        self.passes: dict[int, FixedPass] = {}
        self.refused = False
        self.user: Callable[[], object] = lambda: None

    def lend(self, session: object, capacity: int) -> Cache | None:
        """The cache, empty and of at least `capacity`, for as long as `session` lives; None if it is lent."""
        if self.user() is not None:
            return None
        self.user = weakref.ref(session)
        self.cache.length = 0
        self.cache.reserve(capacity)
        return self.cache

    def feed(self, ids: torch.Tensor) -> torch.Tensor | None:
        """The logits `[1, n, V]` of `ids` [1, n]; None where this pass is not recorded, and then nothing was fed."""
        n, cache = ids.shape[1], self.cache
        if self.refused or not 0 < n <= self.LONGEST:
            return None
        length = cache.length
        cache.reserve(length + n)
        held = self.passes.get(n)
        if held is None or held.capacity != cache.capacity:
            try:
                held = self.passes[n] = FixedPass(self.model, cache, n)
            except RuntimeError as error:  # a driver or an operator that cannot be recorded
                log.warning("CUDA graphs are not used (%s): each pass is launched piece by piece", first_line(error))
                self.refused = True
                cache.length = length
                return None
        return held(ids, length).clone()
