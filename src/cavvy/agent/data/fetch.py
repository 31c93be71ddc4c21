"""Downloads an input from a storage service, many files at a time."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor

from ..http_client import CHUNK, TransferClient
from ..work.folder import inside
from .transfer import ObjectDownload, TransferProgress, save_object

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from ..allowed_folders import AllowedFolders
    from ..config import AgentConfig

    Entry = dict[str, object]

WORKERS = 8
# maximum files queued for the workers; while the queue is full, no more files are listed
PENDING = 256


def fetch_input(
    config: AgentConfig,
    folders: AllowedFolders,
    index: int,
    source: str,
    target: str,
    tell: Callable[[str], None],
) -> None:
    """Download all files of the input at the URL `source` to `target`, which must be in `folders`.
    Raises TransferFailed, LeadsOutside, OSError."""
    meter = TransferProgress(f"input {source}", tell)
    pool = ThreadPoolExecutor(WORKERS)
    waiting: list[Future[None]] = []

    def bring(entry: Entry, path: str) -> None:
        if not has_content(path, entry):
            transfers = TransferClient(config, f"inputs/{index}", meter.waits)
            save_object(folders, path, open_input(transfers, entry, path, meter), meter)
        meter.moved(0, 1)

    try:
        for entry in list_files(TransferClient(config, f"inputs/{index}", meter.waits)):
            path = str(entry["path"])
            whole = inside(target, path) if path else target
            waiting.append(pool.submit(bring, entry, whole))
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
    """Yield all files of the input. Raises TransferFailed."""
    after = ""
    while True:
        page = transfers.read("GET", after=after)
        files = page["files"]
        assert isinstance(files, list)
        yield from files
        after = str(page["next"])
        if not after:
            return


def open_input(
    transfers: TransferClient, entry: Entry, path: str, meter: TransferProgress
) -> ObjectDownload:
    """Download one file of the input to `path`."""
    return ObjectDownload(
        transfers,
        entry,
        str(entry["path"]) or os.path.basename(path),
        meter.waits,
        sign=lambda: transfers.read("GET", "/signed", path=entry["path"]),
    )


def has_content(path: str, entry: Entry) -> bool:
    """Return whether the file at `path` already has the content of `entry`. The comparison uses the
    MD5 hash that storage services report. MD5 is sufficient, because the comparison protects no
    secret.
    """
    if not entry["md5"] or not os.path.isfile(path) or os.path.getsize(path) != entry["size"]:
        return False
    found = hashlib.md5()
    with open(path, "rb") as file:
        for data in iter(lambda: file.read(CHUNK), b""):
            found.update(data)
    return found.hexdigest() == entry["md5"]
