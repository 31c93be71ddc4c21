"""Arrays of jobs in commands: finding an array by its name, waiting for its jobs, its table, and
the logs of all its jobs in one stream, each line with the name of its job.
"""

import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from queue import Empty, Queue
from threading import Thread
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import click

from cavvy.cli.reach.follow import leave_running
from cavvy.cli.reach.session import make_failure, named
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.formatting import ENDED
from cavvy.cli.view.job_output import show_whole

if TYPE_CHECKING:
    from cavvy.client import ApiClient
    from cavvy.client.array_wire import ArrayDetail, ArrayMemberView
    from cavvy.client.wire import JobDetail, Submitted

    LoggedJob = ArrayMemberView | JobDetail
    ReadLog = Callable[[ApiClient, LoggedJob], Iterator[bytes]]


_SHOWN = 10  # failed jobs that are named
_SHORTEST_S, _LONGEST_S = 0.2, 2.0  # seconds between two requests to the server

STREAMS = 16  # logs that are read at the same time, each with its own connection
_LOOK_S = 1.0  # seconds between two reads of the array


class LogGroup(NamedTuple):
    """Jobs whose logs are read together: those of an array, or the replicas of a service. `reason`
    says how they fare, and `ended` whether no further job can come."""

    name: str
    reason: str
    jobs: "Sequence[LoggedJob]"
    ended: bool


class LogReader(NamedTuple):
    """How a job's log is read, and whether a terminal gets its escape sequences."""

    read: "ReadLog"
    raw: bool


def group_logs(array: "ArrayDetail") -> LogGroup:
    return LogGroup(array.array.name, array.array.reason, array.jobs, ended=True)


def follow_array(
    client: "ApiClient",
    project: str,
    name: str,
    reached: Collection[str] = ENDED,
    until: float | None = None,
) -> "ArrayDetail":
    """Wait until all jobs of the array are in one of the phases `reached`, print how many are in
    each phase when this changes, and return the array. Raises CommandFailure at the time `until`.
    """
    from cavvy.client.array_wire import read_array

    pause, told = _SHORTEST_S, ""
    while True:
        found = read_array(client, project, name)
        if found.array.reason != told:
            told, pause = found.array.reason, _SHORTEST_S
            click.echo(f"{found.array.name}: {told}", err=True)
        if all(job.phase in reached for job in found.jobs):
            # The server counts the jobs before it lists them, so the counts may be older.
            return read_array(client, project, name)
        if until is not None and time.monotonic() >= until:
            hint = f"the jobs continue; `cavvy ps {named(project, found.array.name)}` lists them"
            raise CommandFailure(f"{found.array.name} has not ended: {told}", hint, exit_code=124)
        time.sleep(pause)
        pause = min(_LONGEST_S, pause * 1.5)


def follow_to_end(client: "ApiClient", array: "Submitted") -> NoReturn:
    """Wait until all jobs of the array have ended, name those that did not succeed, and exit."""
    from cavvy.cli.reach.follow import leave_running

    with leave_running(array.project, array.name, "wait"):
        jobs = follow_array(client, array.project, array.id).jobs
    end_array(jobs)


def end_array(jobs: "Sequence[ArrayMemberView]") -> NoReturn:
    """Name the jobs of an ended array that did not succeed, and exit."""
    if saved := say_saved(jobs):
        click.echo(saved, err=True)
    failed = [each for each in jobs if each.phase != "done"]
    for each in failed[:_SHOWN]:
        click.echo(f"{each.name}: {each.phase}, {each.reason}", err=True)
    if failed:
        more = f", and {len(failed) - _SHOWN} more" if len(failed) > _SHOWN else ""
        click.echo(f"{len(failed)} of {len(jobs)} jobs did not succeed{more}", err=True)
    sys.exit(exit_code_of(jobs))


def exit_code_of(jobs: "Sequence[LoggedJob]") -> int:
    """Return 0 if all jobs succeeded, and otherwise the exit code of the first that did not."""
    return next((job.exit_code or 1 for job in jobs if job.phase != "done"), 0)


def read_best(text: str) -> tuple[str, bool]:
    """Read the option --best: return the metric, and whether its maximum is the best. Raises
    CommandFailure.
    """
    metric, colon, which = text.rpartition(":")
    if not colon or not metric or which not in ("min", "max"):
        hint = "for example --best loss:min"
        raise CommandFailure(f"--best {text}: expected METRIC:min or METRIC:max", hint, 2)
    return metric, which == "max"


def rank_members(
    jobs: "Sequence[ArrayMemberView]", metric: str, *, highest: bool
) -> "list[ArrayMemberView]":
    """Return the jobs that reported the metric, the best first. Raises CommandFailure if none did,
    with the metrics that were reported.
    """
    found = [(value, job) for job in jobs if (value := _read_number(job, metric)) is not None]
    if not found:
        known = sorted(
            {key for job in jobs for key in job.progress if _read_number(job, key) is not None}
        )
        hint = f"they reported {', '.join(known)}" if known else "the guide of arrays says how"
        raise CommandFailure(f"no job of the array has reported {metric}", hint)
    ordered = sorted(found, key=lambda each: (-each[0] if highest else each[0], each[1].index))
    return [job for _, job in ordered]


def _read_number(job: "ArrayMemberView", metric: str) -> float | None:
    value = job.progress.get(metric)
    return value if isinstance(value, (int, float)) and value == value else None


def members_out(jobs: "Sequence[ArrayMemberView]", output: str, metric: str | None = None) -> None:
    """Print the jobs of an array, with their parameters and the metrics that they reported last.
    The columns of all metrics but `metric` are omitted on a narrow terminal.
    """
    from cavvy.cli.view import formatting
    from cavvy.cli.view.output import TableColumn, rows_out
    from cavvy.client.metrics import figures

    params = list(dict.fromkeys(name for job in jobs for name in job.params))
    first = [] if metric is None else [metric]
    reported = (name for job in jobs for name in figures(job.progress))
    metrics = list(dict.fromkeys([*first, *reported]))
    columns = [
        TableColumn("name"),
        TableColumn("index", hidden=True),
        TableColumn("id", hidden=True),
        *(TableColumn(f"params.{name}", name) for name in params),
        *(TableColumn(f"metrics.{name}", name, drop=6 * (name != metric)) for name in metrics),
        TableColumn("phase"),
        TableColumn("since", "SINCE", formatting.show_ago, drop=5),
        TableColumn("attempt", "TRY", drop=3),
        TableColumn("exit_code", "EXIT", drop=4),
        TableColumn("spent_micros", "SPENT", drop=2),
        TableColumn("placement", drop=1),
        TableColumn("reason", cut=True),
    ]
    rows = [
        {
            **{column.name: getattr(job, column.name, None) for column in columns},
            **({"phase": "early"} if job.early and job.phase == "done" else {}),
            **{f"params.{name}": job.params.get(name) for name in params},
            **{f"metrics.{name}": job.progress.get(name) for name in metrics},
        }
        for job in jobs
    ]
    rows_out(columns, rows, output, empty="the array has no jobs")
    if output == "table" and (saved := say_saved(jobs)):
        click.echo(saved)


def say_saved(jobs: "Sequence[ArrayMemberView]") -> str:
    """Return how many jobs were stopped early, and what they would have cost in addition if each
    had cost as much as the mean of those that ran to their end; "" if none was stopped."""
    from cavvy.domain.units import Money, format_usd

    early = [job for job in jobs if job.early]
    whole = [job.spent_micros for job in jobs if job.phase == "done" and not job.early]
    if not early:
        return ""
    were = "was" if len(early) == 1 else "were"
    told = f"{len(early)} of {len(jobs)} jobs {were} stopped early"
    if not whole:
        return told
    mean = sum(whole) // len(whole)
    saved = sum(max(0, mean - job.spent_micros) for job in early)
    return f"{told}, which saved about {format_usd(Money(saved))}" if saved else told


def print_logs(client: "ApiClient", found: LogGroup, logs: LogReader) -> None:
    """Print the logs one after the other."""
    for job in found.jobs:
        if job.attempt:
            _write(job.name, b"".join(logs.read(client, job)), raw=logs.raw)


def follow_logs(
    client: "ApiClient",
    project: str,
    found: LogGroup,
    look: "Callable[[], LogGroup]",
    logs: LogReader,
) -> "Sequence[LoggedJob]":
    """Print the logs as they arrive, until all jobs have ended, and return the jobs. The next log
    is read when one of `STREAMS` logs has ended. `look` returns the jobs as they are now.
    """
    with leave_running(project, found.name):
        return _Streams(client, found, look, logs).show()


class _Streams:
    def __init__(
        self,
        client: "ApiClient",
        found: LogGroup,
        look: "Callable[[], LogGroup]",
        logs: LogReader,
    ) -> None:
        self._client, self._found, self._look, self._logs = client, found, look, logs
        self._queue: Queue[tuple[str, bytes | CommandFailure | None]] = Queue(STREAMS)
        self._begun: set[str] = set()
        self._lines: dict[str, bytes] = {}  # the begin of the last line of each log that is read
        self._told = ""

    def show(self) -> "Sequence[LoggedJob]":
        """Print the logs until all have ended, and return the jobs."""
        looked = monotonic()
        while not self._begin():
            with suppress(Empty):
                self._take(*self._queue.get(timeout=_LOOK_S))
            if monotonic() - looked >= _LOOK_S:
                self._found = self._look()
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
        done = self._found.ended and all(job.phase in ENDED for job in self._found.jobs)
        return done and not self._lines

    def _tell(self, text: str) -> None:
        counts = self._found.reason
        said = "; ".join(each for each in (counts, text) if each)
        if said != self._told:
            click.echo(f"{self._found.name}: {said}", err=True)
            self._told = said

    def _take(self, name: str, item: bytes | CommandFailure | None) -> None:
        if isinstance(item, CommandFailure):
            raise item
        if item is None:
            _write(name, self._lines.pop(name), raw=self._logs.raw)
            return
        lines, newline, rest = (self._lines[name] + item).rpartition(b"\n")
        self._lines[name] = rest
        _write(name, lines + newline, raw=self._logs.raw)

    def _pump(self, job: "LoggedJob") -> None:
        from cavvy.client import ApiError

        try:
            with self._client.sibling() as own:
                for data in self._logs.read(own, job):
                    self._queue.put((job.name, data))
        except ApiError as error:
            self._queue.put((job.name, make_failure(error)))
        self._queue.put((job.name, None))


def _write(name: str, data: bytes, *, raw: bool) -> None:
    data = data if raw else show_whole(data)
    begin = f"{name}: ".encode()
    # carriage returns are parts of a line, in which a progress bar was redrawn
    lines = data.removesuffix(b"\n").split(b"\n") if data else []
    sys.stdout.buffer.writelines(begin + line + b"\n" for line in lines)
    sys.stdout.buffer.flush()
