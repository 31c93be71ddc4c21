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
from tests.store.ended_rows import copy_ended, weigh

from cavvy.store.drivers import DatabaseSession

_FEW, _MANY = 900, 1500  # jobs that have ended; at most 800 are read for estimates
_STEPS = 20  # of SQLite's machine, by which two runs of a statement may differ
# of jobs between two IDs, which a server chooses so that a few thousand lie between them; see
# `test_a_later_count_of_ended_jobs_reads_as_much_of_many_as_of_few`
_COUNTED = "phase IN (?, ?, ?) GROUP BY project, phase"
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


def copy_rows(path: Path, first: int, last: int) -> None:
    """Copy the rows of the job `ended`, and of all that belongs to it, under these numbers."""
    with closing(sqlite3.connect(path, timeout=60)) as database, database:
        copy_ended(database, "SELECT id FROM jobs WHERE name = 'ended'", first, last)


def weigh_in(path: Path, sql: str, values: tuple[object, ...]) -> tuple[str, int]:
    """How SQLite runs a statement, and how many steps that takes. Nothing is changed."""
    with closing(sqlite3.connect(path, timeout=60, isolation_level=None)) as database:
        return weigh(database, sql, values)


class Asked:
    """Notes the statements that run, each with its first values."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.statements: dict[str, tuple[object, ...]] = {}
        run = DatabaseSession.run

        def noted(session: DatabaseSession, sql: str, values: Sequence[object] = ()) -> Any:
            self.statements.setdefault(sql, tuple(values))
            return run(session, sql, values)

        patch.setattr(DatabaseSession, "run", noted)


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
    monkeypatch.setattr("cavvy.store.ended_jobs.PART", _FEW // 2)  # jobs that are counted at once
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
    copy_rows(path, 1, _FEW)
    few = {sql: weigh_in(path, sql, values) for sql, values in read.items()}
    copy_rows(path, _FEW + 1, _FEW + _MANY)
    grown = []
    for sql, values in read.items():
        plan, steps = weigh_in(path, sql, values)
        assert plan == few[sql][0]
        if steps > few[sql][1] + _STEPS and not sql.endswith(_COUNTED):
            grown.append(f"{few[sql][1]} steps, then {steps}: {sql}\n{plan}")
    assert not grown, "\n\n".join(grown)
