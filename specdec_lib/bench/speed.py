"""Four decoders over the same prompts, in turn: transformers plain and assisted, ours plain and drafted.

What makes the comparison fair:

* the same weights and, on a CPU, the same packed layers for all (`packed.py`);
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
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from time import perf_counter
from typing import Any

import numpy as np
import torch

from ..audit.identity import compare
from ..decode import Round, check_lengths, generate, generate_plain
from ..drafters import SamplingParams
from ..errors import SpecdecError, first_line
from ..models.pair import is_encoder_decoder
from ..models.support import context_length, room
from .contest import Contest, pack_linears
from .costs import FEWEST, Estimate, synchronise
from .prompts import Prompt

ARMS = {
    "transformers": "transformers plain",
    "assisted": "transformers assisted",
    "plain": "ours plain",
    "drafted": "ours drafted",
}


@dataclass(frozen=True)
class Run:
    """One decoder on one prompt.

    Attributes:
        seconds: from the prompt's ids to the last new token.
        first: from the prompt's ids to the first new token (or the first few, where a round gives several).
        tokens: the new ids.
        trace: the rounds of our decoders.
    """

    seconds: float
    first: float
    tokens: list[int]
    trace: list[Round]


@dataclass(frozen=True)
class Row:
    """All decoders on one prompt: `runs[arm]`."""

    prompt: Prompt
    ids: list[int]
    runs: dict[str, Run]

    @property
    def new_tokens(self) -> int:
        return len(self.runs["drafted"].tokens)


def arms_of(contest: Contest) -> list[str]:
    """The decoders that can take this draft."""
    return [arm for arm in ARMS if arm != "assisted" or not contest.refusal]


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
    arms = arms_of(contest)
    for index, (prompt, ids) in enumerate(encoded):
        draws = random.Random(f"{seed}/{prompt.id}")
        settings: dict[str, Any] = {"gamma": gamma, "temperature": temperature}
        free: dict[str, Any] = {"max_new_tokens": max_new_tokens, "seed": draws.getrandbits(32), "eos": contest.ends}
        length = len(generate(contest.bare, ids, **free, **settings).tokens[0])
        seeds = {arm: draws.getrandbits(32) for arm in arms}
        for arm in arms:
            run(contest, arm, ids, min(2, length), seed=0, **settings)
        first = index % len(arms)
        turns = arms[first:] + arms[:first]
        row = Row(prompt, ids, {arm: run(contest, arm, ids, length, seed=seeds[arm], **settings) for arm in turns})
        if also is not None:
            also(row)
        yield row


def run(contest: Contest, arm: str, ids: list[int], new_tokens: int, gamma: int, temperature: float, seed: int) -> Run:
    """Time one decoder (a key of `ARMS`) writing exactly `new_tokens` tokens after the prompt `ids`.

    Raises:
        Unfit: transformers fails with a draft of other tokens.
    """
    if arm == "assisted" and contest.translation:
        try:
            return _run_transformers(contest, ids, new_tokens, gamma, temperature, seed)
        except Exception as error:  # its own, of any kind
            raise Unfit(
                f"transformers' universal assisted decoding fails with this draft ({type(error).__name__}: "
                f"{first_line(error)})"
            ) from error
    if arm in ("transformers", "assisted"):
        return _run_transformers(contest, ids, new_tokens, gamma if arm == "assisted" else None, temperature, seed)
    rounds: list[float] = []  # when each ended
    settings: dict[str, Any] = {"max_new_tokens": new_tokens, "temperature": temperature, "seed": seed, "eos": []}
    settings["on_round"] = lambda done: rounds.append(perf_counter())
    synchronise(contest.target.device)
    start = perf_counter()
    if arm == "drafted":
        out = generate(contest.bare, ids, gamma=gamma, **settings)
    else:
        out = generate_plain(contest.bare, ids, **settings)
    synchronise(contest.target.device)
    return Run(perf_counter() - start, rounds[0] - start, out.tokens[0], out.trace)


class Unfit(Exception):
    """transformers' assisted generation does not take this draft."""


def prepared(contest: Contest, ids: list[int], gamma: int, temperature: float) -> Contest:
    """The contest with an assistant that may run: where the draft has other tokens, a copy for this temperature alone.

    transformers' sampling then changes the draft model for good (its embeddings and its output layer), and remembers
    by the tokenizers that it did, so each run gets a model and a tokenizer of its own.  It does so when it is first
    called, on stock layers, which are packed afterwards.

    Raises:
        Unfit: it fails on this draft.
    """
    if not contest.translation or contest.refusal:
        return contest
    own = {**contest.translation, "assistant_tokenizer": deepcopy(contest.translation["assistant_tokenizer"])}
    found = replace(contest, assistant=deepcopy(contest.assistant), translation=own)
    run(found, "assisted", ids, 2, gamma, temperature, seed=0)
    pack_linears(found.assistant)
    return found


class _FirstToken:
    """A transformers streamer that looks at the clock: it is given the prompt, then each new token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, ids: torch.Tensor) -> None:
        self.times.append(perf_counter())

    def end(self) -> None: ...


def _run_transformers(
    contest: Contest, ids: list[int], new_tokens: int, gamma: int | None, temperature: float, seed: int
) -> Run:
    """transformers' `generate`; assisted, by what the contest has for it, where `gamma` is given."""
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=temperature > 0)
    if temperature > 0:
        config.temperature, config.top_k = temperature, 0  # 0 keeps all tokens, the default is 50
    helper: dict[str, Any] = {}
    if gamma is not None and contest.lookup:
        config.prompt_lookup_num_tokens, config.max_matching_ngram_size = gamma, contest.lookup
    elif gamma is not None:
        # read from the assistant's own generation config; given to generate they are ignored
        contest.assistant.generation_config.update(
            num_assistant_tokens=gamma, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
        )
        helper = {"assistant_model": contest.assistant, **contest.translation}
    device = contest.target.device
    two = is_encoder_decoder(contest.target)
    prompt = torch.tensor([ids[:-1] if two else ids], device=device)  # an encoder-decoder's ends in the start marker
    watch = _FirstToken()
    with _only_errors_are_said(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        synchronise(device)
        start = perf_counter()
        out = contest.target.generate(
            prompt, attention_mask=torch.ones_like(prompt), generation_config=config, streamer=watch, **helper
        )
        synchronise(device)
        end = perf_counter()
    return Run(end - start, watch.times[1] - start, out[0, 1 if two else len(ids) :].tolist(), [])


@contextmanager
def _only_errors_are_said() -> Iterator[None]:
    """transformers warns of how its own assisted generation calls its own `generate`."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


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
    for arm in (a for a in arms_of(contest) if a != "plain"):
        differences = [compare(contest.pair.target, r.ids, r.runs["plain"].tokens, r.runs[arm].tokens) for r in rows]
        ties = sum(d is not None and d.tie for d in differences)
        same = sum(d is None for d in differences)
        found[arm] = {"identical": same, "ties": ties, "different": len(rows) - same - ties}
    return found
