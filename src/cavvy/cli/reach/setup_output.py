"""Separates the output of a job's setup from the output of its work. Nodes tell where in the log
the setup's output begins and ends. A follower shows the setup as one line, and keeps its output
until it knows where it ends, so that no output of the work is lost.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from cavvy.cli.view.setup_line import FailedSetup

if TYPE_CHECKING:
    from cavvy.client import LogChunk
    from cavvy.client.wire import JobDetail

TAIL = 20  # last lines of a setup that are shown if it fails
_LONGEST_LINE = 4096  # bytes of the last lines that are looked at for the live line


class LogPart(NamedTuple):
    """A part of the log of one rank in one attempt. `at` is its position in the log."""

    rank: int
    attempt: int
    data: bytes
    at: int = 0


class _Kept:
    """The output of one rank's setup, which begins at the position `at`."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.data = bytearray()

    def read_from(self, at: int) -> bytes:
        return bytes(self.data[max(0, at - self.at) :])

    def count_lines(self, to: int) -> int:
        """Return the number of lines before the position `to`."""
        return self.data.count(b"\n", 0, max(0, to - self.at))

    @property
    def last_line(self) -> bytes:
        end = bytes(self.data[-_LONGEST_LINE:]).replace(b"\r", b"\n").split(b"\n")
        return next((line for line in reversed(end) if line.strip()), b"")

    def tail(self) -> tuple[bytes, int]:
        """Return the last lines, and how many are before them."""
        lines = bytes(self.data).splitlines(keepends=True)
        return b"".join(lines[-TAIL:]), len(lines[:-TAIL])


class SetupOutput:
    """Takes the parts of a job's log, and returns those of the work. `learn` must be called with
    what is known of the job.
    """

    def __init__(self) -> None:
        self._bounds: dict[tuple[int, int], tuple[int, int | None]] = {}  # by attempt and rank
        self._kept: dict[tuple[int, int], _Kept] = {}
        # ranks of attempts that have ended; what arrives late is shown at once
        self._over: set[tuple[int, int]] = set()
        self.lines = 0  # lines of the setups that have ended

    def learn(self, job: "JobDetail") -> list[LogPart]:
        """Note where the setups begin and end. Returns the output of the work that was kept."""
        for attempt in job.attempts:
            for node in attempt.nodes:
                if node.setup_from is not None:
                    self._bounds[attempt.number, node.rank] = node.setup_from, node.setup_to
        freed: list[LogPart] = []
        for (attempt_number, rank), kept in [*self._kept.items()]:
            _, to = self._bounds[attempt_number, rank]
            if to is not None:
                del self._kept[attempt_number, rank]
                self.lines += kept.count_lines(to)
                if data := kept.read_from(to):
                    freed.append(LogPart(rank, attempt_number, data, max(to, kept.at)))
        return freed

    def take(self, part: LogPart) -> list[LogPart]:
        """Add a part of the log. Returns what of it is no output of a setup."""
        key = part.attempt, part.rank
        if key not in self._bounds or key in self._over:
            return [part]
        begin, to = self._bounds[key]
        first = max(0, begin - part.at)
        before, rest, at = (
            part.data[:first],
            part.data[first:],
            part.at + min(first, len(part.data)),
        )
        found = [part._replace(data=before)] if before else []
        if not rest:
            return found
        if to is None:
            self._kept.setdefault(key, _Kept(at)).data.extend(rest)
            return found
        cut = max(0, to - at)
        self.lines += rest[:cut].count(b"\n")
        if rest[cut:]:
            found.append(part._replace(data=rest[cut:], at=at + cut))
        return found

    def end(self, attempt: int, rank: int) -> FailedSetup | None:
        """Note that a rank has ended. Returns the last lines of its setup if that did not end
        before."""
        self._over.add((attempt, rank))
        kept = self._kept.pop((attempt, rank), None)
        return None if kept is None else FailedSetup(rank, *kept.tail())

    def list_open(self) -> list[tuple[int, int]]:
        """Return the attempts and ranks whose setups have written something and not ended."""
        return sorted(self._kept)

    @property
    def last_line(self) -> bytes:
        """The newest line of the newest setup that runs, or b""."""
        return self._kept[max(self._kept)].last_line if self._kept else b""


def only_setup(chunks: "Iterable[LogChunk]", job: "JobDetail", rank: int) -> "Iterator[LogChunk]":
    """Yield the parts of the chunks that are output of the job's setups."""
    from cavvy.domain.values import replace

    bounds = {
        attempt.number: (node.setup_from, node.setup_to)
        for attempt in job.attempts
        for node in attempt.nodes
        if node.rank == rank and node.setup_from is not None
    }
    for chunk in chunks:
        begin, to = bounds.get(chunk.attempt, (None, None))
        if begin is None:
            continue
        at = chunk.offset - len(chunk.data)
        data = chunk.data if to is None else chunk.data[: max(0, to - at)]
        end = at + len(data)
        yield replace(chunk, data=data[max(0, begin - at) :], offset=end)
