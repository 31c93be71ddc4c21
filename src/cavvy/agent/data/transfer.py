"""Transfers the objects of inputs, outputs and checkpoints by signed requests to the storage.

The control plane signs the requests, so that this node needs no credentials of the storage. A
broken transfer resumes where it stopped, and an expired request is signed again. If this node
cannot connect to the storage, the control plane relays the bytes.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import os
import threading
import time
import urllib.error
from contextlib import suppress

from ..allowed_folders import AllowedFolders
from ..disk import name_part
from ..documents import say_files
from ..http_client import (
    CHUNK,
    FAULTS,
    TOLD_EVERY_S,
    RetryBudget,
    TransferClient,
    TransferFailed,
    request,
)
from ..work.trees import remove_below

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Protocol

    from ..config import AgentConfig

    Tell = Callable[[str], None]
    Entry = dict[str, object]

    class UploadSigner(Protocol):
        """The methods that an upload needs. Two classes have these methods: `TransferClient`, and
        the class for uploads that were signed earlier.
        """

        def read(self, method: str, route: str = "", ask: object = None) -> Entry: ...
        def ask(
            self, method: str, route: str = "", body: bytes | None = None, **query: object
        ) -> bytes: ...
        def abort(self, ask: Entry) -> None: ...


LINE = 2000  # maximum bytes of a message; a pipe never splits a write of up to 4096 bytes
EXPIRED = (400, 401, 403)  # statuses that storages send for an expired request
RELAY = 4 * 1024 * 1024  # maximum bytes of one answer that the control plane relays


class ObjectDownload:
    """Downloads one object, or the bytes of it in `span`. `entry` is the control plane's
    description of the object: `size`, `tag`, `md5` or `sha256`, and the first signed request.
    """

    def __init__(
        self,
        transfers: TransferClient,
        entry: Entry,
        name: str,
        waits: Tell | None,
        *,
        sign: Callable[[], Entry],
        span: tuple[int, int] | None = None,
    ) -> None:
        self._span = span
        self._transfers, self._entry, self._name = transfers, entry, name
        self._waits, self._sign = waits, sign
        self._signed = entry["signed"]
        size = entry["size"]
        self._size = size if isinstance(size, int) else None
        self._reached = False
        self._at = 0
        if span is not None:
            self._at, self._size = span

    def read(self) -> Iterator[bytes]:
        """Yield the object's bytes in order. Raises TransferFailed, for example if the checksum
        differs."""
        kind = find_hash(self._entry)
        found, budget = hashlib.new(kind), RetryBudget(self._waits)
        while self._size is None or self._at < self._size:
            before = self._at
            try:
                for data in self._ask():
                    if self._span is None:
                        found.update(data)
                    self._at += len(data)
                    yield data
                fault: Exception = http.client.IncompleteRead(b"")
            except FAULTS as error:
                fault = error
            if self._at > before:
                budget.reset()
            elif self._size is None or self._at < self._size:
                self._lose(fault, budget)
        if self._at != self._size:
            raise TransferFailed(f"{self._name} has {self._at} bytes instead of {self._size}")
        if self._span is None:
            check_content(self._name, self._entry, found.hexdigest())

    def _lose(self, fault: Exception, budget: RetryBudget) -> None:
        """Wait after a failed request. Raises TransferFailed if no tries are left, or if another
        try cannot succeed.
        """
        status = 0
        if isinstance(fault, urllib.error.HTTPError):
            fault.close()
            self._reached, status = True, fault.code
        elif (
            not self._reached
            and self._size is not None
            and isinstance(fault, urllib.error.URLError)
        ):
            self._signed = None  # this node cannot reach the storage: let the control plane relay
            return
        if status == 412:
            raise TransferFailed(f"{self._name} changed while it was copied")
        if status in (404, 410):
            raise TransferFailed(f"{self._name} no longer exists")
        if status == 416 and self._size is None:
            self._size = self._at  # all bytes have arrived
            return
        url = self._signed["url"] if isinstance(self._signed, dict) else ""
        if budget.lose_request(self._name, fault, url) in EXPIRED:
            self._signed = self._sign()

    def _ask(self) -> Iterator[bytes]:
        """Yield the bytes that one request returns. Raises HTTPError, OSError, HTTPException,
        TransferFailed."""
        if not isinstance(self._signed, dict):
            length = min(RELAY, (self._size or 0) - self._at)
            yield self._transfers.ask(
                "GET", "/bytes", path=self._entry["path"], offset=self._at, length=length
            )
            return
        last = "" if self._size is None else str(self._size - 1)
        headers = {"Range": f"bytes={self._at}-{last}"}
        tag = str(self._entry.get("tag", ""))
        if tag and not tag.startswith("W/"):
            headers["If-Match"] = tag
        with request(self._signed, headers=headers) as reply:
            self._reached = True
            left = reply.length
            if self._span is not None and reply.status != 206:
                raise RangesRefused(f"{self._name}: the storage sends no parts")
            skip = (
                self._at if reply.status == 200 else 0
            )  # a server without range support sends everything
            for data in iter(lambda: reply.read(CHUNK), b""):
                left = None if left is None else left - len(data)
                cut = min(skip, len(data))
                skip -= cut
                if cut < len(data):
                    yield data[cut:]
        if left:
            raise http.client.IncompleteRead(b"", left)
        if self._size is None:
            self._size = self._at


def find_hash(entry: Entry) -> str:
    """Return the kind of the hash that an entry states."""
    return "sha256" if entry.get("sha256") or "md5" not in entry else "md5"


def check_content(name: str, entry: Entry, found: str) -> None:
    """Raise TransferFailed if the hash of an object's content is not the one in its entry."""
    wanted = entry[find_hash(entry)]
    if wanted and found != wanted:
        raise TransferFailed(f"{name} was damaged in transit: its checksum differs")


class RangesRefused(TransferFailed):
    """Raised if a storage does not send a part of an object."""


def save_object(
    folders: AllowedFolders,
    path: str,
    download: ObjectDownload,
    meter: TransferProgress | None = None,
) -> None:
    """Download the object to a temporary file, which is renamed to `path` when it is complete. The
    path must be in `folders`; missing folders are created. Raises TransferFailed, LeadsOutside,
    OSError.
    """

    def write(file: int) -> None:
        with open(file, "wb", closefd=False) as buffered:
            for data in download.read():
                buffered.write(data)
                if meter is not None:
                    meter.moved(len(data))

    save_anew(folders, path, write)


def save_anew(folders: AllowedFolders, path: str, write: Callable[[int], None]) -> None:
    """Let `write` fill a temporary file, which is renamed to `path` when it is complete."""
    folder, name = folders.find(path, follow=False, make=True)
    part = name_part(name, ".cavvy-part")
    try:
        remove_below(folder, part)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        file = os.open(part, flags, 0o666, dir_fd=folder)
        try:
            write(file)
        finally:
            os.close(file)
        os.replace(part, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            remove_below(folder, part)  # the disk may be full
        raise
    finally:
        os.close(folder)


class ObjectUpload:
    """Uploads one object in parts. `target` is the control plane's name for the object."""

    def __init__(
        self,
        transfers: UploadSigner,
        target: Entry,
        name: str,
        waits: Tell | None,
        moved: Callable[[int], None] | None = None,
    ) -> None:
        self._transfers, self._target, self._name = transfers, target, name
        self._waits, self._moved = waits, moved

    def send(self, size: int, read: Callable[[int, int], bytes]) -> None:
        """Upload `size` bytes. `read(offset, length)` returns bytes of the source, and raises an
        error if the source has changed. The object exists in the storage only after the storage has
        accepted every part.

        Raises TransferFailed and the errors of `read`. After an error, the storage deletes the
        parts.
        """
        how = self._transfers.read("POST", "", dict(self._target, size=size))
        upload = dict(self._target, upload=str(how["upload"]))
        part_bytes, relay, tags = int(str(how["part_bytes"])), bool(how.get("relay")), []
        self._may_relay = "path" in upload and not upload["upload"]
        try:
            for number, at in enumerate(range(0, max(size, 1), part_bytes), 1):
                data = read(at, min(part_bytes, size - at))
                tag = "" if relay else self._put(dict(upload, part=number), data)
                if not tag:
                    self._transfers.ask(
                        "PUT", "/bytes", data, path=self._target["path"], offset=at, size=size
                    )
                tags.append(tag)
                if self._moved is not None:
                    self._moved(len(data))
            read(size, 0)
            if all(tags):
                self._transfers.read("POST", "/complete", dict(upload, size=size, tags=tags))
        except BaseException:
            if upload["upload"]:
                self._transfers.abort(upload)
            raise

    def _put(self, part: Entry, data: bytes) -> str:
        """Upload one part and return its ETag. Return "" if this node cannot reach the storage but
        the control plane can relay the part. Raises TransferFailed.
        """
        digest = base64.b64encode(hashlib.md5(data).digest()).decode()
        budget, reached, status = RetryBudget(self._waits), False, 401
        while True:
            if status in EXPIRED:
                signed = self._transfers.read("POST", "/parts", part)
            try:
                with request(signed, data, {"Content-MD5": digest}) as reply:
                    reply.read()
                    return reply.headers.get("ETag") or "-"
            except FAULTS as error:
                reached = reached or isinstance(error, urllib.error.HTTPError)
                if self._may_relay and not reached and isinstance(error, urllib.error.URLError):
                    return ""
                status = budget.lose_request(self._name, error, signed["url"])


class TransferProgress:
    """Reports a transfer's progress every few seconds, and the reasons for waits. Several threads
    may call the methods simultaneously.

    If `quiet` is set, waits are not reported, because the user already knows the reason.
    """

    def __init__(self, what: str, tell: Tell, *, quiet: bool = False) -> None:
        self._what = what
        self._tell = tell
        self._lock = threading.Lock()
        self._told = time.monotonic()
        self._began = self._told
        self._quiet = quiet
        self._waited = 0.0
        self._stopped = False
        self.bytes = self.files = 0

    def moved(self, count: int, files: int = 0) -> None:
        with self._lock:
            if self._stopped:
                raise TransferFailed(f"{self._what} was stopped")
            self.bytes += count
            self.files += files
            now = time.monotonic()
            if now - self._told < TOLD_EVERY_S:
                return
            self._told = now
            text = f"{self._what}: {self.describe()} so far"
        self._tell(text)

    def stop(self) -> None:
        """Let the other threads end soon: `moved` raises TransferFailed from now on."""
        with self._lock:
            self._stopped = True

    def waits(self, text: str) -> None:
        """Report that a thread is waiting, and the reason."""
        with self._lock:
            now = time.monotonic()
            if self._quiet or (self._waited and now - self._waited < TOLD_EVERY_S):
                return
            self._waited = now
        self._tell(f"{self._what} waits: {text}")

    def describe(self) -> str:
        """Return the files and bytes transferred so far, such as "3 files, 1.5 MiB"."""
        return say_files(self.files, self.bytes)

    def end(self) -> None:
        seconds = time.monotonic() - self._began
        self._tell(f"{self._what}: {self.describe()} in {seconds:.1f} s")


def tell_to(channel: int, word: str = "moved") -> Tell:
    """Return a function that sends messages to the agent, which records them as events named
    `word`. The returned function does nothing if the channel is negative.
    """
    return lambda text: None if channel < 0 else _write(channel, word, text)


def _write(channel: int, word: str, text: str) -> None:
    line = " ".join(f"{word} {text}".split())  # file names may contain line breaks
    os.write(channel, line.encode("utf-8", "replace")[:LINE] + b"\n")


def send_file(
    config: AgentConfig,
    name: str,
    size: int,
    read: Callable[[int, int], bytes],
    tell: Tell | None = None,
) -> None:
    """Upload the file whose SHA-256 is `name`. The function `read` returns its bytes, as for
    `ObjectUpload.send`. Raises TransferFailed and the errors of `read`. `tell` is called with a
    message about each long wait.
    """
    transfers = TransferClient(config, f"checkpoint/{name}", tell)
    ObjectUpload(transfers, {}, f"checkpoint file {name[:12]}", tell).send(size, read)


def fetch_file(config: AgentConfig, name: str, path: str, tell: Tell | None = None) -> None:
    """Download the file whose SHA-256 is `name` to `path`. Raises TransferFailed, OSError. `tell`
    is called with a message about each long wait.
    """
    transfers = TransferClient(config, f"checkpoint/{name}", tell)

    def sign() -> dict[str, object]:
        return transfers.read("GET")

    entry: dict[str, object] = {"size": None, "sha256": name, "signed": sign()}
    download = ObjectDownload(transfers, entry, f"checkpoint file {name[:12]}", tell, sign=sign)
    save_object(AllowedFolders([os.path.dirname(path)]), path, download)
