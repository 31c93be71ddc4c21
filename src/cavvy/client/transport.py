"""An HTTP/1.1 client over a Unix socket, TCP or TLS, with persistent connections.

This client is used instead of `http.client`, because importing `http.client` takes as long as
importing all other modules of a command. The client supports only answers in the form that Cavvy's
server sends: with Content-Length or a chunked body. A connection belongs to one thread.

Defines how long a client waits for a server that does not answer, and reports these waits to the
user.
"""

import select
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TypeVar

from cavvy.client.errors import ConnectionLost, Unreachable

QUIET_S = 3.0  # seconds without an answer after which the silence is reported


class Patience:
    """Limits and reports waits for a server. All connections of one command share one object of
    this class. `limit_s` is the time for which a request is repeated while no server answers.
    `report` is called with a sentence when the server stops answering, and when the server answers
    again.
    """

    def __init__(self, limit_s: float = 0.0, report: Callable[[str], None] | None = None) -> None:
        self.limit_s = limit_s
        self._report = report
        self._silent = self._migrates = False

    def note_silence(self, what: str = "no answer from the server yet") -> None:
        """Report that the server does not answer, or answers only that its database does not,
        unless this was reported already.
        """
        self._note(f"{what}; still waiting (see `cavvy server logs`)")

    def note_start(self) -> None:
        """Report that the server, which this client has started, needs more time than usual."""
        self._note("the server is starting, which can take a minute (`cavvy server logs`)")

    def note_migration(self) -> None:
        """Report that the server migrates its database, also if its slow start was reported."""
        if not self._migrates and self._report is not None:
            self._migrates = self._silent = True
            self._report(
                "the server is migrating its database, which can take minutes; still waiting (see "
                "`cavvy server logs`)"
            )

    def _note(self, text: str) -> None:
        if not self._silent and self._report is not None:
            self._silent = True
            self._report(text)

    def note_answer(self) -> None:
        """Report that the server answers, after a report that it did not."""
        if self._silent and self._report is not None:
            self._silent = False
            self._report("the server answers now")


_HEAD_LIMIT = 64 * 1024
_RECV = 256 * 1024
_PIECE = 1024 * 1024
_P = TypeVar("_P")
_T = TypeVar("_T")


class HttpAnswer:
    """An answer: status, headers with lower-case names, and the complete body."""

    __slots__ = ("body", "headers", "status")

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body


class ClientConnection:
    """One connection to `unix:/path`, `http://host:port` or `https://host:port`, which is opened at
    the first use. The default port is 443 for https and 80 for http. For https, `ca` contains the
    certificates of the authorities to trust, in PEM; if it is empty, the system's authorities are
    trusted.
    """

    def __init__(self, address: str, *, ca: str = "", connect_timeout_s: float = 5.0) -> None:
        scheme, colon, rest = address.partition(":")
        self.address = scheme.lower() + colon + rest  # RFC 3986, 3.1: schemes ignore case
        self._ca = ca
        self._connect_timeout_s = connect_timeout_s
        self._socket: socket.socket | None = None
        self._buffer = b""
        self._timeout_s = 0.0  # timeout of the current request
        self._quiet: tuple[float, Callable[[], None]] | None = None

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket, self._buffer = None, b""

    def request(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes | Iterable[bytes] = b"",
        *,
        length: int | None = None,
        timeout_s: float = 30.0,
        quiet: tuple[float, Callable[[], None]] | None = None,
        take: Callable[[int, bytes], None] | None = None,
    ) -> HttpAnswer:
        """Send one request and read its answer. If the body is not bytes, `length` must be given.
        The body of an answer 200 or 206 goes to `take` in pieces, with the status, and is not kept.
        `quiet` consists of a time in seconds and a function, which is called once if nothing is
        sent or received for that time.

        Raises Unreachable if nothing could be sent, and ConnectionLost if the connection ended
        after something was sent.
        """
        size = len(body) if isinstance(body, bytes) else length
        # Proxies select the server by this name.
        host = self.address.removeprefix("https://").rstrip("/") if self._is_tls else "cavvy"
        lines = [f"{method} {target} HTTP/1.1", f"Host: {host}", f"Content-Length: {size}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        fresh = self._socket is None
        connection = self._open()
        self._timeout_s, self._quiet = timeout_s, quiet
        try:
            with suppress(
                BrokenPipeError, ConnectionResetError
            ):  # the server may have refused the request before it closed the connection
                self._send(connection, head, body)
            return self._read_answer(connection, take)
        except ConnectionLost:
            self.close()
            raise
        except (OSError, ValueError, IndexError) as error:
            self.close()
            kind = "timed out" if isinstance(error, TimeoutError) else f"ended: {error}"
            raise ConnectionLost(
                "connection-lost",
                f"the connection to {self.address} {kind}",
                "Cavvy repeats the request if a repetition is safe"
                if not fresh
                else "see `cavvy server logs`",
            ) from error
        # for example on Ctrl-C; the next request must not read the answer to this one
        except BaseException:
            self.close()
            raise

    def _send(self, connection: socket.socket, head: bytes, body: bytes | Iterable[bytes]) -> None:
        parts = [body] if isinstance(body, bytes) else body
        if isinstance(body, bytes) and len(body) < 65536:
            head, parts = head + body, []
        self._send_all(connection, head)
        for part in parts:
            self._send_all(connection, part)

    def _send_all(self, connection: socket.socket, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._wait(connection, connection.send, view) :]

    def _wait(self, connection: socket.socket, act: Callable[[_P], _T], value: _P) -> _T:
        """Call a blocking method of the socket. If the method takes longer than the quiet time,
        report the delay once, and wait until the timeout.
        """
        if self._quiet is not None and self._quiet[0] < self._timeout_s:
            after_s, report = self._quiet
            connection.settimeout(after_s)
            try:
                return act(value)
            except TimeoutError:
                report()
                self._quiet = None
                connection.settimeout(self._timeout_s - after_s)
        else:
            connection.settimeout(self._timeout_s)
        return act(value)

    def _open(self) -> socket.socket:
        if self._socket is not None:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            if not poll.poll(0):
                return self._socket
            # An idle connection becomes readable only when the server closes it.
            self.close()
        try:
            connection = self._connect()
        except (OSError, ValueError) as error:
            if refusal := _certificate_fault(error):
                raise Unreachable(
                    "certificate-untrusted",
                    f"the certificate of {self.address} is not trusted: {refusal}",
                    "check the address; if a private authority issued the certificate, sign in "
                    "with `cavvy login URL --ca-file FILE`",
                ) from error
            if shortage := _find_shortage(error):
                raise Unreachable(*shortage) from error
            raise Unreachable(
                "server-unreachable",
                f"no server answers at {self.address}: {_say(error)}",
                "see `cavvy server status`"
                if self.address.startswith("unix:")
                else "check the address, and that a server runs at this address",
            ) from error
        self._socket = connection
        return connection

    @property
    def _is_tls(self) -> bool:
        return self.address.startswith("https://")

    def _connect(self) -> socket.socket:
        """Open a new connection. Raises OSError, ValueError."""
        if self.address.startswith("unix:"):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(self._connect_timeout_s)
            try:
                connection.connect(self.address.removeprefix("unix:"))
            except OSError:
                connection.close()
                raise
            return connection
        host, port = _split_address(self.address)
        connection = socket.create_connection((host, port), self._connect_timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not self._is_tls:
            return connection
        import ssl

        try:
            context = ssl.create_default_context(cadata=self._ca or None)
            return context.wrap_socket(connection, server_hostname=host)
        except (OSError, ValueError):
            connection.close()
            raise

    def _read_answer(
        self, connection: socket.socket, take: Callable[[int, bytes], None] | None
    ) -> HttpAnswer:
        while True:
            status, headers = self._read_head(connection)
            if status >= 200:
                break
        if headers.get("transfer-encoding", "").lower() == "chunked":
            body = self._read_chunks(connection)
            if take is not None and status in (200, 206) and body:
                take(status, body)
                body = b""
        else:
            left, body = int(headers.get("content-length", "0")), b""
            while take is not None and status in (200, 206) and left:
                piece = self._read_exactly(connection, min(left, _PIECE))
                take(status, piece)
                left -= len(piece)
            body = self._read_exactly(connection, left)
        if headers.get("connection", "").lower() == "close":
            self.close()
        return HttpAnswer(status, headers, body)

    def _read_head(self, connection: socket.socket) -> tuple[int, dict[str, str]]:
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > _HEAD_LIMIT:
                raise ValueError("the headers of the answer are too long")
            self._fill(connection)
        lines = self._buffer[:end].decode("latin-1").split("\r\n")
        self._buffer = self._buffer[end + 4 :]
        pairs = (line.partition(":") for line in lines[1:])
        return int(lines[0].split(" ", 2)[1]), {
            name.strip().lower(): value.strip() for name, _, value in pairs
        }

    def _read_chunks(self, connection: socket.socket) -> bytes:
        parts = []
        while size := int(self._read_line(connection).split(b";")[0], 16):
            parts.append(self._read_exactly(connection, size))
            self._read_line(connection)
        while self._read_line(connection):
            pass
        return b"".join(parts)

    def _read_line(self, connection: socket.socket) -> bytes:
        while (end := self._buffer.find(b"\r\n")) < 0:
            if len(self._buffer) > _HEAD_LIMIT:
                raise ValueError("a line of the answer is too long")
            self._fill(connection)
        line, self._buffer = self._buffer[:end], self._buffer[end + 2 :]
        return line

    def _read_exactly(self, connection: socket.socket, size: int) -> bytes:
        parts, have = [self._buffer], len(self._buffer)
        while have < size:
            part = self._wait(connection, connection.recv, min(_RECV, size - have))
            if not part:
                raise ConnectionError("the server closed the connection during an answer")
            parts.append(part)
            have += len(part)
        whole = b"".join(parts)
        self._buffer = whole[size:]
        return whole[:size]

    def _fill(self, connection: socket.socket) -> None:
        part = self._wait(connection, connection.recv, _RECV)
        if not part:
            raise ConnectionError("the server closed the connection")
        self._buffer += part


def _find_shortage(error: OSError | ValueError) -> tuple[str, str, str] | None:
    """Return code, message and hint if this process has too many files open, otherwise None."""
    from cavvy.client import file_limit

    found = file_limit.describe_shortage(error) if isinstance(error, OSError) else ""
    return (file_limit.CODE, found, file_limit.HINT) if found else None


def _say(error: OSError | ValueError) -> str:
    """Return the text of the error, without its number."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _certificate_fault(error: Exception) -> str:
    """Return why the server's certificate is not trusted, or "" if the error has another cause."""
    return str(
        getattr(error, "verify_message", "")
    )  # only SSLCertVerificationError has this attribute


def _split_address(address: str) -> tuple[str, int]:
    """Return the host and the port of an http or https address. Raises ValueError."""
    scheme, _, rest = address.partition("://")
    if scheme not in ("http", "https"):
        raise ValueError("the address must begin with https://, http:// or unix:")
    rest = rest.rstrip("/")
    host, colon, port = rest.rpartition(":")
    if not colon or rest.endswith("]"):  # an IPv6 address in brackets contains colons itself
        host, port = rest, "443" if scheme == "https" else "80"
    return host.strip("[]"), int(port)
