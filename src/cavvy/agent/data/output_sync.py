"""Sends the outputs for which the task sets `every`: repeatedly while the work runs, and once more
after the work has ended, successfully or not.
"""

from __future__ import annotations

import json
import os
import time
from functools import partial

from ..control_client import complain
from ..http_client import TransferFailed
from ..sidecar import SidecarPlace, SidecarProcess
from ..work.folder import CannotBuild
from .paths import find_folders, find_output, remember_sent
from .upload import send_output

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ..config import AgentConfig
    from ..documents import WorkConfig

# A file that was written within this many seconds before a check is not sent until a later check or
# the end of the work.
STILL_S = 2.0


class OutputSync(SidecarProcess):
    """Sends changed outputs. A timer starts each check for changes. `finish` sends the remaining
    changes and then calls back; `kill` aborts this last transfer.
    """

    def __init__(self, place: SidecarPlace, work: WorkConfig) -> None:
        super().__init__(place, min(work.mirrored.values()))
        self._work = work
        self._problem = ""  # why the last check failed, or "" if it succeeded
        self._told = ""
        self._last = False  # whether this check is the last

    def hurry(self) -> None:
        """Check the outputs immediately, because the node will be reclaimed soon."""
        if self._done is None:
            self._look()

    def _look(self) -> None:
        if self._process is None and not self._off:
            self._start()

    def _start(self) -> None:
        self._problem, self._last = "it was killed", self._done is not None
        still_s, quiet = 0.0 if self._last else STILL_S, bool(self._told)
        why = self._run(lambda: send_changed(self._config, self._work, still_s, quiet=quiet))
        if why:
            self._problem = why
            complain(f"outputs cannot be sent now: {why}")

    def _heard(self, told: dict[str, Any]) -> None:
        if "moved" in told:
            self._say("event", name="moved", text=told["moved"])
        elif "sent" in told:
            self._say("upload", number=int(told["output"]), sent=int(told["sent"]))
        elif "refused" in told:
            self._warn(told["refused"])
        else:
            self._problem = str(told["problem"])
            if told["files"]:  # a check that sent nothing does not show how long sending takes
                self.seconds = float(told["seconds"])

    def _over(self) -> None:
        if self._done is None and self._problem != self._told:
            self._told = self._problem
            if self._problem:
                self._warn(
                    f"outputs could not be sent: {self._problem}; retrying every "
                    f"{self._every_s:g} s"
                )

    def _finish(self, done: Callable[[], None]) -> None:
        if not self._last and not self._off:
            self._start()
            if self._process is not None:
                return
        if self._off or self._problem:
            why = "no time was left to send the changes" if self._off else self._problem
            self._warn(f"the last changes to the outputs may be missing: {why}")
        done()


def send_changed(config: AgentConfig, work: WorkConfig, still_s: float, *, quiet: bool) -> int:
    """Send the changed outputs once; runs in its own process. The lines printed on standard output
    report progress; the last line is the result.
    """
    began, files, problem = time.monotonic(), 0, ""

    for index in work.mirrored:
        target = work.outputs[index].target
        try:
            path, known = find_output(config, work, index)
            if not os.path.lexists(path):
                continue
            try:
                meter = send_output(
                    config,
                    find_folders(config, work),
                    index,
                    path,
                    target,
                    lambda text: tell(moved=text),
                    known,
                    still_s=still_s,
                    quiet=quiet,
                    refuse=lambda text: None if still_s else tell(refused=text),
                    sent=partial(_tell_sent, index),
                )
            finally:
                remember_sent(config, index, known)
            files += meter.files
            if meter.files:
                meter.end()
        except (TransferFailed, CannotBuild, OSError) as error:
            problem = problem or f"{target}: {error}"
    tell(files=files, problem=problem, seconds=time.monotonic() - began)
    return 0


def tell(**fields: object) -> None:
    """Print a line for the agent."""
    os.write(1, (json.dumps(fields) + "\n").encode())


def _tell_sent(output: int, size: int) -> None:
    tell(output=output, sent=size)
