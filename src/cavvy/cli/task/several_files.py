"""Submits several task files with one request: all of them or none."""

import getpass
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click
from msgspec import Raw
from msgspec.json import encode

from cavvy.cli.reach.interrupts import held_interrupt, leave_if
from cavvy.cli.reach.session import named, session, task_project
from cavvy.cli.task.load import read_tasks
from cavvy.cli.task.submission import ask_consent, make_origin
from cavvy.cli.view.failure import CommandFailure
from cavvy.client import ApiClient
from cavvy.client.paths import make_keys
from cavvy.client.wire import BatchRequest, SubmitRequest, Submitted

if TYPE_CHECKING:
    from cavvy.task_files import LoadedTask, ReadOptions

_NAMED = 20  # jobs whose names are printed


def run_files(
    files: Sequence[str],
    params: Mapping[str, str],
    options: "ReadOptions",
    project: str | None,
    *,
    yes: bool,
    dry_run: bool,
    detach: bool,
    output: str,
) -> None:
    """Submit the tasks of the files and, unless `detach` is set, wait for their jobs. With
    `dry_run`, only say what would be submitted. Raises CommandFailure, ApiError."""
    tasks = [_read_one(file, params, options) for file in files]
    projects = {
        task_project(project, each.task): file for each, file in zip(tasks, files, strict=True)
    }
    if len(projects) > 1:
        (one, of), (other, by), *_ = projects.items()
        text = f"{of} is for project {one}, and {by} for project {other}"
        raise CommandFailure(text, "run them apart, or choose the project with -p", exit_code=2)
    [chosen] = projects
    if dry_run:
        for file, each in zip(files, tasks, strict=True):
            click.echo(f"{file}: {each.task.name}")
        click.echo(f"{len(tasks)} tasks; `cavvy run --dry-run FILE` shows the offers for one")
        return
    with session() as client:
        jobs = _submit(client, files, tasks, params, chosen, yes=yes)
        _report(client, jobs, chosen, detach=detach, output=output)


def _read_one(file: str, params: Mapping[str, str], options: "ReadOptions") -> "LoadedTask":
    task, *others = read_tasks(file, params, options, tells=True)
    if others:
        text = f"{file} has {len(others) + 1} tasks, which may wait for each other"
        raise CommandFailure(text, f"run it by itself: `cavvy run {file}`", exit_code=2)
    return task


def _submit(
    client: ApiClient,
    files: Sequence[str],
    tasks: "Sequence[LoadedTask]",
    params: Mapping[str, str],
    project: str,
    *,
    yes: bool,
) -> Sequence[Submitted]:
    """Upload the files of the tasks, and queue all of them or none. If the user must first agree to
    the costs, show the price and ask."""
    from cavvy.cli.task.profiles import text_with_rates

    sent = set[str]()
    origins = [make_origin(client, project, each, each.text, sent) for each in tasks]
    budgeted = all(each.task.limits.budget is not None for each in tasks)
    keys = make_keys(len(tasks))

    def ask_server(consent: bool) -> Sequence[Submitted]:
        asks = [
            SubmitRequest(
                text=text_with_rates(each.text, each.task, each.folder),
                path=file,
                params=dict(params),
                origin=Raw(encode(origin)),
                user=getpass.getuser(),
                consent=consent,
            )
            for file, each, origin in zip(files, tasks, origins, strict=True)
        ]
        with held_interrupt() as interrupted:
            jobs = client.submit_batch(project, BatchRequest(tasks=asks, keys=keys)).jobs
        leave_if(interrupted(), project, [job.name for job in jobs])
        return jobs

    return ask_consent(yes or (budgeted and not sys.stdin.isatty()), ask_server)


def _report(
    client: ApiClient, jobs: Sequence[Submitted], project: str, *, detach: bool, output: str
) -> None:
    from cavvy.cli.reach.follow import leave_running
    from cavvy.cli.reach.waiting import wait_for_all
    from cavvy.cli.view.output import json_out

    if output == "json":
        json_out([{"id": job.id, "name": job.name, "project": job.project} for job in jobs])
        return
    shown = " ".join(job.name for job in jobs[:_NAMED])
    more = f" and {len(jobs) - _NAMED:,} others" if len(jobs) > _NAMED else ""
    click.echo(f"{len(jobs):,} tasks submitted to project {project}: {shown}{more}", err=not detach)
    if detach:
        if not more:
            click.echo(f"wait for them: cavvy wait {named(project, shown)}")
        return
    with leave_running(project, " ".join(job.name for job in jobs), "wait"):
        sys.exit(wait_for_all(client, project, [job.id for job in jobs]))
