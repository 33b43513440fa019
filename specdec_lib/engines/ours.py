"""Our own decoder as an engine."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

from ..decode import Round, generate, generate_plain
from ..models import Pair
from ..models.session import device_of
from ..sampling import SamplingParams
from .base import Engine, Reply, synchronise


class OurEngine(Engine):
    """`generate` and `generate_plain`.

    Args:
        pair: target and draft.  No text is made while the clock runs.
        gamma: draft length or a rule for it; None decodes plainly.
        name: as it stands in tables.
        options: of `generate`, such as `verifier`.
    """

    def __init__(self, pair: Pair, gamma: Any = None, name: str = "", **options: Any):
        self.pair = Pair(pair.target, pair.draft, None, pair.description)
        self.gamma, self.options = gamma, options
        self.name = name or ("ours plain" if gamma is None else "ours drafted")

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        params: SamplingParams,
        seed: int = 0,
        ends: Sequence[int] = (),
    ) -> list[Reply]:
        ended: dict[int, float] = {}  # when the first round of each prompt ended
        asked: dict[str, Any] = {
            "max_new_tokens": new_tokens,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "processors": params.processors,
            "seed": seed,
            "eos": list(ends),
            "on_round": lambda done: ended.setdefault(done.row, perf_counter()),
        }
        device = device_of(self.pair.target)
        texts = [list(ids) for ids in prompts]
        synchronise(device)
        start = perf_counter()
        if self.gamma is None:
            out = generate_plain(self.pair, texts, **asked, **self.options)
        else:
            out = generate(self.pair, texts, gamma=self.gamma, **asked, **self.options)
        synchronise(device)
        seconds = [row.seconds for row in out.rows] if len(texts) > 1 else [perf_counter() - start]
        begins = [start + sum(seconds[:i]) for i in range(len(texts))]
        traces: list[list[Round]] = [[] for _ in texts]
        for done in out.trace:
            traces[done.row].append(done)
        return [
            Reply(tokens, seconds[i], ended.get(i, begins[i]) - begins[i], traces[i])
            for i, tokens in enumerate(out.tokens)
        ]
