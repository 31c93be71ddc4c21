"""`cavvy schedules`: lists jobs that repeat."""

import json

import click

from cavvy.cli.reach.session import any_project_option, list_jobs, session
from cavvy.cli.view.output import TableColumn, output_option, rows_out


@click.command("schedules")
@any_project_option
@output_option
def command(project: str | None, output: str) -> None:
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
