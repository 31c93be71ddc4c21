"""Gives a user shells, connections and files on this node, multiplexed over one input stream and
one output stream.

This module runs in a separate process with the work's environment. `docs/guides/access.md` and
`client/tunnel` describe the frames.
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

from ..loop import make_wake_pipe
from . import frames, kept_shell
from .files import NodeFileCalls, answer
from .folder_watch import FolderWatch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Fields = dict[str, Any]

# the first channel number that this end assigns; the user's end assigns the numbers below
FROM_HERE = 1 << 31


class SessionTarget:
    """The environment of the session's commands and files: this node or a container on this
    node."""

    def __init__(
        self,
        env: dict[str, str],
        folder: str,
        root: Callable[[], str],
        follow: Callable[[int], tuple[list[str], list[str]]] | None = None,
    ) -> None:
        self.env, self.folder, self.root = env, folder, root
        # Returns, for the number of a channel, the prefix that runs a command inside the container,
        # and the command that sends SIGHUP to this command. None without a container.
        self._follow = follow

    def command(self, asked: Fields, number: int) -> tuple[list[str], list[str]]:
        """Return the command that runs the user's arguments or shell line. Without arguments or a
        shell line, return the command that starts an interactive shell. The second command sends
        SIGHUP to the first command in its container; it is empty if signals need no such help.
        """
        words = asked.get("argv") or (
            ["/bin/sh", "-c", asked["line"]] if asked.get("line") else None
        )
        if self._follow is not None:
            inside = words or [
                "/bin/sh",
                "-c",
                "if command -v bash >/dev/null; then exec bash; else exec sh; fi",
            ]
            prefix, hang_up = self._follow(number)
            if not hang_up:  # Apptainer
                return [*prefix, *inside], []
            flags = ["-i", "-t"] if asked.get("pty") else ["-i"]
            return [*prefix[:2], *flags, *prefix[2:], *inside], hang_up
        shell = self.env.get("SHELL") or "/bin/bash"
        return words or [shell if os.access(shell, os.X_OK) else "/bin/sh"], []


class SessionChannel:
    """One shell, command or connection of a user's session. Data is read from the file descriptors
    `sources` and written to the file descriptor `sink`.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.sources: dict[int, int] = {}  # file descriptor -> kind of its frames
        self.sink = -1
        self.credit = frames.WINDOW  # bytes that may still be sent before the peer confirms some
        self.waiting = bytearray()  # bytes waiting for the sink
        self.ended = False  # whether the peer sends no more data
        self.child: subprocess.Popen[bytes] | None = None
        # sends SIGHUP to the child's command in its container, unless the command has ended
        self.hang_up: list[str] = []
        self.terminal = False
        self.shell = ""  # the name of the kept shell to which the connection leads
        self.connection: socket.socket | None = None
        self.listener: socket.socket | None = None
        self.watch: FolderWatch | None = None
        self.held = contextlib.ExitStack()  # keeps the watched folder's path valid
        # of a watch: whether there is a change to tell, and whether the peer wants to be told
        self.changed = self.wanted = False


class RemoteSession:
    """Serves a user's session until the session's input ends."""

    def __init__(self, source: int, sink: int, place: SessionTarget) -> None:
        self._source, self._sink, self._place = source, sink, place
        self._in = bytearray()
        self._channels: dict[int, SessionChannel] = {}
        self._by_file: dict[int, SessionChannel] = {}
        self._poll = select.poll()
        self._next = FROM_HERE

    def serve(self) -> int:
        wake, _ = make_wake_pipe()
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        os.set_blocking(self._source, False)
        self._poll.register(self._source, select.POLLIN)
        self._poll.register(wake, select.POLLIN)
        while True:
            for fd, events in self._poll.poll():
                if fd == self._source:
                    if not self._receive():
                        self._hang_up()
                        return 0
                elif fd == wake:
                    os.read(wake, 512)
                elif fd in self._by_file:
                    self._move(fd, events)
            self._reap()

    def _hang_up(self) -> None:
        """Send SIGHUP to the user's commands, as a closed terminal does."""
        for channel in list(self._channels.values()):
            self._drop(channel, told=False)

    # Reading and sending frames

    def _say(self, number: int, kind: int, payload: bytes = b"") -> None:
        frame = memoryview(frames.encode_frame(number, kind, payload))
        while frame:
            frame = frame[os.write(self._sink, frame) :]

    def _receive(self) -> bool:
        try:
            data = os.read(self._source, 262144)
        except BlockingIOError:
            return True
        if not data:
            return False
        self._in += data
        for frame in frames.read_frames(self._in):
            self._heard(*frame)
        return True

    def _heard(self, number: int, kind: int, payload: bytes) -> None:
        if kind == frames.OPEN:
            self._open(number, json.loads(payload))
            return
        if kind == frames.CALL:
            self._say(number, frames.REPLY, answer(self._place.root, payload))
            return
        channel = self._channels.get(number)
        if channel is None:
            return
        if kind == frames.DATA and channel.watch is not None:
            channel.wanted = True
            self._say(number, frames.CREDIT, struct.pack(">I", len(payload)))
            self._tell_change(channel)
        elif kind == frames.DATA:
            channel.waiting += payload
            self._pour(channel)
        elif kind == frames.EOF:
            channel.ended = True
            self._pour(channel)
        elif kind == frames.CREDIT:
            channel.credit += struct.unpack(">I", payload)[0]
            self._watch(channel)
        elif kind == frames.CONTROL and channel.shell:
            with contextlib.suppress(OSError):
                where = self._place.env.get("TMUX_TMPDIR") or self._folder()
                kept_shell.resize(where, channel.shell, json.loads(payload))
        elif kind == frames.CONTROL:
            control(channel, json.loads(payload))
        elif kind == frames.CLOSE:
            self._drop(channel, told=False)

    # Opening channels

    def _open(self, number: int, asked: Fields) -> None:
        channel = SessionChannel(number)
        try:
            if asked["what"] == "run" and asked.get("keep"):
                self._attach_shell(channel, asked)
            elif asked["what"] == "run":
                self._run(channel, asked)
            elif asked["what"] == "watch":
                self._watch_folder(channel, asked)
            elif asked["what"] == "tcp":
                made = socket.create_connection((asked["host"], int(asked["port"])), timeout=15)
                self._attach(channel, made)
            else:
                self._listen(channel, asked)
        except (OSError, ValueError, OverflowError) as error:
            said = {
                "error": getattr(error, "strerror", None) or str(error),
                "errno": getattr(error, "errno", 0) or 0,
            }
            self._say(number, frames.FAILED, json.dumps(said).encode())
            return
        self._channels[number] = channel
        port = channel.listener.getsockname()[1] if channel.listener is not None else 0
        self._say(number, frames.OPENED, json.dumps({"port": port}).encode())
        self._watch(channel)

    def _run(self, channel: SessionChannel, asked: Fields) -> None:
        env = {**self._place.env, **asked.get("env", {})}
        folder, terminal = self._folder(), asked.get("pty")
        if terminal:
            env["TERM"] = str(terminal.get("term") or "xterm")
        command, channel.hang_up = self._place.command(asked, channel.number)
        ends = _connect_streams(channel, terminal)
        try:
            channel.child = subprocess.Popen(
                command,
                stdin=ends[0],
                stdout=ends[1],
                stderr=ends[2],
                env=env,
                cwd=folder,
                start_new_session=True,
                preexec_fn=_take_terminal if terminal else None,
            )
        except BaseException:
            for fd in (channel.sink, *channel.sources):
                os.close(fd)
            raise
        finally:
            for fd in set(ends):
                os.close(fd)
        for fd in (channel.sink, *channel.sources):
            os.set_blocking(fd, False)
            self._by_file[fd] = channel

    def _attach_shell(self, channel: SessionChannel, asked: Fields) -> None:
        """Connect the channel to a shell that stays when the session ends."""
        terminal = asked.get("pty") or {}
        env = {**self._place.env, **asked.get("env", {})}
        env["TERM"] = str(terminal.get("term") or "xterm")
        channel.shell = str(asked["keep"])
        command, _ = self._place.command(asked, channel.number)
        folder = self._folder()
        where = env.get("TMUX_TMPDIR") or folder
        made = kept_shell.attach(where, channel.shell, command, env, terminal, folder)
        self._attach(channel, made)

    def _folder(self) -> str:
        return self._place.folder if os.path.isdir(self._place.folder) else "/"

    def _attach(self, channel: SessionChannel, connection: socket.socket) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel.connection = connection
        channel.sink = os.dup(connection.fileno())
        channel.sources = {connection.fileno(): frames.DATA}
        for fd in (channel.sink, *channel.sources):
            self._by_file[fd] = channel

    def _listen(self, channel: SessionChannel, asked: Fields) -> None:
        """Accept connections to a port of the node; each connection opens a channel."""
        family = socket.AF_INET6 if ":" in asked["host"] else socket.AF_INET
        channel.listener = socket.create_server((asked["host"], int(asked["port"])), family=family)
        channel.listener.setblocking(False)
        self._by_file[channel.listener.fileno()] = channel
        self._poll.register(channel.listener.fileno(), select.POLLIN)

    def _watch_folder(self, channel: SessionChannel, asked: Fields) -> None:
        """Watch a folder. For each byte that the peer sends, it is told one change."""
        path = channel.held.enter_context(NodeFileCalls(self._place.root()).find(asked))
        channel.watch = FolderWatch(path, asked.get("without", ()))
        self._by_file[channel.watch.fileno()] = channel
        self._poll.register(channel.watch.fileno(), select.POLLIN)

    def _tell_change(self, channel: SessionChannel) -> None:
        if channel.changed and channel.wanted:
            channel.changed = channel.wanted = False
            self._say(channel.number, frames.DATA, b"\n")

    def _accept(self, channel: SessionChannel) -> None:
        assert channel.listener is not None
        try:
            connection, peer = channel.listener.accept()
        except OSError:
            return
        made = SessionChannel(self._next)
        self._next += 1
        self._attach(made, connection)
        self._channels[made.number] = made
        told = {"listener": channel.number, "peer": [str(peer[0]), peer[1]]}
        self._say(made.number, frames.ACCEPTED, json.dumps(told).encode())
        self._watch(made)

    # Moving bytes between files and frames

    def _watch(self, channel: SessionChannel) -> None:
        """Choose what to poll: the sources, while the peer accepts data; and the sink, while there
        is data to write to it.
        """
        for fd in channel.sources:
            self._want(fd, select.POLLIN if channel.credit > 0 else 0)
        if channel.sink >= 0:
            self._want(channel.sink, select.POLLOUT if channel.waiting else 0)

    def _want(self, fd: int, events: int) -> None:
        if events:
            self._poll.register(fd, events)
            return
        try:
            self._poll.unregister(fd)
        except KeyError:
            return

    def _move(self, fd: int, events: int) -> None:
        channel = self._by_file[fd]
        if channel.listener is not None:
            self._accept(channel)
        elif channel.watch is not None:
            channel.changed |= channel.watch.read()
            self._tell_change(channel)
        elif fd == channel.sink:
            self._pour(channel)
        else:
            self._draw(channel, fd)

    def _draw(self, channel: SessionChannel, fd: int) -> bool:
        """Read the available data of a source and send it; return whether any data was
        available."""
        if channel.credit <= 0:
            return False
        try:
            data = os.read(fd, min(frames.CHUNK, channel.credit))
        except BlockingIOError:
            return False
        except OSError:  # the terminal's last program has exited, or a connection was reset
            data = b""
        if data:
            channel.credit -= len(data)
            self._say(channel.number, channel.sources[fd], data)
            self._watch(channel)
            return True
        self._close_source(channel, fd)
        if not channel.sources and channel.child is None:
            self._say(channel.number, frames.EOF)
            self._end_connection(channel)
        return False

    def _pour(self, channel: SessionChannel) -> None:
        """Write as much data to the sink as the sink accepts."""
        taken = 0
        try:
            while channel.waiting and channel.sink >= 0:
                count = os.write(channel.sink, channel.waiting[: frames.CHUNK])
                del channel.waiting[:count]
                taken += count
        except BlockingIOError:
            pass
        except OSError:  # the reading process has exited
            taken += len(channel.waiting)
            channel.waiting.clear()
            channel.ended = True
        if taken:
            self._say(channel.number, frames.CREDIT, struct.pack(">I", taken))
        if channel.ended and not channel.waiting and channel.sink >= 0:
            if channel.terminal:
                # the character that a user types to end the input (Ctrl-D)
                os.write(channel.sink, b"\x04")
                channel.ended = False
                return
            if channel.connection is not None:
                with contextlib.suppress(OSError):
                    channel.connection.shutdown(socket.SHUT_WR)
            self._close_sink(channel)
            self._end_connection(channel)
        self._watch(channel)

    def _end_connection(self, channel: SessionChannel) -> None:
        """Drop the channel of a connection once both directions are closed."""
        if channel.child is None and not channel.sources and channel.sink < 0:
            self._drop(channel, told=True)

    # Closing channels

    def _reap(self) -> None:
        for channel in list(self._channels.values()):
            if channel.child is None or channel.child.poll() is None:
                continue
            while any(self._draw(channel, fd) for fd in list(channel.sources)):
                pass
            if channel.credit <= 0 and channel.sources:
                # the peer does not accept the last output yet, and the exit code must follow that
                # output
                continue
            code = channel.child.returncode
            said = {
                "code": code if code >= 0 else None,
                "signal": signal.Signals(-code).name[3:] if code < 0 else None,
            }
            self._say(channel.number, frames.EXIT, json.dumps(said).encode())
            self._drop(channel, told=True)

    def _close_source(self, channel: SessionChannel, fd: int) -> None:
        self._want(fd, 0)
        channel.sources.pop(fd, None)
        self._by_file.pop(fd, None)
        if channel.connection is None or channel.connection.fileno() != fd:
            os.close(fd)

    def _close_sink(self, channel: SessionChannel) -> None:
        if channel.sink >= 0:
            self._want(channel.sink, 0)
            self._by_file.pop(channel.sink, None)
            os.close(channel.sink)
            channel.sink = -1

    def _drop(self, channel: SessionChannel, *, told: bool) -> None:
        for fd in list(channel.sources):
            self._close_source(channel, fd)
        self._close_sink(channel)
        if channel.connection is not None:
            channel.connection.close()
        if channel.listener is not None:
            self._want(channel.listener.fileno(), 0)
            self._by_file.pop(channel.listener.fileno(), None)
            channel.listener.close()
        if channel.watch is not None:
            self._want(channel.watch.fileno(), 0)
            self._by_file.pop(channel.watch.fileno(), None)
            channel.watch.close()
        channel.held.close()
        if channel.child is not None and channel.child.poll() is None:
            try:
                os.killpg(channel.child.pid, signal.SIGHUP)
            except OSError as error:
                if error.errno != errno.ESRCH:
                    raise
        if channel.child is not None and channel.hang_up:
            null = subprocess.DEVNULL
            subprocess.Popen(channel.hang_up, stdin=null, stdout=null, stderr=null)
        self._channels.pop(channel.number, None)
        if told:
            self._say(channel.number, frames.CLOSE)


def control(channel: SessionChannel, asked: Fields) -> None:
    """Resize the terminal, or send the user's signal to the command."""
    if "cols" in asked and channel.terminal and channel.sink >= 0:
        resize(channel.sink, asked)
    number = getattr(signal, "SIG" + str(asked.get("signal", "")), None)
    if number is not None and channel.child is not None and channel.child.poll() is None:
        try:
            os.killpg(channel.child.pid, number)
        except OSError:
            return


def _connect_streams(channel: SessionChannel, terminal: Fields | None) -> tuple[int, int, int]:
    """Connect the channel to a new terminal or to three pipes. Return the process's descriptors for
    standard input, output and error.
    """
    if terminal:
        ours, theirs = os.openpty()
        resize(ours, terminal)
        channel.terminal = True
        channel.sink, channel.sources = os.dup(ours), {ours: frames.DATA}
        return theirs, theirs, theirs
    (stdin, channel.sink), (out, stdout), (err, stderr) = os.pipe(), os.pipe(), os.pipe()
    channel.sources = {out: frames.DATA, err: frames.ERR}
    return stdin, stdout, stderr


def _take_terminal() -> None:
    """Make standard input the controlling terminal; runs in the new process."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def resize(terminal: int, size: Fields) -> None:
    packed = struct.pack("HHHH", int(size.get("rows") or 24), int(size.get("cols") or 80), 0, 0)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, packed)
