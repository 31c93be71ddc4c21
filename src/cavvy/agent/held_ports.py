"""Holds the ports of a service's program on its node, from the start of the work until the program
uses them. A server chose these ports, and the program may bind them minutes later.

A held port is bound with SO_REUSEADDR and SO_REUSEPORT, and does not listen. Linux then gives it
to no other program that asks for any free port, nor to an outgoing connection. A program with one
of these options can listen on it. Nearly all servers set SO_REUSEADDR, among them ZeroMQ, asyncio,
Go and Rust, but a task may bind PORT without it, so PORT is free from when the task's command runs.
The other ports belong to engines, and are held until the work ends.
"""

from __future__ import annotations

import errno
import socket

from .documents import PORT_USES


class HeldPorts:
    """The held ports of one rank. `hold` returns why a port cannot be used, or ""."""

    def __init__(self) -> None:
        self._held: dict[str, socket.socket] = {}

    def hold(self, ports: dict[str, int]) -> str:
        for name, port in ports.items():
            try:
                self._held[name] = _bind(port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    continue  # such as a port that only root may bind: the program finds out
                self.close()
                what = PORT_USES.get(name, name)
                return (
                    f"port {port} of this node, for {what} (${name}), is used by another program; "
                    "the service starts a replica with another port"
                )
        return ""

    def release(self, name: str) -> None:
        held = self._held.pop(name, None)
        if held is not None:
            held.close()

    def close(self) -> None:
        for name in list(self._held):
            self.release(name)


def _bind(port: int) -> socket.socket:
    held = socket.socket()
    try:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            held.setsockopt(socket.SOL_SOCKET, option, 1)
        held.bind(("", port))
    except OSError:
        held.close()
        raise
    return held
