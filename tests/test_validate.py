"""Numbers as people have them."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from specdec_lib.errors import SpecdecError
from specdec_lib.validate import flag, number, seed, share, shown, whole

WHOLE = [3, np.int64(3), np.int32(3), np.uint8(3), np.array(3), torch.tensor(3)]
NUMBERS = [0.5, np.float32(0.5), np.float64(0.5), np.array(0.5), torch.tensor(0.5), Fraction(1, 2)]
NO_NUMBERS = [
    True,
    np.True_,
    torch.tensor(True),
    None,
    "3",
    [3],
    np.array([3]),
    torch.tensor([3]),
    3j,
    int,
    float("nan"),
]


@pytest.mark.parametrize("value", WHOLE)
def test_whole_numbers_of_every_library_become_an_int(value):
    assert type(whole("n", value)) is int and whole("n", value) == 3
    assert type(number("n", value)) is float
    assert seed(value) == 3


@pytest.mark.parametrize("value", NUMBERS)
def test_numbers_of_every_library_become_a_float(value):
    assert type(number("x", value)) is float and number("x", value) == 0.5 == share("x", value)
    with pytest.raises(SpecdecError, match="x must be a whole number >= 0, got"):
        whole("x", value)


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_what_is_no_number_is_refused_in_one_line(value):
    for check in (whole, number, share):
        with pytest.raises(SpecdecError, match=r"^x must .*, got ") as caught:
            check("x", value)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 160


@pytest.mark.parametrize("value", [2, np.int64(2), float("inf"), -1])
def test_bounds(value):
    with pytest.raises(SpecdecError, match=r"x must lie in \[0, 2\), got .*: try 1$"):
        number("x", value, 0, 2, open_high=True, remedy="try 1")
    assert number("x", 0, 0, 2) == 0 and number("x", 2, 0, 2) == 2
    with pytest.raises(SpecdecError, match="x must be a finite number, got inf"):
        number("x", float("inf"))
    with pytest.raises(SpecdecError, match="n must be a whole number >= 1, got 0: more"):
        whole("n", np.int64(0), 1, "more")


def test_flags():
    assert flag("f", np.True_) is True and flag("f", torch.tensor(False)) is False
    for value in (1, 0, None, "yes", np.int64(1)):
        with pytest.raises(SpecdecError, match="f must be True or False, got"):
            flag("f", value)


def test_a_value_is_shown_in_one_short_line():
    assert shown("x" * 100) == "a str" and shown(np.zeros((2, 3))) == "a ndarray of shape (2, 3)"
    assert (
        shown(np.int64(3)) == "3"
        and shown(torch.nn.Linear(1, 1)) == "a Linear"
        and shown(Fraction) == "the class Fraction"
    )
