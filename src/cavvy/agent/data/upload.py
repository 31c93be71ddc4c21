"""Sends an output to a storage service, many files at a time."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from ..allowed_folders import AllowedFolders, LeadsOutside, raise_unless_vanished, walk_below
from ..config import AgentConfig
from ..http_client import TransferClient, TransferFailed
from ..work.folder import check_seen
from .transfer import ObjectUpload, TransferProgress

WORKERS = 4  # each thread holds one part in memory


class OutputChanged(TransferFailed):
    """Raised if the file changed during its upload."""


def send_output(
    config: AgentConfig,
    folders: AllowedFolders,
    index: int,
    source: str,
    target: str,
    tell: Callable[[str], None],
    known: dict[str, list[int]],
    *,
    still_s: float = 0.0,
    quiet: bool = False,
    refuse: Callable[[str], None] = lambda text: None,
    sent: Callable[[int], None] = lambda size: None,
) -> TransferProgress:
    """Send a file or a folder. Files in `known` are already stored at the target, so they are not
    sent unless they have changed. Sent files are added to `known`. Links whose target is in one of
    `folders` are followed; for all other links, `refuse` is called.

    If `still_s` is above 0, the work is still running. Files that the work wrote within the last
    `still_s` seconds, or writes during the upload, are skipped. With `quiet`, waits for the storage
    are not reported. `sent` is called with the number of bytes sent, also after a failure. The
    caller must call `end` on the returned meter. Raises TransferFailed, LeadsOutside, OSError.
    """
    meter = TransferProgress(f"output {target}", tell, quiet=quiet)
    try:
        files = list_files(folders, source, target, refuse)
    except FileNotFoundError as error:
        raise TransferFailed(f"the output {source} does not exist") from error
    try:
        with ThreadPoolExecutor(WORKERS) as pool:
            waiting = [
                pool.submit(send_file, config, folders, index, path, name, meter, known)
                for path, name in files
                if is_due(folders, path, name, known, still_s)
            ]
            try:
                for each in waiting:
                    with suppress(*((OutputChanged, FileNotFoundError) if still_s else ())):
                        each.result()
            finally:
                for each in waiting:
                    each.cancel()
    finally:
        if meter.bytes:
            sent(meter.bytes)
    return meter


def list_files(
    folders: AllowedFolders, source: str, target: str, refuse: Callable[[str], None]
) -> list[tuple[str, str]]:
    """Yield the path of each file on this node, and its path relative to the target. A symbolic
    link to a file in one of `folders` is sent as that file. Raises LeadsOutside,
    OSError."""
    if not stat.S_ISDIR(folders.stat(source).st_mode):
        return [(source, os.path.basename(source) if target.endswith("/") else "")]
    found, top = [], folders.open_folder(source)
    try:
        for name, entry, _ in walk_below(top, on_error=raise_unless_vanished):
            path = os.path.join(source, name)
            try:
                if entry.is_symlink() and stat.S_ISREG(folders.stat(path).st_mode):
                    found.append((path, name))
            except LeadsOutside as error:
                refuse(f"{name} of the output {os.path.basename(source)} was not sent: {error}")
            except OSError:
                continue  # the link leads to no file
            if entry.is_file(follow_symlinks=False):
                found.append((path, name))
    finally:
        os.close(top)
    return sorted(found)


def is_due(
    folders: AllowedFolders, path: str, name: str, known: dict[str, list[int]], still_s: float
) -> bool:
    """Return whether to send a file. A file is sent if it has changed since its last upload and has
    been unchanged for `still_s` seconds."""
    try:
        seen = folders.stat(path)
    except OSError:
        return not still_s  # the running work may remove files
    return (
        known.get(name) != [seen.st_size, seen.st_mtime_ns]
        and abs(time.time() - seen.st_mtime) >= still_s
    )


def send_file(
    config: AgentConfig,
    folders: AllowedFolders,
    index: int,
    path: str,
    name: str,
    meter: TransferProgress,
    known: dict[str, list[int]],
) -> None:
    """Send one file. Raises OutputChanged if the file changes during the upload. Raises
    TransferFailed, CannotBuild, LeadsOutside, OSError.
    """
    transfers = TransferClient(config, f"outputs/{index}", meter.waits)
    with open(folders.open_file(path), "rb") as file:
        # a volume may contain files that the work must not see
        check_seen(config, f"/proc/self/fd/{file.fileno()}")
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
