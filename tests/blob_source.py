"""A server that gives blobs, over a connection that breaks."""

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace

from cavvy.client import ConnectionLost


class BlobSource:
    """A server's blobs, which loses the connection after `breaks` bytes of each answer. Without
    `ranges`, it sends the whole blob, whatever is asked."""

    def __init__(self, blobs: dict[str, bytes], breaks: int = 100, ranges: bool = True) -> None:
        self.blobs, self.breaks, self.ranges, self.sent = blobs, breaks, ranges, 0

    def call(self, method: str, path: str, **_: object) -> SimpleNamespace:
        return SimpleNamespace(body=self.blobs[path.rpartition("/")[2]])

    def send(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        take: Callable[[int, bytes], None],
        **_: object,
    ) -> None:
        asked = headers.get("Range", "bytes=0-") if self.ranges else "bytes=0-"
        start = int(asked.removeprefix("bytes=").removesuffix("-"))
        rest = self.blobs[path.rpartition("/")[2]][start:]
        for each in rest[: self.breaks]:
            take(206 if start else 200, bytes([each]))
            self.sent += 1
        if len(rest) > self.breaks:
            raise ConnectionLost("connection-lost", "the connection ended")

    def repeat(self, send: Callable[[], None]) -> None:
        with suppress(ConnectionLost):
            return send()
        send()
