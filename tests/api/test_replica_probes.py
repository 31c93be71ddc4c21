"""The probes of replicas whose port is not known."""

import asyncio
from datetime import timedelta

from tests.waits import patience

from cavvy.api.serving.probes import ProbedPort, ReplicaProbes, probe
from cavvy.control.serving.front import ProbeRecord
from cavvy.domain.services import ReadinessProbe
from cavvy.domain.values import replace

OFTEN = ReadinessProbe(every=timedelta(milliseconds=1))


def test_a_ready_replica_that_stays_out_of_reach_fails_its_probe() -> None:
    async def story() -> None:
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

    asyncio.run(story())


def test_a_probe_may_send_headers_and_a_body() -> None:
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

    async def story() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            how = ReadinessProbe(path="/v1/completions")
            assert not await probe(port, how)
            headers = (("Authorization", "Bearer k"), ("accept", "text/plain"))
            how = replace(how, body='{"a": "é"}', headers=headers)
            assert await probe(port, how)
            assert await probe(port, replace(how, headers=(("content-type", "text/plain"),)))

    asyncio.run(story())
    assert received[0].startswith(b"GET /v1/completions HTTP/1.1\r\n")
    assert b"Content-Length" not in received[0]
    assert b"\r\nAuthorization: Bearer k\r\n" in received[1]
    assert b"\r\naccept: text/plain\r\n" in received[1]
    assert b"\r\nAccept:" not in received[1]
    assert b"\r\nContent-Type: application/json\r\n" in received[1]
    assert b"\r\ncontent-type: text/plain\r\n" in received[2]
    assert b"\r\nContent-Type:" not in received[2]
