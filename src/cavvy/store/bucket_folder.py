"""A folder in a bucket whose files have copies in a local folder. Servers without a shared folder
store blobs and downloads in a BucketFolder. All methods block.
"""

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import ParamSpec, TypeVar

from cavvy.domain.values import replace
from cavvy.store.base import StoreUnusable
from cavvy.store.objects.base import (
    ObjectBucket,
    ObjectError,
    ObjectInfo,
    ObjectMissing,
    ObjectTryAgain,
    part_bytes,
)
from cavvy.store.objects.http import ask, check

AT_ONCE = 16  # requests that one call sends at the same time
_TRIES = 3
_PIECE = 1 << 24  # bytes that are read at once
_SIGNED_S = 300  # how many seconds a signed request for a part is valid
P = ParamSpec("P")
T = TypeVar("T")


class BucketFolder:
    """The objects whose keys begin with `prefix`, which ends with a slash. The object `prefix` +
    NAME has the content of the file `root`/NAME. Objects are complete or do not exist. The methods
    raise StoreUnusable.
    """

    def __init__(
        self,
        bucket: ObjectBucket,
        url: str,
        prefix: str,
        root: Path,
        now: Callable[[], datetime],
    ) -> None:
        self._bucket, self.url, self._prefix, self.root = bucket, url, prefix, root
        self.now = now

    def below(self, name: str) -> "BucketFolder":
        """Return a subfolder of this folder."""
        return BucketFolder(
            self._bucket, self.url, f"{self._prefix}{name}/", self.root / name, self.now
        )

    def name_of(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def find(self, name: str) -> ObjectInfo | None:
        return self._try(self._bucket.head, self._prefix + name)

    def find_all(self, names: Sequence[str]) -> Sequence[ObjectInfo | None]:
        """Call `find` for many names at the same time."""
        if len(names) < 2:
            return [self.find(name) for name in names]
        with ThreadPoolExecutor(AT_ONCE, "bucket") as pool:
            return list(pool.map(self.find, names))

    def list(self, name: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose names begin with `name`. The keys of the yielded objects do not
        contain the folder's prefix."""
        after = ""
        while True:
            page, after = self._try(self._bucket.list, self._prefix + name, after)
            for each in page:
                yield replace(each, key=each.key.removeprefix(self._prefix))
            if not after:
                return

    def put(self, name: str, data: bytes) -> None:
        self._try(self._bucket.put, self._prefix + name, data)

    def get(self, name: str, offset: int = 0, length: int | None = None) -> bytes | None:
        """Return bytes of an object, or None if the object does not exist."""
        try:
            return self._try(self._bucket.get, self._prefix + name, offset, length)
        except FileNotFoundError:
            return None

    def send(self, name: str, source: Path) -> None:
        """Upload a file, in parts if it is large. Raises OSError."""
        size = source.stat().st_size
        if size <= _PIECE:
            self.put(name, source.read_bytes())
            return
        key, each = self._prefix + name, part_bytes(size)
        upload = self._try(self._bucket.begin, key)
        try:
            with source.open("rb") as file:
                tags = [
                    self._send_part(key, upload, number, file.read(each))
                    for number in range(1, -(-size // each) + 1)
                ]
            self._try(self._bucket.complete, key, upload, tags)
        except BaseException:
            self._try(self._bucket.abort, key, upload)
            raise

    def _send_part(self, key: str, upload: str, number: int, data: bytes) -> str:
        def send() -> str:
            signed = self._bucket.sign_put(key, _SIGNED_S, upload, number)
            answer = check(ask(signed.method, signed.url, data, signed.headers), key)
            return answer.headers.get("etag", "")

        return self._try(send)

    def fetch(self, path: Path) -> bool:
        """Download the object of this file, unless the file exists. Return whether the file exists
        afterwards. Raises OSError.
        """
        return path.exists() or self.save(self.name_of(path), path)

    def save(self, name: str, path: Path) -> bool:
        """Download an object to a file. Return whether the object exists. Raises OSError."""
        if (found := self.find(name)) is None or found.size is None:
            return False
        part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
            with open(os.open(part, flags, 0o600), "wb") as file:
                for at in range(0, found.size, _PIECE):
                    data = self.get(name, at, _PIECE)
                    if data is None:
                        return False
                    file.write(data)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
        return True

    def delete(self, *names: str) -> None:
        """Delete objects, if they exist."""
        if not names:
            return
        with ThreadPoolExecutor(min(AT_ONCE, len(names)), "bucket") as pool:
            list(pool.map(lambda name: self._try(self._bucket.delete, self._prefix + name), names))

    def delete_all(self, name: str) -> int:
        """Delete all objects whose names begin with `name`, and return the size of these objects in
        bytes.
        """
        found = list(self.list(name))
        self.delete(*(each.key for each in found))
        return sum(each.size or 0 for each in found)

    def sweep(self, kept: frozenset[str], *, older_than: datetime) -> int:
        """Delete the objects that are older than `older_than`, unless `kept` contains the part of
        their name after the last slash. Return the total size of the deleted objects in bytes.
        """
        unwanted = [
            each
            for each in self.list()
            if each.key.rpartition("/")[2] not in kept
            and each.changed_at is not None
            and each.changed_at < older_than
        ]
        # an object may have been stored again meanwhile
        again = self.find_all([each.key for each in unwanted])
        unwanted = [
            each
            for each, now in zip(unwanted, again, strict=True)
            if now is not None and now.changed_at is not None and now.changed_at < older_than
        ]
        self.delete(*(each.key for each in unwanted))
        return sum(each.size or 0 for each in unwanted)

    def _try(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function again after a temporary failure. Raises FileNotFoundError,
        StoreUnusable."""
        for tries_left in reversed(range(_TRIES)):
            try:
                return call(*args, **kwargs)
            except ObjectMissing as error:
                raise FileNotFoundError(2, str(error)) from error
            except ObjectTryAgain as error:
                if not tries_left:
                    raise StoreUnusable(f"{self.url} does not answer: {error}") from error
            except ObjectError as error:
                raise StoreUnusable(
                    f"{self.url} refuses a request: {error}; check the keys and permissions of "
                    "the server for the bucket"
                ) from error
        raise AssertionError("unreachable")
