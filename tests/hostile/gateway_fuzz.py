"""Requests that were damaged at random, for the gateway: the same seed gives the same ones.

After each, a request on another connection must get its own answer, and if the damaged request was
answered and its connection stays open, so must the next request on it.
"""

import json
import random
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.contract.http_talk import Talk, write_request
from tests.contract.replica_stand_in import ReplicaStandIn, Seen

_BASES = (
    write_request("GET", "/echo?fuzz", accept="*/*"),
    write_request("POST", "/echo?fuzz", b"hello world", content_type="text/plain"),
    write_request("PUT", "/echo?fuzz", b"5\r\nhello\r\n0\r\n\r\n", transfer_encoding="chunked"),
    write_request("POST", "/echo?fuzz", b"x" * 20, expect="100-continue"),
    write_request("GET", "/echo?fuzz", connection="keep-alive, x-a", x_a="1", te="trailers"),
    write_request("HEAD", "/echo?fuzz"),
    write_request("GET", "http://svc.example/echo?fuzz"),
    write_request(
        "POST", "/echo?fuzz", b"3;a=b\r\nabc\r\n0\r\nX: y\r\n\r\n", transfer_encoding="chunked"
    ),
)
_PARTS = (
    *(b"\r\n", b"\n", b"\r", b"\x00", b" ", b"\t", b":", b";", b",", b"\xff", b"0\r\n\r\n"),
    *(b"Content-Length: 5\r\n", b"Content-Length: 0\r\n", b"content-length : 7\r\n"),
    *(
        b"Transfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n",
        b"TE: chunked\r\n",
    ),
    *(b"Transfer_Encoding: chunked\r\n", b"Transfer-Encoding:\x0bchunked\r\n"),
    *(b"Host: svc.example\r\n", b"Connection: close\r\n", b"Connection: host, content-length\r\n"),
    *(b" HTTP/1.1\r\n", b" HTTP/1.0", b"HTTP/0.9", b"GET /echo?fuzz HTTP/1.1\r\n", b"ffffffff\r\n"),
    *(b"Upgrade: h2c\r\nConnection: upgrade\r\n", b"Expect: 100-continue\r\n", b"%00", b"/../"),
)


@dataclass
class FuzzReport:
    requests: int = 0
    answered: int = 0
    refused: int = 0
    closed: int = 0  # without an answer
    grown_kib: int = 0  # of the gateway's memory


def make_requests(seed: int, count: int) -> Iterator[bytes]:
    choice = random.Random(seed)
    for _ in range(count):
        data = bytearray(choice.choice(_BASES))
        for _ in range(choice.randrange(1, 4)):
            at = choice.randrange(len(data))
            match choice.randrange(5):
                case 0:
                    data[at] = choice.randrange(256)
                case 1:
                    data[at:at] = choice.choice(_PARTS)
                case 2:
                    del data[at : at + choice.randrange(1, 12)]
                case 3:
                    lines = bytes(data).split(b"\r\n")
                    lines.insert(choice.randrange(1, len(lines)), choice.choice(lines))
                    data = bytearray(b"\r\n".join(lines))
                case 4:
                    line = bytes(data).find(b"\r\n", at) + 2
                    data[line:line] = choice.choice(_PARTS)
            data = data or bytearray(b"\r\n")
        yield bytes(data)


def run_fuzz(port: int, pid: int, seed: int, count: int) -> FuzzReport:
    """Raises AssertionError at the first answer that is another request's."""
    report = FuzzReport()
    before = read_memory_kib(pid)
    with Talk(port) as other:
        for number, data in enumerate(make_requests(seed, count)):
            report.requests += 1
            status = _try_one(port, data, number)
            report.answered += status is not None and status < 400
            report.refused += status is not None and status >= 400
            report.closed += status is None
            path = f"/echo?other={number}"
            assert other.ask("POST", path, b"x").json["path"] == path, data
    report.grown_kib = read_memory_kib(pid) - before
    return report


def _try_one(port: int, data: bytes, number: int) -> int | None:
    """The status of the answer; None without one."""
    with Talk(port) as talk:
        try:
            talk.send(data)
            if number % 2:
                talk.socket.shutdown(socket.SHUT_WR)
            else:
                talk.send(write_request("GET", "/echo?tail", connection="close"))
                talk.socket.shutdown(socket.SHUT_WR)
            raw = talk.rest()
        except OSError:  # the gateway has closed the connection
            return None
    return _check_answers(raw, data)


def _check_answers(raw: bytes, data: bytes) -> int | None:
    """All that came back are whole answers of the gateway or the replica, in order."""
    first = None
    for piece in raw.split(b"HTTP/1.1 ")[1:]:
        status = int(piece[:3])
        assert status in range(100, 600), data
        if first is None and status >= 200:
            first = status
    assert not raw or raw.startswith(b"HTTP/1.1 "), (data, raw)
    assert raw.count(b"?tail") <= 1, (data, raw)
    return first


def read_memory_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


_ROUTES = (
    *("chat/completions", "completions", "embeddings", "responses", "messages", "rerank"),
    *("audio/transcriptions", "files", "batches", "tokenize"),
)
_ASKED = {
    **{"model": "m", "stream": True, "max_tokens": 3, "stream_options": {"include_usage": True}},
    "messages": [{"role": "system", "content": "brief"}, {"role": "user", "content": "hello"}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
}
_EVENTS = (
    b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10}}\n\n',
    *(b"data: [DONE]\n\n", b"event: x\ndata: {\n\n", b": ping\r\n\r\n", b"data: \xff\n\n", b"data"),
    *(b'data: {"usage":' + b"[" * 5000 + b"\n\n", b'data: {"usage":{"prompt_tokens":1e999}}\n\n'),
    b'data: {"usage":{"completion_tokens":-5,"prompt_tokens":99999999999999999999}}\n\n',
)


@dataclass
class DamagedEngine(ReplicaStandIn):
    """An engine whose answers are damaged event streams, whatever it is asked."""

    choice: random.Random = field(default_factory=lambda: random.Random(3))

    def _find(self, path: str) -> Any:
        return self._do_damaged

    async def _do_damaged(self, request: Seen, _: dict[str, str], reader, writer) -> bool:
        self.seen.clear()
        kind = self.choice.choice((b"text/event-stream", b"application/json"))
        body = b"".join(self.choice.choices(_EVENTS, k=self.choice.randrange(6)))
        cut = self.choice.randrange(10) == 0  # the connection ends in the middle of the answer
        size = len(body) + (10 if cut else 0)
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n" % (kind, size)
        )
        writer.write(body)
        return not cut


def make_bodies(seed: int, count: int) -> Iterator[bytes]:
    """Yield bodies of requests to language models, with odd values and damaged JSON."""
    choice = random.Random(seed)
    names = [*_ASKED, "prompt", "input", "n", "user"]
    for _ in range(count):
        asked: dict[str, Any] = dict(_ASKED)
        for _ in range(choice.randrange(1, 4)):
            asked[choice.choice(names)] = _make_value(choice, 0)
        data = bytearray(json.dumps(asked).encode())
        at = choice.randrange(len(data))
        match choice.randrange(8):
            case 0:
                del data[at:]
            case 1:
                data[at:at] = choice.randbytes(choice.randrange(1, 6))
            case 2:
                deep = choice.choice((999, 1001, 100_000))
                data[1:1] = b'"messages":' + b"[" * deep + b"]" * choice.choice((0, deep)) + b","
        yield bytes(data)


def _make_value(choice: random.Random, depth: int) -> Any:
    kind = choice.randrange(8) if depth < 4 else 7
    if kind < 2:
        return [_make_value(choice, depth + 1) for _ in range(choice.randrange(4))]
    if kind < 4:
        keys = choice.choices(("role", "content", "type", "text", "model"), k=choice.randrange(4))
        return {key: _make_value(choice, depth + 1) for key in keys}
    return choice.choice((None, True, 0, -1, 1e308, 10**30, "", "m", "\ud800", "\0", "x" * 5000))


def fuzz_bodies(port: int, pid: int, seed: int, count: int) -> FuzzReport:
    """Send damaged bodies to the routes of OpenAI's API. Raises AssertionError at an answer of the
    gateway that is no error in the format of OpenAI or Anthropic, or that blames the gateway."""
    report = FuzzReport()
    before = read_memory_kib(pid)
    for number, body in enumerate(make_bodies(seed, count)):
        path = f"/v1/{_ROUTES[number % len(_ROUTES)]}"
        report.requests += 1
        with Talk(port) as talk:
            talk.send(write_request("POST", path, body, host="any.example"))
            try:
                reply = talk.read()
            except (OSError, AssertionError, EOFError):  # the engine's answer was cut
                report.closed += 1
                continue
        report.answered += reply.status < 400
        report.refused += reply.status >= 400
        if reply.status >= 400:
            assert isinstance(reply.json["error"]["message"], str), (path, body)
        assert reply.status < 500, (path, body, reply.body)
    report.grown_kib = read_memory_kib(pid) - before
    return report
