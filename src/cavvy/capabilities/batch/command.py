"""`cavvy batch`: processes the rows of files in shards on many nodes, and shows how far it is."""

import os
import shutil
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

import click

from cavvy.cli.reach.session import detach_option, named, session, task_project
from cavvy.cli.task.load import param_option, read_params, read_task, yes_option
from cavvy.cli.task.option_groups import GroupedCommand
from cavvy.cli.task.options import task_options
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.output import json_option

if TYPE_CHECKING:
    from cavvy.client import ApiClient
    from cavvy.client.array_wire import ArrayDetail
    from cavvy.client.metrics import BatchProgress
    from cavvy.task_files import ReadOptions

_LOOK_S = 1.0
_TOLD_S = 10.0  # seconds between two lines of progress, if the output is no terminal


@click.command("batch", cls=GroupedCommand)
@task_options
@param_option
@detach_option
@yes_option
@click.option(
    "-p", "--project", default=None, help="The project; the default is the project in the file."
)
@click.option("--name", default=None, help="The batch's name; the default is the name in the file.")
@json_option
def command(
    file: str,
    options: "ReadOptions",
    param: tuple[str, ...],
    detach: bool,
    yes: bool,
    project: str | None,
    name: str | None,
    output: str,
) -> None:
    """Process the rows of files in shards, each row exactly once, or show how far a batch is.

    TASK.YAML has a section `batch`. The command submits it as an array of jobs, and shows the rows
    that are done, the cost so far and of a million rows, and what is left. With the name of a batch
    instead of a file, it shows these figures and exits. `cavvy retry NAME` goes on with a batch
    that was stopped or has failed, with the code that was submitted; to use changed code, submit
    the file again.

    Use a batch for rows in files and your own code or model. For requests to a model that a service
    serves already, send a file to `/v1/batches` of the service instead.

    \b
      cavvy batch embed.yaml --spot
      cavvy batch embed
    """
    if output == "json" and not detach and _is_file(file):
        raise click.UsageError("-o json needs --detach, or the name of a batch")
    if not _is_file(file):
        _show(file, project, output)
        return
    from cavvy.cli.task.submission import submit_loaded
    from cavvy.domain.units import format_count
    from cavvy.spec.batch_section import PROGRAM

    params = read_params(param)
    loaded = read_task(file, params, options, tells=True)
    if all(each.inside != PROGRAM for each in loaded.source.local):
        hint = "add, for example, `batch: {input: rows.jsonl, output: /data/out, function: m:run}`"
        raise CommandFailure(f"{file} has no section `batch`", hint, exit_code=2)
    project = task_project(project, loaded.task)
    with session() as client:
        job = submit_loaded(client, loaded, file, params, project, name, yes)
        if output == "json":
            from cavvy.cli.view.output import json_out

            shown = {"id": job.id, "name": job.name, "project": job.project}
            json_out({**shown, "members": job.members})
            return
        jobs = format_count(job.members or 0, "job")
        click.echo(f"{job.name} ({job.id}): {jobs} submitted", err=not detach)
        if detach:
            there = named(job.project, job.name)
            click.echo(f"show its progress: cavvy batch {there}    stop it: cavvy stop {there}")
            return
        _follow(client, job.project, job.name, job.id)


def _is_file(text: str) -> bool:
    """Whether the argument is a task file, and not the name of a batch, which has neither / nor
    dots."""
    return text == "-" or os.path.isfile(text) or "/" in text or "." in text


def _show(name: str, project: str | None, output: str) -> None:
    from cavvy.cli.reach.names import find_named
    from cavvy.cli.reach.session import default_project
    from cavvy.cli.view.output import json_out, pairs_out
    from cavvy.client import ApiError
    from cavvy.client.array_wire import ArrayDetail
    from cavvy.client.metrics import measure_batch

    project = project or default_project()
    with session() as client:
        try:
            found = find_named(client, project, name)
        except ApiError as error:
            if error.code != "job-not-found":
                raise
            found = None
        if not isinstance(found, ArrayDetail):
            message = f"there is no file and no batch {name} in the project {project}"
            raise CommandFailure(message, "`cavvy ps` lists jobs", exit_code=2)
        progress = measure_batch(found)
    if progress is None and all(each.phase in ("done", "failed") for each in found.jobs):
        hint = f"`cavvy ps {named(project, name)}` shows its jobs"
        raise CommandFailure(f"{name} has reported no rows of a batch", hint)
    shown = _describe(found, progress)
    if output == "json":
        json_out(
            {"name": found.array.name, "jobs": found.array.members, **_to_json(found, progress)}
        )
    else:
        pairs_out([("name", found.array.name), *shown])


def _follow(client: "ApiClient", project: str, name: str, array: str) -> NoReturn:
    """Show the progress until all jobs have ended, and exit."""
    from cavvy.cli.reach.arrays import end_array
    from cavvy.cli.reach.follow import leave_running
    from cavvy.cli.reach.session import FOLLOW_PATIENCE_S
    from cavvy.cli.view.formatting import ENDED
    from cavvy.client.array_wire import read_array
    from cavvy.client.metrics import measure_batch

    client.patience.limit_s = FOLLOW_PATIENCE_S
    told, told_at = "", 0.0
    with leave_running(project, name, "batch"):
        while True:
            found = read_array(client, project, array)
            over = all(job.phase in ENDED for job in found.jobs)
            line = _make_line(found, measure_batch(found))
            if sys.stderr.isatty():
                width = shutil.get_terminal_size().columns - 1
                shown, end = (line, "\n") if over else (line[:width], "")
                click.echo(f"\r\x1b[K{shown}{end}", err=True, nl=False)
            elif line != told and (over or time.monotonic() >= told_at + _TOLD_S):
                told, told_at = line, time.monotonic()
                click.echo(line, err=True)
            if over:
                break
            time.sleep(_LOOK_S)
    if any(job.phase == "failed" for job in found.jobs):
        click.echo(f"why: cavvy logs {named(project, name)}", err=True)
    end_array(found.jobs)


def _make_line(found: "ArrayDetail", progress: "BatchProgress | None") -> str:
    """Return the progress in one line, what matters most first: a narrow terminal cuts the end."""
    shown = dict(_describe(found, progress))
    order = ("rows", "forecast", "cost", "jobs")
    return f"{found.array.name}: " + "; ".join(shown[each] for each in order if each in shown)


def _describe(found: "ArrayDetail", progress: "BatchProgress | None") -> list[tuple[str, str]]:
    """Return what to show of a batch: pairs of a name and a text."""
    from cavvy.cli.view.formatting import show_bar, show_money, show_seconds

    jobs = [("jobs", found.array.reason)]
    if progress is None:
        return [*jobs, ("cost", f"{show_money(found.array.spent_micros)} so far")]
    share = progress.done / progress.total
    rows = f"{show_bar(share)} {progress.done:,} of {progress.total:,} rows"
    cost = f"{show_money(progress.spent_micros)} so far"
    if (rate := progress.micros_per_million) is not None:
        cost += f", {show_money(rate)} per million rows"
    shown = [("rows", rows), ("cost", cost)]
    if progress.before:
        shown[0] = ("rows", f"{rows}, {progress.before:,} of them by an earlier batch")
    if progress.done < progress.total and progress.left_s is not None:
        left = f"{show_seconds(progress.left_s)} left at {progress.rows_per_s:,.0f} rows/s"
        if progress.total_micros is not None:
            left += f", about {show_money(progress.total_micros)} in total"
        shown.append(("forecast", left))
    return [*shown, *jobs]


def _to_json(found: "ArrayDetail", progress: "BatchProgress | None") -> dict[str, Any]:
    if progress is None:
        return {"spent_micros": found.array.spent_micros}
    return {
        "rows_done": progress.done,
        "rows_total": progress.total,
        "rows_before": progress.before,
        "rows_per_s": progress.rows_per_s,
        "left_s": progress.left_s,
        "spent_micros": progress.spent_micros,
        "micros_per_million_rows": progress.micros_per_million,
        "total_micros": progress.total_micros,
    }
