"""`cavvy logs`, `events` and `wait`: follow a job by its log, by the reasons for its steps, or
until it runs or has ended.
"""

import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import click

from cavvy.cli.reach.arguments import (
    JOBS_LISTING,
    any_job_argument,
    complete_jobs,
    job_argument,
    since_option,
)
from cavvy.cli.reach.newest import find_newest
from cavvy.cli.reach.session import (
    FOLLOW_PATIENCE_S,
    PATIENCE_S,
    project_option,
    rank_option,
    session,
)
from cavvy.cli.reach.waiting import wait_for_all
from cavvy.cli.view.failure import CommandFailure, note_out
from cavvy.cli.view.formatting import ENDED, show_clock, show_time
from cavvy.cli.view.groups import NameArgument
from cavvy.cli.view.job_output import JobOutput
from cavvy.cli.view.numbers import count_option
from cavvy.cli.view.output import TableColumn, output_option, rows_out
from cavvy.domain.values import Struct

if TYPE_CHECKING:
    from cavvy.cli.reach.arrays import LoggedJob, LogReader
    from cavvy.client import ApiClient, ApiError, LogChunk
    from cavvy.client.array_wire import ArrayDetail
    from cavvy.client.service_wire import NamedService
    from cavvy.client.wire import EventView, JobDetail

_LOOK_AGAIN_S = 1.0  # seconds between two reads of the events of several jobs
MOST_HISTORIES = 100  # jobs whose events are read together, each with requests of its own


@click.command("logs")
@any_job_argument
@project_option
@click.option(
    "-f", "--follow", "following", is_flag=True, help="Follow the log until the job ends."
)
@rank_option
@count_option("--replica", help="Print only the log of this replica of a service.")
@count_option("--attempt", help="Print only the log of this attempt; the default is all attempts.")
@click.option(
    "--setup",
    is_flag=True,
    help="Print only what the setup has written, and the pull of the image.",
)
@count_option("-n", "--tail", least=0, help="Print only the last N lines.")
@since_option
@click.option(
    "--timestamps",
    is_flag=True,
    help="Begin each line with the time at which the server received it.",
)
@click.option(
    "--raw",
    is_flag=True,
    help="Pass all escape sequences on to the terminal, not only those of colours.",
)
def command(
    name: str | None,
    project: str,
    following: bool,
    rank: int,
    replica: int | None,
    attempt: int | None,
    setup: bool,
    tail: int | None,
    since: datetime | None,
    timestamps: bool,
    raw: bool,
) -> None:
    """Print or follow the log of a job, or the logs of all jobs of an array or replicas of a
    service. Logs are kept after the nodes are removed.

    Without NAME, this is the newest job of the task in the current folder.

    --since and --timestamps use the local time at which the server received a line. A terminal
    gets only the colours of a log, and no other escape sequences; pipes and files get all bytes.
    """
    from cavvy.cli.reach.arrays import LogReader
    from cavvy.cli.reach.follow import follow
    from cavvy.client import ApiError

    part = _LogPart(
        rank=rank,
        attempt=attempt,
        setup=setup,
        tail=tail,
        since=since,
        following=following,
        stamped=timestamps,
    )
    part.check()
    if replica is not None and name is None:
        raise click.UsageError("--replica needs the name of a service")
    read = partial(_read_part, project, part)
    with session(patience_s=FOLLOW_PATIENCE_S if following else PATIENCE_S) as client:
        name = name or find_newest(client, project, "logs")
        if replica is not None:
            name = _find_replica(client, project, name, replica)
        try:
            if following and part.is_whole and not raw:
                follow(client, project, name)
            job = client.job(project, name, session=True)
        except ApiError as error:
            logs = LogReader(read, raw)
            _show_several(client, project, name, error, logs, following=following)
            return
        output = JobOutput(raw=raw)
        for data in read(client, job):
            output.write(data)


class _LogPart(Struct, frozen=True, kw_only=True):
    """What is printed of a log."""

    rank: int
    attempt: int | None
    setup: bool  # only the output of the setup
    tail: int | None  # lines
    since: datetime | None
    following: bool
    stamped: bool  # whether each line begins with its time

    @property
    def is_whole(self) -> bool:
        """Whether it is the log of rank 0 as it is, without a choice of lines."""
        chosen = (self.tail, self.attempt, self.since)
        return chosen == (None, None, None) and self.rank == 0 and not self.stamped

    def check(self) -> None:
        """Raise UsageError if options exclude each other."""
        if self.since and self.tail is not None:
            raise click.UsageError("--since and --tail cannot be used together")
        if self.setup and (self.following or self.since or self.tail is not None):
            raise click.UsageError("--setup cannot be used with --follow, --tail or --since")


def _read_part(
    project: str, part: _LogPart, client: "ApiClient", job: "LoggedJob"
) -> Iterator[bytes]:
    newest = job.attempt or None if part.tail is not None else None
    request = partial(
        client.log_chunks,
        project,
        job.id,
        rank=part.rank,
        attempt=part.attempt or newest,
        since=part.since,
        times=part.stamped,
    )
    if part.setup:
        detail = client.job(project, job.id)
        _check_setup(detail)
        request = partial(_read_setup, request, detail, part.rank)
    return _read_log(request, part.tail, following=part.following, stamped=part.stamped)


def _find_replica(client: "ApiClient", project: str, service: str, number: int) -> str:
    """Return the ID of the job of a replica. A replica that is no longer listed has a name only."""
    from cavvy.client import ApiError
    from cavvy.client.service_wire import find_named_service

    with suppress(ApiError):
        for each in find_named_service(client, project, service).replicas:
            if each.number == number and each.job:
                return each.job
    return f"{service}.{number}"


def _show_several(
    client: "ApiClient",
    project: str,
    name: str,
    error: "ApiError",
    logs: "LogReader",
    *,
    following: bool,
) -> None:
    """Print the logs of an array or of a service, because there is no job with this name."""
    from cavvy.cli.reach.arrays import (
        exit_code_of,
        follow_logs,
        group_logs,
        print_logs,
    )
    from cavvy.cli.reach.names import find_named
    from cavvy.cli.reach.services import ReplicaLogs
    from cavvy.client.array_wire import read_array
    from cavvy.client.service_wire import NamedService
    from cavvy.client.wire import JobDetail

    array = find_named(client, project, name, error)
    if isinstance(array, JobDetail):
        raise error
    if isinstance(array, NamedService):
        replicas = ReplicaLogs(client, array)
        if not following:
            print_logs(client, replicas.look(), logs)
            return
        follow_logs(client, project, replicas.look(), replicas.look_again, logs)
        return
    if not following:
        print_logs(client, group_logs(array), logs)
        return
    array_id = array.array.id
    jobs = follow_logs(
        client,
        project,
        group_logs(array),
        lambda: group_logs(read_array(client, project, array_id)),
        logs,
    )
    sys.exit(exit_code_of(jobs))


def _read_log(
    request: "Callable[..., Iterable[LogChunk]]",
    tail: int | None,
    *,
    following: bool,
    stamped: bool,
) -> Iterator[bytes]:
    """Yield the last lines of a log if `tail` is given, and otherwise the whole log. If
    `following`, also yield what is added."""

    def read_some(follow: bool, tail_bytes: int | None) -> Iterator[bytes]:
        chunks = request(follow=follow, tail_bytes=tail_bytes)
        if stamped:
            return _stamp(chunks, redrawn=sys.stdout.isatty())
        return (chunk.data for chunk in chunks)

    if tail is not None:
        yield from _last_lines(read_some, tail)
    if tail is None or following:
        yield from read_some(following, 0 if tail is not None else None)


def _check_setup(job: "JobDetail") -> None:
    nodes = [node for attempt in job.attempts for node in attempt.nodes]
    if all(node.setup_from is None for node in nodes):
        raise CommandFailure(
            f"{job.name} has no output of a setup",
            f"`cavvy logs {job.name}` shows the whole log, `cavvy status {job.name}` the state",
        )


def _read_setup(
    request: "Callable[..., Iterable[LogChunk]]", job: "JobDetail", rank: int, **which: Any
) -> "Iterator[LogChunk]":
    from cavvy.cli.reach.setup_output import only_setup

    return only_setup(request(**which), job, rank)


def _stamp(chunks: "Iterable[LogChunk]", redrawn: bool) -> Iterator[bytes]:
    """Yield the parts of a log, with the time at which a line began to arrive before the line. If
    `redrawn`, the time is repeated after each carriage return, because a terminal overwrites it.
    """
    last, begun = b"\n", b""
    for chunk in chunks:
        at = chunk.offset - len(chunk.data)
        for part in chunk.data.splitlines(keepends=True):
            if last == b"\n":
                begun = _time_text(chunk, at)
            stamped = last == b"\n" or (redrawn and last == b"\r" and part != b"\n")
            yield begun + part if stamped else part
            last, at = part[-1:], at + len(part)


def _time_text(chunk: "LogChunk", at: int) -> bytes:
    from cavvy.cli.view.formatting import show_time

    known = bisect_right(chunk.times, at, key=itemgetter(0))
    if not known:
        return b"-  "
    return show_time(datetime.fromtimestamp(chunk.times[known - 1][1], UTC)).encode() + b"  "


def _last_lines(read: Callable[[bool, int | None], Iterator[bytes]], lines: int) -> list[bytes]:
    """Return the last `lines` lines of a log. The function `read` is called with increasing sizes
    until the result has enough lines.
    """
    size = 200 * lines
    while lines:
        data = b"".join(read(False, size))
        if data.count(b"\n") > lines or len(data) < size:
            # Carriage returns are parts of a line, in which a progress bar was redrawn.
            rows = data.removesuffix(b"\n").split(b"\n")
            ends = b"\n" if data.endswith(b"\n") else b""
            return [b"\n".join(rows[-lines:]) + ends] if data else []
        size *= 4
    return []


@click.command("events")
@job_argument
@project_option
@click.option("-f", "--follow", is_flag=True, help="Follow the events until the job ends.")
@output_option
def events_command(name: str, project: str, follow: bool, output: str) -> None:
    """Show the history of a job, of the jobs of an array or of the replicas of a service: each step
    with its reason."""
    from cavvy.cli.reach.names import find_named
    from cavvy.client import ApiError
    from cavvy.client.service_wire import NamedService
    from cavvy.client.wire import JobDetail

    with session(patience_s=FOLLOW_PATIENCE_S if follow else PATIENCE_S) as client:
        follow = follow and output == "table"
        try:
            _show_events(client, project, name, output, follow=follow)
        except ApiError as error:
            found = find_named(client, project, name, error)
            if isinstance(found, JobDetail):  # the session of a machine
                _show_events(client, project, found.id, output, follow=follow)
            elif follow:
                _follow_several(client, project, found)
            else:
                heading = "replica" if isinstance(found, NamedService) else "job"
                events = _Histories(client, project, found).read()
                _events_out(events, (TableColumn(heading),), output)


def _show_events(
    client: "ApiClient", project: str, name: str, output: str, *, follow: bool
) -> None:
    from cavvy.cli.view.formatting import story_line

    if not follow:
        _events_out([(name, each) for each in _list_events(client, project, name)], (), output)
        return
    for event in client.follow(project, name):
        click.echo(f"{show_clock(event.at)}  {story_line(event)}")


def _list_events(client: "ApiClient", project: str, name: str, after: int = 0) -> "list[EventView]":
    events: list[EventView] = []
    while page := client.events(project, name, after=events[-1].id if events else after).events:
        events += page
    return events


class _Histories:
    """The events of the jobs of an array, or of the replicas of a service."""

    def __init__(
        self, client: "ApiClient", project: str, found: "ArrayDetail | NamedService"
    ) -> None:
        from cavvy.client.array_wire import ArrayDetail

        self._client, self._project = client, project
        self._read: dict[str, int] = {}  # the ID of the last event of each job that was read
        self._names: dict[str, str] = {}  # of the jobs of replicas
        self.look(found)
        if isinstance(found, ArrayDetail) and len(found.jobs) > MOST_HISTORIES:
            count = f"the first {MOST_HISTORIES} of {len(found.jobs):,} jobs"
            note_out(f"{count}; name a job, such as {found.jobs[-1].name}")

    def look(self, found: "ArrayDetail | NamedService") -> None:
        """Take the jobs as they are now."""
        from cavvy.client.array_wire import ArrayDetail

        self._jobs = (
            {each.id: each.name for each in found.jobs[:MOST_HISTORIES]}
            if isinstance(found, ArrayDetail)
            else self._name([each.job for each in found.replicas if each.job])
        )

    def _name(self, ids: list[str]) -> dict[str, str]:
        from cavvy.cli.reach.names import name_jobs

        known = {each: self._names[each] for each in ids if each in self._names}
        new = (each for each in ids if each not in known)
        self._names |= name_jobs(self._client, self._project, new)
        return {each: self._names[each] for each in ids if each in self._names}

    def read(self) -> "list[tuple[str, EventView]]":
        """Return the events that were not read yet, in the order of their times."""
        found = []
        for job_id, name in self._jobs.items():
            events = _list_events(self._client, self._project, job_id, self._read.get(job_id, 0))
            if events:
                self._read[job_id] = events[-1].id
            found += [(name, each) for each in events]
        return sorted(found, key=lambda pair: pair[1].at)


def _follow_several(client: "ApiClient", project: str, found: "ArrayDetail | NamedService") -> None:
    """Print the events of the jobs as they happen, until all jobs of an array have ended, or a
    service no longer exists."""
    from cavvy.cli.view.formatting import story_line
    from cavvy.client import ApiError
    from cavvy.client.array_wire import ArrayDetail, read_array
    from cavvy.client.service_wire import find_named_service

    histories, over = _Histories(client, project, found), False
    while True:
        for name, event in histories.read():
            click.echo(f"{show_clock(event.at)}  {name}  {story_line(event)}")
        if over:
            return
        time.sleep(_LOOK_AGAIN_S)
        try:
            found = (
                read_array(client, project, found.array.id)
                if isinstance(found, ArrayDetail)
                else find_named_service(client, project, found.name)
            )
        except ApiError as error:
            if error.code != "service-not-found":
                raise
            return
        histories.look(found)
        over = isinstance(found, ArrayDetail) and all(job.phase in ENDED for job in found.jobs)


def _events_out(
    events: "list[tuple[str, EventView]]", before: "tuple[TableColumn, ...]", output: str
) -> None:
    """Print events, each with its job's name in the column `before`, if there is one."""
    # If all events happened on one day, the heading shows the day instead of each row.
    days = {show_time(event.at, "%Y-%m-%d") for _, event in events}
    columns = [
        *before,
        TableColumn("at", min(days), lambda at: show_time(at, "%H:%M:%S", zone=False))
        if len(days) == 1
        else TableColumn("at", "TIME"),
        TableColumn("id", hidden=True),
        TableColumn("attempt", "TRY", lambda number: str(number or "-"), drop=2),
        TableColumn("rank", drop=1),
        TableColumn("kind"),
        TableColumn("text", wrap=True),
    ]
    rows = [
        (*(job for _ in before), each.at, each.id, each.attempt, each.rank, each.kind, each.text)
        for job, each in events
    ]
    rows_out(columns, rows, output, empty="no events yet")


@click.command("wait")
@click.argument(
    "names",
    nargs=-1,
    required=True,
    cls=NameArgument,
    listing=JOBS_LISTING,
    shell_complete=complete_jobs,
)
@project_option
@click.option(
    "--for",
    "what",
    type=click.Choice(["end", "running"]),
    default="end",
    help="Wait until all jobs have ended (end), or until each job is running or has ended "
    "(running).",
)
@click.option("--timeout", metavar="TIME", help="Give up after this time, such as 90s or 2h.")
def wait_command(names: tuple[str, ...], project: str, what: str, timeout: str | None) -> None:
    """Wait for jobs, all jobs of an array, or a service, and say why a queued job waits. The exit
    code is the code of the first job that failed, or 0 if no job failed. After the timeout, the
    exit code is 124.

    A service has ended after `cavvy stop`. It is running when as many replicas are ready as it
    wants, also none.
    """
    from cavvy.domain.units import UnitError, parse_duration

    try:
        until = time.monotonic() + parse_duration(timeout).total_seconds() if timeout else None
    except UnitError as error:
        raise CommandFailure(f"--timeout: {error}", "write, for example, 90s or 2h", 2) from error
    reached = ENDED | {"running"} if what == "running" else ENDED
    with session(patience_s=FOLLOW_PATIENCE_S) as client:
        raise SystemExit(wait_for_all(client, project, names, reached, until))
