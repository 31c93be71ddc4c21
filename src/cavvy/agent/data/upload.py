"""Sends an output to a storage: many files at once, large ones in parts, each sent again after a
break.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import os
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

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

    from ..config import AgentConfig

WORKERS = 4  # each holds one part in memory


class OutputChanged(TransferFailed):
    """The file was written while it was sent."""


def send_output(
    config: AgentConfig,
    index: int,
    source: str,
    target: str,
    tell: Callable[[str], None],
    known: dict[str, list[int]],
    *,
    still_s: float = 0.0,
    quiet: bool = False,
) -> TransferProgress:
    """Send a file, or a folder with all that is below but what is `known` to be there; what was
    sent is known then.

    With `still_s` the work runs: what it has written since, or writes meanwhile, is left for later.
    `quiet`: that the storage is waited for is known. The caller tells the meter's end. Raises
    TransferFailed, OSError.
    """
    if not os.path.lexists(source):
        raise TransferFailed(f"the output {source} does not exist")
    meter = TransferProgress(f"output {target}", tell, quiet=quiet)
    with ThreadPoolExecutor(WORKERS) as pool:
        waiting = [
            pool.submit(OutputUpload(config, index, path, name, meter, known).run)
            for path, name in list_files(source, target)
            if is_due(path, name, known, still_s)
        ]
        try:
            for each in waiting:
                with suppress(*((OutputChanged, FileNotFoundError) if still_s else ())):
                    each.result()
        finally:
            for each in waiting:
                each.cancel()
    return meter


def list_files(source: str, target: str) -> Iterator[tuple[str, str]]:
    """Files with the paths that they get below the target; links to files are sent as what they
    lead to.
    """
    if not os.path.isdir(source):
        yield source, os.path.basename(source) if target.endswith("/") else ""
        return
    for folder, folders, names in os.walk(source):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(folder, name)
            if os.path.isfile(path):
                yield path, os.path.relpath(path, source)


def is_due(path: str, name: str, known: dict[str, list[int]], still_s: float) -> bool:
    """Whether a file is not as it came from, or was sent to, the very place that it would be
    sent to.
    """
    try:
        seen = os.stat(path)
    except FileNotFoundError:
        return not still_s  # to be told of, unless the work may do so
    return (
        known.get(name) != [seen.st_size, seen.st_mtime_ns]
        and abs(time.time() - seen.st_mtime) >= still_s
    )


class OutputUpload:
    """One file. It counts when every part was taken, and it did not change meanwhile."""

    def __init__(
        self,
        config: AgentConfig,
        index: int,
        path: str,
        name: str,
        meter: TransferProgress,
        known: dict[str, list[int]],
    ) -> None:
        self._transfers = TransferClient(config, f"outputs/{index}", meter.waits)
        self._path = path
        self._name = name
        self._meter = meter
        self._known = known

    def run(self) -> None:
        """Raises TransferFailed, OSError."""
        with open(self._path, "rb") as file:
            seen = os.fstat(file.fileno())
            how = self._transfers.read("POST", "", {"path": self._name, "size": seen.st_size})
            upload = str(how["upload"])
            try:
                self._send(
                    file.fileno(), seen, upload, int(str(how["part_bytes"])), bool(how["relay"])
                )
            except (TransferFailed, OSError):
                if upload:
                    self._transfers.abort({"path": self._name, "upload": upload})
                raise
        self._known[self._name] = [seen.st_size, seen.st_mtime_ns]
        self._meter.moved(0, 1)

    def _send(
        self, file: int, seen: os.stat_result, upload: str, part_bytes: int, relay: bool
    ) -> None:
        size, tags = seen.st_size, []
        for number, at in enumerate(range(0, max(size, 1), part_bytes), 1):
            data = os.pread(file, min(part_bytes, size - at), at)
            if len(data) != min(part_bytes, size - at):
                raise OutputChanged(f"{self._path} became shorter while it was sent")
            tags.append(
                self._relay(at, size, data) if relay else self._put(upload, number, size, data)
            )
            self._meter.moved(len(data))
        now = os.fstat(file)
        if (now.st_size, now.st_mtime_ns) != (size, seen.st_mtime_ns):
            raise OutputChanged(f"{self._path} was changed while it was sent")
        if not relay and "" not in tags[:1]:
            self._transfers.read(
                "POST",
                "/complete",
                {"path": self._name, "upload": upload, "size": size, "tags": tags},
            )

    def _relay(self, at: int, size: int, data: bytes) -> str:
        self._transfers.ask("PUT", "/bytes", data, path=self._name, offset=at, size=size)
        return ""

    def _put(self, upload: str, number: int, size: int, data: bytes) -> str:
        """Send one part; its ETag, "" where the whole file went through the control plane.
        Raises TransferFailed.
        """
        asked = {"path": self._name, "upload": upload, "part": number}
        signed = self._transfers.read("POST", "/parts", asked)
        digest = hashlib.md5(data).digest()
        headers = {"Content-MD5": base64.b64encode(digest).decode()}
        patience, reached = RetryBudget(self._meter.waits), False
        while True:
            try:
                with request(signed, data, headers) as reply:
                    reply.read()
                    return reply.headers.get("ETag") or "-"
            except urllib.error.HTTPError as error:
                reached, status = True, error.code
                error.close()
                patience.lose(
                    f"{self._path}: the storage answers with status {status}", status=status
                )
                if status in EXPIRED:
                    signed = self._transfers.read("POST", "/parts", asked)
            except (OSError, http.client.HTTPException) as error:
                if not reached and not upload and isinstance(error, urllib.error.URLError):
                    return self._relay(0, size, data)
                patience.lose(
                    f"{self._path}: the storage breaks off: {say_fault(error, signed['url'])}",
                    error,
                )
