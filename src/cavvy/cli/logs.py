"""`cavvy logs`: prints or follows a job's log."""

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.arguments import job_argument, since_option
from cavvy.cli.reach.session import (
    FOLLOW_PATIENCE_S,
    PATIENCE_S,
    project_option,
    rank_option,
    session,
)
from cavvy.cli.view.numbers import count_option

if TYPE_CHECKING:
    from cavvy.client import ApiClient, LogChunk
    from cavvy.client.array_wire import ArrayMemberView
    from cavvy.client.wire import JobDetail


@click.command("logs")
@job_argument
@project_option
@click.option(
    "-f", "--follow", "following", is_flag=True, help="Follow the log until the job ends."
)
@rank_option
@count_option("--attempt", help="Print only the log of this attempt; the default is all attempts.")
@count_option("-n", "--tail", least=0, help="Print only the last N lines.")
@since_option
@click.option(
    "--timestamps",
    is_flag=True,
    help="Begin each line with the time at which the server received it.",
)
def command(
    name: str,
    project: str,
    following: bool,
    rank: int,
    attempt: int | None,
    tail: int | None,
    since: datetime | None,
    timestamps: bool,
) -> None:
    """Print or follow the log of a job, or the logs of all jobs of an array. Logs are kept after
    the nodes are removed.

    --since and --timestamps use the local time at which the server received a line.
    """
    from cavvy.cli.reach.arrays import array_instead, follow_logs, print_logs
    from cavvy.cli.reach.follow import follow
    from cavvy.client import ApiError

    if since and tail is not None:
        raise click.UsageError("--since and --tail cannot be used together")
    plain = tail is None and attempt is None and rank == 0 and since is None and not timestamps

    def read(client: "ApiClient", job: "JobDetail | ArrayMemberView") -> Iterator[bytes]:
        newest = job.attempt or None if tail is not None else None
        request = partial(
            client.log_chunks,
            project,
            job.id,
            rank=rank,
            attempt=attempt or newest,
            since=since,
            times=timestamps,
        )
        return _read_log(request, tail, following=following, stamped=timestamps)

    with session(patience_s=FOLLOW_PATIENCE_S if following else PATIENCE_S) as client:
        try:
            if following and plain:
                follow(client, project, name)
            job = client.job(project, name, session=True)
        except ApiError as error:
            array = array_instead(client, project, name, error)
            if following:
                follow_logs(client, project, array, read)
            print_logs(client, array, read)
            return
        for data in read(client, job):
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()


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
