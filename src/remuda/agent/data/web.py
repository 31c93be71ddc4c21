"""Plain HTTP with ranges and retries, by requests that need no credentials; and what the control plane says of them."""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from urllib.parse import quote

from ..work.blobs import Line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..config import Config

    Wanted = dict[str, object]

TIMEOUT_S = 60.0
TRIES = 8  # in a row, of one request that brings nothing
FIRST_DELAY_S = 0.2
LAST_DELAY_S = 5.0
TOLD_EVERY_S = 10.0
EXPIRED = (400, 401, 403)  # what storages answer to a request whose time is over


class CannotMove(Exception):
    """An input or output cannot be moved; the message says why, for the user."""


class Desk:
    """What the control plane knows of one input or output; good for one thread."""

    def __init__(self, config: Config, route: str) -> None:
        self._line = Line(config)
        self._route = route

    def ask(self, method: str, route: str = "", body: bytes | None = None, **query: object) -> bytes:
        """A good answer's body. Waits for a control plane that is away. Raises CannotMove."""
        more = "".join(f"&{name}={quote(str(value), safe='')}" for name, value in query.items())
        length = None if body is None else len(body)
        tries = 0
        while True:
            try:
                reply = self._line.ask(method, f"data/{self._route}{route}", body, length, more)
                data = reply.read()
            except (OSError, http.client.HTTPException):
                self._line.wait()
                continue
            if reply.status == 200:
                return data
            tries += 1
            if reply.status < 500 or tries > TRIES:
                raise CannotMove(_reason(reply.status, data))
            self._line.wait()

    def read(self, method: str, route: str = "", ask: object = None, **query: object) -> dict[str, object]:
        """As `ask`, of JSON both ways."""
        found = json.loads(self.ask(method, route, None if ask is None else json.dumps(ask).encode(), **query))
        assert isinstance(found, dict)
        return found

    def abort(self, ask: dict[str, object]) -> None:
        """Have the storage drop the parts of an upload that comes to nothing, which its owner would pay for."""
        with suppress(CannotMove):  # as of a control plane that is older than this
            self.read("POST", "/abort", ask)


class Meter:
    """How far a transfer is, told every few seconds; its threads count here."""

    def __init__(self, what: str, tell: Callable[[str], None]) -> None:
        self._what = what
        self._tell = tell
        self._lock = threading.Lock()
        self._told = time.monotonic()
        self._began = self._told
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

    def describe(self) -> str:
        """Such as "3 files, 1.5 MiB"."""
        return f"{self.files} file{'' if self.files == 1 else 's'}, {say_size(self.bytes)}"

    def end(self) -> None:
        seconds = time.monotonic() - self._began
        self._tell(f"{self._what}: {self.describe()} in {seconds:.1f} s")


class Patience:
    """How often one thing is tried again, and how long to wait before."""

    def __init__(self) -> None:
        self._tries = 0
        self._delay = FIRST_DELAY_S

    def reset(self) -> None:
        self._tries, self._delay = 0, FIRST_DELAY_S

    def lose(self, reason: str) -> None:
        """Wait; raises CannotMove where it was too often in a row."""
        self._tries += 1
        if self._tries > TRIES:
            raise CannotMove(reason)
        time.sleep(self._delay)
        self._delay = min(LAST_DELAY_S, self._delay * 2)


def request(
    wanted: Wanted, body: bytes | None = None, headers: dict[str, str] | None = None
) -> http.client.HTTPResponse:
    """Send a signed request. Raises urllib.error.HTTPError for a bad status, OSError, HTTPException."""
    signed = wanted.get("headers")
    every = {str(name): str(value) for name, value in (signed.items() if isinstance(signed, dict) else ())}
    every.update(headers or {})
    if body is not None:
        every.setdefault("Content-Type", "application/octet-stream")
    asked = urllib.request.Request(str(wanted["url"]), data=body, headers=every, method=str(wanted["method"]))
    reply = urllib.request.urlopen(asked, timeout=TIMEOUT_S)
    assert isinstance(reply, http.client.HTTPResponse)
    return reply


def say_size(size: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def tell_to(channel: int) -> Callable[[str], None]:
    """Tell the agent, which makes an event of it."""
    return lambda text: None if channel < 0 else _write(channel, text)


def _write(channel: int, text: str) -> None:
    os.write(channel, f"moved {text}\n".encode())


def _reason(status: int, data: bytes) -> str:
    try:
        return str(json.loads(data)["message"])
    except (ValueError, KeyError, TypeError):
        return f"the control plane refuses it (status {status})"
