"""Plain HTTP with ranges and retries, by requests that need no credentials; and what the control
plane says of them.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from urllib.parse import quote, urlsplit

from ..work.blobs import BlockingClient, StorageTimeout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..config import AgentConfig

    Wanted = dict[str, object]

TIMEOUT_S = 60.0
TRIES = (
    8  # in a row, of one request that brings nothing; one that gets no answer at all counts for two
)
FIRST_DELAY_S = 0.2
LAST_DELAY_S = 5.0
TOLD_EVERY_S = 10.0
LINE = (
    2000  # bytes of what is told at most: less than a pipe takes at once, whoever else writes to it
)
PASSING = (408, 425, 429)  # of 4xx: the same request may do later
EXPIRED = (400, 401, 403)  # what storages answer to a request whose time is over


class TransferFailed(Exception):
    """An input or output cannot be moved; the message says why, for the user."""


class StorageUnresponsive(TransferFailed, StorageTimeout):
    """The storage gave no good answer for as long as it is waited for."""


class TransferClient:
    """What the control plane knows of one input or output; good for one thread. `tell` hears of
    long waits.
    """

    def __init__(
        self, config: AgentConfig, route: str, tell: Callable[[str], None] | None = None
    ) -> None:
        self._line = BlockingClient(config)
        self._route = route
        self._tell = tell

    def ask(
        self, method: str, route: str = "", body: bytes | None = None, **query: object
    ) -> bytes:
        """A good answer's body. Waits for a control plane that is away. Raises TransferFailed."""
        return self._ask(RetryBudget(self._tell), method, route, body, **query)

    def _ask(
        self,
        patience: RetryBudget,
        method: str,
        route: str = "",
        body: bytes | None = None,
        **query: object,
    ) -> bytes:
        more = "".join(f"&{name}={quote(str(value), safe='')}" for name, value in query.items())
        length = None if body is None else len(body)
        while True:
            try:
                reply = self._line.ask(method, f"data/{self._route}{route}", body, length, more)
                data = reply.read()
            except (OSError, http.client.HTTPException):
                self._line.wait()
                continue
            if reply.status == 200:
                return data
            if reply.status < 500:
                raise TransferFailed(read_reason(reply.status, data))
            patience.lose(read_reason(reply.status, data))

    def read(
        self, method: str, route: str = "", ask: object = None, **query: object
    ) -> dict[str, object]:
        """As `ask`, of JSON both ways."""
        found = json.loads(
            self.ask(method, route, None if ask is None else json.dumps(ask).encode(), **query)
        )
        assert isinstance(found, dict)
        return found

    def abort(self, ask: dict[str, object]) -> None:
        """Have the storage drop the parts of an upload that comes to nothing, which its owner
        would pay for.
        """
        with suppress(
            TransferFailed
        ):  # as of a control plane that is older than this, or a storage that is silent still
            self._ask(RetryBudget(tries=1), "POST", "/abort", json.dumps(ask).encode())


class TransferProgress:
    """How far a transfer is, and what it waits for, told every few seconds; its threads count here.

    `quiet`: what it waits for is known already.
    """

    def __init__(self, what: str, tell: Callable[[str], None], *, quiet: bool = False) -> None:
        self._what = what
        self._tell = tell
        self._lock = threading.Lock()
        self._told = time.monotonic()
        self._began = self._told
        self._quiet = quiet
        self._waited = 0.0
        self.bytes = self.files = 0

    def moved(self, count: int, files: int = 0) -> None:
        with self._lock:
            self.bytes += count
            self.files += files
            now = time.monotonic()
            if now - self._told < TOLD_EVERY_S:
                return
            self._told = now
            text = f"{self._what}: {self.describe()} so far"
        self._tell(text)

    def waits(self, text: str) -> None:
        """One of the threads gets nothing, and says why."""
        with self._lock:
            now = time.monotonic()
            if self._quiet or (self._waited and now - self._waited < TOLD_EVERY_S):
                return
            self._waited = now
        self._tell(f"{self._what} waits: {text}")

    def describe(self) -> str:
        """Such as "3 files, 1.5 MiB"."""
        return f"{self.files} file{'' if self.files == 1 else 's'}, {say_size(self.bytes)}"

    def end(self) -> None:
        seconds = time.monotonic() - self._began
        self._tell(f"{self._what}: {self.describe()} in {seconds:.1f} s")


class RetryBudget:
    """How often one thing is tried again, how long to wait before, and who hears of it when that
    takes long.
    """

    def __init__(
        self,
        tell: Callable[[str], None] | None = None,
        *,
        tries: int | None = None,
        since: float | None = None,
    ) -> None:
        self._tell = tell
        self._most = TRIES if tries is None else tries
        self._tries, self._delay = 0, FIRST_DELAY_S
        self._since = time.monotonic() if since is None else since

    def reset(self) -> None:
        """Something has come."""
        self._tries, self._delay, self._since = 0, FIRST_DELAY_S, time.monotonic()

    def lose(self, reason: str, error: Exception | None = None, status: int = 0) -> None:
        """Wait; raises StorageUnresponsive where it was too often in a row, TransferFailed where it
        was refused each time.

        `error` is what came instead of an answer, `status` the bad answer's.
        """
        self._tries += 2 if error is not None and is_silence(error) else 1
        waited = time.monotonic() - self._since
        if self._tries > self._most:
            raise (
                TransferFailed(reason)
                if 400 <= status < 500 and status not in PASSING
                else StorageUnresponsive(reason)
            )
        if self._tell is not None and waited >= TOLD_EVERY_S:
            self._tell(f"{reason} (for {waited:.0f} s now)")
        time.sleep(self._delay)
        self._delay = min(LAST_DELAY_S, self._delay * 2)


def request(
    wanted: Wanted, body: bytes | None = None, headers: dict[str, str] | None = None
) -> http.client.HTTPResponse:
    """Send a signed request. Raises urllib.error.HTTPError for a bad status, OSError,
    HTTPException.
    """
    signed = wanted.get("headers")
    every = {
        str(name): str(value)
        for name, value in (signed.items() if isinstance(signed, dict) else ())
    }
    every.update(headers or {})
    if body is not None:
        every.setdefault("Content-Type", "application/octet-stream")
    asked = urllib.request.Request(
        str(wanted["url"]), data=body, headers=every, method=str(wanted["method"])
    )
    reply = urllib.request.urlopen(asked, timeout=TIMEOUT_S)
    assert isinstance(reply, http.client.HTTPResponse)
    return reply


def is_silence(error: Exception) -> bool:
    """Whether no answer came in the time of a request, rather than a bad one."""
    return isinstance(getattr(error, "reason", error), socket.timeout)


def say_fault(error: Exception, url: object) -> str:
    """What went wrong with a request, and with whom."""
    where = urlsplit(str(url)).netloc.rpartition("@")[2]
    return f"{where}: no answer for {TIMEOUT_S:g} s" if is_silence(error) else f"{where}: {error}"


def say_size(size: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def tell_to(channel: int, word: str = "moved") -> Callable[[str], None]:
    """Tell the agent, which makes an event of that name of it."""
    return lambda text: None if channel < 0 else _write(channel, word, text)


def _write(channel: int, word: str, text: str) -> None:
    line = " ".join(
        f"{word} {text}".split()
    )  # names of files, which it may have, may hold ends of lines
    os.write(channel, line.encode("utf-8", "replace")[:LINE] + b"\n")


def read_reason(status: int, data: bytes) -> str:
    try:
        return str(json.loads(data)["message"])
    except (ValueError, KeyError, TypeError):
        return f"the control plane refuses it (status {status})"
