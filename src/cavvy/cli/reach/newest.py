"""Finds the job that a user means who names none: the newest of the folder's task."""

import os
import re
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.arguments import JOBS_LISTING
from cavvy.cli.reach.session import named
from cavvy.cli.view.failure import CommandFailure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cavvy.client import ApiClient
    from cavvy.client.wire import JobListing

_LOOKED = 200  # newest jobs among which the folder's are looked for
_LISTED = 5  # jobs that an error names
_OFFERED = 10  # jobs from which a terminal chooses
_SCRIPTS = (".py", ".ipynb", ".sh", ".sbatch", ".slurm")
_LONGEST = 1 << 20  # bytes of a file that is looked at for the name of its task


def find_newest(client: "ApiClient", project: str, command: str) -> str:
    """Return the name of the newest job of the tasks in the current folder or, without such a job,
    of the project's only job, and say on standard error which job this is. Of several, a terminal
    is asked. Raises CommandFailure with a list to choose from.
    """
    jobs = client.jobs(project, limit=_LOOKED, arrays=True).jobs
    tasks = _task_names()
    own = [job for job in jobs if re.sub(r"-\d+$", "", job.name) in tasks or job.name in tasks]
    if own and len({re.sub(r"-\d+$", "", job.name) for job in own}) == 1:
        found = own[0]
        click.echo(f"{found.name}: the newest job of this folder's task", err=True)
        return found.name
    if len(jobs) == 1:
        click.echo(f"{jobs[0].name}: the only job", err=True)
        return jobs[0].name
    if jobs and sys.stdin.isatty() and sys.stderr.isatty():
        return _choose(own or jobs)
    raise _refuse(own or jobs, project, command)


def _choose(jobs: "Sequence[JobListing]") -> str:
    """Show the newest jobs with numbers, and ask for one."""
    from cavvy.cli.view.formatting import show_ago

    shown = jobs[:_OFFERED]
    width = max(len(job.name) for job in shown)
    for number, job in enumerate(shown, 1):
        since = show_ago(job.submitted_at)
        click.echo(f"{number:>3}  {job.name.ljust(width)}  {job.phase:<8}  {since}", err=True)
    known = {str(number): job.name for number, job in enumerate(shown, 1)}
    known |= {job.name: job.name for job in jobs}

    def read(text: str) -> str:
        if text.strip() not in known:
            raise click.BadParameter(f"expected 1 to {len(shown)}, or the name of a job")
        return known[text.strip()]

    found: str = click.prompt("Which job", default="1", value_proc=read, err=True)
    return found


def _refuse(jobs: "Sequence[JobListing]", project: str, command: str) -> CommandFailure:
    shown = ", ".join(f"{job.name} ({job.phase})" for job in jobs[:_LISTED])
    if not shown:
        return CommandFailure(
            "NAME is missing, and there is no job", "`cavvy run` starts a job", exit_code=2
        )
    more = f", and more: {JOBS_LISTING}" if len(jobs) > _LISTED else ""
    there = named(project, jobs[0].name)
    hint = f"`cavvy {command} {there}` is the newest; there are {shown}{more}"
    return CommandFailure("NAME is missing", hint, exit_code=2)


def _task_names() -> set[str]:
    """Return the names that the task files of the current folder state, and those that tasks of
    its scripts have."""
    from cavvy.spec.problems import slug

    names = set()
    with suppress(OSError):
        for entry in os.scandir():
            if entry.name.endswith((".yaml", ".yml")) and entry.is_file():
                names |= _read_names(entry.path)
            elif entry.name.endswith(_SCRIPTS) and entry.is_file():
                names.add(slug(entry.name.rpartition(".")[0]))
    return names


def _read_names(path: str) -> set[str]:
    """Return the names at the top level of a file's documents. A file that is no task is none."""
    with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        text = file.read(_LONGEST)
        return set(re.findall(r"^name:[ \t]*[\"']?([\w.-]+)", text, re.MULTILINE))
    return set()
