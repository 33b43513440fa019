"""The audit is audited: its level, its power, its bound, and that bad input never passes.

Sizes are small: 2,000 repetitions of quick tests, and a few hundred samples with large effects (0.3) where a real
decoder draws them, since one text takes some 10 ms.  Every test is seeded, so it gives the same result each time.
"""

import json

import numpy as np
import pytest
import typer
from scipy.stats import binom
from transformers import GenerationConfig
from typer.testing import CliRunner

from specdec_lib.audit import adapters, command
from specdec_lib.audit.audit import audit
from specdec_lib.audit.enumeration import Unenumerable, runs
from specdec_lib.audit.gof import goodness_of_fit, holm, log_e_value, pool, power_at, required_samples, visible_effect
from specdec_lib.drafters import Sampling
from specdec_lib.errors import SpecdecError
from specdec_lib.exact import constant_model, distance, output_law, random_pair, target_law
from specdec_lib.exact.kill import P, Q, mutant_law
from specdec_lib.models import Pair, load_model, load_transformers
from specdec_lib.verify.lossy import ensemble
from specdec_lib.verify.mutants import MUTANTS

REPETITIONS = 2_000
LAWS = {
    "uniform": np.full(4, 0.25),
    "skew": np.array([0.5, 0.3, 0.1, 0.05, 0.03, 0.01, 0.006, 0.003, 0.0009, 0.0001]),
    "many": np.random.default_rng(0).dirichlet(np.full(27, 0.5)),
}


def sampler_of(law):
    """A fast sampler of one token, or of the outcomes of a dict."""
    if isinstance(law, dict):
        outcomes, weights = list(law), np.array([float(w) for w in law.values()])
        return lambda n, seed: [outcomes[i] for i in np.random.default_rng(seed).choice(len(outcomes), n, p=weights)]
    return lambda n, seed: np.random.default_rng(seed).choice(len(law), n, p=law)


# -- level, power, bound -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAWS)
def test_level_of_the_test(name):
    """Over 2,000 samples from the law itself, the share of rejections lies in the binomial interval of the level."""
    law = LAWS[name]
    counts = np.random.default_rng(1).multinomial(400, law, REPETITIONS)
    p_values = np.array([goodness_of_fit(c, law).p_value for c in counts])
    for level in (0.05, 0.01):
        low, high = binom.interval(0.999, REPETITIONS, level)
        assert low <= (p_values <= level).sum() <= high


def test_level_of_the_audit():
    """The same of the whole procedure, seed by seed, over two contexts: Holm keeps the family's level."""
    laws = [LAWS["uniform"], np.array([0.6, 0.4])]
    samplers = [sampler_of(law) for law in laws]
    verdicts = [
        audit(
            lambda n, seed, i: samplers[i](n, seed), lambda i: laws[i], contexts=[0, 1],
            level=0.1, effect=0.2, power=0.9, seed=seed,
        )
        for seed in range(REPETITIONS)
    ]  # fmt: skip
    found = sum(v.exit_status == 1 for v in verdicts)
    # of two tests at 0.05 each, at least one rejects in 0.0975 of the runs; the exact test of the coin somewhat less
    low, high = binom.interval(0.999, REPETITIONS, 0.1)
    assert low * 0.7 <= found <= high
    assert {v.exit_status for v in verdicts} == {0, 1}


def test_power_at_the_least_favourable_shape_is_the_stated_one():
    """Half of the outcomes gain evenly, half lose: here the stated power is not a bound but the number itself."""
    law, effect, level, power = np.full(10, 0.1), 0.1, 0.01, 0.9
    samples = required_samples(law, effect, level, power)
    wrong = law + np.repeat([1, -1], 5) * effect / 5
    counts = np.random.default_rng(2).multinomial(samples, wrong, REPETITIONS)
    found = sum(goodness_of_fit(c, law).p_value <= level for c in counts)
    low, high = binom.interval(0.999, REPETITIONS, power)
    assert low <= found <= high


@pytest.mark.parametrize("name", ["resampled from p", "p and q swapped", "q taken as one", "bonus from q"])
def test_power_on_mutants_is_at_least_the_stated_one(name):
    """Wrong rules whose total variation is known exactly, two tokens at draft length 1."""
    target, draft = constant_model(P), constant_model(Q)
    wrong = mutant_law(MUTANTS[name], target, draft, gamma=1, length=2).sequences
    right = target_law(target, 2)
    variation = float(distance(wrong, right))
    assert variation > 0.03
    law, level, power = np.array([float(w) for w in right.values()]), 1e-3, 0.9
    samples = required_samples(law, variation, level, power)
    drawn = np.array([float(wrong.get(text, 0)) for text in right])
    counts = np.random.default_rng(3).multinomial(samples, drawn / drawn.sum(), 200)
    found = sum(goodness_of_fit(c, law).p_value <= level for c in counts)
    assert found >= binom.ppf(0.001, 200, power)
    assert audit(sampler_of(wrong), right, effect=variation, power=power).exit_status == 1
    assert audit(sampler_of(right), right, effect=variation, power=power).exit_status == 0


@pytest.mark.parametrize(
    ("outcomes", "effect", "published"),
    [(10, 0.05, 4_800), (10, 0.02, 30_000), (100, 0.05, 10_000), (100, 0.02, 64_000), (1_000, 0.05, 27_000)],
)
def test_sample_sizes(outcomes, effect, published):
    """Chi-squared, power 0.99 at level 0.001, a deviation spread evenly over a uniform law: computed independently."""
    samples = required_samples(np.full(outcomes, 1 / outcomes), effect, level=1e-3, power=0.99)
    assert samples == pytest.approx(published, rel=0.03)


def test_a_sample_size_is_the_smallest_that_suffices():
    law = LAWS["many"] / LAWS["many"].sum()
    samples = required_samples(law, 0.1, 1e-3, 0.9)
    assert visible_effect(law, samples, 1e-3, 0.9) <= 0.1 < visible_effect(law, samples - 1, 1e-3, 0.9)
    assert power_at(law, samples, 1e-3, 0.1) >= 0.9 > power_at(law, samples - 1, 1e-3, 0.1)


def test_the_bound_covers_the_true_variation():
    law = LAWS["skew"]
    wrong = np.roll(law, 1) * 0.1 + law * 0.9
    variation = abs(wrong - law).sum() / 2
    counts = np.random.default_rng(4).multinomial(2_000, wrong, REPETITIONS)
    bounds = np.array([goodness_of_fit(c, law).bound(0.1) for c in counts])
    assert (bounds >= variation).mean() >= 0.9
    assert np.median(bounds) < variation + 0.06  # and says something


def test_looking_early_keeps_the_level_and_stops():
    """A look after every one of 300 samples: the e-value crosses in at most `level` of 500 correct runs."""
    law, level, size = np.array([0.5, 0.3, 0.2]), 0.1, 300
    draws = np.random.default_rng(5).choice(3, p=law, size=(500, size))
    counts = np.cumsum(np.eye(3, dtype=int)[draws], axis=1)
    crossed = 0
    for run in counts:
        crossed += any(log_e_value(c, law, effect=0.1) >= np.log(1 / level) for c in run)
    assert crossed <= binom.ppf(0.999, 500, level)
    assert crossed > 0  # it does move

    wrong = audit(sampler_of([0.4, 0.2, 0.2, 0.2]), [0.25] * 4, sequential=True)
    assert wrong.exit_status == 1
    assert wrong.samples < wrong.needed / 10
    assert wrong.fits[-1].method == "e-value" and wrong.bound == 1
    right = audit(sampler_of([0.25] * 4), [0.25] * 4, effect=0.1, sequential=True)
    assert right.exit_status == 0
    assert right.samples == right.needed > required_samples([0.25] * 4, 0.1, 1e-3, 0.99)
    leaks = audit(sampler_of([0.99, 0.01]), [1.0, 0.0], effect=0.001, sequential=True)
    assert leaks.exit_status == 1 and leaks.samples < leaks.needed


def test_level_of_the_sequential_audit():
    law = np.array([0.6, 0.4])
    runs = [audit(sampler_of(law), law, level=0.1, effect=0.1, power=0.9, sequential=True, seed=s) for s in range(300)]
    assert 0 < sum(v.exit_status == 1 for v in runs) <= binom.ppf(0.999, 300, 0.1)


# -- bins and small samples ----------------------------------------------------------------------------


def test_bins_come_from_the_law_and_hide_what_they_say():
    bins = pool(LAWS["skew"], 1_000)
    assert bins.law.min() * 1_000 >= 10
    assert bins.hidden == pytest.approx(0.01)  # the last four share a bin: 0.006 + 0.003 + 0.0009 + 0.0001
    assert np.bincount(bins.label, LAWS["skew"]) == pytest.approx(bins.law)
    moved = LAWS["skew"].copy()
    moved[[6, 7]] = moved[[7, 6]]  # a deviation within the bin: the bins cannot tell
    assert bins.count(moved * 1e6).tolist() == bins.count(LAWS["skew"] * 1e6).tolist()


def test_drawn_and_summed_small_sample_tests_agree(monkeypatch):
    counts, law = [4, 1, 3, 0], [0.25, 0.25, 0.3, 0.2]
    exact = goodness_of_fit(counts, law)
    monkeypatch.setattr("specdec_lib.audit.gof.ENUMERATED", 0)
    drawn = goodness_of_fit(counts, law, seed=1)
    assert (exact.method, drawn.method) == ("exact multinomial", "Monte-Carlo multinomial")
    assert drawn.p_value == pytest.approx(exact.p_value, abs=0.015)


def test_an_excluded_outcome_refutes():
    assert goodness_of_fit([500, 500, 1], [0.5, 0.5, 0.0]).p_value == 0
    greedy = audit(lambda n, seed: np.zeros(n, int), [1.0, 0.0], effect=0.05)
    assert greedy.exit_status == 0
    assert greedy.samples == 90  # 0.95^90 < 0.01 <= 0.95^89
    leaks = lambda n, seed: (np.random.default_rng(seed).random(n) < 0.05).astype(int)  # noqa: E731
    assert audit(leaks, [1.0, 0.0], effect=0.05).exit_status == 1


def test_holm_by_hand():
    assert holm([0.04, 0.001, 0.03]) == pytest.approx([0.06, 0.003, 0.06])


# -- bad input -----------------------------------------------------------------------------------------


def fair(n, seed):
    return np.random.default_rng(seed).integers(0, 4, n)


@pytest.mark.parametrize(
    ("law", "message"),
    [
        ([0.5, 0.4], "sums to 0.9"),
        ([0.5, 0.7, -0.2], "negative probability"),
        ([0.5, float("nan")], "NaN"),
        ([float("inf"), 0.5], "sums to inf"),
        ([], "list of probabilities"),
        ([[0.5, 0.5]], "list of probabilities"),
        ({(): 0.5, (1,): 0.5}, "none empty"),
        ({0: 0.5, (0,): 0.5}, "twice"),
        ({"a": 1.0}, "tuples of token ids"),
        (lambda context: [1.0], "no contexts"),
    ],
)
def test_what_is_no_law(law, message):
    with pytest.raises(SpecdecError, match=message):
        audit(fair, law)


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (lambda n, seed: fair(n, seed)[:-1], "asked for 32 outcomes and returned 31"),
        (lambda n, seed: fair(n, seed) / 4, "must return token ids"),
        (lambda n, seed: fair(n * 2, seed).reshape(n, 2), "1 to 1 token ids"),
        (lambda n, seed: fair(n, seed).reshape(n, 1, 1), "must return token ids"),
        (lambda n, seed: [()] * n, "returned \\(\\)"),
        (lambda n, seed: ["a"] * n, "returned \\('a',\\)"),
        (lambda n, seed: 3, "not int"),
        (lambda n, seed: fair(n, None), "the same seed gave other outcomes"),
        (lambda n, seed: fair(n, 0), "five seeds gave the same outcomes"),
    ],
)
def test_what_is_no_sampler(sampler, message):
    with pytest.raises(SpecdecError, match=message):
        audit(sampler, [0.25] * 4)


@pytest.mark.parametrize("setting", [{"level": 0}, {"effect": 1}, {"power": 1.5}, {"effect": "0.1"}])
def test_shares(setting):
    with pytest.raises(SpecdecError, match=f"{next(iter(setting))} must lie strictly between 0 and 1"):
        audit(fair, [0.25] * 4, **setting)


@pytest.mark.parametrize("seed", [-1, 0.5, None])
def test_seeds(seed):
    with pytest.raises(SpecdecError, match="seed must be a whole number"):
        audit(fair, [0.25] * 4, seed=seed)


def test_a_budget_that_is_too_small_is_never_a_pass():
    few = audit(fair, [0.25] * 4, budget=1_000)
    assert few.exit_status == 2
    assert few.sentence.startswith("inconclusive: 1,000 samples see a deviation of 0.02")
    assert f"{few.needed:,} samples are needed" in few.sentence
    assert audit(fair, [0.25] * 4, budget=few.needed).exit_status == 0
    assert audit(fair, [0.4, 0.2, 0.2, 0.2], budget=1_000).exit_status == 1  # but it may find something
    with pytest.raises(SpecdecError, match="without any"):
        audit(lambda n, seed, c: fair(n, seed), lambda c: [0.25] * 4, contexts=[0, 1], budget=1)
    with pytest.raises(SpecdecError, match="more than 1,000,000,000 samples"):
        audit(fair, [0.25] * 4, effect=1e-6)


def test_support_that_differs_is_found():
    law = {(0, 1): 0.5, (1,): 0.5}
    beyond = lambda n, seed: [[(0, 1), (1, 0)][i] for i in fair(n, seed) % 2]  # noqa: E731 - runs past its end
    assert audit(beyond, law, effect=0.3).exit_status == 1


def test_contexts_are_told_apart():
    laws = [[0.25] * 4, [0.4, 0.2, 0.2, 0.2]]
    verdict = audit(lambda n, seed, i: fair(n, seed), lambda i: laws[i], contexts=[0, 1], effect=0.15)
    assert verdict.exit_status == 1 and verdict.worst == 1
    assert "in context 2 at" in verdict.sentence


# -- engines, on models of six tokens ------------------------------------------------------------------

PROMPT, LENGTH, END = [1, 2, 3, 1, 2], 3, 0
QUICK = {"effect": 0.3, "level": 1e-3, "power": 0.9}


@pytest.fixture(scope="module")
def six(tiny_folder):
    """Target, draft, the target's tabular law and that of its blocks, small outcomes grouped to save samples."""
    target, draft = (load_transformers(tiny_folder("llama", seed=s, vocab_size=6), device="cpu") for s in (0, 1))
    table = adapters.tabular(target, PROMPT, end=END)
    return target, draft, table, adapters.BlockLaw(table, LENGTH, floor=0.03)


def test_block_law(six):
    target, _, table, grouped = six
    whole = adapters.BlockLaw(table, LENGTH)
    assert whole.rest == 0
    assert float(distance(whole.law, target_law(table, LENGTH))) < 1e-12
    sums = dict.fromkeys(grouped.law, 0.0)
    for tokens, weight in whole.law.items():
        sums[grouped.outcome(tokens)] += weight
    assert sums == pytest.approx(grouped.law)
    half = adapters.tabular(target, PROMPT, Sampling(0.5))
    expected = table.law(()) ** 2 / (table.law(()) ** 2).sum()
    assert half.law(()) == pytest.approx(expected, abs=1e-6)


def test_our_decoder(six, tiny_folder):
    target, draft, _, block = six
    fast = load_model(tiny_folder("llama", seed=0, vocab_size=6), device="cpu")
    right = adapters.ours(Pair(fast, draft), PROMPT, LENGTH, end=END)
    assert audit(block.of(right), block.law, **QUICK).exit_status == 0
    wrong = adapters.ours(Pair(target, draft), PROMPT, LENGTH, end=END, verifier=ensemble(0.3, "target"))
    assert audit(block.of(wrong), block.law, **QUICK).exit_status == 1


@pytest.mark.parametrize(
    "how",
    [{}, {"assistant": True}, {"assistant": True, "threshold": None}, {"prompt_lookup_num_tokens": 2}],
    ids=["plain", "assistant", "assistant, default threshold", "prompt lookup"],
)
def test_transformers_keeps_the_law(how, six):
    target, draft, _, block = six
    how = how | {"assistant": draft if "assistant" in how else None}
    before = draft.generation_config.to_dict()
    sampler = adapters.transformers(target, PROMPT, LENGTH, end=END, **how)
    assert audit(block.of(sampler), block.law, **QUICK).exit_status == 0
    assert draft.generation_config.to_dict() == before


@pytest.mark.skipif(
    not hasattr(GenerationConfig(), "assistant_ensemble_weight"), reason="this transformers has no ensemble"
)
def test_transformers_ensemble_is_flagged_and_follows_the_law_that_we_compute(six):
    target, draft, table, block = six
    sampler = adapters.transformers(target, PROMPT, LENGTH, draft, end=END, assistant_ensemble_weight=0.3)
    assert audit(block.of(sampler), block.law, **QUICK).exit_status == 1
    law = output_law(
        ensemble(0.3, "target"), table, adapters.tabular(draft, PROMPT, end=END), gamma=3, length=LENGTH, cap=True
    )
    grouped: dict = {}
    for tokens, weight in law.sequences.items():
        outcome = block.outcome(tokens)
        grouped[outcome] = grouped.get(outcome, 0) + weight
    assert audit(block.of(sampler), grouped, **QUICK).exit_status == 0


def test_a_wrong_temperature_is_found(six):
    target, _, _, block = six
    sampler = adapters.transformers(target, PROMPT, LENGTH, end=END, temperature=0.5)
    assert audit(block.of(sampler), block.law, **QUICK).exit_status == 1


# -- the door in the shell -----------------------------------------------------------------------------

RULES = """
import numpy as np

def decode(p, q, draft, rng, residual):
    for i, x in enumerate(draft):
        if rng.random() * q[i][x] >= p[i][x]:
            law = residual(p[i], q[i])
            return [*draft[:i], rng.choice(len(law), p=law / law.sum())]
    return [*draft, rng.choice(p.shape[1], p=p[-1])]

def right(p, q, draft, rng):
    return decode(p, q, draft, rng, lambda p, q: np.maximum(p - q, 0))

def wrong(p, q, draft, rng):
    return decode(p, q, draft, rng, lambda p, q: p)

class Other:  # draws in a way that cannot be followed
    def __init__(self, rng):
        self.random = rng.uniform
        self.choice = rng.choice

def right_by_sampling(p, q, draft, rng):
    return right(p, q, draft, Other(rng))

def wrong_by_sampling(p, q, draft, rng):
    return wrong(p, q, draft, Other(rng))

def unseeded(p, q, draft, rng):
    return right(p, q, draft, np.random.default_rng())

def empty(p, q, draft, rng):
    return []

def broken(p, q, draft, rng):
    return 1 / 0
"""


@pytest.fixture
def specdec(tmp_path):
    """`specdec(*arguments) -> result`, with the rules above in the file `result.rules`."""
    app = typer.Typer()
    app.command()(command.audit)
    (tmp_path / "rules.py").write_text(RULES)
    return lambda *arguments: CliRunner().invoke(app, [str(a).replace("RULES", str(tmp_path)) for a in arguments])


def test_a_users_rule_by_enumeration(specdec, tmp_path):
    passed = specdec("RULES/rules.py:right")
    assert passed.exit_code == 0 and "no deviation: the exact output law on 3 small models" in passed.output
    found = specdec("RULES/rules.py:wrong", "--json", "RULES/out.json")
    assert found.exit_code == 1 and "deviation found" in found.output
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["exit_status"] == 1 and written["sentence"] in found.output
    pairs = [random_pair(*pair) for pair in command.RULE_PAIRS]
    exact = [  # the same fault in the exact room
        distance(mutant_law(MUTANTS["resampled from p"], *pair, gamma=2, length=3).sequences, target_law(pair[0], 3))
        for pair in pairs
    ]
    assert written["variations"] == pytest.approx([float(v) for v in exact])


def test_a_users_rule_by_sampling(specdec, tmp_path):
    found = specdec("RULES/rules.py:wrong_by_sampling", "--effect", "0.1", "--json", "RULES/out.json")
    assert found.exit_code == 1 and "deviation found in context" in found.output
    full = json.loads((tmp_path / "out.json").read_text())
    assert full["exit_status"] == 1 and full["sentence"] in found.output
    early = specdec("RULES/rules.py:wrong_by_sampling", "--sequential", "--json", "RULES/out.json")
    assert early.exit_code == 1
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["samples"] < written["needed"] / 10
    passed = specdec("RULES/rules.py:right_by_sampling", "--effect", "0.1")
    assert passed.exit_code == 0 and "no deviation above 0.1 found at level 0.001 with power 0.99" in passed.output
    unsure = specdec("RULES/rules.py:right_by_sampling", "--budget", "300")
    assert unsure.exit_code == 2 and "inconclusive" in unsure.output


def test_uniform_numbers_that_are_followed():
    """Thresholds in any order, multiples, arrays: each probability by hand."""
    thirds = lambda rng: (lambda u: 0 if u < 1 / 3 else 1 if 3 * u <= 2 else 2)(rng.random())  # noqa: E731
    assert {i: chance for chance, i in runs(thirds)} == pytest.approx({0: 1 / 3, 1: 1 / 3, 2: 1 / 3})
    twice = lambda rng: (lambda u: (u > np.float64(0.5), u > 0.25, np.float64(0.75) > u))(rng.random())  # noqa: E731
    assert {result: chance for chance, result in runs(twice)} == {
        (False, False, True): 0.25, (False, True, True): 0.25, (True, True, True): 0.25, (True, True, False): 0.25
    }  # fmt: skip
    both = lambda rng: (rng.random(2) < np.array([0.5, 0.25])).tolist()  # noqa: E731
    assert sum(chance for chance, result in runs(both) if result == [True, True]) == 0.125
    never = lambda rng: (rng.random() * 0 >= 0.5, rng.random() < 0, rng.random() >= 1)  # noqa: E731
    assert list(runs(never)) == [(1.0, (False, False, False))]
    with pytest.raises(Unenumerable, match="does not do the same"):
        flips = iter([True, False] * 10)
        list(runs(lambda rng: next(flips) and rng.random() < 0.5))
    with pytest.raises(Unenumerable, match="too many branches"):
        list(runs(lambda rng: [rng.random() < 0.5 for _ in range(20)]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rules.py"], "names no rule"),
        (["RULES/none.py:rule"], "there is no file"),
        (["RULES/rules.py:none"], "has no function none"),
        (["RULES/rules.py:empty"], "must return 1 to 3 token ids"),
        (["RULES/rules.py:unseeded"], "ignores its seed"),
        (["RULES/rules.py:broken"], "ZeroDivisionError"),
        (["--effect", "2"], "effect must lie strictly between"),
        (["--engine", "other"], "unknown engine"),
        (["--json", "no/such/folder/out.json"], "there is no folder"),
        (["--target", "no/such/folder"], "there is no model folder"),
    ],
)
def test_bad_input_of_the_door(arguments, message, specdec):
    error = specdec(*arguments).exception
    assert isinstance(error, SpecdecError) and message in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize("engine", command.ENGINES)
def test_models_in_the_shell(engine, specdec, tiny_folder):
    target, draft = (tiny_folder("gpt2", seed=s, vocab_size=6) for s in (0, 1))  # no chat template: "abcab" is 34534
    out = specdec(
        "--target", target, "--draft", draft, "--engine", engine, "--prompt", "abcab", "--length", "2",
        "--effect", "0.4", "--power", "0.8",
    )  # fmt: skip
    assert out.exit_code == 0, out.output
    assert "no deviation above 0.4 found" in out.output


def test_random_pairs_through_a_rule_keep_the_law():
    """The rule sampler itself, against the exact room: same target, rounds cut at the length."""
    target, draft = random_pair("stochastic", 3, 7)
    copy = lambda p, q, x, rng: [rng.choice(3, p=p[0])]  # noqa: E731 - plain decoding, one token a round
    verdict = audit(adapters.of_rule(copy, target, draft, gamma=1, length=2), target_law(target, 2), effect=0.1)
    assert verdict.exit_status == 0
