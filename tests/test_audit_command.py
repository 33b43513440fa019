"""`specdec audit`: a rule of one's own, by enumeration and by sampling, and decoders on models."""

import json
import sys

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from specdec_lib.audit import command
from specdec_lib.audit.enumeration import Unenumerable, runs
from specdec_lib.errors import SpecdecError
from specdec_lib.exact import distance, random_pair, target_law
from specdec_lib.studies.kill import mutant_law
from specdec_lib.verify.mutants import MUTANTS

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

def broken_at_times(p, q, draft, rng):  # a misspelt name, in a branch that most draws do not reach
    if rng.random() < 0.02:
        return [*draft[:0], corection(p)]
    return right(p, q, draft, rng)

def searches(p, q, draft, rng):  # right, and its uniform numbers go where they cannot be followed
    for i, x in enumerate(draft):
        if rng.random() * q[i][x] >= p[i][x]:
            law = np.maximum(p[i] - q[i], 0)
            return [*draft[:i], int(np.searchsorted(np.cumsum(law) / law.sum(), float(rng.random())))]
    return [*draft, int(np.searchsorted(np.cumsum(p[-1]), float(rng.random())))]
"""


@pytest.fixture
def specdec(tmp_path, monkeypatch):
    """`specdec(*arguments) -> result`, with the rules above in the file `result.rules`."""
    app = typer.Typer()
    app.command()(command.audit)
    (tmp_path / "rules.py").write_text(RULES)
    (tmp_path / "exits.py").write_text("import sys; sys.exit(3)")
    (tmp_path / "fails.py").write_text("def rule(")
    monkeypatch.setattr("sys.path", [*sys.path])
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


def test_a_rule_that_cannot_be_followed_is_tested_by_sampling_and_that_is_said(specdec, tmp_path):
    found = specdec("RULES/rules.py:searches", "--effect", "0.1", "--json", "RULES/out.json")
    assert found.exit_code == 0, found.output
    assert "tested by sampling, since not every branch of the rule can be followed: it raises TypeError" in found.output
    assert json.loads((tmp_path / "out.json").read_text())["not_enumerated"].startswith("it raises TypeError")


def test_a_rule_file_is_a_module(specdec, tmp_path):
    """Dataclasses look their module up, and neighbours can be imported."""
    (tmp_path / "neighbour_of_rules.py").write_text("from rules import right\n")
    (tmp_path / "modern.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from neighbour_of_rules import right\n"
        "@dataclass(frozen=True)\n"
        "class Rule:\n"
        "    name: str = 'a'\n"
        "    def __call__(self, p, q, draft, rng):\n"
        "        return right(p, q, draft, rng)\n"
        "rule = Rule()\n"
    )
    found = specdec("RULES/modern.py:rule")
    assert found.exit_code == 0 and "no deviation" in found.output, found.exception


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
        (["RULES/rules.py:broken"], "the rule raised ZeroDivisionError"),
        (["RULES/rules.py:broken_at_times"], "the rule raised NameError: name 'corection'"),
        (["RULES/exits.py:rule"], "exits.py cannot be imported: SystemExit: 3"),
        (["RULES/fails.py:rule"], "fails.py cannot be imported: SyntaxError"),
        (["--effect", "2"], "effect must lie strictly between"),
        (["--budget", "0"], "budget must be a whole number >= 1"),
        (["--seed", "-1"], "seed must be a whole number >= 0"),
        (["--length", "0"], "length must be at least 1"),
        (["--gamma", "0"], "gamma must be a whole number >= 1"),
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


def test_transformers_is_given_the_fastest_model_and_no_draft_that_is_none(packaged_folder):
    from specdec_lib.audit.command import load_engine

    pair, _ = load_engine("transformers", "packaged", None, gamma=2, temperature=1.0)
    assert pair.description == "target packaged, draft small"
    for name in ("features", "ngram", "own-tokenizer"):
        with pytest.raises(SpecdecError, match=f"takes a draft model or lookup, {name} is neither"):
            load_engine("transformers", "packaged", name, gamma=2, temperature=1.0)
