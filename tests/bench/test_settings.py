"""Several settings of the bench: one after the other or on dask workers, the same numbers, nothing lost or redone."""

import json
import logging
import os
import signal
import threading
import time

import psutil
import pytest

from specdec_lib.bench import settings
from specdec_lib.bench.settings import Setting, measure_setting, sweep
from specdec_lib.errors import SpecdecError


@pytest.fixture(scope="module")
def target(tiny_folder):
    return str(tiny_folder("llama"))


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "mine.jsonl"
    path.write_text('{"prompt": "a b a b a b"}\n{"prompt": "so so"}\n')
    return str(path)


@pytest.fixture
def asked(target, mine):
    """Three draft lengths, without the processes that measure memory."""
    return [Setting(target, "lookup", gamma, 8, prompts=mine, repeats=0) for gamma in (1, 2, 3)]


@pytest.fixture
def quiet(monkeypatch):
    """A quiet machine, and a checkout that is not edited while the test runs."""
    monkeypatch.setattr(settings, "cpu_use", lambda: 0.0)
    state = settings.state_of(settings.ROOT)
    monkeypatch.setattr(settings, "state_of", lambda root: state)


def counted(found):
    """What no clock tells."""
    names = ("setting", "alpha", "block_efficiency", "new_tokens", "texts", "accepted_per_drafted")
    return {name: found[name] for name in names}


def test_a_sweep_goes_on_where_it_was_left(asked, tmp_path, monkeypatch, quiet):
    file, told, real = tmp_path / "sweep.json", [], measure_setting
    met = []

    def interrupted(setting, ticks):
        met.append(setting.gamma)
        if setting.gamma == 2 and len(met) == 2:
            raise KeyboardInterrupt
        return real(setting, ticks)

    monkeypatch.setattr(settings, "measure_setting", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sweep(asked, file, say=told.append)
    assert [entry["setting"]["gamma"] for entry in json.loads(file.read_text())["settings"]] == [1]
    found = sweep(asked, file, say=told.append)
    assert met == [1, 2, 2, 3] and "1 of 3 settings are in" in told[1]
    assert [entry["setting"]["gamma"] for entry in found] == [1, 2, 3]
    assert json.loads(file.read_text())["settings"] == json.loads(json.dumps(found))

    # another length of text is another setting, and an old one that is not asked for is not kept
    longer = [Setting(**{**vars(setting), "max_new_tokens": 9}) for setting in asked[:1]]
    sweep(longer, file, say=told.append)
    assert met[4:] == [1] and len(json.loads(file.read_text())["settings"]) == 1


def test_a_run_cut_short_is_no_finished_setting(asked, tmp_path, monkeypatch, quiet):
    monkeypatch.setattr(settings, "measure_setting", lambda *_: {"runs": [{"interrupted": "1 of 2 prompts"}]})
    with pytest.raises(KeyboardInterrupt):
        sweep(asked, tmp_path / "sweep.json", say=lambda line: None)
    assert not (tmp_path / "sweep.json").exists()


def test_a_setting_that_fails_fails_alone(asked, tmp_path, quiet):
    told = []
    broken = Setting(**{**vars(asked[0]), "draft": "./nothing"})
    found = sweep([broken, asked[0]], tmp_path / "sweep.json", say=told.append)
    assert [entry["setting"]["draft"] for entry in found] == ["lookup"]
    assert "draft ./nothing, gamma 1: failed: there is no model folder" in told[0]


@pytest.fixture(scope="module")
def local():
    from specdec_lib.report.workers import LocalCluster

    how = {"threads_per_worker": 2, "memory_limit": 0, "dashboard_address": ":0", "silence_logs": logging.CRITICAL}
    with LocalCluster(n_workers=2, **how) as found:
        yield found


def kill_a_worker_in_mid_run(killed):
    """Kill, from a thread, the first process that is seen to measure a setting for a worker: the worker, not it."""

    def measures(process):
        try:
            return settings.__name__ in process.cmdline()
        except psutil.Error:
            return False

    def kill():
        deadline = time.monotonic() + 120
        while not killed and time.monotonic() < deadline:
            for process in psutil.Process().children(recursive=True):
                if not killed and measures(process):
                    killed.append((process, process.ppid()))
                    os.kill(process.ppid(), signal.SIGKILL)
            time.sleep(0.02)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return thread


def test_a_worker_killed_in_mid_run_loses_nothing(asked, tmp_path, local, quiet, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    told, killed = [], []
    killer = kill_a_worker_in_mid_run(killed)
    file = tmp_path / "sweep.json"
    found = sweep(asked[:2], file, scheduler=local.scheduler_address, say=told.append)
    killer.join()
    assert len(killed) == 1 and not psutil.pid_exists(killed[0][1])
    psutil.wait_procs([killed[0][0]], timeout=30)
    assert not killed[0][0].is_running()  # what it measured died with it
    assert len(found) == 2 and "several workers share a machine" in told[0], told

    # the numbers of this process, and the same file
    assert [counted(entry) for entry in found] == [counted(measure_setting(setting)) for setting in asked[:2]]
    assert {entry["environment"]["threads"]["omp"] for entry in found} == {"1"}
    assert len(json.loads(file.read_text())["settings"]) == 2
    assert "2 of 2 settings are in" in (sweep(asked[:2], file, say=told.append), told[-1])[1]


def test_a_worker_with_another_library_or_a_failing_process_fails_the_setting(asked, monkeypatch):
    class Worker:
        address = "w1"

    monkeypatch.setattr("distributed.get_worker", Worker)
    here = asked[0].depends_on(settings.state_of(settings.ROOT))
    with pytest.raises(SpecdecError, match="worker w1 has other library"):
        settings.work((asked[0], here | {"library": "another"}), {})
    broken = Setting(**{**vars(asked[0]), "draft": "./nothing"})
    with pytest.raises(SpecdecError, match="there is no model folder"):
        settings.work((broken, broken.depends_on(settings.state_of(settings.ROOT))), {})


# -- the door ------------------------------------------------------------------------------------------


@pytest.fixture
def call(door, target, mine, quiet, no_footprint):
    words = ["--target", target, "--prompts", mine, "--max-new-tokens", 8]
    return lambda *more: door(*words, *more)


def test_several_drafts_and_lengths_make_a_sweep(call, target, tmp_path):
    file = tmp_path / "sweep.json"
    words = ["--draft", "lookup", "--draft", target, "--gamma", 1, "--gamma", 3, "--json", file]
    done = call(*words)
    assert done.exit_code == 0, done.exception
    found = json.loads(file.read_text())
    assert [(e["setting"]["draft"], e["setting"]["gamma"]) for e in found["settings"]] == [
        ("lookup", 1), ("lookup", 3), (target, 1), (target, 3),
    ]  # fmt: skip
    assert all(entry["memory"] and entry["runs"] for entry in found["settings"]) and found["environment"]
    assert "what it is made of" in done.stdout and "assisted" in done.stdout
    assert sum(line.startswith("lookup ") for line in done.stdout.splitlines()) == 2
    # an entry has the numbers of a call with that one setting
    alone = call("--draft", "lookup", "--gamma", 3, "--json", tmp_path / "one.json")
    one = json.loads((tmp_path / "one.json").read_text())
    assert alone.exit_code == 0 and set(found["settings"][1]) == {*one, "depends_on"}
    assert counted(one) == counted(found["settings"][1])


def test_a_sweep_of_which_a_part_failed_has_status_1(call):
    assert call("--draft", "lookup", "--draft", "./nothing").exit_code == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gamma", 1, "--gamma", 0], "gamma must be a whole number >= 1"),
        (["--gamma", 1, "--gamma", 8], "no round could draft 8 tokens"),
        (["--jobs", 0], "jobs is 0"),
        (["--jobs", 2, "--scheduler", "tcp://127.0.0.1:9"], "use one of the two"),
        (["--gamma", 1, "--gamma", 2, "--keep"], "--keep notes one speed"),
        (["--tokenizers", "both"], "unknown tokenizers"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(words, message, call, monkeypatch):
    monkeypatch.setattr(settings, "measure_setting", lambda *_: pytest.fail("measured"))
    done = call(*words)
    assert isinstance(done.exception, SpecdecError) and message in str(done.exception)
