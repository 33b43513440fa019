"""How many tokens to draft: a constant, or a rule that adapts to what was accepted.

`generate(gamma=5)` drafts five; `generate(gamma=Heuristic())` and the like adapt.  An object here is a rule without
state: what is learnt lives in the `Schedule` that a call starts, never in a model or its configuration.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

from .drafters.model import check_confidence
from .errors import SpecdecError
from .results import Round


class Schedule(Protocol):
    """A rule at work in one call."""

    def next(self, row: int) -> int:
        """How many tokens to draft in the next round of a row; 0 asks the target alone."""
        ...

    def update(self, done: Round) -> None: ...


class Lengths(Protocol):
    """A rule for the draft length."""

    @property
    def confidence(self) -> float:
        """Probability below which a draft ends early; 0 for rules that do not use it."""
        ...

    def start(self) -> Schedule: ...


@dataclass(frozen=True)
class Constant:
    """Always `gamma` tokens."""

    gamma: int
    confidence = 0.0

    def __post_init__(self) -> None:
        check_gamma(self.gamma)

    def start(self) -> Constant:
        return self

    def next(self, row: int) -> int:
        return self.gamma

    def update(self, done: Round) -> None: ...


@dataclass(frozen=True)
class Heuristic:
    """Two more after a draft that was kept whole, one less after a refusal; each text has a count of its own.

    The rule of Hugging Face's assisted generation (Gante 2023).  There it lives on in the assistant's configuration;
    here every call begins at `first`.

    >>> schedule = Heuristic(first=5).start()
    >>> for accepted in (5, 3):
    ...     schedule.update(Round(0, [7] * 5, accepted, [7] * (accepted + 1), [], [], 5, 0.0, 0.0, 0.0))
    ...     print(schedule.next(0))
    7
    6
    """

    first: int = 5
    confidence = 0.0

    def __post_init__(self) -> None:
        check_gamma(self.first, "first")

    def start(self) -> _HeuristicSchedule:
        return _HeuristicSchedule(self.first)


class _HeuristicSchedule:
    def __init__(self, first: int):
        self.lengths: dict[int, int] = defaultdict(lambda: first)

    def next(self, row: int) -> int:
        return self.lengths[row]

    def update(self, done: Round) -> None:
        if done.drafted:
            whole = done.accepted == len(done.drafted)
            self.lengths[done.row] = self.lengths[done.row] + 2 if whole else max(self.lengths[done.row] - 1, 1)


@dataclass(frozen=True)
class Confidence:
    """Draft until the draft is unsure: the token it gave less than `threshold` is the last one, and is verified too.

    The probability is that at temperature 1, whatever is sampled.  The output law is kept: whether drafting goes on
    depends only on tokens that are verified.
    """

    threshold: float = 0.4
    longest: int = 20

    def __post_init__(self) -> None:
        check_confidence(self.threshold)
        check_gamma(self.longest, "longest")

    @property
    def confidence(self) -> float:
        return self.threshold

    def start(self) -> Constant:
        return Constant(self.longest)


@dataclass(frozen=True)
class Fastest:
    """The length that promises most tokens a second, from what this call has measured so far.

    A round of `g` draft tokens is expected to emit `E(g) = (1 - alpha^(g + 1)) / (1 - alpha)` tokens (Leviathan et
    al., equation 1) in `g d + t(g + 1)` seconds, where `d` is the time of a draft token and `t(n)` that of a target
    pass over `n` positions and of the loop.  All three are running estimates.  Where no length pays, the target
    decodes alone, and every so often one draft token tests whether that still holds.

    Lengths follow the clock, so at a temperature above 0 the same seed may give another text (of the same law).

    Attributes:
        first: length of the first rounds.
        longest: most tokens of a draft.
    """

    first: int = 4
    longest: int = 12
    confidence = 0.0

    def __post_init__(self) -> None:
        check_gamma(self.first, "first")
        check_gamma(self.longest, "longest")
        if self.first > self.longest:
            raise SpecdecError(f"first must not exceed longest, got {self.first} and {self.longest}")

    def start(self) -> _FastestSchedule:
        return _FastestSchedule(self.first, self.longest)


class _FastestSchedule:
    MEMORY = 0.985  # what a verdict still weighs one round later: an average over some seventy rounds
    RECENT = 31  # timings that a median is taken over
    PATIENCE = 12  # rounds without a draft before one is tried again

    def __init__(self, first: int, longest: int):
        self.first, self.longest = first, longest
        self.kept, self.refused = 3.0, 1.0  # a prior of four tokens at alpha = 0.75
        self.passes: dict[int, deque[float]] = {}
        self.drafts: deque[float] = deque(maxlen=self.RECENT)
        self.rows: set[int] = set()
        self.alone = 0

    def next(self, row: int) -> int:
        if not self.drafts or not any(self.passes.values()):
            return self.first
        alpha = self.kept / (self.kept + self.refused)
        best = best_length(alpha, median(self.drafts), pass_seconds(self.passes), self.longest)
        return best if best or self.alone < self.PATIENCE else 1

    def update(self, done: Round) -> None:
        self.kept = self.MEMORY * self.kept + done.kept
        self.refused = self.MEMORY * self.refused + done.rejected
        n = len(done.drafted) + 1
        if n not in self.passes:  # a pass of a length not seen before also prepares it
            self.passes[n] = deque(maxlen=self.RECENT)
        else:
            self.passes[n].append(done.seconds - done.draft_seconds)
        if done.drafted and done.row in self.rows:  # the first draft of a row also reads the prompt
            self.drafts.append(done.draft_seconds / len(done.drafted))
        self.rows.add(done.row)
        self.alone = 0 if done.drafted else self.alone + 1


def best_length(alpha: float, draft_seconds: float, pass_seconds: Callable[[int], float], longest: int) -> int:
    """The `g` in 0..longest with the most expected tokens a second, the smallest among equals.

    >>> best_length(alpha=0.8, draft_seconds=0.1, pass_seconds=lambda n: 1.0, longest=12)
    6
    >>> best_length(alpha=0.3, draft_seconds=0.5, pass_seconds=lambda n: 1.0, longest=12)
    0
    """
    best, fastest, tokens = 0, 0.0, 0.0
    for g in range(longest + 1):
        tokens += alpha**g  # 1 + alpha + ... + alpha^g
        speed = tokens / (g * draft_seconds + pass_seconds(g + 1))
        if speed > fastest:
            best, fastest = g, speed
    return best


def pass_seconds(timed: Mapping[int, Sequence[float]]) -> Callable[[int], float]:
    """`t(n)` from timings of passes over `n` positions: a line through them, and nearer to its own where `n` has any.

    >>> seconds = pass_seconds({1: [1.0] * 4, 3: [1.2] * 4})
    >>> round(seconds(1), 9), round(seconds(5), 9)
    (1.0, 1.4)
    """
    typical = {n: (median(times), len(times)) for n, times in timed.items() if times}
    weight = sum(k for _, k in typical.values())
    middle = sum(n * k for n, (_, k) in typical.items()) / weight
    mean = sum(t * k for t, k in typical.values()) / weight
    spread = sum(k * (n - middle) ** 2 for n, (_, k) in typical.items())
    rise = sum(k * (n - middle) * (t - mean) for n, (t, k) in typical.items())
    slope = max(rise / spread, 0.0) if spread else 0.0
    least = min(t for t, _ in typical.values()) / 2

    def seconds(n: int) -> float:
        line = max(mean + slope * (n - middle), least)
        own, count = typical.get(n, (0.0, 0))
        return (2 * line + count * own) / (2 + count)

    return seconds


def check_gamma(value: Any, name: str = "gamma") -> None:
    """Refuse a draft length that is no whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecdecError(
            f"{name} must be a whole number >= 1, got {value!r}: use generate_plain to decode without drafts"
        )


def as_lengths(gamma: Any) -> Lengths:
    """A number as the constant rule; a rule as it is."""
    if hasattr(gamma, "start") and hasattr(gamma, "confidence"):
        return gamma
    check_gamma(gamma)
    return Constant(gamma)
