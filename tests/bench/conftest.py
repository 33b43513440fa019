"""A tiny contest and prompts for it, and a door to `specdec bench` that measures no memory."""

import json

import pytest
import typer
from tiny import tiny_tokenizer
from typer.testing import CliRunner

from specdec_lib.bench.command import bench
from specdec_lib.bench.contest import load_contest
from specdec_lib.bench.prompts import load_prompts
from specdec_lib.models import load_transformers
from specdec_lib.studies.both_sides import disturbed

collect_ignore = ["conftest.py"]  # not a module of doctests: it is not the only one of its name

WORDS = [
    "the cat sat on the mat and the cat",
    "one two one two one",
    "what is it",
    "a b a b a b",
    "to be or not",
    "so so",
]


@pytest.fixture(scope="module")
def target_folder(tiny_folder):
    return tiny_folder("llama")


@pytest.fixture(scope="module")
def draft_folder(target_folder, tmp_path_factory):
    """The target with noise on its weights: accepted now and then."""
    model = disturbed(load_transformers(target_folder, device="cpu"), 0.3)
    folder = tmp_path_factory.mktemp("draft")
    model.save_pretrained(folder)
    tiny_tokenizer("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def contest(target_folder, draft_folder):
    return load_contest(target_folder, draft_folder, device="cpu")


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "mine.jsonl"
    path.write_text("".join(json.dumps({"prompt": w, "kind": f"kind{i % 2}"}) + "\n" for i, w in enumerate(WORDS)))
    return path


@pytest.fixture(scope="module")
def prompts(prompt_file):
    return load_prompts(prompt_file)


@pytest.fixture
def no_footprint(monkeypatch):
    """The processes that measure memory take seconds; one test runs them for real."""
    sizes = {"peak_mib": 2.0, "resident_mib": 1.0, "gpu_mib": None}
    loading = {"import_seconds": 1.0, "target_seconds": 1.0, "draft_seconds": 0.1}
    fake = {"plain": sizes, "drafted": sizes, "loading": loading}
    monkeypatch.setattr("specdec_lib.bench.settings.footprint", lambda *_, **__: fake)
    monkeypatch.setattr("specdec_lib.bench.settings.cpu_use", lambda: 0.0)


@pytest.fixture
def door():
    app = typer.Typer()
    app.command()(bench)
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])
