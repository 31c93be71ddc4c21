"""Uploads the blobs that the server does not have, over a few connections. Small blobs are sent in
packs.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from cavvy.client.errors import ApiError
from cavvy.client.packs import PACK_BLOBS, PACK_BYTES, SMALL, make_pack, size_in_pack

if TYPE_CHECKING:
    from cavvy.client.client import ApiClient
    from cavvy.client.transport import HttpAnswer

_CONNECTIONS = 4
_ASK_AT_ONCE = 5000  # maximum number of names in one request, which then has 335 kB
_PART = 1024 * 1024
# maximum bytes of a pack; small enough to show progress on a slow connection
_PACK = PACK_BYTES // 4
_WAIT_S = 270.0  # seconds that the server may need to store a pack or a large blob

Source = bytes | str | os.PathLike[str]
Progress = Callable[[int, int], None]


def upload(
    client: "ApiClient", project: str, blobs: Mapping[str, Source], progress: Progress | None
) -> int:
    """Upload the missing blobs, and return the number of bytes sent. Raises the first ApiError or
    OSError of any thread.
    """
    names = list(blobs)
    missing = [
        name
        for start in range(0, len(names), _ASK_AT_ONCE)
        for name in client.missing_blobs(project, names[start : start + _ASK_AT_ONCE])
    ]
    return _Upload(client, project, {name: blobs[name] for name in missing}, progress).run()


class _Upload:
    """One upload. Threads take packs of names from a queue until the queue is empty or a thread has
    failed."""

    def __init__(
        self,
        client: "ApiClient",
        project: str,
        blobs: Mapping[str, Source],
        progress: Progress | None,
    ) -> None:
        self._client, self._project, self._blobs, self._progress = client, project, blobs, progress
        self._sizes = {name: _size(source) for name, source in blobs.items()}
        self._total = sum(self._sizes.values())
        self._packs = True  # False once a server has refused a pack because it is too old for packs
        self._sent = 0
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._left: SimpleQueue[list[str]] = SimpleQueue()

    def run(self) -> int:
        packs = _divide(self._sizes)
        for names in packs:
            self._left.put(names)
        if self._progress is not None:
            self._progress(0, self._total)
        threads = [
            threading.Thread(target=self._work) for _ in range(min(_CONNECTIONS, len(packs)))
        ]
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
                    names = self._left.get_nowait()
                except Empty:
                    return
                try:
                    self._send(connection, names)
                except BaseException as error:  # noqa: BLE001 - raised again by run()
                    self._failure = error

    def _send(self, connection: "ApiClient", names: list[str]) -> None:
        if len(names) > 1 and self._packs:
            try:
                self._put(connection, "pack", make_pack((name, self._read(name)) for name in names))
                self._count(names)
                return
            except ApiError as error:
                # An older server takes "pack" for the name of a blob, and refuses it as an invalid
                # hash.
                if error.status not in (404, 405) and error.code != "invalid-request":
                    raise
                self._packs = False
        for name in names:
            if self._failure is not None:
                return
            self._put(connection, name, self._blobs[name])
            self._count([name])

    def _put(self, connection: "ApiClient", name: str, source: Source) -> None:
        target = f"/v1/projects/{self._project}/blobs/{name}"

        def send() -> "HttpAnswer":
            body = source if isinstance(source, bytes) else _parts(source)
            return connection.send("PUT", target, body, length=_size(source), wait_s=_WAIT_S)

        connection.repeat(send)

    def _read(self, name: str) -> bytes:
        """Read the bytes of the blob, up to its original size. If the file has changed, its hash
        differs, and the server refuses the blob.
        """
        source = self._blobs[name]
        if isinstance(source, bytes):
            return source
        with open(source, "rb") as file:
            return file.read(self._sizes[name])

    def _count(self, names: list[str]) -> None:
        with self._lock:
            self._sent += sum(self._sizes[name] for name in names)
            if self._progress is not None:
                self._progress(self._sent, self._total)


def _divide(sizes: Mapping[str, int]) -> list[list[str]]:
    """Divide blobs into packs. Each blob larger than SMALL bytes has its own pack."""
    packs = [[name] for name, size in sizes.items() if size > SMALL]
    room, names = _PACK, list[str]()
    for name, size in sizes.items():
        if size > SMALL:
            continue
        if names and (room < size_in_pack(size) or len(names) == PACK_BLOBS):
            packs.append(names)
            room, names = _PACK, []
        names.append(name)
        room -= size_in_pack(size)
    return [*packs, names] if names else packs


def _size(source: Source) -> int:
    return len(source) if isinstance(source, bytes) else os.stat(source).st_size


def _parts(source: str | os.PathLike[str]) -> Iterator[bytes]:
    with open(source, "rb") as file:
        while part := file.read(_PART):
            yield part
