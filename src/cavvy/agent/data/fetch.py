"""Brings an input from a storage: many files at once, large ones in pieces, each gone on with
after a break.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
from concurrent.futures import ThreadPoolExecutor

from ..work.blobs import CHUNK
from ..work.folder import inside
from .transfer import (
    EXPIRED,
    RetryBudget,
    TransferClient,
    TransferFailed,
    TransferProgress,
    request,
    say_fault,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from ..config import AgentConfig

    Entry = dict[str, object]

WORKERS = 8
PIECE = 32 * 1024 * 1024  # bytes of a large file that one worker fetches at a time
RELAY = 4 * 1024 * 1024  # bytes of an answer that comes through the control plane
PENDING = 256  # files that wait for a worker; a listing is asked for no faster than it is used


def fetch_input(
    config: AgentConfig, index: int, source: str, target: str, tell: Callable[[str], None]
) -> None:
    """Make `target` what the URL means. Raises TransferFailed, OSError."""
    meter = TransferProgress(f"input {source}", tell)
    pool = ThreadPoolExecutor(WORKERS)
    waiting: list[Future[None]] = []
    try:
        for entry in list_files(TransferClient(config, f"inputs/{index}", meter.waits)):
            path = str(entry["path"])
            whole = inside(target, path) if path else target
            os.makedirs(os.path.dirname(whole), exist_ok=True)
            waiting.append(pool.submit(InputDownload(config, index, entry, whole, meter).run))
            if len(waiting) >= PENDING:
                waiting.pop(0).result()
        for each in waiting:
            each.result()
    finally:
        for each in waiting:
            each.cancel()
        pool.shutdown()
    if not meter.files:
        os.makedirs(target, exist_ok=True)
    meter.end()


def list_files(transfers: TransferClient) -> Iterator[Entry]:
    """Every file of the input. Raises TransferFailed."""
    after = ""
    while True:
        page = transfers.read("GET", after=after)
        files = page["files"]
        assert isinstance(files, list)
        yield from files
        after = str(page["next"])
        if not after:
            return


class InputDownload:
    """One file. It gets its name when all of it is there and is what the storage says it is."""

    def __init__(
        self, config: AgentConfig, index: int, entry: Entry, path: str, meter: TransferProgress
    ) -> None:
        self._transfers = TransferClient(config, f"inputs/{index}", meter.waits)
        self._entry = entry
        self._path = path
        self._part = path + ".cavvy-part"
        self._meter = meter
        self._patience = RetryBudget(meter.waits)
        self._reached = False
        self._relay = entry["signed"] is None
        self._signed = entry["signed"]
        size = entry["size"]
        self._size = size if isinstance(size, int) else None

    def run(self) -> None:
        """Raises TransferFailed, OSError."""
        if self._is_there():
            self._meter.moved(0, 1)
            return
        file = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._patience.reset()  # it has waited for its worker until now
        try:
            at = 0
            while self._size is None or at < self._size:
                got = self._bring(file, at)
                at += got
                self._meter.moved(got)
            self._check(file, at)
        finally:
            os.close(file)
        os.replace(self._part, self._path)
        self._meter.moved(0, 1)

    def _is_there(self) -> bool:
        """Whether an earlier copy of the very same content is in the place."""
        if (
            not self._entry["md5"]
            or not os.path.isfile(self._path)
            or os.path.getsize(self._path) != self._size
        ):
            return False
        return hash_file(self._path) == self._entry["md5"]

    def _bring(self, file: int, at: int) -> int:
        """Some bytes from `at` on; how many. Raises TransferFailed."""
        while True:
            try:
                got = self._piece(file, at) if self._relay else self._direct(file, at)
            except urllib.error.HTTPError as error:
                self._refused(error)
                continue
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, OSError) and error.errno in (
                    28,
                    122,
                    30,
                ):  # the disk is full, or may not be
                    raise
                if not self._reached and isinstance(error, urllib.error.URLError):
                    self._relay = (
                        True  # this node does not reach the storage; the control plane may
                    )
                    continue
                self._patience.lose(
                    f"{self._name}: the storage breaks off: {say_fault(error, self._url)}", error
                )
                continue
            if got:
                self._patience.reset()
                return got
            self._patience.lose(f"{self._name}: the storage sends nothing after {at} bytes")

    def _direct(self, file: int, at: int) -> int:
        assert isinstance(self._signed, dict)
        end = "" if self._size is None else str(min(at + PIECE, self._size) - 1)
        headers = {"Range": f"bytes={at}-{end}"}
        tag = str(self._entry["tag"])
        if tag and not tag.startswith("W/"):
            headers["If-Match"] = tag
        with request(self._signed, headers=headers) as reply:
            self._reached = True
            skip = (
                at if reply.status == 200 else 0
            )  # a server that knows no ranges begins at the beginning
            got = 0
            try:
                while True:
                    data = reply.read(CHUNK)
                    if not data:
                        break
                    if skip:
                        cut = min(skip, len(data))
                        data, skip = data[cut:], skip - cut
                    os.pwrite(file, data, at + got)
                    got += len(data)
            except (OSError, http.client.HTTPException) as error:
                if not got or (isinstance(error, OSError) and error.errno in (28, 122, 30)):
                    raise
                return got  # the next request goes on from here
        if self._size is None:
            self._size = at + got
        return got

    def _piece(self, file: int, at: int) -> int:
        if self._size is None:
            raise TransferFailed(
                f"{self._name}: its server does not say how large it is, and the node does not "
                "reach it"
            )
        length = min(RELAY, self._size - at)
        data = self._transfers.ask(
            "GET", "/bytes", path=self._entry["path"], offset=at, length=length
        )
        os.pwrite(file, data, at)
        return len(data)

    def _refused(self, error: urllib.error.HTTPError) -> None:
        with error:
            status = error.code
        self._reached = True
        if status == 412:
            raise TransferFailed(f"{self._name} was changed while it was copied")
        if status in (404, 410):
            raise TransferFailed(f"{self._name} is not there any more")
        if status == 416 and self._size is None:
            raise TransferFailed(f"{self._name}: its server has no such range")
        self._patience.lose(
            f"{self._name}: the storage answers with status {status}", status=status
        )
        if status in EXPIRED:
            self._signed = self._transfers.read("GET", "/signed", path=self._entry["path"])

    def _check(self, file: int, size: int) -> None:
        if self._size is not None and size != self._size:
            raise TransferFailed(f"{self._name} has {size} bytes and should have {self._size}")
        if self._entry["md5"] and hash_file(self._part) != self._entry["md5"]:
            raise TransferFailed(
                f"{self._name} did not arrive as it is stored: its checksum differs"
            )

    @property
    def _name(self) -> str:
        return str(self._entry["path"]) or os.path.basename(self._path)

    @property
    def _url(self) -> object:
        return self._signed["url"] if isinstance(self._signed, dict) else ""


def hash_file(path: str) -> str:
    """The MD5 of a file's content: what storages name content by, no secret depends on it."""
    found = hashlib.md5()
    with open(path, "rb") as file:
        for data in iter(lambda: file.read(CHUNK), b""):
            found.update(data)
    return found.hexdigest()
