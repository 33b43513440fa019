"""`python -m specdec_lib.bench.batches`: throughput over batch sizes, and where drafting stops paying.

A target pass over several rows costs more than over one, and a draft makes it longer still: the memory-bound regime,
where checking several positions is as cheap as one, ends.  Plain and drafted decoding of the same prompts take
turns; the numbers go to `results/bench/batches.json`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from .. import paths
from ..decode import Generation
from ..environment import environment
from ..files import write_text
from ..load import load_pair
from ..models.pair import Pair
from .prompts import load_prompts
from .speed import in_turn
from .sweep import in_turns

SIZES = (1, 2, 4, 8, 16)
RESULTS = paths.RESULTS / "bench" / "batches.json"


def outside_share(out: Generation) -> float:
    """Time of the rounds that neither model took, as a share of it."""
    rounds = sum(r.seconds for r in out.trace)
    return (rounds - sum(r.draft_seconds + r.target_seconds for r in out.trace)) / rounds


def throughput(
    pair: Pair, prompts: Sequence[list[int]], sizes: Sequence[int], new_tokens: int, gamma: int = 5, repeats: int = 3
) -> list[dict[str, Any]]:
    """For each batch size: tokens a second plain and drafted, their ratio, and the share of time outside the models.

    The first `max(sizes)` prompts are decoded at every size; medians over `repeats`, all in turns.
    """
    used = list(prompts[: max(sizes)])
    arms = {(size, g): {"batch_size": size} | ({"gamma": g} if g else {}) for size in sizes for g in (0, gamma)}
    outs = in_turns(pair, [used] * repeats, arms, max_new_tokens=new_tokens, eos=[])
    found = []
    for size in sizes:
        plain, drafted = outs[size, 0], outs[size, gamma]
        found.append(
            {
                "batch_size": size,
                "plain_tokens_per_second": median(out.stats.tokens_per_second for out in plain),
                "drafted_tokens_per_second": median(out.stats.tokens_per_second for out in drafted),
                "speedup": median(p.stats.seconds / d.stats.seconds for p, d in zip(plain, drafted, strict=True)),
                "outside_plain": median(map(outside_share, plain)),
                "outside_drafted": median(map(outside_share, drafted)),
            }
        )
    return found


def main(path: Path = RESULTS, new_tokens: int = 32) -> None:
    pair = load_pair()
    prompts = [pair.encode(p.messages) for p in in_turn(load_prompts())[: max(SIZES)]]
    found = throughput(pair, prompts, SIZES, new_tokens)
    print("batch  plain tok/s  drafted tok/s  speed-up  outside the models")
    for row in found:
        print(
            f"{row['batch_size']:5d}  {row['plain_tokens_per_second']:11.1f}  {row['drafted_tokens_per_second']:13.1f}"
            f"  {row['speedup']:8.2f}  {row['outside_drafted']:.2%}"
        )
    result = {"pair": pair.description, "new_tokens": new_tokens, "batches": found, "environment": environment()}
    write_text(path, json.dumps(result, indent=1) + "\n")
    print(f"written to {path.name} in {path.parent.name}")


if __name__ == "__main__":
    main()
