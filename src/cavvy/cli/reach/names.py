"""What the name in a command means: a job, the session of a machine, an array or group of jobs, or
a service. Every command that takes the name of a job finds the others here.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import click

from cavvy.cli.reach.session import named
from cavvy.cli.view.failure import CommandFailure

if TYPE_CHECKING:
    from cavvy.client import ApiClient, ApiError
    from cavvy.client.array_wire import ArrayDetail
    from cavvy.client.service_wire import NamedService
    from cavvy.client.wire import JobDetail

    Found = JobDetail | ArrayDetail | NamedService

_T = TypeVar("_T")
_SHOWN = 5  # names that an error lists


def find_named(
    client: "ApiClient",
    project: str,
    name: str,
    error: "ApiError | None" = None,
    *,
    newest: bool = False,
) -> "Found":
    """Return the job with this name or ID, or else the session of the machine, the array or the
    service with this name. `error` is what a request for a job of this name was refused with: it is
    raised if it has another reason, or if nothing has the name. With `newest`, the machine's newest
    session comes before an ended session of this name. Raises CommandFailure if the name is that of
    a machine without a session.
    """
    from cavvy.client import ApiError

    if error is not None and error.code != "job-not-found":
        raise error
    for session in (True,) if newest or error else (False, True):
        try:
            return client.job(project, name, session=session)
        except ApiError as missing:
            if missing.code != "job-not-found":
                raise
            error = error or missing
    assert error is not None
    return _find_other(client, project, name, error)


def _find_other(
    client: "ApiClient", project: str, name: str, error: "ApiError"
) -> "ArrayDetail | NamedService":
    from cavvy.client import ApiError
    from cavvy.client.array_wire import read_array
    from cavvy.client.service_wire import find_named_service

    if "." in name:  # only jobs have a dot in their names
        raise error
    for read in (read_array, find_named_service):
        try:
            return read(client, project, name)
        except ApiError as other:
            if other.status not in (403, 404):
                raise
    with suppress(ApiError):
        if any(each.name == name for each in client.machines(project)):
            there = named(project, name)
            hint = f"`cavvy machines stop {there}` stops the machine {name}"
            raise CommandFailure(f"machine {name} has no session", hint) from error
    raise error


def is_job(found: "Found") -> bool:
    from cavvy.client.wire import JobDetail

    return isinstance(found, JobDetail)


def find_array(
    client: "ApiClient", project: str, name: str, error: "ApiError", instead: str
) -> "ArrayDetail":
    """Return the array with this name, for a command that does the same with a job and an array.
    Raises CommandFailure for a service: `instead` says what to do with services.
    """
    from cavvy.client.array_wire import ArrayDetail

    found = find_named(client, project, name, error)
    if isinstance(found, ArrayDetail):
        return found
    if is_job(found):
        raise error
    raise CommandFailure(f"{name} is a service", instead, 2)


def find_job(client: "ApiClient", project: str, name: str) -> "JobDetail":
    """Return a job, for a command that needs one: of an array or a service, a job has to be named.
    Raises CommandFailure."""
    from cavvy.client.array_wire import ArrayDetail
    from cavvy.client.service_wire import NamedService

    found = find_named(client, project, name)
    if isinstance(found, ArrayDetail):
        what, jobs = "a group" if found.group else "an array", [each.name for each in found.jobs]
    elif isinstance(found, NamedService):
        ids = [each.job for each in found.replicas if each.job]
        what, jobs = "a service", list(name_jobs(client, project, ids).values())
    else:
        return found
    more = f" and {len(jobs) - _SHOWN} more" if len(jobs) > _SHOWN else ""
    hint = f"its jobs are {', '.join(jobs[:_SHOWN])}{more}" if jobs else "it has no job now"
    raise CommandFailure(f"{name} is {what}: name one of its jobs", hint, 2)


def find_running(
    client: "ApiClient", project: str, name: str, error: "ApiError | None" = None
) -> str:
    """Return the ID or name of the job on whose nodes a command for one job acts: a replica of a
    service, of which those that are ready come first, or the only running job of an array. Raises
    CommandFailure.
    """
    from cavvy.client.array_wire import ArrayDetail
    from cavvy.client.service_wire import NamedService

    found = find_named(client, project, name, error)
    if isinstance(found, NamedService):
        return _choose_replica(client, found)
    if isinstance(found, ArrayDetail):
        return _choose_member(found)
    return found.id


def name_jobs(client: "ApiClient", project: str, ids: "Iterable[str]") -> dict[str, str]:
    """Return the names of the jobs with these IDs, as far as they exist. A replica's job need not
    be called SERVICE.NUMBER: a former service of this name may have had such a job."""
    from cavvy.client import ApiError

    found = {}
    for job_id in ids:
        with suppress(ApiError):
            found[job_id] = client.job(project, job_id).name
    return found


def with_running(
    client: "ApiClient", project: str, name: str, request: "Callable[[str], _T]"
) -> "_T":
    """Call `request` with the name and, if there is no job of this name, with the job that
    `find_running` finds."""
    from cavvy.client import ApiError

    try:
        return request(name)
    except ApiError as error:
        return request(find_running(client, project, name, error))


def _choose_replica(client: "ApiClient", found: "NamedService") -> str:
    there = named(found.project, found.name)
    alive = [each for each in found.replicas if each.job and each.ended_at is None]
    alive.sort(key=lambda each: (each.state != "ready", each.number))
    if not alive:
        hint = f"`cavvy call {there}` sends a request, which starts one; `cavvy status {there}`"
        raise CommandFailure(f"service {found.name} has no replica now: {found.why}", hint)
    if len(alive) > 1:
        chosen = name_jobs(client, found.project, [alive[0].job]).get(alive[0].job, alive[0].job)
        click.echo(f"{chosen}: one of {len(alive)} replicas of {found.name}", err=True)
    return alive[0].job


def _choose_member(found: "ArrayDetail") -> str:
    name, project = found.array.name, found.array.project
    running = [each for each in found.jobs if each.phase == "running"]
    if len(running) == 1:
        return running[0].id
    what = "a group" if found.group else "an array"
    if not running:
        hint = f"`cavvy ps {named(project, name)}` lists its jobs"
        raise CommandFailure(f"{name} is {what}, of which no job runs: {found.array.reason}", hint)
    shown = ", ".join(each.name for each in running[:_SHOWN])
    more = f" and {len(running) - _SHOWN} more" if len(running) > _SHOWN else ""
    raise CommandFailure(f"{name} is {what}: name one of its jobs", f"{shown}{more} run now", 2)
