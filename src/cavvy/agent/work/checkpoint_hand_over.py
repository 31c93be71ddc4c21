"""Takes a checkpoint: looks at the checkpoint folder, and uploads what the work has finished. May
block.

The upload runs in a separate process during the work. The process reports its result as a line of
JSON with the key `state`. The states `saved` and `refused` are final. After the other states, the
upload must be repeated: `void` (the work changed a file), `same` (the work has finished nothing
new), `silent` (the bucket does not respond) or `failed` (an error on this node). Earlier lines
(`full` or `waits`) report what the upload is waiting for.
"""

from __future__ import annotations

import json
import os
import time
from functools import partial

from ..http_client import RequestInvalid, StorageTimeout, TransferFailed
from .checkpoint_choice import FILLED_S
from .checkpoint_files import fingerprint, newest, written
from .checkpoint_upload import CheckpointUpload, FileChanged, copies_of
from .trees import remove_tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ..config import AgentConfig
    from .checkpoint_files import FileEntry

# the lengths of successive looks at a folder that the work is changing, and of the pauses between
# them, as shares of the first look
SHARES, PAUSE = (1, 0.5, 0.25, 0.12, *(0.06,) * 8), 0.13
MOST_UNSAFE = 100  # files that are being written, of which the result tells
# The state of the upload after each exception. The first class that matches applies. Unreadable
# files raise an OSError. The work can change the files of an invalid request.
FAILURES = {
    FileChanged: "void",
    RequestInvalid: "failed",
    StorageTimeout: "silent",
    TransferFailed: "refused",
    OSError: "failed",
}


def hand_over(
    config: AgentConfig,
    folder: str,
    *,
    copy_first: bool,
    since_ns: int,
    began_ns: int,
    quiet: bool = False,
    given: list[str] | None = None,
    settle_s: float = 0.0,
    filled_s: float = FILLED_S,
    cut_ns: int = 0,
    torn: frozenset[int] = frozenset(),
) -> int:
    """Upload the finished files that the control plane does not have, commit the checkpoint, and
    report the result.

    `since_ns`: time of the newest change already uploaded; `began_ns`: when this attempt's work
    started. `quiet`: do not report waits for the bucket. `copy_first`: first copy the files on this
    disk and upload the copies, because the work changes the files during each upload. `given`: see
    `list_checkpoint`. `settle_s`: seconds between two looks at the files; 0 after the work
    has ended. `filled_s`: see `LookResult`. `cut_ns`: when the work was killed, or 0. `torn`:
    inodes that the work had open when SIGTERM ended it.
    """
    os.nice(10)
    raise_limit()
    began = time.monotonic()
    try:
        look = partial(CheckpointUpload.look, config, folder, given, quiet=quiet)
        saving = _look_often(
            look,
            settle_s,
            copy_first=copy_first,
            filled_s=filled_s,
            ended=not settle_s,
            cut_ns=cut_ns,
            torn=torn,
        )
        result = _send_checkpoint(saving)
        result.update(
            {
                "files": saving.count,
                "bytes": saving.size,
                "newest_ns": newest(saving.entries),
                "wrote_s": round(written(folder, saving.entries, since_ns, began_ns)[1], 3),
                "print": fingerprint(saving.listed) if saving.is_all else "",
                "unnamed": saving.unnamed,
                "unsafe": dict(list(saving.unsafe.items())[:MOST_UNSAFE]),
                "seconds": round(time.monotonic() - began, 3),
            }
        )
        saving.close()
    except tuple(FAILURES) as error:
        state = next(state for kind, state in FAILURES.items() if isinstance(error, kind))
        result = {"state": state, "reason": str(error)}
    finally:
        remove_tree(copies_of(config))
    os.write(1, (json.dumps(result) + "\n").encode())
    return 0


def _look_often(
    look: Callable[[], CheckpointUpload],
    settle_s: float,
    *,
    copy_first: bool,
    **more: Any,
) -> CheckpointUpload:
    """Look at the folder until the work changes none of the newest checkpoint's files, each time
    for a shorter time, since a program may save often; and copy the files if the work may change
    them soon. Raises FileChanged, OSError."""
    since: list[FileEntry] | None = None
    restless: frozenset[str] | None = None
    shares = SHARES if settle_s else (1.0,)
    for left, share in zip(reversed(range(len(shares))), shares, strict=True):
        saving = look()
        time.sleep(settle_s * share)
        busy = saving.choose(
            since=since,
            restless=(restless or frozenset()) if not left else frozenset(),
            **more,
        )
        try:
            if not busy or not left:
                if copy_first or not saving.is_all:
                    saving.copy()
                return saving
        except FileChanged:
            if not left:
                raise
        since = saving.all_entries if since is None else since
        restless = busy if restless is None else restless & busy
        saving.close()
        time.sleep(settle_s * PAUSE)
    raise AssertionError("unreachable")


def _send_checkpoint(saving: CheckpointUpload) -> dict[str, object]:
    saving.hash()
    if saving.is_same():
        return {"state": "same"}
    number, sent = saving.send()
    saving.remember()
    return {"state": "saved", "number": number, "sent": sent}


def raise_limit() -> None:
    """Raise this process's limit on open files to the allowed maximum."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError):
            return
