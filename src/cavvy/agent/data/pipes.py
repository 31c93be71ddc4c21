"""The process beside the work that fills its pipes, as the agent sees it."""

from __future__ import annotations

import json
import os

from ..loop import READ
from ..work.process import WorkProcess
from ..work.reaper import ChildCommand
from .paths import find_input
from .stream import stream_inputs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..config import AgentConfig, WorkConfig
    from ..loop import EventLoop
    from ..work.environment import RankPaths


class PipeStreams:
    """Starts with the work and ends with it; `failure` says why the work had to be ended,
    `outcome` as what.
    """

    def __init__(
        self, loop: EventLoop, config: AgentConfig, places: RankPaths, lock: int, work: WorkConfig
    ) -> None:
        self._loop = loop
        self._config = config
        self._places = places
        self._lock = lock
        self._wanted = [
            (at, work.inputs[at].source, find_input(places, at, work.inputs[at].target))
            for at in work.streams
        ]
        self._process: WorkProcess | None = None
        self._channel = -1
        self._lines = b""
        self.failure, self.outcome = "", "exit"

    def start(self, say: Callable[..., None], stop: Callable[[], None]) -> None:
        """Raises OSError. `say` is told of progress, `stop` ends the work."""
        self._say, self._stop = say, stop
        self._channel, writer = os.pipe()
        os.set_blocking(self._channel, False)
        self._loop.watch(self._channel, READ, self._heard)
        command = ChildCommand([], dict(os.environ), self._places.home)
        command.channel = writer
        command.call = lambda: stream_inputs(self._config, self._wanted, writer)
        try:
            self._process = WorkProcess(
                self._loop,
                command,
                self._lock,
                wrote=lambda data: None,
                ended=self._ended,
                gone=lambda: None,
            )
        finally:
            os.close(writer)

    def end(self) -> None:
        """The work is over."""
        if self._process is not None:
            self._process.kill()
        self._close()

    def _ended(self, code: int | None) -> None:
        if code and not self.failure:
            self.failure = "the process that streams the inputs was killed"
            self._stop()

    def _heard(self, events: int) -> None:
        try:
            data = os.read(self._channel, 65536)
        except BlockingIOError:
            return
        if not data:
            self._close()
        *lines, self._lines = (self._lines + data).split(b"\n")
        for line in lines:
            if line.startswith(b"moved "):
                self._say("event", name="moved", text=line[6:].decode("utf-8", "replace"))
            elif not self.failure:
                told = json.loads(line)
                self.failure, self.outcome = str(told["reason"]), str(told["outcome"])
                self._stop()

    def _close(self) -> None:
        if self._channel >= 0:
            self._loop.unwatch(self._channel)
            os.close(self._channel)
            self._channel = -1
