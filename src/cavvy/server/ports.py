"""Opens the TCP ports on which the server listens."""

import errno
import socket
import time

# The system can give a port that is in none of its programs' settings to an outgoing connection
# while the server restarts. Most of these connections end soon.
WAIT_S = 5.0
_PAUSE_S = 0.1


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
