"""What chapter 02 puts a decoder through that was written by hand: the same text, the same distribution, the time.

The decoder itself stands in the notebook; `tests/test_chapter_loop.py` reads it from there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from ..audit.adapters import BlockLaw, tabular
from ..audit.audit import Verdict, audit
from ..audit.identity import compare
from ..audit.memoize_forward import MemoizedForward
from ..bench.costs import Estimate, synchronise
from ..bench.prompts import load_prompts
from ..bench.speed import in_turn, ratio_of_totals
from ..load import draft_source
from ..models import Pair, load_transformers
from ..sampling import SamplingParams

if TYPE_CHECKING:
    import pandas as pd

Decoder = Callable[[list[int]], list[int]]
"""Token ids of a prompt to the new token ids."""


def load_both(target: str, draft: str) -> tuple[Any, Any]:
    """A target and its draft as plain transformers models, on one device; names as in `load_pair`."""
    return load_transformers(target), load_transformers(draft_source(draft))


def questions(pair: Pair, n: int, seed: int = 0) -> list[list[int]]:
    """Token ids of `n` packaged prompts, of the six kinds in turn."""
    prompts = in_turn(load_prompts(limit=-(-n // 6), seed=seed))[:n]
    return [pair.encode(prompt.messages) for prompt in prompts]


def greedy_text(target: Any, ids: list[int], n_new: int, end: int | None) -> list[int]:
    """What transformers' own `generate` writes without a draft, at temperature 0."""
    batch = torch.tensor([ids], device=target.device)
    asked = {"max_new_tokens": n_new, "do_sample": False, "eos_token_id": end, "pad_token_id": end}
    return target.generate(batch, attention_mask=torch.ones_like(batch), **asked)[0, len(ids) :].tolist()


# -- the same distribution -----------------------------------------------------------------------------


def audit_loop(
    decode: Callable[..., Any],
    target: Any,
    draft: Any,
    prompt: Sequence[int],
    *,
    gamma: int,
    length: int,
    top_k: int = 4,
    **plan: Any,
) -> Verdict:
    """Test whether a decoder samples `length` tokens from the target's distribution, at temperature 1.

    Both models are memoized and have only their `top_k` likeliest tokens after each prefix.  So every text of `length`
    tokens is an outcome of the test, with its exact probability under the target, and no outcome is grouped.

    Args:
        decode: called as `decode(target, draft, prompt, length, gamma, 1.0)`; it calls a model as
            `model(input_ids, cache=cache).logits` with a cache made of `model.config`, draws with torch's default
            generator, and returns the new tokens, or these and something else.
        target, draft: transformers models.
        prompt: token ids.
        plan: level, effect, power and seed of `audit.audit.audit`.
    """
    truth = tabular(target, prompt, SamplingParams(temperature=1.0, top_k=top_k))
    models = [MemoizedForward(model, top_k) for model in (target, draft)]

    def one() -> tuple[int, ...]:
        written = decode(*models, list(prompt), length, gamma, 1.0)
        return tuple(written[0] if isinstance(written, tuple) else written)

    def sampler(n: int, seed: int) -> list[tuple[int, ...]]:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return [one() for _ in range(n)]

    return audit(sampler, BlockLaw(truth, length).law, **plan)


# -- the same text, and the time -----------------------------------------------------------------------


@dataclass
class Timed:
    """What one decoder did with each prompt.

    Attributes:
        tokens: the new tokens, one list a prompt.
        seconds: of each prompt.
        inside: name of a watched model -> seconds inside its forward passes, of each prompt.
        calls: name of a watched model -> number of its forward passes, of each prompt.
    """

    tokens: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    inside: dict[str, list[float]] = field(default_factory=dict)
    calls: dict[str, list[int]] = field(default_factory=dict)

    @property
    def written(self) -> int:
        return sum(map(len, self.tokens))


def in_turns(
    decoders: Mapping[str, Decoder],
    prompts: Sequence[list[int]],
    seed: int = 0,
    watch: Mapping[str, torch.nn.Module] | None = None,
) -> dict[str, Timed]:
    """Let each decoder write after each prompt, in an order that is shuffled anew for each prompt.

    A slow minute of the machine so meets all of them.  Each one writes after the end of the first prompt before any
    clock runs.

    Args:
        decoders: name -> function from a prompt to new tokens.
        prompts: token ids.
        seed: of the order.
        watch: name -> transformers model: the seconds inside its forward passes are noted as well.

    >>> found = in_turns({"echo": list, "back": lambda ids: ids[::-1]}, [[1, 2], [3, 4, 5]])
    >>> found["back"].tokens, found["echo"].written, len(found["echo"].seconds)
    ([[2, 1], [5, 4, 3]], 5, 2)
    """
    order, clocks = random.Random(seed), {name: Clock(model) for name, model in (watch or {}).items()}
    found = {name: Timed(inside={m: [] for m in clocks}, calls={m: [] for m in clocks}) for name in decoders}
    for decode in decoders.values():
        decode(prompts[0][-16:])
    for clock in clocks.values():
        clock.read()
    for prompt in prompts:
        for name in order.sample(list(decoders), len(decoders)):
            timed, start = found[name], perf_counter()
            timed.tokens.append(list(decoders[name](prompt)))
            timed.seconds.append(perf_counter() - start)
            for model, clock in clocks.items():
                seconds, calls = clock.read()
                timed.inside[model].append(seconds)
                timed.calls[model].append(calls)
    for clock in clocks.values():
        clock.remove()
    return found


class Clock:
    """Counts the forward passes of a model and the seconds inside them, until it is removed."""

    def __init__(self, model: torch.nn.Module):
        self.model, self.seconds, self.calls, self.started = model, 0.0, 0, 0.0
        self.hooks = [model.register_forward_pre_hook(self._before), model.register_forward_hook(self._after)]

    def _before(self, *_: Any) -> None:
        self.started = perf_counter()

    def _after(self, *_: Any) -> None:
        synchronise(next(self.model.parameters()).device)
        self.seconds += perf_counter() - self.started
        self.calls += 1

    def read(self) -> tuple[float, int]:
        """Seconds and passes since the clock was read last."""
        read = self.seconds, self.calls
        self.seconds, self.calls = 0.0, 0
        return read

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()


def shares(found: Mapping[str, Timed]) -> pd.DataFrame:
    """Milliseconds for each new token, by decoder: inside each watched model, and `the rest`.

    >>> one = Timed(tokens=[[1, 2]], seconds=[0.5], inside={"target": [0.25]})
    >>> {name: column.tolist() for name, column in shares({"loop": one}).items()}
    {'target': [125.0], 'the rest': [125.0]}
    """
    import pandas as pd

    rows = {}
    for name, timed in found.items():
        inside = {model: sum(seconds) for model, seconds in timed.inside.items()}
        rest = sum(timed.seconds) - sum(inside.values())
        rows[name] = {part: 1e3 * s / timed.written for part, s in {**inside, "the rest": rest}.items()}
    return pd.DataFrame.from_dict(rows, orient="index")


def same_texts(target: Any, prompts: Sequence[list[int]], found: Mapping[str, Timed]) -> pd.DataFrame:
    """How many texts of each decoder are the first one's, part from it at a tie within rounding, or differ."""
    import pandas as pd

    first, *others = found
    rows = {}
    for name in others:
        pairs = zip(prompts, found[first].tokens, found[name].tokens, strict=True)
        parted = [compare(target, *texts) for texts in pairs]
        ties = sum(each is not None and each.tie for each in parted)
        same = sum(each is None for each in parted)
        rows[name] = {f"same text as {first}": same, "parted at a tie": ties, "different": len(parted) - same - ties}
    return pd.DataFrame.from_dict(rows, orient="index")


def speed_ratio(slow: Timed, fast: Timed, seed: int = 0) -> Estimate:
    """How many times as fast `fast` is as `slow` on the same prompts, with its interval (`ratio_of_totals`)."""
    return ratio_of_totals(slow.seconds, fast.seconds, seed)
