"""The stores that must behave alike, and short ways to make rows; used by the contract tests and
by others.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from tests.system.postgres import PostgresMissing, new_database, opened_database

from cavvy.domain.allocations import Allocation, Host
from cavvy.domain.events import Charge, ChargeKind, Event
from cavvy.domain.jobs import Attempt, JobRecord, Node, RunOrigin, attempt_id
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace
from cavvy.store.base import AtomicWrite
from cavvy.store.drivers import make_driver
from cavvy.store.migrate import prepare
from cavvy.store.open import open_store
from cavvy.store.sql import Store

KINDS = ("memory", "sqlite-wal", "sqlite-delete", "postgres")
_MODEL_ID = token_hex(16).encode()  # the installation's ID in the file that is copied
NOW = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)


def store_url(kind: str, folder: Path) -> str:
    """The URL of a new, empty store of that kind; skips the test where there is no PostgreSQL."""
    if kind == "memory":
        return "memory:"
    if kind.startswith("sqlite"):
        return f"sqlite:///{folder}/cavvy.db"
    return postgres_url(new_database)


def make_store(kind: str, folder: Path) -> Store:
    """A store that is not open yet, and in which nothing is."""
    url = postgres_url(opened_database) if kind == "postgres" else store_url(kind, folder)
    if kind.startswith("sqlite"):
        put_database(folder / "cavvy.db")
    return open_store(url, journal="delete" if kind == "sqlite-delete" else "wal")


def put_database(path: Path) -> None:
    """Write a database with the tables of a store, and nothing in them, unless there is one. To
    open it needs a quarter of the CPU time of a new one.
    """
    if not path.exists():
        path.write_bytes(_read_model().replace(_MODEL_ID, token_hex(16).encode()))
        path.chmod(0o600)


@cache
def _read_model() -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "cavvy.db"
        prepare(make_driver(f"sqlite:///{path}", journal="delete"), _MODEL_ID.decode)
        return path.read_bytes()


def postgres_url(make: Callable[[], str]) -> str:
    """Make a database; skips the test where there is no PostgreSQL."""
    try:
        return make()
    except PostgresMissing as missing:
        pytest.skip(str(missing))


def after(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def make_job(
    job_id: str, *, project: str = "p", name: str = "train", priority: int = 0, **fields: Any
) -> JobRecord:
    fields = {
        "task": TaskSpec(name=name, run="true", priority=priority),
        "submitted_at": NOW,
        "since": NOW,
        **fields,
    }
    return JobRecord(id=job_id, project=project, name=name, **fields)


def make_event(job: JobRecord, text: str = "submitted", **fields: Any) -> Event:
    return Event(
        **{
            "project": job.project,
            "job_id": job.id,
            "at": NOW,
            "kind": "queued",
            "text": text,
            **fields,
        }
    )


async def submit(store: Store, job_id: str, **fields: Any) -> JobRecord:
    job = make_job(job_id, **fields)
    return await store.submit(job, make_event(job))


def make_offer(instance_type: str = "big", rate: int = 3_600_000) -> Offer:
    return Offer(provider="fake", region="here", instance_type=instance_type, rate=HourlyRate(rate))


def make_attempt(job: JobRecord, number: int = 1, **fields: Any) -> Attempt:
    name = attempt_id(job.id, number)
    return Attempt(
        **{
            "id": name,
            "job_id": job.id,
            "project": job.project,
            "number": number,
            "gang": f"rm-{name}",
            "offer": make_offer(),
            "nodes": 1,
            "created_at": NOW,
            "since": NOW,
            **fields,
        }
    )


async def begin(store: Store, job: JobRecord, number: int = 1, **fields: Any) -> Attempt:
    """Write an attempt and return it as stored."""
    attempt = make_attempt(job, number, **fields)
    await store.commit(AtomicWrite(attempts=[attempt]))
    return replace(attempt, version=1)


def make_node(attempt: Attempt, rank: int = 0, **fields: Any) -> Node:
    return Node(attempt_id=attempt.id, project=attempt.project, rank=rank, **fields)


def make_charge(
    attempt: Attempt, micros: int, *, since: float = 0, until: float = 60, **fields: Any
) -> Charge:
    return Charge(
        **{
            "project": attempt.project,
            "job_id": attempt.job_id,
            "attempt_id": attempt.id,
            "rank": 0,
            "kind": ChargeKind.NODE,
            "since": after(since),
            "until": after(until),
            "rate": HourlyRate(3_600_000),
            "amount": Money(micros),
            **fields,
        }
    )


def make_host(
    name: str = "local/here", *, cpus: float = 4, memory_mib: int = 8192, devices: int = 2
) -> Host:
    return Host(
        name=name,
        cpus=cpus,
        memory_mib=memory_mib,
        devices=tuple(f"GPU-{i}" for i in range(devices)),
    )


def make_allocation(
    gang: str, *devices: str, host: str = "local/here", rank: int = 0, **fields: Any
) -> Allocation:
    return Allocation(
        **{
            "host": host,
            "gang": gang,
            "rank": rank,
            "project": "p",
            "cpus": 1.0,
            "memory_mib": 1024,
            "devices": devices,
            **fields,
        }
    )


FULL_ORIGIN = RunOrigin(
    task_text="run: true\n", commit="abc", diff="+x\n", snapshot="5" * 64, versions={"cavvy": "0.1"}
)
