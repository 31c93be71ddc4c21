"""Measures the CPU time per call of the store's most frequent calls, with 100,000 jobs in the
database.

Run it: python benchmarks/store.py [--jobs N] [--url sqlite:///… | postgresql+psycopg://…]
CPU time is that of all threads of this process. The time of a PostgreSQL server is not included.
"""

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta

from cavvy.domain.audit import AuditEntry
from cavvy.domain.events import Charge, Event
from cavvy.domain.jobs import Attempt, AttemptPhase, JobPhase, JobRecord, Node
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace
from cavvy.store.audit import PENDING
from cavvy.store.base import AtomicWrite
from cavvy.store.open import open_store
from cavvy.store.sql import Store

NOW = datetime(2026, 1, 1, tzinfo=UTC)
OFFER = Offer(
    provider="local", region="here", instance_type="host", rate=HourlyRate(3_600_000), shared=True
)
CLIENTS = 16


def make_job(i: int, name: str = "train") -> JobRecord:
    task = TaskSpec(name=name, run="python train.py", params={"lr": 0.1}, env={"A": "b"})
    return JobRecord(
        id=f"{i:016}", project="default", name=name, task=task, submitted_at=NOW, since=NOW
    )


def make_event(job: JobRecord, kind: str) -> Event:
    return Event(
        project=job.project, job_id=job.id, at=NOW, kind=kind, text=f"{kind}: as it should be"
    )


async def fill(store: Store, count: int) -> None:
    for start in range(0, count, 500):
        jobs = [make_job(i, f"job-{i}") for i in range(start, min(start + 500, count))]
        done = [
            replace(job, phase=JobPhase.DONE if i % 50 else JobPhase.FAILED)
            for i, job in enumerate(jobs)
        ]
        await store.commit(
            AtomicWrite(jobs=done, events=[make_event(job, "queued") for job in jobs])
        )


async def measure(
    name: str, times: int, call: Callable[[int], Awaitable[object]], clients: int = 1
) -> None:
    numbers = iter(range(times))

    async def client() -> None:
        for i in numbers:
            await call(i)

    cpu, wall = time.process_time(), time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    print(f"{name:<58} {cpu / times * 1e3:8.3f} {times / wall:12,.0f}")


async def live(store: Store, job: JobRecord) -> None:
    """Make the eight commits of one job that runs and ends."""
    name = f"{job.id}-1"
    attempt = Attempt(
        id=name,
        job_id=job.id,
        project=job.project,
        number=1,
        gang=name,
        offer=OFFER,
        nodes=1,
        created_at=NOW,
        since=NOW,
    )
    node = Node(attempt_id=name, project=job.project, rank=0)
    charge = Charge(
        project=job.project,
        job_id=job.id,
        attempt_id=name,
        rank=0,
        since=NOW,
        until=NOW,
        rate=OFFER.rate,
        amount=Money(0),
    )
    job = replace(await store.job(job.id), phase=JobPhase.STARTING, attempt=1)
    await store.commit(
        AtomicWrite(jobs=[job], attempts=[attempt], events=[make_event(job, "placed")])
    )
    await store.commit(AtomicWrite(nodes=[node]))
    for version, phase in enumerate((AttemptPhase.BOOTING, AttemptPhase.RUNNING), start=1):
        await store.commit(AtomicWrite(attempts=[replace(attempt, phase=phase, version=version)]))
    await store.commit(
        AtomicWrite(
            nodes=[replace(node, last_seq=1, version=1)], events=[make_event(job, "running")]
        )
    )
    job = replace(job, phase=JobPhase.RUNNING, version=2)
    await store.commit(AtomicWrite(jobs=[job], charges=[charge]))
    await store.commit(AtomicWrite(nodes=[replace(node, last_seq=2, exit_code=0, version=2)]))
    grown = replace(charge, until=NOW + timedelta(seconds=9), amount=Money(9000))
    ended = replace(attempt, phase=AttemptPhase.ENDED, version=3)
    done = replace(job, phase=JobPhase.DONE, exit_code=0, version=3)
    await store.commit(
        AtomicWrite(
            jobs=[done], attempts=[ended], charges=[grown], events=[make_event(job, "done")]
        )
    )


async def run(url: str, count: int) -> None:
    store = open_store(url)
    await store.open()
    print(f"{url.split(':')[0]}, {count:,} jobs{'':<30} CPU ms/call      calls/s")
    await measure(f"fill, 500 jobs in a commit ({count:,} jobs)", 1, lambda _: fill(store, count))
    await measure("list_jobs: 10 newest", 2000, lambda _: store.list_jobs("default", limit=10))
    cursor = f"{count // 2:016}"
    await measure(
        "list_jobs: 10 by cursor",
        2000,
        lambda _: store.list_jobs("default", cursor=cursor, limit=10),
    )
    await measure(
        "list_jobs: 10 failed",
        2000,
        lambda _: store.list_jobs("default", {JobPhase.FAILED}, limit=10),
    )
    await measure(
        "list_jobs: 10 active, of which there are none", 2000, lambda _: list_active(store)
    )
    await measure("count_jobs", 5, lambda _: store.count_jobs("default"))
    await measure("job", 2000, lambda i: store.job(f"{i:016}"))
    jobs = [make_job(count + i) for i in range(2000)]
    await measure("submit, one name for all", 2000, lambda i: submit(store, jobs[i]), CLIENTS)
    told = [make_job(count + 10_000 + i) for i in range(2000)]
    await measure(
        "submit, with a record of the audit log",
        2000,
        lambda i: submit_recorded(store, told[i]),
        CLIENTS,
    )
    await measure("unfinished, of 4,000", 20, lambda _: store.unfinished())
    await measure("waiting, 100 of 4,000", 100, lambda _: store.waiting(NOW, 100))
    await measure(
        "a job's life: a read and 8 commits", 500, lambda i: live(store, jobs[i]), CLIENTS
    )
    await measure("the same, one job after the other", 200, lambda i: live(store, jobs[1000 + i]))
    await store.close()
    cost = min(opening(url) for _ in range(5))
    print(f"{'open an existing database, in a process of its own (s)':<58} {cost:8.3f}")


async def list_active(store: Store) -> object:
    return await store.list_jobs(
        "default", {JobPhase.RUNNING, JobPhase.STARTING, JobPhase.STOPPING}, limit=10
    )


async def submit(store: Store, job: JobRecord) -> JobRecord:
    return await store.submit(job, make_event(job, "queued"))


class Pending:
    """The entry of a submission, as the API makes it."""

    def __init__(self, job: JobRecord) -> None:
        self._entry: AuditEntry | None = AuditEntry(
            at=NOW,
            signed_in=True,
            account="ada",
            action="POST /v1/projects/{project}/jobs",
            project=job.project,
            target={"project": job.project},
            after={"id": job.id, "name": job.name, "file_sha256": "0" * 64},
        )

    def claim(self) -> AuditEntry | None:
        entry, self._entry = self._entry, None
        return entry

    def give_back(self) -> None:
        raise NotImplementedError


async def submit_recorded(store: Store, job: JobRecord) -> JobRecord:
    token = PENDING.set(Pending(job))
    try:
        return await submit(store, job)
    finally:
        PENDING.reset(token)


def opening(url: str) -> float:
    """The CPU seconds of a process that opens the store, minus those of a process that only imports
    asyncio.
    """
    code = (
        "import asyncio, sys, time\nif sys.argv[1:]:\n    from cavvy.store.open import open_store\n"
    )
    code += "    asyncio.run(open_store(sys.argv[1]).open())\nprint(time.process_time())"
    with_store, without = (
        float(subprocess.check_output([sys.executable, "-c", code, *arguments]))
        for arguments in ([url], [])
    )
    return with_store - without


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument(
        "--url", help="an empty database; a temporary SQLite file where it is left out"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cavvy-bench-") as folder:
        cost = min(opening(f"sqlite:///{folder}/fresh-{i}.db") for i in range(5))
        print(f"{'open a fresh SQLite database, in a process of its own (s)':<58} {cost:8.3f}")
        asyncio.run(run(arguments.url or f"sqlite:///{folder}/cavvy.db", arguments.jobs))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
