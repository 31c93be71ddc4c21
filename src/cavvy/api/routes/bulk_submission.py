"""Stores many jobs with one request and in one transaction. Tasks that differ only in their names
are checked once."""

import asyncio
import re
from asyncio import to_thread
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from msgspec import msgpack, structs

from cavvy.api.app_state import AppState
from cavvy.api.errors import KNOWN, ApiProblem, RetryLater, explain
from cavvy.api.routes.submission import (
    admit_task,
    as_job,
    ask_market,
    check_after,
    check_parts,
    count_new,
    is_of_now,
    join_group,
    measure_inputs,
    name_task,
    parse_submitted,
    place_buckets,
    read_ceiling,
    read_made_before,
    read_origin,
    read_text,
    view_submitted,
)
from cavvy.client import wire
from cavvy.client.paths import PATTERN
from cavvy.control.decide.placement import FREE_FIELDS, MarketSnapshot, find_needs
from cavvy.control.job_service import TaskSubmission
from cavvy.domain.arrays import StoredArray, count_members, is_array
from cavvy.domain.jobs import JobRecord, RunOrigin
from cavvy.domain.policies import BoundPolicy
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import Struct, field, replace
from cavvy.spec.problems import SpecError
from cavvy.store.base import RowNotFound, StaleVersion
from cavvy.store.documents import encode

MOST_TASKS = 10_000  # tasks of one request
UNNAMED = wire.SubmitRequest().path  # of a task that has no file
_AT_ONCE = 50  # tasks that are read before other requests have their turn, in about 0.03 s
_TRIES = 3  # to store a batch, of which another request stores a part meanwhile


class ReadTask(Struct, frozen=True, kw_only=True):
    """A task of a batch. `number` is its place in the request, and `key` the ID of its job."""

    number: int
    key: str
    ask: wire.SubmitRequest
    origin: RunOrigin
    task: TaskSpec


class _Bulk(Struct, kw_only=True):
    """A batch while it is checked: the tasks that may still be stored, the jobs that are, and the
    numbers of the tasks that were refused for each reason."""

    asks: Sequence[wire.SubmitRequest]
    each: bool
    read: dict[int, ReadTask] = field(default_factory=dict)
    made: dict[int, wire.Submitted] = field(default_factory=dict)
    refused: dict[tuple[str, str, str], list[int]] = field(default_factory=dict)

    def refuse(self, numbers: Sequence[int], error: Exception) -> None:
        """Leave out these tasks. Raises the error if it does not concern the tasks alone, or if all
        tasks of the batch must be accepted."""
        problem = error if isinstance(error, ApiProblem) else explain(error)
        if problem is None or isinstance(problem, RetryLater):
            raise error
        if not self.each:
            message = f"{self._name(numbers)}: {problem.message}"
            if isinstance(error, SpecError) and self.asks[numbers[0]].path != UNNAMED:
                message = problem.message  # it begins with the name of the file
            raise ApiProblem(problem.code, message, problem.hint) from error
        reason = (problem.code, problem.message, problem.hint)
        self.refused.setdefault(reason, []).extend(numbers)
        for number in numbers:
            self.read.pop(number, None)

    def _name(self, numbers: Sequence[int]) -> str:
        """Name the first of these tasks by its file, or else by its place."""
        path = self.asks[numbers[0]].path
        place = f"task {numbers[0] + 1:,} of the request" if path == UNNAMED else path
        return f"{place} and {len(numbers) - 1:,} others" if len(numbers) > 1 else place


async def submit_batch(
    app_state: AppState,
    project: str,
    ask: wire.BatchRequest,
    account: str,
    permit: Callable[[TaskSpec], None],
    announce: Callable[[Sequence[ReadTask]], None],
) -> wire.SubmittedBatch:
    """Store the jobs of many tasks, in one transaction, as jobs of `account`. If `ask.each` is set,
    the tasks that are refused are left out; otherwise one of them refuses all. `permit` raises
    ApiProblem for a task that the caller may not run, and `announce` is called with those that are
    about to be stored. Raises ApiProblem, StoreError.
    """
    _check_keys(ask)
    batch = _Bulk(asks=ask.tasks, each=ask.each)
    await _read_all(app_state, project, ask, batch)
    for left in reversed(range(_TRIES)):
        await _find_earlier(app_state, project, batch)
        try:
            await _store(app_state, project, batch, account, permit, announce)
            break
        except StaleVersion:  # the same request was sent twice at the same time
            if not left:
                raise
    refused = [
        wire.RefusedTasks(tasks=sorted(numbers), code=code, message=message, hint=hint)
        for (code, message, hint), numbers in batch.refused.items()
    ]
    jobs = [job for _, job in sorted(batch.made.items())]
    return wire.SubmittedBatch(jobs=jobs, refused=refused)


def _check_keys(ask: wire.BatchRequest) -> None:
    if not ask.tasks:
        raise ApiProblem("invalid-request", "`tasks` is empty", "send at least one task")
    if len(ask.tasks) > MOST_TASKS:
        raise ApiProblem(
            "invalid-request",
            f"{len(ask.tasks):,} tasks are too many for one request",
            f"submit at most {MOST_TASKS:,} at once",
        )
    if len(ask.keys) != len(ask.tasks):
        text = f"`keys` has {len(ask.keys):,} keys for {len(ask.tasks):,} tasks"
        raise ApiProblem("invalid-request", text, "send one key for each task")
    key, count = Counter(ask.keys).most_common(1)[0]
    if count > 1:
        text = f"`keys` has {key!r} {count:,} times"
        raise ApiProblem("invalid-request", text, "make another key for each task")
    if len({each.user for each in ask.tasks}) > 1:
        text = "the tasks of one request must have the same `user`"
        raise ApiProblem("invalid-request", text, "send a request for each user")
    for key in ask.keys:
        if not re.fullmatch(PATTERN, key):
            raise ApiProblem("invalid-request", f"expected keys of the form {PATTERN}, not {key!r}")


async def _read_all(
    app_state: AppState, project: str, ask: wire.BatchRequest, batch: _Bulk
) -> None:
    """Read the tasks. Requests that differ only in the name of the job are read once."""
    now = app_state.now()
    known = dict[bytes, tuple[TaskSpec, RunOrigin] | Exception]()

    def read(number: int) -> tuple[TaskSpec, RunOrigin] | Exception:
        unnamed = structs.replace(ask.tasks[number], name=None)
        same = msgpack.encode(unnamed)
        if same not in known:
            try:
                text = read_text(unnamed)
                origin = read_origin(unnamed, text)
                known[same] = parse_submitted(project, unnamed, text, origin, now), origin
            except (ApiProblem, *KNOWN) as error:
                known[same] = error
        return known[same]

    for start in range(0, len(ask.tasks), _AT_ONCE):
        numbers = range(start, min(start + _AT_ONCE, len(ask.tasks)))
        async with app_state.parsing:
            found = await to_thread(list, map(read, numbers))
        for number, one in zip(numbers, found, strict=True):
            each = ask.tasks[number]
            try:
                if isinstance(one, Exception):
                    raise one
                task, origin = name_task(one[0], each), one[1]
            except (ApiProblem, *KNOWN) as error:
                batch.refuse([number], error)
                continue
            batch.read[number] = ReadTask(
                number=number, key=ask.keys[number], ask=each, origin=origin, task=task
            )


async def _find_earlier(app_state: AppState, project: str, batch: _Bulk) -> None:
    """Find the jobs that an earlier request with the same keys has made."""
    by_key = {each.key: each for each in batch.read.values()}
    known = {job.id: job for job in await app_state.store.find_jobs(list(by_key))}
    for key, each in by_key.items():
        found: JobRecord | StoredArray | None = known.get(key)
        if found is None and is_array(each.task):
            with suppress(RowNotFound):
                found = await app_state.store.arrays.get(key)
        if found is None and is_of_now(app_state, key):
            continue
        try:
            found = await read_made_before(app_state, project, key, each.origin)
        except ApiProblem as error:
            batch.refuse([each.number], error)
            continue
        del batch.read[each.number]
        batch.made[each.number] = view_submitted(found, created=False)


async def _store(
    app_state: AppState,
    project: str,
    batch: _Bulk,
    account: str,
    permit: Callable[[TaskSpec], None],
    announce: Callable[[Sequence[ReadTask]], None],
) -> None:
    """Check the tasks that were read, and store their jobs."""
    policies = await app_state.store.policies_of(project)
    checked = await _check_all(app_state, policies, account, batch, permit)
    read = [each for number, each in sorted(batch.read.items()) if number in checked]
    if not read:
        return
    announce(read)
    asks, keys = [checked[each.number] for each in read], [each.key for each in read]
    new = sum(max(1, count_members(each.task)) for each in read)
    async with count_new(app_state, policies, read[0].ask.user, new, keys):
        stored = await app_state.control_plane.jobs.submit_all(asks, project)
    for each, made in zip(read, stored, strict=True):
        if each.origin.snapshot is not None:
            # garbage collection keeps these blobs from now on, because the job is stored
            app_state.snapshots.add((project, each.origin.snapshot))
        batch.made[each.number] = wire.Submitted(
            id=each.key,
            project=project,
            name=made.job.name,
            phase=made.job.phase,
            members=len(made.members) or None,
        )


async def _check_all(
    app_state: AppState,
    policies: Sequence[BoundPolicy],
    account: str,
    batch: _Bulk,
    permit: Callable[[TaskSpec], None],
) -> dict[int, TaskSubmission]:
    """Check the tasks that were read. Return what is to be stored of each, by its number."""
    market = await ask_market(app_state)
    alike = dict[object, list[tuple[int, TaskSubmission]]]()
    parts = dict[object, ApiProblem | None]()
    for number, each in list(batch.read.items()):
        shape = _find_shape(app_state, each, market)
        try:
            permit(each.task)
            await check_after(app_state, each.task)
            await _check_parts_once(app_state, each, parts)
            checked = await _make(app_state, each, account)
        except (ApiProblem, *KNOWN) as error:
            batch.refuse([number], error)
            continue
        alike.setdefault(shape, []).append((number, checked))
        if number % _AT_ONCE == 0:
            await asyncio.sleep(0)  # other requests have their turn
    now, found = app_state.now(), dict[int, TaskSubmission]()
    for group in alike.values():
        (number, first), *others = group
        ask = batch.read[number].ask
        try:
            task, consented = await admit_task(
                app_state,
                first.task,
                policies,
                now,
                ask.user,
                consented=ask.consent,
                own=ask.own_consent,
                silent=market is None,
            )
        except (ApiProblem, *KNOWN) as error:
            batch.refuse([number for number, _ in group], error)
            continue
        found[number] = replace(first, task=task, consented=consented)
        found |= {number: replace(each, consented=consented) for number, each in others}
    return found


def _find_shape(app_state: AppState, each: ReadTask, market: MarketSnapshot | None) -> object:
    """Return what decides whether a task is admitted: tasks that get the same offers are admitted
    together. A task that `admit_task` may complete, or that names what exists already, is checked
    by itself. If `market` is None, the providers are silent."""
    task, ask = each.task, each.ask
    if task.image or task.machine or task.pool or task.after or task.group:
        return each.number
    job = as_job(task, app_state.now(), consented=ask.consent)
    if market is None:
        needs = encode(replace(task, **FREE_FIELDS)).encode()
    else:
        needs = find_needs(job, market, app_state.control_plane.pool.objections)
    return needs, _files_of(each), ask.consent, ask.own_consent


async def _check_parts_once(
    app_state: AppState, each: ReadTask, known: dict[object, ApiProblem | None]
) -> None:
    """Check the secrets and files of a task, once for all tasks that have the same. Raises
    ApiProblem."""
    alike = (
        None if each.task.after else (encode(replace(each.task, **FREE_FIELDS)), *_files_of(each))
    )
    if alike is None or alike not in known:
        problem = None
        try:
            await check_parts(app_state, each.task, each.origin)
        except ApiProblem as error:
            problem = error
        known[alike] = problem
    if (found := known[alike]) is not None:
        raise found


def _files_of(each: ReadTask) -> tuple[str | None, str | None]:
    return each.origin.snapshot, each.origin.rerun_of


async def _make(app_state: AppState, each: ReadTask, account: str) -> TaskSubmission:
    """Return what is to be stored of the task, with the places of its data. Raises ApiProblem."""
    task, group = await join_group(app_state, each.task)
    return TaskSubmission(
        task=await place_buckets(app_state, await measure_inputs(app_state, task)),
        origin=each.origin,
        id=each.key,
        user=each.ask.user,
        account=account,
        ceiling=read_ceiling(each.ask),
        group=group,
    )
