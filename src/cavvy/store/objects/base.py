"""The interfaces of object stores, and their errors.

* ObjectError
  + ObjectMissing   there is no such object, bucket or container
  + ObjectDenied    the credentials are missing, wrong or insufficient; a person must act
  + ObjectTryAgain  a temporary fault; the same call may succeed later

All calls block; the event loop calls them in threads. An object's key is the part of the object's
URL after the bucket.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import ClassVar, Protocol, runtime_checkable

from cavvy.domain.values import Struct, field

PART_BYTES = 16 * 1024 * 1024  # minimum bytes of a part, except of the last part
MOST_PARTS = 10_000  # limit of S3 and Google Cloud Storage; Azure allows 50,000


class ObjectError(Exception):
    """Base class of all errors of this module. The message is written for users."""


class ObjectMissing(ObjectError):
    """Raised if the object, bucket or container does not exist."""


class ObjectDenied(ObjectError):
    """Raised if the credentials are missing, wrong or insufficient."""


class ObjectTryAgain(ObjectError):
    """Raised for a temporary fault; the same call may succeed later."""


class ObjectInfo(Struct, frozen=True, kw_only=True):
    """The properties of one object. `md5` and `sha256` are hashes of the object's content in
    hexadecimal, or "" if they are not known. `tag` changes whenever the content changes.
    """

    key: str
    size: int | None  # None if the object is on a web server that does not report the size
    tag: str = ""
    md5: str = ""
    sha256: str = ""
    changed_at: datetime | None = None


class SignedRequest(Struct, frozen=True, kw_only=True):
    """A request that can be sent without credentials until it expires. The request must be sent
    with exactly these `headers`, because the signature covers them.
    """

    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)


class ObjectReader(Protocol):
    """A store from which objects can be read."""

    def head(self, key: str) -> ObjectInfo | None:
        """Return the object's properties, or None if the object does not exist. Raises
        ObjectDenied, ObjectTryAgain.
        """

    def list(
        self, prefix: str, after: str = "", limit: int = 1000
    ) -> tuple[Sequence[ObjectInfo], str]:
        """Return a page of the objects whose keys begin with `prefix`, and the value of `after` for
        the next page ("" on the last page).
        """

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """Return `length` bytes of the object from `offset` on, or all bytes from `offset` on if
        `length` is None. Raises ObjectMissing.
        """


@runtime_checkable
class ObjectSigner(Protocol):
    """A store that signs requests, so that nodes can read its objects without credentials."""

    def sign_get(self, key: str, expires_s: int) -> SignedRequest | None:
        """Return a signed request, or None if only the server can read the object."""


@runtime_checkable
class ObjectBucket(ObjectReader, ObjectSigner, Protocol):
    """A store that the server accesses directly, and that nodes access with signed requests from
    the server.

    An upload in parts has no effect until it is completed. Parts are numbered from 1. Each part
    except the last has at least PART_BYTES bytes. `bills_parts` states whether the store keeps and
    bills the parts until the upload is completed or aborted.
    """

    bills_parts: ClassVar[bool]

    def put(self, key: str, data: bytes) -> None: ...
    def delete(self, key: str) -> None:
        """Delete the object, if it exists."""

    def begin(self, key: str) -> str:
        """Start an upload in parts and return its ID."""

    def sign_put(self, key: str, expires_s: int, upload: str = "", part: int = 0) -> SignedRequest:
        """Sign a request that sends one part of an upload or, if `upload` is "", the whole
        object."""

    def complete(self, key: str, upload: str, tags: Sequence[str]) -> None:
        """Complete an upload whose parts have these ETags, in this order. The caller can safely
        repeat the call.
        """

    def abort(self, key: str, upload: str) -> None: ...


@runtime_checkable
class RelayedObjects(ObjectReader, Protocol):
    """A store that only the server can access. The server relays the reads and writes of nodes."""

    def write(self, key: str, offset: int, data: bytes, size: int) -> None:
        """Write a part of a file of `size` bytes. The file is complete when its last part has been
        written.
        """


def part_bytes(size: int) -> int:
    """Return the number of bytes in each part of an upload of `size` bytes. The size is a whole
    number of MiB, and large enough that at most MOST_PARTS parts are needed.
    """
    mib = 1024 * 1024
    needed = -(-size // (MOST_PARTS - 1))
    return max(PART_BYTES, -(-needed // mib) * mib)
