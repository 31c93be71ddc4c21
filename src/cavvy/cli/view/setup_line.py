"""Says in one line what the setup of a followed job does: how long, how much it has written, and
its newest line of output.
"""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from cavvy.cli.view.failure import escape_controls
from cavvy.cli.view.formatting import show_seconds, show_size, step_line
from cavvy.cli.view.job_output import EscapeFilter

if TYPE_CHECKING:
    from cavvy.client.wire import JobDetail, NodeView

_MIB = 1 << 20
_ACTIVE = frozenset({"starting", "running"})  # phases of jobs


class FailedSetup(NamedTuple):
    """The last lines of a setup that failed; `more` lines before them are left out."""

    rank: int
    data: bytes
    more: int


class SetupLine:
    """What is known of the setup of the newest attempt. `open` tells whether a setup, or the pull
    of an image, runs. `done` tells whether one has ended that was not told yet.
    """

    def __init__(self) -> None:
        self.open = self.done = False
        self.name = ""
        self._nodes: list[NodeView] = []
        self._ranks = 1
        self._line = ""
        self._lines = self._told = 0
        self._seconds = 0.0

    def learn(self, job: "JobDetail") -> None:
        self.name = job.name if job.project == "default" else f"{job.name} -p {job.project}"
        nodes = job.attempts[-1].nodes if job.attempts else []
        known = [node for node in nodes if node.setup_from is not None]
        self._ranks = len(nodes)
        runs = [node for node in known if node.setup_to is None and node.exited_at is None]
        self._nodes = runs if job.phase in _ACTIVE else []
        self.open = bool(self._nodes)
        ended = [node for node in known if node.setup_to is not None and node.running_at]
        self._seconds = max(
            (
                (node.running_at - node.claimed_at).total_seconds()
                for node in ended
                if node.running_at and node.claimed_at
            ),
            default=0.0,
        )
        self.done = bool(ended) and not self.open and self._lines > self._told

    def wrote(self, line: bytes, lines: int) -> None:
        """Note the newest line of the setup that runs, and the number of lines of those that have
        ended."""
        if line:
            text = EscapeFilter().take(line, final=True).decode().strip()
            self._line = escape_controls(text)
        self._lines = lines

    def take_done(self) -> str:
        """Return what is said once a setup has ended."""
        count, self._told, self.done, self._line = self._lines - self._told, self._lines, False, ""
        lines = f"{count} line{'s' * (count != 1)} of output"
        took = show_seconds(round(self._seconds))
        return step_line("setup", f"took {took}; {lines}: cavvy logs --setup {self.name}")

    def figures(self, spent: str = "") -> str:
        """Return how long the setup takes so far, how much it has written, and its newest line."""
        node = self._nodes[0]
        parts = []
        if self._ranks > 1:
            parts.append(f"on {len(self._nodes)} of {self._ranks} nodes")
        other = node.telemetry.get("setup_other_s")
        if other is not None:
            parts.append(f"by another job on this machine for {show_seconds(round(other))}")
        elif node.claimed_at is not None:
            lasted = (datetime.now(UTC) - node.claimed_at).total_seconds()
            parts.append(show_seconds(max(0, int(lasted))))
        if written := node.telemetry.get("setup_written_mib", 0):
            parts.append(f"{show_size(written * _MIB)} written")
        parts += [spent] if spent else []
        parts += [self._line] if self._line and other is None else []
        return "  ".join(parts)

    def text(self) -> str:
        """Return the same as a line of a pipe."""
        return step_line("setup", self.figures())


def say_left_out(failed: "FailedSetup", name: str) -> str:
    """Return how many lines of a failed setup are not shown, and which command shows them."""
    lines = f"{failed.more} line{'s' * (failed.more != 1)}"
    where = f"cavvy logs --setup {name}"
    return step_line("setup", f"failed; before these last lines are {lines}: {where}")
