"""Fetches the frozen parts of a working folder by hash into the machine's cache; runs in a process that may block."""

from __future__ import annotations

import hashlib
import http.client
import os
import socket
import time

from ..config import PROTOCOL
from ..wire import Address

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..config import Config

CHUNK = 1024 * 1024
TIMEOUT_S = 60.0
LAST_DELAY_S = 5.0


class Missing(Exception):
    """The control plane does not have, or does not give out, what was asked for; asking again does not help."""


class Blobs:
    """The cache of one machine, shared by its agents: files named by the SHA-256 of their content, never changed."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._folder = config.cache + "/blobs"
        self._connection: http.client.HTTPConnection | None = None
        os.makedirs(self._folder, mode=0o700, exist_ok=True)

    def fetch(self, digest: str) -> str:
        """The path of the blob in the cache. Waits for a control plane that is away. Raises Missing, OSError."""
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise Missing(f"{digest!r} is not the hash of a part of a working folder")
        path = os.path.join(self._folder, digest)
        if os.path.exists(path):
            return path
        delay = 0.2
        while not self._download(digest, path):
            time.sleep(delay)  # in a process of its own, which a stop kills
            delay = min(LAST_DELAY_S, delay * 2)
        return path

    def _download(self, digest: str, path: str) -> bool:
        """False: the control plane could not be reached or broke off; ask again. Raises Missing, OSError."""
        try:
            reply = self._ask(f"/agent/v1/blobs/{digest}?gang={self._config.gang}")
        except (OSError, http.client.HTTPException):
            self._connection = None
            return False
        if reply.status in (401, 403, 404, 409, 410):
            raise Missing(f"the control plane has no part {digest} of the working folder (status {reply.status})")
        if reply.status != 200:
            self._connection = None
            return False
        temporary = f"{path}.{os.getpid()}"
        found = hashlib.sha256()
        try:
            with open(temporary, "wb") as file:
                while True:
                    try:
                        data = reply.read(CHUNK)
                    except (OSError, http.client.HTTPException):
                        self._connection = None
                        return False
                    if not data:
                        break
                    found.update(data)
                    file.write(data)
            if found.hexdigest() != digest:
                raise Missing(f"what the control plane sent for {digest} is not that: it has hash {found.hexdigest()}")
            os.replace(temporary, path)
        finally:
            if os.path.exists(temporary):
                os.unlink(temporary)
        return True

    def _ask(self, path: str) -> http.client.HTTPResponse:
        address = Address(self._config.address)
        if self._connection is None:
            self._connection = connect(address)
        headers = {"Authorization": f"Bearer {self._config.token}", "Remuda-Agent-Protocol": str(PROTOCOL)}
        self._connection.request("GET", address.prefix + path, headers=headers)
        return self._connection.getresponse()


def connect(address: Address) -> http.client.HTTPConnection:
    """A connection that may block, over whichever carrier the address names. Raises OSError."""
    if address.tls:
        return http.client.HTTPSConnection(address.name, address.port, timeout=TIMEOUT_S)
    connection = http.client.HTTPConnection(address.name, address.port, timeout=TIMEOUT_S)
    if address.text.startswith("unix:"):
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.settimeout(TIMEOUT_S)
        connection.sock.connect(address.text[5:])
    return connection
