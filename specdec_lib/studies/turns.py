"""Decoders that share nothing but their prompts, timed in turns, and where the time of each goes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from ..bench.costs import synchronise

if TYPE_CHECKING:
    import pandas as pd

Decoder = Callable[[list[int]], list[int]]
"""Token ids of a prompt to the new token ids."""


@dataclass
class Timed:
    """What one decoder did with each prompt.

    Attributes:
        tokens: the new tokens, one list a prompt.
        seconds: of each prompt.
        inside: name of a model -> seconds inside its forward passes, of each prompt; empty where none was watched.
    """

    tokens: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    inside: dict[str, list[float]] = field(default_factory=dict)

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
    order, models = random.Random(seed), dict(watch or {})
    found = {name: Timed(inside={model: [] for model in models}) for name in decoders}
    for decode in decoders.values():
        decode(prompts[0][-16:])
    for prompt in prompts:
        for name in order.sample(list(decoders), len(decoders)):
            with clocks(models) as inside:
                start = perf_counter()
                tokens = list(decoders[name](prompt))
                found[name].seconds.append(perf_counter() - start)
            found[name].tokens.append(tokens)
            for model, seconds in inside.items():
                found[name].inside[model].append(seconds)
    return found


@contextmanager
def clocks(models: Mapping[str, torch.nn.Module]) -> Iterator[dict[str, float]]:
    """Seconds inside the forward passes of each model while the context lasts, by name."""
    spent, started, hooks = dict.fromkeys(models, 0.0), dict.fromkeys(models, 0.0), []

    def watch(name: str, model: torch.nn.Module) -> None:
        def before(*_: Any) -> None:
            started[name] = perf_counter()

        def after(*_: Any) -> None:
            synchronise(next(model.parameters()).device)
            spent[name] += perf_counter() - started[name]

        hooks.extend([model.register_forward_pre_hook(before), model.register_forward_hook(after)])

    for name, model in models.items():
        watch(name, model)
    try:
        yield spent
    finally:
        for hook in hooks:
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
