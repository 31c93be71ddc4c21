"""The server's state folder. The folder contains the server's socket, the user's token, the log
file, and a lock that prevents a second server from using the folder.
"""

import asyncio
import errno
import fcntl
import os
import secrets
import socket
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

from cavvy.client import file_limit
from cavvy.client.state import host_name, is_migrating, read_server, read_token, write_private
from cavvy.mounts import is_shared, read_mounts

# maximum bytes of a socket's path; the kernel allows 108 including the final NUL
_SOCKET_PATH_BYTES = 100
_BEAT_S = 20.0  # seconds after which a server in a shared folder refreshes its mark
# if the mark is older than this many seconds, a server on another host may take over
_BEATEN_S = 120.0


class StateDirError(Exception):
    """Raised if the state folder cannot be used until a person acts."""

    def __init__(self, code: str, message: str, hint: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint


class StateDirBusy(Exception):
    """Raised if another server uses this state folder."""


class StateDir:
    """One state folder. The server that has locked the folder holds the lock until its process
    ends."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.shared = False
        self._lock: int | None = None

    def file(self, *names: str) -> str:
        return os.path.join(self.path, *names)

    def claim(self, *, wait_s: float, alone: bool = False) -> None:
        """Lock the folder. Waits for up to `wait_s` seconds while another server is stopping or
        starting. `alone` is true if no server on another host uses the database. Raises
        StateDirBusy, StateDirError.
        """
        self.prepare()
        try:
            lock = os.open(self.file("server.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise home_error(self.path, error) from error
        try:
            if self.shared and not alone:
                self._check_other_host()
            self._wait_for_lock(lock, wait_s)
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock
        if self.shared:
            _touch(self.file("server.beat"))

    def prepare(self) -> None:
        """Create the folder, readable only by this user. Raises StateDirError."""
        try:
            os.makedirs(self.path, mode=0o700, exist_ok=True)
            self._make_private()
        except OSError as error:
            raise home_error(self.path, error) from error
        self.shared = is_shared(self.path, read_mounts())

    @contextmanager
    def setting_up(self) -> Iterator[None]:
        """Prevent other servers that start in this folder from creating the folder's files at the
        same time. Blocks.
        """
        with open(self.file("setup.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def claim_idle(self) -> None:
        """Lock the folder for a command that can run only while the folder's server is stopped.
        Raises StateDirError.
        """
        try:
            self.claim(wait_s=0.0)
        except StateDirBusy as error:
            raise StateDirError(
                "server-running",
                f"a server uses {self.path}",
                f"stop this server first: CAVVY_HOME={self.path} cavvy server stop; "
                "jobs keep running",
            ) from error

    def _wait_for_lock(self, lock: int, wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        while not _try_lock(lock):
            server = read_server(self.path)
            if server is not None and _connects(server.address):
                raise StateDirBusy
            if is_migrating(self.path):
                deadline = time.monotonic() + wait_s
            if time.monotonic() > deadline:
                raise StateDirError(
                    "server-stuck",
                    f"another server holds {self.file('server.lock')} and does not answer",
                    "see `cavvy server logs`, or end that server with `cavvy server stop`; "
                    "jobs keep running",
                )
            time.sleep(0.02)

    def token(self) -> str:
        """Return the user's token, which is created on the first start."""
        known = read_token(self.path)
        if known:
            return known
        made = secrets.token_urlsafe(32)
        write_private(self.file("token"), made.encode() + b"\n")
        return made

    def listen(self) -> tuple[socket.socket, str]:
        """Open a Unix socket that only this user can connect to, and return the socket and its
        address.
        """
        path = self.socket_path()
        if os.path.dirname(path) != self.path:
            write_private(self.file("server.socket"), path.encode())
        # this process holds the lock, so an existing socket was left behind by a killed server
        return listen_at(path), f"unix:{path}"

    def agents_path(self) -> str:
        """Return the path of the socket for agents on this machine, if several servers share the
        folder. One server on the machine listens on this socket.
        """
        path = self.file("agents.sock")
        if _fits(path) and not self.shared:
            return path
        return f"/tmp/cavvy-{os.getuid()}/{_digest(self.path)}.agents.sock"

    def gateway_path(self) -> str:
        """Return the path of the gateway's control socket."""
        path = self.file("gateway.sock")
        if _fits(path) and not self.shared:
            return path
        return f"/tmp/cavvy-{os.getuid()}/{_digest(self.path)}.gateway.sock"

    def haproxy_path(self) -> str:
        """Return the path of the socket of HAProxy's runtime API. The path leaves room for the
        longer temporary name that HAProxy uses.
        """
        return f"/tmp/cavvy-{os.getuid()}/{_digest(self.path)}.haproxy.sock"

    def socket_path(self) -> str:
        """Return the path of the server's socket. The socket is in the state folder or, if that
        file system does not support sockets, in a folder of this user on a local disk.
        """
        path = self.file("server.sock")
        if _fits(path) and not self.shared:
            return path
        kept = self._kept_path()
        if kept is not None and os.path.isdir(os.path.dirname(kept)):
            # Running agents use this path, even if the environment of this session is different.
            return kept
        runtime = os.environ.get("XDG_RUNTIME_DIR", "")
        name = f"{_digest(self.path)}.sock"
        path = os.path.join(runtime, "cavvy", name)
        return (
            path if os.path.isdir(runtime) and _fits(path) else f"/tmp/cavvy-{os.getuid()}/{name}"
        )

    def _kept_path(self) -> str | None:
        try:
            with open(self.file("server.socket")) as file:
                return file.read().strip() or None
        except OSError:
            return None

    def forget(self, *, served: bool = True) -> None:
        """Remove the files that exist only while a server runs. The lock is released when the
        process ends. If another server owns the remaining files, only the socket is removed.
        Another server owns them if this process was never the server, or if a server on another
        host has taken over.
        """
        server = read_server(self.path)
        mine = served and (server is None or server.host == host_name())
        files = [self.file("server.json"), self.file("server.beat")] if mine else []
        for path in (*files, self.socket_path()):
            if os.path.lexists(path):
                os.unlink(path)

    async def beat(self) -> None:
        """If the folder is shared, refresh the mark file until this task is cancelled. The mark
        shows other hosts that the server on this host is using the folder.
        """
        while self.shared:
            _touch(self.file("server.beat"))
            await asyncio.sleep(_BEAT_S)

    def _make_private(self) -> None:
        mode = stat.S_IMODE(os.stat(self.path).st_mode)
        if mode & 0o077:
            os.chmod(self.path, mode & 0o700)

    def _check_other_host(self) -> None:
        server = read_server(self.path)
        if server is None or server.host == host_name() or self._silent_s() > _BEATEN_S:
            return
        raise StateDirError(
            "server-elsewhere",
            f"{self.path} is served by the host {server.host} (process {server.pid}); two servers "
            "must not share it",
            f"use cavvy on {server.host}, or stop the server there with `cavvy server stop`, "
            "or set CAVVY_HOME to another folder here",
        )

    def _silent_s(self) -> float:
        """Return the seconds since the server on the other host last refreshed its mark, measured
        by the clock of the file system.
        """
        probe = self.file(f".clock-{host_name()}-{os.getpid()}")
        try:
            _touch(probe)
            now = os.stat(probe).st_mtime
            os.unlink(probe)
            return now - os.stat(self.file("server.beat")).st_mtime
        except FileNotFoundError:
            return _BEATEN_S + 1
        except OSError:
            return 0.0


class LogFile:
    """The log file `server.log`, which receives standard output and standard error. When the file
    is too large, it is renamed to `server.log.1`.
    """

    def __init__(self, path: str, limit_bytes: int) -> None:
        self._path = path
        self._limit = limit_bytes

    def rotate(self) -> bool:
        """Start a new log file if the current file exceeds the size limit. Returns whether a new
        log file was started. Child processes may continue to write to the old file.
        """
        try:
            if os.fstat(2).st_size < self._limit or not os.path.samestat(
                os.fstat(2), os.stat(self._path)
            ):
                return False
            os.replace(self._path, self._path + ".1")
            fresh = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOENT):
                return False
            raise
        os.dup2(fresh, 1)
        os.dup2(fresh, 2)
        os.close(fresh)
        return True


def listen_at(path: str) -> socket.socket:
    """Open a Unix socket that only this user can connect to, in place of an existing socket. Raises
    StateDirError if other users can access the socket's folder, or can replace it because it is
    their symbolic link.
    """
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    found = os.stat(folder)
    if (
        os.lstat(folder).st_uid not in (0, os.getuid())
        or found.st_uid != os.getuid()
        or stat.S_IMODE(found.st_mode) & 0o077
        or not stat.S_ISDIR(found.st_mode)
    ):
        raise StateDirError(
            "socket-folder-unsafe",
            f"{folder} belongs to another user, or other users can access it",
            f"remove the folder, or restrict access to it: chmod 700 {folder}",
        )
    if os.path.lexists(path):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    os.chmod(path, 0o600)
    listener.listen(1024)
    listener.setblocking(False)
    return listener


def peer_is_us(connection: socket.socket) -> bool:
    """Return whether the process at the other end of a Unix socket belongs to this user or to
    root.
    """
    if connection.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return True
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", peer)
    return uid in (0, os.getuid())


def home_error(path: str, error: OSError) -> StateDirError:
    """Return the StateDirError for an error of the operating system."""
    if shortage := file_limit.describe_shortage(error):
        return StateDirError(file_limit.CODE, shortage, file_limit.HINT)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StateDirError(
            "disk-full",
            f"no space in {path}",
            "free some space on the folder's disk, or set CAVVY_HOME to another folder",
        )
    below = isinstance(error.filename, str) and error.filename.startswith(path + os.sep)
    return StateDirError(
        "home-unusable",
        f"{error.filename if below else path}: {error.strerror}",
        "check who owns the file, or set CAVVY_HOME to another folder"
        if below
        else "set CAVVY_HOME to a folder that you can write to",
    )


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise StateDirError(
            "home-unusable",
            f"server.lock cannot be locked in its folder: {error.strerror}",
            "set CAVVY_HOME to a folder on a local disk",
        ) from error
    return True


def _fits(path: str) -> bool:
    return len(os.fsencode(path)) <= _SOCKET_PATH_BYTES


def _connects(address: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(address.removeprefix("unix:"))
        except OSError:
            return False
        return True


def _touch(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    os.utime(path)


def _digest(path: str) -> str:
    from hashlib import sha256

    return sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:16]
