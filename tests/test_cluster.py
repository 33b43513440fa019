"""Notebooks on dask workers: the same results, nothing lost when a worker dies, no two that disturb each other."""

import json
import logging
import os
import signal
import threading
import time
from itertools import pairwise

import nbformat
import pytest
from test_reproduce import profile, records, write

from specdec_lib import workers
from specdec_lib.errors import SpecdecError
from specdec_lib.provenance import state_of
from specdec_lib.report import cluster
from specdec_lib.report.board import Board
from specdec_lib.report.reproduce import prepare, reproduce

CLAIM = """
from specdec_lib.report import claim
claim("n", "n is what the profile says", source="here", kind="proved", holds=True, measured=n)
"""
# Notebooks 1 and 2 each wait until the other is there.
MEETS = """
import time
from pathlib import Path
Path(f"there {n}").touch()
deadline = time.monotonic() + 60
while not Path(f"there {3 - n}").exists():
    assert time.monotonic() < deadline
    time.sleep(0.02)
"""
LEAVES = 'Path(f"gone {n}").touch()'
ALONE = """
from pathlib import Path
assert Path("gone 1").exists() and Path("gone 2").exists()
"""
# Each run notes the process that runs it, from when to when.
NOTES = """
import os, time
from pathlib import Path
began = time.time()
with open("starts", "a") as file:
    print(n, os.getppid(), file=file)
time.sleep(0.3)
with open("spans", "a") as file:
    print(os.getppid(), began, time.time(), file=file)
"""
VICTIM = """
import os, time
from pathlib import Path
first = not Path("victim").exists()
with open("starts", "a") as file:
    print(n, os.getppid(), file=file)
if first:
    Path("part").write_text(str(os.getppid()))
    Path("part").rename("victim")
    time.sleep(300)
"""
THREADS = """
import os
from specdec_lib.report import claim
threads = os.environ.get("OMP_NUM_THREADS")
claim("threads", "as where it was asked for", source="here", kind="proved", holds=True, measured=threads)
"""


def left_by(folder):
    """What a run leaves, apart from what tells of its time and place."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".ipynb":
            found[name] = [cell.get("outputs") for cell in nbformat.read(path, as_version=4).cells]
        elif name.endswith(".run.json"):
            found[name] = json.loads(path.read_text()) | {"seconds": None, "environment": None}
        elif name == "claims.json" or name.startswith("claims/"):
            found[name] = path.read_text()
        elif path.is_file():
            found[name] = None
    return found


def test_two_jobs_share_the_machine_and_one_that_measures_time_comes_alone_afterwards(tmp_path, capsys):
    write(tmp_path, "00_alone", ALONE, CLAIM)
    write(tmp_path, "01_one", MEETS, CLAIM, LEAVES, tags=["parallel"])
    write(tmp_path, "02_two", MEETS, CLAIM, LEAVES, tags=["parallel"])
    profile(tmp_path, "cpu", "00_alone: {n: 3}\n01_one: {n: 1}\n02_two: {n: 2}\n")
    assert reproduce(root=tmp_path, jobs=2) == 0, capsys.readouterr().out
    found = left_by(tmp_path / "results" / "cpu")
    assert {stem: record["state"] for stem, record in records(tmp_path / "results" / "cpu").items()} == {
        "00_alone": "ok",
        "01_one": "ok",
        "02_two": "ok",
    }
    assert not list(tmp_path.rglob(".running*"))

    # One after the other takes up what was done beside each other, and leaves the same where it runs anew.
    capsys.readouterr()
    assert reproduce(root=tmp_path) == 0
    assert capsys.readouterr().out.count("unchanged") == 3
    assert reproduce(root=tmp_path, notebooks=["01_one"], force=True) == 0
    assert left_by(tmp_path / "results" / "cpu") == found


@pytest.fixture(scope="module")
def local():
    """Two workers with two threads each: a thread too many for notebooks."""
    how = {"threads_per_worker": 2, "memory_limit": 0, "dashboard_address": ":0", "silence_logs": logging.CRITICAL}
    with workers.LocalCluster(n_workers=2, **how) as found:
        yield found


def kill_when_written(path):
    """Kill, from a thread, the process whose number is in the file, as soon as there is one."""

    def kill():
        while not path.exists():
            time.sleep(0.02)
        os.kill(int(path.read_text()), signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return thread


def test_a_worker_killed_in_mid_run_loses_nothing(tmp_path, capsys, monkeypatch, local):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # dask tells its workers 1
    write(tmp_path, "00_victim", VICTIM, CLAIM)
    for n in (1, 2):
        write(tmp_path, f"0{n}_notes", NOTES, CLAIM, THREADS)
    profile(tmp_path, "cpu", "00_victim: {n: 0}\n" + "".join(f"0{n}_notes: {{n: {n}}}\n" for n in (1, 2)))
    killer = kill_when_written(tmp_path / "notebooks" / "victim")
    assert reproduce(root=tmp_path, scheduler=local.scheduler_address) == 0, capsys.readouterr().out
    killer.join()
    assert "several workers share a machine" in capsys.readouterr().out

    results = tmp_path / "results" / "cpu"
    assert {stem: record["state"] for stem, record in records(results).items()} == {
        "00_victim": "ok",
        "01_notes": "ok",
        "02_notes": "ok",
    }
    claims = json.loads((results / "claims.json").read_text())["claims"]
    assert sorted(c["measured"] for c in claims if c["id"] == "n") == [0, 1, 2]
    assert [c["measured"] for c in claims if c["id"] == "threads"] == ["7"] * 2
    assert {r["environment"]["threads"]["omp"] for r in records(results).values()} == {"7"}

    starts = [line.split() for line in (tmp_path / "notebooks" / "starts").read_text().splitlines()]
    assert [n for n, _ in starts].count("0") == 2  # the victim, and the victim again
    assert len({process for n, process in starts if n == "0"}) == 2
    assert all([n for n, _ in starts].count(n) >= 1 for n in "12")
    spans = [map(float, line.split()) for line in (tmp_path / "notebooks" / "spans").read_text().splitlines()]
    spans = sorted(tuple(span) for span in spans)
    for (one, _, end), (other, begin, _) in pairwise(spans):
        assert one != other or end <= begin  # one notebook at a time on a worker

    # Resumed elsewhere, nothing is left to do.
    assert reproduce(root=tmp_path) == 0
    assert capsys.readouterr().out.count("unchanged") == 3


def test_what_went_wrong_on_a_worker_fails_one_notebook(tmp_path):
    write(tmp_path, "00_a", "n")
    job = prepare(tmp_path, "00_a", {"n": 2}, {})

    class Failed:
        def __init__(self, error):
            self.error = error

        def result(self):
            raise self.error

    for error, message in [
        (workers.KilledWorker("work-1", None, 3), "each worker that took it died"),
        (SpecdecError("the worker w1 has other library: mend it"), "the worker w1 has other library: mend it"),
        (ImportError("no module\nat all"), "ImportError: no module"),
    ]:
        record = cluster.deliver(Failed(error), job, tmp_path)
        assert record["state"] == "failed" and record["error"][0].startswith(message)
    with pytest.raises(KeyboardInterrupt):
        cluster.deliver(Failed(KeyboardInterrupt()), job, tmp_path)


@pytest.mark.large
def test_a_notebook_that_kills_every_worker_fails_alone(tmp_path, capsys, local):
    local.scheduler.allowed_failures = 0
    write(tmp_path, "00_deadly", "import os, signal, time; os.kill(os.getppid(), signal.SIGKILL); time.sleep(300)")
    write(tmp_path, "01_well", CLAIM)
    profile(tmp_path, "cpu", "00_deadly: {}\n01_well: {}\n")
    assert reproduce(root=tmp_path, scheduler=local.scheduler_address) == 1
    assert "each worker that took it died" in capsys.readouterr().out
    found = records(tmp_path / "results" / "cpu")
    assert (found["00_deadly"]["state"], found["01_well"]["state"]) == ("failed", "ok")
    assert "00_deadly.html" not in (tmp_path / "results" / "cpu" / "index.html").read_text()


def test_a_worker_whose_checkout_differs_is_refused(tmp_path):
    for name, cell in (("here", "n"), ("same", "n"), ("other", "n + 1")):
        write(tmp_path / name, "00_a", cell)
    job = prepare(tmp_path / "here", "00_a", {"n": 2}, state_of(tmp_path / "here"))
    cluster.check(job, tmp_path / "same", "w1")
    with pytest.raises(SpecdecError, match="worker w1 has other notebook: bring its checkout"):
        cluster.check(job, tmp_path / "other", "w1")
    (tmp_path / "same" / "specdec_lib").mkdir()
    (tmp_path / "same" / "specdec_lib" / "one.py").touch()
    with pytest.raises(SpecdecError, match="worker w1 has other library"):
        cluster.check(job, tmp_path / "same", "w1")


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "nowhere"])
def test_a_scheduler_that_does_not_answer_is_bad_input(tmp_path, monkeypatch, address):
    monkeypatch.setattr(workers, "TIMEOUT", 0.3)
    write(tmp_path, "00_a", "n")
    profile(tmp_path, "cpu", "00_a: {}\n")
    with pytest.raises(SpecdecError, match=f"no dask scheduler answers at {address}: start one") as error:
        reproduce(root=tmp_path, scheduler=address)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"jobs": 0}, "jobs is 0"), ({"jobs": 2, "scheduler": "tcp://127.0.0.1:9"}, "use one of the two")],
)
def test_impossible_options_are_refused_before_anything_is_written(tmp_path, options, message):
    write(tmp_path, "00_a", "n")
    profile(tmp_path, "cpu", "00_a: {}\n")
    with pytest.raises(SpecdecError, match=message):
        reproduce(root=tmp_path, **options)
    assert not (tmp_path / "results").exists()


def test_the_board_shows_what_runs_and_drops_late_news():
    board = Board(["00_a", "01_b"])
    board.started("00_a", 3)
    board.started("01_b", 5)
    board.cell("01_b", 2)
    board.finished("00_a", "ok", 0.0)
    board.cell("00_a", 1)
    board.started("01_b", 5)  # its worker died: anew
    assert [(task.description, task.completed, task.total) for task in board.progress.tasks] == [("2/2 01_b", 0, 5)]


def test_a_notebook_is_alone_unless_it_says_otherwise(tmp_path):
    write(tmp_path, "00_a", "n")
    write(tmp_path, "01_b", "n", tags=["parallel"])
    jobs = [prepare(tmp_path, stem, {}, {}) for stem in ("00_a", "01_b")]
    assert [job.shares for job in jobs] == [False, True]
