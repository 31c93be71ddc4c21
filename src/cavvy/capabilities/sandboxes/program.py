"""A program in a sandbox: its input, its outputs and its end."""

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

from cavvy.capabilities.functions.app import BothWays
from cavvy.capabilities.sandboxes.errors import SandboxLost
from cavvy.capabilities.sandboxes.link import ProgramStream, SandboxLink


class SandboxOutput:
    """An output of a program. Iterating yields its lines (of text, or bytes); `read` returns all
    that is left. What a sandbox prints is not trusted: it can have codes that change a terminal.
    """

    def __init__(self, stream: ProgramStream, fd: int, *, text: bool) -> None:
        self._stream, self._fd, self._text = stream, fd, text
        self._rest = b""

    def __iter__(self) -> Iterator[Any]:
        while line := self._read_line():
            yield self._decode(line)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while line := await asyncio.to_thread(self._read_line):
            yield self._decode(line)

    @property
    def read(self) -> BothWays[..., Any]:
        """Return all that is left, when the output has ended."""
        return BothWays(self._read, partial(asyncio.to_thread, self._read))

    @property
    def dropped(self) -> int:
        """Bytes that were dropped: while only the end is waited for, the last 64 MiB are kept."""
        return self._stream.dropped[self._fd]

    def read_pieces(self) -> Iterator[bytes]:
        """Yield bytes as they arrive. Raises SandboxLost."""
        if self._rest:
            rest, self._rest = self._rest, b""
            yield rest
        while data := self._stream.take(self._fd):
            yield data
        if self._stream.lost:
            raise SandboxLost(self._stream.lost)

    def _read(self) -> Any:
        return self._decode(b"".join(self.read_pieces()))

    def _read_line(self) -> bytes:
        """Return the next line, or a part of a very long one; b"" at the end."""
        held = bytearray(self._rest)
        start = 0
        while (at := held.find(b"\n", start)) < 0 and len(held) < _MOST_LINE:
            start = len(held)
            data = self._stream.take(self._fd)
            if not data:
                self._rest = b""
                return bytes(held)
            held += data
        end = at + 1 if at >= 0 else len(held)
        self._rest = bytes(held[end:])
        return bytes(held[:end])

    def _decode(self, data: bytes) -> Any:
        return data.decode(errors="replace") if self._text else data


_MOST_LINE = 1 << 20


class SandboxInput:
    """The input of a program."""

    def __init__(self, stream: ProgramStream) -> None:
        self._stream = stream

    @property
    def write(self) -> BothWays[..., None]:
        """Write text or bytes, and wait until the program's pipe has taken them. Raises
        BrokenPipeError if nothing reads them."""

        async def write(data: str | bytes) -> None:
            await asyncio.to_thread(self._write, data)

        return BothWays(self._write, write)

    @property
    def write_eof(self) -> BothWays[..., None]:
        """End the input."""
        return BothWays(self._end, partial(asyncio.to_thread, self._end))

    def _write(self, data: str | bytes) -> None:
        raw = data.encode() if isinstance(data, str) else bytes(data)
        if raw and not self._stream.write(raw):
            raise BrokenPipeError("the program reads no input any more")

    def _end(self) -> None:
        self._stream.write(b"", last=True)


class SandboxProcess:
    """A program that runs in a sandbox. `why` says why it was killed: memory, timeout and others;
    "" of one that ended by itself.
    """

    def __init__(
        self,
        link: SandboxLink,
        stream: ProgramStream,
        argv: tuple[str, ...],
        *,
        text: bool,
        timeout: float | None = None,
    ) -> None:
        self.args = argv
        self._link, self._stream = link, stream
        self.stdin = SandboxInput(stream)
        self.stdout = SandboxOutput(stream, 1, text=text)
        self.stderr = SandboxOutput(stream, 2, text=text)
        self._timed_out = False
        if timeout is not None:
            self._timer = threading.Timer(timeout, self._run_out)
            self._timer.daemon = True
            self._timer.start()

    @property
    def returncode(self) -> int | None:
        """The exit code, or the negative number of the signal that has killed the program; None
        while it runs. A program that cannot be started has 127."""
        return self._stream.code

    @property
    def why(self) -> str:
        return "timeout" if self._timed_out else self._stream.why

    @property
    def wait(self) -> BothWays[..., int | None]:
        """Wait until the program has ended, for at most `timeout` seconds, and return its exit
        code. Raises SandboxLost."""
        return BothWays(self._wait, partial(asyncio.to_thread, self._wait))

    def poll(self) -> int | None:
        """Return the exit code, or None while the program runs."""
        return self._stream.code

    def kill(self, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal to the program and its group."""
        self._link.kill(self._stream, int(signal_number))

    def read_pieces(self) -> Iterator[bytes]:
        """Yield the output as it arrives, as bytes."""
        return self.stdout.read_pieces()

    def read_error(self, most: int) -> bytes:
        """Return the beginning of the error output of a program that has ended."""
        found = b""
        for each in self.stderr.read_pieces():
            found = (found + each)[:most]
        return found

    def write_bytes(self, data: bytes, *, last: bool = False) -> bool:
        """Write to the input. Return False if nothing reads it."""
        return self._stream.write(data, last=last)

    def _wait(self, timeout: float | None = None) -> int | None:
        return self._stream.wait(timeout)

    def _run_out(self) -> None:
        if self._stream.code is None:
            self._timed_out = True
            self.kill()

    def __repr__(self) -> str:
        state = "running" if self.returncode is None else f"exit code {self.returncode}"
        return f"<SandboxProcess {self.args[0]!r:.60} {state}>"
