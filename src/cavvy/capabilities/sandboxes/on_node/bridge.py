"""Carries bytes between standard input and output and the socket of the sandbox host of this job,
for callers on other machines. `python3 bridge.py`, in the working folder.
"""

from __future__ import annotations

import os
import selectors
import socket
import time

_WAIT_S = 60.0
_PIECE = 1 << 16
# beside the files that were sent with the job
_SOCKET = os.path.abspath(os.path.join(__file__, *[os.pardir] * 5, "host.sock"))


def main() -> None:
    """Carry until one side ends."""
    made = _connect()
    chooser = selectors.DefaultSelector()
    chooser.register(made, selectors.EVENT_READ)
    chooser.register(0, selectors.EVENT_READ)
    while True:
        for key, _ in chooser.select():
            if key.fileobj is made:
                data = made.recv(_PIECE)
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(1, rest) :]
            else:
                data = os.read(0, _PIECE)
                made.sendall(data)
            if not data:
                return


def _connect() -> socket.socket:
    until = time.monotonic() + _WAIT_S
    while True:
        made = socket.socket(socket.AF_UNIX)
        try:
            made.connect(os.path.relpath(_SOCKET))  # a path of a socket has at most 107 bytes
            return made
        except OSError:
            made.close()
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


if __name__ == "__main__":
    main()
