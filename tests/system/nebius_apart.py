"""The stand-in of Nebius, with its gRPC server in a process of its own: machines of a lab are forks of
the tests' process, and gRPC's threads do not survive a fork.

    python -m tests.system.nebius_apart SOCKET

runs that process. It passes each call on to the stand-in at the Unix socket, and ends when its
standard input does.
"""

import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

from tests.contract.nebius_stand_in import CallError, NebiusStandIn, serve_calls
from tests.waits import PATIENCE_S

_ROOT = Path(__file__).parents[2]


class NebiusApart(NebiusStandIn):
    """The API in front of a cloud in memory."""

    def serve(self) -> int:
        self._folder = tempfile.TemporaryDirectory(prefix="cavvy-nebius-")
        socket = f"{self._folder.name}/calls"
        self._listener = Listener(socket, "AF_UNIX")
        threading.Thread(target=self._accept, daemon=True).start()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.system.nebius_apart", socket],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=_ROOT,
        )
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=PATIENCE_S)
        self._listener.close()
        self._folder.cleanup()

    def _accept(self) -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                line = self._listener.accept()
                threading.Thread(target=self._answer, args=(line,), daemon=True).start()

    def _answer(self, line: Connection) -> None:
        with line:
            line.send(self.call(*line.recv()))


def main(socket: str) -> None:
    def pass_on(method: str, headers: Mapping[str, str], data: bytes) -> bytes | CallError:
        with Client(socket, "AF_UNIX") as line:
            line.send((method, headers, data))
            told: bytes | CallError = line.recv()
            return told

    server, port = serve_calls(pass_on)
    print(port, flush=True)
    sys.stdin.read()
    server.stop(0).wait()


if __name__ == "__main__":
    main(sys.argv[1])
