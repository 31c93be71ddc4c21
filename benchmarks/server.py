"""Measures the embedded server: the CPU time of its start, its memory after 1,000 mixed requests,
and the CPU time to list 10 of 100,000 jobs.

    python benchmarks/server.py [--jobs 100000] [--requests 2000]

For comparison, on the same kind of machine: dstack 0.22.5 takes 5.5 CPU s and 248 MiB, and 10-15
CPU ms to list 10 of 10 runs; SkyPilot 0.14.1 takes 3.9 CPU s, 1,190 MiB and 213 CPU ms. CPU time
and memory are those of all threads of the server process.
"""

import argparse
import asyncio
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from measure import fresh_home, process_cpu_s, process_rss_mib, record, table

from cavvy.client import ApiClient, connect
from cavvy.client.connection import stop_server
from cavvy.domain.jobs import JobPhase, JobRecord
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import replace
from cavvy.store.base import AtomicWrite
from cavvy.store.open import open_store

PHASES = (JobPhase.DONE, JobPhase.FAILED, JobPhase.STOPPED)
_DIGITS = "0123456789abcdefghjkmnpqrstvwxyz"


def fill(home: Path, count: int) -> None:
    """Put ended jobs into the database while the server is not running."""

    async def write() -> None:
        store = open_store(f"sqlite:///{home / 'cavvy.db'}")
        await store.open()
        start = datetime.now(UTC) - timedelta(days=30)
        first = JobRecord(
            id="",
            project="default",
            name="",
            task=TaskSpec(name="bench", run="true"),
            submitted_at=start,
            since=start,
        )
        for block in range(0, count, 1000):
            jobs = [make_job(first, number) for number in range(block, min(block + 1000, count))]
            await store.commit(AtomicWrite(jobs=jobs))
        await store.close()

    asyncio.run(write())


def make_job(first: JobRecord, number: int) -> JobRecord:
    at = first.submitted_at + timedelta(seconds=number)
    text, left = "", number
    for _ in range(8):
        left, digit = divmod(left, 32)
        text = _DIGITS[digit] + text
    phase = PHASES[number % len(PHASES)]
    return replace(
        first,
        id=f"01bench0{text}",
        name=f"bench-{number}",
        phase=phase,
        reason="the work ended",
        submitted_at=at,
        since=at,
        ended_at=at,
        exit_code=0 if phase is JobPhase.DONE else 1,
    )


def start() -> tuple[float, float]:
    """Start the server. Returns its CPU seconds and its MiB when it reports that it is healthy."""
    with connect() as client:
        client.health()
        pid = client.server().pid
    return process_cpu_s(pid), process_rss_mib(pid)


def mix(client: ApiClient, count: int) -> None:
    """Make `count` requests of various kinds, as users do."""
    made = client.submit("{name: mixed, run: 'true'}", key=None)
    calls = (
        lambda number: client.jobs("default", limit=50),
        lambda number: client.job("default", made.name),
        lambda number: client.events("default", made.name),
        lambda number: client.cost("default", made.name),
        lambda number: client.nodes(),
        lambda number: client.log("default", made.name),
        lambda number: client.put_secret("default", f"S{number % 50}", "x" * 100),
        lambda number: client.secrets("default"),
        lambda number: client.missing_blobs("default", [f"{number:064x}"]),
        lambda number: client.server(),
    )
    for number in range(count - 1):
        calls[number % len(calls)](number)


def list_pages(client: ApiClient, count: int) -> float:
    """The CPU ms of the server for each page of 10 jobs, from the newest to older jobs by
    cursor."""
    pid = client.server().pid
    client.jobs("default", limit=10)
    before, cursor = process_cpu_s(pid), None
    for _ in range(count):
        page = client.jobs("default", limit=10, cursor=cursor)
        assert len(page.jobs) == 10
        cursor = page.cursor
    return (process_cpu_s(pid) - before) / count * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--requests", type=int, default=2000)
    arguments = parser.parse_args()
    rows: list[tuple[str, float, float, str]] = []

    def row(what: str, figure: float, bar: float) -> None:
        name, _, unit = what.rpartition(": ")
        rows.append((what, figure, bar, record(name, figure, bar, unit)))

    with fresh_home():
        home = Path(os.environ["CAVVY_HOME"])
        for database in ("fresh database", f"database with {arguments.jobs} jobs"):
            cpu_s, rss_mib = start()
            row(f"start to healthy, {database}: CPU s", cpu_s, 0.7)
            row(f"resident when healthy, {database}: MiB", rss_mib, 110.0)
            with connect() as client:
                mix(client, 1000)
                pid = client.server().pid
                row(
                    f"resident after 1,000 mixed requests, {database}: MiB",
                    process_rss_mib(pid),
                    110.0,
                )
                if database != "fresh database":
                    row(
                        "list 10, authorised, by cursor: CPU ms",
                        list_pages(client, arguments.requests),
                        1.0,
                    )
            stop_server()
            if database == "fresh database":
                fill(home, arguments.jobs)
    table("the embedded server", ("what", "figure", "bar", ""), rows)


if __name__ == "__main__":
    main()
