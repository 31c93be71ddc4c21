"""Code of all commands that use the server: the connection, the project, and its jobs."""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from cavvy.cli.view.failure import CommandFailure

if TYPE_CHECKING:
    from cavvy.client import Client
    from cavvy.client.wire import JobListing

_PAGE = 200


@contextmanager
def session() -> Iterator["Client"]:
    """A client of the server, which is started if it does not run. An ApiError becomes a
    CommandFailure.
    """
    from cavvy.client import ApiError, connect

    try:
        with connect() as client:
            yield client
    except ApiError as error:
        raise CommandFailure(error.message, error.hint) from error


def _default_project() -> str:
    return os.environ.get("CAVVY_PROJECT", "default")


project_option = click.option(
    "-p",
    "--project",
    default=_default_project,
    show_default="CAVVY_PROJECT, or default",
    help="The project the job belongs to.",
)
any_project_option = click.option("-p", "--project", help="Only this project; the default is all.")
detach_option = click.option("-d", "--detach", is_flag=True, help="Do not follow the log.")
rank_option = click.option(
    "--rank", type=click.IntRange(0), default=0, help="The node of the gang."
)


def named(project: str, name: str) -> str:
    """The job as an argument of other commands, with -p if its project is not the default
    project.
    """
    return name if project == _default_project() else f"{name} -p {project}"


def list_jobs(
    client: "Client", project: str | None, phases: Collection[str] = (), limit: int | None = None
) -> "tuple[list[JobListing], bool]":
    """At most `limit` jobs, newest first, and whether there are more."""
    rows: list[JobListing] = []
    cursor = None
    while True:
        size = _PAGE if limit is None else min(_PAGE, limit - len(rows))
        page = client.jobs(project, phases=phases, cursor=cursor, limit=size)
        rows += page.jobs
        cursor = page.cursor
        if cursor is None or (limit is not None and len(rows) >= limit):
            return rows, cursor is not None
