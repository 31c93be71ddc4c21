"""The server's process of the gateway."""

import asyncio
import signal
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from tests.waits import PATIENCE_S

from cavvy.api.execs import JobExecs
from cavvy.api.notifier import ChangeNotifier
from cavvy.capabilities.serving.server.front import GatewayFront
from cavvy.capabilities.serving.server.gateway_child import _END_S, GatewayChild, GatewayLink
from cavvy.capabilities.serving.server.listener import ServiceListener
from cavvy.capabilities.serving.server.relays import ReplicaRelays
from cavvy.capabilities.serving.stored_services import StoredService
from cavvy.domain.services import ServiceSpec
from cavvy.domain.tasks import TaskSpec

_OLD_GATEWAY = """
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.bind(sys.argv[1])
    server.listen()
    print("ready", flush=True)
    while True:
        link = server.accept()[0].makefile("rw")
        for line in link:
            stopped = json.loads(line)["type"] == "stop"
            link.write("{}\\n" if stopped else '{"error": "unknown field `batch`"}\\n')
            link.flush()
            if stopped:
                os._exit(0)
"""


async def test_a_gateway_that_still_starts_is_told_to_end(tmp_path: Path) -> None:
    """It has no control socket yet. A gateway that is not told would be killed after its time."""
    child = GatewayChild(tmp_path, str(tmp_path / "socket"), ServiceListener())
    starting = asyncio.create_task(child.reach())
    while not child.started:
        await asyncio.sleep(0)
    process = child._process
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await child.end(2.0)
    assert process is not None
    assert process.returncode in (0, -signal.SIGTERM)


async def test_the_link_to_a_gateway_that_does_not_end_in_time_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[GatewayLink] = []
    over = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"{}\n")
        await over.wait()
        writer.close()

    async def keep(path: str) -> GatewayLink:
        opened.append(GatewayLink(*await asyncio.open_unix_connection(path)))
        return opened[0]

    monkeypatch.setattr(GatewayLink, "open", keep)
    control = str(tmp_path / "socket")
    async with await asyncio.start_unix_server(answer, control):
        await GatewayChild(tmp_path, control, ServiceListener()).end(-_END_S)
        closed = opened[0]._writer.is_closing()
        opened[0].close()
        over.set()
    assert closed


async def test_the_link_to_a_gateway_that_was_lost_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, lost = Mock(), asyncio.Event()
    relays = ReplicaRelays(JobExecs(ChangeNotifier()))
    front = GatewayFront(tmp_path, str(tmp_path / "socket"), ServiceListener(), relays)

    async def reach() -> Any:
        if link.close.called:
            lost.set()
        front._link = link
        return link

    monkeypatch.setattr(front, "_open", reach)
    monkeypatch.setattr(front, "_follow", AsyncMock(side_effect=OSError("it has ended")))
    monkeypatch.setattr("cavvy.capabilities.serving.server.front._PAUSE_S", 0.0)
    front._needed.set()
    running = asyncio.create_task(front.run([], lambda _: None))
    try:
        async with asyncio.timeout(PATIENCE_S):
            await lost.wait()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_gateway_that_refuses_the_services_is_replaced(tmp_path: Path) -> None:
    """A killed server of an older version leaves a gateway that does not know the new fields."""
    control = str(tmp_path / "socket")
    old = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _OLD_GATEWAY, control, stdout=asyncio.subprocess.PIPE
    )
    assert old.stdout is not None
    await old.stdout.readline()
    relays = ReplicaRelays(JobExecs(ChangeNotifier()))
    front = GatewayFront(tmp_path, control, ServiceListener(), relays)
    task = TaskSpec(name="s", run="serve", service=ServiceSpec())
    service = StoredService(project="p", name="s", id="s", task=task, created_at=datetime.now(UTC))
    answers = asyncio.Event()
    running = asyncio.create_task(front.run([service], lambda _: answers.set()))
    try:
        async with asyncio.timeout(PATIENCE_S):
            assert await old.wait() == 0
            await answers.wait()
            assert await front.read_traffic(service) is not None
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        with suppress(ProcessLookupError):
            old.kill()
        await old.wait()


def test_ports_of_replicas_are_given_to_no_connection(tmp_path: Path) -> None:
    front = GatewayFront(tmp_path, "", ServiceListener(), ReplicaRelays(JobExecs(ChangeNotifier())))
    found = [front.find_port() for _ in range(20)]
    assert len(set(found)) == 20
    assert all(10_000 <= each < 20_000 for each in found)
