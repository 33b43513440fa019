"""The main job: run the notebooks of a profile, keep what is finished, say what holds.

Each notebook runs into a temporary folder inside the results; when it has ended, its outputs replace the old ones
and its run record, `<notebook>.run.json`, is written last.  So an interrupted run loses nothing that was finished,
and results are never a mixture of two runs; a lock keeps a second run out of the folder.  Who executes the notebooks is
an `Executor`: this process, one after the other (`one_by_one`), or the workers of a dask scheduler (`cluster.py`); the
rest is the same for all.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..environment import environment
from ..errors import SpecdecError, first_line
from ..files import held, host, write_text
from ..interrupt import exit_status, sigterm_interrupts
from ..paths import ROOT
from ..provenance import digest, state_of
from ..validate import workers as check_workers
from .chapters import read_chapter
from .claims import broken, collect, markdown, summary, table_row, to_json

if TYPE_CHECKING:
    from .board import Board
    from .profiles import Profile

SHARES = "parallel"  # the tag, on the parameters cell, of a notebook that measures no time


@dataclass(frozen=True)
class Job:
    """One notebook to run, with all that its result depends on; it can be sent to another machine.

    Attributes:
        stem: names the notebook: `notebooks/<stem>.ipynb` of a checkout.
        parameters: from the profile.
        cells: their number.
        shares: whether others may run beside it on its machine.
        depends_on: a digest of everything that the result depends on, by name.
    """

    stem: str
    parameters: dict[str, Any]
    cells: int
    shares: bool
    depends_on: dict[str, str]


Fill = Callable[[Path], dict[str, Any]]
"""Puts what a finished notebook leaves into an empty folder, and returns its run record."""

Ended = Generator[tuple[str, Fill], None, None]
"""For each job that has ended, its stem and what fills a folder."""

Executor = Callable[[Iterable[Job], Path, "Board"], Ended]
"""Runs jobs of a checkout, and tells the board what it is at."""


def reproduce(
    profile: str = "cpu",
    notebooks: Sequence[str] | None = None,
    force: bool = False,
    results: str | Path | None = None,
    jobs: int = 1,
    scheduler: str | None = None,
    *,
    root: Path = ROOT,
) -> int:
    """Run the notebooks of a profile and leave the report in the results folder.

    One after the other, because many of them measure time.  A notebook that is unchanged since a finished run (its
    text, its parameters, the library, the data, the models, the versions) is skipped.  A notebook that fails does not
    stop the others: what it had executed is kept.

    Args:
        profile: `smoke`, `cpu`, `full`, `gpu`: a name under `sizes` in `notebooks/*.yaml`.
        notebooks: run only these (stems or file names); None runs all that the profile lists.
        force: run also what is unchanged.
        results: the folder to write; None is `results/<profile>`.
        jobs: how many notebooks may run beside each other on this machine, if their parameters cell has the tag
            `parallel`.  Those without it measure time: they run alone, after the others.
        scheduler: the address of a dask scheduler, whose workers run the notebooks instead, one at a time each.
        root: the checkout: `notebooks/`, `specdec_lib/`, `data/`.

    Returns:
        The exit status: 0; 1 when a notebook failed or a claim that must hold does not; 130 after Ctrl-C; 143 after
        SIGTERM.

    Raises:
        SpecdecError: before anything runs: unknown profile, notebook or parameter, a value of the wrong type, the
            notebook tools are not installed, the results folder cannot be written or another run is writing to it, no
            scheduler answers.
    """
    missing = [name for name in ("papermill", "nbconvert", "ipykernel", "pydantic") if find_spec(name) is None]
    if missing:
        raise SpecdecError(f"{', '.join(missing)} not installed: pip install 'specdec-lab[notebooks]'")
    from .profiles import load_profile, select

    root = root.resolve()  # the kernels work in another folder
    plan = load_profile(profile, root / "notebooks")
    stems = select(plan, notebooks)
    execute = executor(jobs, scheduler)
    folder = Path(results).expanduser().resolve() if results else root / "results" / profile
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise SpecdecError(f"cannot write results to {folder} ({error.strerror}): choose another folder") from None

    with held(folder, "the results folder"), sigterm_interrupts():
        return run_all(plan, stems, force, folder, execute, root)


def run_all(plan: Profile, stems: list[str], force: bool, folder: Path, execute: Executor, root: Path) -> int:
    """Run the notebooks `stems` of a profile into the results folder, whose lock is held; the exit status."""
    from .board import Board

    remove_leftovers(folder)
    surroundings = state_of(root)
    skipped: set[str] = set()
    states: dict[str, str] = {}  # of those that have ended or need not run
    interrupt: KeyboardInterrupt | None = None

    def changed() -> Iterator[Job]:
        for stem in stems:
            job = prepare(root, stem, plan.notebooks[stem], surroundings)
            record = read_record(folder, stem)
            if force or record.get("state") != "ok" or record.get("depends_on") != job.depends_on:
                yield job
            else:
                board.finished(stem, "unchanged", record["seconds"])
                skipped.add(stem)
                states[stem] = "ok"

    with Board(stems) as board:
        try:
            with closing(execute(changed(), root, board)) as ended:
                for stem, fill in ended:
                    record = keep(folder, stem, fill)
                    board.finished(stem, record["state"], record["seconds"], record["error"])
                    states[stem] = record["state"]
        except KeyboardInterrupt as error:
            interrupt = error

    if set(states) - skipped or not (folder / "environment.json").exists():
        write_text(folder / "environment.json", to_json(environment()))
    rows = collect(folder, plan.notebooks)
    write_index(folder, plan.name, list(plan.notebooks), skipped, rows)
    print(f"{summary(rows)} Report: {relative(folder / 'index.html')}")
    if interrupt is not None:
        left = next((stem for stem in stems if stem not in states), "nothing")
        print(f"interrupted. Finished: {', '.join(states) or 'none'}. The same command goes on with {left}.")
        return exit_status(interrupt)
    failing = [row for row in broken(rows) if row["notebook"] in states]
    for row in failing:
        print(f"must hold and does not: {row['id']} ({row['notebook']}): {row['statement']}")
    return int(bool(failing) or any(state != "ok" for state in states.values()))


def executor(jobs: int, scheduler: str | None) -> Executor:
    """Who runs the notebooks."""
    check_workers(jobs, scheduler)
    if jobs == 1 and not scheduler:
        return one_by_one
    from . import cluster

    return partial(cluster.elsewhere, address=scheduler) if scheduler else partial(cluster.beside, count=jobs)


# -- one notebook --------------------------------------------------------------------------------------


def prepare(root: Path, stem: str, parameters: dict[str, Any], surroundings: dict[str, Any]) -> Job:
    """The job of running a notebook of the checkout `root`, whose `state_of` is `surroundings`."""
    cells = essence(root / "notebooks" / f"{stem}.ipynb")
    claims = read_chapter(root / "notebooks" / f"{stem}.yaml")["claims"]
    parts = {"notebook": cells, "parameters": parameters, "claims": claims, **surroundings}
    shares = any(SHARES in tags for *_, tags in cells)
    return Job(stem, parameters, len(cells), shares, {name: digest(part) for name, part in parts.items()})


def one_by_one(jobs: Iterable[Job], root: Path, board: Board) -> Ended:
    """The executor that is this process."""
    for job in jobs:
        board.started(job.stem, job.cells)
        yield job.stem, partial(run, job, root, partial(board.cell, job.stem))


def run(job: Job, root: Path, on_cell: Callable[[int], None], stage: Path) -> dict[str, Any]:
    """Execute the notebook of the checkout `root` into the folder `stage`; return its run record."""
    from .runner import execute

    start = time.perf_counter()
    error = execute(root / "notebooks" / f"{job.stem}.ipynb", stage, job.parameters, on_cell)
    return record_of(job, error, time.perf_counter() - start)


def record_of(job: Job, error: list[str], seconds: float = 0.0) -> dict[str, Any]:
    """What is noted of a run that has ended; `error` is empty where it went well."""
    return {
        "notebook": job.stem,
        "state": "failed" if error else "ok",
        "seconds": round(seconds, 1),
        "error": error,
        "parameters": job.parameters,
        "depends_on": job.depends_on,
    }


def keep(folder: Path, stem: str, fill: Fill) -> dict[str, Any]:
    """Publish in `folder` what `fill` makes; return the run record.  A full disk fails this notebook alone."""
    try:
        prefix = f".running-{host()}-"
        with tempfile.TemporaryDirectory(prefix=prefix, dir=folder, ignore_cleanup_errors=True) as temporary:
            record = fill(Path(temporary))
            publish(Path(temporary), folder, stem)
        write_text(record_path(folder, stem), to_json(record))
    except OSError as error:
        record = {"notebook": stem, "state": "failed", "seconds": 0.0}
        record["error"] = [f"what it made could not be kept: {first_line(error)}"]
        with suppress(OSError):
            record_path(folder, stem).unlink(missing_ok=True)
            write_text(record_path(folder, stem), to_json(record))
    return record


def publish(stage: Path, folder: Path, stem: str) -> None:
    """Replace all that an earlier run of this notebook left by what this one made.  The old record goes first."""
    record_path(folder, stem).unlink(missing_ok=True)
    moves = {
        stage / "claims.json": folder / "claims" / f"{stem}.json",
        stage / "figures": folder / "figures" / stem,
        stage / "tables": folder / "tables" / stem,
        stage / f"{stem}.html": folder / f"{stem}.html",
        stage / f"{stem}.ipynb": folder / f"{stem}.ipynb",
    }
    for made, place in moves.items():
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)
        if made.exists():
            place.parent.mkdir(exist_ok=True)
            made.rename(place)


def remove_leftovers(folder: Path) -> None:
    """The temporary folders of runs of this machine that were killed: whoever holds the lock is the only one going.

    Those of another machine are left to it, since not every shared disk shares its locks.
    """
    for leftover in folder.glob(f".running-{host()}-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def record_path(folder: Path, stem: str) -> Path:
    return folder / f"{stem}.run.json"


def read_record(folder: Path, stem: str) -> dict:
    """What is known of the last run that ended; empty when there was none."""
    try:
        return json.loads(record_path(folder, stem).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


# -- what a result depends on --------------------------------------------------------------------------


def essence(source: Path) -> list:
    """The cells without outputs and counts."""
    from .profiles import read_notebook

    return [[cell.cell_type, cell.source, cell.metadata.get("tags", [])] for cell in read_notebook(source).cells]


# -- the report ----------------------------------------------------------------------------------------


def write_index(folder: Path, profile: str, stems: list[str], skipped: set[str], rows: list[dict]) -> None:
    """`index.html`: the notebooks with their states, what else is there, the claims."""
    from .runner import page

    lines = [f"# Results of the profile {profile}", "", table_row(["notebook", "", "state", "seconds"])]
    lines.append(table_row(["---"] * 4))
    for stem in stems:
        record = read_record(folder, stem)
        state = record.get("state", "not run") + (" (unchanged, skipped)" if stem in skipped else "")
        there = (folder / f"{stem}.html").exists()
        links = [f"[{stem}]({stem}.html)", f"[ipynb]({stem}.ipynb)"] if there else [stem, ""]
        error = ": " + ", ".join(record["error"]) if record.get("error") else ""
        lines.append(table_row([*links, state + error, str(record.get("seconds", ""))]))
    beside = ("figures", "tables", "environment.json", "claims.json", "claims.md")
    links = [f"[{name}]({name})" for name in beside if (folder / name).exists()]
    lines += ["", "Also here: " + ", ".join(links) + ".", "", "## Claims", "", markdown(rows)]
    write_text(folder / "index.html", page("\n".join(lines), f"Results: {profile}"))


def relative(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return os.fspath(path)
