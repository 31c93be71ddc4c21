"""Stores deferred calls in a folder, so that they survive a restart of the gateway.

Of a deferred call, `ID.call` is the request, `ID.sent` marks that a replica has received the
request, `ID.result` is the response, and `ID.index` identifies the owner of the call. Each file is
written under a temporary name and then renamed, so that no incomplete file is visible. The client
is notified after the file is on the disk.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from cavvy.domain.values import Struct


class StoredCall(Struct, frozen=True, kw_only=True):
    id: str
    service: str
    key_id: str  # ID of the client's key; "" if none was needed
    head: bytes  # head of the request, as the client sent it, without its Prefer field
    body: bytes


class StoredResult(Struct, frozen=True, kw_only=True):
    status_line: bytes
    lines: tuple[bytes, ...]
    body: bytes

    @property
    def status(self) -> int:
        return int(self.status_line.split(b" ")[1])


class KnownCall(Struct, kw_only=True):
    """The part of a call that is kept in memory."""

    service: str
    key_id: str
    expires_at: float  # wall-clock time
    done: bool


class CallStore:
    """Stores deferred calls in a folder. All methods block; one thread calls `expire` and `put`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def put(self, call: StoredCall, known: KnownCall) -> None:
        self._write(f"{call.id}.index", msgspec.msgpack.encode(known))
        self._write(f"{call.id}.call", msgspec.msgpack.encode(call))

    def mark_sent(self, call_id: str) -> None:
        (self._folder / f"{call_id}.sent").touch()

    def put_result(self, call_id: str, result: StoredResult) -> None:
        self._write(f"{call_id}.result", msgspec.msgpack.encode(result))
        for kind in ("call", "sent"):
            (self._folder / f"{call_id}.{kind}").unlink(missing_ok=True)

    def get_result(self, call_id: str) -> StoredResult | None:
        try:
            data = (self._folder / f"{call_id}.result").read_bytes()
        except FileNotFoundError:
            return None
        return msgspec.msgpack.decode(data, type=StoredResult)

    def remove(self, call_id: str) -> None:
        for kind in ("call", "sent", "result", "index"):
            (self._folder / f"{call_id}.{kind}").unlink(missing_ok=True)

    def list_known(self) -> dict[str, KnownCall]:
        """Return the calls that an earlier gateway process stored. Files of calls that are
        incomplete or too old are removed.
        """
        now = time.time()
        found = {}
        for path in sorted(self._folder.iterdir()):
            if path.suffix == ".new":
                path.unlink()
            elif path.suffix == ".index":
                known = msgspec.msgpack.decode(path.read_bytes(), type=KnownCall)
                known.done = (self._folder / f"{path.stem}.result").exists()
                request = self._folder / f"{path.stem}.call"
                if known.expires_at <= now or not (known.done or request.exists()):
                    self.remove(path.stem)
                else:
                    found[path.stem] = known
        return found

    def list_open(self) -> Iterator[tuple[StoredCall, bool]]:
        """Return each call without a result, oldest first, and whether a replica has received the
        call.
        """
        for path in sorted(self._folder.glob("*.call"), key=lambda each: each.stat().st_mtime_ns):
            call = msgspec.msgpack.decode(path.read_bytes(), type=StoredCall)
            yield call, path.with_suffix(".sent").exists()

    def _write(self, name: str, data: bytes) -> None:
        write_whole(self._folder / name, data)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file under a temporary name, and rename it when it is on the disk."""
    new = path.with_name(f"{path.name}.new")
    with open_new(new) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)


def open_new(path: Path) -> BinaryIO:
    """Open a new file that only this user may read."""
    return open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600))
