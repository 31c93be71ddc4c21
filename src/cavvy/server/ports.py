"""Opens the TCP ports on which the server listens, and reserves ports for replicas."""

import errno
import socket
import time

# The system can give a port that is in none of its programs' settings to an outgoing connection
# while the server restarts. Most of these connections end soon.
WAIT_S = 5.0
_PAUSE_S = 0.1
LOCAL = "127.0.0.1"


def open_port(
    host: str, port: int, family: int, *, wait_s: float = 0.0, reuse_port: bool = False
) -> socket.socket:
    """Listen on a port. If another socket uses the port, try again for `wait_s` seconds. Blocks.
    Raises OSError.
    """
    end = time.monotonic() + wait_s
    while True:
        try:
            return socket.create_server(
                (host, port), family=family, backlog=1024, reuse_port=reuse_port
            )
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= end:
                raise
        time.sleep(_PAUSE_S)


def hold_port() -> socket.socket:
    """Reserve a free port: return a socket that is bound to it. While the socket exists, Linux does
    not assign the port to programs that request any free port. A program that sets SO_REUSEADDR can
    still listen on it.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((LOCAL, 0))
    return held
