"""Sends an output to a storage, many files at once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from ..config import AgentConfig
from ..http_client import TransferClient, TransferFailed
from ..work.folder import check_seen
from .transfer import ObjectUpload, TransferProgress

WORKERS = 4  # each thread holds one part in memory


class OutputChanged(TransferFailed):
    """The file changed during its upload."""


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
    """Send a file, or a folder without the files that are `known` to be at the target. Sent files
    are added to `known`.

    If `still_s` is above 0, the work is still running: files that it wrote within the last
    `still_s` seconds, or writes during the upload, are skipped. `quiet`: report no waits for the
    storage. The caller must end the returned meter. Raises TransferFailed, OSError.
    """
    if not os.path.lexists(source):
        raise TransferFailed(f"the output {source} does not exist")
    meter = TransferProgress(f"output {target}", tell, quiet=quiet)
    with ThreadPoolExecutor(WORKERS) as pool:
        waiting = [
            pool.submit(send_file, config, index, path, name, meter, known)
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
    """Yield the path of each file, and its path relative to the target. A symbolic link to a file
    is sent as that file."""
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
    """Whether to send a file: its content differs from the target's, and it has not changed for
    `still_s` seconds."""
    try:
        seen = os.stat(path)
    except FileNotFoundError:
        return not still_s  # while the work runs, it may remove files
    return (
        known.get(name) != [seen.st_size, seen.st_mtime_ns]
        and abs(time.time() - seen.st_mtime) >= still_s
    )


def send_file(
    config: AgentConfig,
    index: int,
    path: str,
    name: str,
    meter: TransferProgress,
    known: dict[str, list[int]],
) -> None:
    """Send one file. Raises OutputChanged if the file changes during the upload, TransferFailed,
    CannotBuild, OSError.
    """
    transfers = TransferClient(config, f"outputs/{index}", meter.waits)
    with open(path, "rb") as file:
        check_seen(config, f"/proc/self/fd/{file.fileno()}")  # a link may lead anywhere
        seen = os.fstat(file.fileno())

        def read(offset: int, length: int) -> bytes:
            data, now = os.pread(file.fileno(), length, offset), os.fstat(file.fileno())
            if len(data) != length or now.st_size < seen.st_size:
                raise OutputChanged(f"{path} became shorter while it was sent")
            if (now.st_size, now.st_mtime_ns) != (seen.st_size, seen.st_mtime_ns):
                raise OutputChanged(f"{path} changed while it was sent")
            return data

        ObjectUpload(transfers, {"path": name}, path, meter.waits, meter.moved).send(
            seen.st_size, read
        )
    known[name] = [seen.st_size, seen.st_mtime_ns]
    meter.moved(0, 1)
