"""Keeps a terminal on the node while its user is not connected, as dtach and tmux do.

A process holds the terminal and listens on a socket in the work's own folder. A session that
attaches gets the newest output again, and then all that follows. The process ends with its shell,
or when the work ends.

A client sends one line of JSON, `{"rows", "cols", "attach"}`. The terminal gets this size. If
`attach` is true, all further bytes are keys, and the client receives the output.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import select
import signal
import socket
import struct
import subprocess
import termios

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Fields = dict[str, Any]

_KEPT = 32 * 1024  # bytes of output that a user who attaches gets again
# Bytes that wait for one slow user. Then the user misses output, so that the program never waits
# for a connection.
_MOST = 1024 * 1024
_PIECE = 64 * 1024
_LAST_MS = 3000  # milliseconds in which users take the last output, after the shell has exited
_LONGEST_PATH = 100  # bytes of a socket's path; Linux allows 107, other systems fewer


def attach(folder: str, name: str, command: list[str], env: dict[str, str], size: Fields,
           where: str) -> socket.socket:  # fmt: skip
    """Return a connection to the shell `name`, which is started with `command` in the folder
    `where` if it does not run. Its socket is below `folder`. Raises OSError.
    """
    place = os.path.join(folder, ".cavvy-shells")
    os.makedirs(place, mode=0o700, exist_ok=True)
    inside = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(inside).st_uid != os.geteuid():
            raise OSError(errno.EPERM, "the folder of the kept shells belongs to another user")
        os.fchmod(inside, 0o700)
        fcntl.flock(inside, fcntl.LOCK_EX)  # two users who connect at once get the same shell
        path = _name_socket(place, inside, name)
        made = _connect(path)
        if made is None:
            _start(path, os.path.join(place, name), command, env, size, where)
            made = socket.socket(socket.AF_UNIX)
            made.connect(path)
    finally:
        os.close(inside)
    made.sendall(json.dumps({**_read_size(size), "attach": True}).encode() + b"\n")
    return made


def resize(folder: str, name: str, size: Fields) -> None:
    """Give the shell's terminal this size. Raises OSError."""
    place = os.path.join(folder, ".cavvy-shells")
    inside = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        made = _connect(_name_socket(place, inside, name))
    finally:
        os.close(inside)
    if made is not None:
        with made:
            made.sendall(json.dumps({**_read_size(size), "attach": False}).encode() + b"\n")


def _name_socket(place: str, inside: int, name: str) -> str:
    if not name.isalnum() or len(name) > 32:
        raise ValueError("the name of a kept shell has at most 32 letters and digits")
    path = os.path.join(place, name)
    return path if len(os.fsencode(path)) <= _LONGEST_PATH else f"/proc/self/fd/{inside}/{name}"


def _connect(path: str) -> socket.socket | None:
    made = socket.socket(socket.AF_UNIX)
    try:
        made.connect(path)
    except OSError as error:
        made.close()
        if error.errno in (errno.ENOENT, errno.ECONNREFUSED):
            return None
        raise
    return made


def _read_size(size: Fields) -> Fields:
    rows, cols = int(size.get("rows") or 24), int(size.get("cols") or 80)
    return {"rows": min(max(rows, 1), 9999), "cols": min(max(cols, 1), 9999)}


def _start(path: str, name: str, command: list[str], env: dict[str, str], size: Fields,
           where: str) -> None:  # fmt: skip
    """Start the process that holds the terminal. It is not a child of the session, and shares no
    open file with it.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(8)
    child = os.fork()
    if child:
        listener.close()
        os.waitpid(child, 0)
        return
    try:
        os.setsid()
        if os.fork() == 0:
            _become_holder(listener, name, command, env, size, where)
    finally:
        os._exit(0)


def _become_holder(listener: socket.socket, name: str, command: list[str], env: dict[str, str],
                   size: Fields, where: str) -> None:  # fmt: skip
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    kept = listener.fileno()
    os.closerange(3, kept)
    os.closerange(kept + 1, 65536)
    listener.setblocking(False)
    ours, theirs = os.openpty()
    _set_size(ours, size)
    child = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=env,
        cwd=where,
        start_new_session=True,
        preexec_fn=_take_terminal,
    )
    os.close(theirs)
    _Holder(listener, ours).serve(child)
    with contextlib.suppress(OSError):
        os.unlink(name)


def _take_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _set_size(terminal: int, size: Fields) -> None:
    wanted = _read_size(size)
    packed = struct.pack("HHHH", wanted["rows"], wanted["cols"], 0, 0)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, packed)


class _Client:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.head: bytearray | None = bytearray()  # the first line, until it is complete
        self.attached = False
        self.out = bytearray()


class _Holder:
    """Passes bytes between the terminal and the users who are connected."""

    def __init__(self, listener: socket.socket, terminal: int) -> None:
        self._listener, self._terminal = listener, terminal
        self._kept, self._keys = bytearray(), bytearray()
        self._clients: dict[int, _Client] = {}
        os.set_blocking(terminal, False)

    def serve(self, child: subprocess.Popen[bytes]) -> None:
        """Serve until the shell has exited or closed the terminal, and its output is delivered."""
        wake, woken = os.pipe()
        os.set_blocking(woken, False)
        signal.set_wakeup_fd(woken)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        ended = False
        while not ended or any(each.out for each in self._clients.values()):
            poll = select.poll()
            poll.register(self._listener, select.POLLIN)
            poll.register(wake, select.POLLIN)
            if not ended:
                poll.register(self._terminal, select.POLLIN | (select.POLLOUT * bool(self._keys)))
            for fd, client in self._clients.items():
                poll.register(fd, select.POLLIN | (select.POLLOUT * bool(client.out)))
            ready = poll.poll(_LAST_MS if ended else None)
            if not ready:
                return
            for fd, events in ready:
                if fd == self._listener.fileno():
                    self._accept()
                elif fd == wake:
                    os.read(wake, 512)
                elif fd == self._terminal:
                    ended = not self._move_terminal(events) or ended
                elif fd in self._clients:
                    self._move_client(self._clients[fd], events)
            if not ended and child.poll() is not None:
                while self._draw():
                    pass
                ended = True

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._clients[connection.fileno()] = _Client(connection)

    def _move_terminal(self, events: int) -> bool:
        """Return whether the terminal is still open."""
        if events & select.POLLOUT and self._keys:
            try:
                del self._keys[: os.write(self._terminal, self._keys[:_PIECE])]
            except BlockingIOError:
                pass
            except OSError:
                return False
        return self._draw() is not None if events & ~select.POLLOUT else True

    def _draw(self) -> int | None:
        """Pass the terminal's output on. Return the number of bytes, or None if the terminal is
        closed.
        """
        try:
            data = os.read(self._terminal, _PIECE)
        except BlockingIOError:
            return 0
        except OSError:  # the last program has exited
            return None
        self._kept += data
        del self._kept[: max(0, len(self._kept) - _KEPT)]
        for client in self._clients.values():
            if client.attached:
                client.out += data
                if len(client.out) > _MOST:
                    client.out[:] = self._newest()
        return len(data) or None

    def _newest(self) -> bytes:
        """Return the kept output. Its first line may be incomplete, so it is left out."""
        full = len(self._kept) >= _KEPT
        start = self._kept.find(b"\n") + 1 if full else 0
        return bytes(self._kept[start:])

    def _move_client(self, client: _Client, events: int) -> None:
        try:
            if events & select.POLLOUT and client.out:
                del client.out[: client.connection.send(client.out[:_PIECE])]
            if events & ~select.POLLOUT:
                data = client.connection.recv(_PIECE)
                if not data:
                    raise ConnectionResetError
                self._take(client, data)
        except BlockingIOError:
            return
        except (OSError, ValueError, TypeError):
            self._clients.pop(client.connection.fileno(), None)
            client.connection.close()

    def _take(self, client: _Client, data: bytes) -> None:
        if client.head is None:
            self._keys += data
            return
        client.head += data
        line, newline, rest = bytes(client.head).partition(b"\n")
        if not newline:
            if len(client.head) > _PIECE:
                raise ValueError
            return
        client.head, asked = None, json.loads(line)
        if not isinstance(asked, dict):
            raise ValueError
        _set_size(self._terminal, asked)
        if not asked.get("attach"):
            raise ConnectionResetError  # a client that only sets the size is done
        client.attached = True
        client.out += self._newest()
        self._keys += rest
        # A program that uses the whole screen draws it again, even if the size is as before.
        with contextlib.suppress(OSError):
            os.killpg(os.tcgetpgrp(self._terminal), signal.SIGWINCH)
