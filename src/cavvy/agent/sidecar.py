"""Runs a helper process repeatedly while the work runs, and once more after the work has ended."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod

from .control_client import complain
from .loop import by_line
from .work.process import WorkProcess
from .work.reaper import ChildCommand

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .config import AgentConfig
    from .loop import EventLoop, LoopTimer


class SidecarPlace:
    """Where a process beside the work runs: the agent's loop and configuration, and how it reports
    to the server."""

    __slots__ = ("config", "loop", "say")

    def __init__(self, loop: EventLoop, config: AgentConfig, say: Callable[..., None]) -> None:
        self.loop, self.config, self.say = loop, config, say


class SidecarProcess(ABC):
    """Runs a helper process, at most one at a time. Each line that the process prints is a JSON
    object. `finish` starts the last run, and `kill` ends the last run early.

    Subclasses implement four methods. `_look` is called every `every_s` seconds, and starts a
    process if needed. `_heard` handles a line, and `_over` handles the end of a process. `_finish`
    completes the sidecar's task after the work has ended, then calls `done`.
    """

    def __init__(self, place: SidecarPlace, every_s: float) -> None:
        self._loop, self._config, self._say = place.loop, place.config, place.say
        self._every_s = every_s
        self._process: WorkProcess | None = None
        self._off = False
        self._done: Callable[[], None] | None = None
        self.seconds = 0.0  # seconds that the last run took
        self._timer: LoopTimer | None = place.loop.after(every_s, self._tick)

    @property
    def finishing(self) -> bool:
        """Whether the work has ended and the last run is in progress."""
        return self._done is not None

    def finish(self, done: Callable[[], None]) -> None:
        """Start the last run, because the work has ended; call `done` after the run."""
        self._done = done
        self._loop.cancel(self._timer)
        if self._process is None:
            self._finish(done)

    def kill(self) -> None:
        """Kill the running process and start no further process."""
        self._off = True
        if self._process is not None:
            self._process.kill()

    def _tick(self) -> None:
        self._timer = self._loop.after(self._every_s, self._tick)
        self._look()

    def _warn(self, text: str) -> None:
        """Warn that files of the work may be lost."""
        self._say("event", name="unsafe", text=text)

    def _run(self, call: Callable[[], int]) -> str:
        """Start a process; return "", or the reason if the process cannot be started."""
        command = ChildCommand([], {}, self._config.home, lambda channel: call())
        try:
            self._process = WorkProcess(
                self._loop, command, wrote=by_line(self._wrote), gone=self._gone
            )
        except OSError as error:
            return str(error)
        return ""

    def _wrote(self, line: bytes) -> None:
        try:
            fields = json.loads(line)
        except ValueError:
            fields = None
        if isinstance(fields, dict):
            self._heard(fields)
        else:
            complain(line.decode("utf-8", "replace"))  # the process has printed an error message

    def _gone(self) -> None:
        self._process = None
        self._over()
        if self._done is not None:
            self._finish(self._done)

    @abstractmethod
    def _look(self) -> None:
        """Start the helper process if it is needed."""

    @abstractmethod
    def _heard(self, told: dict[str, Any]) -> None:
        """Handle a line of the process's output."""

    @abstractmethod
    def _over(self) -> None:
        """Handle the exit of the helper process."""

    @abstractmethod
    def _finish(self, done: Callable[[], None]) -> None:
        """Finish the sidecar's task after the work has ended, then call `done`. The method is
        called when the work ends. It is called again whenever a process of the work ends after
        that.
        """
