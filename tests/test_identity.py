"""Greedy identity and its classification: a gate in float32, a rate below it, and a fault is never called rounding."""

import pytest
import torch

import specdec_lib as sd
from specdec_lib.audit.identity import TIE, compare, greedy_identity, rounding
from specdec_lib.models.pair import load_model
from specdec_lib.models.session import open_session
from specdec_lib.verify import VERIFIERS, Verifier

PROMPTS = [[5, 9, 17, 3], [30, 8], [12], [7, 7, 7, 21, 40]]


@pytest.fixture(scope="module")
def tiny(tiny_folder):
    """`tiny(dtype) -> Pair` of two random models."""
    return lambda dtype: sd.Pair(
        *(load_model(tiny_folder("llama", seed), device="cpu", dtype=dtype) for seed in (0, 1))
    )


def logits_after(model, ids):
    return open_session(model).feed(torch.tensor([ids]))[0, -1].double()


# -- one parting ---------------------------------------------------------------------------------------


def test_the_same_text_has_no_difference(tiny):
    assert compare(tiny("float32").target, [1, 2], [3, 4], [3, 4]) is None


def test_a_parting_is_classified_by_the_gap_of_the_two_tokens(tiny):
    target = tiny("float32").target
    logits = logits_after(target, [5, 9, 17])
    best, second = logits.topk(2).indices.tolist()
    gap = float(logits[best] - logits[second])
    for tolerance, tie in ((0.9 * gap, False), (1.1 * gap, True)):
        found = compare(target, [5, 9], [17, best, 4], [17, second, 4], tolerance)
        assert (found.position, found.tokens, found.tie) == (1, (best, second), tie)
        assert found.gap == pytest.approx(gap, abs=1e-5)


def test_two_tokens_that_tie_far_below_the_best_are_no_tie(tiny):
    """Equal logits do not excuse a token that the target would never have written."""
    target = tiny("float32").target
    worst = logits_after(target, [5, 9]).argsort()[:2].tolist()
    gap = compare(target, [5, 9], [worst[0]], [worst[1]]).gap
    assert not compare(target, [5, 9], [worst[0]], [worst[1]], tolerance=2 * gap).tie


def test_a_text_that_ended_early_is_a_difference(tiny):
    found = compare(tiny("float32").target, [1, 2], [3, 4], [3])
    assert (found.position, found.tokens, found.tie) == (1, (4, None), False)


# -- many texts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [1, 4])
def test_in_float32_nothing_parts_but_at_a_tie(tiny, gamma):
    pair = tiny("float32")
    for draft in (pair.draft, pair.target):
        found = greedy_identity(sd.Pair(pair.target, draft), PROMPTS, gamma=gamma, max_new_tokens=24)
        assert found.different == 0 and found.texts == 4
        assert found.tolerance < 5 * TIE
        assert found.identical + found.ties == 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_is_counted_and_its_tolerance_measured(tiny, dtype):
    pair = tiny(dtype)
    control = greedy_identity(sd.Pair(pair.target, pair.target), PROMPTS, max_new_tokens=24)
    assert control.identical + control.ties + control.different == control.texts == 4
    assert control.match_rate == control.identical / 4
    assert control.tokens == sum(d.position for d in control.differences) + 24 * control.identical
    assert control.different == 0


def test_rounding_is_coarser_in_low_precision(tiny):
    moved = {dtype: rounding(tiny(dtype).target, PROMPTS[0], list(range(3, 40))) for dtype in ("float32", "bfloat16")}
    assert moved["float32"] < 1e-3 < moved["bfloat16"] < 1


def test_a_faulty_rule_is_found_and_not_called_a_tie(tiny):
    token = VERIFIERS["token"]
    accepts_all = Verifier("mutant", lambda p, q, x: [0] * len(x) + [1], token.correction, False, "")
    for dtype in ("float32", "bfloat16"):
        found = greedy_identity(tiny(dtype), PROMPTS, gamma=3, max_new_tokens=12, verifier=accepts_all)
        assert found.different > 0 and found.match_rate < 1


def test_plain_texts_may_be_given(tiny):
    pair = tiny("float32")
    plain = sd.generate_plain(pair, PROMPTS, max_new_tokens=12).tokens
    known = {"max_new_tokens": 12, "plain": plain}
    assert greedy_identity(pair, PROMPTS, **known) == greedy_identity(pair, PROMPTS, max_new_tokens=12)
    plain[2][5] = (plain[2][5] + 1) % 46
    (found,) = greedy_identity(pair, PROMPTS, **known).differences
    assert (found.position, found.tie) == (5, False)
    with pytest.raises(sd.SpecdecError, match="3 plain texts for 4 prompts"):
        greedy_identity(pair, PROMPTS, max_new_tokens=12, plain=plain[:3])


def test_nothing_to_compare_is_refused(tiny):
    with pytest.raises(sd.SpecdecError, match="at least one token"):
        greedy_identity(tiny("float32"), PROMPTS, max_new_tokens=0)
    with pytest.raises(sd.SpecdecError, match="no prompt"):
        greedy_identity(tiny("float32"), [])
