"""What requests that are sent often, and the passes of the control plane beside them, ask the
database: no statement does more work because more jobs have ended.
"""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.api.api.test_api_agents import claim, report, start
from tests.api.api_state import Api, open_api, until

from cavvy.store.drivers import DatabaseSession

_FEW, _MANY = 900, 1500  # jobs that have ended; at most 800 are read for estimates
_STEPS = 20  # of SQLite's machine, by which two runs of a statement may differ
# the columns that name a job, an attempt or a gang
_NAMES = {"id", "job_id", "attempt_id", "gang", "bought_as", "name"}
_TABLES = ("jobs", "documents", "attempts", "nodes", "charges", "ledger_subjects", "ledger")
_READS = (
    "/v1/jobs?arrays=true",
    "/v1/projects/default/jobs?arrays=true&limit=50",
    "/v1/projects/default/jobs/waits",
    "/v1/projects/default/jobs/runs",
    "/v1/projects/default/jobs/runs/events",
    "/v1/shares",
    "/v1/nodes",
    "/v1/projects",
    "/metrics",
)
# of all jobs, so these are counted rarely (`JobCounts`)
_COUNTED = "phase IN (?, ?, ?) GROUP BY project, phase"


def copy_ended(path: Path, first: int, last: int) -> None:
    """Copy the rows of the job `ended`, and of all that belongs to it, under these numbers."""
    with closing(sqlite3.connect(path, timeout=60)) as database, database:
        database.execute("PRAGMA foreign_keys=OFF")
        for table in _TABLES:
            columns = database.execute(f"PRAGMA table_info({table})").fetchall()
            names = [each[1] for each in columns]
            owner = "id" if table == "jobs" else "job_id"
            if owner not in names and "attempt_id" not in names:
                continue
            texts = [each[1] for each in columns if each[2] not in ("BIGINT", "INTEGER")]
            made = ", ".join(
                f"{each} || '-' || n" if each in _NAMES and each in texts else f'"{each}"'
                for each in names
            )
            ended = "SELECT id FROM jobs WHERE name = 'ended'"
            where = (
                f"{owner} IN ({ended})"
                if owner in names
                else f"attempt_id IN (SELECT id FROM attempts WHERE job_id IN ({ended}))"
            )
            database.execute(
                "WITH RECURSIVE numbers(n) AS "
                "(SELECT ? UNION ALL SELECT n + 1 FROM numbers WHERE n < ?) "
                f"INSERT INTO {table} SELECT {made} FROM {table}, numbers WHERE {where}",
                (first, last),
            )


class Asked:
    """Notes the statements that run, each with its first values."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.statements: dict[str, tuple[object, ...]] = {}
        run = DatabaseSession.run

        def noted(session: DatabaseSession, sql: str, values: Sequence[object] = ()) -> Any:
            self.statements.setdefault(sql, tuple(values))
            return run(session, sql, values)

        patch.setattr(DatabaseSession, "run", noted)


def weigh(path: Path, sql: str, values: tuple[object, ...]) -> tuple[str, int]:
    """How SQLite runs a statement, and how many steps that takes. Nothing is changed."""
    with closing(sqlite3.connect(path, timeout=60, isolation_level=None)) as database:
        plan = database.execute(f"EXPLAIN QUERY PLAN {sql}", values).fetchall()
        steps = 0

        def count() -> int:
            nonlocal steps
            steps += 1
            return 0

        database.execute("BEGIN")
        database.set_progress_handler(count, 1)
        database.execute(sql, values).fetchall()
        database.set_progress_handler(None, 1)
        database.execute("ROLLBACK")
    return "\n".join(str(each[3]) for each in plan), steps


async def use(api: Api, gang: str) -> None:
    for path in _READS:
        answer = await api.http.get(path)
        assert answer.status_code == 200, (path, answer.text)
    told = {"kind": "telemetry", "cpu_percent": 50.0, "memory_mib": 100}
    assert (await report(api, gang, {"seq": 2, **told})).status_code == 200
    await api.submit("{name: other, run: 'true'}")
    await api.http.post("/v1/projects/default/jobs/other/stop", json={})


async def test_no_statement_grows_with_the_jobs_that_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_api("sqlite", tmp_path) as api:
        gang = await start(api, "{name: ended, run: 'true'}")
        await claim(api, gang)
        await report(api, gang, {"seq": 1, "kind": "running"})
        over = {"seq": 2, "kind": "exited", "outcome": "succeeded", "exit_code": 0, "log_bytes": 0}
        await report(api, gang, over)

        async def is_done() -> bool:
            answer = await api.http.get("/v1/projects/default/jobs/ended")
            return bool(answer.json()["phase"] == "done")

        assert await until(is_done)
        gang = await start(api, "{name: runs, run: 'true'}")
        await claim(api, gang)
        await report(api, gang, {"seq": 1, "kind": "running"})
        for name in ("fills", "waits"):  # the free machine can be had twice
            await api.submit(f"{{name: {name}, run: 'true'}}")
        asked = Asked(monkeypatch)
        await use(api, gang)
        monkeypatch.undo()
        path = tmp_path / "home" / "cavvy.db"
    read = {
        sql: values
        for sql, values in asked.statements.items()
        if sql.lstrip().startswith(("SELECT", "WITH", "UPDATE", "DELETE"))
    }
    assert len(read) >= 30
    copy_ended(path, 1, _FEW)
    few = {sql: weigh(path, sql, values) for sql, values in read.items()}
    copy_ended(path, _FEW + 1, _FEW + _MANY)
    grown = []
    for sql, values in read.items():
        plan, steps = weigh(path, sql, values)
        assert plan == few[sql][0]
        if steps > few[sql][1] + _STEPS and not sql.endswith(_COUNTED):
            grown.append(f"{few[sql][1]} steps, then {steps}: {sql}\n{plan}")
    assert not grown, "\n\n".join(grown)
