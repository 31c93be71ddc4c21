"""Moves a checkpoint's files to and from the job's bucket, by requests that the control plane
signs; may block.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import os
import urllib.error

from ..work.blobs import CHUNK
from .transfer import EXPIRED, RetryBudget, TransferClient, TransferFailed, request, say_fault

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..config import AgentConfig

FAULTS = (OSError, http.client.HTTPException)  # urllib.error.URLError is an OSError


def send_file(
    config: AgentConfig,
    name: str,
    size: int,
    read: Callable[[int, int], bytes],
    tell: Callable[[str], None] | None = None,
) -> None:
    """Send the file of this content; `read(offset, length)` gives its bytes. Raises TransferFailed
    and what `read` does.

    `tell` hears of long waits.
    """
    transfers = TransferClient(config, f"checkpoint/{name}", tell)
    how = transfers.read("POST", "", {"size": size})
    upload, part_bytes = str(how["upload"]), int(str(how["part_bytes"]))
    tags = []
    try:
        for number, at in enumerate(range(0, max(size, 1), part_bytes), 1):
            tags.append(
                _put(
                    transfers,
                    name,
                    upload,
                    number,
                    read(at, min(part_bytes, size - at)),
                    RetryBudget(tell),
                )
            )
        transfers.read("POST", "/complete", {"upload": upload, "size": size, "tags": tags})
    except BaseException:  # whatever `read` raises
        if upload:
            transfers.abort({"upload": upload})
        raise


def fetch_file(
    config: AgentConfig, name: str, path: str, tell: Callable[[str], None] | None = None
) -> None:
    """Make `path` the file of this content; what came already is not asked for again. Raises
    TransferFailed, OSError.

    `tell` hears of long waits.
    """
    transfers, patience = TransferClient(config, f"checkpoint/{name}", tell), RetryBudget(tell)
    found = hashlib.sha256()
    with open(path, "wb") as file:
        signed = transfers.read("GET")
        while True:
            try:
                at = file.tell()
                with request(signed, None, {"Range": f"bytes={at}-"} if at else {}) as reply:
                    if at and reply.status != 206:
                        file.seek(0)
                        file.truncate()
                        found = hashlib.sha256()
                    _copy(reply, file, found, patience)
                break
            except urllib.error.HTTPError as error:
                status = error.code
                error.close()
                if status == 416:  # nothing is left
                    break
                if status in (404, 410):
                    raise TransferFailed(f"the bucket has no {name[:12]} (any more)") from error
                patience.lose(
                    f"the bucket answers with status {status} for {name[:12]}", status=status
                )
                if status in EXPIRED:
                    signed = transfers.read("GET")
            except FAULTS as error:
                patience.lose(
                    f"the bucket breaks off for {name[:12]}: {say_fault(error, signed['url'])}",
                    error,
                )
    if found.hexdigest() != name:
        os.unlink(path)
        raise TransferFailed(f"what the bucket has for {name[:12]} is something else")


def _copy(
    reply: http.client.HTTPResponse, file: object, found: object, patience: RetryBudget
) -> None:
    left = reply.length
    while True:
        data = reply.read(CHUNK)
        if not data:
            break
        file.write(data)  # type: ignore[attr-defined]  # a file open for writing
        found.update(data)  # type: ignore[attr-defined]  # a hash
        patience.reset()
        left = None if left is None else left - len(data)
    if left:
        raise http.client.IncompleteRead(b"", left)


def _put(
    transfers: TransferClient,
    name: str,
    upload: str,
    number: int,
    data: bytes,
    patience: RetryBudget,
) -> str:
    """Send one part; its ETag."""
    asked = {"upload": upload, "part": number}
    signed = transfers.read("POST", "/parts", asked)
    headers = {"Content-MD5": base64.b64encode(hashlib.md5(data).digest()).decode()}
    while True:
        try:
            with request(signed, data, headers) as reply:
                reply.read()
                return reply.headers.get("ETag") or "-"
        except urllib.error.HTTPError as error:
            status = error.code
            error.close()
            patience.lose(f"the bucket answers with status {status} to {name[:12]}", status=status)
            if status in EXPIRED:
                signed = transfers.read("POST", "/parts", asked)
        except FAULTS as error:
            patience.lose(
                f"the bucket breaks off at {name[:12]}: {say_fault(error, signed['url'])}", error
            )
