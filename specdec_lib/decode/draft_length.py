"""How many tokens to draft: a constant, or a policy that adapts to what was accepted.

`generate(gamma=5)` drafts five; `generate(gamma=Heuristic())` and the like adapt.  A policy has no state: what it
learns is in the `PolicyState` that each call starts, never in a model or its configuration.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ..drafters.base import Drafter
from ..drafters.model import check_confidence
from ..errors import SpecdecError
from ..validate import whole
from .results import Round


class PolicyState:
    """The state of a policy in one call of `generate`: `next` is called before each round, `update` after it."""

    def next(self, row: int, room: int | None = None) -> int:
        """How many tokens to draft in the next round of one text; 0 lets the target decode alone.

        Args:
            row: the index of the prompt.
            room: how many draft tokens the text can still use; a larger answer is cut to it.  None if it is unknown.
        """
        raise NotImplementedError

    def update(self, done: Round) -> None:
        """Learn from a finished round.  The default learns nothing."""


class DraftLengthPolicy:
    """How the draft length is chosen.  A policy of your own overrides `start`, and is given as `generate(gamma=...)`.

    A policy that drafts twice as many tokens in each round of a text:

    >>> class Doubling(DraftLengthPolicy):
    ...     def start(self):
    ...         return DoublingState()
    >>> class DoublingState(PolicyState):
    ...     def __init__(self):
    ...         self.rounds = defaultdict(int)
    ...     def next(self, row, room=None):
    ...         return 2 ** self.rounds[row]
    ...     def update(self, done):
    ...         self.rounds[done.row] += 1
    >>> as_policy(Doubling()).start().next(row=0)
    1
    """

    @property
    def confidence(self) -> float:
        """The probability below which a token ends its draft; 0 for policies that do not use it."""
        return 0.0

    def start(self) -> PolicyState:
        """The state for one call; each call gets a new one."""
        raise NotImplementedError


@dataclass(frozen=True)
class Constant(DraftLengthPolicy):
    """Always `gamma` tokens."""

    gamma: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "gamma", check_gamma(self.gamma))

    def start(self) -> PolicyState:
        return _ConstantState(self.gamma)


class _ConstantState(PolicyState):
    def __init__(self, gamma: int):
        self.gamma = gamma

    def next(self, row: int, room: int | None = None) -> int:
        return self.gamma


@dataclass(frozen=True)
class Heuristic(DraftLengthPolicy):
    """Two tokens more after a draft that was accepted completely, one less after a rejection; separately for each text.

    The policy of Hugging Face's assisted generation (Gante 2023).  There the length is kept in the assistant's
    configuration from call to call; here every call begins at `first`.

    >>> state = Heuristic(first=5).start()
    >>> for accepted in (5, 3):
    ...     state.update(Round(0, [7] * 5, accepted, [7] * accepted + [9], [], [], 5, 0.0, 0.0, 0.0))
    ...     print(state.next(0))
    7
    6
    """

    first: int = 5

    def __post_init__(self) -> None:
        object.__setattr__(self, "first", check_gamma(self.first, "first"))

    def start(self) -> _HeuristicState:
        return _HeuristicState(self.first)


class _HeuristicState(PolicyState):
    def __init__(self, first: int):
        self.lengths: dict[int, int] = defaultdict(lambda: first)

    def next(self, row: int, room: int | None = None) -> int:
        return self.lengths[row]

    def update(self, done: Round) -> None:
        if done.drafted:
            length = self.lengths[done.row]
            self.lengths[done.row] = max(length - 1, 1) if done.rejected else length + 2


@dataclass(frozen=True)
class Confidence(DraftLengthPolicy):
    """Draft until the draft model is unsure: a token with a probability below `threshold` is the last, and is verified.

    The probability is taken at temperature 1, at any sampling temperature.  The output distribution is kept, because
    whether drafting continues depends only on tokens that are verified.
    """

    threshold: float = 0.4
    longest: int = 20

    def __post_init__(self) -> None:
        object.__setattr__(self, "threshold", check_confidence(self.threshold))
        object.__setattr__(self, "longest", check_gamma(self.longest, "longest"))

    @property
    def confidence(self) -> float:
        return self.threshold

    def start(self) -> PolicyState:
        return _ConstantState(self.longest)


@dataclass(frozen=True)
class Fastest(DraftLengthPolicy):
    """The length with the most expected tokens a second, from what this call has measured so far.

    A round of `g` draft tokens is expected to emit `1 + s_1 + s_1 s_2 + ... + s_1 ... s_g` tokens, where `s_j` is the
    probability that the `j`-th token is kept if those before it were.  If all `s_j` are alpha, this is
    `(1 - alpha^(g + 1)) / (1 - alpha)` (Leviathan et al., equation 1); for a drafter that copies long passages they
    rise.  The round takes `t(1) + sum_j o_j (d + t(j + 1) - t(j))` seconds, where `o_j` is the probability that a draft
    reaches `j` tokens if that many are asked for, `d` the time of a draft token, and `t(n)` the time of a target pass
    over `n` positions and of the loop.  All four are running estimates.  If no length pays, the target decodes alone,
    and now and then one draft token tests whether this is still so.

    Lengths depend on the clock, so at a temperature above 0 the same seed may give another text, from the same
    distribution.

    Attributes:
        first: length of the first rounds.
        longest: the most tokens of a draft.
    """

    first: int = 4
    longest: int = 12

    def __post_init__(self) -> None:
        for name in ("first", "longest"):
            object.__setattr__(self, name, check_gamma(getattr(self, name), name))
        if self.first > self.longest:
            raise SpecdecError(f"first must not exceed longest, got {self.first} and {self.longest}")

    def start(self) -> _FastestState:
        return _FastestState(self.first, self.longest)


class _FastestState(PolicyState):
    RECENT = 31  # timings that are kept
    PATIENCE = 12  # rounds without a draft before one is tried again

    def __init__(self, first: int, longest: int):
        self.first, self.longest = first, longest
        self.kept, self.offered = Shares(longest, first=0.6), Shares(longest, first=1.0)
        self.passes: dict[int, deque[float]] = {}
        self.drafts: deque[tuple[float, int]] = deque(maxlen=self.RECENT)
        self.asked: dict[int, int] = {}
        self.rows: set[int] = set()
        self.alone = 0

    def next(self, row: int, room: int | None = None) -> int:
        length = self.length()
        self.asked[row] = (
            length if room is None else min(length, room)
        )  # a draft cut by the end of its text tells nothing
        return self.asked[row]

    def length(self) -> int:
        if not self.drafts or not any(self.passes.values()):
            return self.first
        seconds, tokens = map(sum, zip(*self.drafts, strict=True))
        draft_seconds = seconds / tokens  # a mean, since copied and modelled drafts differ much
        best = best_length(self.kept.estimates(), self.offered.estimates(), draft_seconds, pass_seconds(self.passes))
        return best if best or self.alone < self.PATIENCE else 1

    def update(self, done: Round) -> None:
        asked = self.asked.get(done.row, len(done.drafted))
        self.offered.see(len(done.drafted), asked)
        # a draft that ends early counts as rejected there; the end of a text tells nothing
        self.kept.see(done.kept, min(done.kept + (not done.trimmed), asked))
        n = len(done.drafted) + 1
        if n not in self.passes:  # a pass of a length not seen before also prepares it
            self.passes[n] = deque(maxlen=self.RECENT)
        else:
            self.passes[n].append(done.seconds - done.draft_seconds)
        if done.drafted and done.row in self.rows:  # the first draft of a row also reads the prompt
            self.drafts.append((done.draft_seconds, len(done.drafted)))
        self.rows.add(done.row)
        self.alone = 0 if done.drafted else self.alone + 1


class Shares:
    """The share of successes at each position of a draft; older rounds have less weight.

    The estimate at a position is the prior of the next position, since late positions are seldom tried.

    Args:
        length: the number of positions.
        first: the prior of the first position.

    >>> shares = Shares(3, first=0.5)
    >>> shares.see(successes=1, tries=2)
    >>> [round(share, 3) for share in shares.estimates()]  # (8 * 0.5 + 1) / 9, then 8 / 9 of that, then the same
    [0.556, 0.494, 0.494]
    """

    MEMORY = 0.99  # factor of a round's weight for each later round: an average over about a hundred rounds
    WEIGHT = 8  # weight of the prior, in rounds

    def __init__(self, length: int, first: float):
        self.first = first
        self.successes, self.tries = [0.0] * length, [0.0] * length

    def see(self, successes: int, tries: int) -> None:
        """Count a draft: its first `tries` positions were tried, and the first `successes` of them succeeded."""
        for j in range(len(self.tries)):
            self.successes[j] = self.MEMORY * self.successes[j] + (j < successes)
            self.tries[j] = self.MEMORY * self.tries[j] + (j < tries)

    def estimates(self) -> list[float]:
        found, share = [], self.first
        for successes, tries in zip(self.successes, self.tries, strict=True):
            share = (self.WEIGHT * share + successes) / (self.WEIGHT + tries)
            found.append(share)
        return found


def best_length(
    kept: Sequence[float], offered: Sequence[float], draft_seconds: float, pass_seconds: Callable[[int], float]
) -> int:
    """The `g` in 0..longest with the most expected tokens a second, the smallest of equal ones; see `Fastest`.

    Args:
        kept: `s_j` for `j` = 1..longest.
        offered: `o_j` for the same.
        draft_seconds: `d`.
        pass_seconds: `t`.

    >>> best_length([0.8] * 12, [1.0] * 12, draft_seconds=0.1, pass_seconds=lambda n: 1.0)
    6
    >>> best_length([0.3] * 12, [1.0] * 12, draft_seconds=0.5, pass_seconds=lambda n: 1.0)
    0
    """
    survival, tokens, seconds = 1.0, 1.0, pass_seconds(1)
    best, fastest = 0, tokens / seconds
    for g, (s, o) in enumerate(zip(kept, offered, strict=True), 1):
        survival *= s
        tokens += survival
        seconds += o * (draft_seconds + pass_seconds(g + 1) - pass_seconds(g))
        if tokens / seconds > fastest:
            best, fastest = g, tokens / seconds
    return best


def pass_seconds(timed: Mapping[int, Sequence[float]]) -> Callable[[int], float]:
    """`t(n)` from timings of passes over `n` positions: a fitted line, averaged with the timings at `n` itself.

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


def check_gamma(value: Any, name: str = "gamma") -> int:
    """A draft length as an int; refuses anything but a whole number of at least 1."""
    return whole(name, value, 1, "use generate_plain to decode without drafts")


def as_policy(gamma: Any) -> DraftLengthPolicy:
    """A number as the constant policy; a policy as it is.

    Raises:
        SpecdecError: for anything else, such as a class or a drafter.
    """
    if isinstance(gamma, DraftLengthPolicy):
        return gamma
    if isinstance(gamma, type):
        raise SpecdecError(f"gamma is the class {gamma.__name__}: make one of it, {gamma.__name__}()")
    if isinstance(gamma, Drafter):
        raise SpecdecError(
            f"gamma is a drafter, {type(gamma).__name__}: give it as the pair's draft, and a number or a "
            "DraftLengthPolicy as gamma"
        )
    return Constant(check_gamma(gamma))
