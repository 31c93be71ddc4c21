"""Calls to the control plane over HTTPS, with the server's certificate pinned by hash.

An OSError means that the caller should try again later; MachineDismissed means that the machine
must leave permanently.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import shutil
import socket
import ssl

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Fields = dict[str, Any]

TIMEOUT_S = 30.0


def _is_intact(path: str, digest: str) -> bool:
    """Return whether the file exists and has this hash. Something else there is removed."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(path, flags), "rb") as file:
            if hashlib.sha256(file.read()).hexdigest() == digest:
                return True
    except OSError:
        pass
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)
    return False


class MachineDismissed(Exception):
    """Raised if the control plane refuses this machine; the message gives the reason."""


class ServerAddresses:
    """The addresses of the control plane's servers, shared by all threads. Each server can answer
    all calls. `first` is the address with which the machine joined.
    """

    def __init__(self, first: str, others: list[str]) -> None:
        self._first, self.others = first, others
        self.current = first

    def learn(self, others: list[str]) -> bool:
        """Replace all addresses except the first. Return whether the addresses have changed."""
        changed, self.others = others != self.others, others
        return changed

    def leave(self, failed: str) -> None:
        """Switch from `failed` to the next address, unless another thread has already switched."""
        if self.current == failed:
            known = [self._first, *(each for each in self.others if each != self._first)]
            at = known.index(failed) + 1 if failed in known else 0
            self.current = known[at % len(known)]


class ServerCalls:
    """A persistent connection to the control plane. Each thread needs its own instance."""

    def __init__(self, addresses: ServerAddresses, pin: str, place: str, token: str) -> None:
        self._addresses, self._pin, self._place = addresses, pin, place
        self.token = token
        self._connection: http.client.HTTPSConnection | None = None
        self.own_address = ""  # this machine's own address on the connection

    def ask(self, call: str, fields: Fields, wait_s: float = 0) -> Fields:
        """Send a request to the control plane and return the answer. Raises OSError,
        MachineDismissed.
        """
        headers = {"Authorization": "Bearer " + self.token, "Content-Type": "application/json"}
        body = json.dumps(fields).encode()
        status, data = self._request(
            "POST", f"/nodes/v1/{self._place}/{call}", body, headers, wait_s
        )
        if status == 200:
            return dict(json.loads(data))
        said = data[:500].decode("utf-8", "replace")
        try:
            said = json.loads(data)["message"]
        except (ValueError, KeyError, TypeError):
            pass
        if status in (401, 403, 410):
            raise MachineDismissed(said)
        raise OSError(f"status {status}: {said}")

    def fetch(self, digest: str, path: str) -> None:
        """Download the file with this hash to `path`, unless the file is there. On some machines,
        an earlier job can have changed the file. Raises OSError."""
        if _is_intact(path, digest):
            return
        status, data = self._request("GET", "/boot/v1/" + digest, b"", {}, 60.0)
        if status != 200 or hashlib.sha256(data).hexdigest() != digest:
            raise OSError(f"the requested file was not received (HTTP status {status})")
        fresh = f"{path}.{os.getpid()}"
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
        os.rename(fresh, path)

    def _request(
        self, method: str, path: str, body: bytes, headers: dict[str, str], wait_s: float
    ) -> tuple[int, bytes]:
        address = self._addresses.current
        try:
            connection = self._connect(address)
            connection.sock.settimeout(TIMEOUT_S + wait_s)
            connection.request(method, path, body, headers)
            reply = connection.getresponse()
            data = reply.read()
            if reply.will_close:
                self.drop()
            return reply.status, data
        except (OSError, http.client.HTTPException) as error:
            self.drop()
            self._addresses.leave(address)
            raise OSError(str(error) or type(error).__name__) from error

    def _connect(self, address: str) -> http.client.HTTPSConnection:
        if self._connection is not None:
            return self._connection
        context = ssl.SSLContext(
            ssl.PROTOCOL_TLS_CLIENT
        )  # without CA certificates, because the certificate is checked by its hash
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        host, _, port = address.partition("://")[2].rpartition(":")
        made = http.client.HTTPSConnection(
            host.strip("[]"), int(port), timeout=TIMEOUT_S, context=context
        )
        made.connect()
        made.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        made.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        found = hashlib.sha256(made.sock.getpeercert(True) or b"").hexdigest()
        if found != self._pin:
            made.close()
            raise OSError(f"unexpected certificate from the control plane: {found}")
        self.own_address = made.sock.getsockname()[0]
        # no automatic reconnection, because it would skip the check of the certificate
        made.auto_open = 0
        self._connection = made
        return made

    def drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
