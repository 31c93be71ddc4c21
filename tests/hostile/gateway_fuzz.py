"""Requests that were damaged at random, for the gateway: the same seed gives the same ones.

After each, a request on another connection must get its own answer, and if the damaged request was
answered and its connection stays open, so must the next request on it.
"""

import random
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.contract.http_talk import Talk, write_request

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
