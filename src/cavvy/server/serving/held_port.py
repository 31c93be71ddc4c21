"""Reserves a port of this machine for one replica, even while no socket listens on the port."""

import socket

LOCAL = "127.0.0.1"


def hold_port() -> socket.socket:
    """Reserve a free port: return a socket that is bound to it. While the socket exists, Linux does
    not assign the port to programs that request any free port. A program that sets SO_REUSEADDR can
    still listen on it.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((LOCAL, 0))
    return held
