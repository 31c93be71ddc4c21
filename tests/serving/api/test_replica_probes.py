"""The probes of replicas whose port is not known."""

import asyncio
from datetime import timedelta

import pytest
from tests.waits import patience

from cavvy.capabilities.serving.control.front import ProbeRecord
from cavvy.capabilities.serving.server import probes as probes_module
from cavvy.capabilities.serving.server.probes import (
    ProbedPort,
    ReplicaProbes,
    keeps_unused,
    probe,
)
from cavvy.domain.services import ReadinessProbe
from cavvy.domain.values import replace

OFTEN = ReadinessProbe(every=timedelta(milliseconds=1))


async def test_a_ready_replica_that_stays_out_of_reach_fails_its_probe() -> None:
    probes = ReplicaProbes()
    ports = {
        "starts": ProbedPort(lambda: 0, OFTEN, patience_s=0.0),
        "was-ready": ProbedPort(lambda: 0, OFTEN, ready=True, patience_s=0.0),
        "comes-back": ProbedPort(lambda: 0, OFTEN, ready=True),
    }
    probes.watch("s", ports, lambda: None)
    async with patience():
        while probes.record("was-ready").failures < 3:
            await asyncio.sleep(0.001)
    assert probes.record("starts") == probes.record("comes-back") == ProbeRecord()
    probes.close()


async def test_a_probe_may_send_headers_and_a_body() -> None:
    received: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            (int(line[16:]) for line in head.splitlines() if line.startswith(b"Content-Length: ")),
            0,
        )
        body = await reader.readexactly(length)
        received.append(head + body)
        good = head.startswith(b"POST /v1/completions ") and body == '{"a": "é"}'.encode()
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" if good else b"HTTP/1.1 405 No\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        how = ReadinessProbe(path="/v1/completions")
        assert await probe(port, how) == "/v1/completions was answered with status 405"
        headers = (("Authorization", "Bearer k"), ("accept", "text/plain"))
        how = replace(how, body='{"a": "é"}', headers=headers)
        assert await probe(port, how) == ""
        how = replace(how, headers=(("content-type", "text/plain"),))
        assert await probe(port, how) == ""
    assert received[0].startswith(b"GET /v1/completions HTTP/1.1\r\n")
    assert b"Content-Length" not in received[0]
    assert b"\r\nAuthorization: Bearer k\r\n" in received[1]
    assert b"\r\naccept: text/plain\r\n" in received[1]
    assert b"\r\nAccept:" not in received[1]
    assert b"\r\nContent-Type: application/json\r\n" in received[1]
    assert b"\r\ncontent-type: text/plain\r\n" in received[2]
    assert b"\r\nContent-Type:" not in received[2]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"HTTP/1.1 401 Unauthorized\r\n\r\n", "/up was answered with status 401"),
        (b"HTTP/1.1 302 Found\r\n\r\n", ""),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "the answer to /up is not HTTP/1.1"),
        (b"", "the answer to /up is not HTTP/1.1"),
        (None, "no answer to /up within 0.1 s"),
    ],
)
async def test_a_failed_probe_says_why(answer: bytes | None, problem: str) -> None:
    ended = asyncio.Event()

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if answer is None:
            await ended.wait()
        else:
            writer.write(answer)
        writer.close()

    how = ReadinessProbe(path="/up", timeout=timedelta(seconds=0.1 if answer is None else 60))
    async with await asyncio.start_server(reply, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert await probe(port, how) == problem
        ended.set()
    assert await probe(port, how) == (
        "the program does not listen on the port in the variable PORT"
    )


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@pytest.mark.parametrize(
    ("answer", "closes", "keeps"),
    [
        (OK, False, True),
        (OK, True, False),
        (b"HTTP/1.1 200 OK\r\nconnection: Keep-Alive, close\r\n\r\n", False, False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", False, False),
        (b"", False, False),
        (b"x" * 100_000, False, False),
    ],
    ids=["keeps", "closes", "will close", "HTTP/1.0", "silent", "no head"],
)
async def test_a_replica_is_tried_for_whether_it_keeps_unused_connections(
    monkeypatch: pytest.MonkeyPatch, answer: bytes, closes: bool, keeps: bool
) -> None:
    monkeypatch.setattr(probes_module, "KEPT_S", 0.2)
    ended = asyncio.Event()

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"connection: close" not in head.lower()
        writer.write(answer)
        if not closes:
            await ended.wait()
        writer.close()

    how = ReadinessProbe(timeout=timedelta(seconds=60 if answer else 0.1))
    async with await asyncio.start_server(reply, "127.0.0.1", 0) as server:
        assert await keeps_unused(server.sockets[0].getsockname()[1], how) is keeps
        ended.set()


async def test_a_replica_that_answers_again_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probes_module, "KEPT_S", 0.01)
    good, ended = True, asyncio.Event()

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(OK if good else b"HTTP/1.1 500 No\r\n\r\n")
        if b"Connection: close" not in head:
            await ended.wait()
        writer.close()

    probes = ReplicaProbes()
    async with await asyncio.start_server(reply, "127.0.0.1", 0) as server, patience():
        port = server.sockets[0].getsockname()[1]
        probes.watch("s", {"r": ProbedPort(lambda: port, OFTEN)}, lambda: None)
        for good in (True, False, True):
            while probes.record("r").keeps is not good:
                await asyncio.sleep(0.001)
        ended.set()
        probes.close()
    assert not probes.record("r").keeps
