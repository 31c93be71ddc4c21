"""Asks the control plane, and fetches parts of folders by hash from it; in processes of their
own, which may block.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import socket
import time

from ..config import PROTOCOL
from ..wire import ServerAddress, check_pin, make_context
from .cache import touch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..config import AgentConfig

CHUNK = 1024 * 1024
TIMEOUT_S = 60.0
FIRST_DELAY_S = 0.2
LAST_DELAY_S = 5.0
SMALL = 256 * 1024  # bytes of the largest blob that comes in a pack
PACK = 2048  # blobs asked for together; the answer has as many of them as 8 MiB hold
REFUSALS = (401, 403, 404, 409, 410)
TROUBLE = "data-trouble"  # the code of an answer about a storage


class BlobUnavailable(Exception):
    """The control plane does not have, or does not give out, what was asked for; asking again
    does not help.
    """


class StorageTimeout(Exception):
    """A storage that is waited for gives no good answer, and it was long enough; later it may."""


class BlockingClient:
    """Requests to the control plane, one after the other, that wait for it as long as it is
    away.
    """

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._connection: http.client.HTTPConnection | None = None
        self._delay = FIRST_DELAY_S

    def ask(
        self,
        method: str,
        route: str,
        body: object = None,
        length: int | None = None,
        query: str = "",
    ) -> http.client.HTTPResponse:
        """The answer, whatever its status; the gang's name is added. Raises OSError,
        HTTPException.
        """
        address = ServerAddress(self._config.address, self._config.pin)
        headers = {
            "Authorization": f"Bearer {self._config.token}",
            "Cavvy-Agent-Protocol": str(PROTOCOL),
        }
        headers["Content-Type"] = "application/json"
        if length is not None:
            headers["Content-Length"] = str(length)
        try:
            if self._connection is None:
                self._connection = connect(address)
            path = f"{address.prefix}/agent/v1/{route}?gang={self._config.gang}{query}"
            try:
                self._connection.request(method, path, body, headers)  # type: ignore[arg-type]  # bytes or a reader
            except (BrokenPipeError, ConnectionResetError):
                return self._connection.getresponse()  # a refusal in the middle of the body
            return self._connection.getresponse()
        except (OSError, http.client.HTTPException):
            self.drop()
            raise

    def read(
        self,
        method: str,
        route: str,
        body: bytes | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> bytes:
        """The body of a good answer; asked for again and again. Raises BlobUnavailable where it is
        refused for good.

        Raises StorageTimeout where the control plane is there, and the storage behind it does not
        answer; `tell` hears of it.
        """
        began, patience = time.monotonic(), None
        while True:
            try:
                reply = self.ask(method, route, body)
                data = reply.read()
            except (OSError, http.client.HTTPException):
                self.wait()
                continue
            if reply.status == 200:
                self._delay = FIRST_DELAY_S
                return data
            self.check(reply.status, route)
            if not is_trouble(data):
                self.wait()
                continue
            from ..data.transfer import (
                RetryBudget,
                read_reason,
            )  # which needs much that is needed here only

            patience = patience or RetryBudget(tell, since=began)
            patience.lose(read_reason(reply.status, data))

    def check(self, status: int, route: str) -> None:
        """Raises BlobUnavailable for a status that asking again does not change."""
        if status in REFUSALS:
            raise BlobUnavailable(
                f"the control plane refuses {route.partition('/')[0]} (status {status})"
            )

    def drop(self) -> None:
        """Begin anew with the next request."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def wait(self) -> None:
        """Before the next try; in a process of its own, which a stop kills."""
        self.drop()
        time.sleep(self._delay)
        self._delay = min(LAST_DELAY_S, self._delay * 2)


class BlobCache:
    """The cache of one machine, shared by its agents: files named by the SHA-256 of their
    content, never changed.
    """

    def __init__(self, config: AgentConfig) -> None:
        self._line = BlockingClient(config)
        self._folder = config.cache + "/blobs"
        os.makedirs(self._folder, mode=0o700, exist_ok=True)

    def fetch(self, digest: str) -> str:
        """The path of the blob in the cache. Waits for a control plane that is away. Raises
        BlobUnavailable, OSError.
        """
        path = self._path(digest)
        if not touch(path):
            fetch_to(self._line, digest, path)
        return path

    def bring(self, digests: Iterable[str]) -> None:
        """Fetch many small blobs into the cache, in packs. Raises BlobUnavailable, OSError.

        What a pack leaves out, and everything where the control plane knows no packs, is left to
        `fetch`.
        """
        wanted = [digest for digest in dict.fromkeys(digests) if not touch(self._path(digest))]
        while wanted:
            pack = self._fetch_pack(wanted[:PACK])
            if pack is None:
                return
            found = self._keep(pack)
            wanted = (
                [digest for digest in wanted if digest not in found] if found else wanted[PACK:]
            )

    def _fetch_pack(self, digests: list[str]) -> bytes | None:
        """Some of the blobs as a pack; None: the control plane is older than packs. Raises
        BlobUnavailable.
        """
        body = json.dumps({"blobs": digests}).encode()
        while True:
            try:
                reply = self._line.ask("POST", "blobs/pack", body)
                data = reply.read()
            except (OSError, http.client.HTTPException):
                self._line.wait()
                continue
            if reply.status == 200:
                return data
            if reply.status in (404, 405):
                return None
            self._line.check(reply.status, "blobs/pack")
            self._line.wait()

    def _keep(self, pack: bytes) -> set[str]:
        """Put a pack's blobs into the cache; their names. Raises BlobUnavailable, OSError."""
        found, at = set(), 0
        while at < len(pack):
            line = pack.find(b"\n", at, at + 80)
            name, size = pack[at : at + 64].decode("latin-1"), pack[at + 64 : max(line, 0)]
            if not size.isdigit() or len(pack) - line - 1 < int(size):
                raise BlobUnavailable(
                    "what the control plane sent as parts of the working folder is torn at byte "
                    f"{at}"
                )
            at = line + 1 + int(size)
            data = pack[line + 1 : at]
            actual = hashlib.sha256(data).hexdigest()
            if actual != name:
                raise BlobUnavailable(
                    f"what the control plane sent for {name} is not that: it has hash {actual}"
                )
            self._write(self._path(name), data)
            found.add(name)
        return found

    def _write(self, path: str, data: bytes) -> None:
        temporary = f"{path}.{os.getpid()}"
        try:
            with open(temporary, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
        except OSError:
            if os.path.exists(temporary):
                os.unlink(temporary)
            raise

    def _path(self, digest: str) -> str:
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise BlobUnavailable(f"{digest!r} is not the hash of a part of a working folder")
        return os.path.join(self._folder, digest)


def fetch_to(line: BlockingClient, digest: str, path: str) -> None:
    """Make `path` the blob, whole. Waits for a control plane that is away. Raises BlobUnavailable,
    OSError.
    """
    while not _download(line, digest, path):
        line.wait()


def _download(line: BlockingClient, digest: str, path: str) -> bool:
    """False: the control plane could not be reached or broke off; ask again. Raises
    BlobUnavailable, OSError.
    """
    try:
        reply = line.ask("GET", f"blobs/{digest}")
    except (OSError, http.client.HTTPException):
        return False
    if reply.status in REFUSALS:
        raise BlobUnavailable(
            f"the control plane has no part {digest} of the working folder (status {reply.status})"
        )
    if reply.status != 200:
        return False
    temporary = f"{path}.{os.getpid()}"
    found = hashlib.sha256()
    try:
        with open(temporary, "wb") as file:
            while True:
                try:
                    data = reply.read(CHUNK)
                except (OSError, http.client.HTTPException):
                    return False
                if not data:
                    break
                found.update(data)
                file.write(data)
        if found.hexdigest() != digest:
            raise BlobUnavailable(
                f"what the control plane sent for {digest} is not that: it has hash "
                f"{found.hexdigest()}"
            )
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    return True


def is_trouble(data: bytes) -> bool:
    """Whether an answer says that a storage, and not the control plane itself, is in trouble."""
    try:
        return bool(json.loads(data)["code"] == TROUBLE)
    except (ValueError, KeyError, TypeError):
        return False


def connect(address: ServerAddress) -> http.client.HTTPConnection:
    """A connection that may block, over the transport that the address names. Raises OSError."""
    if address.by_mail:
        from .mailbox_http import BlockingMailboxConnection

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
        secure.auto_open = 0  # a connection that was made anew unseen would not be checked
        return secure
    connection = http.client.HTTPConnection(
        address.name, address.port, timeout=TIMEOUT_S, blocksize=CHUNK
    )
    if address.text.startswith("unix:"):
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.settimeout(TIMEOUT_S)
        connection.sock.connect(address.text[5:])
    return connection
