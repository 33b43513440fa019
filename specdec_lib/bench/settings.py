"""One setting of `specdec bench`, several of them, and who measures them: this process, or dask workers.

A setting is one draft and one draft length at all temperatures; whatever is compared is timed in turns within it, on
one machine.  On a worker a setting is measured in a process of its own, where dask's threads are not in the way.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..drafters import SamplingParams
from ..environment import environment
from ..errors import SpecdecError
from ..files import finite, json_text, write_text
from ..load import check_tokenizers
from ..paths import ROOT
from ..provenance import digest, state_of
from .contest import load_contest
from .costs import footprint
from .prompts import Prompt, load_prompts
from .speed import check_room
from .summary import measure

BUSY = 0.2  # the share of the CPU that others may use before a note says so


@dataclass(frozen=True)
class Setting:
    """What one call of the benchmark measures.

    Attributes:
        target, draft, tokenizers: as in `load_contest`, by name.
        gamma, max_new_tokens: as in `race`.
        temperatures: one run each.
        prompts, limit, seed: as in `load_prompts`; the seed is of all draws too.
        repeats: how often memory and loading times are measured; 0 leaves them out.
        trust_remote_code: as in `load_pair`.
    """

    target: str
    draft: str
    gamma: int
    max_new_tokens: int
    temperatures: tuple[float, ...] = (0.0,)
    prompts: str | None = None
    limit: int = 4
    seed: int = 0
    tokenizers: str = "same"
    repeats: int = 3
    trust_remote_code: bool = False

    def check(self) -> None:
        """Refuse what can be seen to be wrong before anything is loaded."""
        check_room(self.gamma, self.max_new_tokens)
        for t in self.temperatures:
            SamplingParams(t)
        check_tokenizers(self.tokenizers)
        self.chosen()

    def chosen(self) -> list[Prompt]:
        return load_prompts(self.prompts, limit=self.limit, seed=self.seed)

    def depends_on(self, surroundings: dict[str, Any]) -> dict[str, str]:
        """A digest of everything that the result depends on, by name; the machine is no part of it."""
        parts = {"setting": asdict(self), "prompts": [asdict(p) for p in self.chosen()], **surroundings}
        return {name: digest(part) for name, part in parts.items()}


Ticks = Callable[[str, int | None], Callable[[], Any]]
"""Given what is done and of how many steps, returns what is called after each step."""


def silent(what: str, steps: int | None) -> Callable[[], Any]:
    return lambda: None


def measure_setting(setting: Setting, ticks: Ticks = silent) -> dict[str, Any]:
    """All numbers of one setting, ready for JSON: the first temperature's at the top, each temperature's in `runs`.

    An interrupt ends it early with what is done: the last of `runs` then has the key `interrupted`.
    """
    chosen = setting.chosen()
    trust = setting.trust_remote_code
    contest = load_contest(setting.target, setting.draft, tokenizers=setting.tokenizers, trust_remote_code=trust)
    busy = cpu_use()
    runs: list[dict[str, Any]] = []
    memory, remarks = None, []
    for t in setting.temperatures:
        tick = ticks(f"decoding at temperature {t:g}", len(chosen))
        try:
            runs.append(measure(contest, chosen, setting.gamma, setting.max_new_tokens, t, setting.seed, tick))
        except KeyboardInterrupt:
            if not runs:
                raise
            runs[-1]["interrupted"] = f"nothing at temperature {t:g}"
        if "interrupted" in runs[-1]:
            break
    if "interrupted" in runs[-1]:
        remarks = ["interrupted: memory, loading times and what else was to come were not measured"]
    elif setting.repeats:
        ticks("memory and loading", None)
        try:
            memory = footprint(setting.target, setting.draft, setting.gamma, setting.repeats, setting.tokenizers, trust)
        except (SpecdecError, KeyboardInterrupt) as error:
            remarks = [f"memory and loading times were not measured: {error or 'interrupted'}"]
    if busy > BUSY:
        remarks.append(f"other programs used {busy:.0%} of the CPU before the start: repeat this on a quiet machine")
    for run in runs:
        run["notes"] += remarks
    names = ("target", "draft", "gamma", "max_new_tokens", "limit", "seed", "tokenizers")
    asked = {name: getattr(setting, name) for name in names}
    return {
        **runs[0],
        "setting": asked | {"prompts": setting.prompts or "packaged"},
        "memory": memory and {name: memory[name] for name in ("plain", "drafted")},
        "loading": memory and memory["loading"],
        "cpu_use_before": busy,
        "environment": environment(),
        "runs": runs,
    }


def cpu_use() -> float:
    """The share of the CPU in use during one second in which this process sleeps."""
    import psutil

    return psutil.cpu_percent(interval=1.0) / 100


# -- several settings ----------------------------------------------------------------------------------

Measured = Iterator[tuple[Setting, "dict[str, Any] | SpecdecError"]]
"""For each setting that has ended its numbers, or why there are none."""


def sweep(
    settings: Sequence[Setting],
    file: Path | None = None,
    jobs: int = 1,
    scheduler: str | None = None,
    say: Callable[[str], Any] = print,
    ticks: Ticks = silent,
    done: dict[Setting, dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Measure settings, each by itself; those that `file` holds of an unchanged library are not measured again.

    Args:
        settings: at least one.
        file: `{"settings": [...], "environment": ...}`, written anew after each setting that has ended.
        jobs: how many are measured at a time on this machine, whose cores they share.
        scheduler: the address of a dask scheduler, whose workers measure instead, one setting at a time each.
        say: is told what happens.
        ticks: progress of a setting that this process measures.
        done: is given the numbers of each setting that has ended: what there is when an interrupt ends the sweep.

    Returns:
        The numbers of the settings that could be measured, in order, each with what it `depends_on`.
    """
    surroundings = state_of(ROOT)
    keys = {setting: setting.depends_on(surroundings) for setting in settings}
    kept = [entry for entry in read(file) if entry.get("depends_on") in keys.values()]
    done = {} if done is None else done
    done |= {s: entry for s in settings for entry in kept if entry["depends_on"] == keys[s]}
    missing = [s for s in settings if s not in done]
    if done:
        say(f"{len(done)} of {len(settings)} settings are in {file} and not measured again")
    if jobs == 1 and not scheduler:
        measured = here(missing, ticks)
    else:
        measured = on_workers({s: keys[s] for s in missing}, jobs, scheduler, say)
    for setting, found in measured:
        name = f"draft {setting.draft}, gamma {setting.gamma}"
        if isinstance(found, SpecdecError):
            say(f"{name}: failed: {found}")
            continue
        done[setting] = found | {"depends_on": keys[setting]}
        fast = f"{found['speedup']:.2f} times as fast at temperature {found['temperature']:g}"
        say(f"{name}: {fast} ({len(done)} of {len(settings)} settings)")
        if file is not None:
            entries = [done[s] for s in settings if s in done]
            write_text(file, json_text({"settings": entries, "environment": environment()}))
    return [done[s] for s in settings if s in done]


def read(file: Path | None) -> list[dict[str, Any]]:
    """The settings that an earlier sweep left in `file`; none where it holds anything else."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))["settings"] if file is not None else []
        return [entry for entry in found if isinstance(entry, dict)]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def here(settings: Sequence[Setting], ticks: Ticks) -> Measured:
    """One after the other in this process.  An interrupt ends the sweep; the setting it met is measured anew."""
    for setting in settings:
        try:
            found: dict[str, Any] | SpecdecError = measure_setting(setting, ticks)
        except SpecdecError as error:
            found = error
        if not isinstance(found, SpecdecError) and any("interrupted" in run for run in found["runs"]):
            raise KeyboardInterrupt
        yield setting, found


def on_workers(
    settings: dict[Setting, dict[str, str]], jobs: int, scheduler: str | None, say: Callable[[str], Any]
) -> Measured:
    """On the workers of a dask scheduler, one setting at a time on each."""
    from .. import workers

    def found(future: Any) -> dict[str, Any] | SpecdecError:
        try:
            return workers.result(future)
        except SpecdecError as error:
            return error

    if not settings:
        return
    door: AbstractContextManager = workers.elsewhere(scheduler, say) if scheduler else workers.beside(jobs)
    with door as (client, threads):
        for (setting, _), future in workers.submit(client, work, list(settings.items()), threads):
            yield setting, found(future)


def work(task: tuple[Setting, dict[str, str]], threads: dict[str, str | None]) -> dict[str, Any]:
    """On a worker: measure the setting in a process of its own, with this worker's checkout."""
    from distributed import get_worker

    from ..workers import check_same

    setting, depends_on = task
    check_same(depends_on, setting.depends_on(state_of(ROOT)), get_worker().address)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    variables = {**os.environ, **threads, "PYTHONPATH": path}
    kept = {name: value for name, value in variables.items() if value is not None}
    with (
        tempfile.TemporaryFile("w+") as told,
        subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=told, text=True, env=kept,
        ) as process,
    ):  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(asdict(setting)) + "\n")
        process.stdin.flush()  # and stays open: the process ends when this one does
        said = process.stdout.read()
        if process.wait():
            told.seek(0)
            raise SpecdecError((told.read().strip().splitlines() or ["killed, perhaps for want of memory"])[-1])
    return json.loads(said.splitlines()[-1])


def main() -> None:
    """Measure the setting that stands on the first line of standard input; end when that is closed."""
    given = json.loads(sys.stdin.readline())
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
    try:
        found = measure_setting(Setting(**given | {"temperatures": tuple(given["temperatures"])}))
    except SpecdecError as error:
        sys.exit(str(error))
    print(json.dumps(finite(found)))


if __name__ == "__main__":
    main()
