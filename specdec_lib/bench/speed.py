"""Four decoders over the same prompts, in turn: transformers plain and assisted, ours plain and drafted.

What makes the comparison fair:

* the same weights and, on a CPU, the same packed layers for all (`contest.py`);
* each prompt is decoded by all four, one after the other, in an order that rotates from prompt to prompt, so that a
  slow minute of the machine meets all of them; each reads the prompt once before its clock runs;
* all write the same number of new tokens: as many as an independent run wrote before its end-of-sequence token, at
  most `max_new_tokens`; then nothing ends a text.  Only new tokens count, reading the prompt is part of the time;
* transformers' assisted generation drafts gamma tokens a round, as ours does: its confidence threshold is 0;
* speed is a ratio of total times, not a mean of ratios; its interval comes from resampling the prompts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

import numpy as np

from ..audit.identity import compare
from ..decode import check_lengths
from ..engines import Reply
from ..errors import SpecdecError
from ..models.support import context_length, room
from ..sampling import SamplingParams
from .contest import Contest
from .costs import FEWEST, Estimate
from .prompts import Prompt


@dataclass(frozen=True)
class Row:
    """All arms on one prompt: `runs[arm]`."""

    prompt: Prompt
    ids: list[int]
    runs: dict[str, Reply]

    @property
    def new_tokens(self) -> int:
        return len(self.runs["drafted"].tokens)


def race(
    contest: Contest,
    prompts: Sequence[Prompt],
    gamma: int = 5,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    also: Callable[[Row], Any] | None = None,
) -> Iterator[Row]:
    """Decode the prompts with all arms, yielding each prompt's row; the kinds of prompt take turns.

    Args:
        contest: who is compared.
        prompts: at least one.
        gamma: draft length.
        max_new_tokens: at most so many new tokens a prompt; more than `gamma`, so that a round can draft `gamma`.
        temperature: 0 decodes greedily.
        seed: of all draws.  The caller's random state is left as it was.
        also: called with each row before the next prompt, for measurements that belong in between.

    Raises:
        SpecdecError: for what cannot be used, before any decoding.
    """
    check_room(gamma, max_new_tokens)
    SamplingParams(temperature)
    if not prompts:
        raise SpecdecError("no prompt to measure on: give at least one")
    limit = context_length(contest.pair.target)
    encoded = []
    for prompt in in_turn(prompts):
        try:
            encoded.append((prompt, contest.pair.encode(prompt.messages)))
        except SpecdecError as error:
            raise SpecdecError(f"prompt {prompt.id}: {error}") from None
    for prompt, ids in encoded:
        if max_new_tokens > room(contest.pair.target, ids):
            raise SpecdecError(
                f"prompt {prompt.id} has {len(ids)} tokens; with {max_new_tokens} new ones it exceeds the target's "
                f"context of {limit}: leave it out or lower max_new_tokens"
            )
    return _race(contest, encoded, gamma, max_new_tokens, temperature, seed, also)


def check_room(gamma: int, max_new_tokens: int) -> None:
    """Refuse texts so short that no round could draft `gamma` tokens."""
    check_lengths(gamma, max_new_tokens)
    if max_new_tokens <= gamma:
        raise SpecdecError(
            f"max_new_tokens is {max_new_tokens} and gamma {gamma}, so no round could draft {gamma} tokens: "
            "ask for more new tokens or a shorter draft"
        )


def _race(
    contest: Contest,
    encoded: list[tuple[Prompt, list[int]]],
    gamma: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    also: Callable[[Row], Any] | None,
) -> Iterator[Row]:
    engines, params = contest.engines(gamma), SamplingParams(temperature)
    arms = list(engines)
    for index, (prompt, ids) in enumerate(encoded):
        draws = random.Random(f"{seed}/{prompt.id}")
        independent = draws.getrandbits(32)
        (free,) = engines["drafted"].run([ids], max_new_tokens, params, independent, contest.ends)
        length = len(free.tokens)
        seeds = {arm: draws.getrandbits(32) for arm in arms}
        for engine in engines.values():
            engine.run([ids], min(2, length), params)
        first = index % len(arms)
        turns = arms[first:] + arms[:first]
        row = Row(prompt, ids, {arm: engines[arm].run([ids], length, params, seeds[arm])[0] for arm in turns})
        if also is not None:
            also(row)
        yield row


def in_turn(prompts: Sequence[Prompt]) -> list[Prompt]:
    """One of each kind, then another of each: a run that is interrupted has seen all kinds.

    >>> [p.id for p in in_turn([Prompt(i, i[0], []) for i in ("a1", "a2", "a3", "b1")])]
    ['a1', 'b1', 'a2', 'a3']
    """
    kinds = [[p for p in prompts if p.kind == kind] for kind in dict.fromkeys(p.kind for p in prompts)]
    return [p for p in chain.from_iterable(zip_longest(*kinds)) if p is not None]


# -- ratios --------------------------------------------------------------------------------------------


def ratio_of_totals(
    numerator: Sequence[float], denominator: Sequence[float], seed: int = 0, resamples: int = 10_000
) -> Estimate:
    """`sum(numerator) / sum(denominator)` over prompts, with a 95 % interval from resampling the prompts.

    Prompts are drawn with replacement, both numbers of a prompt together.  The percentiles are those of Hesterberg's
    expanded interval (arXiv 1411.5279, 5.3), which widens them by `t sqrt(n / (n - 1))` against the normal quantile:
    the plain bootstrap interval is too narrow for few prompts.

    Args:
        numerator, denominator: one number a prompt, `[prompts]`.

    Returns:
        An `Estimate`, without an interval for fewer than 6 prompts.

    >>> ratio_of_totals([2.0, 4.0], [1.0, 3.0])
    Estimate(value=1.5, low=None, high=None)
    """
    from scipy.special import ndtr, stdtrit

    a, b = np.asarray(numerator, float), np.asarray(denominator, float)
    n = len(a)
    value = float(a.sum() / b.sum())
    if n < FEWEST:
        return Estimate(value)
    chosen = np.random.default_rng(seed).integers(n, size=(resamples, n))
    ratios = a[chosen].sum(1) / b[chosen].sum(1)
    tail = float(ndtr(stdtrit(n - 1, 0.025) * np.sqrt(n / (n - 1))))
    low, high = np.quantile(ratios, [tail, 1 - tail])
    return Estimate(value, float(low), float(high))


def speed_ratio(rows: Sequence[Row], slow: str, fast: str) -> Estimate:
    """How many times as fast the arm `fast` is as the arm `slow`."""
    return ratio_of_totals([r.runs[slow].seconds for r in rows], [r.runs[fast].seconds for r in rows])


def partings(contest: Contest, rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """Greedy texts against our plain ones: per arm how many are identical, part at a tie within rounding, or differ."""
    found = {}
    for arm in [arm for arm in rows[0].runs if arm != "plain"]:
        differences = [compare(contest.pair.target, r.ids, r.runs["plain"].tokens, r.runs[arm].tokens) for r in rows]
        ties = sum(d is not None and d.tie for d in differences)
        same = sum(d is None for d in differences)
        found[arm] = {"identical": same, "ties": ties, "different": len(rows) - same - ties}
    return found
