"""Forwards a port of this computer to a port of a sandbox, through the connection to its host."""

import socket
import threading
from contextlib import suppress

from cavvy.capabilities.sandboxes.link import ProgramStream, SandboxLink
from cavvy.sdk.errors import CavvyError, InvalidArgument

_PIECE = 64 << 10


class PortForward:
    """Listens on 127.0.0.1. `port` is the port of this computer."""

    def __init__(self, link: SandboxLink, sandbox: str, port: int, local_port: int) -> None:
        if not isinstance(port, int) or not 0 < port < 65536:
            raise InvalidArgument(f"port={port!r:.50}", "use a number from 1 to 65535")
        self._link, self._sandbox, self._there = link, sandbox, port
        self._listener = socket.create_server(("127.0.0.1", local_port))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True, name="cavvy-port").start()

    def _accept(self) -> None:
        while True:
            made, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(made,), daemon=True).start()

    def _serve(self, made: socket.socket) -> None:
        with made:
            try:
                stream, _ = self._link.open(
                    "connect", outputs=(1,), sandbox=self._sandbox, port=self._there
                )
            except CavvyError:
                return  # nothing listens there, so the connection is closed
            threading.Thread(target=_send, args=(made, stream), daemon=True).start()
            with suppress(OSError):
                while data := stream.take(1):
                    made.sendall(data)
                made.shutdown(socket.SHUT_WR)
            self._link.kill(stream, 9)


def _send(made: socket.socket, stream: ProgramStream) -> None:
    with suppress(OSError, CavvyError):
        while data := made.recv(_PIECE):
            if not stream.write(data):
                return
        stream.write(b"", last=True)
