"""Measures an installation with a year of 1,000 jobs a day: the sizes of its tables and files, and
the CPU seconds to start the server, to list jobs and to show their costs.

    python benchmarks/year.py [--days 365] [--a-day 1000] [--keep 0,90] [--logs 0.02]

The year is written with the code that writes the rows of jobs in production: jobs with one or two
attempts, nodes, events, bills, entries of the ledger and records of the audit log. Logs are written
for a part of the jobs (`--logs`), and their size is multiplied accordingly. `--keep` lists the
days for which ended jobs are kept; 0 keeps them forever. Older jobs are removed before the
measurements, in the server's steps but without its pauses. CPU seconds of a command include those
of the server. With `--home FOLDER`, the state folder is kept there, and a year that is there is
used again.
"""

import argparse
import asyncio
import os
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

from measure import CAVVY, command_cpu_s, fresh_home, process_cpu_s, record, table

from cavvy.client import connect
from cavvy.client.connection import stop_server
from cavvy.control.clock import WallClock
from cavvy.control.deferred import Deferred
from cavvy.control.job_service import JobIds, JobService
from cavvy.control.retention import ROUNDS, WAIT, Retention
from cavvy.domain.audit import AuditEntry
from cavvy.domain.checkpoints import RemovedCheckpoints
from cavvy.domain.events import Charge, Event
from cavvy.domain.jobs import (
    Attempt,
    AttemptOutcome,
    AttemptPhase,
    JobPhase,
    JobRecord,
    Node,
    NodePhase,
    RunOrigin,
    attempt_id,
)
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.retention import RetentionDays
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace
from cavvy.store.audit import append_all
from cavvy.store.base import AtomicWrite
from cavvy.store.drivers import make_driver
from cavvy.store.logs import LogStore
from cavvy.store.open import open_store
from cavvy.store.sql import Store

PROJECTS = ("default", "vision", "speech")
USERS = tuple(f"user-{number}" for number in range(20))
OFFERS = tuple(
    Offer(
        provider=provider,
        region=region,
        instance_type=instance,
        accelerator=accelerator,
        accelerator_count=count,
        rate=HourlyRate(rate),
        purchase=purchase,
        vcpus=count * 16.0,
        memory_mib=count * 131_072,
    )
    for provider, region, instance, accelerator, count, rate in (
        ("aws", "us-east-1", "p5.48xlarge", "H100", 8, 98_320_000),
        ("gcp", "us-central1", "a2-highgpu-1g", "A100", 1, 3_673_385),
        ("lambda", "us-west-1", "gpu_1x_a10", "A10", 1, 750_000),
    )
    for purchase in (Purchase.ON_DEMAND, Purchase.SPOT)
)
START_BAR_S, COMMAND_BAR_S = 1.0, 0.3
_BATCH = 250
_LOG = b"".join(b"step %6d  loss 0.123456  42.1 samples/s\n" % step for step in range(200))
_DIFF = "diff --git a/train.py b/train.py\n" + "+learning_rate = 0.0003\n" * 20


class YearClock:
    """The time at which the simulated job is submitted."""

    def __init__(self, now: datetime) -> None:
        self.time = now

    def now(self) -> datetime:
        return self.time


def make_rows(
    ids: JobIds, clock: YearClock, number: int, rng: random.Random
) -> tuple[AtomicWrite, AuditEntry]:
    """Make the rows that a job leaves that was submitted now and has ended."""
    job = _make_job(ids, clock.now(), number, rng)
    at = job.submitted_at
    attempts, nodes, events, charges = [], [], [event_of(job, 0, at, "queued", "submitted")], []
    tries = 2 if number % 10 == 0 else 1
    for count in range(1, tries + 1):
        begun, at = at, at + timedelta(minutes=rng.uniform(2, 240))
        offer, key = rng.choice(OFFERS), attempt_id(job.id, count)
        attempts.append(_make_attempt(job, count, offer, begun, at))
        nodes.append(
            Node(attempt_id=key, project=job.project, rank=0, phase=NodePhase.EXITED, exit_code=0)
        )
        for kind, text in (
            ("placed", f"starts on {offer.key}"),
            ("claimed", "the agent of rank 0 reported in on node-1"),
            ("running", f"runs on {offer.key}"),
            ("exited", "exit code 0"),
            ("done", "the work succeeded"),
        ):
            events.append(event_of(job, count, at, kind, text))
        hours = (at - begun) / timedelta(hours=1)
        charges.append(
            Charge(
                project=job.project,
                job_id=job.id,
                attempt_id=key,
                rank=0,
                since=begun,
                until=at,
                rate=offer.rate,
                amount=Money(round(offer.rate.micros_per_hour * hours)),
            )
        )
    phase = JobPhase.FAILED if number % 20 == 0 else JobPhase.DONE
    job = replace(job, phase=phase, since=at, ended_at=at, exit_code=0, attempt=tries)
    write = AtomicWrite(jobs=[job], attempts=attempts, nodes=nodes, events=events, charges=charges)
    return write, _audit_of(job)


def _make_job(ids: JobIds, at: datetime, number: int, rng: random.Random) -> JobRecord:
    project, user = PROJECTS[number % len(PROJECTS)], USERS[number % len(USERS)]
    task = TaskSpec(
        name=f"train-{number}",
        project=project,
        run="python train.py --lr $lr",
        params={"lr": rng.random()},
        env={"WANDB_MODE": "offline", "OMP_NUM_THREADS": "8"},
        tags={"team": f"team-{number % 5}"},
    )
    origin = RunOrigin(
        task_text=f"name: {task.name}\nresources: {{accelerators: A100}}\nrun: {task.run}\n",
        dialect="Cavvy",
        commit="0" * 40,
        diff=_DIFF,
    )
    return JobRecord(
        id=ids.make(),
        project=project,
        name=task.name,
        user=user,
        task=task,
        origin=origin,
        submitted_at=at,
        since=at,
    )


def _make_attempt(
    job: JobRecord, number: int, offer: Offer, begun: datetime, ended: datetime
) -> Attempt:
    key = attempt_id(job.id, number)
    return Attempt(
        id=key,
        job_id=job.id,
        project=job.project,
        number=number,
        gang=f"rm-12345678-{key}",
        offer=offer,
        nodes=1,
        phase=AttemptPhase.ENDED,
        reason="the work succeeded",
        outcome=AttemptOutcome.SUCCEEDED,
        exit_code=0,
        created_at=begun,
        since=ended,
        ended_at=ended,
    )


def _audit_of(job: JobRecord) -> AuditEntry:
    """Return the entry of the job's submission in the audit log."""
    return AuditEntry(
        at=job.submitted_at,
        signed_in=True,
        account=job.user,
        action="POST /v1/projects/{project}/jobs",
        project=job.project,
        target={"project": job.project},
        after={"id": job.id, "name": job.name, "file_sha256": "0" * 64},
    )


def event_of(job: JobRecord, attempt: int, at: datetime, kind: str, text: str) -> Event:
    return Event(project=job.project, job_id=job.id, attempt=attempt, at=at, kind=kind, text=text)


async def fill(home: Path, days: int, a_day: int, logs: float) -> float:
    """Write the year's rows and logs. Returns the MiB of the logs of all jobs."""
    url = f"sqlite:///{home / 'cavvy.db'}"
    store, rng = open_store(url), random.Random(1)
    await store.open()
    end = datetime.now(UTC) - timedelta(hours=6)
    clock = YearClock(end - timedelta(days=days))
    ids, kept = JobIds(clock), LogStore(home / "logs")  # type: ignore[arg-type]
    entries: list[AuditEntry] = []
    pending: list[AtomicWrite] = []
    count, written = days * a_day, 0
    for number in range(count):
        clock.time += timedelta(days=1) / a_day
        write, entry = make_rows(ids, clock, number, rng)
        pending.append(write)
        entries.append(entry)
        if rng.random() < logs:
            job, written = write.jobs[0], written + 1
            for attempt in range(1, job.attempt + 1):
                kept.append(job.project, job.id, attempt, 0, 0, _LOG, now_s=clock.time.timestamp())
            kept._logs.clear()  # a year of logs must not stay open
        if len(pending) == _BATCH or number == count - 1:
            await commit_all(store, pending)
            pending.clear()
            if number % 20_000 < _BATCH:
                print(f"  {number + 1:,} jobs", file=sys.stderr)
    await store.close()
    with closing(make_driver(url, journal="wal").connect()) as session:
        for start in range(0, count, 1000):
            session.begin()
            append_all(session, entries[start : start + 1000])
            session.commit()
    return disk_mib(home / "logs") * count / max(written, 1)


async def commit_all(store: Store, writes: Sequence[AtomicWrite]) -> None:
    """Commit the rows of several jobs in one transaction."""
    names = ("jobs", "attempts", "nodes", "events", "charges")
    rows = {name: [row for each in writes for row in getattr(each, name)] for name in names}
    await store.commit(AtomicWrite(**rows))


def disk_mib(path: Path) -> float:
    """The space that a file or folder takes on the disk."""
    if not path.exists():
        return 0.0
    paths = [path, *path.rglob("*")] if path.is_dir() else [path]
    return sum(each.lstat().st_blocks for each in paths) * 512 / 2**20


def table_sizes(home: Path) -> list[tuple[str, int, float | str]]:
    """Return the tables with more than 1,000 rows: their rows, and their MiB with their indexes if
    SQLite can tell."""
    found: list[tuple[str, int, float | str]] = []
    with closing(sqlite3.connect(home / "cavvy.db")) as database:
        names = "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"
        for (name,) in database.execute(names).fetchall():
            rows = database.execute(f"SELECT COUNT(*) FROM {name}").fetchone()[0]
            try:
                size: float | str = (
                    database.execute(
                        "SELECT COALESCE(SUM(pgsize), 0) FROM dbstat WHERE aggregate = TRUE "
                        "AND name IN (SELECT name FROM sqlite_master WHERE tbl_name = ?)",
                        (name,),
                    ).fetchone()[0]
                    / 2**20
                )
            except sqlite3.Error:
                size = "-"
            if rows > 1000:
                found.append((name, rows, size))
    return found


def measure_start() -> float:
    """The CPU seconds of the server until it answers."""
    stop_server()
    with connect() as client:
        client.health()
        return process_cpu_s(client.server().pid)


def measure_command(env: dict[str, str], *words: str) -> float:
    """The median CPU seconds of a command and of the server while it answers."""

    def once() -> float:
        pid = server_pid()
        before = process_cpu_s(pid)
        return command_cpu_s([CAVVY, *words], env) + process_cpu_s(pid) - before

    first = once()
    return first if "--all" in words else sorted(once() for _ in range(3))[1]


def measure_call(call: Callable[[], object]) -> float:
    pid = server_pid()
    call()
    before, own = process_cpu_s(pid), time.process_time()
    call()
    return process_cpu_s(pid) - before + time.process_time() - own


def server_pid() -> int:
    with connect() as client:
        return client.server().pid


def overview() -> object:
    """Make the calls of the first page of the console, without its templates."""
    from cavvy.console.charts import spending_by_day

    class NoMemory:
        def recall(self, key: str, make: Callable[[], object], *args: object) -> object:
            return make()

    with connect() as client:
        client.jobs(phases=("queued", "running"), limit=500)
        client.jobs(phases=("failed",), limit=10)
        client.jobs(limit=10)
        client.server()
        return spending_by_day(client, NoMemory(), "project", datetime.now(UTC), 14)  # type: ignore[arg-type]


def measure_all(home: Path, env: dict[str, str], kept: str, logs_mib: float) -> None:
    rows = table_sizes(home)
    total = disk_mib(home / "cavvy.db")
    table(f"{kept}: rows", ["table", "rows", "MiB with indexes"], rows)
    results: list[tuple[str, float | str, str]] = [
        ("cavvy.db, MiB", total, ""),
        ("logs of all jobs, MiB", logs_mib, ""),
    ]
    newest = f"train-{newest_number(home)}"
    started = measure_start()
    verdict = record(f"start, {kept}", started, START_BAR_S, "CPU s")
    print(f"  start: {started:.2f} CPU s", file=sys.stderr, flush=True)
    results.append(("server start, CPU s", started, verdict))
    commands = {
        "ps": ("ps",),
        "ps of a project": ("ps", "-p", "vision"),
        "ps --phase failed": ("ps", "--phase", "failed"),
        "status JOB": ("status", newest, "-p", project_of(newest)),
        "logs JOB": ("logs", newest, "-p", project_of(newest)),
        "cost": ("cost",),
        "cost JOB": ("cost", newest, "-p", project_of(newest)),
        "cost --by month": ("cost", "--by", "month"),
        "cost --by project": ("cost", "--by", "project"),
        "cost --by user": ("cost", "--by", "user"),
        "cost --by project,gpu --since 30d": ("cost", "--by", "project,gpu", "--since", "30d"),
        "server status": ("server", "status"),
        "ps --all": ("ps", "--all"),
    }
    for name, words in commands.items():
        cpu_s = measure_command(env, *words)
        barred = (name.startswith("ps") and name != "ps --all") or name == "cost"
        verdict = record(f"{name}, {kept}", cpu_s, COMMAND_BAR_S, "CPU s") if barred else ""
        print(f"  {name}: {cpu_s:.2f} CPU s", file=sys.stderr, flush=True)
        results.append((f"{name}, CPU s", cpu_s, verdict))
    results.append(("console overview, CPU s", measure_call(overview), ""))
    table(kept, ["what", "figure", "bar"], results)


def newest_number(home: Path) -> int:
    with closing(sqlite3.connect(home / "cavvy.db")) as database:
        name = "SELECT name FROM jobs ORDER BY id DESC LIMIT 1"
        return int(database.execute(name).fetchone()[0].removeprefix("train-"))


def project_of(name: str) -> str:
    return PROJECTS[int(name.removeprefix("train-")) % len(PROJECTS)]


async def settle(home: Path, days: int) -> None:
    """Remove the jobs that are no longer kept, without pauses between the steps."""
    store, clock = open_store(f"sqlite:///{home / 'cavvy.db'}"), WallClock()
    await store.open()
    logs, count, before = LogStore(home / "logs"), 0, time.process_time()

    async def remove_files(job: JobRecord) -> RemovedCheckpoints:
        nonlocal count
        count += 1
        logs.remove(job.project, job.id)
        return RemovedCheckpoints()

    jobs = JobService(
        Deferred(store),
        clock,
        JobIds(clock),
        hint=lambda key: None,
        arrived=lambda: None,
        notify=lambda job_id, what: None,
        remove_checkpoints=remove_files,
    )
    now = clock.now()
    await store.put_fact(ROUNDS, f"{(now - WAIT).isoformat()} {now.isoformat()}")
    retention, longest = Retention(store, clock, jobs, RetentionDays(jobs=days)), 0.0
    while True:
        began = time.process_time()
        if await retention.reconcile() >= timedelta(hours=1):
            break
        longest = max(longest, time.process_time() - began)
    total = time.process_time() - before
    print(
        f"  removed {count:,} jobs in {total:.0f} CPU s ({total / max(count, 1) * 1e3:.2f} ms for "
        f"each); the longest step took {longest:.2f} CPU s",
        file=sys.stderr,
    )
    await store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=int, default=365)
    parser.add_argument("--a-day", type=int, default=1000)
    parser.add_argument("--keep", default="0,90")
    parser.add_argument("--logs", type=float, default=0.02)
    parser.add_argument("--home", help="keep the state folder here, and use the year that is there")
    given = parser.parse_args()
    with fresh_home() as env:
        if given.home:
            os.environ["CAVVY_HOME"] = env["CAVVY_HOME"] = given.home
        home = Path(env["CAVVY_HOME"])
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        logs_mib = 0.0
        if not (home / "cavvy.db").exists():
            before = time.process_time()
            logs_mib = asyncio.run(fill(home, given.days, given.a_day, given.logs))
            print(f"written in {time.process_time() - before:.0f} CPU s", file=sys.stderr)
        for keep in given.keep.split(","):
            days = int(keep)
            stop_server()
            os.environ["CAVVY_RETENTION_JOBS_DAYS"] = env["CAVVY_RETENTION_JOBS_DAYS"] = keep
            if days:
                asyncio.run(settle(home, days))
            told = f"jobs kept for {days} days" if days else "all jobs kept"
            measure_all(home, env, told, logs_mib * min(1, days / given.days) if days else logs_mib)
        subprocess.run([CAVVY, "server", "stop"], env=env, check=False, capture_output=True)


if __name__ == "__main__":
    main()
