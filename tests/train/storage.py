"""Remote storage for tests: a folder whose transfers fail on request."""

from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem


class UnreliableStorage(LocalFileSystem):
    """The next `failures` transfers fail, and all removals if `keeps_all`."""

    failures = 0
    uploads = 0
    downloads = 0
    keeps_all = False

    def put_file(self, *args: Any, **options: Any) -> Any:
        self._fail()
        UnreliableStorage.uploads += 1
        return super().put_file(*args, **options)

    def get_file(self, *args: Any, **options: Any) -> Any:
        self._fail()
        UnreliableStorage.downloads += 1
        return super().get_file(*args, **options)

    def rm(self, *args: Any, **options: Any) -> Any:
        if UnreliableStorage.keeps_all:
            raise PermissionError("removal is not allowed")
        return super().rm(*args, **options)

    def _fail(self) -> None:
        if UnreliableStorage.failures:
            UnreliableStorage.failures -= 1
            raise OSError("the storage does not answer")


def use_unreliable_storage() -> None:
    """URLs that begin with file:// name unreliable storage in this process."""
    fsspec.register_implementation("file", UnreliableStorage, clobber=True)
