"""The figures of checks say what their data say: each cell, each line, each verdict."""

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from specdec_lib.audit.audit import audit
from specdec_lib.audit.gof import noise
from specdec_lib.studies.checks import MISSED, Row, by_survival, draw_audits, draw_kills

MATRIX = pd.DataFrame(
    {
        "exact": [False, True, True, True],
        "greedy": [False, True, False, False],
        "variation": [0.0, 0.2, 0.3, 0.001],
    },
    index=["correct", "loud", "large", "tiny"],
)
CHECKS = {"exact": "exact law", "greedy": "greedy text"}


@pytest.fixture
def axes():
    fig, axes = plt.subplots()
    yield axes
    plt.close(fig)


def test_survivors_come_first_and_small_ones_before_large():
    assert by_survival(MATRIX, list(CHECKS), controls=1) == ["tiny", "large", "loud", "correct"]


def test_every_cell_of_the_kill_matrix_says_what_happened(axes):
    draw_kills(axes, MATRIX, CHECKS, controls=1)
    assert [t.get_text() for t in axes.get_yticklabels()] == ["tiny", "large", "loud", "correct"]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["exact law\n3 of 3", "greedy text\n1 of 3"]
    words = {tuple(int(v) for v in t.get_position()): t.get_text() for t in axes.texts}  # the middle of a cell is at .5
    assert words == {
        (0, 0): "0.001", (1, 0): "missed", (0, 1): "0.3", (1, 1): "missed", (0, 2): "0.2", (1, 2): "", (0, 3): "0",
        (1, 3): "",
    }  # fmt: skip
    colours = axes.collections[0].get_facecolors()
    missed = [i for i, colour in enumerate(colours) if matplotlib.colors.same_color(colour, MISSED)]
    assert missed == [1, 3]  # cells row by row


def test_a_false_alarm_of_a_correct_rule_shows(axes):
    wrong = MATRIX.copy()
    wrong.loc["correct", "greedy"] = True
    draw_kills(axes, wrong, CHECKS, controls=1)
    assert "false alarm" in [t.get_text() for t in axes.texts]


def test_audits_show_estimate_bound_and_verdict(axes):
    def sampler(n, seed):
        return np.random.default_rng(seed).integers(0, 4, n)

    right = audit(sampler, [0.25] * 4, effect=0.1)
    wrong = audit(sampler, [0.4, 0.2, 0.2, 0.2], effect=0.1)
    rows = [Row(name, v, noise([0.25] * 4, v.samples)) for name, v in (("right", right), ("wrong", wrong))]
    draw_audits(axes, rows)
    assert [t.get_text() for t in axes.get_yticklabels()] == ["right", "wrong"]
    verdicts = [t.get_text() for t in axes.texts]
    assert verdicts[0].startswith("no deviation found") and verdicts[1].startswith("deviation found")
    ends = [tuple(line.get_xdata()) for line in axes.lines]
    assert (right.variation, right.bound) in ends and (wrong.effect, wrong.effect) in ends
    assert rows[0].noise[0] <= right.variation <= rows[0].noise[1] < wrong.variation
