"""Checks whether a listener can use an address, and explains why an address cannot be used."""

import errno
import os
import socket
from contextlib import suppress

from cavvy.server.addresses import explain_reason

_LISTENS = "0A"  # the state of a listening socket in Linux's /proc/net/tcp


def explain_address(host: str, port: int, error: OSError, setting: str = "services.listen") -> str:
    """Return the reason why nothing can listen on the address of a setting, together with the
    fix.
    """
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if error.errno == errno.EADDRINUSE:
        user = find_listener(port) or "another process"
        return f"address {shown} is in use by {user}; end it, or change {setting}"
    return f"address {shown} cannot be used ({explain_reason(error)}); change {setting}"


def find_obstacle(host: str, port: int, *, reuse_port: bool = False) -> str:
    """Return why nothing can listen on an address, or "" if the address can be used. The function
    frees the address before it returns.
    """
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[
            0
        ]
        with socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if reuse_port:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            tried.bind(where)
    except OSError as error:
        return explain_address(host, port, error)
    return ""


def find_listener(port: int) -> str:
    """Return the process that listens on a TCP port of this machine, such as
    "process 412 (nginx)", or "" if it is unknown. The process is known on Linux, if this user may
    look at it.
    """
    sockets = {f"socket:[{inode}]" for inode in _list_inodes(port)}
    for pid in (name for name in _list_folder("/proc") if sockets and name.isdigit()):
        for file in _list_folder(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{file}") in sockets:
                    with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as comm:
                        return f"process {pid} ({comm.read().strip()})"
    return ""


def _list_inodes(port: int) -> list[str]:
    """Return the inodes of the sockets that listen on a port."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError), open(table, encoding="ascii") as lines:
            rows = [line.split() for line in lines]
            found += [
                inode
                for _, local, _, state, _, _, _, _, _, inode, *_ in rows
                if state == _LISTENS and int(local.rpartition(":")[2], 16) == port
            ]
    return found


def _list_folder(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []
