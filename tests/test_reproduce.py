"""The runner, on notebooks of three lines: what it leaves, what it skips, what it refuses, how it ends."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

from specdec_lib import paths
from specdec_lib.errors import SpecdecError
from specdec_lib.files import HOLDER, LOCK, held, host, replace_folder, restore_folder
from specdec_lib.report import reproduce as module
from specdec_lib.report import runner
from specdec_lib.report.profiles import Parameter, accepts, parameters_of
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
    (root / "notebooks").mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, root / "notebooks" / f"{stem}.ipynb")
    if not (beside := root / "notebooks" / f"{stem}.yaml").exists():
        beside.write_text("sizes: {}")


def profile(root, name, text):
    """The files beside the notebooks, of a text `stem: parameters`, one a line."""
    for line in text.strip().split("\n"):
        stem, given = line.split(":", 1)
        (root / "notebooks" / f"{stem}.yaml").write_text(f"sizes:\n  {name}:{given}\n")


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
    profile(root, "cpu", "00_good: {n: 7}\n01_bad:\n02_false: {}\n")
    results = root / "results" / "cpu"

    assert reproduce(root=root) == 1
    said = capsys.readouterr().out
    assert "In [2]: raise KeyError('no such word')\n    KeyError: 'no such word'" in said
    assert "1 of 2 claims holds on this machine; 1 does not." in said
    assert "must hold and does not: sum (02_false)" in said
    assert {stem: record["state"] for stem, record in records(results).items()} == {
        "00_good": "ok",
        "01_bad": "failed",
        "02_false": "ok",
    }
    left = {path.relative_to(results).as_posix() for path in results.rglob("*") if path.is_file() and path.name != LOCK}
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
    assert "measured 7" in executed.cells[4].outputs[0].data["text/html"]
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


def test_a_kernel_that_dies_is_the_failure_of_one_notebook(tmp_path, capsys):
    write(tmp_path, "00_quick", "n")
    write(tmp_path, "01_dies", "import os; os._exit(9)")
    profile(tmp_path, "cpu", "00_quick: {}\n01_dies: {}\n")
    assert reproduce(root=tmp_path, results=tmp_path / "elsewhere") == 1
    said = capsys.readouterr().out
    assert records(tmp_path / "elsewhere")["00_quick"]["state"] == "ok"
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
        [sys.executable, "-c", command, str(tmp_path)],
        cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not started.exists() and run.poll() is None:
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    said, complained = run.communicate()
    assert run.returncode == 130
    assert "Traceback" not in complained
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
        ("00_a: 3\n", "00_a.yaml: sizes must map names to mappings"),
        ("00_a: {n: [}\n", "00_a.yaml: not valid YAML"),
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


def parameters_cell(root, source):
    write(root, "00_a {1}")
    path = root / "notebooks" / "00_a {1}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[0].source = source
    nbformat.write(notebook, path)
    return path


def test_parameters_are_what_papermill_reads(tmp_path):
    source = 'n: int = 20_000  # draws\n# a remark\nnames: list[str] = [\n    "a",\n]  # two # marks'
    assert list(parameters_of(parameters_cell(tmp_path, source)).values()) == [
        Parameter("n", "int", 20_000, "draws"),
        Parameter("names", "list[str]", ["a"], "two # marks"),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "n = 3",
        "n: int",
        "n: int = 2 * k",
        "import numpy",
        "n: int | None = None",
        "n: integer = 3",
        "n: list[integer] = []",
        "n: int = 3  # k = 3",
        'n: str = "a # b"',
        'n: str = "a = b"',
    ],
)
def test_a_parameter_that_papermill_would_skip_or_misread_is_refused(tmp_path, line):
    path = parameters_cell(tmp_path, f"k: int = 1  # first\n{line}")
    with pytest.raises(SpecdecError, match=r"00_a \{1\}: line 2 of the parameters cell must read `name: type = lit"):
        parameters_of(path)


@pytest.mark.parametrize(
    "annotation, good, bad",
    [
        ("int", [0, -3], [True, 1.5, "3", None, [1]]),
        ("float", [1.5, 3], [True, "1e-4", None]),
        ("bool", [True], [0, "true"]),
        ("str", ["", "1"], [1, None]),
        ("list[int]", [[], [1, 2]], [1, ["1"], [True], [1.5]]),
        ("dict[str, list[str]]", [{}, {"a": ["b"]}], [[], {"a": "b"}, {1: ["b"]}]),
    ],
)
def test_values_of_parameters_are_checked_strictly(annotation, good, bad):
    assert all(accepts(annotation, value) for value in good)
    assert not any(accepts(annotation, value) for value in bad)


# -- without kernels: what counts, what is run again, what fails alone ---------------------------------------


@pytest.fixture
def instant(checkout, monkeypatch):
    """A checkout whose notebooks take no time: `ran` lists those that were run, each with one claim that holds."""
    ran = []

    def execute(source, stage, parameters, on_cell):
        ran.append(source.stem)
        row = {"id": "a", "statement": "s", "source": "here", "kind": "proved", "verdict": "holds", "must_hold": True}
        (stage / "claims.json").write_text(json.dumps([row]))
        (stage / source.name).write_text("{}")
        return []

    monkeypatch.setattr(runner, "execute", execute)
    return checkout, ran


@pytest.fixture
def checkout_data(instant):
    """The checkout with a folder of data that no list names."""
    root, ran = instant
    (root / "data" / "new" / "deep").mkdir(parents=True)
    (root / "data" / "new" / "deep" / "weights").write_text("1")
    return root, ran


def test_any_folder_of_data_makes_notebooks_run_again_and_what_was_fetched_does_not(checkout_data):
    root, ran = checkout_data
    assert reproduce(root=root) == reproduce(root=root) == 0 and ran == ["00_a"]
    (root / "data" / "new" / "deep" / "weights").write_text("2")
    assert reproduce(root=root) == 0 and ran == ["00_a"] * 2
    (root / "data" / "another").mkdir()
    (root / "data" / "another" / "file").touch()
    assert reproduce(root=root) == 0 and ran == ["00_a"] * 3
    for made in paths.FETCHED_OR_MADE:
        (root / "data" / made).mkdir()
        (root / "data" / made / "file").touch()
    (root / "data" / ".new-replaced").mkdir()
    for hidden in (".new-replaced/file", "new/.lock"):
        (root / "data" / hidden).touch()
    assert reproduce(root=root) == 0 and ran == ["00_a"] * 3


def test_every_folder_of_data_that_git_keeps_is_in_the_digest():
    listed = subprocess.run(["git", "ls-files", "data"], cwd=REPOSITORY, capture_output=True, text=True)
    kept = {Path(line).parts[1] for line in listed.stdout.splitlines() if len(Path(line).parts) > 2}
    assert kept <= {path.name for path in paths.data_folders(REPOSITORY)}


def test_claims_of_notebooks_that_the_profile_does_not_list_are_not_counted(instant, capsys):
    root, _ = instant
    claims = root / "results" / "cpu" / "claims"
    claims.mkdir(parents=True)
    row = {
        "id": "gone",
        "statement": "s",
        "source": "x",
        "kind": "proved",
        "verdict": "does not hold",
        "must_hold": True,
    }
    (claims / "99_gone.json").write_text(json.dumps([row]))
    assert reproduce(root=root) == 0
    assert "1 of 1 claims holds" in capsys.readouterr().out
    assert "gone" not in (root / "results" / "cpu" / "claims.md").read_text()
    assert "gone" not in (root / "results" / "cpu" / "index.html").read_text()


def test_a_notebook_whose_page_or_files_cannot_be_written_fails_alone(tmp_path, monkeypatch, capsys):
    for stem in ("00_a", "01_b", "02_c"):
        write(tmp_path, stem, "n")
    profile(tmp_path, "cpu", "00_a: {}\n01_b: {}\n02_c: {}\n")
    real_page, real_publish = runner.html, module.publish

    def papermill(source, target, **_):
        Path(target).write_text(Path(source).read_text())

    def page(notebook, title):
        if title == "00_a":
            raise ValueError("no template\nand more")
        return real_page(notebook, title)

    def publish(stage, folder, stem):
        if stem == "01_b":
            raise OSError(28, "No space left on device")
        real_publish(stage, folder, stem)

    monkeypatch.setattr(runner.papermill, "execute_notebook", papermill)
    monkeypatch.setattr(runner, "html", page)
    monkeypatch.setattr(module, "publish", publish)
    assert reproduce(root=tmp_path) == 1
    said = capsys.readouterr().out
    assert "ValueError: no template" in said and "and more" not in said
    assert "could not be kept: [Errno 28] No space left on device" in said
    results = tmp_path / "results" / "cpu"
    assert {stem: record["state"] for stem, record in records(results).items()} == {
        "00_a": "failed", "01_b": "failed", "02_c": "ok",
    }  # fmt: skip
    assert (results / "00_a.ipynb").exists() and (results / "02_c.html").exists()


def test_sigterm_ends_a_run_as_control_c_does(instant, monkeypatch, capsys):
    root, _ = instant
    before = signal.getsignal(signal.SIGTERM)

    def terminated(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "execute", terminated)
        assert reproduce(root=root) == 143
    assert "interrupted. Finished: none. The same command goes on with 00_a." in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) == before and not records(root / "results" / "cpu")
    assert not list((root / "results" / "cpu").glob(".running*"))
    assert reproduce(root=root) == 0


# -- one run at a time ---------------------------------------------------------------------------------------


def test_a_second_run_of_the_same_results_is_refused_and_told_who_runs(instant):
    root, ran = instant
    results = root / "results" / "cpu"
    with held(results, "the results folder"):
        with pytest.raises(SpecdecError, match=f"in use by process {os.getpid()} on .* since .*: wait") as caught:
            reproduce(root=root)
        assert "\n" not in str(caught.value) and not ran
        assert reproduce(root=root, results=root / "elsewhere") == 0
    assert reproduce(root=root) == 0 and not (results / HOLDER).exists()


def test_the_lock_of_a_killed_process_is_free_and_a_waiting_one_says_for_whom(tmp_path):
    command = (
        "import sys, time; from pathlib import Path; from specdec_lib.files import held\n"
        "with held(Path(sys.argv[1]), 'it'): print('held', flush=True); time.sleep(300)"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", command, str(tmp_path)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    assert run.stdout.readline() == "held\n"
    told = []

    def wait(line):
        told.append(line)
        run.kill()

    with held(tmp_path, "the folder", wait):
        assert f"the folder {tmp_path} is in use by process {run.pid} on " in told[0] and "waiting for it" in told[0]
        assert str(os.getpid()) in (tmp_path / HOLDER).read_text()
    run.wait()


def test_leftovers_of_this_machine_go_and_those_of_another_stay(instant):
    root, _ = instant
    results = root / "results" / "cpu"
    for name in (f".running-{host()}-abc", ".running-elsewhere-abc"):
        (results / name).mkdir(parents=True)
    assert reproduce(root=root) == 0
    assert [path.name for path in results.glob(".running*")] == [".running-elsewhere-abc"]


def test_a_folder_is_replaced_whole_also_after_a_kill_between_the_renames(tmp_path):
    def folder(name, text):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(text)
        return tmp_path / name

    place = folder("draft", "old")
    replace_folder(folder("made", "new"), place)
    assert (place / "file").read_text() == "new" and [p.name for p in tmp_path.iterdir()] == ["draft"]
    place.rename(tmp_path / ".draft-replaced")  # killed here
    restore_folder(place)
    assert (place / "file").read_text() == "new"
    folder(".draft-replaced", "older")  # killed after the second rename
    restore_folder(place)
    assert (place / "file").read_text() == "new" and [p.name for p in tmp_path.iterdir()] == ["draft"]


def test_what_asyncio_says_of_interrupted_tasks_is_not_shown(tmp_path, monkeypatch, caplog):
    import asyncio

    def interrupted(*_, **__):
        async def cell():
            raise KeyboardInterrupt

        async def polls():
            task = asyncio.ensure_future(cell())
            await asyncio.sleep(1)
            await task

        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(polls())
        finally:
            loop.close()

    write(tmp_path, "00_a", "n")
    profile(tmp_path, "cpu", "00_a: {}\n")
    monkeypatch.setattr(runner.papermill, "execute_notebook", interrupted)
    assert reproduce(root=tmp_path) == 130
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]
