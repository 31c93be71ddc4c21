"""Waits for jobs, and says why a job that was just queued waits.

Shows data from the server once, or repeatedly until Ctrl-C.
"""

import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, TypeVar

import click

from cavvy.cli.reach.arrays import exit_code_of, follow_array
from cavvy.cli.reach.names import find_named
from cavvy.cli.reach.services import wait_for_end, wait_for_replicas
from cavvy.cli.reach.session import FOLLOW_PATIENCE_S, PATIENCE_S, session
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.formatting import ENDED

if TYPE_CHECKING:
    from cavvy.client import ApiClient, wire


_SHORTEST_S, _LONGEST_S = 0.2, 2.0  # seconds between two requests to the server
_TELL_S = 0.5  # maximum seconds until the server has tried to place the job
_LOOK_S = 0.02

_T = TypeVar("_T")
_REFRESH_S = 2.0

watch_option = click.option(
    "-w", "--watch", is_flag=True, help="Refresh the output until you press Ctrl-C."
)


def find_wait(client: "ApiClient", project: str, name: str) -> str:
    """Return why a queued job does not start now, such as "waits for free capacity at local/here",
    or "" if it starts, or the server does not say so within `_TELL_S` seconds. The job is queued
    in any case, so an error of the server is no error of the command.
    """
    from cavvy.client import ApiError

    try:
        return _find(client, project, name)
    except ApiError:
        return ""


def _find(client: "ApiClient", project: str, name: str) -> str:
    until, pause = time.monotonic() + _TELL_S, _LOOK_S
    events = client.events(project, name).events
    began = next((each.text for each in reversed(events) if each.kind == "queued"), "")
    while (job := client.job(project, name)).phase == "queued":
        if job.reason not in ("", began):  # the first reason is the event's text
            return job.reason
        if time.monotonic() > until:
            place = job.queue_position
            return f"position {place} in the queue" if place else ""
        time.sleep(pause)
        pause *= 1.5
    return ""


def wait_for_all(
    client: "ApiClient",
    project: str,
    names: Sequence[str],
    reached: Collection[str] = ENDED,
    until: float | None = None,
    *,
    graph: bool = False,
) -> int:
    """Wait for jobs and arrays, and print how they ended. Return the exit code of the first that
    did not succeed, or 0. In a graph, jobs do not count that ended because of another job.
    """
    from cavvy.client import ApiError
    from cavvy.client.array_wire import ArrayDetail

    code = 0
    for name in names:
        try:
            job = _wait(client, project, name, reached, until)
        except ApiError as error:
            found = find_named(client, project, name, error)
            if not isinstance(found, ArrayDetail):
                if "running" in reached:
                    wait_for_replicas(client, project, name, until)
                else:
                    wait_for_end(client, project, name, until)
                    click.echo(f"service {name} has ended")
                continue
            found = follow_array(client, project, found.array.id, reached, until)
            click.echo(f"{found.array.name}: {found.array.reason}")
            ended = [each for each in found.jobs if each.phase in ENDED]
            code = code or exit_code_of(ended)
            continue
        click.echo(f"{job.name}: {job.phase}, {job.reason}")
        if graph and job.stop_cause in ("dependency", "group"):
            continue
        if job.phase in ENDED and job.phase != "done":
            code = code or job.exit_code or 1
    return code


def _wait(
    client: "ApiClient", project: str, name: str, reached: Collection[str], until: float | None
) -> "wire.JobDetail":
    pause, told = _SHORTEST_S, ""
    while (job := client.job(project, name, session=True)).phase not in reached:
        name = job.id  # The name of a session may later refer to the machine's next session.
        if until is not None and time.monotonic() >= until:
            raise CommandFailure(
                f"{job.name} is still {job.phase}: {job.reason}",
                f"the job continues; `cavvy status {job.name}` shows its state",
                exit_code=124,
            )
        if pause > _SHORTEST_S and job.phase == "queued" and job.reason != told:
            told = job.reason
            click.echo(f"{job.name}: queued, {told}", err=True)
        time.sleep(pause)
        pause = min(_LONGEST_S, pause * 1.5)
    return job


def show_repeatedly(
    read: "Callable[[ApiClient], _T]", show: Callable[[_T], None], watch: bool, output: str
) -> None:
    """Call `read` and pass its result to `show`. If `watch` is set, clear the terminal and call
    both functions repeatedly.
    """
    if watch and (output != "table" or not sys.stdout.isatty()):
        raise CommandFailure(
            "--watch can only refresh a table on a terminal",
            "in scripts, `cavvy wait NAME` waits for a job",
            2,
        )
    with session(patience_s=FOLLOW_PATIENCE_S if watch else PATIENCE_S) as client:
        while True:
            found = read(client)
            if watch:
                click.clear()
            show(found)
            if not watch:
                return
            time.sleep(_REFRESH_S)
