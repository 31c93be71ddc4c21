"""Connects this program's standard input and output to the first process of the pod. The control
plane runs this program in the pod, through `tunnel.sh`.
"""

import os
import select
import socket
import sys

PATH = "/cavvy/run/tunnel.sock"
CHUNK = 65536


def main() -> int:
    tunnel = socket.socket(socket.AF_UNIX)
    tunnel.connect(PATH)
    poll = select.poll()
    poll.register(0, select.POLLIN)
    poll.register(tunnel, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            data = os.read(0, CHUNK) if descriptor == 0 else tunnel.recv(CHUNK)
            if not data:
                return 0
            if descriptor == 0:
                tunnel.sendall(data)
            while descriptor and data:
                data = data[os.write(1, data) :]


if __name__ == "__main__":
    sys.exit(main())
