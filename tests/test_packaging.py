"""One list of packages: pyproject.toml.  The lock, the conda file and the code's own imports agree with it."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import specdec_lib

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
LOCK_LINES = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text())
LOCKED_EXTRAS = ["notebooks", "scale", "test"]


def requirements(*extras):
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in EXTRAS[extra])]
    return [Requirement(line) for line in lines]


def locked():
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in LOCK_LINES)}


def disagreements(needed, pins):
    """Each requirement that the pins leave out or contradict."""
    return [str(r) for r in needed if not r.specifier.contains(pins.get(canonicalize_name(r.name), "0"))]


def test_every_line_of_the_lock_is_one_exact_public_version():
    assert [line for line in LOCK_LINES if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", line)] == []
    assert len(LOCK_LINES) == len(locked())


def test_lock_satisfies_pyproject():
    assert disagreements(requirements(*LOCKED_EXTRAS), locked()) == []


def test_a_missing_and_a_contradicting_pin_are_noticed():
    pins = locked() | {"numpy": "1.0"}
    del pins["torch"]
    assert [r.split(">")[0] for r in disagreements(requirements(), pins)] == ["numpy", "torch"]


def test_lock_is_closed():
    """What a locked package needs is locked too; torch's CUDA packages depend on the build and are left out."""
    pins, missing = locked(), []
    for name in pins:
        if name == "torch":
            continue
        for line in metadata.requires(name) or []:
            r = Requirement(line)
            if (r.marker is None or r.marker.evaluate({"extra": ""})) and canonicalize_name(r.name) not in pins:
                missing.append(f"{name} needs {r.name}")
    assert not missing, "; ".join(missing)


def test_build_requirements_are_locked():
    """`make setup` builds without isolation, so that nothing unpinned is downloaded."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert disagreements(map(Requirement, build), locked()) == []


def test_conda_file_repeats_nothing():
    plain = [item for item in CONDA["dependencies"] if isinstance(item, str)]
    (pip,) = [item["pip"] for item in CONDA["dependencies"] if isinstance(item, dict)]
    python = Requirement(plain[0])
    assert (python.name, python.specifier) == ("python", SpecifierSet(PROJECT["requires-python"]))
    assert plain[1:] == ["pip", "make"]
    assert pip == [f"-e .[{','.join(LOCKED_EXTRAS)}]"] and set(LOCKED_EXTRAS) <= set(EXTRAS)
    assert CONDA["name"] == PROJECT["name"]


def imported_by(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("folder, extras", [("specdec_lib", ["notebooks", "scale"]), ("tests", LOCKED_EXTRAS)])
def test_everything_imported_is_declared(folder, extras):
    declared = {canonicalize_name(r.name) for r in requirements(*extras)}
    distributions = metadata.packages_distributions()
    undeclared = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        local = {"specdec_lib", "tests", *(p.stem for p in (ROOT / folder).rglob("*.py"))}
        for name in set(imported_by(path)) - sys.stdlib_module_names - local:
            if not declared & {canonicalize_name(d) for d in distributions.get(name, [name])}:
                undeclared.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not undeclared, "; ".join(undeclared)


NOT_IMPORTED = {
    "accelerate": "transformers reads GGUF files and spreads models with it",
    "jinja2": "transformers fills chat templates with it",
    "jupyterlab": "`make lab`",
    "ipywidgets": "without it progress bars warn in notebooks",
    "mypy": "`make lint`",
    "nbstripout": "`make lint`, `make fmt`",
    "nbval": "`make nbtest`",
    "pytest-xdist": "`make test` runs on several workers",
    "ruff": "`make lint`, `make fmt`",
    "pandas-stubs": "for mypy",
    "types-pyyaml": "for mypy",
}


def test_everything_declared_is_imported_or_has_a_reason():
    modules = metadata.packages_distributions()
    sources = [path for folder in ("specdec_lib", "tests") for path in (ROOT / folder).rglob("*.py")]
    imported = {canonicalize_name(d) for path in sources for name in imported_by(path) for d in modules.get(name, [])}
    declared = {canonicalize_name(r.name) for r in requirements(*LOCKED_EXTRAS)}
    assert declared - imported == set(NOT_IMPORTED)


def test_package_and_citation_say_the_same():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"] == specdec_lib.__version__
    newest = re.search(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest and newest[1] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert (ROOT / "specdec_lib" / "py.typed").exists()


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(*arguments):
    """Apart from the make that may be running these tests."""
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    command = ["make", "-C", str(ROOT), "--no-print-directory", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@needs_make
def test_plain_make_prints_every_target():
    run = make()
    printed = [line.split()[1] for line in run.stdout.splitlines()]
    (phony,) = re.findall(r"^\.PHONY: help (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert printed == phony.split()
    assert {"setup", "models", "reproduce", "test", "nbtest", "lint", "fmt", "bench", "lab", "lock", "clean"} <= set(
        printed
    )
    assert run.returncode == 0 and run.stderr == ""


@needs_make
def test_setup_refuses_an_old_python_in_one_line(tmp_path):
    """With an interpreter that exits 1 at the version question, in a folder where nothing is installed."""
    for name in ("Makefile", "requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    run = make("-C", str(tmp_path), "setup", "PYTHON=false")
    assert run.returncode == 2 and not (tmp_path / ".venv").exists()
    assert run.stderr.splitlines()[0] == (
        "'false' is not Python 3.11 or newer: name one that is, make setup PYTHON=python3.12"
    )


@needs_make
def test_clean_keeps_models_and_results():
    run = make("--dry-run", "clean")
    assert "rm -rf .venv" in run.stdout
    assert "models" not in run.stdout and "results" not in run.stdout and "-name data -prune" in run.stdout
