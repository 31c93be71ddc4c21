"""Uploading blobs: ask what is missing, send only that, over a few connections."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from remuda.client.errors import Lost, Unreachable

if TYPE_CHECKING:
    from remuda.client.client import Client

_CONNECTIONS = 4
_ASK_AT_ONCE = 5000  # names in one question: 335 kB
_PART = 1024 * 1024
_TRIES = 3

Source = bytes | str | os.PathLike[str]
Progress = Callable[[int, int], None]


def upload(client: "Client", project: str, blobs: Mapping[str, Source], progress: Progress | None) -> int:
    """Send what the server lacks; returns the bytes sent. Raises the first ApiError or OSError of any thread."""
    names = list(blobs)
    missing = [
        name
        for start in range(0, len(names), _ASK_AT_ONCE)
        for name in client.missing_blobs(project, names[start : start + _ASK_AT_ONCE])
    ]
    return _Upload(client, project, {name: blobs[name] for name in missing}, progress).run()


class _Upload:
    """One upload: threads take names from a queue until it is empty or one of them fails."""

    def __init__(self, client: "Client", project: str, blobs: Mapping[str, Source], progress: Progress | None) -> None:
        self._client, self._project, self._blobs, self._progress = client, project, blobs, progress
        self._total = sum(_size(source) for source in blobs.values())
        self._sent = 0
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._left: SimpleQueue[str] = SimpleQueue()

    def run(self) -> int:
        for name in self._blobs:
            self._left.put(name)
        if self._progress is not None:
            self._progress(0, self._total)
        threads = [threading.Thread(target=self._work) for _ in range(min(_CONNECTIONS, len(self._blobs)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure
        return self._total

    def _work(self) -> None:
        with self._client.sibling() as connection:
            while self._failure is None:
                try:
                    name = self._left.get_nowait()
                except Empty:
                    return
                try:
                    self._put(connection, name)
                except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
                    self._failure = error

    def _put(self, connection: "Client", name: str) -> None:
        source = self._blobs[name]
        target = f"/v1/projects/{self._project}/blobs/{name}"
        for attempt in range(_TRIES):
            try:
                if isinstance(source, bytes):
                    connection.send("PUT", target, source)
                else:
                    connection.send("PUT", target, _parts(source), length=_size(source), timeout_s=300)
                break
            except Unreachable as error:
                connection.close()
                if attempt + 1 == _TRIES or not isinstance(error, Lost):
                    raise
        with self._lock:
            self._sent += _size(source)
            if self._progress is not None:
                self._progress(self._sent, self._total)


def _size(source: Source) -> int:
    return len(source) if isinstance(source, bytes) else os.stat(source).st_size


def _parts(source: str | os.PathLike[str]) -> Iterator[bytes]:
    with open(source, "rb") as file:
        while part := file.read(_PART):
            yield part
