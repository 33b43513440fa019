"""The enumerator: its models, its accounting against hand-made numbers and theory, and what it proves."""

from fractions import Fraction as F
from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec_lib.distributions import overlap, temper, total_variation
from specdec_lib.errors import SpecdecError
from specdec_lib.exact import (
    KINDS,
    Draft,
    TabularModel,
    accepted_law,
    constant_model,
    distance,
    fractions,
    output_law,
    random_model,
    random_pair,
    round_law,
    target_law,
)
from specdec_lib.studies.kill import P, Q
from specdec_lib.studies.proof import LOSSLESS, prove, unlikely
from specdec_lib.verify import Verifier, token
from specdec_lib.verify.multidraft import recursive

quick = partial(settings, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
seeds = st.integers(0, 10_000)
rules = st.sampled_from([name for name in LOSSLESS if name != "greedy"])


@st.composite
def sizes(draw, most_drafts=3000):
    """Vocabulary, gamma, length up to gamma + 3 and cap, with a bound on the number of drafts to be summed."""
    vocabulary, gamma = draw(st.integers(2, 4)), draw(st.integers(1, 4))
    length, cap = draw(st.integers(1, gamma + 3)), draw(st.booleans())

    def drafts(n):
        return sum(vocabulary ** (s + (min(gamma, n - s - 1) if cap else gamma)) for s in range(n))

    while length > 1 and drafts(length) > most_drafts:
        length -= 1
    return vocabulary, gamma, length, cap


def mean(law):
    return sum(n * chance for n, chance in enumerate(law))


# -- models --------------------------------------------------------------------------------------------


def test_random_models_are_reproducible_laws_that_depend_on_the_whole_prefix():
    model, again = random_model(4, seed=3), random_model(4, seed=3)
    laws = {prefix: tuple(model.law(prefix)) for prefix in product(range(4), repeat=3)}
    assert all(sum(law) == 1 for law in laws.values())
    assert all(tuple(again.law(prefix)) == law for prefix, law in laws.items())
    assert laws[0, 1, 2] != laws[3, 1, 2]  # same last two tokens
    assert len(set(laws.values())) > 40


def test_kinds_of_pairs():
    prefixes = list(product(range(3), repeat=3))
    target, draft = random_pair("deterministic", 3, 0)
    assert all(sorted(draft.law(x)) == [0, 0, 1] for x in prefixes)
    target, draft = random_pair("identical", 3, 0)
    assert target is draft
    target, draft = random_pair("partial", 3, 1)
    shared = [overlap(target.law(x), draft.law(x)) for x in prefixes]
    assert min(shared) == 0 and 0.3 < sum(shared) / len(shared) < 0.9
    assert any((target.law(x) == 0).any() and (target.law(x) > 0).sum() > 1 for x in prefixes)
    target, draft = random_pair("stochastic", 3, 0)
    assert all((target.law(x) > 0).all() and (draft.law(x) > 0).all() for x in prefixes)


@pytest.mark.parametrize(
    ("law", "complaint"),
    [
        (fractions("1/2", "1/3"), "sum to 1, got 5/6"),
        (fractions("3/2", "-1/2"), "must not be negative"),
        (np.array([0.5, np.nan]), "must not be negative"),
        (np.array([0.2, 0.3, 0.5]), r"shape \(2,\)"),
    ],
)
def test_laws_that_are_none_are_refused(law, complaint):
    with pytest.raises(SpecdecError, match=complaint):
        TabularModel(2, lambda prefix: law).law(())


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda m: output_law("token", m, m, -1, 3), "gamma must be a whole number >= 0, got -1"),
        (lambda m: round_law("token", m, m, -1), "gamma must be a whole number >= 0, got -1"),
        (lambda m: output_law("token", m, m, 2, 0), "length must be at least 1"),
        (lambda m: output_law("token", m, random_model(3, 0), 2, 2), "share a vocabulary"),
        (lambda m: output_law("tokn", m, m, 2, 2), "unknown verifier 'tokn'"),
        (lambda m: random_model(1, 0), "at least 2 tokens"),
        (lambda m: random_pair("odd", 2, 0), "unknown kind of pair"),
    ],
)
def test_bad_input_is_named(call, complaint):
    with pytest.raises(SpecdecError, match=complaint):
        call(random_model(2, 0))


def test_a_rule_whose_probabilities_do_not_sum_to_one_is_refused():
    leaky = Verifier("leaky", token.accepted, lambda p, q, x, n: p[n] / 2, False, "")
    with pytest.raises(SpecdecError, match="'leaky' gives probabilities that sum to 1/2"):
        output_law(leaky, random_model(2, 0), random_model(2, 1), 1, 1)


# -- accounting ----------------------------------------------------------------------------------------


def test_target_law_is_the_product_and_stops_at_the_end_token():
    model = constant_model(fractions("1/4", "3/4"), end=0)
    assert target_law(model, 2) == {(0,): F(1, 4), (1, 0): F(3, 16), (1, 1): F(9, 16)}


def test_two_rounds_by_hand():
    """p = (1/3, 2/3), q = (2/3, 1/3), gamma = 1, two tokens: alpha = 2/3.

    The first round writes both with probability 2/3; else a second round is needed.
    """
    target, draft = constant_model(fractions("1/3", "2/3")), constant_model(fractions("2/3", "1/3"))
    law = output_law("token", target, draft, gamma=1, length=2)
    assert law.rounds == F(4, 3)
    assert law.histogram == [F(1, 3) * F(4, 3), F(2, 3) * F(4, 3)]
    assert law.accepted == [F(1, 3), F(2, 3)]
    assert law.tokens == 2 and law.tokens_per_pass == F(3, 2)
    capped = output_law("token", target, draft, gamma=1, length=2, cap=True)
    assert capped.histogram == [F(2, 3), F(2, 3)] and capped.sequences == law.sequences


@quick(max_examples=20)
@given(seeds, st.integers(2, 4), st.integers(0, 3))
def test_accepted_length_of_the_token_rule_is_the_capped_geometric(seed, vocabulary, gamma):
    """Leviathan et al., equation (1), with alpha = sum min(p, q) (theorem 3.5), as fractions."""
    p, q = random_model(vocabulary, seed).law(()), random_model(vocabulary, seed + 1).law(())
    alpha = overlap(p, q)
    law = accepted_law("token", constant_model(p), constant_model(q), gamma)
    assert law == [alpha**n * (1 - alpha) for n in range(gamma)] + [alpha**gamma]
    assert 1 + mean(law) == sum(alpha**n for n in range(gamma + 1))


@quick(max_examples=10)
@given(seeds, st.integers(1, 3), st.integers(1, 6))
def test_rounds_agree_with_the_recursion_of_the_runtime_analysis(seed, gamma, length):
    from specdec_lib.theory import expected_rounds

    p, q = random_model(2, seed).law(()), random_model(2, seed + 1).law(())
    law = output_law("token", constant_model(p), constant_model(q), gamma, length, cap=True)
    assert float(law.rounds) == pytest.approx(expected_rounds([float(overlap(p, q))] * gamma, length), rel=1e-12)


@quick(max_examples=15)
@given(seeds, rules, st.sampled_from(KINDS))
def test_tokens_are_accepted_tokens_and_one_a_round_less_what_was_cut(seed, rule, kind):
    target, draft = random_pair(kind, 2, seed)
    law = output_law(LOSSLESS[rule], target, draft, gamma=2, length=4, cap=True)
    assert sum(law.sequences.values()) == 1 and sum(law.accepted) == 1
    assert law.tokens == mean(law.histogram) + law.rounds  # capped and endless: nothing is cut
    assert 1 <= law.tokens_per_pass <= 3
    trimmed = output_law(LOSSLESS[rule], target, draft, gamma=2, length=4)
    assert trimmed.tokens <= mean(trimmed.histogram) + trimmed.rounds


def test_identical_models_accept_everything():
    target, draft = random_pair("identical", 3, 5)
    for rule in ("token", "block", recursive(2)):
        law = output_law(rule, target, draft, gamma=2, length=6)
        assert law.rounds == 2 and law.histogram == [0, 0, 2]


def test_floats_agree_with_fractions():
    target, draft = random_pair("partial", 3, 1, end=0)
    for rule in LOSSLESS.values():
        exact = output_law(rule, target, draft, gamma=2, length=4)
        fast = output_law(rule, *(m.mapped(lambda law: law.astype(float)) for m in (target, draft)), 2, 4)
        assert distance(exact.sequences, fast.sequences) < 1e-14
        assert fast.tokens_per_pass == pytest.approx(float(exact.tokens_per_pass), rel=1e-12)


# -- the output law is the target's --------------------------------------------------------------------


@quick(max_examples=120)
@given(sizes(), seeds, rules, st.sampled_from(KINDS), st.sampled_from([None, 0]))
def test_lossless_rules_write_the_targets_law(size, seed, rule, kind, end):
    vocabulary, gamma, length, cap = size
    target, draft = random_pair(kind, vocabulary, seed, end)
    law = output_law(LOSSLESS[rule], target, draft, gamma, length, cap=cap)
    assert distance(law.sequences, target_law(target, length)) == 0


@pytest.mark.parametrize("rule", [name for name in LOSSLESS if name != "greedy"])
@pytest.mark.parametrize(("vocabulary", "gamma"), list(product((2, 3, 4), (1, 2, 3, 4))))
def test_lossless_rules_at_every_vocabulary_and_gamma(vocabulary, gamma, rule):
    """`gamma + 3` tokens each time, a size that the random test seldom affords."""
    for kind, end in (("stochastic", 1), ("partial", None)):
        target, draft = random_pair(kind, vocabulary, 10 * vocabulary + gamma, end)
        law = output_law(LOSSLESS[rule], target, draft, gamma, gamma + 3, cap=True)
        assert distance(law.sequences, target_law(target, gamma + 3)) == 0


@quick(max_examples=20)
@given(sizes(), seeds, st.sampled_from(KINDS), st.sampled_from([None, 0]))
def test_greedy_writes_the_greedy_text(size, seed, kind, end):
    vocabulary, gamma, length, cap = size
    target, draft = random_pair(kind, vocabulary, seed, end)
    law = output_law("greedy", target, draft, gamma, length, cap=cap)
    (text,) = target_law(target.mapped(lambda p: temper(p, 0)), length)
    assert law.sequences == {text: 1}


@quick(max_examples=20)
@given(seeds, st.sampled_from(["token", "block"]), st.sampled_from(["stochastic", "partial"]), st.booleans())
def test_drafting_past_the_end_token_is_cut_exactly(seed, rule, kind, cap):
    target, draft = random_pair(kind, 3, seed, end=0)
    unaware = TabularModel(3, draft.rule)
    law = output_law(rule, target, unaware, gamma=2, length=4, cap=cap)
    assert distance(law.sequences, target_law(target, 4)) == 0


@quick(max_examples=20)
@given(seeds, st.sampled_from(["token", "block"]), st.sampled_from(["stochastic", "partial"]))
def test_stopping_after_a_low_confidence_token_is_exact(seed, rule, kind):
    target, draft = random_pair(kind, 3, seed)
    adaptive = Draft(draft, draft, stop=unlikely)
    law = output_law(rule, target, adaptive, gamma=3, length=4, cap=True)
    assert distance(law.sequences, target_law(target, 4)) == 0


def test_dropping_the_low_confidence_token_is_not():
    target, draft = constant_model(P), constant_model(Q)
    stop = lambda q, x: bool(q[x] < F(8, 31))  # noqa: E731
    for drop, variation in ((False, 0), (True, F(1, 6) * F(24, 31))):
        law = output_law("token", target, Draft(draft, draft, stop, drop), gamma=1, length=1)
        assert distance(law.sequences, target_law(target, 1)) == variation
    assert float(F(1, 6) * F(24, 31)) == pytest.approx(0.129, abs=5e-4)
    target, draft = random_pair("stochastic", 3, 3)
    for rule in ("token", "block"):
        law = output_law(rule, target, Draft(draft, draft, unlikely, drop=True), gamma=2, length=3)
        assert distance(law.sequences, target_law(target, 3)) > F(1, 50)


# -- block verification --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gamma", "token_wise", "block_wise"),
    [(1, F(2, 3), F(2, 3)), (2, F(10, 9), F(11, 9)), (3, F(38, 27), F(5, 3)), (4, F(130, 81), F(166, 81))],
)
def test_the_published_two_letter_example(gamma, token_wise, block_wise):
    target, draft = constant_model(fractions("1/3", "2/3")), constant_model(fractions("2/3", "1/3"))
    assert mean(accepted_law("token", target, draft, gamma)) == token_wise
    assert mean(accepted_law("block", target, draft, gamma)) == block_wise


@quick(max_examples=25)
@given(seeds, st.integers(2, 3), st.integers(1, 3), st.sampled_from(KINDS))
def test_block_never_accepts_less(seed, vocabulary, gamma, kind):
    """Not only on average: each accepted length is reached at least as often."""
    target, draft = random_pair(kind, vocabulary, seed)
    by_token = accepted_law("token", target, draft, gamma)
    by_block = accepted_law("block", target, draft, gamma)
    assert mean(by_block) >= mean(by_token)
    assert all(sum(by_block[n:]) >= sum(by_token[n:]) for n in range(gamma + 1))
    if gamma == 1:
        assert by_block == by_token


def test_block_accepts_strictly_more_with_two_draft_tokens_and_nothing_more_at_temperature_zero():
    target, draft = random_pair("stochastic", 3, 0)
    assert mean(accepted_law("block", target, draft, 2)) > mean(accepted_law("token", target, draft, 2))
    target, draft = (m.mapped(lambda p: temper(p, 0)) for m in (target, draft))
    assert accepted_law("block", target, draft, 3) == accepted_law("token", target, draft, 3)


# -- the large run -------------------------------------------------------------------------------------


def test_the_proof_counts_its_cases_and_reports_failures(monkeypatch):
    proof = prove(vocabularies=[2], gammas=[1], rules=["token", "tree, 2 independent"])
    assert (proof.cases, proof.failures) == (100 + 60, [])
    assert prove(vocabularies=[2], gammas=[1], rules=["token"], limit=1).cases == 100
    unfit = Verifier("unfit", token.accepted, lambda p, q, x, n: p[n], False, "")
    monkeypatch.setitem(LOSSLESS, "token", unfit)
    failures = prove(vocabularies=[2], gammas=[1], rules=["token"]).failures
    assert failures and all(f.startswith("token: ") for f in failures)
    assert not any("identical" in f for f in failures)


@pytest.mark.large
def test_every_case():
    proof = prove()
    assert proof.failures == []
    assert proof.cases == 8424


def test_total_variation_of_one_position_is_that_of_the_laws():
    a, b = target_law(constant_model(P), 1), target_law(constant_model(Q), 1)
    assert distance(a, b) == total_variation(P, Q) == F(59, 372)
