"""The interfaces of object stores, and their errors.

* ObjectError
  + ObjectMissing   there is no such object, bucket or container
  + ObjectDenied    the credentials are missing, wrong or insufficient; a person must act
  + ObjectTryAgain  a temporary fault; the same call may succeed later

All calls block; the event loop calls them in threads. Keys are the part of the URL after the
bucket.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import ClassVar, Protocol, runtime_checkable

PART_BYTES = 16 * 1024 * 1024  # minimum bytes of a part
MOST_PARTS = 10_000  # limit of S3 and Google Cloud Storage; Azure allows 50,000


class ObjectError(Exception):
    """Base of all errors of this module; the message is for users."""


class ObjectMissing(ObjectError):
    """There is no such object, bucket or container."""


class ObjectDenied(ObjectError):
    """The credentials are missing, wrong or insufficient."""


class ObjectTryAgain(ObjectError):
    """A temporary fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One object. `md5` (hexadecimal) is the MD5 of its content, if the store knows it; `tag`
    changes with the content.
    """

    key: str
    size: int | None  # None if the object is on a web server that does not report its size
    tag: str = ""
    md5: str = ""
    changed_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedRequest:
    """A request that needs no credentials until it expires. Send exactly its `headers`, because the
    signature covers them.
    """

    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)


class ObjectReader(Protocol):
    """A source that objects can be read from."""

    def head(self, key: str) -> ObjectInfo | None:
        """The object's properties, or None if it does not exist. Raises ObjectDenied,
        ObjectTryAgain.
        """

    def list(
        self, prefix: str, after: str = "", limit: int = 1000
    ) -> tuple[Sequence[ObjectInfo], str]:
        """A page of the objects whose keys begin with `prefix`, and the value of `after` for the
        next page ("" on the last page).
        """

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """The object's `length` bytes from `offset` on; None means all of them. Raises
        ObjectMissing."""


@runtime_checkable
class ObjectSigner(Protocol):
    """A source that signs requests, so that others can read its objects."""

    def sign_get(self, key: str, expires_s: int) -> SignedRequest: ...


@runtime_checkable
class ObjectBucket(ObjectReader, ObjectSigner, Protocol):
    """A store that the server accesses directly, and that others access with requests that the
    server signs.

    An upload in parts has no effect until it is completed. Parts are numbered from 1 and have at
    least PART_BYTES, except the last part. `bills_parts`: whether the store keeps and bills the
    parts until the upload is completed or aborted.
    """

    bills_parts: ClassVar[bool]

    def put(self, key: str, data: bytes) -> None: ...
    def delete(self, key: str) -> None:
        """Delete an object. Succeeds if the object does not exist."""

    def begin(self, key: str) -> str:
        """Start an upload in parts; returns its id."""

    def sign_put(self, key: str, expires_s: int, upload: str = "", part: int = 0) -> SignedRequest:
        """A signed request to send one part of an upload, or the whole object if `upload` is ""."""

    def complete(self, key: str, upload: str, tags: Sequence[str]) -> None:
        """Complete an upload whose parts have these ETags, in order. Repeating the call
        succeeds.
        """

    def abort(self, key: str, upload: str) -> None: ...


@runtime_checkable
class RelayedObjects(ObjectReader, Protocol):
    """A store that only the server can reach; the server relays the reads and writes of others."""

    def write(self, key: str, offset: int, data: bytes, size: int) -> None:
        """Write a part of a file of `size` bytes; the file is complete when its last part is
        written.
        """


def part_bytes(size: int) -> int:
    """The size of each part for an upload of `size` bytes: whole MiB, so that at most MOST_PARTS
    parts are needed.
    """
    mib = 1024 * 1024
    needed = -(-size // (MOST_PARTS - 1))
    return max(PART_BYTES, -(-needed // mib) * mib)
