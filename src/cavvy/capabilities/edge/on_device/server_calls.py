"""A device's requests to its server, over TLS with the server's certificate pinned by its hash, and
the device's key, which never leaves it."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time

from cavvy.agent.http_client import FAULTS, connect, read_field, read_reason
from cavvy.agent.wire import ServerAddress

from .documents import Proof, read_nonce, read_token, write
from .slots import PACKAGES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

_RENEW = 0.5  # of a token's time is used up when it is renewed
_REFUSALS = (401, 403)
_INVALID = (400, 413, 422)
_PIECE = 64 * 1024
_MOST_ANSWER = 16 << 20  # bytes of an answer that is kept in memory
# A body of which fewer bytes come in this time, in seconds, is not waited for any longer.
_SLOW_S, _SLOW_BYTES = 60.0, 16 * 1024


class DeviceRefused(Exception):
    """Raised if the server refuses the device. `retired` if it is none of the project's devices."""

    def __init__(self, reason: str, *, retired: bool = False) -> None:
        super().__init__(reason)
        self.retired = retired


class DeviceRequestInvalid(ValueError):
    """Raised if the server will never accept a request."""


class ServerFileMissing(OSError):
    """Raised if the server has no file of this name."""


class DeviceCalls:
    """One connection to the server. `card` holds what the device learned when it enrolled."""

    def __init__(self, card: dict[str, Any], folder: str) -> None:
        self._card, self._folder = card, folder
        self._address = ServerAddress(card["address"], card.get("pin", ""))
        self._connection: http.client.HTTPConnection | None = None
        self._token, self._renew_at = "", 0.0

    def ask(self, method: str, path: str, body: object = None, token: str = "") -> dict[str, Any]:
        """Send a request without a device's token, and return the answer. Raises OSError,
        DeviceRefused."""
        return dict(json.loads(self._read(method, path, body, token)))

    def call(self, method: str, path: str, body: object = None) -> bytes:
        """Send a request as this device. Raises OSError, DeviceRefused."""
        return self._read(method, path, body, self.token())

    def token(self) -> str:
        """Return a token that is valid now. Raises OSError, DeviceRefused."""
        if time.monotonic() >= self._renew_at:
            nonce = read_nonce(self.ask("GET", "/edge/v1/nonce")).nonce
            proof = Proof(
                project=self._card["project"],
                device=self._card["device"],
                nonce=nonce,
                signature=run_key(self._folder, "sign", nonce),
            )
            found = read_token(self.ask("POST", "/edge/v1/token", write(proof)))
            self._token = found.token
            self._renew_at = time.monotonic() + found.valid_s * _RENEW
        return self._token

    def open(self, path: str, offset: int) -> http.client.HTTPResponse:
        """Request a file from an offset on, and return the answer, whose body the caller reads.
        Raises OSError, DeviceRefused."""
        headers = {"Authorization": f"Bearer {self.token()}"}
        if offset:
            headers["Range"] = f"bytes={offset}-"
        reply = self._send("GET", path, None, headers)
        if reply.status not in (200, 206):
            self._fail(reply.status, self._receive(reply))
        return reply

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _read(self, method: str, path: str, body: object, token: str) -> bytes:
        headers = {"Content-Type": "application/json"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        sent = None if body is None else json.dumps(body).encode()
        reply = self._send(method, path, sent, headers)
        data = self._receive(reply)
        if reply.status >= 300:
            self._fail(reply.status, data)
        return data

    def _receive(self, reply: http.client.HTTPResponse) -> bytes:
        data = b""
        try:
            for piece in read_pieces(reply):
                data += piece
                if len(data) > _MOST_ANSWER:
                    raise OSError(f"the server's answer has more than {_MOST_ANSWER} bytes")
        except OSError:
            self.close()
            raise
        return data

    def _send(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> http.client.HTTPResponse:
        try:
            if self._connection is None:
                self._connection = connect(self._address)
            self._connection.request(method, path, body, headers)
            return self._connection.getresponse()
        except FAULTS as error:
            self.close()
            raise OSError(str(error) or type(error).__name__) from error

    def _fail(self, status: int, data: bytes) -> None:
        reason = read_reason(status, data)
        if status in _REFUSALS:
            self._renew_at = 0.0
            retired = read_field(data, "code") == "enrolment-refused"
            raise DeviceRefused(reason, retired=retired)
        if status in _INVALID:
            raise DeviceRequestInvalid(reason)
        if status == 404:
            raise ServerFileMissing(reason)
        raise OSError(f"{reason} (status {status})")


def read_pieces(reply: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yield the body of an answer. Raises OSError if it comes too slowly; the time that the
    caller takes for each piece does not count."""
    got, waited = 0, 0.0
    while True:
        asked = time.monotonic()
        try:
            piece = reply.read1(_PIECE)
            if not piece:
                reply.read()  # frees the connection
                if reply.length:
                    raise OSError(f"the connection ended {reply.length} bytes early")
                return
        except FAULTS as error:
            raise OSError(str(error) or type(error).__name__) from error
        got, waited = got + len(piece), waited + time.monotonic() - asked
        if waited >= _SLOW_S:
            if got < _SLOW_BYTES:
                raise OSError(f"the server is too slow: {got} bytes came in {waited:.0f} s")
            got, waited = 0, 0.0
        yield piece


def run_key(folder: str, do: str, text: str = "") -> str:
    """Run `keys.py`, which makes the device's key or signs a text, in a process of its own: the
    package that it needs takes more memory than all of this program. Raises OSError."""
    command = [sys.executable, "-m", f"{__package__}.keys", do, folder, text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment())
    if done.returncode:
        raise OSError(f"the device's key cannot be used: {done.stderr.strip()[-300:]}")
    return done.stdout.strip()


def confine(folder: str, files: str, line: list[str], work: str = "") -> list[str]:
    """Return the line that starts a program without the device's rights; see `confine.py`."""
    if os.uname().sysname != "Linux":
        return line
    module = [sys.executable, "-m", "cavvy.agent.work.confine"]
    return [*module, os.path.abspath(folder), os.path.abspath(files), work, *line]


def environment(packages: str = "") -> dict[str, str]:
    """Return the environment for a process that runs another module of this package, with the
    packages of a model before those of the program."""
    here = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    path = [each for each in (packages, os.environ.get(PACKAGES, ""), here) if each]
    return dict(os.environ, PYTHONPATH=os.pathsep.join(path))
