"""Streams inputs: the work reads a pipe while it runs, and nothing lies on the disk.

A pipe can be read once. The files of a folder come one after another, by name. When a stream breaks
off for good its pipe stays open, so that the work cannot take what it got for the whole, and the
agent ends the work.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import signal
import threading
import urllib.error

from ..notices.faults import NETWORK
from ..work.blobs import CHUNK, StorageTimeout
from .fetch import RELAY, list_files
from .transfer import (
    EXPIRED,
    RetryBudget,
    TransferClient,
    TransferFailed,
    TransferProgress,
    request,
    say_fault,
    tell_to,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..config import AgentConfig

    Entry = dict[str, object]


def make_pipe(path: str) -> None:
    """Raises OSError."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.lexists(path):
        os.unlink(path)
    os.mkfifo(path, 0o600)


def stream_inputs(config: AgentConfig, wanted: list[tuple[int, str, str]], channel: int) -> int:
    """Fill every pipe of `wanted` (index, URL, path), each as fast as it is read; ends when all
    have ended.
    """
    lock = threading.Lock()
    failed: list[str] = []

    def run(index: int, source: str, path: str) -> None:
        try:
            InputStream(config, index, source, path, channel).run()
        except (TransferFailed, OSError) as error:
            with lock:
                if not failed:
                    failed.append(source)
                    reason = f"the input {source} breaks off: {error}"
                    outcome = (
                        NETWORK if isinstance(error, StorageTimeout) else "exit"
                    )  # as of an input that is copied
                    result = {
                        "outcome": outcome,
                        "exit_code": None,
                        "reason": reason,
                        "reused": False,
                    }
                    os.write(channel, (json.dumps(result) + "\n").encode())

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in wanted]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    while failed:
        signal.pause()  # with the pipes open, until the agent has ended the work
    return 0


class InputStream:
    """One input into one pipe."""

    def __init__(
        self, config: AgentConfig, index: int, source: str, path: str, channel: int
    ) -> None:
        self._path = path
        self._meter = TransferProgress(f"input {source}", tell_to(channel))
        self._transfers = TransferClient(config, f"inputs/{index}", self._meter.waits)
        self._pipe = -1
        self._at = 0  # of the file that is on its way
        self._found = hashlib.md5()
        self._reached = False

    def run(self) -> None:
        """Raises TransferFailed, OSError."""
        self._pipe = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)  # waits until the work reads
        try:
            for entry in list_files(self._transfers):
                self._send(entry)
                self._meter.moved(0, 1)
        except BrokenPipeError:
            self._meter.end()  # the work has read what it wanted
            return
        os.close(self._pipe)
        self._meter.end()

    def _send(self, entry: Entry) -> None:
        """One file, gone on with after a break. Raises TransferFailed, BrokenPipeError."""
        self._at, self._found, self._reached = 0, hashlib.md5(), False
        name, size, patience = (
            str(entry["path"]) or os.path.basename(self._path),
            entry["size"],
            RetryBudget(self._meter.waits),
        )
        over = size == 0
        while not over:
            before = self._at
            lost: Exception | None = None
            status = 0
            try:
                self._pull(entry)
                over = self._at == size if isinstance(size, int) else True
                reason = f"{name} ends after {self._at} bytes"
            except urllib.error.HTTPError as error:
                reason, status = self._refused(entry, error, name), error.code
            except BrokenPipeError:
                raise
            except (OSError, http.client.HTTPException) as error:
                signed, lost = entry["signed"], error
                url = signed["url"] if isinstance(signed, dict) else ""
                reason = f"{name}: the storage breaks off: {say_fault(error, url)}"
                if (
                    not self._reached
                    and isinstance(error, urllib.error.URLError)
                    and isinstance(size, int)
                ):
                    entry["signed"] = None  # this node does not reach the storage
                    continue
            if self._at > before:
                patience.reset()
            elif not over:
                patience.lose(reason, lost, status)
        if entry["md5"] and self._found.hexdigest() != entry["md5"]:
            raise TransferFailed(f"{name} did not arrive as it is stored: its checksum differs")

    def _pull(self, entry: Entry) -> None:
        """What one request brings. Raises HTTPError, OSError, HTTPException, TransferFailed."""
        signed, tag = entry["signed"], str(entry["tag"])
        if signed is None:
            self._write(self._relay(entry, self._at))
            return
        headers = {"Range": f"bytes={self._at}-"}
        if tag and not tag.startswith("W/"):
            headers["If-Match"] = tag
        assert isinstance(signed, dict)
        with request(signed, headers=headers) as reply:
            self._reached, skip = True, self._at if reply.status == 200 else 0
            while True:
                data = reply.read(CHUNK)
                if not data:
                    return
                cut = min(skip, len(data))
                skip -= cut
                self._write(data[cut:])

    def _refused(self, entry: Entry, error: urllib.error.HTTPError, name: str) -> str:
        """Why, for people; an expired request is replaced. Raises TransferFailed."""
        self._reached, status = True, error.code
        error.close()
        if status == 412:
            raise TransferFailed(f"{name} was changed while it was read")
        if status in EXPIRED:
            entry["signed"] = self._transfers.read("GET", "/signed", path=entry["path"])
        return f"{name}: the storage answers with status {status}"

    def _relay(self, entry: Entry, at: int) -> bytes:
        size = entry["size"]
        if not isinstance(size, int):
            raise TransferFailed(
                "its server does not say how large it is, and the node does not reach it"
            )
        return self._transfers.ask(
            "GET", "/bytes", path=entry["path"], offset=at, length=min(RELAY, size - at)
        )

    def _write(self, data: bytes) -> None:
        self._found.update(data)
        self._at += len(data)
        left = memoryview(data)
        while left:
            left = left[os.write(self._pipe, left) :]
        self._meter.moved(len(data))
