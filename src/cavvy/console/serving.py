"""Serves the console on a port until a signal ends the command."""

import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from types import FrameType
from typing import TYPE_CHECKING

from anyio import to_thread
from starlette.types import ASGIApp, Receive, Scope, Send

from cavvy.console.access import Access
from cavvy.console.app import Console

if TYPE_CHECKING:
    import uvicorn

_GOODBYE_S = 3.0  # seconds after which the command ends although pages still wait for the server
_PAGES = 200  # pages that are made at a time; most wait for the server
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def serve(
    access: Access,
    server: str,
    listener: socket.socket,
    make_http_server: "Callable[[ASGIApp], uvicorn.Server]",
    start: Callable[[], None] | None = None,
) -> None:
    """Serve until a signal, and raise SystemExit then. `server` is the name of the server that the
    pages show, and `start` starts it if it is the embedded server. `make_http_server` returns an
    HTTP server that leaves signals to its caller and limits slow and huge requests.
    """
    logging.basicConfig(format="cavvy: %(message)s", level=logging.WARNING)
    # Requests that are no HTTP are not worth a message, and the console itself reports faults.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    _allow_many_files()
    listener.setblocking(False)
    app = Console(access, server, lambda: datetime.now(UTC), start).app
    http_server = make_http_server(_ManyPages(app))
    _run_until_signal(http_server, listener, access)


class _ManyPages:
    """Makes more pages at a time than the usual number of threads."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        to_thread.current_default_thread_limiter().total_tokens = _PAGES
        await self._app(scope, receive, send)


def _run_until_signal(
    http_server: "uvicorn.Server", listener: socket.socket, access: Access
) -> None:
    """Raises SystemExit with the exit code that shells report for the signal."""
    numbers: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        if numbers:  # a second Ctrl-C
            os._exit(128 + number)
        numbers.append(number)
        http_server.should_exit = True
        last = threading.Timer(_GOODBYE_S, os._exit, [128 + number])
        last.daemon = True
        last.start()

    for number in _SIGNALS:
        # `nohup` ignores SIGHUP, and shells make background commands ignore Ctrl-C
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)
    try:
        http_server.run(sockets=[listener])
    finally:
        access.close()
    if numbers:
        sys.exit(128 + numbers[0])


def _allow_many_files() -> None:
    """Use as many file descriptors as the system permits: each browser keeps connections open."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS permits fewer than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
