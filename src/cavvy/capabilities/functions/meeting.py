"""Where callers on this machine meet the broker of a job: a socket in a folder of this user, where
both sides prove that they know a key.
"""

import os
import socket
import stat
import struct
import tempfile
from contextlib import suppress
from hmac import compare_digest
from secrets import token_hex
from time import monotonic
from typing import Any

from cavvy.capabilities.functions.frames import CallFrames, WrongFrame, pack, prove
from cavvy.sdk.errors import CavvyError

_GREET_S = 2.0  # for all that a broker says before it takes calls
_MOST_GREETING = 4096  # bytes of each of its answers
_PEER = struct.Struct("3i")  # process, user and group


def make_meeting_place(name: str) -> str:
    """Return the path of a socket in a folder that only this user can use, a colon and a new key
    for it. Raises CavvyError.
    """
    folder = _name_folder()
    with suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    found = os.lstat(folder)
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise CavvyError(
            f"{folder} belongs to another user, or others can use it",
            "remove it, or set TMPDIR to a folder of your own",
        )
    return os.path.join(folder, f"{name}.sock:{token_hex(16)}")


def dial_here(meet: str) -> socket.socket:
    """Return a connection to the broker that meets its callers there, on this machine. Nothing else
    is sent, and nothing loaded, before both sides have proved that they know the key. Raises
    OSError.
    """
    path, _, key = meet.rpartition(":")
    folder = os.lstat(os.path.dirname(path))
    own = stat.S_ISDIR(folder.st_mode) and folder.st_uid == os.geteuid()
    if not key or not own or folder.st_mode & 0o077:
        raise ConnectionRefusedError(f"{path} is in no folder of this user alone")
    made = socket.socket(socket.AF_UNIX)
    try:
        until = monotonic() + _GREET_S
        made.settimeout(_GREET_S)
        made.connect(path)
        _check_peer(made)
        nonce = token_hex(16)
        made.sendall(pack({"op": "hello", "id": 0, "nonce": nonce}))
        answer = _read_frame(made, "challenge", until)
        nonces = f"{nonce}:{answer.get('nonce')}"
        if not compare_digest(str(answer.get("proof")).encode(), _prove(key, "broker", nonces)):
            raise ConnectionRefusedError(f"who listens at {path} does not know its key")
        proof = _prove(key, "caller", nonces).decode()
        made.sendall(pack({"op": "hello", "id": 0, "proof": proof}))
        _read_frame(made, "welcome", until)
        made.settimeout(None)
    except BaseException:
        made.close()
        raise
    return made


def is_own_place(meet: str) -> bool:
    """Return whether this is a meeting place of this user on this machine: another one, which a
    client names, is none to connect to.
    """
    return os.path.dirname(meet.rpartition(":")[0]) == _name_folder()


def _name_folder() -> str:
    return os.path.join(tempfile.gettempdir(), f"cavvy-functions-{os.geteuid()}")


def _check_peer(connection: socket.socket) -> None:
    """Raise OSError if another user listens, where the system tells it."""
    if hasattr(socket, "SO_PEERCRED"):
        told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        if _PEER.unpack(told)[1] != os.geteuid():
            raise ConnectionRefusedError("the socket is another user's")


def _prove(key: str, role: str, nonces: str) -> bytes:
    return prove(key, role, nonces).encode()


def _read_frame(connection: socket.socket, op: str, until: float) -> dict[str, Any]:
    """Return the head of the next frame, which must be this one and arrive in time. Raises
    OSError."""
    reader, left = CallFrames(), _MOST_GREETING
    while left > 0:
        # not the time of each `recv`: who listens may send one byte at a time
        if (left_s := until - monotonic()) <= 0:
            raise TimeoutError(f"who listens does not say {op} within {_GREET_S:g} s")
        connection.settimeout(left_s)
        if not (data := connection.recv(left)):
            break
        left -= len(data)
        try:
            found = reader.feed(data)
        except WrongFrame as error:
            raise ConnectionRefusedError(str(error)) from None
        if found:
            head, _ = found[0]
            if head.get("op") == op and len(found) == 1:
                return head
            break
    raise ConnectionRefusedError(f"who listens does not say {op}")
