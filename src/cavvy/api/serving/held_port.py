"""Reserves a port of this machine for one replica, even while no socket listens on the port."""

import socket

LOCAL = "127.0.0.1"


def hold_port() -> socket.socket:
    """Return a socket that is bound to a free port. Linux allows another socket that sets
    SO_REUSEADDR to listen on this port, but does not assign the port to programs that request any
    free port.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((LOCAL, 0))
    return held
