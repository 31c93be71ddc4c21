"""Deployed apps: `cavvy deploy app.py` stores what submits their jobs, and any program calls their
functions by `Function.lookup`. The first call submits the job, which ends when nothing calls it.
"""

import asyncio
import getpass
import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Raw
from msgspec.json import decode, encode

from cavvy.capabilities.functions import payload, wire
from cavvy.capabilities.functions.app import App, Function, name_place
from cavvy.capabilities.functions.calls import AppRun, FunctionCall
from cavvy.capabilities.functions.jobs import (
    ENDED,
    JobPlace,
    group_functions,
    make_key,
    make_task,
)
from cavvy.capabilities.functions.limits import CallLimit
from cavvy.capabilities.functions.meeting import make_meeting_place
from cavvy.capabilities.functions.options import FunctionOptions
from cavvy.capabilities.functions.schema import describe_function
from cavvy.capabilities.functions.stored_calls import CallKeeper, make_finder
from cavvy.client.client import ApiClient
from cavvy.client.errors import ApiError
from cavvy.client.paths import read_time
from cavvy.client.wire import JobListing
from cavvy.sdk.connections import Connections
from cavvy.sdk.errors import InvalidArgument, JobNotFound
from cavvy.sdk.submission import SentTask, SubmitOptions, prepare_task
from cavvy.sdk.task import Task

if TYPE_CHECKING:
    import hashlib

SendTask = Callable[[Task, Mapping[str, Path], str], SentTask]
# tags with the name of the app: of jobs that repeat, and of those that take calls
_SCHEDULE, _DEPLOYED = "cavvy-schedule", "cavvy-deployed"
_REVISION, _FUNCTION = "cavvy-revision", "cavvy-function"  # tags of jobs that repeat
_PAGE = 200  # jobs
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

    def __init__(self, app: str, function: str, project: str, *, consent: bool = False) -> None:
        self.name, self._function, self._project = app, function, project
        self._consent = consent

    def find(self, connections: Connections) -> JobPlace:
        with connections.use() as connection:
            while (found := self._find(connection)) is None:
                pass  # it was deployed again meanwhile
        return found

    def _find(self, connection: ApiClient) -> JobPlace | None:
        """Return None if the app has another revision than the one that was read here."""
        part = find_part(connection, self._project, self.name, self._function)
        job = part.job
        phase = self._look(connection, job)
        if phase in ENDED or (not phase and not _is_fresh(job)):
            ask = wire.NextJobAsk(part=part.part, revision=part.revision, ended=job)
            try:
                job = wire.claim_job(connection, self._project, self.name, ask)
            except ApiError as error:
                if error.code != "app-changed":
                    raise
                return None
            phase = ""
        if not phase:
            agreed = part.consent or self._consent
            submit_part(connection, self._project, self.name, part, job, consent=agreed)
            if self._was_replaced(connection, part, job):
                return None
        return JobPlace(self._project, job, part.meet)

    def _was_replaced(self, connection: ApiClient, part: wire.AppPart, job: str) -> bool:
        """Stop a job whose app was deployed again or removed before the job was
        submitted, since the one who did so could not stop it. Return whether this was so.
        """
        found = _read_before(connection, self._project, self.name)
        if found is not None and any(each.job == job for each in found.parts):
            return False
        with suppress(ApiError):
            connection.stop(self._project, job, reason="the app was deployed again")
        return True

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


def find_function(
    app: str, name: str, project: str | None, *, trust: bool, consent: bool
) -> Function:
    """Return a function of a deployed app. Raises CavvyError."""
    connections = Connections(None, None, None)
    chosen = project or connections.default_project()
    with connections.use() as connection:
        part = find_part(connection, chosen, app, name)
    found = next(each for each in part.functions if each.name == name)
    known = App.looked_up(app)
    function = Function(known, name, None, FunctionOptions())
    function.is_generator = found.generator
    codec = payload.PickleCodec() if trust else payload.JsonCodec()
    schema = decode(found.arguments) if found.arguments else None
    if found.limits:
        function.find_keys = make_finder(name, schema or {}, found.limits)
    known.runner = DeployedRun(
        known,
        CallKeeper(chosen, app, codec, once=found.once, consent=consent, schema=schema),
        codec=codec,
        find_source=lambda called: (
            f"{chosen}/{part.part}",
            DeployedJob(app, called.name, chosen, consent=consent),
        ),
    )
    return function


class DeployedRun(AppRun):
    """The jobs of a deployed app. The server keeps the calls of `spawn`, and those with a key."""

    def __init__(self, app: App, keeper: CallKeeper, **options: Any) -> None:
        super().__init__(app, **options)
        self._keeper = keeper

    def call(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function.key is None and not self._keeper.once:
            return super().call(function, args, kwargs)
        return self._keeper.spawn(function, args, kwargs).get()

    async def call_async(
        self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if function.key is None and not self._keeper.once:
            return await super().call_async(function, args, kwargs)
        return await asyncio.to_thread(self.call, function, args, kwargs)

    def spawn(
        self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> FunctionCall:
        return self._keeper.spawn(function, args, kwargs)

    def spawn_all(
        self,
        function: Function,
        items: Iterable[tuple[Sequence[Any], Mapping[str, Any]]],
        keys: Iterable[str] | None,
    ) -> Iterator[FunctionCall]:
        yield from self._keeper.spawn_all(function, items, keys, turn=token_hex(4))


def find_part(connection: ApiClient, project: str, app: str, function: str) -> wire.AppPart:
    """Return the part of an app that has a function. Raises JobNotFound, ApiError."""
    found = wire.read_app(connection, project, app)
    for part in found.parts:
        if any(each.name == function for each in part.functions):
            return part
    known = ", ".join(each.name for part in found.parts for each in part.functions)
    raise JobNotFound(f"the app {app} has no function {function}", f"it has {known}")


def submit_part(
    connection: ApiClient,
    project: str,
    app: str,
    part: wire.AppPart,
    job: str,
    *,
    consent: bool,
) -> None:
    """Submit the job with this ID. If another program has submitted it, nothing happens."""
    connection.submit(
        part.text,
        project=project,
        path=app,
        origin=part.origin,
        user=getpass.getuser(),
        consent=consent,
        key=job,
    )


def deploy_app(app: App, project: str | None, *, consent: bool) -> DeployedRevision:
    """Store a revision of an app, stop what belongs to others, and submit the schedules that are
    missing: also those that a deployment which was interrupted has left. Raises CavvyError.
    """
    if not app.place.file:
        raise InvalidArgument(f"the app {app.name} is in no file", "write it into a file")
    connections = Connections(None, None, None)
    chosen = project or app.project or connections.default_project()
    revision = sha256()
    with connections.use() as connection:
        before = _read_before(connection, chosen, app.name)
        send = partial(_send, connection, connections, chosen, revision)
        parts = [
            _make_part(app, key, mine, send, before, consent=consent)
            for key, mine in group_functions(app).items()
        ]
        schedules = {
            each.name: make_scheduled(app, each)
            for each in app.functions.values()
            if each.options.schedule is not None
        }
        for task, files in schedules.values():
            send(task, files, "")
        made = revision.hexdigest()[:12]
        changed = before is None or before.parts[0].revision != made
        replaced: Sequence[str] = ()
        if changed:
            ask = wire.AppAsk(revision=made, parts=parts, user=getpass.getuser())
            # also the jobs that were started since the app was read
            replaced = wire.put_app(connection, chosen, app.name, ask).replaced
        old, known = sort_jobs(connection, chosen, app.name, made)
        for job in {*replaced, *old}:
            with suppress(ApiError):
                connection.stop(chosen, job, reason=f"revision {made} was deployed")
        for name in schedules.keys() - known:
            task, files = schedules[name]
            task = task.replace(tags={_REVISION: made, _FUNCTION: name})
            options = SubmitOptions(project=chosen, files=files)
            sent = prepare_task(connection, task, options, None, connections.default_project)
            _submit(connection, sent, chosen, consent=consent)
    return DeployedRevision(chosen, made, list(app.functions), list(schedules), changed)


def sort_jobs(
    connection: ApiClient, project: str, app: str, revision: str
) -> tuple[list[str], set[str]]:
    """Return the IDs of the app's jobs that do not belong to this revision, and the functions whose
    schedules of this revision exist.
    """
    listed = list_own_jobs(connection, project, app)
    found = _read_before(connection, project, app)  # after the jobs: each was claimed before
    current = {each.job for each in found.parts} if found is not None else set()
    old, known = [], set[str]()
    for each in listed:
        name = each.tags.get(_FUNCTION, "")
        if _SCHEDULE not in each.tags:
            is_own = each.id in current
        else:
            is_own = each.tags.get(_REVISION) == revision and name not in known
            known |= {name} if is_own else set()
        if not is_own:
            old.append(each.id)
    return old, known


def make_scheduled(app: App, function: Function) -> tuple[Task, dict[str, Path]]:
    """Return the task that runs a function at the times of its schedule, and the files to send.
    Raises InvalidArgument if the function needs arguments.
    """
    needed = [
        each.name
        for each in inspect.signature(function.raw or (lambda: None)).parameters.values()
        if each.default is each.empty
        and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        and not (function.owner is not None and each.name == "self")
    ]
    if needed:
        raise InvalidArgument(
            f"{function.name} ({name_place(function.raw)}) has a schedule and needs the arguments "
            f"{', '.join(needed)}",
            "give them defaults, since the schedule passes none",
        )
    options = function.options
    task, files = make_task(app, make_key(app, function), [function.name], 0.0, "once")
    name = f"{app.name}-{function.name}".lower().replace(".", "-").replace("_", "-")
    more: dict[str, Any] = {
        "name": name[:50].strip("-"),
        "tags": {"cavvy-app": app.name, _SCHEDULE: app.name},
        "schedule": {"cron": options.schedule},
    }
    if options.retries:
        more["retry"] = {"exit": options.retries}
    if options.timeout:
        more["limits"] = {"duration": options.timeout}
    return task.replace(**more), files


def _make_part(
    app: App,
    key: str,
    mine: Sequence[Function],
    send: SendTask,
    before: wire.DeployedApp | None,
    *,
    consent: bool,
) -> wire.AppPartAsk:
    owners = [each.options if each.owner is None else each.owner.options for each in mine]
    kept = any(each.min_replicas for each in owners)
    idle_s = _NEVER_S if kept else max(each.idle for each in owners)
    meet = make_meeting_place(token_hex(8))
    path = meet.rpartition(":")[0]
    if before is not None and (secret := before.parts[0].meet.rpartition(":")[2]):
        meet = f"{path}:{secret}"  # as part of the files, another key would be another revision
    task, files = make_task(app, key, [], idle_s, meet=meet)
    sent = send(task.replace(tags={_DEPLOYED: app.name}), files, path)
    return wire.AppPartAsk(
        text=sent.text,
        origin=Raw(encode(sent.origin)),
        snapshot=sent.origin.snapshot or "",
        meet=meet,
        functions=[_describe(each) for each in mine],
        consent=consent,
    )


def _describe(function: Function) -> wire.DeployedFunction:
    arguments, result = describe_function(
        function.raw or (lambda: None),
        bound=function.owner is not None,
        batched=function.options.batch is not None,
    )
    return wire.DeployedFunction(
        name=function.name,
        generator=function.is_generator,
        once=function.options.once,
        schedule=function.options.schedule or "",
        priority=function.options.priority,
        limits=tuple(_list_paths(function, each) for each in function.options.limit),
        arguments=Raw(encode(arguments)),
        result=Raw(encode(result)),
    )


def _list_paths(function: Function, limit: CallLimit) -> tuple[str, ...]:
    """Return the parameters that are the key of a limit. Raises InvalidArgument."""
    if callable(limit.key):
        raise InvalidArgument(
            f"{function.name} ({name_place(function.raw)}) has a limit whose key is a function, "
            "which callers of a deployed app do not have",
            'name parameters instead, such as key="tenant" or key=["tenant", "order.region"]',
        )
    return tuple(limit.list_paths())


def _send(
    connection: ApiClient,
    connections: Connections,
    project: str,
    revision: "hashlib._Hash",
    task: Task,
    files: Mapping[str, Path],
    apart: str,
) -> SentTask:
    """Check a task and upload its files. What it is, without the text `apart`, goes into the hash
    of the revision.
    """
    options = SubmitOptions(project=project, files=files)
    sent = prepare_task(connection, task, options, None, connections.default_project)
    same = sent.text.replace(apart, "") if apart else sent.text
    revision.update(f"{same}\0{sent.origin.snapshot}\0".encode())
    return sent


def _read_before(connection: ApiClient, project: str, app: str) -> wire.DeployedApp | None:
    try:
        return wire.read_app(connection, project, app)
    except ApiError as error:
        if error.code != "app-not-found":
            raise
        return None


def list_own_jobs(connection: ApiClient, project: str, app: str) -> list[JobListing]:
    """Return the deployed app's jobs that take calls and those that repeat, without their runs."""
    found: list[JobListing] = []
    cursor: str | None = None
    while True:
        page = connection.jobs(
            project, phases=("queued", "starting", "running"), cursor=cursor, limit=_PAGE
        )
        for each in page.jobs:
            repeats = each.held and each.tags.get(_SCHEDULE) == app
            if repeats or each.tags.get(_DEPLOYED) == app:
                found.append(each)
        cursor = page.cursor
        if cursor is None:
            return found


def _submit(connection: ApiClient, sent: SentTask, project: str, *, consent: bool) -> None:
    connection.submit(
        sent.text,
        project=project,
        path=sent.path,
        origin=sent.origin,
        user=getpass.getuser(),
        consent=consent,
    )


_NEVER_S = 1e9  # of a job that is kept while nothing calls it


def _is_fresh(job: str) -> bool:
    made_at = read_time(job) if job else None
    return made_at is not None and time.time() - made_at < _FRESH_S
