"""Joins its input and output to the first process of the pod; the control plane runs it there, by
`tunnel.sh`.

It takes the bare `_socket` for the reason that `init.py` gives.
"""

import _socket
import os
import select
import sys

PATH = "/cavvy/run/line.sock"
CHUNK = 65536


def main() -> int:
    line = _socket.socket(_socket.AF_UNIX)
    line.connect(PATH)
    poll = select.poll()
    poll.register(0, select.POLLIN)
    poll.register(line, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            data = os.read(0, CHUNK) if descriptor == 0 else line.recv(CHUNK)
            if not data:
                return 0
            if descriptor == 0:
                line.sendall(data)
            while descriptor and data:
                data = data[os.write(1, data) :]


if __name__ == "__main__":
    sys.exit(main())
