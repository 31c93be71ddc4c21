"""What a killed agent left in the shared folder is delivered before the gang counts as ended."""

import asyncio
import io
import sys
import zipfile
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

import msgspec
import pytest
from tests.waits import patience

from cavvy.providers.base import GangState, ProviderContext
from cavvy.providers.batch.commands import BatchCommands, BatchJobRow, BatchPhase
from cavvy.providers.batch.gangs import BatchGangs
from cavvy.providers.batch.login_session import LoginNode, LoginSession
from cavvy.providers.batch.system import BatchSystem
from cavvy.providers.batch.workspace import BatchIntent, SharedWorkspace
from cavvy.providers.slurm.system import DIALECT

NOW = datetime(2026, 7, 1, tzinfo=UTC)
# Counts its runs in a file of the test, since the gang's folder goes with the gang.
AGENT = """
import os, sys
with open({tries!r}, "a") as file:
    print(sys.argv[1], os.path.basename(os.path.dirname(sys.argv[2])), file=file)
sys.exit(os.path.getsize({tries!r}) < {enough} * len("--deliver 0\\n"))
"""


class KilledJob:
    """A batch system with one job, whose agent was killed."""

    def __init__(self, login_session: LoginSession) -> None:
        self.commands = BatchCommands(login_session, DIALECT)

    async def jobs(self, uid: int, mark: str) -> Sequence[BatchJobRow]:
        row = BatchJobRow(
            id="1",
            name="gang",
            phase=BatchPhase.OVER,
            hosts=("a",),
            start=NOW - timedelta(minutes=1),
            end=NOW,
            broke=True,
        )
        return [row]


@pytest.mark.parametrize(("enough", "runs"), [(1, 1), (2, 2), (9, 3)])
async def test_a_delivery_is_repeated_until_nothing_is_left(
    tmp_path: Path, enough: int, runs: int
) -> None:
    tries = tmp_path / "tries"
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("__main__.py", AGENT.format(tries=str(tries), enough=enough))
    context = ProviderContext(
        installation="here",
        home=tmp_path,
        settings={"python": sys.executable},
        agent_archive=archive.getvalue,
        now=lambda: NOW,
    )
    where = LoginNode(
        host="", ssh_options=(), python=sys.executable, folder=str(tmp_path / "shared"), tools=()
    )
    login_session = LoginSession(where)
    workspace = SharedWorkspace(login_session, "here", (await login_session.hello()).folder)
    intent = BatchIntent(name="gang", nodes=1, asked_at=NOW)
    files = {"gang.json": msgspec.json.encode(intent), "job": b"1", "end": b"137 1782864000"}
    await login_session.make(workspace.gang("gang"), files)
    await login_session.write({f"{workspace.gang('gang')}/0/started": b""})
    gangs = BatchGangs(cast(BatchSystem, KilledJob(login_session)), context)
    first = await gangs.gangs("gang")
    assert [seen.state for seen in first] == [GangState.RUNNING]
    async with patience():
        while (await gangs.gangs("gang"))[0].state is not GangState.ENDED:
            await asyncio.sleep(0.01)
    await gangs.close()
    await login_session.close()
    assert tries.read_text() == "--deliver 0\n" * runs
