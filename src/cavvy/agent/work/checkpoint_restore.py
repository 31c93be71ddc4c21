"""Downloads the newest checkpoint of the job before the work starts. May block."""

from __future__ import annotations

import json
import os
import time

from ..disk import read_number, write_whole
from ..http_client import BlockingClient, StorageTimeout, TransferFailed
from .blobs import fetch_to
from .checkpoint_files import write_rows
from .sparse_files import restore_holes
from .trees import remove_tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..config import AgentConfig

    Tell = Callable[[str], None]

RESTORES = 5
SETTLE_S = 0.5  # seconds between checks whether rank 0 has finished


def settle(config: AgentConfig, storage: str, attempt: int, tell: Tell | None = None) -> str:
    """If the control plane has a newer checkpoint than the nodes' shared folder, download the
    checkpoint to that folder. Rank 0 downloads the checkpoint while the other ranks wait. See
    `restore` for the result and the errors.

    The file `attempt` next to the folder contains the number of the attempt that used the folder
    last. If a later attempt uploaded a checkpoint, that checkpoint is newer than the files in the
    folder.
    """
    path = os.path.dirname(storage) + "/attempt"
    if config.rank > 0:
        while read_number(path) != attempt:
            # rank 0 is still downloading; if the work is stopped, this process is killed
            time.sleep(SETTLE_S)
        return ""
    user = read_number(path)
    if user is None:
        user = 0 if os.path.isdir(storage) and os.listdir(storage) else -1
    os.makedirs(os.path.dirname(storage), mode=0o700, exist_ok=True)
    told = restore(config, storage, tell, later_than=user)
    write_whole(path, str(attempt), sync=True)
    return told


def restore(
    config: AgentConfig, folder: str, tell: Tell | None = None, later_than: int = -1
) -> str:
    """Download the newest checkpoint of the job to `folder`, if an attempt with a number above
    `later_than` uploaded it.

    Returns a message for the user, or "" if nothing was downloaded. `tell` is called with a message
    about each long wait. Raises TransferFailed, StorageTimeout, OSError.
    """
    for tries_left in reversed(range(RESTORES)):
        found = json.loads(BlockingClient(config).read("GET", "checkpoints/latest", tell=tell))[
            "checkpoint"
        ]
        if found is None or found["attempt"] <= later_than:
            write_rows(config, [])
            return ""
        try:
            fetch(config, found["files"], folder, tell, direct=bool(found.get("direct")))
        except TransferFailed as error:
            if tries_left and not isinstance(error, StorageTimeout):
                continue  # a newer checkpoint has replaced this one meanwhile
            raise
        files = len(found["files"])
        size = f"{files} file{'' if files == 1 else 's'}, {found['bytes'] / 2**20:.1f} MiB"
        return f"resuming from checkpoint {found['number']} of attempt {found['attempt']}: {size}"
    raise AssertionError("unreachable")


def fetch(
    config: AgentConfig,
    files: list[dict[str, object]],
    folder: str,
    tell: Tell | None = None,
    *,
    direct: bool = False,
) -> None:
    """Download all files to a new folder, which then replaces `folder`. Raises TransferFailed,
    StorageTimeout, OSError.
    """
    from .folder import inside

    fresh, line = (
        folder + ".cavvy-new",
        BlockingClient(config),
    )  # a folder with the same parent as `folder`, so that one rename replaces the old folder
    remove_tree(fresh)
    os.makedirs(fresh)
    for each in files:
        path = inside(fresh, str(each["path"]))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if each.get("link") is not None:
            os.symlink(str(each["link"]), path)
            continue
        if direct:
            from ..data.transfer import fetch_file

            fetch_file(config, str(each["sha256"]), path, tell)
        else:
            fetch_to(line, str(each["sha256"]), path)
        extents = each.get("data")
        if isinstance(extents, list):
            restore_holes(path, extents, int(str(each["size"])))
        os.chmod(path, int(str(each["mode"])) & 0o777)
        os.utime(path, ns=(int(str(each["mtime_ns"])),) * 2)
    remove_tree(folder)
    os.rename(fresh, folder)
    write_rows(config, sorted(files, key=lambda row: str(row["path"])))
