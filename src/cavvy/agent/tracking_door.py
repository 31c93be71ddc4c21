"""The door for tracking clients of the task: `$MLFLOW_TRACKING_URI` leads to this agent. What
answers is loaded when a client first connects.
"""

from __future__ import annotations

import os
import socket

from .control_client import complain
from .loop import READ

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from .loop import EventLoop
    from .work.tracking_server import TakeParams, TakeValues, TrackingServer

URI, TOKEN = "MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_TOKEN"
# Variables by which a task says itself where its runs go, or how it signs in there.
OWN = (URI, TOKEN, "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_INSECURE_TLS", "DATABRICKS_HOST")
ADDRESS = "127.0.0.1"
BACKLOG = 64


class TrackingDoor:
    """Listens on a port of the loopback interface. Only who knows the token, which stands in the
    environment of the task, is answered: other users of the machine reach the port, too.
    """

    def __init__(
        self, loop: EventLoop, folder: str, values: TakeValues, params: TakeParams
    ) -> None:
        self._loop, self._folder = loop, folder
        self._values, self._params = values, params
        self._server: TrackingServer | None = None
        self._socket: socket.socket | None = None
        self._token = ""

    def open(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return variables for the task, whose environment is `given`, or {} if it says itself
        where its runs go."""
        if any(name in given for name in OWN):
            return {}
        listener = socket.socket()
        try:
            listener.bind((ADDRESS, 0))
            listener.listen(BACKLOG)
        except OSError as error:
            complain(f"tracking clients of the task get no address: {error}")
            listener.close()
            return {}
        listener.setblocking(False)
        self._socket, self._token = listener, _make_token()
        self._loop.watch(listener.fileno(), READ, self._accept)
        found = {URI: f"http://{ADDRESS}:{listener.getsockname()[1]}", TOKEN: self._token}
        if any(name.lower() in ("http_proxy", "all_proxy") for name in given):
            for name in ("no_proxy", "NO_PROXY"):
                found[name] = ",".join(filter(None, (given.get(name, ""), ADDRESS)))
        return found

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._socket is not None:
            self._loop.unwatch(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def _accept(self, events: int) -> None:
        assert self._socket is not None
        try:
            connection, _ = self._socket.accept()
        except OSError:
            return
        if self._server is None:
            from .work.tracking_server import TrackingServer

            self._server = TrackingServer(
                self._loop, self._token, self._folder, self._values, self._params
            )
        self._server.add(connection)


def _make_token() -> str:
    return os.urandom(24).hex()
