"""Answers that a gateway can pass on to a queued call."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from tests.serving.team_rows import make_service

from cavvy.capabilities.serving.queued_calls import CallAnswer, QueuedCall
from cavvy.capabilities.serving.server.gateway_child import GatewayCaller
from cavvy.capabilities.serving.server.listener import ServiceListener

pytestmark = pytest.mark.timeout(60)
NOW = datetime(2026, 1, 1, tzinfo=UTC)
HINT = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
DONE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi"


async def ask(answer: bytes, method: str = "POST") -> CallAnswer:
    """Send a call to a server that answers with these bytes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    call = QueuedCall(project="p", service="s", id="c", method=method, submitted_at=NOW, due_at=NOW)
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        caller = GatewayCaller(ServiceListener())
        return await caller.call(port, make_service("p", NOW), call, b"", timedelta(seconds=30))


@pytest.mark.parametrize(
    "before", [b"", HINT, HINT * 3, b"HTTP/1.1 100 Continue\r\n\r\n" + HINT, HINT * 100]
)
async def test_interim_answers_are_skipped(before: bytes) -> None:
    found = await ask(before + DONE)
    assert (found.status, found.body, found.problem) == (200, b"hi", "")


@pytest.mark.parametrize("answer", [HINT, HINT * 101 + DONE])
async def test_interim_answers_without_an_end_are_a_failure(answer: bytes) -> None:
    found = await ask(answer)
    assert found.status is None
    assert "the gateway did not answer" in found.problem


async def test_the_answer_to_head_has_no_body() -> None:
    found = await ask(DONE.removesuffix(b"hi"), "HEAD")
    assert (found.status, found.body, found.problem) == (200, b"", "")
