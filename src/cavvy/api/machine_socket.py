"""The socket to which agents on this machine connect, if several servers share one database. One
server on the machine serves this socket. When the server that serves the socket ends, another
server on the machine takes over the socket, so agents need no new address.
"""

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from cavvy.api.state_dir import listen_at

if TYPE_CHECKING:
    from cavvy.api.doors import BoundedServer

_log = logging.getLogger(__name__)


class MachineSocket:
    """Serves `app` on the Unix socket `path` from the call `update(True)` to the call
    `update(False)`."""

    def __init__(self, app: Any, path: str) -> None:
        self._app = app
        self._path = path
        self._server: BoundedServer | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def update(self, mine: bool) -> None:
        """Start or stop serving. If another server has left a socket file at this path, the file is
        replaced.
        """
        from cavvy.api.doors import BoundedServer

        if mine and self._server is None:
            self._server = BoundedServer(self._app)
            task = asyncio.create_task(self._server.serve([listen_at(self._path)]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            _log.info("serving the agents on this machine", extra={"address": self._path})
        elif not mine and self._server is not None:
            self._server.should_exit = True
            self._server = None

    async def close(self) -> None:
        """Stop serving. The socket file is kept for the next server."""
        self.update(False)
        if self._tasks:
            await asyncio.wait(self._tasks)
