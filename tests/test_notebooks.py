"""The form of the committed notebooks: they can be read on a web page, run by papermill, compared by nbval."""

import ast
import re
from pathlib import Path

import nbformat
import pytest

from specdec_lib.report.chapters import declared_claims, read_chapter
from specdec_lib.report.profiles import accepts, load_profile, parameters_of

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
PROFILES = ["smoke", "cpu", "full", "gpu"]
ABSOLUTE_PATH = re.compile(r"(?<![\w/.:<])/(home|Users|root|tmp|work|usr|opt|mnt|private|var|content)/\w|\b[A-Z]:\\\w")

pytestmark = pytest.mark.skipif(not NOTEBOOKS, reason="no notebook yet")


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture
def notebook(path):
    return nbformat.read(path, as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook):
    return [(cell, output) for cell in code(notebook) for output in cell.outputs]


def texts(output):
    yield from output.get("traceback", [])
    yield output.get("text", "")
    yield from (data for kind, data in output.get("data", {}).items() if kind.startswith("text/"))


def test_it_is_valid_small_and_for_the_python_kernel(path, notebook):
    nbformat.validate(notebook)
    assert path.stat().st_size < 300_000
    assert notebook.metadata.kernelspec.name == "python3"
    assert "widgets" not in notebook.metadata and "papermill" not in notebook.metadata
    assert all("papermill" not in cell.metadata and "execution" not in cell.metadata for cell in notebook.cells)


def test_it_was_run_from_top_to_bottom(notebook):
    cells = [cell for cell in code(notebook) if cell.source.strip()]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))


def test_outputs_are_free_of_errors_warnings_and_paths_of_a_machine(notebook):
    for cell, output in outputs(notebook):
        assert output.output_type != "error" or "raises-exception" in cell.metadata.get("tags", [])
        assert output.get("name") != "stderr", output.text
        for text in texts(output):
            assert not ABSOLUTE_PATH.search(text), text


def test_figures_have_alternative_text(notebook):
    for cell, output in outputs(notebook):
        if "image/png" in output.get("data", {}):
            alt = cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "")
            assert len(alt.split()) >= 4, f"no alternative text for the figure of the cell: {cell.source}"


def test_code_cells_are_short(notebook):
    """A folded one, which holds bookkeeping, may be longer."""
    for cell in code(notebook):
        most = 40 if "hide-input" in cell.metadata.get("tags", []) else 20
        assert len(cell.source.splitlines()) <= most, cell.source


def test_one_parameters_cell_of_annotated_explained_literals(path, notebook):
    (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    parameters = parameters_of(path)
    assert len(parameters) == len(cell.source.splitlines())
    assert all(p.comment and accepts(p.annotation, p.default) for p in parameters.values())


@pytest.mark.parametrize("profile", PROFILES)
def test_profiles_list_every_notebook_with_parameters_that_it_has(profile):
    assert list(load_profile(profile, FOLDER).notebooks) == [path.stem for path in NOTEBOOKS]


def test_each_claim_of_a_chapter_is_made_once_in_it_and_nowhere_else(path, notebook):
    calls = [node for cell in code(notebook) for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Call)]
    claims = [call for call in calls if getattr(call.func, "id", "") == "claim" and len(call.args) == 1]
    made = [call.args[0].value for call in claims]
    assert sorted(made) == sorted(read_chapter(path.with_suffix(".yaml"))["claims"])
    assert all(declared_claims()[id]["notebook"] == path.stem for id in made)


def test_links_of_chapters_lead_somewhere(notebook):
    """To other files of the folder, and to terms of the notation page."""
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    anchors = set(re.findall(r'<a id="([\w-]+)">', (FOLDER / "notation.md").read_text()))
    for place, anchor in re.findall(r"\]\(([\w./-]+\.(?:ipynb|md))(?:#([\w-]+))?\)", text):
        assert (FOLDER / place).exists(), place
        assert not anchor or anchor in anchors, anchor


def test_links_of_the_notation_page_lead_somewhere():
    text = (FOLDER / "notation.md").read_text()
    places = set(re.findall(r"\]\(([\w./-]+\.ipynb)\)", text))
    assert places and all((FOLDER / place).exists() for place in places)
