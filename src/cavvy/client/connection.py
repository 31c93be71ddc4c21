"""Connects to the server that commands use: the server of the chosen context, or else the embedded
server, which is started in the background if it is not running.

If two commands start a server at the same time, both commands use the server that gets the lock. A
server of an older version is replaced; jobs and their nodes keep running meanwhile.
"""

import os
import time

from cavvy import __version__
from cavvy.client.client import API, REVISION, ApiClient, parse_version
from cavvy.client.contexts import Context, chosen_context
from cavvy.client.errors import ApiError, IncompatibleVersions, StartFailed, Unreachable
from cavvy.client.state import (
    ServerFile,
    default_home,
    process_mark,
    read_server,
    read_token,
    server_holds_lock,
)
from cavvy.client.transport import QUIET_S, Patience
from cavvy.packages import update_command

_STOP_WAIT_S = 15.0


def connect(
    *,
    start: bool = True,
    home: str | None = None,
    timeout_s: float = 30.0,
    patience: Patience | None = None,
) -> ApiClient:
    """Connect to the server of the chosen context (see `contexts.py`). Without a context, or if
    `home` names a state folder, connect to the embedded server. Unless `start` is False, the server
    is started if it is not running. If the server later stops answering, requests are repeated
    until the time limit of `patience`.

    Raises ApiError with the code `context-unknown`, StartFailed, IncompatibleVersions. Raises
    Unreachable if the embedded server is not running and `start` is False.
    """
    context = None if home is not None else chosen_context(default_home())
    if context is not None:
        return open_context(context, timeout_s=timeout_s, patience=patience)
    return connect_embedded(start=start, home=home, timeout_s=timeout_s, patience=patience)


def open_context(
    context: Context, *, timeout_s: float = 30.0, patience: Patience | None = None
) -> ApiClient:
    """Return a client of the context's server. This function sends no request."""
    return ApiClient(
        context.address, context.token, timeout_s=timeout_s, patience=patience, ca=context.ca
    )


def connect_embedded(
    *,
    start: bool = True,
    home: str | None = None,
    timeout_s: float = 30.0,
    patience: Patience | None = None,
) -> ApiClient:
    """Connect to the embedded server. Unless `start` is False, the server is started if it is not
    running. If the server later stops answering, requests are repeated until the time limit of
    `patience`.

    Raises Unreachable (the server is not running and `start` is False), StartFailed,
    IncompatibleVersions.
    """
    folder, patience = home or default_home(), patience or Patience()
    server = read_server(folder)
    if server is None:
        server = _ensure(folder, patience, start=start)
    elif not _fits(server):
        server = _replace(folder, server, patience, start=start)

    def revive() -> tuple[str, str]:
        again = _ensure(folder, patience, start=start)
        return again.address, read_token(folder)

    return ApiClient(
        server.address, read_token(folder), timeout_s=timeout_s, revive=revive, patience=patience
    )


def ensure_server(*, home: str | None = None, patience: Patience | None = None) -> ServerFile:
    """Start the embedded server unless it is running, and return when it answers. Raises
    StartFailed, IncompatibleVersions.
    """
    return _ensure(home or default_home(), patience or Patience(), start=True)


def stop_server(*, home: str | None = None, patience: Patience | None = None) -> bool:
    """Stop the embedded server and wait until it has stopped. Returns False if no server was
    running. Nodes keep running.
    """
    folder = home or default_home()
    server = read_server(folder)
    if server is None or not server_holds_lock(folder):
        return False
    _stop(folder, server, patience or Patience())
    return True


def _ensure(home: str, patience: Patience, *, start: bool) -> ServerFile:
    server = read_server(home)
    if server is not None and server_holds_lock(home) and _answers(server, patience):
        return server if _fits(server) else _replace(home, server, patience, start=start)
    return _launch(home, patience, start=start)


def _answers(server: ServerFile, patience: Patience) -> bool:
    with ApiClient(server.address, "", timeout_s=5.0, patience=patience) as client:
        try:
            client.send("GET", "/v1/health")
        except Unreachable:
            return False
        except ApiError:  # the server answers, even if with an error
            return True
        return True


def _fits(server: ServerFile) -> bool:
    """Return whether this program can use the server. If the result is False, the server is older
    than this program and must be replaced.

    Raises IncompatibleVersions if the server has a newer major version of the API.
    """
    if server.api > API:
        raise IncompatibleVersions(
            "client-too-old",
            f"the running server (cavvy {server.version}) is newer than this command (cavvy "
            f"{__version__})",
            f"update this command: {update_command(server.version)}",
        )
    mine = (API, REVISION, parse_version(__version__))
    return (server.api, server.revision, parse_version(server.version)) >= mine


def _replace(home: str, server: ServerFile, patience: Patience, *, start: bool) -> ServerFile:
    if server_holds_lock(home):
        if not start:
            raise IncompatibleVersions(
                "server-too-old",
                f"the running server (cavvy {server.version}) is older than this command (cavvy "
                f"{__version__})",
                "to replace the server, run `cavvy server restart`; jobs keep running",
            )
        _stop(home, server, patience)
    return _launch(home, patience, start=start)


def _launch(home: str, patience: Patience, *, start: bool) -> ServerFile:
    if not start and server_holds_lock(home):
        raise Unreachable(
            "server-unreachable",
            f"the server for {home} is running, but does not answer",
            "see the server's log: cavvy server logs",
        )
    if not start:
        raise Unreachable(
            "server-not-running",
            f"no server is running for {home}",
            "start the server with `cavvy server start`",
        )
    from cavvy.client.launch import launch

    return launch(home, patience)


def _stop(home: str, server: ServerFile, patience: Patience) -> None:
    """Stop the server through its API, or by a signal to its process, and wait until the process
    has ended.

    When this function returns, another server may already have the lock: a command that follows a
    job starts a new server when the old server stops answering.
    """
    try:
        with ApiClient(
            server.address, read_token(home), timeout_s=5.0, patience=patience
        ) as client:
            client.send("POST", "/v1/server/stop")
    except ApiError:
        if process_mark(server.pid) == server.process != "":
            import signal

            os.kill(server.pid, signal.SIGTERM)
    began = time.monotonic()
    while read_server(home) in (None, server) and (
        server_holds_lock(home) or process_mark(server.pid) == server.process != ""
    ):
        waited = time.monotonic() - began
        if waited > QUIET_S:
            patience.note_silence()
        if waited > _STOP_WAIT_S:
            raise StartFailed(
                "server-does-not-stop",
                f"the server (process {server.pid}) did not stop within {_STOP_WAIT_S:.0f} s",
                f"see {home}/server.log, or run `kill -9 {server.pid}`, which does not affect jobs",
            )
        time.sleep(0.02)
