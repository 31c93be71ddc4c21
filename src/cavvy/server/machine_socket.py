"""The socket to which agents on this machine connect, if several servers share one database. One
server on the machine serves this socket. When the server that serves the socket ends, another
server on the machine takes over the socket, so agents need no new address.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from typing import TYPE_CHECKING, Any

from cavvy.server.state_dir import listen_at

if TYPE_CHECKING:
    from cavvy.server.doors import BoundedServer

_PAUSE_S = 0.2
_log = logging.getLogger(__name__)


class MachineSocket:
    """Serves `app` on the Unix socket `path` from the call `update(True)` to the call
    `update(False)`. `end_polls` answers the agents' long polls."""

    def __init__(self, app: Any, path: str, end_polls: Callable[[], None]) -> None:
        self._app = app
        self._path = path
        self._end_polls = end_polls
        self._server: BoundedServer | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def update(self, mine: bool) -> None:
        """Start or stop serving. If another server has left a socket file at this path, the file is
        replaced.
        """
        from cavvy.server.doors import BoundedServer

        if mine and self._server is None:
            self._server = BoundedServer(self._app)
            self._start(self._server.serve([listen_at(self._path)]))
            _log.info("serving the agents on this machine", extra={"address": self._path})
        elif not mine and self._server is not None:
            self._server.should_exit = True
            self._start(self._end_all_polls(frozenset(self._tasks)))
            self._server = None

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end_all_polls(self, serving: Collection[asyncio.Task[None]]) -> None:
        """Answer the agents' polls until `serving` has ended. Repeats this, because an agent may
        poll again until the server has noticed that it must end.
        """
        while not all(each.done() for each in serving):
            self._end_polls()
            await asyncio.wait(serving, timeout=_PAUSE_S)

    async def close(self) -> None:
        """Stop serving. The socket file is kept for the next server."""
        self.update(False)
        if self._tasks:
            await asyncio.wait(self._tasks)
