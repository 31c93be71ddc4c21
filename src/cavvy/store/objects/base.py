"""What every store of objects can do, and the errors it raises.

* ObjectError
  + ObjectMissing   there is no such object, bucket or container
  + ObjectDenied    the credentials are absent, wrong or may not do this; a person must act
  + ObjectTryAgain   a passing fault; the same call may work later

All calls block; the event loop calls them in threads. Keys are the part of the URL behind the
bucket.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol, runtime_checkable

PART_BYTES = 16 * 1024 * 1024  # of a part of an upload, at least
MOST_PARTS = 10_000  # of S3 and Google Cloud Storage; Azure takes 50,000


class ObjectError(Exception):
    """Base of all errors of this module; the message is for users."""


class ObjectMissing(ObjectError):
    """There is no such object, bucket or container."""


class ObjectDenied(ObjectError):
    """The credentials are absent, wrong or may not do this."""


class ObjectTryAgain(ObjectError):
    """A passing fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One object. `md5` (hex) is of its content, where the store knows it; `tag` changes when
    the content does.
    """

    key: str
    size: int | None  # None: a web server that does not say
    tag: str = ""
    md5: str = ""
    changed_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedRequest:
    """A request that needs no credentials until it expires: send `headers` with it, and no
    others that sign.
    """

    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)


class ObjectReader(Protocol):
    """A place that objects are read from."""

    def head(self, key: str) -> ObjectInfo | None:
        """None where there is no such object. Raises ObjectDenied, ObjectTryAgain."""

    def list(
        self, prefix: str, after: str = "", limit: int = 1000
    ) -> tuple[Sequence[ObjectInfo], str]:
        """A page of what begins with `prefix`, and what to ask for the next one, "" after the
        last.
        """

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """The bytes. Raises ObjectMissing."""


@runtime_checkable
class ObjectSigner(Protocol):
    """A place whose objects others may read by a request that it signs."""

    def sign_get(self, key: str, expires_s: int) -> SignedRequest: ...


@runtime_checkable
class ObjectBucket(ObjectReader, ObjectSigner, Protocol):
    """A place that objects are read from and written to, by itself or by others whose requests it
    signs.

    An upload in parts counts only when it is completed; parts are numbered from 1 and, but for the
    last, PART_BYTES large or larger.
    """

    def put(self, key: str, data: bytes) -> None: ...
    def delete(self, key: str) -> None:
        """Gone already is fine."""

    def begin(self, key: str) -> str:
        """The id of a new upload in parts."""

    def sign_put(self, key: str, expires_s: int, upload: str = "", part: int = 0) -> SignedRequest:
        """Of a part of an upload, or of the whole object."""

    def complete(self, key: str, upload: str, tags: Sequence[str]) -> None:
        """All parts are there, with these ETags in order. Completed already is fine."""

    def abort(self, key: str, upload: str) -> None: ...


@runtime_checkable
class RelayedObjects(ObjectReader, Protocol):
    """A place that only we can reach: what others read and write goes through us."""

    def write(self, key: str, offset: int, data: bytes, size: int) -> None:
        """Write a part of a file of `size` bytes; the last one puts the file in its place."""


def part_bytes(size: int) -> int:
    """How large the parts of an upload of `size` bytes are: whole MiB, at most MOST_PARTS of
    them.
    """
    mib = 1024 * 1024
    needed = -(-size // (MOST_PARTS - 1))
    return max(PART_BYTES, -(-needed // mib) * mib)
