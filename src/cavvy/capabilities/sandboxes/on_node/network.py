"""The way from a sandbox to the internet: a proxy for HTTP and CONNECT, which the host runs.

A sandbox's network namespace has no way out. The first process of a sandbox listens in it on
127.0.0.1:PORT, and hands the socket to the host, which accepts connections, looks up the name that
a program asks for, and connects only to addresses of the internet: not to this machine, its
networks, or addresses at which clouds hand out credentials.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PORT = 3128
_MOST_HEAD = 16 << 10
_MOST_OPEN = 64  # connections of a sandbox at the same time
_MOST_LOOKUPS = 2  # of names at the same time; each occupies a thread, for long if no answer comes
_HEAD_S = 15.0
_CONNECT_S = 15.0
_PIECE = 1 << 16
_MAIL = 25
_HOST = re.compile(r"[a-z0-9._:-]+")  # resolvers take more, such as an address before a blank
_HEADER = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+")  # names of headers (RFC 9110, 5.6.2)
_METHOD = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # also a token (RFC 9110, 9.1)
_VERSION = re.compile(r"HTTP/1\.[01]")
# Addresses of the internet by their form at which clouds serve their machines (Azure's wire server)
_OF_CLOUDS = frozenset({"168.63.129.16"})
# networks that hold others, or have a purpose of their own (RFC 6890); Oracle's metadata service
_OTHERS = tuple(map(ipaddress.ip_network, ("192.0.0.0/24", "2002::/16", "2001::/23", "3fff::/20")))
_INTERNET_6 = ipaddress.ip_network("2000::/3")


def make_variables() -> dict[str, str]:
    """Return the variables by which programs find the proxy."""
    names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    found = {name: f"http://127.0.0.1:{PORT}" for name in names}
    found |= {name.lower(): value for name, value in found.items()}
    return found | dict.fromkeys(("NO_PROXY", "no_proxy"), "localhost,127.0.0.1,::1")


def is_public(address: str) -> bool:
    """Return whether an address is one of the internet, and none of this machine."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:  # with a scope, such as fe80::1%eth0
        return False
    if not found.is_global or found.is_multicast or str(found) in _OF_CLOUDS:
        return False
    inside = found.version == 4 or found in _INTERNET_6
    return inside and not any(found in each for each in _OTHERS) and not _is_own(found)


def _is_own(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Return whether this machine has the address: only then it can be bound."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as made:
        made.bind((str(address), 0))
        return True
    return False


class NetworkProxy:
    """The proxy of one sandbox. `names` are patterns of host names that it allows; None: all."""

    def __init__(
        self, names: Sequence[str] | None, allows: Callable[[str], bool] = is_public
    ) -> None:
        self._names, self._allows = names, allows
        self._open: set[asyncio.Task[object]] = set()
        # threads of its own, so that it takes none from other sandboxes; they start when needed
        self._lookups = ThreadPoolExecutor(_MOST_LOOKUPS, "lookup")

    async def start(self, listener: socket.socket) -> asyncio.Server:
        """Accept connections of a listening socket."""
        return await asyncio.start_server(self._serve, sock=listener, limit=_MOST_HEAD)

    def close(self) -> None:
        for task in list(self._open):
            task.cancel()
        self._lookups.shutdown(wait=False, cancel_futures=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            if len(self._open) > _MOST_OPEN:
                _refuse(writer, "503 Busy", "too many connections")
                return
            await self._carry(reader, writer)
        except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError) as error:
            _refuse(writer, "502 Bad Gateway", str(error) or type(error).__name__)
        except asyncio.LimitOverrunError:
            _refuse(writer, "431 Too Large", "the head is too long")
        finally:
            self._open.discard(task)
            with suppress(OSError):
                writer.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_HEAD_S):
            head = await reader.readuntil(b"\r\n\r\n")
        host, port, first = read_head(head)
        if self._names is not None and not any(fnmatchcase(host, each) for each in self._names):
            _refuse(writer, "403 Forbidden", f"{host} is not among the sandbox's host names")
            return
        if port == _MAIL:
            _refuse(writer, "403 Forbidden", "sandboxes send no mail")
            return
        address = await self._find(host, port)
        if address is None:
            _refuse(writer, "403 Forbidden", f"{host} has no address of the internet")
            return
        async with asyncio.timeout(_CONNECT_S):
            there, back = await asyncio.open_connection(address, port)
        try:
            if first:
                back.write(first)
            else:
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            await _join((reader, back), (there, writer))
        finally:
            back.close()

    async def _find(self, host: str, port: int) -> str | None:
        """Return the address to connect to. It is looked up once, so no later answer counts."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(_CONNECT_S):
            look = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
            found = await loop.run_in_executor(self._lookups, look)
        return next((str(each[4][0]) for each in found if self._allows(str(each[4][0]))), None)


def read_head(head: bytes) -> tuple[str, int, bytes]:
    """Return the host and port that a request names, and what to send there first; b"" for CONNECT.
    Raises ValueError.
    """
    line, _, rest = head.partition(b"\r\n")
    method, target, version = line.decode("ascii").split(" ")
    written = _METHOD.fullmatch(method) and target.isprintable() and _VERSION.fullmatch(version)
    if not written:  # a part with a line end would add a `Host` of its own
        raise ValueError("no request of HTTP/1")
    if method == "CONNECT":
        host, port = _split(target, 443)
        return host, port, b""
    scheme, _, after = target.partition("://")
    if scheme.lower() != "http":
        raise ValueError("use CONNECT, or a URL that begins with http://")
    where, slash, path = after.partition("/")
    host, port = _split(where.rpartition("@")[2], 80)
    begin = f"{method} {slash or '/'}{path} {version}\r\nHost: {where.rpartition('@')[2]}".encode()
    kept = _keep_lines(rest)
    return host, port, b"\r\n".join([begin, *kept, b"Connection: close", b"", b""])


def _keep_lines(rest: bytes) -> list[bytes]:
    """Return the lines of a head that are passed on. Its `Host` is not: a server that has several
    names would serve one that the sandbox may not reach. Raises ValueError.
    """
    lines = [each for each in rest.split(b"\r\n") if each]
    kept = []
    for each in lines:
        name = each.partition(b":")[0].lower()
        if not _HEADER.fullmatch(name) or b"\n" in each or b"\r" in each:
            raise ValueError("a line of the head is no header")
        if name not in (b"host", b"connection", b"keep-alive") and not name.startswith(b"proxy-"):
            kept.append(each)
    return kept


def _split(where: str, usual: int) -> tuple[str, int]:
    host, colon, port = where.rpartition(":")
    if not colon or "]" in port:
        host, port = where, ""
    number = int(port) if port else usual
    host = host.strip("[]").lower().rstrip(".")
    if not _HOST.fullmatch(host) or not 0 < number < 65536:
        raise ValueError("no host")
    return host, number


def _refuse(writer: asyncio.StreamWriter, status: str, text: str) -> None:
    body = f"cavvy: {text}\n".encode(errors="replace")
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    with suppress(OSError):
        writer.write(head.encode() + body)


async def _join(*ways: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
    """Carry bytes until both ways have ended, or one is broken."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_PIECE):
            writer.write(data)
            await writer.drain()
        with suppress(OSError):
            writer.write_eof()

    tasks = [asyncio.ensure_future(carry(*way)) for way in ways]
    try:
        await asyncio.gather(*tasks)
    except OSError:
        return
    finally:
        for task in tasks:
            task.cancel()
