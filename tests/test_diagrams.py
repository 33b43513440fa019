"""Schematics: a figure each, legible, and the numbers in it are those of the verify functions."""

import matplotlib

matplotlib.use("agg")
import pytest
from matplotlib.figure import Figure

from specdec_lib.report import use_style
from specdec_lib.report.diagrams import Canvas, faults


@pytest.fixture(autouse=True)
def one_look():
    with matplotlib.rc_context():
        use_style()
        yield


def words(figure):
    """Every text of a figure."""
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_text()]


def test_a_card_has_boxes_arrows_and_brackets():
    card = Canvas(6.4, 2.0, "A title that is a sentence.")
    boxes = card.row(["a", "brown", "c"], 0.4, 1.0, ["accepted", "refused", "bonus"])
    card.bracket(boxes[0].left, boxes[1].right, 0.75, "two tokens")
    card.arrow(boxes[2].east, (4, 1.0), "next")
    assert isinstance(card.figure, Figure)
    assert boxes[0].right < boxes[1].left < boxes[1].right < boxes[2].left
    assert boxes[0].width < boxes[1].width
    assert faults(card.figure) == []


def test_texts_that_overlap_or_leave_the_card_are_seen():
    card = Canvas(3.0, 1.0, "Short.")
    card.label(1.0, 0.3, "one text")
    card.label(1.1, 0.32, "another text")
    card.label(2.9, 0.6, "too far to the right")
    assert faults(card.figure) == ["'too far to the right' leaves the figure", "'one text' overlaps 'another text'"]
