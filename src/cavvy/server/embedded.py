"""The process of the embedded server. Each state folder has one server. The server runs in the
background and exits when it is idle.

`cavvy.client.launch` starts the process as `python -m cavvy.server.embedded --ready-fd N`. Through
the pipe N, the process reports that it is serving requests, that another server is already running,
or why the start failed.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from cavvy import __version__, settings
from cavvy.client import API, REVISION, file_limit
from cavvy.client.launch import StartupReport
from cavvy.client.state import (
    ServerFile,
    end_migration,
    host_name,
    note_migration,
    process_mark,
    write_private,
    write_server,
)
from cavvy.server.state_dir import LogFile, StateDir, StateDirBusy, StateDirError, home_error
from cavvy.server.threads import (
    describe_long,
    end_threads,
    exit_at_last,
    open_threads,
    tell_long,
)

if TYPE_CHECKING:
    import socket

    from cavvy.api.app_state import AppState
    from cavvy.api.audit import AuditMiddleware
    from cavvy.api.auth import AuthMiddleware
    from cavvy.server.doors import BoundedServer
    from cavvy.server.node_listener import MachineSocket, NodeListener
    from cavvy.server.user_listener import UserListener
    from cavvy.store.bucket_folder import BucketFolder
    from cavvy.store.leases import ReplicaLeases

_CHORES_S = 5.0
_TELL_S = 1.0
_OPEN_FILES = 65_536  # as in the systemd unit; 2,000 nodes need two connections each
_BUCKET_THREADS = 64
_MIB = 1024 * 1024
_left = threading.Event()  # set if threads of the server do not end
_log = logging.getLogger("cavvy.server")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until stopped, and return the exit code."""
    # Imports create little garbage, and the server starts a tenth faster without garbage
    # collection.
    gc.disable()
    given = sys.argv[1:] if arguments is None else arguments
    word, waits = _Word(_read_fd(given)), [each for each in given if each == "--wait"]
    if too_low := file_limit.find_low_limit(_OPEN_FILES):
        return word.fail(file_limit.CODE, too_low, file_limit.HINT)
    try:
        configured = settings.load()
        home = StateDir(str(configured.home))
        if waits:
            from cavvy.server.database import wait_for_turn

            _start_log()
            _load_modules()
            wait_for_turn(home, configured)
        else:
            home.claim(wait_s=configured.whole("server.start_timeout_s"))
    except StateDirBusy:
        word.say("busy")
        return 0
    except (StateDirError, settings.SettingsError) as error:
        return word.fail(error.code, error.message, error.hint)
    _start_log()
    again = _serve(home, configured, word)
    if again:
        os.execv(sys.executable, [sys.executable, "-P", "-m", "cavvy.server.embedded", *waits])
    code = 0 if word.said_ready else 1
    if _left.is_set():  # Python would wait for them
        logging.shutdown()
        os._exit(code)
    return code


def _load_modules() -> None:
    """Import the server's modules in advance, so that a server that takes over need not wait for
    the imports.
    """
    import uvloop  # noqa: F401

    import cavvy.api.app
    import cavvy.server.open_state  # noqa: F401


def _serve(home: StateDir, configured: settings.Settings, word: "_Word") -> bool:
    """Serve until stopped. Returns True if the server must restart immediately."""
    import uvloop

    from cavvy.providers.base import ProviderError
    from cavvy.store.base import StoreError
    from cavvy.store.reserve import Reserve, is_full

    started = threading.Event()
    threading.Thread(target=_tell_of_migration, args=(home, started), daemon=True).start()
    try:
        return _run(_ServerRun(home, configured, word, started), uvloop.new_event_loop)
    except (StateDirError, settings.SettingsError, StoreError, OSError) as error:
        if not word.said_ready and is_full(home.path) and Reserve(Path(home.path)).give_up():
            return _serve(home, configured, word)
        _fail(home, word, error)
    except ProviderError as error:
        word.fail(
            "settings-invalid",
            str(error),
            f"correct {configured.file}, then check every provider with `cavvy check`",
        )
    finally:
        started.set()
    return False


def _run(server: "_ServerRun", make_loop: Callable[[], asyncio.AbstractEventLoop]) -> bool:
    """Run the server until it stops. A thread that does not end then does not keep the process."""
    runner = asyncio.Runner(loop_factory=make_loop)
    try:
        return runner.run(server.run())
    finally:
        if end_threads():
            runner.close()
        else:
            _left.set()
        _log.info("stopped")


def _tell_of_migration(home: StateDir, ended: threading.Event) -> None:
    """Until the start has ended, tell the commands that wait for it while the database is being
    migrated.
    """
    while not ended.wait(_TELL_S):
        module = sys.modules.get("cavvy.store.migrate")
        if module is not None and module.running.is_set():
            with contextlib.suppress(OSError):
                note_migration(home.path)
    with contextlib.suppress(OSError):
        end_migration(home.path)


def _fail(home: StateDir, word: "_Word", error: Exception) -> None:
    from cavvy.store.base import StoreFull

    if isinstance(error, StateDirError | settings.SettingsError):
        word.fail(error.code, error.message, error.hint)
    elif isinstance(error, StoreFull):
        word.fail(
            "disk-full", str(error), f"free some space on the disk of {home.path}, then try again"
        )
    elif isinstance(error, OSError):
        told = home_error(home.path, error)
        word.fail(told.code, told.message, told.hint)
    else:
        word.fail("database-unusable", str(error), _where_database(home))


def _where_database(home: StateDir) -> str:
    local = home.file("cavvy.db")
    if os.path.exists(local):
        return f"the database is in {local}"
    return "the setting server.database names the database"


class _ServerRun:
    """One run of the server, until it stops or must be restarted."""

    def __init__(
        self,
        home: StateDir,
        configured: settings.Settings,
        word: "_Word",
        started: threading.Event,
    ) -> None:
        self._started = started
        self._home = home
        self._settings = configured
        self._word = word
        self._stopping = asyncio.Event()
        self._for_idleness = False
        self._broken = False

    async def run(self) -> bool:
        """Serve until stopped. Returns True if the server must restart immediately."""
        loop = asyncio.get_running_loop()
        loop.set_default_executor(open_threads())
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        listener, address = self._home.listen()
        again = served = False
        try:
            async with self._join_servers(address) as (files, leases):
                served = True
                again = await self._work(listener, address, files, leases)
        except Exception as error:
            if not self._broken:
                raise
            _log.error("the control plane failed with this error", exc_info=error)
            again = True
        finally:
            listener.close()
            self._home.forget(served=served)
        return again

    async def _work(
        self,
        listener: "socket.socket",
        address: str,
        files: StateDir,
        leases: "ReplicaLeases | None",
    ) -> bool:
        """Serve until stopped. Returns True if the server must restart immediately."""
        from cavvy.domain.values import replace
        from cavvy.server.node_listener import listen_for_nodes
        from cavvy.server.open_state import open_state

        bucket = None if leases is None else await self._open_bucket(leases.url)
        with files.setting_up():
            node_endpoint = await asyncio.to_thread(
                listen_for_nodes, files, self._settings, shared=leases is not None
            )
            self._share_token(files)
        if leases is not None and node_endpoint is not None:
            leases.me = replace(leases.me, peer=node_endpoint.own_address)
        try:
            async with open_state(
                self._home,
                self._settings,
                address,
                self._stopping.set,
                database=leases,
                files=files,
                bucket=bucket,
                node_endpoint=node_endpoint,
            ) as app_state:
                await self._serve(app_state, listener, address, node_endpoint)
                # A job may have arrived while the server was stopping because it was idle.
                return self._broken or (
                    self._for_idleness and bool(await app_state.store.unfinished())
                )
        finally:
            if node_endpoint is not None:
                node_endpoint.sock.close()

    @contextlib.asynccontextmanager
    async def _join_servers(
        self, address: str
    ) -> "AsyncIterator[tuple[StateDir, ReplicaLeases | None]]":
        """Register this server with the other servers of its PostgreSQL database, if the server
        uses PostgreSQL. Returns the folder for files, and this server's registration.
        """
        from cavvy.server.database import choose_database, choose_files, join_servers

        url = choose_database(self._home, self._settings)
        files = choose_files(self._home, self._settings, url)
        if url is None:
            yield files, None
            return
        async with join_servers(url, self._home, files, self._settings, address) as leases:
            yield files, leases

    async def _open_bucket(self, url: str) -> "BucketFolder | None":
        """Open the bucket for files, if the server uses one, and read the values that all servers
        of the database share.
        """
        from cavvy.server.database import choose_bucket
        from cavvy.server.stored_files import join_bucket

        bucket = choose_bucket(self._home, self._settings, url)
        if bucket is not None:
            # each request to the bucket keeps a thread waiting
            asyncio.get_running_loop().set_default_executor(open_threads(_BUCKET_THREADS))
            await join_bucket(bucket, url, self._home, self._settings)
        return bucket

    def _share_token(self, files: StateDir) -> None:
        """Let all servers that share their files accept the same user token."""
        if files is not self._home:
            write_private(self._home.file("token"), files.token().encode() + b"\n")

    async def _serve(
        self,
        app_state: "AppState",
        listener: "socket.socket",
        address: str,
        node_endpoint: "NodeListener | None",
    ) -> None:
        from cavvy.server.doors import WAIT_S
        from cavvy.server.user_listener import listen_for_users

        auth, app = _make_apps(app_state, self._home.token())
        user_listener = await asyncio.to_thread(listen_for_users, self._settings, WAIT_S)
        listen = user_listener.address if user_listener is not None else None
        app_state.listen = listen
        servers = _make_servers(app, listener, user_listener, node_endpoint)
        machine_socket = _share_machine(app, app_state)
        async with asyncio.TaskGroup() as group:
            serving = [group.create_task(server.serve(own)) for server, own in servers]
            # uvicorn has no event for its start, only this flag
            while not (  # noqa: ASYNC110
                all(server.started for server, _ in servers) or any(each.done() for each in serving)
            ):
                await asyncio.sleep(0.001)
            write_server(self._home.path, _describe(address, listen, app_state.started_at))
            self._report_ready(address, listen, node_endpoint)
            chores = group.create_task(self._do_chores(app_state, auth))
            beat = group.create_task(self._home.beat())
            await self._stopping.wait()
            self._home.forget()
            app_state.close_polls()
            await machine_socket.close()
            for server, _ in servers:
                server.should_exit = True
            await asyncio.gather(*serving)
            chores.cancel()
            beat.cancel()

    def _report_ready(
        self, address: str, listen: str | None, node_endpoint: "NodeListener | None"
    ) -> None:
        self._settle()
        self._started.set()
        self._word.say("ready")
        shown = {
            "address": address,
            "listen": listen,
            "node_endpoint": node_endpoint.address if node_endpoint is not None else None,
            "version": __version__,
            "cpu_s": round(time.process_time(), 3),
        }
        _log.info("serving", extra=shown)

    def _settle(self) -> None:
        """Exclude all objects that exist now from garbage collection, because they are needed until
        the process ends.
        """
        gc.freeze()
        gc.set_threshold(20_000, 20, 50)
        gc.enable()

    async def _do_chores(self, app_state: "AppState", auth: "AuthMiddleware") -> None:
        """Until the server stops: rotate the log, warn if file descriptors are short, stop the
        server when it is idle, and restart it if the control plane has failed.
        """
        from cavvy.client.file_limit import OpenFilesCheck
        from cavvy.store.reserve import Reserve

        open_files = OpenFilesCheck()
        idle_stop_s = self._settings.whole("server.idle_stop_s")
        log_file = LogFile(
            self._home.file("server.log"), self._settings.whole("server.log_mib") * _MIB
        )
        reserve = Reserve(Path(self._home.path))
        while True:
            await asyncio.to_thread(reserve.take)
            await asyncio.sleep(
                min(_CHORES_S, max(0.2, idle_stop_s / 4)) if idle_stop_s else _CHORES_S
            )
            open_files.look()
            tell_long()
            if log_file.rotate():
                _log.info("started a new log file")
            if not app_state.control_plane.running:
                _log.error("the control plane failed; the server restarts")
                self._broken = True
                self._stopping.set()
                return
            if idle_stop_s and auth.idle_s > idle_stop_s and await app_state.control_plane.idle():
                _log.info("stopping: the server is idle", extra={"idle_s": round(auth.idle_s)})
                self._for_idleness = True
                self._stopping.set()
                return


class _Word:
    """Reports to the process that started this server whether the start succeeded. Reports only
    once."""

    def __init__(self, ready_fd: int | None) -> None:
        self._fd = ready_fd
        self.said_ready = False
        if ready_fd is not None:
            os.set_inheritable(ready_fd, False)

    def say(self, state: str, *, code: str = "", message: str = "", hint: str = "") -> None:
        from msgspec.json import encode

        self.said_ready = self.said_ready or state == "ready"
        if self._fd is None:
            return
        with contextlib.suppress(
            OSError
        ):  # the starting process has ended; the next command will find the server
            os.write(
                self._fd,
                encode(StartupReport(state=state, code=code, message=message, hint=hint)) + b"\n",
            )
            os.close(self._fd)
        self._fd = None

    def fail(self, code: str, message: str, hint: str) -> int:
        self.say("error", code=code, message=message, hint=hint)
        sys.stderr.write(f"{code}: {message}\n  {hint}\n")
        return 1


def _make_apps(app_state: "AppState", token: str) -> "tuple[AuthMiddleware, AuditMiddleware]":
    """Return two applications that check the token. The first writes no audit log, and the second
    does.
    """
    from cavvy.api.app import make_app
    from cavvy.api.audit import AuditMiddleware
    from cavvy.api.auth import AuthMiddleware

    auth = AuthMiddleware(make_app(app_state), token, app_state)
    app_state.idle_s = lambda: auth.idle_s
    app_state.long_threads = describe_long
    return auth, AuditMiddleware(auth, app_state)


def _make_servers(
    app: "AuditMiddleware",
    own: "socket.socket",
    user_listener: "UserListener | None",
    node_endpoint: "NodeListener | None",
) -> "list[tuple[BoundedServer, list[socket.socket]]]":
    """Create the servers for the Unix socket `own`, for users and for outside nodes, each with its
    listening sockets.
    """
    from cavvy.server.doors import BoundedServer
    from cavvy.server.node_listener import ONLY_DOWNLOADS, NodeRouteFilter
    from cavvy.server.node_tls import TlsContexts
    from cavvy.server.turns import Turns

    servers, turns = [(BoundedServer(app), [own])], Turns()
    if user_listener is not None:
        server = BoundedServer(app, user_listener.tls, turns=turns)
        servers.append((server, [user_listener.sock]))
    if node_endpoint is not None:
        nodes, tls = NodeRouteFilter(app), TlsContexts(node_endpoint.certificate.file)
        server = BoundedServer(nodes, tls, ONLY_DOWNLOADS, turns)
        servers.append((server, [node_endpoint.sock]))
    return servers


def _share_machine(app: "AuditMiddleware", app_state: "AppState") -> "MachineSocket":
    """Serve the agents on this machine while this server is responsible for the shared socket of
    the agents. If this is the only server, do nothing, because agents connect to the server's own
    socket.
    """
    from cavvy.server.node_listener import MachineSocket

    machine_socket = MachineSocket(
        app, app_state.address.removeprefix("unix:"), app_state.end_order_polls
    )
    if (share := app_state.share) is not None:
        share.on_turn = lambda: machine_socket.update(share.serves_machine)
        share.on_turn()
    return machine_socket


def _read_fd(arguments: Sequence[str]) -> int | None:
    return int(arguments[arguments.index("--ready-fd") + 1]) if "--ready-fd" in arguments else None


def _describe(address: str, listen: str | None, started_at: datetime) -> ServerFile:
    return ServerFile(
        pid=os.getpid(),
        process=process_mark(os.getpid()),
        host=host_name(),
        address=address,
        listen=listen,
        version=__version__,
        api=API,
        revision=REVISION,
        started_at=started_at,
    )


class _JsonLines(logging.Formatter):
    """Formats each log record as one line of JSON, with the `extra` fields of the logging call."""

    _plain = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

    def format(self, record: logging.LogRecord) -> str:
        from msgspec.json import encode

        fields: dict[str, object] = {
            "at": datetime.fromtimestamp(record.created, UTC),
            "level": record.levelname.lower(),
            "logger": record.name,
            "text": record.getMessage(),
        }
        fields |= {name: value for name, value in vars(record).items() if name not in self._plain}
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        return encode(fields, enc_hook=str).decode()


def _start_log() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("uvicorn").setLevel(logging.ERROR)


if __name__ == "__main__":
    exit_code = main()
    exit_at_last(exit_code)
    sys.exit(exit_code)
