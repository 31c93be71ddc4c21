"""Pages of jobs read into one list; used by `ps`, `cost` and `stop --all`."""

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remuda.client import Client
    from remuda.client.wire import JobRow

_PAGE = 200
UNFINISHED = ("queued", "starting", "running", "stopping")


def list_jobs(
    client: "Client", project: str | None, phases: Collection[str] = (), limit: int | None = None
) -> "tuple[list[JobRow], bool]":
    """Jobs newest first, at most `limit`, and whether there are more."""
    rows: list[JobRow] = []
    cursor = None
    while True:
        size = _PAGE if limit is None else min(_PAGE, limit - len(rows))
        page = client.jobs(project, phases=phases, cursor=cursor, limit=size)
        rows += page.jobs
        cursor = page.cursor
        if cursor is None or (limit is not None and len(rows) >= limit):
            return rows, cursor is not None
