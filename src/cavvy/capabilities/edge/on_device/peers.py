"""Lets devices of a site take files from each other. Neither side trusts the other: a device gives
a file only to those that the server has told the site's key of the day, and takes bytes only if
they have the SHA-256 that the signed manifest names. The files are not encrypted on the way.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import os
import re
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from cavvy.agent.http_client import FAULTS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

PEERS = "CAVVY_EDGE_PEERS"  # the variable with the devices that a fetch may ask, and the key
PROOF = "Cavvy-Proof"  # the header with the proof that a device may have a file
_FILE = re.compile(r"/files/([0-9a-f]{64})")
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]{2,45}\]|[0-9.]{7,15}):([0-9]{1,5})")
_AT_ONCE = 4  # files that a device gives
_TIMEOUT_S = 5.0
# The head of a request or answer may take _GRACE_S, and the bytes that were sent so far as long and
# the time that they need at this rate, in bytes a second.
_GRACE_S, _LEAST_RATE = 10.0, 128 * 1024
_PIECE = 64 * 1024


def make_proof(key: str, digest: str) -> str:
    """Return the proof that a device knows the key of its site."""
    return hmac.new(key.encode(), digest.encode(), hashlib.sha256).hexdigest()


def _leave_later(line: socket.socket) -> threading.Timer:
    """Return a timer that ends a connection, unless it is cancelled before."""

    def leave() -> None:
        with suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(_GRACE_S, leave)
    timer.daemon = True
    timer.start()
    return timer


class PeerServer(ThreadingHTTPServer):
    """Gives files to other devices of the site, a few at once. `find` returns the path of a file by
    its SHA-256, or None."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], find: Callable[[str], str | None]) -> None:
        self.find = find
        self.keys: deque[str] = deque(maxlen=2)  # of today and, around midnight, of yesterday
        self._free = threading.BoundedSemaphore(_AT_ONCE)
        super().__init__(address, _PeerHandler)

    def take_key(self, key: str) -> None:
        """Note the site's key of the day."""
        if key and key not in self.keys:
            self.keys.append(key)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, *_: Any) -> None:
        """Do nothing: the other device asks the server."""


class _PeerHandler(BaseHTTPRequestHandler):
    timeout = _TIMEOUT_S
    server: PeerServer

    def handle(self) -> None:
        self._late = _leave_later(self.connection)  # a request that comes byte by byte
        try:
            super().handle()
        finally:
            self._late.cancel()

    def do_GET(self) -> None:
        self._late.cancel()
        found = _FILE.fullmatch(self.path)
        digest, told = found[1] if found else "", self.headers.get(PROOF, "")
        known = [make_proof(key, digest) for key in self.server.keys]
        if not digest or not any(
            hmac.compare_digest(told.encode(), each.encode()) for each in known
        ):
            self.send_error(403)
            return
        path = self.server.find(digest)
        if path is None:
            self.send_error(404)
            return
        with open(path, "rb") as file:
            self.send_response(200)
            self.send_header("Content-Length", str(os.fstat(file.fileno()).st_size))
            self.end_headers()
            until = time.monotonic() + _GRACE_S
            while (piece := file.read(_PIECE)) and time.monotonic() < until:
                self.wfile.write(piece)
                until += len(piece) / _LEAST_RATE

    def log_message(self, *_: Any) -> None:
        """Do nothing."""


class PeerFiles:
    """Fetches files from devices at `addresses`. One that fails or lies is not asked again."""

    def __init__(self, addresses: Sequence[str], key: str) -> None:
        self._at = [each for each in addresses if _ADDRESS.fullmatch(each)]
        self._key = key

    def fetch(self, wanted: dict[str, Any], fresh: str, path: str) -> bool:
        """Write a file to `path`, by way of `fresh`. Return False if no device has given it, or if
        a former fetch from one was cut: the hours of a site may be too short for it, and what the
        server sends goes on where it ended."""
        while self._at and not os.path.exists(fresh):
            if self._receive(self._at[0], wanted, fresh):
                os.rename(fresh, path)
                return True
            self._at.pop(0)
            with suppress(OSError):
                os.unlink(fresh)
        with suppress(OSError):
            os.unlink(fresh)
        return False

    def _receive(self, address: str, wanted: dict[str, Any], fresh: str) -> bool:
        host, _, port = address.rpartition(":")
        line = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=_TIMEOUT_S)
        digest, got, size = hashlib.sha256(), 0, wanted["size"]
        headers = {PROOF: make_proof(self._key, wanted["sha256"])}
        try:
            line.connect()
            late = _leave_later(line.sock)  # an answer whose head comes byte by byte or never ends
            try:
                line.request("GET", f"/files/{wanted['sha256']}", headers=headers)
                reply = line.getresponse()
            finally:
                late.cancel()
            if reply.status != 200 or reply.chunked:  # chunks may have heads without end too
                return False
            until = time.monotonic() + _GRACE_S
            with open(fresh, "wb") as file:
                while got < size and time.monotonic() < until:
                    piece = reply.read1(min(_PIECE, size - got))
                    if not piece:
                        break
                    file.write(piece)
                    digest.update(piece)
                    got += len(piece)
                    until += len(piece) / _LEAST_RATE
        except (*FAULTS, OverflowError, ValueError):
            return False
        finally:
            line.close()
        return bool(digest.hexdigest() == wanted["sha256"])
