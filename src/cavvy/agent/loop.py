"""The agent's event loop: one thread waits for files, signals and timers, and calls handlers."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable

READ = select.POLLIN
WRITE = select.POLLOUT


class LoopTimer:
    """A callback that is called at the time `due` of the monotonic clock, unless it is
    cancelled."""

    __slots__ = ("call", "due")

    def __init__(self, due: float, call: Callable[[], None]) -> None:
        self.due = due
        self.call = call


class EventLoop:
    """Calls handlers when their files are ready, and timers when they are due, until `stop` is
    called.
    """

    def __init__(self, lock: int = -1) -> None:
        self.lock = lock  # the file descriptor of the rank's lock; reapers get a copy of it
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[int], object]] = {}
        # there are only a few timers, so a search is cheaper than a heap
        self._timers: list[LoopTimer] = []
        self._signals: dict[int, Callable[[], None]] = {}
        self._wake: tuple[int, int] | None = None
        self._running = True

    def watch(self, fd: int, events: int, handler: Callable[[int], object]) -> None:
        """Call `handler(events)` whenever `fd` is ready for `events`. A second call for the same
        `fd` replaces its events and its handler.
        """
        self._poll.register(fd, events)
        self._handlers[fd] = handler

    def unwatch(self, fd: int) -> None:
        """Stop watching `fd`. The method must be called before the file is closed."""
        if self._handlers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def after(self, seconds: float, call: Callable[[], None]) -> LoopTimer:
        """Call `call` once, `seconds` from now."""
        timer = LoopTimer(time.monotonic() + seconds, call)
        self._timers.append(timer)
        return timer

    def cancel(self, timer: LoopTimer | None) -> None:
        """Cancel the timer, unless it has already fired or was cancelled."""
        if timer in self._timers:
            self._timers.remove(timer)

    def on_signal(self, number: int, call: Callable[[], None]) -> None:
        """Call `call` from the loop whenever the signal has arrived."""
        if self._wake is None:
            self._wake = make_wake_pipe()
            self.watch(self._wake[0], READ, self._signalled)
        self._signals[number] = call
        signal.signal(number, _noted)

    def stop(self) -> None:
        self._running = False

    def close(self) -> None:
        """Stop receiving signals, so that another loop can receive them. The caller must keep the
        signals blocked until the other loop has its own handlers.
        """
        if self._wake is not None:
            signal.set_wakeup_fd(-1)
            for end in self._wake:
                os.close(end)
            self._wake = None

    def run(self) -> None:
        while self._running:
            self._call_due()
            ready = [
                (self._handlers.get(fd), fd, events)
                for fd, events in self._poll.poll(self._wait_ms())
            ]
            for handler, fd, events in ready:
                # An earlier handler of this round may have closed the file, and the file's number
                # may belong to a new file by now.
                if handler is not None and self._handlers.get(fd) is handler:
                    handler(events)

    def _wait_ms(self) -> int | None:
        if not self._running:
            return 0  # a timer has stopped the loop
        if not self._timers:
            return None
        due = min(timer.due for timer in self._timers)
        return max(0, int((due - time.monotonic()) * 1000) + 1)

    def _call_due(self) -> None:
        now = time.monotonic()
        for timer in [timer for timer in self._timers if timer.due <= now]:
            if timer in self._timers:
                self._timers.remove(timer)
                timer.call()

    def _signalled(self, events: int) -> None:
        assert self._wake is not None
        for number in set(os.read(self._wake[0], 512)):
            call = self._signals.get(number)
            if call is not None:
                call()


class PipeReader:
    """Passes the data of a pipe to `took`, and calls `ended` at the end of the pipe."""

    def __init__(
        self,
        loop: EventLoop,
        fd: int,
        took: Callable[[bytes], None],
        ended: Callable[[], None] | None = None,
    ) -> None:
        self._loop, self._fd, self._took, self._ended = loop, fd, took, ended
        os.set_blocking(fd, False)
        self.pause(False)

    def pause(self, paused: bool) -> None:
        """Pause or resume reading; while reading is paused, the writer waits."""
        if self._fd >= 0:
            self._loop.watch(self._fd, 0 if paused else READ, self._read)

    def write(self, data: bytes) -> None:
        """Write data if the file is a socket whose other end is still open."""
        if self._fd >= 0:
            try:
                os.write(self._fd, data)
            except OSError:
                return  # the loop will detect the end of the connection

    def move(self, loop: EventLoop) -> None:
        """Read in another loop from now on; the former one must no longer run."""
        self._loop = loop
        self.pause(False)

    def read_waiting(self) -> None:
        """Read what waits to be read."""
        while self.has_data() and self._read(READ):
            pass

    def has_data(self) -> bool:
        """Whether data wait to be read, such as while reading is paused."""
        if self._fd < 0:
            return False
        poll = select.poll()
        poll.register(self._fd, READ)
        return bool(poll.poll(0))

    def drain(self) -> None:
        """Read the remaining data, and close the file."""
        while self._fd >= 0 and self._read(READ):
            pass
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.unwatch(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _read(self, events: int) -> bool:
        """Read from the file once; return whether data was available."""
        try:
            data = os.read(self._fd, 65536)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if data:
            self._took(data)
            return True
        self.close()
        if self._ended is not None:
            self._ended()
        return False


def by_line(take: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """Return a function that takes a stream piece by piece and passes each complete line to
    `take`."""
    rest = b""

    def feed(data: bytes) -> None:
        nonlocal rest
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            take(line)

    return feed


def make_wake_pipe() -> tuple[int, int]:
    """Return a non-blocking pipe that receives the number of each caught signal."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    return reader, writer


def _noted(number: int, frame: object) -> None:
    """Do nothing: this handler replaces the signal's default action, and the wake-up pipe reports
    the signal to the loop."""
