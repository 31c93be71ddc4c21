"""The proxy through which sandboxes reach the internet, and nothing else."""

import asyncio
import socket
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from cavvy.capabilities.sandboxes.on_node.network import NetworkProxy, is_public, read_head


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.9.9.9", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1"),
        *("169.254.169.254", "169.254.170.2", "100.100.100.200", "168.63.129.16", "192.0.0.192"),
        *("224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%lo", "fc00::1"),
        *("fd00:ec2::254", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe"),
        *("2002:7f00:1::", "2001:0:1::1", "ff02::1", "::127.0.0.1", "x", ""),
    ],
)
def test_addresses_that_are_not_of_the_internet(address: str) -> None:
    assert not is_public(address)


def test_addresses_of_the_internet() -> None:
    assert all(map(is_public, ("1.1.1.1", "151.101.0.223", "2606:4700::1111")))


def test_heads() -> None:
    assert read_head(b"CONNECT A.org:8443 HTTP/1.1\r\n\r\n") == ("a.org", 8443, b"")
    assert read_head(b"CONNECT [2606::1]:443 HTTP/1.1\r\n\r\n")[:2] == ("2606::1", 443)
    host, port, first = read_head(
        b"GET http://u:p@a.org/x?y HTTP/1.1\r\nHost: a.org\r\nProxy-Authorization: x\r\n\r\n"
    )
    assert (host, port) == ("a.org", 80)
    assert first == b"GET /x?y HTTP/1.1\r\nHost: a.org\r\nConnection: close\r\n\r\n"
    for wrong in (
        *(b"CONNECT 8.8.8.8\t.a.org:80 HTTP/1.1", b"CONNECT a/.b.org:80 HTTP/1.1"),
        *(b"GET http://a.org/\nHost:b.org HTTP/1.1", b"GET http://a.org/ HTTP/1.1\r\n Host: b.org"),
        b"GET http://a.org/secret HTTP/1.1\nHost:b.org\n\n",  # one line, as a bare LF ends none
        b"G\nHost:b.org http://a.org/ HTTP/1.1",
        b"GET http://a.org/ HTTP/1.1\rHost:b.org",
        *(
            b"GET http://a.org/ HTTP/1.12",
            b"GET http://a.org/ HTTP/1.1\n",
            b" http://a.org/ HTTP/1.1",
        ),
    ):
        with pytest.raises(ValueError):
            read_head(wrong + b"\r\n\r\n")
    for wrong in (b"GET / HTTP/1.1", b"CONNECT :443 HTTP/1.1", b"x", b"CONNECT a:0 HTTP/1.1"):
        with pytest.raises(ValueError):
            read_head(wrong + b"\r\n\r\n")


def test_a_request_names_the_host_that_was_allowed() -> None:
    """A server that has several names would serve another one, which the sandbox may not reach."""
    for line in (b"Host: b.org", b"HOST:b.org", b"A: b\r\nhost: b.org\r\nHost: c.org"):
        _, _, first = read_head(b"GET http://a.org:81/x HTTP/1.1\r\n" + line + b"\r\n\r\n")
        assert [each for each in first.split(b"\r\n") if each.lower().startswith(b"host")] == [
            b"Host: a.org:81"
        ]
    for line in (
        b"Host : b.org",
        b"A: b\nHost: b.org",
        b"A: b\rHost: b.org",
        b"\tHost: b.org",
        b":x",
    ):
        with pytest.raises(ValueError):
            read_head(b"GET http://a.org/ HTTP/1.1\r\n" + line + b"\r\n\r\n")


def ask(sent: bytes, names: Sequence[str] | None, *, anywhere: bool) -> bytes:
    """Return what a program gets that sends this to the proxy. PORT is that of a server here."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"got " + await reader.readuntil(b"\r\n\r\n"))
        writer.close()

    async def run() -> bytes:
        there = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = there.sockets[0].getsockname()[1]
        proxy = NetworkProxy(names, *([lambda _: True] if anywhere else []))
        listener = socket.create_server(("127.0.0.1", 0))
        served = await proxy.start(listener)
        async with there, served:
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(sent.replace(b"PORT", str(port).encode()))
            told = await reader.read()
            writer.close()
            await writer.wait_closed()
            return told

    return asyncio.run(run())


def test_requests_are_carried() -> None:
    told = ask(b"GET http://127.0.0.1:PORT/x HTTP/1.1\r\nA: b\r\n\r\n", None, anywhere=True)
    assert told.startswith(b"got GET /x HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nA: b\r\n" in told
    told = ask(b"CONNECT localhost:PORT HTTP/1.1\r\n\r\nhello\r\n\r\n", ["local*"], anywhere=True)
    assert told == b"HTTP/1.1 200 OK\r\n\r\ngot hello\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "names", "anywhere"),
    [
        (b"CONNECT localhost:PORT HTTP/1.1\r\n\r\n", ["*.example.com"], True),
        (b"CONNECT localhost:PORT HTTP/1.1\r\n\r\n", None, False),
        (b"GET http://127.0.0.1:PORT/ HTTP/1.1\r\n\r\n", ["127.0.0.1"], False),
        (b"CONNECT 127.1:PORT HTTP/1.1\r\n\r\n", None, False),
        (b"CONNECT 2130706433:PORT HTTP/1.1\r\n\r\n", None, False),
        (b"CONNECT 0x7f.1:PORT HTTP/1.1\r\n\r\n", None, False),
        (b"CONNECT [::ffff:127.0.0.1]:PORT HTTP/1.1\r\n\r\n", None, False),
        (b"CONNECT 169.254.169.254:80 HTTP/1.1\r\n\r\n", None, False),
        (b"CONNECT localhost:25 HTTP/1.1\r\n\r\n", None, True),
    ],
)
def test_requests_to_elsewhere_are_refused(
    sent: bytes, names: Sequence[str] | None, anywhere: bool
) -> None:
    assert ask(sent, names, anywhere=anywhere).startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize("sent", [b"x\r\n\r\n", b"\xff\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"])
def test_what_is_no_request_is_refused(sent: bytes) -> None:
    assert ask(sent, None, anywhere=True).startswith(b"HTTP/1.1 502 ")


def test_lookups_of_one_sandbox_take_none_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    release, looked = threading.Event(), list[str]()

    def look_up(host: str, port: int, **_: object) -> list[Any]:
        looked.append(host)
        if host == "slow":
            release.wait()
        return [(0, 0, 0, "", ("192.0.2.1", port))]

    async def run() -> str | None:
        greedy, other = (NetworkProxy(None, lambda _: True) for _ in range(2))
        asked = [asyncio.ensure_future(greedy._find("slow", 80)) for _ in range(64)]
        try:
            async with asyncio.timeout(10):
                while "slow" not in looked:
                    await asyncio.sleep(0)
                return await other._find("fast", 80)
        finally:
            count = looked.count("slow")
            release.set()
            greedy.close()
            other.close()
            for each in asked:
                each.cancel()
            await asyncio.wait(asked)
            assert count <= 2

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert asyncio.run(run()) == "192.0.2.1"
