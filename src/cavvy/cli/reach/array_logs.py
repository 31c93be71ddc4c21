"""The logs of all jobs of an array in one stream, each line with the name of its job."""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import Empty, Queue
from threading import Thread
from time import monotonic
from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.arrays import exit_code_of
from cavvy.cli.reach.follow import leave_running
from cavvy.cli.reach.session import make_failure
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.formatting import ENDED

if TYPE_CHECKING:
    from cavvy.client import ApiClient
    from cavvy.client.array_wire import ArrayDetail, ArrayMemberView

    # yields the parts of the log of a job
    ReadLog = Callable[[ApiClient, ArrayMemberView], Iterator[bytes]]

STREAMS = 16  # logs that are read at the same time, each with its own connection
_LOOK_S = 1.0  # seconds between two reads of the array


def print_logs(client: "ApiClient", found: "ArrayDetail", read: "ReadLog") -> None:
    """Print the logs one after the other."""
    for job in found.jobs:
        if job.attempt:
            _write(job.name, b"".join(read(client, job)))


def follow_logs(client: "ApiClient", project: str, found: "ArrayDetail", read: "ReadLog") -> None:
    """Print the logs as they arrive, until all jobs have ended, and exit with the exit code of the
    first job that did not succeed. The next log is read when one of `STREAMS` logs has ended.
    """
    with leave_running(project, found.array.name):
        jobs = _Streams(client, project, found, read).show()
    sys.exit(exit_code_of(jobs))


class _Streams:
    def __init__(
        self, client: "ApiClient", project: str, found: "ArrayDetail", read: "ReadLog"
    ) -> None:
        self._client, self._project, self._found, self._read = client, project, found, read
        self._queue: Queue[tuple[str, bytes | CommandFailure | None]] = Queue(STREAMS)
        self._begun: set[str] = set()
        self._lines: dict[str, bytes] = {}  # the begin of the last line of each log that is read
        self._told = ""

    def show(self) -> "list[ArrayMemberView]":
        """Print the logs until all have ended, and return the jobs of the array."""
        from cavvy.client.array_wire import read_array

        looked = monotonic()
        while not self._begin():
            with suppress(Empty):
                self._take(*self._queue.get(timeout=_LOOK_S))
            if monotonic() - looked >= _LOOK_S:
                self._found = read_array(self._client, self._project, self._found.array.id)
                looked = monotonic()
        return self._found.jobs

    def _begin(self) -> bool:
        """Begin to read more logs. Return True if there is nothing left to read."""
        jobs = [job for job in self._found.jobs if job.attempt and job.id not in self._begun]
        for job in jobs[: STREAMS - len(self._lines)]:
            self._begun.add(job.id)
            self._lines[job.name] = b""
            Thread(target=self._pump, args=(job,), daemon=True).start()
        running = [job for job in jobs[STREAMS:] if job.phase not in ENDED]
        self._tell(f"follows {STREAMS} logs at a time; others come later" if running else "")
        return not self._lines and all(job.phase in ENDED for job in self._found.jobs)

    def _tell(self, text: str) -> None:
        counts = self._found.array.reason
        said = "; ".join(each for each in (counts, text) if each)
        if said != self._told:
            click.echo(f"{self._found.array.name}: {said}", err=True)
            self._told = said

    def _take(self, name: str, item: bytes | CommandFailure | None) -> None:
        if isinstance(item, CommandFailure):
            raise item
        if item is None:
            _write(name, self._lines.pop(name))
            return
        lines, newline, rest = (self._lines[name] + item).rpartition(b"\n")
        self._lines[name] = rest
        _write(name, lines + newline)

    def _pump(self, job: "ArrayMemberView") -> None:
        from cavvy.client import ApiError

        try:
            with self._client.sibling() as own:
                for data in self._read(own, job):
                    self._queue.put((job.name, data))
        except ApiError as error:
            self._queue.put((job.name, make_failure(error)))
        self._queue.put((job.name, None))


def _write(name: str, data: bytes) -> None:
    begin = f"{name}: ".encode()
    # carriage returns are parts of a line, in which a progress bar was redrawn
    lines = data.removesuffix(b"\n").split(b"\n") if data else []
    sys.stdout.buffer.writelines(begin + line + b"\n" for line in lines)
    sys.stdout.buffer.flush()
