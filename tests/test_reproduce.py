"""The runner, on notebooks of three lines: what it leaves, what it skips, what it refuses, how it ends."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

from specdec_lib.errors import SpecdecError
from specdec_lib.report.profiles import parse_parameters
from specdec_lib.report.reproduce import reproduce

REPOSITORY = Path(__file__).resolve().parents[1]

IMPORT = "from specdec_lib.report import claim, save"
GOOD = """
import matplotlib.pyplot as plt
fig, ax = plt.subplots(figsize=(1, 1))
save(fig, "dot")
"""
CLAIM = 'claim("sum", "n is n", source="here", kind="proved", holds=HOLDS, measured=n)'
INTERRUPTIBLE = """
import time
from pathlib import Path
first = not Path("started").exists()
Path("started").touch()
time.sleep(300 if first else 0)
"""


def write(root, stem, *cells, tags=()):
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    notebook = nbformat.v4.new_notebook(metadata=metadata)
    notebook.cells = [nbformat.v4.new_code_cell("n: int = 1  # a number", metadata={"tags": ["parameters", *tags]})]
    notebook.cells += [nbformat.v4.new_code_cell(cell.strip()) for cell in cells]
    (root / "notebooks" / "profiles").mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, root / "notebooks" / f"{stem}.ipynb")


def profile(root, name, text):
    (root / "notebooks" / "profiles" / f"{name}.yaml").write_text(text)


def records(folder):
    return {path.name.split(".")[0]: json.loads(path.read_text()) for path in folder.glob("*.run.json")}


def test_the_whole_story(tmp_path, capsys):
    """One test, because each kernel takes a second to start: first run, rerun, changes, force."""
    root = tmp_path / "checkout {1}"  # braces and spaces in a path are nobody's business
    write(root, "00_good", IMPORT, GOOD, CLAIM.replace("HOLDS", "n == 7"))
    write(root, "01_bad", "raise KeyError('no such word')", "never = 1")
    write(root, "02_false", IMPORT, CLAIM.replace("HOLDS", "False"))
    (root / "specdec_lib").mkdir()
    (root / "specdec_lib" / "one.py").write_text("x = 1\n")
    profile(root, "cpu", "00_good: {n: 7}\n01_bad:\n02_false: {}\n_timeout: 60\n")
    results = root / "results" / "cpu"

    assert reproduce(root=root) == 1
    said = capsys.readouterr().out
    assert "In [2]: raise KeyError('no such word')\n    KeyError: 'no such word'" in said
    assert "1 of 2 claims hold on this machine" in said
    assert "must hold and does not: sum (02_false)" in said
    assert {stem: record["state"] for stem, record in records(results).items()} == {
        "00_good": "ok",
        "01_bad": "failed",
        "02_false": "ok",
    }
    left = {path.relative_to(results).as_posix() for path in results.rglob("*") if path.is_file()}
    notebooks = {f"{stem}{kind}" for stem in records(results) for kind in (".ipynb", ".html", ".run.json")}
    assert left == notebooks | {
        "claims/00_good.json",
        "claims/02_false.json",
        "figures/00_good/dot.png",
        "figures/00_good/dot.svg",
        "environment.json",
        "claims.json",
        "claims.md",
        "index.html",
    }
    assert str(root) not in (results / "00_good.ipynb").read_text()
    executed = nbformat.read(results / "00_good.ipynb", as_version=4)
    assert [cell.execution_count for cell in executed.cells] == [1, 2, 3, 4, 5]
    assert [list(out.data) for out in executed.cells[3].outputs] == [["image/png", "text/plain"]]  # shown once
    assert "measured 7" in executed.cells[4].outputs[0].data["text/markdown"]
    assert "KeyError" in (results / "01_bad.html").read_text()
    index = (results / "index.html").read_text()
    assert all(f'<a href="{stem}.html">' in index for stem in records(results)) and "failed: In [2]" in index

    # Again: only what failed runs, and the status still tells of the claim.
    before = records(results)
    assert reproduce(root=root) == 1
    said = capsys.readouterr().out
    assert said.count("unchanged") == 2 and "must hold and does not: sum" in said
    assert records(results)["00_good"] == before["00_good"]
    assert "ok (unchanged, skipped)" in (results / "index.html").read_text()

    # A mended notebook runs, and a figure that it no longer draws is gone.
    write(
        root, "00_good", CLAIM.replace("HOLDS", "True").replace("claim(", "import specdec_lib.report as r; r.claim(", 1)
    )
    assert reproduce(root=root, notebooks=["00_good.ipynb"]) == 0
    assert "unchanged" not in capsys.readouterr().out
    assert not (results / "figures" / "00_good").exists()
    assert "2 of" not in (results / "claims.md").read_text()

    # Library, parameters and force each make it run again; nothing else does.
    assert reproduce(root=root, notebooks=["00_good"]) == 0
    assert "unchanged" in capsys.readouterr().out
    (root / "specdec_lib" / "one.py").write_text("x = 2\n")
    assert reproduce(root=root, notebooks=["00_good"]) == 0
    profile(root, "cpu", "00_good: {n: 8}\n01_bad:\n02_false: {}\n")
    assert reproduce(root=root, notebooks=["00_good"]) == 0
    assert reproduce(root=root, notebooks=["00_good"], force=True) == 0
    assert "unchanged" not in capsys.readouterr().out
    assert json.loads((results / "claims" / "00_good.json").read_text())[0]["measured"] == 8


def test_a_cell_over_its_time_and_a_kernel_that_dies_are_failures_of_one_notebook(tmp_path, capsys):
    write(tmp_path, "00_slow", "import time; time.sleep(300)")
    write(tmp_path, "01_dies", "import os; os._exit(9)")
    profile(tmp_path, "cpu", "00_slow: {}\n01_dies: {}\n_timeout: 1\n")
    assert reproduce(root=tmp_path, results=tmp_path / "elsewhere") == 1
    said = capsys.readouterr().out
    assert "cell 2: import time; time.sleep(300)\n    CellTimeoutError" in said
    assert "cell 2: import os; os._exit(9)\n    the kernel died" in said
    assert not list(tmp_path.rglob(".running*"))


def test_control_c_keeps_what_is_finished_and_a_rerun_goes_on(tmp_path):
    write(tmp_path, "00_quick", "n")
    write(tmp_path, "01_slow", INTERRUPTIBLE)
    profile(tmp_path, "cpu", "00_quick: {}\n01_slow: {}\n")
    command = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from pathlib import Path\n"
        "from specdec_lib.report.reproduce import reproduce\n"
        "sys.exit(reproduce(root=Path(sys.argv[1])))"
    )
    started = tmp_path / "notebooks" / "started"
    run = subprocess.Popen(
        [sys.executable, "-c", command, str(tmp_path)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    while not started.exists() and run.poll() is None:
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    said, _ = run.communicate()
    assert run.returncode == 130
    assert "interrupted. Finished: 00_quick. The same command goes on with 01_slow." in said
    results = tmp_path / "results" / "cpu"
    assert list(records(results)) == ["00_quick"]
    assert not list(results.glob(".running*"))
    first = records(results)["00_quick"]
    assert reproduce(root=tmp_path) == 0
    assert records(results)["00_quick"] == first
    assert records(results)["01_slow"]["state"] == "ok"


@pytest.fixture
def checkout(tmp_path):
    write(tmp_path, "00_a", "n")
    write(tmp_path, "01_b", "n")
    profile(tmp_path, "cpu", "00_a: {}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("02_c: {}\n", "unknown notebook '02_c': there are 00_a, 01_b"),
        ("00_a: {samples: 3}\n", "00_a has no parameter 'samples': it has n"),
        ("00_a: {n: 1e4}\n", "n must be int, got '1e4'.*1.0e-4.*as text"),
        ('00_a: {n: "3"}\n', "n must be int, got '3'"),
        ("00_a: {n: true}\n", "n must be int, got True"),
        ("00_a: {n: 1.5}\n", "n must be int, got 1.5"),
        ("00_a: 3\n", "must map parameters to values"),
        ("00_a: {n: [}\n", "not valid YAML"),
        ("- 00_a\n", "must map notebooks"),
        ("_timeout: -1\n00_a: {}\n", "_timeout must be a positive number"),
        ("_speed: 1\n00_a: {}\n", "unknown notebook '_speed'"),
    ],
)
def test_a_bad_profile_is_refused_before_anything_runs(checkout, content, message):
    profile(checkout, "odd", content)
    with pytest.raises(SpecdecError, match=message) as caught:
        reproduce("odd", root=checkout)
    assert "\n" not in str(caught.value)
    assert not (checkout / "results").exists()


def test_unknown_profile_and_notebook_are_refused(checkout):
    with pytest.raises(SpecdecError, match="unknown profile 'fast': use one of cpu"):
        reproduce("fast", root=checkout)
    with pytest.raises(SpecdecError, match="unknown notebook '01_b': there are 00_a"):
        reproduce("cpu", notebooks=["01_b"], root=checkout)
    with pytest.raises(SpecdecError, match="run from a checkout"):
        reproduce("cpu", root=checkout / "nowhere")


def test_results_that_cannot_be_written_are_refused(checkout):
    (checkout / "taken").write_text("a file")
    with pytest.raises(SpecdecError, match="cannot write results"):
        reproduce("cpu", results=checkout / "taken", root=checkout)


def test_parameter_cells_hold_annotated_literals_only():
    n, names = parse_parameters('n: int = 20_000  # draws\nnames: list[str] = [\n    "a",\n]  # two # marks', "x")
    assert (n.default, n.comment, names.default, names.comment) == (20000, "draws", ["a"], "two # marks")
    for wrong in ("n = 3", "n: int", "n: int = 2 * k", "import numpy"):
        with pytest.raises(SpecdecError, match="must read `name: type = literal"):
            parse_parameters(wrong, "x")
