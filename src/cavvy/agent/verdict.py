"""Says why the work of a rank failed, and keeps the message about its exit on disk."""

from __future__ import annotations

import json
import os
import time

from .control_client import complain
from .disk import open_own, read_text, write_whole
from .ends import judge, judge_lost
from .failure_clues import FailureClues
from .gpu_faults import FAILURES, GPU, NETWORK, GpuFaultScanner, read_kernel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .config import AgentConfig
    from .documents import WorkConfig


class FailureCause:
    """Collects why the work failed: from its output, the kernel's log, and what else is known. Call
    `feed` with each piece of output.
    """

    def __init__(self) -> None:
        self._faults, self._born = GpuFaultScanner(), time.monotonic()
        self._clues = FailureClues()
        self._cut_off = False  # whether the work has lost its connection to another rank
        self._known = False  # whether the reason for the failure is known

    def feed(self, data: bytes) -> None:
        self._faults.feed(data)
        self._clues.feed(data)

    def explain(self, code: int, reason: str, excess: str) -> tuple[str, str]:
        """Return the outcome and the reason of work that has failed by itself. `excess` says which
        limit the work has exceeded, if it has.
        """
        if excess:
            self._known = True
            return "exit", excess
        if fault := self._faults.found or read_kernel(self._born):
            return GPU, f"{fault} (exit code {code})"
        return "exit", reason

    def cut_off(self, error: str) -> str:
        """Note that the work has lost its connection to another rank. Return the reason."""
        self._cut_off = True
        return f"the connection to another rank was lost: {error}"

    def add_clue(self, reason: str, work: WorkConfig, path: str, folder: str) -> str:
        """Add to the reason what the task probably lacks; see `FailureClues.explain`."""
        self._known = self._known or self._clues.is_known()
        clue = self._clues.explain(work, path, folder)
        return f"{reason}; {clue}" if clue else reason

    def describe(self, outcome: str, code: int | None, reason: str) -> dict[str, object]:
        """Return the fields of the exit message that say how the work ended."""
        failure = outcome if outcome in FAILURES else None
        stated = "program" if outcome == "exit" and self._known else failure
        stated = NETWORK if outcome == "exit" and self._cut_off else stated
        return {
            "outcome": outcome if failure is None else "node",
            "failure": stated,
            "exit_code": code,
            "reason": FAILURES.get(outcome, "") + reason,
        }


class ExitRecord:
    """The exit message of the work. It is on disk before it is reported, so that a later agent can
    report it if this agent is killed.
    """

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self.fields: dict[str, object] = {}
        self.stored = False

    def read(self) -> bool:
        """Read what an earlier agent has written. Return whether it has written the exit."""
        try:
            with open(self._config.exit_file, encoding="utf-8", opener=open_own) as file:
                self.fields = json.load(file)
        except (FileNotFoundError, ValueError):
            return False
        self.stored = True
        return True

    def write(self, fields: dict[str, object]) -> None:
        self.fields = fields
        try:
            write_whole(self._config.exit_file, json.dumps(fields), sync=True)
            self.stored = True
        except (
            OSError
        ) as error:  # The disk is full; the agent must stay alive until the exit is delivered.
            complain(f"cannot record the exit: {error}")

    def find_lost(self) -> tuple[str, int | None, str]:
        """Return the outcome, exit code and reason of work whose agent was killed."""
        try:
            with open(self._config.status_file, encoding="ascii", opener=open_own) as file:
                code, interrupted = (int(word) for word in file.read().split())
            noticed = os.path.exists(self._config.notice_file)
            ending = (
                "preempted" if noticed else "stopped",
                "the agent was killed while it ended the work",
            )
            return judge(code, ending if interrupted else None)
        except (FileNotFoundError, ValueError):
            return judge_lost(read_text(self._config.started_file))
