"""The rules themselves: one set of functions for three kinds of numbers, and the law of each rule in closed form."""

import itertools
import math
from fractions import Fraction as F
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec_lib.distributions import keep_top_k, minimum, one_hot, overlap, positive_part, temper, total_variation
from specdec_lib.errors import SpecdecError
from specdec_lib.exact import (
    TabularModel,
    accepted_law,
    constant_model,
    distance,
    fractions,
    output_law,
    random_model,
    random_pair,
    target_law,
)
from specdec_lib.studies.kill import P, Q
from specdec_lib.verify import VERIFIERS, get_verifier
from specdec_lib.verify.lossy import BONUSES, RESIDUALS, ensemble, lenience, lenience_greedy, threshold, typical
from specdec_lib.verify.multidraft import DRAWS, TreeVerifier, accepted, correction, recursive, top_k

quick = partial(settings, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
seeds = st.integers(0, 10_000)
kinds_of_zeros = st.booleans()


def laws(rows, vocabulary, seed, zeros):
    """`rows` random laws as an object array of fractions."""
    model = random_model(vocabulary, seed, zeros=zeros)
    return np.stack([model.law((i % vocabulary,) * (i // vocabulary + 1)) for i in range(rows)])


def one_token_law(rule, p, q):
    """The exact law of the first token written from one draft token, as an array."""
    law = output_law(rule, constant_model(p), constant_model(q), 1, 1).sequences
    return np.array([law.get((x,), F(0)) for x in range(len(p))], dtype=object)


def all_rules(exact):
    number = F if exact else float
    return [
        *VERIFIERS.values(),
        *(lenience(number(F(1, 2)), residual_of) for residual_of in RESIDUALS),
        *(ensemble(number(F(3, 4)), bonus) for bonus in BONUSES),
        lenience_greedy(number(F(1, 2))),
        typical(),
    ]


def lossy_rules():
    return [
        *(lenience(level, residual_of) for level in (F(1), F(1, 3)) for residual_of in RESIDUALS),
        *(ensemble(w, bonus) for w in (F(0), F(3, 4)) for bonus in ("mixture", "target")),
        lenience_greedy(F(1, 2)),
        typical(),
    ]


# -- one set of functions ------------------------------------------------------------------------------


@quick(max_examples=40)
@given(seeds, st.integers(2, 5), st.integers(0, 4), kinds_of_zeros)
def test_fractions_numpy_and_torch_agree(seed, vocabulary, gamma, zeros):
    p, q = laws(gamma + 1, vocabulary, seed, zeros), laws(gamma + 1, vocabulary, seed + 1, zeros)
    x = [int(np.flatnonzero(row)[seed % np.count_nonzero(row)]) for row in q[:gamma]]
    for exact, fast in zip(all_rules(True), all_rules(False), strict=True):
        expected = exact.accepted(p, q, x)
        assert sum(expected) == 1 and all(chance >= 0 for chance in expected)
        chances = [float(chance) for chance in expected]
        for convert in (np.asarray, torch.tensor):
            as_floats = [convert(a.astype(float)) for a in (p, q)]
            # a rule for devices takes tensors and gives tensors; every rule takes a list and a number
            on_device = convert is torch.tensor and fast.on_device
            whole = torch.tensor if on_device else lambda value: value
            got = fast.accepted(*as_floats, torch.tensor(x, dtype=torch.long) if on_device else x)
            assert torch.is_tensor(got) if on_device else torch.is_tensor(got) or {*map(type, got)} <= {int, float}
            assert list(map(float, got)) == pytest.approx(chances, abs=1e-12)
            assert list(map(float, fast.accepted(*as_floats, x))) == pytest.approx(chances, abs=1e-12)
            for n, chance in enumerate(expected):
                if chance > 0:
                    law = fast.correction(*as_floats, whole(x), whole(n))
                    assert type(law) is type(as_floats[0])
                    reference = exact.correction(p, q, x, n)
                    assert sum(reference) == 1
                    assert law.tolist() == pytest.approx(reference.astype(float).tolist(), abs=1e-12)
                    assert fast.correction(*as_floats, x, n).tolist() == pytest.approx(law.tolist(), abs=1e-12)


@quick(max_examples=20)
@given(seeds, st.integers(2, 5), kinds_of_zeros)
def test_candidates_agree_over_the_three_kinds(seed, vocabulary, zeros):
    p, q = laws(1, vocabulary, seed, zeros)[0], laws(1, vocabulary, seed + 1, zeros)[0]
    for draw in (*DRAWS.values(), top_k):
        for _, candidates, reported in draw(q, 2):
            expected = accepted(p, reported, candidates)
            assert sum(expected) == 1
            for convert in (np.asarray, torch.tensor):
                as_floats = [convert(a.astype(float)) for a in (p, reported)]
                assert accepted(*as_floats, candidates) == pytest.approx([float(a) for a in expected], abs=1e-12)
                if expected[-1] > 0:
                    law = correction(*as_floats, candidates).tolist()
                    exact = correction(p, reported, candidates).astype(float).tolist()
                    assert law == pytest.approx(exact, abs=1e-12)


def test_float32_tensors_are_served_as_well():
    p, q = (torch.tensor(laws(3, 4, seed, False).astype(float), dtype=torch.float32) for seed in (1, 2))
    for rule in all_rules(False):
        assert float(sum(rule.accepted(p, q, [1, 2]))) == pytest.approx(1, abs=1e-6)
        assert all(rule.correction(p, q, [1, 2], n).dtype == torch.float32 for n in range(3))


def test_registry():
    assert [v.name for v in VERIFIERS.values() if v.lossless] == ["token", "block", "greedy"]
    with pytest.raises(SpecdecError, match="unknown verifier 'blok': use one of token, block, greedy"):
        get_verifier("blok")


def test_token_rule_under_point_masses_is_greedy():
    for seed in range(30):
        p, q = laws(4, 3, seed, False), laws(3, 3, seed + 100, False)
        x = q.argmax(-1).tolist()
        cold = temper(p, 0), temper(q, 0)
        greedy, by_token = VERIFIERS["greedy"], VERIFIERS["token"]
        assert greedy.accepted(p, q, x) == by_token.accepted(*cold, x)
        n = greedy.accepted(p, q, x).index(1)
        assert (greedy.correction(p, q, x, n) == by_token.correction(*cold, x, n)).all()


def test_a_token_the_draft_says_it_cannot_draw_is_never_accepted():
    p, q = np.array([fractions("1/2", "1/2")] * 3), np.array([fractions("0", "1")] * 2)
    for rule in (VERIFIERS["token"], VERIFIERS["block"]):
        assert rule.accepted(p, q, [0, 1]) == [1, 0, 0]


# -- lossy rules, each with its law --------------------------------------------------------------------


@quick(max_examples=40)
@given(seeds, st.integers(2, 4), st.sampled_from([F(1, 10), F(1, 3), F(3, 4), F(1)]), st.sampled_from(RESIDUALS))
def test_lenience_has_its_stated_law_and_respects_the_bound(seed, vocabulary, l, residual_of):  # noqa: E741
    """Kept mass min(q, p/l); the rest goes where the residual says; nothing exceeds p/l (appendix A.5)."""
    p, q = laws(1, vocabulary, seed, True)[0], laws(1, vocabulary, seed + 1, True)[0]
    kept = minimum(q, p / l)
    scale = l if residual_of == "p-lq" else 1
    excess = positive_part(p - scale * q)
    share = excess / excess.sum() if excess.sum() > 0 else p
    law = one_token_law(lenience(l, residual_of), p, q)
    assert (law == kept + (1 - kept.sum()) * share).all()
    assert (law <= p / l).all()
    assert accepted_law(lenience(l, residual_of), constant_model(p), constant_model(q), 1)[1] == kept.sum()


def test_the_two_readings_of_lenience_differ_and_both_keep_the_bound_on_sequences():
    target, draft = random_pair("stochastic", 3, 2)
    half = F(1, 2)
    written = {r: output_law(lenience(half, r), target, draft, 2, 4).sequences for r in RESIDUALS}
    assert distance(*written.values()) > F(1, 100)
    plain = target_law(target, 4)
    for law in written.values():
        assert distance(law, plain) > F(1, 20)
        assert all(law.get(s, 0) <= plain[s] / half**4 for s in plain)
    exact = output_law(lenience(F(1)), target, draft, 2, 4).sequences
    assert distance(exact, plain) == 0


def test_the_printed_greedy_lenience_rule_would_accept_everything():
    """`p(x) <= l max p` holds for every token at l = 1, where the paper's table has alpha = 0.75."""
    p = laws(2, 4, 0, False)
    assert all(p_x <= 1 * max(p[0]) for p_x in p[0])
    kept = [lenience_greedy(F(1)).accepted(p, p, [x])[1] for x in range(4)]
    assert kept == [int(x == p[0].argmax()) for x in range(4)]
    ties = fractions("2/5", "2/5", "1/5")[None]  # greedy decoding writes the first of them, and no other is kept
    assert [lenience_greedy(F(1)).accepted(ties, ties, [x])[1] for x in range(3)] == [1, 0, 0]
    looser = [lenience_greedy(F(1, 100)).accepted(p, p, [x])[1] for x in range(4)]
    assert looser == [1, 1, 1, 1]


@quick(max_examples=60)
@given(seeds, st.integers(2, 4), kinds_of_zeros)
def test_the_stated_law_of_a_position_is_the_law_that_is_written(seed, vocabulary, zeros):
    """`law` and `acceptance` are computed from two vectors; here every draft token and every coin is summed."""
    p, q = laws(1, vocabulary, seed, zeros)[0], laws(1, vocabulary, seed + 1, zeros)[0]
    for rule in lossy_rules():
        assert (rule.law(p, q) == one_token_law(rule, p, q)).all()
        assert rule.acceptance(p, q) == accepted_law(rule, constant_model(p), constant_model(q), 1)[1]
        assert sum(rule.law(p, q)) == 1


@quick(max_examples=60)
@given(seeds, st.integers(2, 4), kinds_of_zeros)
def test_no_rule_gains_more_acceptance_than_it_pays_in_total_variation(seed, vocabulary, zeros):
    p, q = laws(1, vocabulary, seed, zeros)[0], laws(1, vocabulary, seed + 1, zeros)[0]
    for rule in lossy_rules():
        gain, price = rule.acceptance(p, q) - overlap(p, q), total_variation(rule.law(p, q), p)
        assert gain <= price
        if rule.name.startswith("ensemble") or rule.name.endswith("p-q)"):
            assert gain == price


def test_the_other_residual_and_typical_acceptance_pay_more_than_they_gain():
    p, q = fractions("1/2", "1/3", "7/60", "1/20"), fractions("1/20", "1/3", "7/60", "1/2")
    for rule in (lenience(F(1, 2), "p-lq"), typical()):
        assert rule.acceptance(p, q) - overlap(p, q) < total_variation(rule.law(p, q), p)


def mixture(target, draft, w):
    return TabularModel(target.vocabulary, lambda s: w * target.law(s) + (1 - w) * draft.law(s), target.end)


@quick(max_examples=25)
@given(seeds, st.sampled_from([F(0), F(1, 2), F(9, 10), F(1)]), st.integers(1, 3), st.sampled_from([None, 0]))
def test_ensemble_with_its_bonus_from_the_mixture_writes_the_mixture(seed, w, gamma, end):
    target, draft = random_pair("partial", 3, seed, end)
    law = output_law(ensemble(w), target, draft, gamma, 3).sequences
    assert distance(law, target_law(mixture(target, draft, w), 3)) == 0


def test_ensemble_with_its_bonus_from_the_target_writes_neither_and_depends_on_gamma():
    target, draft = random_pair("stochastic", 3, 1)
    w = F(1, 2)
    written = {gamma: output_law(ensemble(w, "target"), target, draft, gamma, 3).sequences for gamma in (1, 2, 3)}
    for gamma in (1, 2):
        assert distance(written[gamma], target_law(target, 3)) > F(1, 20)
        assert distance(written[gamma], target_law(mixture(target, draft, w), 3)) > F(1, 50)
    assert distance(written[1], written[2]) > F(1, 100)
    # three drafted positions and three tokens: no bonus token is ever used
    assert distance(written[3], target_law(mixture(target, draft, w), 3)) == 0


def test_ensemble_at_the_published_laws():
    """TV(v, p) = (1 - w) TV(p, q): 0.0159 and 0.0793."""
    for w, printed in ((F(9, 10), 0.0159), (F(1, 2), 0.0793)):
        law = one_token_law(ensemble(w), P, Q)
        assert (law == w * P + (1 - w) * Q).all()
        assert total_variation(law, P) == (1 - w) * total_variation(P, Q)
        assert float(total_variation(law, P)) == pytest.approx(printed, abs=5e-5)


@quick(max_examples=15)
@given(seeds, st.sampled_from([F(0), F(1, 2), F(1)]), st.integers(1, 3), st.sampled_from([None, 0]))
def test_ensemble_without_a_bonus_writes_the_mixture_too(seed, w, gamma, end):
    """With an end token drafts vary in length: a last token that were set aside unread would bias the law."""
    target, draft = random_pair("partial", 3, seed, end)
    mixed = mixture(target, draft, w)
    law = output_law(ensemble(w, "none"), target, draft, gamma, 3)
    assert distance(law.sequences, target_law(mixed, 3)) == 0
    assert law.histogram[gamma] == 0  # a kept last token counts as the one that follows
    # drafts cut to what can be used: nothing is drafted for the last token, and it is the target's
    capped = output_law(ensemble(w, "none"), target, draft, gamma, 3, cap=True).sequences
    last_from_target = TabularModel(3, lambda s: (target if len(s) == 2 else mixed).law(s), end)
    assert distance(capped, target_law(last_from_target, 3)) == 0


def test_ensemble_needs_the_next_draft_law_for_its_bonus():
    p, q = laws(2, 3, 0, False), laws(1, 3, 1, False)
    with pytest.raises(SpecdecError, match="g \\+ 1 rows"):
        ensemble(F(1, 2)).correction(p, q, [0], 1)
    assert sum(ensemble(F(1, 2), "none").correction(p, q, [0], 0)) == 1


@quick(max_examples=25)
@given(seeds, st.integers(2, 4))
def test_typical_acceptance_writes_the_drafts_typical_tokens(seed, vocabulary):
    p, q = laws(1, vocabulary, seed, True)[0], laws(1, vocabulary, seed + 1, True)[0]
    entropy = -sum(float(x) * math.log(x) for x in p if x > 0)
    assert threshold(p, 0.09, 0.3) == pytest.approx(min(0.09, 0.3 * math.exp(-entropy)), rel=1e-12)
    is_typical = np.array([int(x > min(0.09, 0.3 * math.exp(-entropy))) for x in p])
    expected = q * is_typical + one_hot(p.argmax(), p) * (q * (1 - is_typical)).sum()
    assert (one_token_law(typical(), p, q) == expected).all()


def test_typical_acceptance_follows_the_draft_not_the_target():
    p = fractions("1/2", "1/2")
    for q in (fractions("1/10", "9/10"), fractions("9/10", "1/10")):
        assert (one_token_law(typical(), p, q) == q).all()


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: lenience(0), "lenience must be in"),
        (lambda: lenience(1.5), "lenience must be in"),
        (lambda: lenience(0.5, "q"), "unknown residual 'q'"),
        (lambda: lenience_greedy(0), "lenience must be in"),
        (lambda: ensemble(-0.1), "ensemble weight"),
        (lambda: ensemble(float("nan")), "ensemble weight"),
        (lambda: ensemble(0.5, "draft"), "unknown bonus 'draft'"),
        (lambda: typical(0), "needs epsilon in"),
        (lambda: typical(0.1, float("nan")), "delta > 0"),
        (lambda: recursive(0), "at least one child"),
        (lambda: recursive(2, "beams"), "unknown way to draw"),
    ],
)
def test_bad_parameters_are_named(make, complaint):
    with pytest.raises(SpecdecError, match=complaint):
        make()


# -- several candidates --------------------------------------------------------------------------------


@quick(max_examples=25)
@given(seeds, st.integers(2, 4), st.integers(1, 3), kinds_of_zeros)
def test_draws_are_laws_and_say_what_they_did(seed, vocabulary, k, zeros):
    q = laws(1, vocabulary, seed, zeros)[0]
    for draw in DRAWS.values():
        first = dict.fromkeys(range(vocabulary), F(0))
        total = F(0)
        for weight, candidates, reported in draw(q, k):
            total += weight
            first[candidates[0]] += weight
            assert reported.shape == (len(candidates), vocabulary) and (reported.sum(-1) == 1).all()
            assert weight == math.prod(reported[i, x] for i, x in enumerate(candidates))
        assert total == 1
        if draw is not DRAWS["point_masses"]:
            assert list(first.values()) == q.tolist()
    assert all(len(set(c)) == len(c) for _, c, _ in DRAWS["without_replacement"](q, k))


@quick(max_examples=25)
@given(seeds, st.integers(2, 4), kinds_of_zeros)
def test_one_child_is_the_token_rule_and_more_children_never_accept_less(seed, vocabulary, zeros):
    p, q = laws(1, vocabulary, seed, zeros)[0], laws(1, vocabulary, seed + 1, zeros)[0]
    models = constant_model(p), constant_model(q)
    for draw in ("independent", "without_replacement"):
        rates = [accepted_law(recursive(k, draw), *models, 1)[1] for k in (1, 2, 3)]
        assert rates[0] == overlap(p, q) and rates == sorted(rates)


def test_deterministic_children_scored_by_the_softmax_are_wrong_and_as_point_masses_right():
    by_softmax = TreeVerifier("top-k", 1, top_k, accepted, correction, False, "")
    assert one_token_law(by_softmax, P, Q).tolist() == [F(31, 32), 0, F(1, 32), 0]
    assert float(total_variation(one_token_law(by_softmax, P, Q), P)) == pytest.approx(0.719, abs=5e-4)
    two = TreeVerifier("top-k", 2, top_k, accepted, correction, False, "")
    assert total_variation(one_token_law(two, P, Q), P) > F(1, 2)
    assert (one_token_law(recursive(2, "point_masses"), P, Q) == P).all()


def test_top_k_takes_the_first_of_equal_tokens():
    assert [c for _, c, _ in top_k(Q, 2)] == [(0, 1)]
    assert (keep_top_k(Q, 2) > 0).sum() == 3  # the filter keeps ties, the children cannot


def test_a_sequence_by_hand():
    """p = (1/2, 1/2), q = (1/4, 3/4), x = (1, 0): coverage 1, 2/3, 1."""
    p, q = np.array([fractions("1/2", "1/2")] * 3), np.array([fractions("1/4", "3/4")] * 2)
    by_token = VERIFIERS["token"].accepted(p, q, [1, 0])
    assert by_token == [F(1, 3), 0, F(2, 3)]
    # h_2 = c_2 = 1: the whole block is kept although its first token alone would fail with probability 1/3
    assert VERIFIERS["block"].accepted(p, q, [1, 0]) == [0, 0, 1]
    # x = (1, 1): c = 1, 2/3, 4/9; h_1 = (1/3 - 1/4) / (1/12 + 1/3) = 1/5
    assert VERIFIERS["block"].accepted(p, q, [1, 1]) == [F(5, 9) * F(4, 5), F(5, 9) * F(1, 5), F(4, 9)]
    assert VERIFIERS["block"].correction(p, q, [1, 1], 1).tolist() == [1, 0]


def test_every_rule_is_a_law_on_every_draft():
    p, q = laws(3, 3, 7, True), laws(3, 3, 8, True)
    for x in itertools.product(range(3), repeat=2):
        for rule in all_rules(True):
            assert sum(rule.accepted(p, q, list(x))) == 1


def test_the_correction_by_hand():
    """p = (1/2, 3/10, 1/5), q = (1/5, 3/5, 1/5): only the first token was drafted too seldom; a bonus comes from p."""
    p, q = np.array([[F(1, 2), F(3, 10), F(1, 5)]] * 2), np.array([[F(1, 5), F(3, 5), F(1, 5)]])
    assert VERIFIERS["token"].correction(p, q, [1], 0).tolist() == [1, 0, 0]
    assert VERIFIERS["token"].correction(p, q, [1], 1).tolist() == p[1].tolist()
