"""The file in which HAProxy lists the requests that it has completed, for the time after HAProxy is
killed.

HAProxy maps the file into its memory as a ring, so the operating system keeps what a killed HAProxy
has written, and a line takes no system call. The file is read once its HAProxy has ended; until
then, HAProxy's statistics are complete.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from stat import S_ISREG

from cavvy.domain.values import Struct

RING_BYTES = 8 << 20  # the lines of at least 80,000 requests
# what HAProxy writes for a request: the server, the end in microseconds since 1970, and the time
# that the request took in milliseconds, which is -1 if the client left before the response
RING_LINE = "%b/%s %[date(0,us)] %Ta"
_LINE = re.compile(rb"svc-([a-z0-9-]+)/([!-.0-~]+) (\d{16}) (-?\d{1,12})(?!\d)")


class EndedRequests(Struct, frozen=True, kw_only=True):
    """The completed requests of a server of HAProxy."""

    requests: int = 0
    active_s: float = 0.0


def make_ring(path: Path) -> None:
    """Create the file, with all its blocks: a write to a mapped file on a full disk would kill
    HAProxy. Raises OSError.
    """
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        try:
            file.write(bytes(RING_BYTES))
            file.flush()
        except OSError:
            path.unlink()
            raise


def load_ring(path: Path) -> bytes:
    """Return the contents of the file, but no more than HAProxy writes. What is no file, such as a
    pipe, counts as empty. Raises OSError, also for a link.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        return file.read(RING_BYTES) if S_ISREG(os.fstat(fd).st_mode) else b""


def read_ring(data: bytes, since: Callable[[str], int]) -> dict[tuple[str, str], EndedRequests]:
    """Return the requests that ended after the time that `since` returns for their service, in
    microseconds since 1970. The keys are the services and their servers.
    """
    found: dict[tuple[str, str], EndedRequests] = {}
    for line in _LINE.finditer(data):
        service, server = line[1].decode(), line[2].decode()
        if int(line[3]) > since(service):
            before = found.get((service, server), EndedRequests())
            found[service, server] = EndedRequests(
                requests=before.requests + 1,
                active_s=before.active_s + max(int(line[4]), 0) / 1000,
            )
    return found
