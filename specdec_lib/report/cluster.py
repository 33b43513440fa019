"""Notebooks on the workers of a dask scheduler.

A worker runs a notebook of its own checkout, which must be in the state of the one here, and sends back the files that
it made; they are published here, as those of a run in this process are.  So workers share no folder with this machine,
and one that dies loses no more than the run it was in.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from distributed import Client, Future, get_worker

from .. import workers
from ..environment import environment
from ..errors import SpecdecError
from ..paths import ROOT
from ..provenance import state_of
from .board import Board
from .reproduce import Ended, Job, one_by_one, prepare, record_of, run
from .runner import variables

# -- executors: who runs the jobs ----------------------------------------------------------------------


def beside(jobs: Iterable[Job], root: Path, board: Board, *, count: int) -> Ended:
    """Up to `count` at a time on this machine, which they share; then those that measure time, one by one."""
    waiting = list(jobs)
    together = [job for job in waiting if job.shares]
    if len(together) > 1:
        waiting = [job for job in waiting if not job.shares]
        with workers.beside(min(count, len(together))) as (client, threads):
            yield from on_workers(client, together, root, board, threads)
    yield from one_by_one(waiting, root, board)


def elsewhere(jobs: Iterable[Job], root: Path, board: Board, *, address: str) -> Ended:
    """On the workers of the scheduler at `address`."""
    with workers.elsewhere(address, board.say) as (client, threads):
        yield from on_workers(client, list(jobs), root, board, threads)


def on_workers(client: Client, jobs: list[Job], root: Path, board: Board, threads: workers.Threads) -> Ended:
    """Submit all; give each as its files are there."""
    cells = {job.stem: job.cells for job in jobs}
    topic = f"cells for {client.id}"

    def on_event(event: tuple[float, Any]) -> None:
        stem, number = event[1]
        if number == 0:
            board.started(stem, cells[stem])
        board.cell(stem, number)

    client.subscribe_topic(topic, on_event)
    checkout = None if root == ROOT else root
    for job, future in workers.submit(client, work, jobs, checkout, threads, topic):
        yield job.stem, partial(deliver, future, job)


# -- one job, there and back ---------------------------------------------------------------------------


def work(
    job: Job, checkout: Path | None, threads: workers.Threads, topic: str
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """On a worker: run the notebook of its own checkout; return the run record and what the run left, by name."""
    worker = get_worker()
    check(job, checkout or ROOT, worker.address)
    with tempfile.TemporaryDirectory(dir=worker.local_directory) as folder, variables(threads):
        stage = Path(folder)
        record = run(job, checkout or ROOT, lambda cell: worker.log_event(topic, [job.stem, cell]), stage)
        files = {path.relative_to(stage).as_posix(): path.read_bytes() for path in stage.rglob("*") if path.is_file()}
    told = {"omp": threads.get("OMP_NUM_THREADS")}  # this process has dask's one thread, the notebook had not
    return record | {"environment": environment() | {"threads": told}}, files


def check(job: Job, root: Path, name: str) -> None:
    """Refuse to run what would not be the run that was asked for."""
    there = prepare(root, job.stem, job.parameters, state_of(root)).depends_on
    workers.check_same(job.depends_on, there, name)


def deliver(future: Future, job: Job, stage: Path) -> dict[str, Any]:
    """The files of a finished job into the folder `stage`; a job that could not be run is a failed one."""
    try:
        record, files = workers.result(future)
    except SpecdecError as error:
        return record_of(job, [str(error)])
    for name, content in files.items():
        path = stage / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return record
