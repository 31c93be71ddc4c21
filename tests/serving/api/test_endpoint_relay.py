"""The port of a managed endpoint: what it passes on, what it refuses, and how it loses answers."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import pytest
from tests.waits import patience

from cavvy.capabilities.serving.replicas import ServiceReplica
from cavvy.capabilities.serving.server.endpoint_relay import EndpointRelay
from cavvy.providers.abilities import ReplicaAnswer, ReplicaRequest
from cavvy.providers.base import Refused, TryAgain

REPLICA = ServiceReplica(
    id="r",
    service="s",
    revision=1,
    gang="the-gang",
    ordered_at=datetime(2026, 11, 1, tzinfo=UTC),
)
CLOSE = "host: x\r\nconnection: close\r\n"


class Endpoint:
    """An endpoint that returns the body of a request, and may lose or refuse it."""

    def __init__(self) -> None:
        self.up, self.loses, self.refuses = True, False, False
        self.got: list[ReplicaRequest] = []

    async def answers(self, gang: str) -> bool:
        assert gang == "the-gang"
        return self.up

    async def invoke(self, gang: str, request: ReplicaRequest) -> ReplicaAnswer:
        self.got.append(request)
        if self.loses:
            raise TryAgain("no reply")
        if self.refuses:
            raise Refused("the credentials are wrong")
        return ReplicaAnswer(status=200, headers={"content-type": "a/b"}, body=request.body)


Ask = Callable[[bytes], Awaitable[bytes]]


def use(endpoint: Endpoint, scenario: Callable[[Ask], Awaitable[None]]) -> None:
    async def run() -> None:
        relay = EndpointRelay("s", REPLICA, lambda: endpoint)

        async def ask(data: bytes) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
            writer.write(data)
            answer = await reader.read()
            writer.close()
            return answer

        try:
            async with patience():
                while not await listens(relay.port):
                    await asyncio.sleep(0.01)
            await scenario(ask)
        finally:
            relay.close()

    asyncio.run(run())


async def listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionRefusedError:
        return False
    writer.close()
    return True


def make_request(line: str, body: bytes = b"", more: str = "") -> bytes:
    head = f"{line} HTTP/1.1\r\n{CLOSE}{more}content-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def test_a_body_and_its_answer_are_passed_on() -> None:
    endpoint = Endpoint()

    async def scenario(ask: Ask) -> None:
        answer = await ask(
            make_request("POST /invocations?x=1", b"\x00\r\n\xff", "accept: c/d\r\n")
        )
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"content-type: a/b" in head
        assert body == b"\x00\r\n\xff"

    use(endpoint, scenario)
    [got] = endpoint.got
    assert got.headers["accept"] == "c/d"


def test_a_lost_answer_closes_the_connection() -> None:
    """So the gateway's rule for lost replicas applies; a repeated request is not ours to send."""
    endpoint = Endpoint()
    endpoint.loses = True

    async def scenario(ask: Ask) -> None:
        assert await ask(make_request("POST /invocations", b"1")) == b""
        assert (await ask(make_request("GET /ping"))).split()[1] == b"200"

    use(endpoint, scenario)
    assert len(endpoint.got) == 1


async def test_an_endpoint_that_is_gone_refuses_connections_until_it_is_back() -> None:
    """So a request that the gateway repeats waits, and is not lost again."""
    endpoint = Endpoint()
    endpoint.loses, endpoint.up = True, False
    relay = EndpointRelay("s", REPLICA, lambda: endpoint)
    async with patience():
        while not await listens(relay.port):
            await asyncio.sleep(0.01)
        idle, waiting = await asyncio.open_connection("127.0.0.1", relay.port)
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        writer.write(make_request("POST /invocations", b"1"))
        assert await reader.read() == b""
        assert not await listens(relay.port)
        assert await idle.read() == b""
        writer.close()
        waiting.close()
        endpoint.up = True
        while not await listens(relay.port):
            await asyncio.sleep(0.01)
    relay.close()
    assert len(endpoint.got) == 1


@pytest.mark.parametrize(
    ("line", "more", "status"),
    [
        ("GET /ping", "", b"200"),
        ("GET /other", "", b"404"),
        ("POST /v1/chat/completions", "", b"404"),
        ("GET /invocations", "", b"405"),
        ("POST /invocations", "accept: text/event-stream\r\n", b"405"),
    ],
)
def test_other_requests_are_answered_here(line: str, more: str, status: bytes) -> None:
    endpoint = Endpoint()

    async def scenario(ask: Ask) -> None:
        assert (await ask(make_request(line, more=more))).split()[1] == status

    use(endpoint, scenario)
    assert endpoint.got == []


@pytest.mark.parametrize(("path", "status"), [("/ping", b"200"), ("/other", b"404")])
def test_an_answer_to_head_has_no_body(path: str, status: bytes) -> None:
    """A reader would take the body for the start of the next answer on the connection."""
    endpoint = Endpoint()

    async def scenario(ask: Ask) -> None:
        head, _, body = (await ask(make_request(f"HEAD {path}"))).partition(b"\r\n\r\n")
        assert (head.split()[1], body) == (status, b"")
        _, _, whole = (await ask(make_request(f"GET {path}"))).partition(b"\r\n\r\n")
        assert b"content-length: %d\r\n" % len(whole) in head

    use(endpoint, scenario)
    assert endpoint.got == []


async def test_a_port_that_cannot_listen_at_first_is_tried_again() -> None:
    relay = EndpointRelay("s", REPLICA, Endpoint)
    with socket.socket() as blocker:
        blocker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        blocker.bind(("127.0.0.1", relay.port))
        blocker.listen()
        for _ in range(5):  # the relay tries to listen
            await asyncio.sleep(0)
    async with patience():
        while not await listens(relay.port):
            await asyncio.sleep(0.01)
    relay.close()


def test_an_endpoint_that_is_not_in_service_fails_its_probe() -> None:
    endpoint = Endpoint()
    endpoint.up = False

    async def scenario(ask: Ask) -> None:
        assert (await ask(make_request("GET /ping"))).split()[1] == b"503"

    use(endpoint, scenario)


def test_a_body_that_is_too_large_and_a_refusal_have_a_reason() -> None:
    endpoint = Endpoint()
    endpoint.refuses = True

    async def scenario(ask: Ask) -> None:
        large = await ask(make_request("POST /invocations", b"x" * (26 << 20)))
        assert large.split()[1] == b"413"
        refused = await ask(make_request("POST /invocations", b"1"))
        assert refused.split()[1] == b"502"
        assert b"the credentials are wrong" in refused

    use(endpoint, scenario)
    assert len(endpoint.got) == 1
