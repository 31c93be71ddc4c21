"""On PostgreSQL, no statement of a busy server reads more because many jobs have ended."""

from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.contract.store_suite import NOW, begin, make_charge, store_url, submit

from cavvy.domain.jobs import JobPhase
from cavvy.domain.values import replace
from cavvy.store.base import AtomicWrite
from cavvy.store.prepared import PreparedStatements
from cavvy.store.sql import Store

ENDED = 10_000  # each with an attempt, an event, and a charge with its entry of the ledger
# what makes copies of the rows of the job e1, by table
COPIES = {
    "jobs": ("id = 'e1'", {"id": "t.id || '-' || n", "name": "t.name || '-' || n"}),
    "documents": ("job_id = 'e1'", {"job_id": "t.job_id || '-' || n"}),
    "attempts": (
        "job_id = 'e1'",
        {"id": "t.id || '-' || n", "job_id": "t.job_id || '-' || n", "gang": "t.gang || '-' || n"},
    ),
    "events": ("job_id = 'e1'", {"id": "1000000 + n", "job_id": "t.job_id || '-' || n"}),
    "charges": (
        "job_id = 'e1'",
        {"attempt_id": "t.attempt_id || '-' || n", "job_id": "t.job_id || '-' || n"},
    ),
    "ledger_subjects": (
        "job_id = 'e1'",
        {"id": "t.id || '-' || n", "job_id": "t.job_id || '-' || n"},
    ),
    "ledger": (
        "subject = (SELECT id FROM attempts WHERE job_id = 'e1')",
        {"number": "1000000 + n", "subject": "t.subject || '-' || n"},
    ),
}
PLANNED = ("SELECT", "WITH", "INSERT", "UPDATE", "DELETE")
GROWN = frozenset(COPIES)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return store_url("postgres", tmp_path)


@pytest.fixture
async def store(url: str) -> AsyncIterator[Store]:
    opened = Store(url)
    await opened.open()
    yield opened
    await opened.close()


async def do_what_servers_do(store: Store, mark: str) -> None:
    """What happens all the time: passes of the queue, users' lists, jobs that begin and end."""
    some = {JobPhase.QUEUED, JobPhase.RUNNING}
    await store.list_jobs(None)
    for project in ("p", None):
        await store.list_jobs(project, some)
        await store.list_jobs(project, {JobPhase.DONE}, cursor="j9")
        await store.open_attempts(project)
    await store.waiting(NOW, ["q1"])
    await store.queue.heads(NOW, 5)
    await store.queue.firsts(NOW)
    await store.queue.more(NOW, 5, arrays=["a"], projects=["p"], users_of=["p"])
    await store.queue.rows(NOW)
    await store.queue.held()
    await store.next_waiting(NOW)
    await store.unfinished()
    await store.gang_spent("g")
    await store.jobs_of_machine("p", "dev")
    job = await submit(store, f"new-{mark}")
    await store.job(job.id)
    await store.find_job("p", job.name)
    await store.read_job(job.id)
    await store.live_versions()
    await store.dependencies.waiting_for_any([job.id])
    await store.arrays.jobs("a")
    attempt = await begin(store, job)
    await store.attempt_of_gang(attempt.gang)
    await store.attempts(job.id)
    await store.nodes(attempt.id)
    ended = replace(await store.job(job.id), phase=JobPhase.DONE, ended_at=NOW)
    await store.commit(AtomicWrite(jobs=[ended], charges=[make_charge(attempt, 1)]))
    await store.events(job.id)
    await store.charges(job.id)


def read_plan(other: "psycopg.Connection[Any]", sql: str, values: Sequence[object]) -> Any:
    """The plan of a statement; those that only read are run, to count the blocks that they read."""
    reads = sql.lstrip().upper().startswith(("SELECT", "WITH")) and "INSERT" not in sql
    how = "ANALYZE, BUFFERS, FORMAT JSON" if reads else "FORMAT JSON"
    found = other.execute(f"EXPLAIN ({how}) {sql.replace('?', '%s')}", values).fetchone()  # type: ignore[arg-type]
    assert found is not None
    return found[0][0]["Plan"]


def list_scans(plan: Any) -> list[str]:
    """The tables that a plan reads as a whole."""
    found = [plan["Relation Name"]] if plan["Node Type"] == "Seq Scan" else []
    return found + [name for each in plan.get("Plans", ()) for name in list_scans(each)]


def count_blocks(plan: Any) -> int:
    return plan.get("Shared Hit Blocks", 0) + plan.get("Shared Read Blocks", 0)


async def test_no_statement_grows_with_the_ended_jobs(
    store: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        await submit(store, f"q{number}")
        await begin(store, await submit(store, f"r{number}"))
    attempt = await begin(store, await submit(store, "e1"))
    await store.commit(AtomicWrite(charges=[make_charge(attempt, 1)]))
    asked: dict[str, Sequence[object]] = {}

    def watch() -> None:
        """Note the statements that are sent alone, and those that are sent with others."""
        for name in ("_plan", "_run_alone"):
            known = getattr(PreparedStatements, name)

            def send(
                self: PreparedStatements, sql: str, values: Sequence[object], known: Any = known
            ) -> Any:
                if sql.startswith(PLANNED):
                    asked[sql] = values
                return known(self, sql, values)

            monkeypatch.setattr(PreparedStatements, name, send)

    with closing(psycopg.connect(url.replace("+psycopg", ""), autocommit=True)) as other:
        other.execute("UPDATE jobs SET phase = 'done', ended_at = 1 WHERE id = 'e1'")
        other.execute("UPDATE attempts SET phase = 'ended' WHERE job_id = 'e1'")
        watch()
        await do_what_servers_do(store, "few")
        monkeypatch.undo()
        few = {sql: count_blocks(read_plan(other, sql, values)) for sql, values in asked.items()}
        for table, (rows, changes) in COPIES.items():
            pairs = ", ".join(f"'{name}', {value}" for name, value in changes.items())
            other.execute(  # type: ignore[call-overload]
                f"INSERT INTO {table} SELECT (jsonb_populate_record(t, jsonb_build_object("
                f"{pairs}))).* FROM {table} t, generate_series(1, {ENDED}) n WHERE {rows}"
            )
        other.execute("ANALYZE")
        asked.clear()
        watch()
        await do_what_servers_do(store, "many")
        monkeypatch.undo()
        assert len(asked) >= 50
        for sql, values in asked.items():
            plan = read_plan(other, sql, values)
            scanned = GROWN.intersection(list_scans(plan))
            assert not scanned, f"{sql}\nreads all of {scanned}"
            assert count_blocks(plan) <= 2 * few.get(sql, 0) + 60, sql
