"""`cavvy ps` and `cavvy schedules`: list jobs, and the jobs that repeat."""

import json
from typing import TYPE_CHECKING

import click
from msgspec.structs import asdict

from cavvy.cli.reach.arguments import complete_jobs
from cavvy.cli.reach.session import any_project_option, default_project, list_jobs, session
from cavvy.cli.reach.waiting import show_repeatedly, watch_option
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.numbers import count_option
from cavvy.cli.view.output import TableColumn, output_option, rows_out

if TYPE_CHECKING:
    from cavvy.client import ApiClient
    from cavvy.client.wire import JobListing


_RECENT = 20
_NO_JOBS = "no jobs yet; start one with `cavvy run task.yaml`"


@click.command("ps")
@click.argument("array", required=False, shell_complete=complete_jobs)
@click.option(
    "-a",
    "--all",
    "everything",
    is_flag=True,
    help="List all jobs, also each job of arrays; by default, only the newest ones are listed, and "
    "an array is one row.",
)
@any_project_option
@click.option(
    "--phase",
    multiple=True,
    metavar="PHASE",
    help="List only jobs in this phase, such as running or failed.",
)
@click.option("--user", default="", help="List only the jobs of this user.")
@click.option(
    "--best",
    metavar="METRIC:min|max",
    help="List the jobs of the array by a metric that they report, the best first.",
)
@count_option("-n", "--limit", help="Maximum number of rows.")
@watch_option
@output_option
def command(
    array: str | None,
    everything: bool,
    project: str | None,
    phase: tuple[str, ...],
    user: str,
    best: str | None,
    limit: int | None,
    watch: bool,
    output: str,
) -> None:
    """List jobs, newest first, or the jobs of one array, the replicas of a service, or one job."""
    if array is not None and user:
        raise CommandFailure("expected either a name or --user", "leave one of both out", 2)
    if array is not None:
        _array_out(array, project, phase, best, limit, watch, output)
        return
    if best is not None:
        hint = "for example `cavvy ps train --best loss:min`"
        raise CommandFailure("--best needs the name of an array", hint, 2)
    grouped = not everything and not phase
    wanted = limit or (None if everything else _RECENT)

    def show(found: "tuple[list[JobListing], bool]") -> None:
        _jobs_out(found[0], output, f"{user} has no jobs" if user else _NO_JOBS)
        if found[1] and output == "table" and not limit:
            click.echo("… show older jobs: cavvy ps --all")

    def read(client: "ApiClient") -> "tuple[list[JobListing], bool]":
        return list_jobs(client, project, phase, wanted, arrays=grouped, user=user)

    show_repeatedly(read, show, watch, output)


def _array_out(
    name: str,
    project: str | None,
    phases: tuple[str, ...],
    best: str | None,
    limit: int | None,
    watch: bool,
    output: str,
) -> None:
    """Print the jobs that the name means: of an array, of a service, or one."""
    from cavvy.cli.reach.arrays import members_out, rank_members, read_best
    from cavvy.cli.reach.names import find_named
    from cavvy.client.array_wire import ArrayDetail
    from cavvy.client.service_wire import NamedService

    metric, highest = read_best(best) if best is not None else (None, False)

    def read(client: "ApiClient") -> "ArrayDetail | list[JobListing]":
        found = find_named(client, place, name)
        if isinstance(found, NamedService):
            return [client.job(place, each.job) for each in found.replicas if each.job]
        return found if isinstance(found, ArrayDetail) else [found]

    def show(found: "ArrayDetail | list[JobListing]") -> None:
        if not isinstance(found, ArrayDetail):
            if best is not None:
                raise CommandFailure(f"--best: {name} is no array", "`cavvy ps` lists arrays", 2)
            _jobs_out([job for job in found if not phases or job.phase in phases][:limit], output)
            return
        jobs = [job for job in found.jobs if not phases or job.phase in phases]
        shown = metric
        if metric is not None:
            jobs = rank_members(jobs, metric, highest=highest)
        elif found.best:
            shown, most = read_best(found.best)
            ranked = rank_members(
                [job for job in jobs if shown in job.progress], shown, highest=most
            )
            jobs = ranked + [job for job in jobs if job not in ranked]
        members_out(jobs[:limit], output, shown)

    place = project or default_project()
    show_repeatedly(read, show, watch, output)


def _jobs_out(rows: "list[JobListing]", output: str, empty: str = _NO_JOBS) -> None:
    from cavvy.cli.view import formatting

    columns = [
        TableColumn("name"),
        TableColumn("id", hidden=True),
        TableColumn("tags", hidden=True),
        TableColumn("project", drop=2),
        TableColumn("user", drop=8, hidden=len({row.user for row in rows}) < 2),
        TableColumn("phase"),
        TableColumn("submitted_at", "SUBMITTED", formatting.show_ago, drop=6),
        TableColumn("since", "SINCE", formatting.show_ago, hidden=True),
        TableColumn("ended_at", hidden=True),
        TableColumn("attempt", "TRY", drop=3),
        TableColumn("exit_code", "EXIT", drop=4),
        TableColumn("spent_micros", "SPENT", drop=5),
        TableColumn("machine", hidden=not any(row.machine for row in rows)),
        TableColumn("placement", drop=1),
        TableColumn("queue_position", "QUEUE", hidden=not any(row.queue_position for row in rows)),
        TableColumn("queue_ahead", hidden=True),
        TableColumn(
            "likely_start", "STARTS", drop=7, hidden=not any(row.estimated_start for row in rows)
        ),
        TableColumn("earliest_start", hidden=True),
        TableColumn("latest_start", hidden=True),
        TableColumn("reason", cut=True),
    ]
    shown = [asdict(row) | _queue_cells(row, output) for row in rows]
    rows_out(columns, shown, output, empty=empty)


def _queue_cells(row: "JobListing", output: str) -> dict[str, object]:
    """Return the cells about the queue: for people, or with numbers and times for programs."""
    from cavvy.cli.view import formatting

    start = row.estimated_start
    cells: dict[str, object] = {
        "likely_start": start and start.likely,
        "earliest_start": start and start.earliest,
        "latest_start": start and start.latest,
    }
    if output == "table":
        cells["likely_start"] = start and formatting.show_start(start)
        cells["queue_position"] = formatting.show_place(row) if row.queue_position else None
    return cells


@click.command("schedules")
@any_project_option
@output_option
def schedules_command(project: str | None, output: str) -> None:
    """List repeating jobs and their next start times. `cavvy stop NAME` ends a schedule, but not
    the runs that it has already started. No run starts while the account of a schedule is disabled.
    """

    columns = [
        TableColumn("name"),
        TableColumn("project", drop=2),
        TableColumn("cron"),
        TableColumn("time_zone", "ZONE", drop=1),
        TableColumn("next_at", "NEXT"),
        TableColumn("id", hidden=True),
    ]
    cells = []
    with session() as client:
        for row in list_jobs(client, project, ("queued",))[0]:
            if not row.held:
                continue
            job = client.job(row.project, row.name)
            schedule = json.loads(bytes(job.task)).get("schedule") or {}
            if cron := schedule.get("cron"):
                zone = schedule.get("time_zone", "UTC")
                note = job.reason if job.barred else ""
                cells.append((job.name, job.project, cron, zone, job.not_before, job.id, note))
    columns.append(TableColumn("note", wrap=True, hidden=not any(each[-1] for each in cells)))
    empty = (
        "no job repeats; add `schedule: 0 3 * * 1-5` to a task file, then run it with `cavvy run`"
    )
    rows_out(columns, cells, output, empty=empty)
