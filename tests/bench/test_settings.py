"""Several settings of the bench: one after the other or on dask workers, the same numbers, nothing lost or redone."""

import json
import logging
import os
import signal
import threading
import time

import psutil
import pytest

from specdec_lib.bench import command, settings
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


def test_what_is_measured_is_there_after_an_interrupt(asked, tmp_path, monkeypatch, quiet):
    def measured(setting, ticks):
        if setting.gamma == 3:
            raise KeyboardInterrupt
        return {"speedup": 1.0, "temperature": 0.0, "runs": [{}]}

    monkeypatch.setattr(settings, "measure_setting", measured)
    done = {}
    with pytest.raises(KeyboardInterrupt):
        sweep(asked, say=lambda line: None, done=done)
    assert [setting.gamma for setting in done] == [1, 2]


def test_an_interrupt_at_the_second_temperature_keeps_the_first(asked, monkeypatch, quiet):
    setting = Setting(**{**vars(asked[0]), "temperatures": (0.0, 1.0), "repeats": 3})
    monkeypatch.setattr(settings, "footprint", lambda *_, **__: pytest.fail("measured after an interrupt"))

    def ticks(what, steps):
        if "temperature 1" in what:
            raise KeyboardInterrupt
        return lambda: None

    with pytest.raises(KeyboardInterrupt):  # before the race begins nobody looks after it
        measure_setting(Setting(**{**vars(setting), "temperatures": (1.0,)}), ticks)
    monkeypatch.setattr(settings, "measure", interrupted_at(1.0))
    found = measure_setting(setting)
    assert [run["temperature"] for run in found["runs"]] == [0.0]
    assert found["runs"][0]["interrupted"] == "nothing at temperature 1" and found["memory"] is None
    assert "interrupted" in found["runs"][0]["notes"][-1]


def interrupted_at(temperature):
    def measured(contest, chosen, gamma, length, t, seed, tick):
        if t == temperature:
            raise KeyboardInterrupt
        return {"temperature": t, "notes": []}

    return measured


@pytest.mark.parametrize(
    "content",
    ['{"settings": ["x"]}', '{"settings": 5}', '{"settings": {"a": 1}}', "[]", "null", '{"settings": null}', "{"],
)
def test_a_file_of_anything_else_holds_no_settings(content, tmp_path):
    (tmp_path / "odd.json").write_text(content)
    assert settings.read(tmp_path / "odd.json") == []
    (tmp_path / "odd.json").write_text('{"settings": ["x", {"depends_on": {}}]}')
    assert settings.read(tmp_path / "odd.json") == [{"depends_on": {}}]


def test_a_setting_that_fails_fails_alone(asked, tmp_path, quiet):
    told = []
    broken = Setting(**{**vars(asked[0]), "draft": "./nothing"})
    found = sweep([broken, asked[0]], tmp_path / "sweep.json", say=told.append)
    assert [entry["setting"]["draft"] for entry in found] == ["lookup"]
    assert "draft ./nothing, gamma 1: failed: there is no draft './nothing'" in told[0]


@pytest.fixture(scope="module")
def local():
    from specdec_lib.workers import LocalCluster

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


@pytest.mark.large  # ten processes that import torch, one after the other; tests/test_cluster.py kills a worker, too
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


def test_sigterm_shows_and_writes_what_is_done(call, tmp_path, monkeypatch):
    """`timeout` sends it twice, to the process and to its group."""
    real = command.lines

    def lines(what, steps, say):
        tick = real(what, steps, say)

        def killed():
            tick()
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

        return killed

    monkeypatch.setattr(command, "lines", lines)
    before = signal.getsignal(signal.SIGTERM)
    done = call("--draft", "lookup", "--gamma", 2, "--json", tmp_path / "one.json")
    assert done.exit_code == 143, done.exception
    written = json.loads((tmp_path / "one.json").read_text())
    assert written["interrupted"] == "1 of 2 prompts" and written["prompts"] == 1 and written["memory"] is None
    assert "too few prompts for a verdict" in done.stdout and "only 1 of 2 prompts" in done.stdout
    assert "the numbers are of what was done" in done.stderr and signal.getsignal(signal.SIGTERM) == before


def test_control_c_in_a_sweep_shows_what_is_done(call, tmp_path, monkeypatch):
    real, met = settings.measure_setting, []

    def measured(setting, ticks):
        met.append(setting.gamma)
        if setting.gamma == 2:
            raise KeyboardInterrupt
        return real(setting, ticks)

    monkeypatch.setattr(settings, "measure_setting", measured)
    done = call("--draft", "lookup", "--gamma", 1, "--gamma", 2, "--gamma", 3, "--json", tmp_path / "sweep.json")
    assert done.exit_code == 130 and met == [1, 2]
    assert sum(line.startswith("lookup ") for line in done.stdout.splitlines()) == 1
    assert "1 of 3 settings are measured; the same command goes on from there" in done.stderr
    monkeypatch.setattr(settings, "measure_setting", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    done = call("--draft", "lookup", "--gamma", 4, "--gamma", 5)
    assert done.exit_code == 130 and "before anything was measured" in done.stderr


def test_progress_is_told_in_lines_where_there_is_no_terminal(call, monkeypatch):
    monkeypatch.setattr(command, "SECONDS_BETWEEN_LINES", 0)
    done = call("--draft", "lookup", "--gamma", 1)
    told = done.stderr.splitlines()
    about = "decoding at temperature 0: "
    found = [line.removeprefix(about) for line in told if line.startswith(about)]
    assert found == ["2 prompts", "1 of 2", "2 of 2"]
    assert "memory and loading" in told


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
