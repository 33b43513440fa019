"""Every mutant is wrong, and the matrix says which check notices."""

from fractions import Fraction as F

import numpy as np
import pytest

from specdec_lib.exact import KINDS, constant_model, distance, output_law, random_pair, target_law
from specdec_lib.studies.kill import (
    CHECKS,
    CONTROLS,
    GAMMA,
    LENGTH,
    PAIRS,
    P,
    Q,
    chi_squared,
    draw_counts,
    exact_variation,
    kill_matrix,
    mutant_law,
)
from specdec_lib.verify import Verifier, token
from specdec_lib.verify.lossy import in_order
from specdec_lib.verify.mutants import MUTANTS, Mutant
from specdec_lib.verify.token import gather_probs


@pytest.fixture(scope="module")
def matrix():
    return kill_matrix(samples=30_000)


def variation(mutant, target, draft, gamma, length):
    return distance(mutant_law(mutant, target, draft, gamma, length).sequences, target_law(target, length))


def test_the_catalogue():
    assert len(MUTANTS) >= 14
    assert all(m.fault and m.reference for m in MUTANTS.values())
    required = """argmax draft, softmax q; equality, fresh redraw; top-k draft, raw q; target temperature ignored;
        resampled from p; residual not normalised; index shifted; bonus from q; p and q swapped; zero ratio accepted;
        first token unchecked; block rule, token residual; low-confidence token dropped; candidates, a sample each;
        q taken as one"""
    assert {" ".join(name.split()) for name in required.split(";")} <= set(MUTANTS)


# -- exact sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("resampled from p", 0.0925),
        ("p and q swapped", 0.257),
        ("argmax draft, softmax q", 0.719),
        ("low-confidence token dropped", 0.129),
    ],
)
def test_variation_of_one_token_at_the_constructed_laws(name, printed):
    found = variation(MUTANTS[name], constant_model(P), constant_model(Q), gamma=1, length=1)
    assert float(found) == pytest.approx(printed, abs=5e-4)


def test_top_two_draft_with_ties_broken_by_index():
    """The filter of the mutant keeps ties, as `keep_top_k` does; two tokens exactly give the constructed 0.391."""

    def first_two(q):
        return np.array([F(1, 2), F(1, 2), F(0), F(0)], dtype=object)

    mutant = Mutant("", "", "", drawn=first_two)
    assert float(variation(mutant, constant_model(P), constant_model(Q), 1, 1)) == pytest.approx(0.391, abs=5e-4)


def test_the_reported_three_letter_examples():
    """transformers#32867 and #47932 at p = (.5, .3, .2), q = (.6, .3, .1)."""
    p, q = (np.array([F(n, 10) for n in numbers], dtype=object) for numbers in ((5, 3, 2), (6, 3, 1)))
    models = constant_model(p), constant_model(q)
    law = mutant_law(MUTANTS["argmax draft, softmax q"], *models, 1, 1).sequences
    assert law == {(0,): F(5, 6), (2,): F(1, 6)}
    law = mutant_law(MUTANTS["top-k draft, raw q"], *models, 1, 1).sequences
    assert law == {(0,): F(5, 9), (1,): F(1, 3), (2,): F(1, 9)}


def test_equality_with_a_redraw_gives_a_point_mass_draft_two_chances():
    """P(x) = p(x) (2 - p(x)) for the drafted token x."""
    x = 2
    point = np.array([F(int(i == x)) for i in range(4)], dtype=object)
    law = mutant_law(MUTANTS["equality, fresh redraw"], constant_model(P), constant_model(point), 1, 1).sequences
    assert law[x,] == P[x] * (2 - P[x])


def test_a_two_letter_vocabulary_hides_the_wrong_block_residual():
    """With three letters it shows, and small: on few random models at gamma = 2, on nearly all at gamma = 3."""
    mutant = MUTANTS["block rule, token residual"]

    def variations(vocabulary, gamma):
        pairs = [random_pair("stochastic", vocabulary, seed) for seed in range(12)]
        return [variation(mutant, *pair, gamma, length=gamma + 1) for pair in pairs]

    assert not any(variations(2, 3)) and not any(variations(3, 1))
    two, three = variations(3, 2), variations(3, 3)
    assert 1 <= sum(v > 0 for v in two) <= 6 and sum(v > 0 for v in three) >= 10
    assert max(two + three) < F(1, 40)


def test_q_taken_as_one_is_exact_when_the_replacement_leaves_the_draft_token_out():
    """What SafeAILab/EAGLE#329 reports as a fault is the rule for a point mass, whatever drew the token."""

    def without_draft_token(p, q, x, n):
        if n == len(x):
            return p[n]
        rest = p[n].copy()
        rest[x[n]] = F(0)
        return rest / rest.sum()

    rule = Verifier("as a point mass", in_order(lambda p, q, x: gather_probs(p, x)), without_draft_token, True, "")
    for kind in KINDS:
        target, draft = random_pair(kind, 3, 4)
        law = output_law(rule, target, draft, gamma=2, length=4)
        assert distance(law.sequences, target_law(target, 4)) == 0


# -- the matrix ----------------------------------------------------------------------------------------


def test_the_exact_check_rejects_every_mutant_and_no_correct_rule(matrix):
    assert list(matrix.index) == [*CONTROLS, *MUTANTS]
    assert matrix.loc[list(MUTANTS), "exact"].all()
    assert (matrix.loc[list(MUTANTS), "variation"] > 0).all()
    assert not matrix.loc[list(CONTROLS), list(CHECKS)].to_numpy().any()
    assert (matrix.loc[list(CONTROLS), "variation"] == 0).all()


def test_what_survives_the_other_checks(matrix):
    survivors = {check: set(matrix.index[~matrix[check]]) & set(MUTANTS) for check in CHECKS}
    assert survivors["exact"] == set()
    assert survivors["joint"] == {"block rule, token residual", "zero ratio accepted"}
    one_position = {"index shifted", "bonus from q", "end token missed in the block", *survivors["joint"]}
    assert one_position <= survivors["first_token"]
    assert one_position <= survivors["convergence"]
    drafter_faults = {"argmax draft, softmax q", "top-k draft, raw q", "target temperature ignored", "q taken as one"}
    assert drafter_faults <= survivors["greedy"]
    assert {"everything accepted", "end token missed in the block"}.isdisjoint(survivors["greedy"])


def test_the_pairs_of_the_matrix_exercise_the_rule():
    """Something accepted, something rejected, more than one round; an end token inside a block; a draft that proposes
    what the target excludes."""
    for pair in PAIRS:
        law = output_law("token", *random_pair(*pair), GAMMA, LENGTH)
        assert law.rounds > 1 and all(0 < chance < 1 for chance in law.accepted)
    pairs = [random_pair(*pair) for pair in PAIRS]
    assert exact_variation(MUTANTS["end token missed in the block"], pairs)[1] > 0
    assert exact_variation(MUTANTS["zero ratio accepted"], pairs)[2] > 0


def test_the_size_of_the_boundary_fault_is_that_of_the_smallest_uniform():
    tv = variation(MUTANTS["zero ratio accepted"], *random_pair(*PAIRS[2]), gamma=1, length=1)
    target, draft = (model.law(()) for model in random_pair(*PAIRS[2]))
    assert tv == sum(draft[target == 0]) * F(1, 2**24)


def test_simulation_of_a_faulty_decoder_finds_what_the_law_says():
    """Drawing coins and tokens one by one gives the law that the matrix draws its samples from."""
    rng = np.random.default_rng(0)
    p, q = P.astype(float), Q.astype(float)
    counts: dict = {}
    for _ in range(20_000):
        x = int(rng.choice(4, p=q))
        kept = rng.random() < min(1, p[x] / q[x])
        y = x if kept else int(rng.choice(4, p=p))
        counts[y,] = counts.get((y,), 0) + 1
    models = constant_model(P), constant_model(Q)
    assert chi_squared(counts, mutant_law(MUTANTS["resampled from p"], *models, 1, 1).sequences) > 1e-3
    assert chi_squared(counts, target_law(models[0], 1)) < 1e-12


def test_chi_squared_keeps_its_level_and_pools_by_expectation():
    rng = np.random.default_rng(0)
    law = target_law(random_pair("stochastic", 3, 0)[0], 5)
    values = np.array([chi_squared(draw_counts(law, 2_000, rng), law) for _ in range(1_000)])
    # level 5 %: 1,000 repetitions lie in 29..76 with probability 0.999
    assert 29 <= (values < 0.05).sum() <= 76
    assert chi_squared({(0,): 10, (7,): 1}, {(0,): F(1)}) == 0.0


def test_a_correct_token_rule_written_as_a_mutant_passes_everything():
    """The machinery itself introduces no fault."""
    honest = Mutant("honest", "", "", rule=Verifier("token again", token.accepted, token.correction, True, ""))
    assert exact_variation(honest, [random_pair(*pair) for pair in PAIRS]) == [0, 0, 0]
