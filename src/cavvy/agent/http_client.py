"""The blocking HTTP client of the agent's helper processes: requests to the control plane, and
signed requests to storage services. The agent's own process must never block, so it uses `wire`
instead of this module.

* TransferFailed     the request was refused, or failed too often; do not retry
  + StorageTimeout a storage service gave no usable answer; retry later
"""

from __future__ import annotations

import http.client
import io
import json
import socket
import time
import urllib.error
import urllib.request
from contextlib import suppress
from random import random
from urllib.parse import quote, urlsplit

from .documents import PROTOCOL
from .mailbox import AgentMailbox
from .wire import BackOff, ServerAddress, check_pin, make_context

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .config import AgentConfig

    Tell = Callable[[str], None]

CHUNK = 1024 * 1024
TIMEOUT_S = 60.0
FIRST_DELAY_S = 0.2
LAST_DELAY_S = 5.0
TRIES = 8  # consecutive failures of one request; a failure without any answer counts twice
TOLD_EVERY_S = 10.0
FAULTS = (OSError, http.client.HTTPException)  # urllib.error.URLError is an OSError
REFUSALS = (401, 403, 404, 409, 410)
INVALID = (400, 413, 422)  # statuses of a request whose content the control plane refuses
PASSING = (408, 425, 429)  # 4xx statuses after which the same request may succeed later
TROUBLE = "data-trouble"  # error code of an answer: the control plane cannot reach the storage


class TransferFailed(Exception):
    """Raised if the transfer has failed permanently; the message tells the user why."""


class RequestInvalid(TransferFailed):
    """Raised if the control plane refuses the content of a request. The same request can never
    succeed, but a request with other content can."""


class StorageTimeout(TransferFailed):
    """Raised if the storage gave no successful response within the agent's timeout."""


class RetryBudget:
    """Counts the consecutive failures of a request and waits before each retry. `tell` is called
    with a message about each long wait.
    """

    def __init__(self, tell: Tell | None = None, *, tries: int | None = None) -> None:
        self._tell = tell
        self._most = TRIES if tries is None else tries
        self.reset()

    def reset(self) -> None:
        """Reset the failure count, because data has arrived."""
        self._tries, self._since = 0, time.monotonic()
        self._delay = BackOff(FIRST_DELAY_S, LAST_DELAY_S, chance=random)

    def lose(self, reason: str, *, silent: bool = False, status: int = 0) -> None:
        """Count a failure and wait before the next try. After too many consecutive failures, raise
        TransferFailed if the last request was refused, else StorageTimeout.
        """
        self._tries += 2 if silent else 1
        waited = time.monotonic() - self._since
        if self._tries > self._most:
            refused = 400 <= status < 500 and status not in PASSING
            raise (TransferFailed if refused else StorageTimeout)(reason)
        if self._tell is not None and waited >= TOLD_EVERY_S:
            self._tell(f"{reason} (for {waited:.0f} s now)")
        time.sleep(self._delay.next())

    def lose_request(self, name: str, error: Exception, url: object) -> int:
        """Count a failed storage request, and wait before the next try, as `lose` does. `error` is
        the exception that the request raised. Return the response's status, or 0 without a
        response.
        """
        status = error.code if isinstance(error, urllib.error.HTTPError) else 0
        if isinstance(error, urllib.error.HTTPError):
            error.close()
            self.lose(f"{name}: the storage answered with status {status}", status=status)
            return status
        silent = isinstance(getattr(error, "reason", error), socket.timeout)
        host = urlsplit(str(url)).netloc.rpartition("@")[2]
        fault = f"no answer for {TIMEOUT_S:g} s" if silent else error
        self.lose(f"{name}: a request to {host} failed: {fault}", silent=silent)
        return 0


class BlockingClient:
    """Sends one request at a time to the control plane."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._connection: http.client.HTTPConnection | None = None
        self._delay = BackOff(FIRST_DELAY_S, LAST_DELAY_S, chance=random)

    def ask(
        self,
        method: str,
        route: str,
        body: object = None,
        query: str = "",
    ) -> http.client.HTTPResponse:
        """Send a request that includes the gang's name, and return the answer with any status.
        Raises OSError, HTTPException."""
        address = ServerAddress(self._config.address, self._config.pin)
        headers = {
            "Authorization": f"Bearer {self._config.token}",
            "Cavvy-Agent-Protocol": str(PROTOCOL),
            "Content-Type": "application/json",
        }
        if isinstance(size := getattr(body, "size", None), int):
            # for bytes, http.client sets this header itself
            headers["Content-Length"] = str(size)
        try:
            if self._connection is None:
                self._connection = connect(address)
            path = f"{address.prefix}/agent/v1/{route}?gang={self._config.gang}{query}"
            with suppress(
                BrokenPipeError, ConnectionResetError
            ):  # the server refused the request before reading the whole body
                # the body is bytes or a reader
                self._connection.request(method, path, body, headers)  # type: ignore[arg-type]
            return self._connection.getresponse()
        except FAULTS:
            self.drop()
            raise

    def exchange(
        self,
        method: str,
        route: str,
        body: object = None,
        query: str = "",
    ) -> tuple[int, bytes]:
        """Return the answer's status and body. The request is repeated until the control plane
        answers."""
        while True:
            try:
                reply = self.ask(method, route, body, query)
                return reply.status, reply.read()
            except FAULTS:
                self.wait()

    def read(
        self, method: str, route: str, body: bytes | None = None, tell: Tell | None = None
    ) -> bytes:
        """Return the body of a successful answer. Raises TransferFailed if the request is refused.

        If the control plane gets no answer from the storage, calls `tell` with a message about the
        wait and raises StorageTimeout.
        """
        budget = RetryBudget(tell)
        while True:
            status, data = self.exchange(method, route, body)
            if status == 200:
                self._delay.reset()
                return data
            self.check(status, route.partition("/")[0], data)
            if read_field(data, "code") == TROUBLE:
                budget.lose(read_reason(status, data))
            else:
                self.wait()

    def check(self, status: int, asked: str, data: bytes = b"") -> None:
        """Raise TransferFailed if `status` is an error that a retry cannot change; the error is
        RequestInvalid if another content could succeed. `asked` describes the request for the error
        message, and `data` is the body of the answer.
        """
        if status in REFUSALS:
            raise TransferFailed(f"the control plane refused {asked} (status {status})")
        if status in INVALID:
            raise RequestInvalid(f"the control plane refused {asked}: {read_reason(status, data)}")

    def drop(self) -> None:
        """Close the connection; the next request opens a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def wait(self) -> None:
        """Wait before the next try. The process can safely block, because the agent kills this
        process when the work stops.
        """
        self.drop()
        time.sleep(self._delay.next())


class TransferClient:
    """Sends requests about one input, output or checkpoint file. Only one thread may use a client.
    `tell` is called with a message about each long wait.
    """

    def __init__(self, config: AgentConfig, route: str, tell: Tell | None = None) -> None:
        self._line = BlockingClient(config)
        self._route = route
        self._tell = tell

    def ask(
        self, method: str, route: str = "", body: bytes | None = None, **query: object
    ) -> bytes:
        """Send a request and return the body of the successful answer. Waits while the control
        plane is unavailable. Raises TransferFailed."""
        return self._ask(RetryBudget(self._tell), method, route, body, **query)

    def _ask(
        self,
        budget: RetryBudget,
        method: str,
        route: str = "",
        body: bytes | None = None,
        **query: object,
    ) -> bytes:
        more = "".join(f"&{name}={quote(str(value), safe='')}" for name, value in query.items())
        while True:
            status, data = self._line.exchange(method, f"data/{self._route}{route}", body, more)
            if status == 200:
                return data
            if status < 500:
                raise TransferFailed(read_reason(status, data))
            budget.lose(read_reason(status, data))

    def read(
        self, method: str, route: str = "", ask: object = None, **query: object
    ) -> dict[str, object]:
        """Call `ask` with a body in JSON, and return the decoded JSON answer."""
        body = None if ask is None else json.dumps(ask).encode()
        found = json.loads(self.ask(method, route, body, **query))
        assert isinstance(found, dict)
        return found

    def abort(self, ask: dict[str, object]) -> None:
        """Make the storage delete the parts of an aborted upload, because the user pays for stored
        parts. The parts stay in the storage if the server does not support this request or the
        storage does not respond.
        """
        with suppress(TransferFailed):
            self._ask(RetryBudget(tries=1), "POST", "/abort", json.dumps(ask).encode())


def request(
    signed: dict[str, object], body: bytes | None = None, headers: dict[str, str] | None = None
) -> http.client.HTTPResponse:
    """Send a signed request. Raises urllib.error.HTTPError for a bad status, OSError,
    HTTPException.
    """
    own = signed.get("headers")
    every = dict(own, **(headers or {})) if isinstance(own, dict) else dict(headers or {})
    if body is not None:
        every.setdefault("Content-Type", "application/octet-stream")
    asked = urllib.request.Request(
        str(signed["url"]), data=body, headers=every, method=str(signed["method"])
    )
    reply = urllib.request.urlopen(asked, timeout=TIMEOUT_S)
    assert isinstance(reply, http.client.HTTPResponse)
    return reply


def read_field(data: bytes, name: str) -> str:
    """Return a field of an error document, or "" if the field is missing."""
    try:
        return str(json.loads(data)[name])
    except (ValueError, KeyError, TypeError):
        return ""


def read_reason(status: int, data: bytes) -> str:
    """Return the message for the user from an error document."""
    return read_field(data, "message") or f"the control plane refused the request (status {status})"


def connect(address: ServerAddress) -> http.client.HTTPConnection:
    """Create a blocking connection to an address; the scheme of the address selects the transport.
    Raises OSError."""
    if address.by_mail:
        return BlockingMailboxConnection(address.text.partition(":")[2])
    if address.tls:
        secure = http.client.HTTPSConnection(
            address.name,
            address.port,
            timeout=TIMEOUT_S,
            blocksize=CHUNK,
            context=make_context(address),
        )
        secure.connect()
        try:
            check_pin(secure.sock, address)
        except OSError:
            secure.close()
            raise
        secure.auto_open = (
            # http.client reopens no connection by itself: a reopened one would skip the certificate
            # check
            0
        )
        return secure
    connection = http.client.HTTPConnection(
        address.name, address.port, timeout=TIMEOUT_S, blocksize=CHUNK
    )
    if address.text.startswith("unix:"):
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.settimeout(TIMEOUT_S)
        connection.sock.connect(address.text[5:])
    return connection


class BlockingMailboxConnection(http.client.HTTPConnection):
    """An http.client connection whose requests travel through a mailbox, one request at a time. The
    connection waits for each answer.
    """

    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = _MailboxSocket(AgentMailbox(self._path))


class _MailboxSocket:
    """The part of the socket interface that http.client uses. The object collects the bytes that
    are sent. When the client begins to read the answer, the object posts these bytes to the mailbox
    as one request, and waits for the answer.
    """

    def __init__(self, mailbox: AgentMailbox) -> None:
        self._mailbox = mailbox
        self._request = b""

    def sendall(self, data: bytes) -> None:
        self._request += data

    def makefile(self, mode: str) -> io.BytesIO:
        request, self._request = self._request, b""
        answer = self._mailbox.exchange(request, TIMEOUT_S)
        if answer is None:
            raise TimeoutError("no answer arrived in the mailbox")
        return io.BytesIO(answer)

    def close(self) -> None:
        """Do nothing, because a mailbox has no connection to close."""
