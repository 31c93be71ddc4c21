"""`cavvy logs`: prints or follows a job's log."""

import sys
from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.arguments import job_argument
from cavvy.cli.reach.session import (
    FOLLOW_PATIENCE_S,
    PATIENCE_S,
    project_option,
    rank_option,
    session,
)

if TYPE_CHECKING:
    from cavvy.client import Client


@click.command("logs")
@job_argument
@project_option
@click.option("-f", "--follow", "following", is_flag=True, help="Follow until the job ends.")
@rank_option
@click.option(
    "--attempt",
    type=click.IntRange(1),
    default=None,
    help="Only this attempt; the default is all.",
)
@click.option("-n", "--tail", type=click.IntRange(0), default=None, help="Only the last N lines.")
def command(
    name: str, project: str, following: bool, rank: int, attempt: int | None, tail: int | None
) -> None:
    """Print or follow a job's log, which is kept after its nodes are gone."""
    from cavvy.cli.reach.follow import follow

    with session(patience_s=FOLLOW_PATIENCE_S if following else PATIENCE_S) as client:
        if following and tail is None and attempt is None and rank == 0:
            follow(client, project, name)
            return
        if tail is not None:
            attempt = attempt or client.job(project, name).attempt or None
            sys.stdout.buffer.write(_last_lines(client, project, name, rank, attempt, tail))
            if not following:
                return
        size = 0 if tail is not None else None
        for data in client.logs(
            project, name, rank=rank, attempt=attempt, follow=following, tail_bytes=size
        ):
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()


def _last_lines(
    client: "Client", project: str, name: str, rank: int, attempt: int | None, lines: int
) -> bytes:
    """The last `lines` lines of a log; requests longer and longer tails until there are enough
    lines.
    """
    size = 200 * lines
    while lines:
        data = b"".join(client.logs(project, name, rank=rank, attempt=attempt, tail_bytes=size))
        if data.count(b"\n") > lines or len(data) < size:
            return b"".join(data.splitlines(keepends=True)[-lines:])
        size *= 4
    return b""
