"""Runs a recorded list of jobs through the production queue policy (`scheduler.queue`). Time jumps
from one event to the next.
"""

import csv
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from heapq import heappop, heappush
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from cavvy.capabilities.simulation.traces.readers import TraceError
from cavvy.capabilities.simulation.traces.slurm_jobs import is_accounting, read_accounting
from cavvy.domain.jobs import JobRecord
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import Struct
from cavvy.scheduler.offer_lines import pool_of
from cavvy.scheduler.queue import JobPlacement, JobScheduler, QueueCapacity, WaitingJob

# An arbitrary start date, because times in a trace are relative to the start of the trace.
_EPOCH = datetime(2017, 8, 1, tzinfo=UTC)
_LONGEST_S = 1e10  # about three hundred years; longer times are rejected
_COLUMNS = ("arrival_s", "duration_s", "gpus", "vc")
_POOL_COLUMNS = ("vc", "node num")


class TraceArrival(Struct, frozen=True):
    """One job of a trace."""

    arrival_s: float
    duration_s: float
    gpus: int
    pool: str


class QueueStay(Struct, frozen=True):
    """The times when one job arrived, started and ended."""

    pool: str
    gpus: int
    arrival_s: float
    start_s: float
    end_s: float


class QueueResult(Struct, frozen=True, kw_only=True):
    """The result of simulating the queues of the virtual clusters. `gpu_use` is the used GPU time
    divided by the available GPU time, up to the end of the last job. `left_out` is the number of
    jobs that need more GPUs than their cluster has.
    """

    jobs: int
    left_out: int
    decisions: int
    makespan_s: float
    mean_wait_s: float
    median_wait_s: float
    p95_wait_s: float
    gpu_use: float


def read_jobs(path: Path) -> list[TraceArrival]:
    """Read jobs from a CSV or Parquet file with the columns arrival_s, duration_s, gpus and vc, or
    from what Slurm's sacct has printed; a partition is a virtual cluster.
    """
    try:
        rows = _parquet(path) if path.suffix == ".parquet" else _csv(path)
        jobs = [
            _arrival(float(at), float(length), int(gpus), str(pool))
            for at, length, gpus, pool in rows
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(
            f"{path}: expected the columns {', '.join(_COLUMNS)}, with times of 0 or more and at "
            f"least 1 GPU for each job, or the output of sacct --parsable2: {error}"
        ) from None
    return sorted(jobs, key=lambda job: job.arrival_s)


def read_pools(path: Path, gpus_per_node: int) -> dict[str, int]:
    """Read the number of GPUs of each virtual cluster from a CSV file with the columns vc and node
    num.
    """
    with path.open(newline="") as file:
        try:
            return {
                row["vc"]: _count(row["node num"]) * gpus_per_node
                for row in _rows(file, _POOL_COLUMNS)
            }
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{path}: expected the columns vc and node num: {error}") from None


def run_fleet(
    jobs: Iterable[TraceArrival],
    pools: Mapping[str, int],
    keep: Callable[[QueueStay], None] | None = None,
) -> QueueResult:
    """Run every job in its virtual cluster. Whenever a job arrives or ends, the queue policy
    decides which jobs start.

    `keep` is called with each job when the job starts.
    """
    run = _FleetRun(pools, keep)
    for number, arrival in enumerate(jobs):
        run.end_until(arrival.arrival_s)
        run.add(number, arrival)
    run.end_until(float("inf"))
    return _sum_up(run.queues.values(), run.waits, run.used, run.busy_until, run.left_out)


class _FleetRun:
    """The state of a simulation: the queues of all virtual clusters, and the running jobs."""

    def __init__(self, pools: Mapping[str, int], keep: Callable[[QueueStay], None] | None) -> None:
        self.queues = {name: _Pool(name, gpus) for name, gpus in pools.items()}
        self.waits: list[float] = []
        self.used = self.busy_until = 0.0
        self.left_out = 0
        self._keep = keep
        self._ends: list[tuple[float, int, str, int]] = []

    def add(self, number: int, arrival: TraceArrival) -> None:
        pool = self.queues.get(arrival.pool)
        if pool is None or arrival.gpus > pool.gpus:
            self.left_out += 1
            return
        pool.add(number, arrival)
        self._start(pool, arrival.arrival_s)

    def end_until(self, time: float) -> None:
        """End the jobs whose end is at or before this time, and assign their GPUs to jobs in the
        queue.
        """
        while self._ends and self._ends[0][0] <= time:
            now, _, name, gpus = heappop(self._ends)
            self.queues[name].end(gpus)
            self._start(self.queues[name], now)

    def _start(self, pool: "_Pool", now: float) -> None:
        for number, job in pool.start():
            end = now + job.duration_s
            heappush(self._ends, (end, number, pool.name, job.gpus))
            self.waits.append(now - job.arrival_s)
            if self._keep is not None:
                self._keep(QueueStay(job.pool, job.gpus, job.arrival_s, now, end))
            self.used += job.gpus * job.duration_s
            self.busy_until = max(self.busy_until, end)


def _sum_up(
    queues: Collection["_Pool"],
    waits: Sequence[float],
    used: float,
    makespan_s: float,
    left_out: int,
) -> QueueResult:
    ordered = sorted(waits) or [0.0]
    return QueueResult(
        jobs=len(waits),
        left_out=left_out,
        decisions=sum(pool.decisions for pool in queues),
        makespan_s=makespan_s,
        mean_wait_s=sum(ordered) / len(ordered),
        median_wait_s=median(ordered),
        p95_wait_s=ordered[ceil(0.95 * len(ordered)) - 1],
        gpu_use=used / (sum(pool.gpus for pool in queues) * makespan_s) if makespan_s else 0.0,
    )


class _Pool:
    """One virtual cluster: an offer of single GPUs, the number of GPUs in use, and the waiting
    jobs.
    """

    def __init__(self, name: str, gpus: int) -> None:
        self.name, self.gpus, self.decisions = name, gpus, 0
        self._offer = Offer(
            provider="fleet",
            region=name,
            instance_type="gpu",
            accelerator_count=1,
            rate=HourlyRate(0),
            capacity=gpus,
        )
        self._used = 0
        self._queue: deque[tuple[int, TraceArrival, WaitingJob]] = deque()
        # true if the first waiting job did not fit and no job has ended since then
        self._full = False

    def add(self, number: int, arrival: TraceArrival) -> None:
        at = _EPOCH + timedelta(seconds=arrival.arrival_s)
        name = f"j{number}"
        job = JobRecord(
            id=f"{number:016d}",
            project=self.name,
            name=name,
            task=TaskSpec(name=name, run="", nodes=arrival.gpus),
            submitted_at=at,
            since=at,
        )
        self._queue.append((number, arrival, WaitingJob(job=job, gang=name, offers=(self._offer,))))

    def end(self, gpus: int) -> None:
        self._used -= gpus
        self._full = False

    def start(self) -> Iterator[tuple[int, TraceArrival]]:
        """Yield the jobs that start now. If the first job in the queue does not fit, all other jobs
        wait behind it.
        """
        if self._full or not self._queue:
            return
        scheduler = JobScheduler(
            QueueCapacity(used={pool_of(self._offer): Fraction(self._used, self.gpus)})
        )
        while self._queue:
            number, arrival, waiting = self._queue[0]
            self.decisions += 1
            if not isinstance(scheduler.decide(waiting), JobPlacement):
                self._full = True
                return
            self._queue.popleft()
            self._used += arrival.gpus
            yield number, arrival


def _arrival(at: float, length: float, gpus: int, pool: str) -> TraceArrival:
    if not (0 <= at < _LONGEST_S and 0 <= length < _LONGEST_S and gpus > 0):
        raise ValueError(f"arrival {at:g} s, duration {length:g} s, {gpus} GPUs")
    return TraceArrival(at, length, gpus, pool)


def _count(text: str) -> int:
    if int(text) < 0:
        raise ValueError(f"{text} nodes")
    return int(text)


def _rows(file: TextIO, columns: Sequence[str]) -> "csv.DictReader[str]":
    rows = csv.DictReader(file)
    if lacking := [column for column in columns if column not in (rows.fieldnames or ())]:
        raise ValueError(f"the file has no column {' and no '.join(lacking)}")
    return rows


def _csv(path: Path) -> Iterator[tuple[Any, ...]]:
    with path.open(newline="") as file:
        accounting = is_accounting(file.readline())
        file.seek(0)
        if accounting:
            yield from read_accounting(file)
            return
        for row in _rows(file, _COLUMNS):
            yield tuple(row[column] for column in _COLUMNS)


def _parquet(path: Path) -> Iterator[tuple[Any, ...]]:
    from pyarrow import parquet  # type: ignore[import-untyped]  # ships no types

    columns = parquet.read_table(path, columns=list(_COLUMNS)).to_pydict()
    return zip(*(columns[column] for column in _COLUMNS), strict=True)
