"""Defines and reads the format of the results that nodes store in a bucket while the server is
unreachable.

The object RANK/0 in the attempt's folder is a rank's manifest. The manifest contains the rank's
messages, and describes the bytes in the objects RANK/1, RANK/2 and so on.
"""

from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from cavvy.domain.checkpoints import CheckpointFile
from cavvy.store.objects.base import ObjectBucket, ObjectInfo

PARTS = 128  # maximum number of objects for the bytes of one rank
MOST_BYTES = 256 << 20  # maximum bytes of a part; the agent holds a part in memory
AT_ONCE = 4 << 20  # bytes read from the bucket in one request
_MANIFEST_BYTES = 16 << 20
_Position = Annotated[int, Meta(ge=0, lt=1 << 62)]
Read = Callable[[int, int], bytes]  # offset, length


class DepositPiece(Struct, frozen=True, kw_only=True):
    """A range of the stored bytes: undelivered log output, a checkpoint file, or an output file."""

    kind: Literal["log", "blob", "output"]
    bytes: Annotated[int, Meta(ge=0, le=PARTS * MOST_BYTES)]
    offset: _Position = 0  # for a log: the position in the whole log
    lost: _Position = 0  # for a log: the number of bytes lost just before `offset`
    index: Annotated[int, Meta(ge=0, le=100_000)] = 0  # for an output: its index in the task
    # SHA-256 of a checkpoint file, or path of an output file
    name: Annotated[str, Meta(max_length=4096)] = ""


class DepositedCheckpoint(Struct, frozen=True, kw_only=True):
    """A checkpoint that the node could not deliver. The fields are the same as in an agent's commit
    request.
    """

    made_at: Annotated[datetime, Meta(tz=True)]
    files: list[CheckpointFile]


class DepositManifest(Struct, frozen=True, kw_only=True):
    """A rank's undelivered messages, and a description of the rank's stored bytes."""

    nonce: str
    messages: list[dict[str, Any]]
    part_bytes: Annotated[int, Meta(ge=1, le=MOST_BYTES)]
    pieces: list[DepositPiece]
    checkpoint: DepositedCheckpoint | None = None


class InvalidDeposit(Exception):
    """Raised if the stored results contradict each other, because the node sent wrong data or the
    objects were changed."""


class DepositReader:
    """Reads one rank's objects. After each response of the bucket, `read` is called with the number
    of bytes that have been read. `read` can raise ObjectTryAgain to stop the reader. Methods block
    on the network and raise ObjectError.
    """

    def __init__(self, bucket: ObjectBucket, prefix: str, read: Callable[[int], None]) -> None:
        self._bucket, self._prefix, self._was_read = bucket, prefix, read
        self._objects: dict[str, ObjectInfo] = {}
        self._part_bytes = 1

    def read_manifest(self) -> bytes | None:
        """Return the manifest, or None if it is missing or empty. Raises InvalidDeposit if the
        manifest is too large.
        """
        objects, _ = self._bucket.list(self._prefix)
        self._objects = {each.key[len(self._prefix) :]: each for each in objects}
        if "0" not in self._objects or self._objects["0"].size == 0:
            return None
        if (self._objects["0"].size or 0) > _MANIFEST_BYTES:
            raise InvalidDeposit("the manifest is too large")
        content = self._bucket.get(f"{self._prefix}0", 0, _MANIFEST_BYTES)
        self._was_read(0)
        return content or None

    @property
    def stored_at(self) -> datetime | None:
        """The time at which the manifest was stored, according to the bucket's clock."""
        return self._objects["0"].changed_at

    def check(self, manifest: DepositManifest) -> None:
        """Raise InvalidDeposit if the parts do not have the sizes that the manifest implies."""
        self._part_bytes = manifest.part_bytes
        size = sum(each.bytes for each in manifest.pieces)
        for number, at in enumerate(range(0, size, manifest.part_bytes), 1):
            part = self._objects.get(str(number))
            if part is None or part.size != min(manifest.part_bytes, size - at):
                raise InvalidDeposit(f"part {number} is missing or has the wrong size")

    def from_offset(self, start: int) -> Read:
        """Return a function that reads stored bytes at an offset, relative to `start`."""
        return lambda offset, length: self._read(start + offset, length)

    def _read(self, offset: int, length: int) -> bytes:
        found = bytearray()
        while len(found) < length:
            part, at = divmod(offset + len(found), self._part_bytes)
            wanted = min(length - len(found), self._part_bytes - at, AT_ONCE)
            data = self._bucket.get(f"{self._prefix}{part + 1}", at, wanted)
            if len(data) != wanted:
                raise InvalidDeposit(f"part {part + 1} has changed")
            found += data
            self._was_read(offset + len(found))
        return bytes(found)
