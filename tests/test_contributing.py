"""CONTRIBUTING.md is run: its examples do what they claim, and would notice the fault that each is about."""

import re
import shlex

import pytest
import yaml

from specdec_lib.errors import SpecdecError
from specdec_lib.paths import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SECTIONS = {part.split("\n")[0]: part for part in re.split(r"^## ", TEXT, flags=re.M)[1:]}
EXAMPLES = [title for title, part in SECTIONS.items() if "```python" in part]


def code(title):
    """The Python blocks of a section as one program."""
    return "\n".join(re.findall(r"```python\n(.*?)```", SECTIONS[title], re.S))


def run(source, tmp_path):
    names = {"__name__": "example", "folder": tmp_path}
    exec(compile(source, "CONTRIBUTING.md", "exec"), names)
    return names


def test_the_five_things_that_people_add_have_examples():
    assert [f"Add {what}" for what in ("a verifier", "a drafter", "an engine", "a notebook", "an option")] == EXAMPLES


@pytest.mark.parametrize("title", EXAMPLES)
def test_the_example_runs(title, tmp_path):
    run(code(title), tmp_path)


FAULTS = {  # section, what stands there, what the fault puts in its place
    "the refused token comes again": ("Add a verifier", "    rest[x[n]] = 0\n", ""),
    "the mutant is none": ("Add a verifier", "lambda p, q, x, n: p[n]", "correction"),
    "another distribution is reported": ("Add a drafter", "q.repeat(gamma, 1)", "q.flip(0).repeat(gamma, 1)"),
    "no distribution is reported": ("Add a drafter", ", probs=q.repeat(gamma, 1)", ""),
    "the least likely token": ("Add an engine", "argmax", "argmin"),
    "no end": ("Add an engine", "tokens[-1] in ends", "False"),
    "a parameter that it does not have": ("Add a notebook", "{gamma: 8}", "{gama: 8}"),
    "text where a number is meant": ("Add a notebook", "{gamma: 8}", "{gamma: '8'}"),
    "the option does nothing": ("Add an option", "return scores.index_fill", "return scores; scores.index_fill"),
    "no check": ("Add an option", 'validate.whole("banned", token)', "token"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_example_notices_a_fault(fault, tmp_path):
    title, right, wrong = FAULTS[fault]
    assert code(title).count(right) >= 1
    with pytest.raises((AssertionError, SpecdecError, pytest.fail.Exception)):
        run(code(title).replace(right, wrong), tmp_path)


def test_the_files_that_it_names_are_there():
    new = {"specdec_lib/verify/naive.py"}
    named = set(re.findall(r"`((?:specdec_lib|tests|notebooks)/[\w/.]*\w)[/`]", TEXT)) - new
    assert len(named) > 15
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert all(not (ROOT / name).exists() for name in new)


def test_the_make_targets_that_it_names_are_there():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make (\w+)`", TEXT):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_notebooks_have_one_normal_form():
    """The same flags in the Makefile, in the hooks and in the text."""
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    (line,) = re.findall(r"^NBSTRIPOUT := (.*)$", makefile, re.M)
    flags = shlex.split(line)[1:]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repo["repo"] for repo in hooks] == ["local"]  # nothing is downloaded
    entries = {hook["id"]: shlex.split(hook["entry"]) for hook in hooks[0]["hooks"]}
    assert list(entries) == ["ruff-check", "ruff-format", "nbstripout"]
    assert all(entry[0].startswith(".venv/bin/") for entry in entries.values())
    assert entries["nbstripout"][1:] == flags
    (quoted,) = re.findall(r"`(--keep-output[^`]*)`", TEXT)
    assert shlex.split(quoted) == flags
