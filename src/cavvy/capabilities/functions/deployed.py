"""Deployed apps: `cavvy deploy app.py` stores what submits their jobs, and any program calls their
functions by `Function.lookup`. The first call submits the job, which ends when nothing calls it.
"""

import getpass
import time
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from secrets import token_hex
from typing import NamedTuple

from msgspec import Raw
from msgspec.json import encode

from cavvy.capabilities.functions import wire
from cavvy.capabilities.functions.app import App, Function
from cavvy.capabilities.functions.calls import AppRun
from cavvy.capabilities.functions.jobs import (
    ENDED,
    JobPlace,
    group_functions,
    make_meeting_place,
    make_task,
)
from cavvy.capabilities.functions.options import FunctionOptions
from cavvy.client.client import ApiClient
from cavvy.client.errors import ApiError
from cavvy.client.paths import read_time
from cavvy.sdk.connections import Connections
from cavvy.sdk.errors import InvalidArgument, JobNotFound
from cavvy.sdk.submission import SubmitOptions, prepare_task

_FRESH_S = 60.0  # for which another program may still be about to submit a job whose ID it has


class DeployedRevision(NamedTuple):
    """What `deploy_app` has done. `changed` is False if this revision was deployed already."""

    project: str
    revision: str
    functions: Sequence[str]
    schedules: Sequence[str]
    changed: bool


class DeployedJob:
    """The job of a deployed app's functions."""

    stays = True

    def __init__(self, app: str, function: str, project: str) -> None:
        self.name, self._function, self._project = app, function, project

    def find(self, connections: Connections) -> JobPlace:
        with connections.use() as connection:
            part = find_part(connection, self._project, self.name, self._function)
            job = part.job
            phase = self._look(connection, job)
            if phase in ENDED or (not phase and not _is_fresh(job)):
                ask = wire.NextJobAsk(part=part.part, ended=job)
                job = wire.claim_job(connection, self._project, self.name, ask)
                phase = ""
            if not phase:
                submit_part(connection, self._project, self.name, part, job)
        return JobPlace(self._project, job, part.meet)

    def _look(self, connection: ApiClient, job: str) -> str:
        """Return the job's phase, or "" if it was not submitted."""
        if not job:
            return ""
        try:
            return connection.job(self._project, job).phase
        except ApiError as error:
            if error.code != "job-not-found":
                raise
            return ""


def find_function(app: str, name: str, project: str | None) -> Function:
    """Return a function of a deployed app. Raises CavvyError."""
    connections = Connections(None, None, None)
    chosen = project or connections.default_project()
    with connections.use() as connection:
        part = find_part(connection, chosen, app, name)
    found = next(each for each in part.functions if each.name == name)
    known = App.looked_up(app)
    function = Function(known, name, None, FunctionOptions())
    function.is_generator = found.generator
    known.runner = AppRun(
        known,
        quiet=True,
        find_source=lambda called: (
            f"{chosen}/{part.part}",
            DeployedJob(app, called.name, chosen),
        ),
    )
    return function


def find_part(connection: ApiClient, project: str, app: str, function: str) -> wire.AppPart:
    """Return the part of an app that has a function. Raises JobNotFound, ApiError."""
    found = wire.read_app(connection, project, app)
    for part in found.parts:
        if any(each.name == function for each in part.functions):
            return part
    known = ", ".join(each.name for part in found.parts for each in part.functions)
    raise JobNotFound(f"the app {app} has no function {function}", f"it has {known}")


def submit_part(
    connection: ApiClient, project: str, app: str, part: wire.AppPart, job: str
) -> None:
    """Submit the job with this ID. If another program has submitted it, nothing happens."""
    connection.submit(
        part.text,
        project=project,
        path=app,
        origin=part.origin,
        user=getpass.getuser(),
        consent=part.consent,
        key=job,
    )


def deploy_app(app: App, project: str | None, *, consent: bool) -> DeployedRevision:
    """Store a revision of an app, and stop the jobs of the one before. Raises CavvyError."""
    if not app.place.file:
        raise InvalidArgument(f"the app {app.name} is in no file", "write it into a file")
    connections = Connections(None, None, None)
    chosen = project or app.project or connections.default_project()
    parts = []
    revision = sha256()
    with connections.use() as connection:
        try:
            before = wire.read_app(connection, chosen, app.name)
        except ApiError as error:
            if error.code != "app-not-found":
                raise
            before = None
        for key, mine in group_functions(app).items():
            owners = [each.options if each.owner is None else each.owner.options for each in mine]
            kept = any(each.min_replicas for each in owners)
            idle_s = 0.0 if kept else max(each.idle for each in owners)
            meet = make_meeting_place(token_hex(8))
            task, files = make_task(app, key, [meet], idle_s or _NEVER_S)
            options = SubmitOptions(project=chosen, files=files)
            asked = connection, task, options, None, connections.default_project
            prepared = prepare_task(*asked)
            same = prepared.text.replace(meet, "")
            revision.update(f"{same}\0{prepared.origin.snapshot}\0".encode())
            parts.append(
                wire.AppPartAsk(
                    text=prepared.text,
                    origin=Raw(encode(prepared.origin)),
                    snapshot=prepared.origin.snapshot or "",
                    meet=meet,
                    functions=[
                        wire.DeployedFunction(name=each.name, generator=each.is_generator)
                        for each in mine
                    ],
                    consent=consent,
                )
            )
        made = revision.hexdigest()[:12]
        changed = before is None or before.parts[0].revision != made
        if changed:
            ask = wire.AppAsk(revision=made, parts=parts, user=getpass.getuser())
            wire.put_app(connection, chosen, app.name, ask)
            for part in before.parts if before is not None else ():
                if part.job:
                    with suppress(ApiError):
                        reason = f"revision {made} was deployed"
                        connection.stop(chosen, part.job, reason=reason)
    names = list(app.functions)
    return DeployedRevision(chosen, made, names, (), changed)


_NEVER_S = 1e9  # of a job that is kept while nothing calls it


def _is_fresh(job: str) -> bool:
    made_at = read_time(job) if job else None
    return made_at is not None and time.time() - made_at < _FRESH_S
