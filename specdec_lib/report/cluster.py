"""Notebooks on the workers of a dask scheduler: several on this machine, or one on each machine of a cluster.

A worker runs a notebook of its own checkout, which must be in the state of the one here, and sends back the files that
it made; they are published here, as those of a run in this process are.  So workers share no folder with this machine,
and one that dies loses no more than the run it was in: the scheduler gives that to another.

dask makes the workers: `dask worker ADDRESS` by hand, dask-jobqueue on SLURM, dask-kubernetes on Kubernetes.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import Any

from distributed import Client, Future, KilledWorker, LocalCluster, WorkerPlugin, as_completed, get_worker

from ..errors import SpecdecError, first_line
from .board import Board
from .environment import environment
from .reproduce import ROOT, Ended, Job, one_by_one, prepare, record_of, run, state_of
from .runner import variables

TIMEOUT = 10  # seconds that a scheduler may take to answer
SLOT = {"notebook": 1}
# dask gives its workers one thread; a notebook gets what it would get here
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class OneNotebook(WorkerPlugin):
    """A worker, present or future, takes one notebook at a time, however many threads it has."""

    name = "specdec-one-notebook"

    async def setup(self, worker: Any) -> None:
        await worker.set_resources(**SLOT)


# -- executors: who runs the jobs ----------------------------------------------------------------------


def beside(jobs: Iterable[Job], root: Path, board: Board, *, count: int) -> Ended:
    """Up to `count` at a time on this machine, which they share; then those that measure time, one by one."""
    waiting = list(jobs)
    together = [job for job in waiting if job.shares]
    if len(together) > 1:
        waiting = [job for job in waiting if not job.shares]
        count = min(count, len(together))
        threads = str(max(1, (os.cpu_count() or 1) // count))
        local: dict[str, Any] = {"threads_per_worker": 1, "memory_limit": 0, "dashboard_address": ":0"}
        with (
            LocalCluster(n_workers=count, silence_logs=logging.CRITICAL, **local) as cluster,
            Client(cluster) as client,
        ):
            settings: dict[str, str | None] = {name: os.environ.get(name, threads) for name in THREADS}
            yield from on_workers(client, together, root, board, settings)
    yield from one_by_one(waiting, root, board)


def elsewhere(jobs: Iterable[Job], root: Path, board: Board, *, address: str) -> Ended:
    """On the workers of the scheduler at `address`, which may come and go.

    Raises:
        SpecdecError: no scheduler answers.
    """
    try:
        client = Client(address, timeout=TIMEOUT)
    except (OSError, ValueError):
        raise SpecdecError(
            f"no dask scheduler answers at {address}: start one with `dask scheduler` and workers with `dask worker`"
        ) from None
    with client:
        machines = Counter(client.run(gethostname).values())
        if not machines:
            board.say(f"no worker yet, waiting for one: dask worker {address}")
        elif max(machines.values()) > 1:
            board.say("several workers share a machine, so the times measured there are not to be trusted")
        yield from on_workers(client, list(jobs), root, board, {name: os.environ.get(name) for name in THREADS})


def on_workers(client: Client, jobs: list[Job], root: Path, board: Board, threads: dict[str, str | None]) -> Ended:
    """Submit all; give each as its files are there."""
    cells = {job.stem: job.cells for job in jobs}
    topic = f"cells for {client.id}"

    def on_event(event: tuple[float, Any]) -> None:
        stem, number = event[1]
        if number == 0:
            board.started(stem, cells[stem])
        board.cell(stem, number)

    client.subscribe_topic(topic, on_event)
    client.register_plugin(OneNotebook())
    checkout = None if root == ROOT else root
    sent = {client.submit(work, job, checkout, threads, topic, pure=False, resources=SLOT): job for job in jobs}
    for future in as_completed(sent):
        yield sent[future].stem, partial(deliver, future, sent[future])


# -- one job, there and back ---------------------------------------------------------------------------


def work(
    job: Job, checkout: Path | None, threads: dict[str, str | None], topic: str
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
    there = prepare(root, job.stem, job.parameters, job.timeout, state_of(root)).depends_on
    differs = [part for part, digest in job.depends_on.items() if there[part] != digest]
    if differs:
        raise SpecdecError(
            f"the worker {name} has other {', '.join(differs)}: bring its checkout to the state of the one here"
        )


def deliver(future: Future, job: Job, stage: Path) -> dict[str, Any]:
    """The files of a finished job into the folder `stage`; a job that could not be run is a failed one."""
    try:
        record, files = future.result()
    except KilledWorker:
        return record_of(job, ["each worker that took it died: killed, perhaps for want of memory"])
    except Exception as error:  # whatever happened to a worker is the failure of one notebook
        text = first_line(error)
        return record_of(job, [text if isinstance(error, SpecdecError) else f"{type(error).__name__}: {text}"])
    for name, content in files.items():
        path = stage / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return record
