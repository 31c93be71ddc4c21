"""Reads and writes the files of the state folder that the embedded server shares with its clients:
the address, the token and the lock of the running server.
"""

import fcntl
import os
import time
from datetime import datetime
from threading import get_ident

from msgspec import Struct
from msgspec.json import decode, encode

_MIGRATION_S = 10.0  # for which a server's word that it migrates its database holds


class ServerFile(Struct, frozen=True, kw_only=True):
    """The contents of `server.json`: the process, address and versions of the running server."""

    pid: int
    process: str  # a mark that differs from that of a later process with the same pid
    host: str
    address: str
    listen: str | None = None
    version: str
    api: int
    revision: int
    started_at: datetime


def default_home() -> str:
    """Return CAVVY_HOME or ~/.cavvy, as an absolute path."""
    return os.path.abspath(os.path.expanduser(os.environ.get("CAVVY_HOME") or "~/.cavvy"))


def read_server(home: str) -> ServerFile | None:
    """Return the contents of `server.json`, or None if the file is missing or damaged."""
    try:
        with open(os.path.join(home, "server.json"), "rb") as file:
            return decode(file.read(), type=ServerFile)
    except (OSError, ValueError):
        return None


def write_private(path: str, data: bytes) -> None:
    """Replace a file atomically. Only the file's owner can read the new file."""
    draft = f"{path}.{os.getpid()}-{get_ident()}.tmp"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(data)
        os.replace(draft, path)
    except OSError:
        if os.path.exists(draft):
            os.unlink(draft)
        raise


def note_migration(home: str) -> None:
    """Tell the commands that wait for this server that it migrates its database, for the next
    seconds. Raises OSError.
    """
    path = _migration_file(home)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    os.utime(path)


def end_migration(home: str) -> None:
    if os.path.exists(path := _migration_file(home)):
        os.unlink(path)


def is_migrating(home: str) -> bool:
    """Return whether a server of this state folder has just said that it migrates its database."""
    try:
        return abs(time.time() - os.stat(_migration_file(home)).st_mtime) < _MIGRATION_S
    except OSError:
        return False


def _migration_file(home: str) -> str:
    return os.path.join(home, "server.migrates")


def write_server(home: str, server: ServerFile) -> None:
    write_private(os.path.join(home, "server.json"), encode(server))


def read_token(home: str) -> str:
    """Return the user's token, or "" if no server was ever started."""
    try:
        with open(os.path.join(home, "token")) as file:
            return file.read().strip()
    except OSError:
        return ""


def server_holds_lock(home: str) -> bool:
    """Return whether a server for this state folder is running on this host. A running server holds
    the folder's lock.
    """
    try:
        fd = os.open(os.path.join(home, "server.lock"), os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def process_mark(pid: int) -> str:
    """Return a text that distinguishes a process from later processes with the same pid: its start
    time in clock ticks, and the ID of the boot. Returns "" if the process has ended.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        # A zombie process has ended, although its parent has not read its exit status yet.
        return "" if fields[0] == "Z" else f"{fields[19]}@{boot}"
    except (OSError, IndexError):
        return ""


def host_name() -> str:
    return os.uname().nodename
