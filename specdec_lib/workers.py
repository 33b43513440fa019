"""The workers of a dask scheduler: several on this machine, or one on each machine of a cluster.

A worker takes one task at a time, however many threads it has, because tasks measure time; the task of one that dies is
given to another.  dask makes the workers: `dask worker ADDRESS` by hand, dask-jobqueue on SLURM, dask-kubernetes on
Kubernetes.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from socket import gethostname
from typing import Any, TypeVar

from distributed import Client, Future, KilledWorker, LocalCluster, WorkerPlugin, as_completed

from .errors import SpecdecError, first_line

TIMEOUT = 10  # seconds that a scheduler may take to answer
SLOT = {"task": 1}
# dask gives its workers one thread; a task gets what it would get here
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

Task = TypeVar("Task")
Threads = dict[str, str | None]


class OneAtATime(WorkerPlugin):
    """A worker, present or future, takes one task at a time."""

    name = "specdec-one-at-a-time"

    async def setup(self, worker: Any) -> None:
        await worker.set_resources(**SLOT)


@contextmanager
def beside(count: int) -> Iterator[tuple[Client, Threads]]:
    """`count` workers on this machine, which share its cores, and the threads that each may use."""
    threads = str(max(1, (os.cpu_count() or 1) // count))
    local: dict[str, Any] = {"threads_per_worker": 1, "memory_limit": 0, "dashboard_address": ":0"}
    with LocalCluster(n_workers=count, silence_logs=logging.CRITICAL, **local) as cluster, Client(cluster) as client:
        yield client, {name: os.environ.get(name, threads) for name in THREADS}


@contextmanager
def elsewhere(address: str, say: Callable[[str], Any]) -> Iterator[tuple[Client, Threads]]:
    """The workers of the scheduler at `address`, which may come and go.

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
            say(f"no worker yet, waiting for one: dask worker {address}")
        elif max(machines.values()) > 1:
            say("several workers share a machine, so the times measured there are not to be trusted")
        yield client, {name: os.environ.get(name) for name in THREADS}


def submit(
    client: Client, function: Callable[..., Any], tasks: Iterable[Task], *arguments: Any
) -> Iterator[tuple[Task, Future]]:
    """Call `function(task, *arguments)` on the workers for each task; give each as it ends."""
    client.register_plugin(OneAtATime())
    sent = {client.submit(function, task, *arguments, pure=False, resources=SLOT): task for task in tasks}
    for future in as_completed(sent):
        yield sent[future], future


def result(future: Future) -> Any:
    """What the task returned.

    Raises:
        SpecdecError: whatever went wrong with it, in one line.
    """
    try:
        return future.result()
    except KilledWorker:
        raise SpecdecError("each worker that took it died: killed, perhaps for want of memory") from None
    except SpecdecError:
        raise
    except Exception as error:  # whatever happened to a worker is the failure of one task
        raise SpecdecError(f"{type(error).__name__}: {first_line(error)}") from error


def check_same(here: Mapping[str, str], there: Mapping[str, str], worker: str) -> None:
    """Refuse a worker where a task would not be the one that was asked for: digests by what they are of."""
    differs = [part for part, digest in here.items() if there[part] != digest]
    if differs:
        raise SpecdecError(
            f"the worker {worker} has other {', '.join(differs)}: bring its checkout to the state of the one here"
        )
