"""The server's process of the gateway."""

import asyncio
import signal
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from tests.waits import PATIENCE_S

from cavvy.api.execs import JobExecs
from cavvy.api.notifier import ChangeNotifier
from cavvy.capabilities.serving.server.front import GatewayFront
from cavvy.capabilities.serving.server.gateway_child import GatewayChild
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
