"""The exact law of a user's rule: its generator is replaced by one that takes every branch with its probability.

The rule must be deterministic given its draws; it runs once for every combination of draws.  `rng.random()` gives an
object that stands for a uniform number; a comparison with a threshold splits its interval in two.
`rng.choice(n, p=probs)` has a branch for each possible value.  Draws that cannot be followed (for example a uniform
that is passed to `searchsorted`) raise `Unenumerable`, and the rule is tested by sampling instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..exact import TabularModel
from ..exact.law import SequenceLaw
from ..exact.models import as_draft, stacked
from .adapters import checked_round

MOST_PATHS = 10_000  # of one call of the rule


class Unenumerable(Exception):
    """The rule uses its draws in a way that this module cannot follow."""


class BranchPath:
    """One run: follows the choices of `script`, then takes the first possible one; records the other possibilities."""

    def __init__(self, script: list[int]):
        self.script = script
        self.picks: list[int] = []
        self.others: list[list[int]] = []
        self.weight = 1.0

    def choose(self, weights: list[float]) -> int:
        options = [i for i, weight in enumerate(weights) if weight > 0]
        place = len(self.picks)
        pick = self.script[place] if place < len(self.script) else options[0]
        if pick not in options:
            raise Unenumerable("the rule does not do the same when its draws are the same")
        self.picks.append(pick)
        self.others.append([i for i in options if i > pick] if place >= len(self.script) else [])
        self.weight *= weights[pick]
        return pick


class Uniform:
    """`scale` times a uniform number that is known to lie in the interval `[low, high)`."""

    __array_ufunc__ = None  # numpy numbers leave arithmetic and comparisons to this class

    def __init__(self, path: BranchPath, interval: list[float] | None = None, scale: float = 1.0):
        self.path, self.scale = path, scale
        self.interval = [0.0, 1.0] if interval is None else interval  # shared with its multiples

    def __mul__(self, factor: Any) -> Uniform:
        factor = float(factor)
        if factor < 0:
            raise Unenumerable("a uniform number is multiplied by a negative one")
        return Uniform(self.path, self.interval, self.scale * factor)

    __rmul__ = __mul__

    def __lt__(self, threshold: Any) -> bool:
        threshold = float(threshold)
        if self.scale == 0:
            return threshold > 0
        low, high = self.interval
        middle = threshold / self.scale
        if middle <= low or middle >= high:
            return middle > low
        below = self.path.choose([(high - middle) / (high - low), (middle - low) / (high - low)])
        self.interval[:] = [low, middle] if below else [middle, high]
        return bool(below)

    def __le__(self, threshold: Any) -> bool:
        # equal to < but for a set of probability 0, unless the scale is 0
        return self < threshold if self.scale else float(threshold) >= 0

    def __gt__(self, threshold: Any) -> bool:
        return not self <= threshold

    def __ge__(self, threshold: Any) -> bool:
        return not self < threshold


class Generator:
    """Stands in for `numpy.random.Generator`: `random`, `choice` and `integers`."""

    def __init__(self, path: BranchPath):
        self._path = path

    def random(self, size: int | None = None) -> Any:
        if size is None:
            return Uniform(self._path)
        numbers = np.empty(size, dtype=object)
        for i in np.ndindex(numbers.shape):
            numbers[i] = Uniform(self._path)
        return numbers

    def choice(self, a: Any, size: None = None, *, p: Any = None) -> Any:
        if size is not None:
            raise Unenumerable("several values are drawn at once")
        values = np.arange(a) if np.ndim(a) == 0 else np.asarray(a)
        probs = np.full(len(values), 1 / len(values)) if p is None else np.asarray(p, float)
        if len(probs) != len(values) or not abs(probs.sum() - 1) < 1e-8 or (probs < 0).any():
            raise ValueError("probabilities do not sum to 1")  # as numpy does
        return values[self._path.choose(probs.tolist())]

    def integers(self, low: int, high: int | None = None) -> Any:
        return self.choice(np.arange(low) if high is None else np.arange(low, high))

    def __getattr__(self, name: str) -> Any:
        raise Unenumerable(f"the rule draws with rng.{name}")


def runs(rule: Callable[[Generator], Any]) -> Iterator[tuple[float, Any]]:
    """Every branch of `rule(rng)`: its probability and what it returns.

    >>> [(round(p, 2), result) for p, result in runs(lambda rng: rng.random() < 0.5 and int(rng.integers(2)))]
    [(0.5, False), (0.25, 0), (0.25, 1)]
    """
    scripts: list[list[int]] = [[]]
    total, paths = 0.0, 0
    while scripts:
        path = BranchPath(scripts.pop())
        result = rule(Generator(path))
        paths += 1
        if paths > MOST_PATHS:
            raise Unenumerable("the rule has too many branches")
        for place in reversed(range(len(path.picks))):
            scripts += [[*path.picks[:place], other] for other in reversed(path.others[place])]
        total += path.weight
        yield path.weight, result
    if abs(total - 1) > 1e-9:
        raise Unenumerable("the rule does not do the same when its draws are the same")


def rule_law(
    rule: Callable[..., Any], target: TabularModel, draft: TabularModel, gamma: int, length: int
) -> SequenceLaw:
    """The law of the texts that a rule writes, decoding as in `adapters.of_rule`, in floats and without sampling.

    Raises:
        Unenumerable: the branches of the rule cannot be followed.
    """
    target, draft = (model.mapped(lambda probs: probs.astype(float)) for model in (target, draft))

    def round_of(prefix: tuple[int, ...]) -> Iterator[tuple[float, tuple[int, ...]]]:
        for weight, x, q in as_draft(draft).blocks(prefix, gamma):
            p = stacked([target.law((*prefix, *x[:i])) for i in range(gamma + 1)])

            def once(rng: Generator, p: Any = p, q: Any = q, x: Any = x) -> tuple[int, ...]:
                return checked_round(rule(p.copy(), q[:gamma].copy(), list(x), rng), gamma, target.vocabulary)

            # run twice: a rule with other randomness gives another result
            for (chance, tokens), (_, again) in zip(runs(once), runs(once), strict=True):
                if tokens != again:
                    raise Unenumerable("the rule does not do the same when its draws are the same")
                yield weight * chance, tokens

    done: SequenceLaw = {}
    reached: SequenceLaw = {(): 1.0}
    while reached:
        prefix, mass = reached.popitem()
        for chance, tokens in round_of(prefix):
            text = (*prefix, *tokens)[:length]
            place = done if len(text) == length else reached
            place[text] = place.get(text, 0.0) + mass * chance
    return done
