"""Rounds simulated at once have the law of the rule, which the exact room sums; rules that do not fit are refused."""

from collections import Counter
from random import Random

import numpy as np
import pytest

from specdec_lib.audit.gof import goodness_of_fit
from specdec_lib.audit.simulate import SPENT, one_round, simulate
from specdec_lib.errors import SpecdecError
from specdec_lib.exact import TabularModel, fractions, round_law
from specdec_lib.verify import VERIFIERS
from specdec_lib.verify.lossy import lenience
from specdec_lib.verify.mutants import MUTANTS

P = np.stack([fractions("1/4", "1/2", "1/4"), fractions("0", "1/3", "2/3"), fractions("1/5", "2/5", "2/5")])
Q = np.stack([fractions("1/2", "1/4", "1/4"), fractions("1/3", "0", "2/3")])
RULES = {
    "token": VERIFIERS["token"],
    "lenience": lenience(0.5),
    **{
        name: MUTANTS[name].rule
        for name in ("resampled from p", "everything accepted", "p and q swapped", "index shifted")
    },
}


def exact(rule):
    """The law of the tokens of a round when the laws are those of the position alone."""
    target, draft = (
        TabularModel(3, lambda prefix, laws=laws: laws[min(len(prefix), len(laws) - 1)]) for laws in (P, Q)
    )
    law: dict = {}
    for (_, tokens), weight in round_law(rule, target, draft, len(Q)).items():
        law[tokens] = law.get(tokens, 0.0) + float(weight)
    return law


def p_value(tokens, law):
    counts = Counter(tokens)
    assert set(counts) <= set(law)
    return goodness_of_fit([counts[key] for key in law], list(law.values())).p_value


@pytest.mark.parametrize("name", RULES)
def test_rounds_at_once_have_the_law_of_the_rule(name):
    rule = RULES[name]
    rounds = simulate(rule, P.astype(float), Q.astype(float), 50_000, np.random.default_rng(0))
    assert rounds.shape == (50_000, 3)
    tokens = [tuple(t for t in row if t != SPENT) for row in rounds.tolist()]
    assert all(SPENT not in row[: len(t)] for row, t in zip(rounds.tolist(), tokens, strict=True))
    assert p_value(tokens, exact(rule)) > 1e-3
    if name != "token":
        counts, right = Counter(tokens), exact(VERIFIERS["token"])
        known = [counts[key] for key in right]
        assert sum(known) < len(tokens) or goodness_of_fit(known, list(right.values())).p_value < 1e-6


def test_one_round_after_the_other_has_it_too():
    random = Random(0).random
    p, q = P.astype(float), Q.astype(float)
    tokens = [tuple(one_round(VERIFIERS["token"], p, q, random)) for _ in range(5_000)]
    assert p_value(tokens, exact(VERIFIERS["token"])) > 1e-3
    wrong = [tuple(one_round(MUTANTS["resampled from p"].rule, p, q, random)) for _ in range(5_000)]
    counts, right = Counter(wrong), exact(VERIFIERS["token"])
    assert goodness_of_fit([counts[key] for key in right], list(right.values())).p_value < 1e-6


def test_the_same_generator_gives_the_same_rounds():
    first, again, other = (
        simulate(VERIFIERS["token"], P.astype(float), Q.astype(float), 100, np.random.default_rng(seed)).tolist()
        for seed in (0, 0, 1)
    )
    assert first == again != other


@pytest.mark.parametrize(
    "rule", [VERIFIERS["block"], MUTANTS["first token unchecked"].rule, MUTANTS["block rule, token residual"].rule]
)
def test_rules_that_look_at_several_tokens_are_refused(rule):
    rng = np.random.default_rng(0)
    p, q = (rng.dirichlet(np.ones(3), size) for size in (4, 3))
    with pytest.raises(SpecdecError, match="does not decide token by token"):
        simulate(rule, p, q, 10, np.random.default_rng(0))


def test_laws_that_do_not_fit_are_refused():
    with pytest.raises(SpecdecError, match=r"need target distributions of shape \(3, 3\), got \(2, 3\)"):
        simulate(VERIFIERS["token"], P[:2].astype(float), Q.astype(float), 10, np.random.default_rng(0))
