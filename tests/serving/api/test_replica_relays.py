"""The way to a replica on another machine: a port here, a session of its agent, a port there."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import pytest
from tests.waits import patience

from cavvy.api.execs import JobExec, JobExecs
from cavvy.api.notifier import ChangeNotifier
from cavvy.capabilities.serving.replicas import ServiceReplica
from cavvy.capabilities.serving.server.relays import FARTHEST, ReplicaRelays
from cavvy.domain.services import ReplicaRole
from cavvy.domain.values import replace
from cavvy.providers.abilities import AnswersRequests

SESSION = (
    "from cavvy.agent.access.session import RemoteSession, SessionTarget\n"
    "RemoteSession(0, 1, SessionTarget({}, '/', lambda: '')).serve()"
)


class Node:
    """An agent that takes each session that is wanted, as the routes for agents would."""

    def __init__(self) -> None:
        self.watch = ChangeNotifier()
        self.execs = JobExecs(self.watch)
        self.sessions: list[tuple[JobExec, asyncio.subprocess.Process]] = []
        self.delay_s = 0.0  # before each piece of data to the server
        self._tasks: set[asyncio.Task[None]] = set()

    def notify(self, gang: str) -> None:
        for wanted in self.execs.wanted(gang, 0):
            wanted.taken = True
            task = asyncio.ensure_future(self._run(wanted))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, wanted: JobExec) -> None:
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, "-c", SESSION)
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        self.sessions.append((wanted, process))
        feeding = asyncio.ensure_future(self._feed(wanted, process))
        assert process.stdout is not None
        offset = 0
        while data := await process.stdout.read(65536):
            await asyncio.sleep(self.delay_s)
            self.execs.put(wanted.id, wanted.gang, 0, offset, data, None)
            offset += len(data)
        feeding.cancel()
        code = await process.wait()
        self.execs.put(wanted.id, wanted.gang, 0, offset, b"", 255 if code else 0)

    async def _feed(self, wanted: JobExec, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        offset, end = 0, False
        with self.watch.listen([wanted.id]) as listener:
            while not end:
                data, end = self.execs.input_of(wanted.id, wanted.gang, 0, offset)
                offset += len(data)
                process.stdin.write(data)
                await process.stdin.drain()
                if not (data or end):
                    await listener.wait(5)
        process.stdin.close()


@asynccontextmanager
async def echoing() -> AsyncIterator[int]:
    """The port of a program that answers each line with itself."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()


def make_replica(port: int, gang: str = "g") -> ServiceReplica:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    return ServiceReplica(id="r1", service="s", revision=1, port=port, gang=gang, ordered_at=at)


async def until(true: Callable[[], object]) -> None:
    async with patience():
        while not true():
            await asyncio.sleep(0.01)


async def say(port: int, line: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(line)
        return await reader.readline()
    finally:
        writer.close()


def play(story: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await story()

    asyncio.run(run())


def make_relays() -> tuple[Node, ReplicaRelays]:
    node = Node()
    relays = ReplicaRelays(node.execs)
    relays.notify = node.notify
    return node, relays


async def test_a_port_here_leads_to_the_replica_and_stays_when_the_tunnel_is_opened_again() -> None:
    node, relays = make_relays()
    async with echoing() as program:
        replica = make_replica(program)
        relays.keep("s", {"r1": replica})
        await until(lambda: relays.port(replica))
        port = relays.port(replica)
        large = b"x" * 50_000 + b"\n"
        told = await asyncio.gather(*(say(port, large) for _ in range(20)))
        assert told == [large] * 20

        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"one\n")
        assert await reader.readline() == b"one\n"
        node.sessions[0][1].kill()
        with suppress(ConnectionError):
            assert await reader.readline() == b"", "the connection ends with the tunnel"
        writer.close()
        await until(lambda: len(node.sessions) == 2)
        await until(lambda: node.sessions[1][0].taken)

        async def answers() -> bool:
            try:
                return await say(port, b"two\n") == b"two\n"
            except OSError:  # it does not listen while there is no tunnel
                return False

        async with patience():
            while not await answers():
                await asyncio.sleep(0.05)
        assert relays.port(replica) == port

        relays.keep("s", {})
        await until(lambda: node.sessions[1][0].exit_code is not None)
        with pytest.raises(OSError):
            await say(port, b"three\n")


async def test_a_second_port_leads_to_the_events_of_a_replica() -> None:
    node, relays = make_relays()
    async with echoing() as program, echoing() as events:
        replica = replace(make_replica(program), second_port=events)
        relays.keep("s", {"r1": replica})
        await until(lambda: relays.port(replica))
        ports = relays.port(replica), relays.events_port(replica)
        assert len({*ports, program, events}) == 4
        assert [await say(port, b"one\n") for port in ports] == [b"one\n"] * 2
        assert relays.events_port(replace(replica, gang="")) == events
        assert relays.events_port(replace(replica, role=ReplicaRole.PREFILL, gang="")) == 0
        relays.close()
        await until(lambda: node.sessions[0][0].exit_code is not None)


async def test_the_round_trip_to_a_replica_sets_its_tier() -> None:
    node, relays = make_relays()
    node.delay_s = 0.03  # so a round trip takes more, however fast this machine is
    async with echoing() as program:
        replica = make_replica(program)
        relays.keep("s", {"r1": replica})
        await until(lambda: relays.port(replica))
        assert relays.tier("r1") >= 1
        assert relays.tier("another") == 0, "it runs on this machine"
    relays.find_endpoints = lambda account: cast(AnswersRequests, object())
    relays.keep("s", {"r1": replica})
    assert relays.tier("r1") == FARTHEST, "it is not measured"
    relays.close()
    await until(lambda: node.sessions[0][0].exit_code is not None)


async def test_a_program_that_ends_is_refused_before_its_connections_end() -> None:
    node, relays = make_relays()
    connections: list[asyncio.StreamWriter] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)

    program = await asyncio.start_server(accept, "127.0.0.1", 0)
    replica = make_replica(int(program.sockets[0].getsockname()[1]))
    here = make_replica(4242, gang="")
    relays.keep("s", {"r1": here})
    assert (relays.port(here), node.sessions) == (4242, [])
    relays.keep("s", {"r1": replica})
    await until(lambda: relays.port(replica))
    reader, writer = await asyncio.open_connection("127.0.0.1", relays.port(replica))
    writer.write(b"one\n")
    await until(lambda: len(connections) > 1)  # the relay looked before it listened
    program.close()
    for each in connections:
        each.close()
    assert await reader.read() == b""
    with pytest.raises(OSError):
        await say(relays.port(replica), b"two\n")
    writer.close()
    relays.close()
    await until(lambda: node.sessions[0][0].exit_code is not None)


async def test_nobody_gets_the_port_of_a_replica_that_is_not_reached_at_the_moment() -> None:
    node, relays = make_relays()
    async with echoing() as program:
        replica = make_replica(program)
        relays.keep("s", {"r1": replica})
        await until(lambda: relays.port(replica))
        relays.notify = lambda gang: None  # no agent opens another tunnel
        node.sessions[0][1].kill()

        listens = f"0100007F:{relays.port(replica):04X} 00000000:0000 0A"
        await until(lambda: listens not in Path("/proc/net/tcp").read_text())
        with socket.socket() as other, pytest.raises(OSError):
            # no connection was made, which would hold the port too for a while
            other.bind(("127.0.0.1", relays.port(replica)))
    relays.close()
    await until(lambda: not node.execs.wanted("g", 0))


async def test_a_session_that_no_agent_takes_is_given_up() -> None:
    node = Node()
    relays = ReplicaRelays(node.execs)
    replica = make_replica(1)
    relays.keep("s", {"r1": replica})
    await until(lambda: node.execs.wanted("g", 0))
    assert relays.port(replica) == 0
    [wanted] = node.execs.wanted("g", 0)
    relays.close()
    await until(lambda: wanted.exit_code is not None)
