"""A user's rule without sampling: its generator is replaced by one that takes every branch, each with its probability.

A rule that is deterministic given its draws is run once for every way these can fall.  `rng.random()` gives an object
that stands for a uniform number; a comparison with a threshold splits its interval in two.  `rng.choice(n, p=law)` has
a branch for each possible value.  What cannot be followed (a uniform passed to `searchsorted`, say) raises
`Unenumerable`, and the rule is tested by sampling instead.
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
    """The rule does something with its draws that this module cannot follow."""


class Path:
    """One run: follows the choices of `script`, then always the first one; remembers what else could be chosen."""

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
    """`scale` times a uniform number of which is known that it lies in an interval `[low, high)`."""

    __array_ufunc__ = None  # numpy numbers leave arithmetic and comparisons to this class

    def __init__(self, path: Path, interval: list[float] | None = None, scale: float = 1.0):
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
        # differs from < on a set of probability 0, unless nothing is left of the uniform number
        return self < threshold if self.scale else float(threshold) >= 0

    def __gt__(self, threshold: Any) -> bool:
        return not self <= threshold

    def __ge__(self, threshold: Any) -> bool:
        return not self < threshold


class Generator:
    """Stands in for `numpy.random.Generator`: `random`, `choice` and `integers`."""

    def __init__(self, path: Path):
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
        law = np.full(len(values), 1 / len(values)) if p is None else np.asarray(p, float)
        if len(law) != len(values) or not abs(law.sum() - 1) < 1e-8 or (law < 0).any():
            raise ValueError("probabilities do not sum to 1")  # as numpy does
        return values[self._path.choose(law.tolist())]

    def integers(self, low: int, high: int | None = None) -> Any:
        return self.choice(np.arange(low) if high is None else np.arange(low, high))

    def __getattr__(self, name: str) -> Any:
        raise Unenumerable(f"the rule draws with rng.{name}")


def runs(rule: Callable[[Generator], Any]) -> Iterator[tuple[float, Any]]:
    """Every way that `rule(rng)` can go: its probability and what it returns.

    >>> [(round(p, 2), result) for p, result in runs(lambda rng: rng.random() < 0.5 and int(rng.integers(2)))]
    [(0.5, False), (0.25, 0), (0.25, 1)]
    """
    scripts: list[list[int]] = [[]]
    total, paths = 0.0, 0
    while scripts:
        path = Path(scripts.pop())
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
    """The law of what a rule writes, as in `adapters.of_rule`, in floats and without sampling.

    Raises:
        Unenumerable: the rule cannot be followed.
    """
    target, draft = (model.mapped(lambda law: law.astype(float)) for model in (target, draft))

    def round_of(prefix: tuple[int, ...]) -> Iterator[tuple[float, tuple[int, ...]]]:
        for weight, x, q in as_draft(draft).blocks(prefix, gamma):
            p = stacked([target.law((*prefix, *x[:i])) for i in range(gamma + 1)])

            def once(rng: Generator, p: Any = p, q: Any = q, x: Any = x) -> tuple[int, ...]:
                return checked_round(rule(p.copy(), q[:gamma].copy(), list(x), rng), gamma, target.vocabulary)

            # a second time: a rule with randomness of its own does not repeat itself
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
