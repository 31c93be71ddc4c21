"""Uploads checkpoint files to the job's bucket and downloads them. All functions may block."""

from __future__ import annotations

import os

from ..allowed_folders import AllowedFolders
from ..http_client import TransferClient
from .transfer import ObjectDownload, ObjectUpload, save_object

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..config import AgentConfig

    Tell = Callable[[str], None]


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
