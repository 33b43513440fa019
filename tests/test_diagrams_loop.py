"""The pictures of chapters 02 and 03 can be read, whatever the round did."""

import pytest

from specdec_lib.exact import constant_model, fractions
from specdec_lib.report.diagrams import faults
from specdec_lib.report.diagrams.loop import one_round, rollback, round_tree, scoring

DRAFT = [" understanding", "\n", "$5"]


@pytest.mark.parametrize("kept", range(4))
def test_a_round_and_its_rollback_are_legible(kept):
    assert faults(one_round(DRAFT, [0.5, 1.0, 0.25], kept, " more")) == []
    assert faults(rollback(["a", " b", "c"], DRAFT, kept, " more")) == []


@pytest.mark.parametrize("wrong", range(4))
def test_a_pass_over_a_guess_is_legible(wrong):
    best = [*DRAFT[:wrong], " no", *DRAFT[wrong + 1 :], " end"][:4]
    assert faults(scoring(["a", "b", "c", "d"], DRAFT, best)) == []


def test_the_tree_of_a_round_has_the_probabilities_that_add_up_to_p():
    from matplotlib.text import Text

    p, q = constant_model(fractions("1/2", "1/3", "1/6")), constant_model(fractions("1/6", "1/3", "1/2"))
    tree = round_tree(p, q, "abc")
    texts = [text.get_text() for text in tree.findobj(Text)]
    assert faults(tree) == []
    assert any(t.startswith("a: 1/6, then") for t in texts) and any(t.startswith("a: 1/3 from max") for t in texts)
