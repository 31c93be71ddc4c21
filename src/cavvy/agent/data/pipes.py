"""Starts and ends the process that fills the pipes of streamed inputs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

from ..config import AgentConfig
from ..documents import WorkConfig
from ..loop import EventLoop
from ..work.process import WorkProcess
from ..work.reaper import ChildCommand
from .paths import find_input
from .stream import stream_inputs


class PipeStreams:
    """The process that fills the pipes while the work runs. If the process fails, `failure` is the
    reason, `outcome` is the outcome of the work, and `stop` is called to end the work. `say`
    reports progress. Raises OSError.
    """

    def __init__(
        self,
        loop: EventLoop,
        config: AgentConfig,
        work: WorkConfig,
        say: Callable[..., None],
        stop: Callable[[], None],
    ) -> None:
        self._say, self._stop = say, stop
        self.failure, self.outcome = "", "exit"
        self._over = False
        wanted = [
            (at, work.inputs[at].source, find_input(config, at, work.inputs[at].target))
            for at in work.streams
        ]
        command = ChildCommand(
            [],
            dict(os.environ),
            config.home,
            lambda channel: stream_inputs(config, wanted, channel),
        )
        self._process = WorkProcess(loop, command, heard=self._heard, ended=self._ended)

    def end(self) -> None:
        """Kill the process that writes into the pipes, because the work has ended."""
        self._over = True
        self._process.kill()

    def _ended(self, code: int | None) -> None:
        if code != 0:
            self._fail("the process that streams the inputs was killed", "exit")

    def _heard(self, line: bytes) -> None:
        if not line.startswith(b"moved "):
            result = json.loads(line)
            self._fail(str(result["reason"]), str(result["outcome"]))
        elif not self._over:
            self._say("event", name="moved", text=line[6:].decode("utf-8", "replace"))

    def _fail(self, reason: str, outcome: str) -> None:
        if not self.failure and not self._over:
            self.failure, self.outcome = reason, outcome
            self._stop()
