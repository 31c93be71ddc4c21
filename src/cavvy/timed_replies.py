"""HTTP connections whose replies have a time limit, even if a reply arrives byte by byte. The
timeout of a socket cannot limit such a reply, because the timeout starts again after each received
byte.
"""

import http.client
import io
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any


class _TimedStream(io.RawIOBase):
    """The bytes of a reply. Raises TimeoutError once `limit_s` seconds have passed."""

    def __init__(self, sock: socket.socket, limit_s: float) -> None:
        self._sock, self._raw = sock, sock.makefile("rb", buffering=0)
        self._limit_s, self._pause_s = limit_s, sock.gettimeout() or limit_s
        self._until = time.monotonic() + limit_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int | None:  # type: ignore[override]  # one type
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"the reply was not complete after {self._limit_s:g} s")
        self._sock.settimeout(min(self._pause_s, left))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _TimedReply(http.client.HTTPResponse):
    """A reply that must be complete within `limit_s` seconds."""

    def __init__(self, sock: socket.socket, *args: Any, limit_s: float, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp.close()
        self.fp = io.BufferedReader(_TimedStream(sock, limit_s))


def connect_timed(
    kind: type[http.client.HTTPConnection], limit_s: float
) -> Callable[..., http.client.HTTPConnection]:
    """Return a function that opens connections of this kind. A reply that is not complete after
    `limit_s` seconds raises TimeoutError. The `timeout` of a connection, in seconds, is the maximum
    time without any byte.
    """

    def make(host: str, **options: Any) -> http.client.HTTPConnection:
        connection = kind(host, **options)
        reply: Any = partial(_TimedReply, limit_s=limit_s)  # http.client only calls the class
        connection.response_class = reply
        return connection

    return make
