"""A bucket in memory, for tests of what uses buckets. It lists in pages of three."""

from collections.abc import Sequence
from datetime import datetime
from threading import Lock
from typing import ClassVar

from cavvy.store.objects.base import ObjectInfo, ObjectMissing, ObjectTryAgain, SignedRequest

_PAGE = 3


class MemoryBucket:
    """The objects of a bucket. The next `faults` requests fail, as those of a busy storage."""

    bills_parts: ClassVar = False

    def __init__(self, now: datetime) -> None:
        self.objects: dict[str, tuple[bytes, datetime]] = {}
        self.now, self.faults = now, 0
        self.puts = 0
        self._lock = Lock()

    def head(self, key: str) -> ObjectInfo | None:
        self._fail()
        found = self.objects.get(key)
        if found is None:
            return None
        return ObjectInfo(key=key, size=len(found[0]), changed_at=found[1])

    def list(
        self, prefix: str, after: str = "", limit: int = 1000
    ) -> tuple[Sequence[ObjectInfo], str]:
        self._fail()
        with self._lock:
            keys = sorted(key for key in self.objects if key.startswith(prefix) and key > after)
        page = [each for key in keys[:_PAGE] if (each := self.head(key)) is not None]
        return page, page[-1].key if len(keys) > _PAGE else ""

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        self._fail()
        if key not in self.objects:
            raise ObjectMissing(key)
        return self.objects[key][0][offset : None if length is None else offset + length]

    def put(self, key: str, data: bytes) -> None:
        self._fail()
        with self._lock:
            self.objects[key] = data, self.now
            self.puts += 1

    def delete(self, key: str) -> None:
        self._fail()
        with self._lock:
            self.objects.pop(key, None)

    def sign_get(self, key: str, expires_s: int) -> SignedRequest:
        raise NotImplementedError

    def begin(self, key: str) -> str:
        raise NotImplementedError

    def sign_put(self, key: str, expires_s: int, upload: str = "", part: int = 0) -> SignedRequest:
        raise NotImplementedError

    def complete(self, key: str, upload: str, tags: Sequence[str]) -> None:
        raise NotImplementedError

    def abort(self, key: str, upload: str) -> None:
        raise NotImplementedError

    def _fail(self) -> None:
        with self._lock:
            if self.faults:
                self.faults -= 1
                raise ObjectTryAgain("busy")
