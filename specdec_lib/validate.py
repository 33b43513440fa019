"""The one place that checks numbers: what counts as one, and what is said of what does not.

Python's numbers, numpy's scalars and 0-d arrays, and torch's 0-d tensors count alike where a number is meant; a bool
never does.  Each check returns Python's own kind, so that nothing behind it meets another.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from numbers import Integral, Real
from typing import Any

from .errors import SpecdecError

SHOWN = 60  # characters of a value that a message shows


def whole(name: str, value: Any, least: int = 0, remedy: str = "") -> int:
    """`value` as an int of at least `least`; raises `SpecdecError`.

    >>> import numpy, torch
    >>> whole("gamma", numpy.int64(3), least=1), whole("gamma", torch.tensor(4))
    (3, 4)
    >>> whole("gamma", 2.0, least=1, remedy="leave it out for 5")
    Traceback (most recent call last):
    specdec_lib.errors.SpecdecError: gamma must be a whole number >= 1, got 2.0: leave it out for 5
    """
    plain = unwrapped(value)
    if isinstance(plain, bool) or not isinstance(plain, Integral) or plain < least:
        raise refused(name, f"be a whole number >= {least}", value, remedy)
    return int(plain)


def number(
    name: str,
    value: Any,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    open_low: bool = False,
    open_high: bool = False,
    remedy: str = "",
) -> float:
    """`value` as a finite float between `low` and `high`, which are included unless they are open.

    Raises `SpecdecError`.

    >>> import fractions, numpy
    >>> number("temperature", numpy.float32(0.5), low=0), number("rate", fractions.Fraction(1, 4))
    (0.5, 0.25)
    >>> number("top_p", "0.9", low=0, high=1, open_low=True)
    Traceback (most recent call last):
    specdec_lib.errors.SpecdecError: top_p must lie in (0, 1], got '0.9'
    """
    plain: Any = unwrapped(value)
    real = not isinstance(plain, bool) and isinstance(plain, Real)
    fits = real and low <= float(plain) <= high
    if not fits or math.isinf(plain) or (open_low and plain == low) or (open_high and plain == high):
        raise refused(name, interval(low, high, open_low, open_high), value, remedy)
    return float(plain)


def share(name: str, value: Any, remedy: str = "") -> float:
    """A level, power or effect: a float strictly between 0 and 1; raises `SpecdecError`.

    >>> share("level", 1)
    Traceback (most recent call last):
    specdec_lib.errors.SpecdecError: level must lie strictly between 0 and 1, got 1
    """
    return number(name, value, 0, 1, open_low=True, open_high=True, remedy=remedy)


def flag(name: str, value: Any, remedy: str = "") -> bool:
    """`value` as a bool, numpy's and torch's included; a number is none.  Raises `SpecdecError`.

    >>> flag("logprobs", 5)
    Traceback (most recent call last):
    specdec_lib.errors.SpecdecError: logprobs must be True or False, got 5
    """
    plain = unwrapped(value)
    if not isinstance(plain, bool):
        raise refused(name, "be True or False", value, remedy)
    return plain


def seed(value: Any, name: str = "seed") -> int:
    """`value` as the seed of a generator, a whole number of at least 0; raises `SpecdecError`.

    >>> seed(None)
    Traceback (most recent call last):
    specdec_lib.errors.SpecdecError: seed must be a whole number >= 0, got None: leave it out for 0
    """
    return whole(name, value, remedy="leave it out for 0")


def interval(low: float, high: float, open_low: bool, open_high: bool) -> str:
    """What a number between two bounds must do, in words.

    >>> interval(0, 1, True, False), interval(0, math.inf, True, False)
    ('lie in (0, 1]', 'be a number > 0')
    """
    if math.isinf(low) and math.isinf(high):
        return "be a finite number"
    if math.isinf(high):
        return f"be a number {'>' if open_low else '>='} {low:g}"
    if math.isinf(low):
        return f"be a number {'<' if open_high else '<='} {high:g}"
    if open_low and open_high:
        return f"lie strictly between {low:g} and {high:g}"
    return f"lie in {'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"


def workers(jobs: int, scheduler: str | None) -> None:
    """Refuse what the options --jobs and --scheduler cannot mean."""
    if jobs < 1:
        raise SpecdecError(f"jobs is {jobs}: run at least 1 at a time")
    if jobs > 1 and scheduler:
        raise SpecdecError("--jobs runs on this machine, --scheduler on others: use one of the two")
    if (jobs > 1 or scheduler) and find_spec("distributed") is None:
        raise SpecdecError("distributed is not installed: pip install 'specdec-lab[scale]'")


def refused(name: str, rule: str, value: Any, remedy: str = "") -> SpecdecError:
    """The error that says what an argument must do, what was given, and what to give instead."""
    return SpecdecError(f"{name} must {rule}, got {shown(value)}" + (f": {remedy}" if remedy else ""))


def unwrapped(value: Any) -> Any:
    """The Python number in a numpy scalar, a 0-d array or a 0-d tensor; anything else as it is.

    >>> import numpy
    >>> unwrapped(numpy.float64(0.5)), unwrapped([1])
    (0.5, [1])
    """
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def shown(value: Any) -> str:
    """A value for a one-line message: its text where that is short, its kind where it is not.

    >>> import torch
    >>> shown("0.9"), shown(dict), shown(torch.zeros(9, 9))
    ("'0.9'", 'the class dict', 'a Tensor of shape (9, 9)')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if getattr(value, "shape", ()):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    plain = unwrapped(value)
    text = repr(plain) if plain is None or isinstance(plain, (Real, str, bytes, list, tuple, dict, set)) else ""
    return text if text and len(text) <= SHOWN and "\n" not in text else f"a {type(value).__name__}"
