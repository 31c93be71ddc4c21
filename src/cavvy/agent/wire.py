"""A small non-blocking HTTP/1.1 client on the event loop. The client keeps its connection open and
sends one request at a time.

All errors are reported by `failed(reason)`, after which the caller retries. The caller may repeat
any request, because all requests of the agent's protocol are idempotent.
"""

from __future__ import annotations

import errno
import socket
from abc import ABC, abstractmethod

from .loop import READ, WRITE

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from .loop import EventLoop, LoopTimer

    Replied = Callable[[int, bytes], None]
    Failed = Callable[[str], None]

# maximum bytes of an answer; blobs of working folders are fetched by another client
MAX_REPLY = 64 * 1024 * 1024


class ServerAddress:
    """The control plane's address: `unix:/path`, `http://host:port`, `https://host:port` or
    `mailbox:/path`.

    A host name is resolved only once, before the work starts, because the lookup can block for many
    seconds. If the control plane changes its IP address while work runs, the old address must stay
    reachable until the work ends.
    """

    def __init__(self, address: str, pin: str = "") -> None:
        self.text = address
        # SHA-256 of the only trusted certificate; if set, certificate authorities are not used
        self.pin = pin
        self.tls = address.startswith("https://")
        self.prefix = ""
        self.targets: list[tuple[int, object]] = []
        self.by_mail = address.startswith("mailbox:")
        if self.by_mail:
            self.host = "localhost"
        elif address.startswith("unix:"):
            self.host = "localhost"
            self.targets = [(socket.AF_UNIX, address[5:])]
        elif address.startswith(("http://", "https://")):
            self.host, slash, path = address.split("://", 1)[1].partition("/")
            self.prefix = (slash + path).rstrip("/")
        else:
            raise ValueError(
                "`address` must be unix:/path, http(s)://host:port or mailbox:/path, not "
                f"{address!r}"
            )

    def refresh(self) -> None:
        """Resolve the host name. Raises OSError."""
        found = socket.getaddrinfo(self.name, self.port, 0, socket.SOCK_STREAM)
        self.targets = [(family, target) for family, _, _, _, target in found]

    @property
    def name(self) -> str:
        """The host without its port and without the brackets of an IPv6 address."""
        host = self.host if self.host.endswith("]") else self.host.rsplit(":", 1)[0]
        return host.strip("[]")

    @property
    def port(self) -> int:
        port = self.host.rpartition(":")[2]
        return int(port) if port.isdigit() else 443 if self.tls else 80


class BackOff:
    """Growing delays between tries. `chance` returns numbers in [0, 1). If `chance` is given, each
    delay is shortened by up to a half, so that nodes that failed together retry at different times.
    """

    __slots__ = ("_chance", "_delay", "_first", "_growth", "_last")

    def __init__(
        self,
        first_s: float,
        last_s: float,
        growth: float = 2.0,
        chance: Callable[[], float] | None = None,
    ) -> None:
        self._first, self._last, self._growth, self._chance = first_s, last_s, growth, chance
        self._delay = first_s

    def next(self) -> float:
        """Return the number of seconds to wait before the next try."""
        delay, self._delay = self._delay, min(self._last, self._delay * self._growth)
        return delay if self._chance is None else delay * (1 - self._chance() / 2)

    def reset(self) -> None:
        """After a success, reset the delay to the shortest delay."""
        self._delay = self._first

    @property
    def fresh(self) -> bool:
        """True if the last request succeeded, so that the next delay is the shortest one."""
        return self._delay == self._first


class RequestConnection(ABC):
    """Sends one request at a time to the control plane. Each subclass implements one transport."""

    silence = "no answer within {:g} s"

    def __init__(self, loop: EventLoop, address: ServerAddress, headers: str) -> None:
        self._loop, self._address, self.headers = loop, address, headers
        self._request = b""
        self._timer: LoopTimer | None = None
        self._replied: Replied | None = None
        self._failed: Failed | None = None

    @property
    def busy(self) -> bool:
        return self._replied is not None

    def request(
        self,
        method: str,
        path: str,
        body: bytes,
        *,
        timeout_s: float,
        replied: Replied,
        failed: Failed,
        headers: str = "",
    ) -> None:
        """Send a request; the loop later calls `replied(status, body)` or `failed(reason)`."""
        head = (
            f"{method} {self._address.prefix}{path} HTTP/1.1\r\nHost: {self._address.host}\r\n"
            f"{self.headers}{headers}Content-Length: {len(body)}\r\n\r\n"
        )
        self._request = head.encode("latin-1") + body
        self._replied, self._failed = replied, failed
        self._timer = self._loop.after(
            timeout_s, lambda: self._fail(self.silence.format(timeout_s))
        )
        self._start()

    def close(self) -> None:
        """Cancel the request and disconnect. After `close`, no callback is called."""
        self._end()
        self._disconnect()

    @abstractmethod
    def _start(self) -> None:
        """Send `self._request`."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Close the connection, or withdraw the request from the mailbox."""

    def _end(self) -> tuple[Replied | None, Failed | None]:
        """Clear the timer and the callbacks of the finished request, and return the callbacks."""
        callbacks = self._replied, self._failed
        self._replied = self._failed = None
        self._loop.cancel(self._timer)
        return callbacks

    def _succeed(self, status: int, body: bytes) -> None:
        replied, _ = self._end()
        if replied is not None:
            replied(status, body)

    def _fail(self, reason: str) -> None:
        self._disconnect()
        _, failed = self._end()
        if failed is not None:
            failed(reason)

    def _fail_later(self, reason: str) -> None:
        self._loop.after(0, lambda: self._fail(reason))


class LoopConnection(RequestConnection):
    """Sends requests over a socket. The first request opens the socket. If the socket has been
    closed, the next request opens a new one.
    """

    def __init__(self, loop: EventLoop, address: ServerAddress, headers: str) -> None:
        super().__init__(loop, address, headers)
        self._socket: socket.socket | None = None
        self._ready = False  # whether the socket is connected and the TLS handshake is complete
        self._wrapped = False  # whether the socket uses TLS
        self._fresh = True  # True until the first answer arrives on this connection
        self._turn = 0  # index of the resolved address to try next
        self._out = memoryview(b"")
        self._in = bytearray()
        self.said: dict[str, str] = {}  # headers of the last answer

    def _start(self) -> None:
        self._out = memoryview(self._request)
        self._in.clear()
        if self._socket is not None:
            self._flush()
            return
        try:
            self._connect()
        except OSError as error:
            self._disconnect()
            self._fail_later(error.strerror or str(error))

    def _connect(self) -> None:
        if not self._address.targets:
            self._address.refresh()
        family, target = self._address.targets[self._turn % len(self._address.targets)]
        self._ready, self._fresh = False, True
        connection = self._socket = socket.socket(family, socket.SOCK_STREAM)
        connection.setblocking(False)
        if family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # the target is what getaddrinfo gave for this family
        code = connection.connect_ex(target)  # type: ignore[arg-type]
        if code not in (
            0,
            errno.EINPROGRESS,
        ):  # EAGAIN means a full queue of a Unix socket: retry later
            raise OSError(code, errno.errorcode.get(code, str(code)))
        self._wrapped = False
        if code == 0 and not self._address.tls:
            self._ready = True
            self._flush()
        else:
            self._loop.watch(connection.fileno(), WRITE, self._step)

    def _flush(self) -> None:
        """Send as much data as the peer accepts now, then wait until the peer accepts more data or
        responds.
        """
        assert self._socket is not None
        try:
            while self._out:
                self._out = self._out[self._socket.send(self._out[:262144]) :]
        except OSError as error:
            if not self._must_wait(error):
                return
        self._loop.watch(self._socket.fileno(), READ | WRITE if self._out else READ, self._step)

    def _step(self, events: int) -> None:
        assert self._socket is not None
        if not self._ready and not self._get_ready():
            return
        if self._out and events & WRITE:
            self._flush()
        if self._socket is not None and events & ~WRITE:
            self._receive()

    def _get_ready(self) -> bool:
        """Complete the connection and, for TLS, the handshake. Return whether requests can be
        sent."""
        assert self._socket is not None
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._turn += 1
            self._broken(errno.errorcode.get(code, str(code)))
            return False
        if self._address.tls:
            try:
                if not self._wrapped:  # TLS needs a connected socket
                    self._loop.unwatch(self._socket.fileno())
                    self._socket, self._wrapped = wrap_tls(self._socket, self._address), True
                self._socket.do_handshake()  # type: ignore[attr-defined]  # an SSLSocket
                check_pin(self._socket, self._address)  # type: ignore[arg-type]  # as above
            except OSError as error:
                wants = _wants(error)
                if not wants:
                    self._broken(str(error))
                else:
                    self._loop.watch(self._socket.fileno(), wants, self._step)
                return False
        self._ready = True
        self._flush()
        return False

    def _must_wait(self, error: OSError) -> bool:
        """Return whether the connection must first be readable or writable; otherwise break it."""
        if isinstance(error, BlockingIOError) or _wants(error):
            return True
        self._broken(error.strerror or str(error))
        return False

    def _receive(self) -> None:
        assert self._socket is not None
        try:
            while True:
                data = self._socket.recv(262144)
                if not data:
                    self._ended()
                    return
                self._in += data
                if len(self._in) > MAX_REPLY:
                    self._broken(f"the answer has more than {MAX_REPLY} bytes")
                    return
                if len(data) < 262144 and not self._address.tls:
                    break
        except OSError as error:
            if not self._must_wait(error):
                return
        self._parse(False)

    def _ended(self) -> None:
        """Handle a connection that the server has closed. A closed connection is not an error
        between two requests, or at the end of a body without a length.
        """
        if self.busy and self._in and self._parse(True):
            return
        self._broken("the connection was closed")

    def _parse(self, ended: bool) -> bool:
        try:
            found = parse_reply(self._in, ended)
        except ValueError as error:
            self._broken(str(error))
            return True
        if found is None:
            return False
        status, body, keep = found
        self.said = parse_headers(self._in)
        self._in.clear()
        self._fresh = False
        if not keep or ended:
            self._disconnect()
        self._succeed(status, body)
        return True

    def _broken(self, reason: str) -> None:
        """Handle a broken connection. If a connection from an earlier request breaks before the
        response, retry silently, because servers close idle connections.
        """
        again = self.busy and not self._fresh and not self._in
        self._disconnect()
        if again:
            self._start()
        else:
            self._fail(reason)

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._loop.unwatch(self._socket.fileno())
            self._socket.close()
            self._socket = None


def parse_reply(data: bytearray, ended: bool) -> tuple[int, bytes, bool] | None:
    """Return the status, the body, and whether the connection stays open. Returns None while the
    answer is incomplete. Raises ValueError.
    """
    end = data.find(b"\r\n\r\n")
    if end < 0:
        if len(data) > 65536:
            raise ValueError("the answer has a header that is too long")
        return None
    first = bytes(data[: data.find(b"\r\n")]).decode("latin-1")
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
        raise ValueError(f"the answer is not HTTP: {first[:60]!r}")
    status = int(rest[:3])
    headers = parse_headers(data)
    if status < 200:  # an interim reply, which proxies may add
        del data[: end + 4]
        return parse_reply(data, ended)
    keep = headers.get("connection", "").lower() != "close" and version != "HTTP/1.0"
    body = _body(data, end + 4, status, headers, ended)
    return None if body is None else (status, body, keep)


def parse_headers(data: bytearray) -> dict[str, str]:
    """Return the headers as a mapping from lower-case names to values."""
    headers = {}
    for line in bytes(data[: data.find(b"\r\n\r\n")]).decode("latin-1").split("\r\n")[1:]:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return headers


def _body(
    data: bytearray, start: int, status: int, headers: dict[str, str], ended: bool
) -> bytes | None:
    if status in (204, 304):
        return b""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return _unchunk(data, start)
    if "content-length" in headers:
        size = int(headers["content-length"])
        return bytes(data[start : start + size]) if len(data) >= start + size else None
    return bytes(data[start:]) if ended else None


def _unchunk(data: bytearray, at: int) -> bytes | None:
    """Decode the chunked body that begins at `at`; return None while the last chunk is missing."""
    parts: list[bytes] = []
    while True:
        end = data.find(b"\r\n", at)
        if end < 0:
            return None
        size = int(bytes(data[at:end]).split(b";")[0], 16)
        if size == 0:
            return b"".join(parts) if data.find(b"\r\n\r\n", end) >= 0 else None
        at = end + 2 + size + 2
        if len(data) < at:
            return None
        parts.append(bytes(data[end + 2 : at - 2]))


def wrap_tls(connection: socket.socket, address: ServerAddress) -> ssl.SSLSocket:
    """Start TLS on a connection. Either the handshake verifies the peer, or the caller must call
    `check_pin` after the handshake. Raises OSError.
    """
    context = make_context(address)
    return context.wrap_socket(
        connection, server_hostname=address.name, do_handshake_on_connect=False
    )


def make_context(address: ServerAddress) -> ssl.SSLContext:
    """Return a TLS context that trusts the system's certificate authorities. If the hash of the
    server's certificate is configured, the context accepts any certificate, and `check_pin`
    must verify the hash.
    """
    import ssl  # imported only by agents that use TLS

    if not address.pin:
        return ssl.create_default_context()
    context = ssl.SSLContext(
        ssl.PROTOCOL_TLS_CLIENT
    )  # skips loading the authorities, which takes 60 ms
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def check_pin(connection: ssl.SSLSocket, address: ServerAddress) -> None:
    """Verify after the handshake, before anything is sent, that the certificate has the configured
    hash. Raises OSError if the certificate has a different hash."""
    if not address.pin:
        return
    import hashlib

    found = hashlib.sha256(connection.getpeercert(True) or b"").hexdigest()
    if found != address.pin:
        raise OSError(errno.EACCES, f"unexpected certificate from the control plane: {found}")


def _wants(error: OSError) -> int:
    """Return READ or WRITE if `error` says that a TLS connection must first be readable or
    writable. Returns 0 for any other error.
    """
    kind = type(error).__name__
    return READ if kind == "SSLWantReadError" else WRITE if kind == "SSLWantWriteError" else 0
