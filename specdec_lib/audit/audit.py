"""Does a sampler draw from a law that is known?  A verdict with its level and its power.

    verdict = audit(sampler, expected_law, level=1e-3, effect=0.02, power=0.99)
    print(verdict.sentence)

The sample size follows from level, effect and power before anything is drawn.  What is tested must be independent
draws: one output, or one block of fixed length, per run; tokens of one text are not independent.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from ..errors import SpecdecError
from ..validate import seed as checked_seed
from ..validate import share, whole
from .gof import Fit, checked_law, goodness_of_fit, holm, log_e_value, power_at, required_samples, visible_effect

Outcome: TypeAlias = tuple[int, ...]
Law: TypeAlias = Mapping[Outcome, Any] | Sequence[float] | np.ndarray
"""Probability of each outcome: of token sequences as a dict with tuples for keys, of one token as an array."""

NO_DEVIATION, DEVIATION, INCONCLUSIVE = "no deviation found", "deviation found", "inconclusive"
TRIAL = 16  # outcomes of the calls that show whether the sampler heeds its seed
CHUNK = 250  # outcomes a call; a slow sampler should report now and then


@dataclass(frozen=True)
class Verdict:
    """What the audit found, and how much it could have found.

    Attributes:
        outcome: `no deviation found`, `deviation found` or `inconclusive`.
        level: chance of finding a deviation where there is none, over all contexts together.
        effect: total variation that the audit was asked to see.
        power: chance of finding it, at the least favourable shape, in whatever single context it sits.
        samples: drawn, over all contexts.
        needed: that the asked power takes.
        visible: the effect that the drawn samples see with the asked power.
        p_value: the smallest over the contexts, by Holm's method.
        variation: the largest total variation between observed frequencies and law (over pooled bins).
        bound: no context's true total variation exceeds this, with confidence `1 - level`; 1 where it stopped early.
        worst: index of the context with the smallest p-value.
        fits: the test of each context.
    """

    outcome: str
    level: float
    effect: float
    power: float
    samples: int
    needed: int
    visible: float
    p_value: float
    variation: float
    bound: float
    worst: int
    fits: tuple[Fit, ...]

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        place = f" in context {self.worst + 1}" if self.worst or len(self.fits) > 1 else ""
        if self.outcome == DEVIATION:
            return (
                f"deviation found{place} at level {self.level:g}: p = {self.p_value:.2g}, observed total variation "
                f"{self.fits[self.worst].variation:.2g} ({self.samples:,} samples)"
            )
        if self.outcome == INCONCLUSIVE:
            seen = f", or an effect of {self.visible:.2g}" if self.visible < 1 else ""
            return (
                f"inconclusive: {self.samples:,} samples see a deviation of {self.effect:g} at level {self.level:g} "
                f"with power {floored(self.power)} only; {self.needed:,} samples are needed{seen}"
            )
        return (
            f"no deviation above {self.effect:g} found at level {self.level:g} with power {floored(self.power)} "
            f"({self.samples:,} samples, p = {self.p_value:.2g}; with confidence {1 - self.level:g} the total "
            f"variation is at most {self.bound:.2g})"
        )

    @property
    def exit_status(self) -> int:
        """0 no deviation found, 1 deviation found, 2 inconclusive."""
        return {NO_DEVIATION: 0, DEVIATION: 1, INCONCLUSIVE: 2}[self.outcome]

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {"sentence": self.sentence, "exit_status": self.exit_status, **asdict(self)}


def floored(power: float) -> str:
    """Four digits, rounded down: what is stated is never more than what is there."""
    return f"{int(power * 1e4) / 1e4:g}"


def audit(
    sampler: Callable[..., Any],
    expected_law: Law | Callable[[Any], Law],
    *,
    level: float = 1e-3,
    effect: float = 0.02,
    power: float = 0.99,
    contexts: Sequence[Any] | None = None,
    budget: int | None = None,
    sequential: bool = False,
    seed: int = 0,
    on_samples: Callable[[int, int], None] | None = None,
) -> Verdict:
    """Test whether a sampler draws from a law.

    Args:
        sampler: `sampler(n, seed)` returns `n` independent outcomes: ints, an int array `[n]` or `[n, length]`, or
            sequences of ints of any lengths.  The same seed must give the same outcomes, another seed others.
        expected_law: probability of every outcome; a sequence that is not in it has probability 0.
        level: chance of a false alarm, over all contexts together (Holm).
        effect: total variation that must be seen, in any one context.
        power: with which probability.
        contexts: if given, the sampler is called as `sampler(n, seed, context)` and `expected_law` is a function of
            the context.
        budget: most samples that can be afforded, all contexts together; None draws what is needed.  A budget that is
            too small can still find a deviation; where it finds none the verdict is `inconclusive`, never a pass.
        sequential: look after each chunk and stop at the first deviation.  Half of the level goes to these looks (an
            e-value, see `log_e_value`), half to the test at the end, so a pass takes a few more samples.
        seed: of everything.
        on_samples: called as `(drawn, of how many)` after each chunk of samples.

    Raises:
        SpecdecError: no law (sum, sign, NaN, mixed shapes), shares outside (0, 1), a sampler that returns something
            else than asked for or ignores its seed, a budget that leaves a context without a sample.

    >>> fair = lambda n, seed: np.random.default_rng(seed).integers(0, 4, n)
    >>> verdict = audit(fair, [0.25] * 4, effect=0.1)
    >>> verdict.outcome, verdict.samples, verdict.power >= 0.99, verdict.exit_status
    ('no deviation found', 949, True, 0)
    >>> audit(fair, [0.35, 0.25, 0.2, 0.2], effect=0.1).outcome
    'deviation found'
    >>> print(audit(fair, [0.25] * 4, effect=0.1, budget=100).sentence.partition("; ")[2])
    949 samples are needed, or an effect of 0.31
    """
    level, effect, power = share("level", level), share("effect", effect), share("power", power)
    seed = checked_seed(seed)
    if budget is not None:
        budget = whole("budget", budget, least=1)
    check_call(sampler, with_contexts=contexts is not None)
    places = [None] if contexts is None else list(contexts)
    if not places:
        raise SpecdecError("an audit needs at least one context: leave contexts out if there are none")
    laws = [as_law(expected_law if contexts is None else called(expected_law, place)) for place in places]
    tests = 2 if sequential else 1  # in each context
    each_level = level / len(laws) / tests  # Holm rejects whatever Bonferroni rejects: power at this level is a bound
    sizes = [required_samples(p, effect, each_level, power) for _, p in laws]
    needed = sum(sizes)
    if budget is not None and budget < needed:
        sizes = [max(size * budget // needed, 0) for size in sizes]
        if min(sizes) == 0:
            raise SpecdecError(f"a budget of {budget} samples leaves some of {len(laws)} contexts without any: "
                               f"{needed:,} are needed for an effect of {effect:g}")  # fmt: skip

    fits: list[Fit] = []
    drawn, stopped = 0, False
    for index, (place, size, (keys, p)) in enumerate(zip(places, sizes, laws, strict=True)):
        draw = sampler if contexts is None else with_context(sampler, place)
        for counts, n in growing_counts(draw, size, seed, index, keys):
            drawn += n
            if on_samples is not None:
                on_samples(drawn, sum(sizes))
            if sequential and (early := p_value_so_far(counts, p, effect)) <= each_level:
                stopped = True
                break
        fit = goodness_of_fit(counts, np.append(p, 0.0), seed)
        if stopped:
            fit = replace(fit, p_value=early, method="e-value")
        fits.append(replace(fit, p_value=min(1.0, tests * fit.p_value)))
        if stopped:
            break

    adjusted = holm([f.p_value for f in fits] + [1.0] * (len(laws) - len(fits)))  # 1: not looked at
    worst = int(np.argmin([f.p_value for f in fits]))
    # a deviation sits in a context that we do not choose, so the weakest context counts
    reached = min(power_at(p, size, each_level, effect) for size, (_, p) in zip(sizes, laws, strict=True))
    found = DEVIATION if adjusted[worst] <= level else NO_DEVIATION if drawn >= needed else INCONCLUSIVE
    return Verdict(
        outcome=found,
        level=level,
        effect=effect,
        power=reached,
        samples=drawn,
        needed=needed,
        visible=max(visible_effect(p, size, each_level, power) for size, (_, p) in zip(sizes, laws, strict=True)),
        p_value=adjusted[worst],
        variation=max(f.variation for f in fits),
        bound=1.0 if stopped else max(f.bound(each_level) for f in fits),
        worst=worst,
        fits=tuple(fits),
    )


def growing_counts(
    draw: Callable[..., Any], size: int, seed: int, index: int, keys: dict[Any, int]
) -> Iterator[tuple[np.ndarray, int]]:
    """Draw `size` samples of one context in chunks; yields the counts so far and how many samples joined them.

    The counts `[outcomes + 1]` are of the outcomes in `keys`, and last of all others.
    """
    longest = max(map(len, keys))
    check_seed(draw, seed, longest)
    counts = np.zeros(len(keys) + 1, np.int64)
    for chunk, child in enumerate(np.random.SeedSequence([seed, index]).spawn(-(-size // CHUNK))):
        n = min(CHUNK, size - chunk * CHUNK)
        for outcome, times in Counter(ask(draw, n, int(child.generate_state(1)[0]), longest)).items():
            counts[keys.get(outcome, len(keys))] += times
        yield counts, n


def p_value_so_far(counts: np.ndarray, p: np.ndarray, effect: float) -> float:
    """A p-value that holds whenever one looks: 1 / e-value, and 0 once an excluded outcome has occurred."""
    possible = p > 0
    if counts[:-1][possible].sum() < counts.sum():
        return 0.0
    return math.exp(min(0.0, -log_e_value(counts[:-1][possible], p[possible], effect)))


# -- what came in --------------------------------------------------------------------------------------


def check_call(sampler: Any, with_contexts: bool) -> None:
    """Raises `SpecdecError` unless the sampler can be called as it will be."""
    given = ("n", "seed", "context") if with_contexts else ("n", "seed")
    wanted = f"the sampler is called as sampler({', '.join(given)})"
    if not callable(sampler):
        raise SpecdecError(f"{wanted}, but a {type(sampler).__name__} is no function: pass the function itself")
    try:
        signature = inspect.signature(sampler)
    except (TypeError, ValueError):  # some built-in functions have none to look at
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        raise SpecdecError(f"{wanted}, and its parameters do not fit: {error}") from None


def called(expected_law: Any, context: Any) -> Law:
    if not callable(expected_law):
        raise SpecdecError("with contexts, expected_law must be a function of the context: pass lambda context: law")
    return expected_law(context)


def as_law(law: Any) -> tuple[dict[Outcome, int], np.ndarray]:
    """The outcomes, numbered, and their probabilities `[outcomes]`."""
    if callable(law):
        raise SpecdecError("expected_law is a function but there are no contexts: pass contexts=[...], or the law")
    if isinstance(law, Mapping):
        keys = [key if isinstance(key, tuple) else (key,) for key in law]
        if not all(key and all(isinstance(i, (int, np.integer)) for i in key) for key in keys):
            raise SpecdecError("the outcomes of the expected law must be tuples of token ids, none empty")
        p = checked_law(list(law.values()))
    else:
        p = checked_law(law)
        keys = [(i,) for i in range(len(p))]
    numbered = {key: i for i, key in enumerate(keys)}
    if len(numbered) < len(keys):
        raise SpecdecError("the expected law names an outcome twice, as a number and as a tuple: use tuples only")
    return numbered, p


def with_context(sampler: Callable[..., Any], context: Any) -> Callable[[int, int], Any]:
    return lambda n, seed: sampler(n, seed, context)


def ask(draw: Callable[[int, int], Any], n: int, seed: int, longest: int) -> list[Outcome]:
    """`n` outcomes of the sampler, as tuples."""
    drawn = draw(n, seed)
    if hasattr(drawn, "detach"):
        drawn = drawn.detach().cpu().numpy()
    if isinstance(drawn, np.ndarray):
        if drawn.ndim not in (1, 2) or drawn.dtype.kind not in "iu":
            raise SpecdecError(f"the sampler must return token ids, an int array [n] or [n, length]; it returned "
                               f"{drawn.dtype} of shape {drawn.shape}")  # fmt: skip
        drawn = drawn.tolist()
    if not isinstance(drawn, (list, tuple)):
        raise SpecdecError(f"the sampler must return an array or a list of outcomes, not {type(drawn).__name__}")
    if len(drawn) != n:
        raise SpecdecError(f"the sampler was asked for {n} outcomes and returned {len(drawn)}")
    listed = [row.tolist() if hasattr(row, "tolist") else row for row in drawn]  # arrays and tensors among them
    rows = [tuple(row) if hasattr(row, "__len__") else (row,) for row in listed]
    for row in rows:
        if not 0 < len(row) <= longest or not all(isinstance(i, (int, np.integer)) for i in row):
            raise SpecdecError(f"the sampler returned {row!r}; the expected law is one of 1 to {longest} token ids: "
                               "return exactly what the law is a law of")  # fmt: skip
    return rows


def check_seed(draw: Callable[[int, int], Any], seed: int, longest: int) -> None:
    """Raises `SpecdecError` unless a seed gives the same outcomes twice, and other seeds others.

    A sampler that always returns one outcome is let through: that may be the law, and if not the test says so.
    Others repeat themselves by chance at most once in 60 times at each further seed, so four are tried.
    """
    first = ask(draw, TRIAL, seed, longest)
    if first != ask(draw, TRIAL, seed, longest):
        raise SpecdecError("the sampler ignores its seed: the same seed gave other outcomes. Seed every generator "
                           "that it uses inside the call")  # fmt: skip
    if len(set(first)) > 1 and all(first == ask(draw, TRIAL, seed + i, longest) for i in range(1, 5)):
        raise SpecdecError("the sampler ignores its seed: five seeds gave the same outcomes, so they are no "
                           "independent draws. Use the seed that it is given")  # fmt: skip
