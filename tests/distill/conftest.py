"""Small distillations of a tiny target, and one that has run to its end."""

import pytest
from small_job import Quiet, a_job

from specdec_lib.distill.recipe import distill

collect_ignore = ["conftest.py"]  # not a module of doctests: it is not the only one of its name


@pytest.fixture(scope="package")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text(
        '{"prompt": "who are you, and what is 2 by 3?", "kind": "a"}\n'
        '{"prompt": "hello there.", "kind": "b"}\n{"prompt": "say that again", "kind": "b"}\n'
    )
    return file


@pytest.fixture
def job(tiny_folder, tmp_path, prompts):
    return lambda model="llama", **changes: a_job(tmp_path, tiny_folder(model, seed=2), prompts, **changes)


@pytest.fixture(scope="package")
def finished(tiny_folder, tmp_path_factory, prompts):
    """One whole run: job, manifest, what was said."""
    whole = a_job(tmp_path_factory.mktemp("finished"), tiny_folder("llama", seed=2), prompts)
    board = Quiet()
    return whole, distill(whole, board), board.lines
