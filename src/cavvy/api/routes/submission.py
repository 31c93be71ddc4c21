"""Turns a submission into a stored job. The server repeats all checks that the client has made."""

import asyncio
import re
from asyncio import to_thread
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta
from functools import partial

import msgspec

from cavvy.api.app_state import AppState
from cavvy.api.errors import ApiProblem
from cavvy.api.wire import view
from cavvy.catalog.residency import (
    OUTSIDE_HINT,
    explain_unlocated,
    fill_regions,
    list_found_outside,
    list_unknown,
    say_unplaced,
)
from cavvy.client import wire
from cavvy.client.paths import PATTERN, read_time
from cavvy.control.decide.node_pools import (
    complete_pool_task,
    make_cluster_node,
    make_pool_start,
    restrict_to_pool,
    wait_for_offers,
)
from cavvy.control.decide.placement import MarketSnapshot, find_placements
from cavvy.control.decide.task_places import list_elsewhere
from cavvy.control.job_service import TaskSubmission
from cavvy.control.machine_service import MachineUnfit
from cavvy.control.parts import NO_DEVICES
from cavvy.control.share import WorkShare
from cavvy.control.sweep_keeper import NO_SWEEPS
from cavvy.costs.extras import expect_extras
from cavvy.domain.accounts import INSTALLATION, Permission
from cavvy.domain.arrays import StoredArray, count_members, find_phase, is_array
from cavvy.domain.authorization import PERMISSIONS, list_line
from cavvy.domain.credentials import split_account
from cavvy.domain.jobs import JOB_ENDS, JobRecord, RunOrigin
from cavvy.domain.node_pools import NodePool
from cavvy.domain.offers import Offer
from cavvy.domain.policies import BoundPolicy, PolicyBook
from cavvy.domain.tasks import TaskSpec, explain_missing, list_missing, list_secrets
from cavvy.domain.units import (
    HourlyRate,
    Money,
    format_count,
    format_duration,
    format_rate,
    format_usd,
)
from cavvy.domain.values import Struct, replace
from cavvy.planner.candidates import (
    Candidates,
    merge_candidates,
    rank_candidates,
)
from cavvy.planner.objections import explain_image, explain_policy
from cavvy.planner.placements import Placement, PlanningContext, RankingView
from cavvy.planner.rank import plan
from cavvy.spec.graph import MOST_TASKS, find_fault, sort_tasks
from cavvy.spec.overrides import apply_overrides
from cavvy.spec.problems import nearest
from cavvy.spec.uses import explain_unused
from cavvy.store.base import HashMismatch, RowNotFound, StaleVersion, StoreUnusable
from cavvy.store.blobs import BlobStore, NotManifest, read_manifest
from cavvy.store.locks import DatabaseLocks
from cavvy.store.objects.base import ObjectTryAgain
from cavvy.store.objects.locations import MEASURED
from cavvy.task_files import ReadOptions, parse_task

# Maximum age in seconds of an idempotency key. Keys become job IDs, which sort by time, so an older
# key could put its job ahead of others in the queue.
_KEY_AGE_S = 900
_MARKET_AGE = timedelta(seconds=60)  # maximum age of the offers that this check uses
_MARKET_WAIT_S = 5.0
_PRICE_WAITS = 4  # times as long where the user has not agreed, as silence is then a refusal
_SILENT = f"the providers have not answered within {_MARKET_WAIT_S:.0f} s"
MOST_RANKED = 20  # tasks of a file whose placements are ranked
# tries to count a user's jobs that another server counts, and seconds between two of them
_LOCK_TRIES, _LOCK_AGAIN_S = 400, 0.02
_COMPARED = 100  # the newest jobs whose names are compared with a name that does not exist
_SHORT = 5_000  # characters of a task that is parsed in the event loop, in less than 0.1 s
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_decode_origin = msgspec.json.Decoder(RunOrigin).decode


async def submit_task(
    app_state: AppState,
    project: str,
    ask: wire.SubmitRequest,
    key: str | None,
    account: str,
    announce: Callable[[str, TaskSpec], None],
) -> tuple[JobRecord | StoredArray, bool]:
    """Store the job, or the array of jobs, as a job of `account`, which is "" for the owner of the
    server. The second returned value is False if an earlier request with the same `key` has already
    created the job. `announce` is called with the ID and the task before the job is stored.
    Raises ApiProblem, SpecError.
    """
    now = app_state.now()
    text = read_text(ask)
    origin = read_origin(ask, text)
    if key is not None and not is_of_now(app_state, key):
        return await read_made_before(app_state, project, key, origin), False
    task = await read_task(app_state, project, ask, text, origin, now)
    jobs = app_state.control_plane.jobs
    job_id = key or jobs.make_id()
    announce(job_id, task)
    await check_after(app_state, task)
    await check_parts(app_state, task, origin)
    task, group = await join_group(app_state, task)
    policies = await app_state.store.policies_of(project)
    admitted = await _admit(app_state, task, policies, now, ask, origin, job_id, account)
    members = max(1, count_members(task))
    try:
        async with count_new(app_state, policies, ask.user, members, [job_id]):
            job = await jobs.enqueue(replace(admitted, group=group), project)
    except StaleVersion:
        if key is None:
            raise
        return await read_made_before(app_state, project, key, origin), False
    if origin.snapshot is not None:
        # garbage collection keeps these blobs from now on, because the job is stored
        app_state.snapshots.add((project, origin.snapshot))
    return job, True


async def check_runner(app_state: AppState, project: str, account: str, since: datetime) -> None:
    """Raise ApiProblem if the person who asked for something at a time may no longer run jobs in a
    project: what submits jobs later, in the name of a person, asks this. `account` is "" for the
    owner of the server; a later account with this name may belong to another person. A role that
    came with a sign-in counts after the sign-in has ended, too, as for the jobs themselves.
    """
    if not account:
        return
    found = next((each for each in await app_state.store.accounts() if each.name == account), None)
    if found is None or found.disabled_at is not None or found.created_at > since:
        raise ApiProblem("role-needed", f"the account {account} was removed or is disabled")
    line = list_line(project, (await app_state.store.policies()).parents)
    if not any(
        Permission.RUN in PERMISSIONS[each.role]
        for each in await app_state.store.roles()
        if each.account == account and each.project in line
    ):
        text = f"the account {account} may no longer run jobs in project {project}"
        raise ApiProblem("role-needed", text)


async def submit_graph(
    app_state: AppState,
    project: str,
    ask: wire.GraphRequest,
    account: str,
    announce: Callable[[str, TaskSpec], None],
) -> tuple[Sequence[JobRecord | StoredArray], bool]:
    """Store the jobs of several tasks, or none of them. The tasks may wait for each other.
    Otherwise like `submit_task`. Raises ApiProblem, SpecError.
    """
    now, jobs = app_state.now(), app_state.control_plane.jobs
    origins = _read_origins(ask)
    keyed = list(zip(ask.keys, origins, strict=True))
    if not all(is_of_now(app_state, key) for key in ask.keys):
        return [await read_made_before(app_state, project, *each) for each in keyed], False
    found = await _read_graph(app_state, project, ask, origins, now)
    if prices := "\n".join(each.price for each in found if each.price):
        raise ApiProblem("consent-needed", prices)
    tasks = [each.task for each in found]
    names = {task.name: key for task, key in zip(tasks, ask.keys, strict=True)}
    policies = await app_state.store.policies_of(project)
    asks = list[TaskSubmission]()
    for number in sort_tasks(tasks):
        each, task, key = ask.tasks[number], tasks[number], ask.keys[number]
        announce(key, task)
        after = tuple(replace(one, id=names.get(one.job, "")) for one in task.after)
        task = replace(task, after=after)
        origin = origins[number]
        asks.append(await _admit(app_state, task, policies, now, each, origin, key, account))
    members = sum(max(1, count_members(each.task)) for each in asks)
    created = True
    try:
        async with count_new(app_state, policies, asks[0].user, members, ask.keys):
            await jobs.submit_all(asks, project)
    except StaleVersion:
        created = False
    for origin in origins:
        if origin.snapshot is not None:
            app_state.snapshots.add((project, origin.snapshot))
    return [await read_made_before(app_state, project, *each) for each in keyed], created


def view_submitted(job: JobRecord | StoredArray, *, created: bool) -> wire.Submitted:
    """Return the answer for a job or an array."""
    if isinstance(job, JobRecord):
        return view(wire.Submitted, job, created=created)
    return wire.Submitted(
        id=job.id,
        project=job.project,
        name=job.name,
        phase=find_phase(job.counts),
        created=created,
        members=sum(job.counts.values()),
    )


class CheckedTask(Struct, frozen=True, kw_only=True):
    """A task that the server would accept, the task with the places of its data, and the price to
    which the user must first agree, or "".
    """

    task: TaskSpec
    placed: TaskSpec
    price: str


async def check_graph(
    app_state: AppState, project: str, ask: wire.GraphRequest
) -> Sequence[CheckedTask]:
    """Apply the checks of `submit_graph`, and store nothing. Raises ApiProblem, SpecError."""
    origins = _read_origins(ask)
    await app_state.store.archive.check(project)
    return await _read_graph(app_state, project, ask, origins, app_state.now())


def _read_origins(ask: wire.GraphRequest) -> Sequence[RunOrigin]:
    """Return the origins of the tasks. Raises ApiProblem if the request has no tasks, too many or
    no keys for them.
    """
    if len(ask.keys) != len(ask.tasks) or len({*ask.keys}) != len(ask.keys):
        raise ApiProblem("invalid-request", "`keys` must have another key for each task")
    if len(ask.tasks) > MOST_TASKS:
        raise ApiProblem(
            "invalid-request",
            f"{len(ask.tasks):,} tasks are too many",
            f"submit at most {MOST_TASKS}",
        )
    if not ask.tasks or not all(re.fullmatch(PATTERN, key) for key in ask.keys):
        raise ApiProblem("invalid-request", f"expected tasks, and keys of the form {PATTERN}")
    return [read_origin(each, read_text(each)) for each in ask.tasks]


@asynccontextmanager
async def count_new(
    app_state: AppState,
    policies: Sequence[BoundPolicy],
    user: str,
    new: int,
    keys: Sequence[str] = (),
    what: str = "submission",
) -> AsyncIterator[None]:
    """Check that the user may have so many more jobs that wait, if one of the `policies` of the
    project and of those above it limits them. Until they
    are stored, no other submission or retry of the user is counted, on no server. Raises
    ApiProblem, StoreUnusable, or StaleVersion if jobs with these IDs exist already.
    """
    limits = [
        (each, most) for each in policies if (most := each.policy.find_waiting(user)) is not None
    ]
    if not limits or not new:
        yield
        return
    async with (
        app_state.submitting.setdefault(user, asyncio.Lock()),
        hold_between_servers(app_state.share, f"waiting jobs of {user}"),
    ):
        if refusal := await _find_full(app_state, limits, user, new, what):
            if await _have_made(app_state, keys):
                raise StaleVersion("a job with this ID exists already")
            raise refusal
        yield


@asynccontextmanager
async def hold_between_servers(share: WorkShare | None, name: str) -> AsyncIterator[None]:
    """Hold a lock that only one server holds at a time. Raises StoreUnusable."""
    if share is None:
        yield
        return
    locks = DatabaseLocks(share.url)
    for _ in range(_LOCK_TRIES):
        held = await to_thread(locks.try_hold, name)
        if held is not None:
            break
        await asyncio.sleep(_LOCK_AGAIN_S)
    else:
        raise StoreUnusable("another server still counts the user's jobs; try again")
    try:
        yield
    finally:
        await to_thread(held.close)


async def _have_made(app_state: AppState, keys: Sequence[str]) -> bool:
    """Return whether a job or an array with one of these IDs exists."""
    if await app_state.store.find_jobs(keys):
        return True
    for key in keys:
        with suppress(RowNotFound):
            return bool(await app_state.store.arrays.get(key))
    return False


async def _find_full(
    app_state: AppState,
    limits: Sequence[tuple[BoundPolicy, int]],
    user: str,
    new: int,
    what: str,
) -> ApiProblem | None:
    """Return why the user may not have so many more jobs that wait."""
    waiting = await app_state.store.queue.count_waiting(user)
    book = await app_state.store.policies()
    for bound, most in limits:
        below = sum(
            count
            for name, count in waiting.items()
            if bound.project in (INSTALLATION, *list_line(name, book.parents))
        )
        if below + new > most:
            allowed = user if user in bound.policy.users else "each user"
            return ApiProblem(
                "policy-refused",
                f"{bound.owner} allows {allowed} at most {format_count(most, 'waiting job')}: "
                f"{user or 'this user'} has {below}, and the {what} adds {new}",
                "wait until some have started, or stop some; `cavvy project policy show` shows the "
                "limit",
            )
    return None


async def _admit(
    app_state: AppState,
    task: TaskSpec,
    policies: Sequence[BoundPolicy],
    now: datetime,
    ask: wire.SubmitRequest,
    origin: RunOrigin,
    job_id: str,
    account: str,
) -> TaskSubmission:
    """Return what is stored of a checked task. Raises ApiProblem if the task is not admitted."""
    task = await place_buckets(app_state, await measure_inputs(app_state, task))
    task, consented = await admit_task(
        app_state, task, policies, now, ask.user, consented=ask.consent, own=ask.own_consent
    )
    return TaskSubmission(
        task=task,
        origin=origin,
        id=job_id,
        user=ask.user,
        account=account,
        consented=consented,
        ceiling=read_ceiling(ask),
    )


async def _read_graph(
    app_state: AppState,
    project: str,
    ask: wire.GraphRequest,
    origins: Sequence[RunOrigin],
    now: datetime,
) -> Sequence[CheckedTask]:
    """Read and check the tasks. Raises ApiProblem, SpecError."""
    parts = list(zip(ask.tasks, origins, strict=True))
    tasks = [
        await read_task(app_state, project, each, read_text(each), origin, now)
        for each, origin in parts
    ]
    if fault := find_fault(tasks):
        raise ApiProblem("invalid-task", f"{fault.key}: {fault.message}", fault.hint)
    names = {task.name: key for task, key in zip(tasks, ask.keys, strict=True)}
    found = list[CheckedTask]()
    for (each, origin), task in zip(parts, tasks, strict=True):
        await check_after(app_state, task, names)
        await check_parts(app_state, task, origin)
        found.append(await _find_price(app_state, task, now, each))
    return found


async def check_parts(app_state: AppState, task: TaskSpec, origin: RunOrigin) -> None:
    """Raise ApiProblem if a secret or a file of the task is missing, or what the server needs for
    it."""
    check_sweep(app_state, task)
    await check_secrets(app_state, task)
    await check_snapshot(app_state, task.project, origin.snapshot)
    await check_residency(app_state, task, origin.snapshot, origin.rerun_of)
    await check_uses(app_state, task, origin.snapshot)


async def _find_price(
    app_state: AppState, task: TaskSpec, now: datetime, ask: wire.SubmitRequest
) -> CheckedTask:
    """Apply the checks of `admit_task`."""
    app_state.control_plane.jobs.check_times(task)
    placed, price = await place_buckets(app_state, await measure_inputs(app_state, task)), ""
    try:
        await _try_admit(app_state, placed, now, ask)
    except ApiProblem as problem:
        price = f"{task.name}: {problem.message}"
        if problem.code != "consent-needed":
            raise ApiProblem(problem.code, price, problem.hint) from problem
    return CheckedTask(task=task, placed=placed, price=price)


async def _try_admit(
    app_state: AppState, task: TaskSpec, now: datetime, ask: wire.SubmitRequest
) -> None:
    """Apply the checks of `admit_task`, and store nothing."""
    policies, own = await app_state.store.policies_of(task.project), ask.own_consent
    given = ask.consent
    await admit_task(
        app_state, task, policies, now, ask.user, consented=given, own=own, dry_run=True
    )


async def check_submission(
    app_state: AppState, project: str, ask: wire.SubmitRequest
) -> tuple[TaskSpec, str]:
    """Apply the checks of `submit_task`, except those of uploaded files, and store nothing. Returns
    the task with the places of its data and, if the user must first agree to the costs, the price,
    otherwise "". Raises ApiProblem, SpecError.
    """
    now = app_state.now()
    text = read_text(ask)
    task = await read_task(app_state, project, ask, text, read_origin(ask, text), now)
    await app_state.store.archive.check(project)
    await check_after(app_state, task)
    task, _ = await join_group(app_state, task)
    check_sweep(app_state, task)
    await check_secrets(app_state, task)
    app_state.control_plane.jobs.check_times(task)
    placed = await place_buckets(app_state, await measure_inputs(app_state, task))
    try:
        await _try_admit(app_state, placed, now, ask)
    except ApiProblem as problem:
        if problem.code != "consent-needed":
            raise
        return placed, problem.message
    return placed, ""


async def rank_placements(
    app_state: AppState, tasks: Sequence[TaskSpec], count: int
) -> Sequence[Sequence[Placement]]:
    """Return the best `count` placements of each checked task, in the order in which the queue
    tries them: one location of each machine type. There are none while the providers do not answer,
    and of the tasks after the first MOST_RANKED.
    """
    none = [()] * len(tasks)
    if not count:
        return none
    now = app_state.now()
    try:
        async with asyncio.timeout(_MARKET_WAIT_S):
            snapshot = await app_state.control_plane.pool.market(_MARKET_AGE)
    except TimeoutError:
        return none
    ranked: list[Sequence[Placement]] = []
    for task in tasks[:MOST_RANKED]:
        ranked.append(await _rank(app_state, task, snapshot, count, now))
        await asyncio.sleep(0)  # other requests have their turn
    return [*ranked, *none[MOST_RANKED:]]


async def _rank(
    app_state: AppState, task: TaskSpec, snapshot: MarketSnapshot, count: int, now: datetime
) -> Sequence[Placement]:
    egress = await app_state.control_plane.advisor.egress_of(task)
    situation = PlanningContext(submitted_at=now, egress=egress)
    objections = app_state.control_plane.pool.objections
    job = as_job(task, now, consented=True)
    found = await _take_turns(find_placements(job, snapshot, objections, situation, now))
    ranked: list[Placement] = []
    for wish, offers in rank_candidates(found, egress=egress):
        view = RankingView(limit=count, distinct=True)
        ranked += plan(wish.task, offers, now=now, situation=situation, view=view).placements
    return ranked[:count]


async def start_machine(
    app_state: AppState, project: str, name: str, ask: wire.MachineStartAsk
) -> JobRecord:
    """Submit a job that starts a machine. Raises ApiProblem."""
    now = app_state.now()
    await app_state.store.archive.check(project)
    task, origin = await app_state.control_plane.machines.start_task(project, name)
    await check_secrets(app_state, task)
    task = await place_buckets(app_state, await measure_inputs(app_state, task))
    policies = await app_state.store.policies_of(project)
    task, consented = await admit_task(
        app_state, task, policies, now, ask.user, consented=ask.consent
    )
    async with count_new(app_state, policies, ask.user, 1, what="start"):
        return await app_state.control_plane.jobs.submit(
            task, origin, project, user=ask.user, consented=consented
        )


async def move_job(app_state: AppState, job: JobRecord, ask: wire.RetryAsk) -> JobRecord | None:
    """Return the ended job with the resources that a retry asks for, or None if they are its own.
    The user must agree to their costs anew. Raises ApiProblem, SpecError.
    """
    if isinstance(ask.resources, msgspec.UnsetType):
        return None
    now = app_state.now()
    given = msgspec.json.encode({"resources": ask.resources}).decode()
    task = await _parse(app_state, len(given), partial(apply_overrides, job.task, given, now))
    if task == job.task:
        return None
    if task.stated is not None:
        task = replace(task, stated=replace(task.stated, resources=task.resources))
    await check_residency(app_state, task, job.origin.snapshot, job.origin.rerun_of)
    policies = await app_state.store.policies_of(task.project)
    task, consented = await admit_task(
        app_state, task, policies, now, job.user, consented=ask.consent
    )
    return replace(job, task=task, consented=consented)


async def admit_task(
    app_state: AppState,
    task: TaskSpec,
    policies: Sequence[BoundPolicy],
    now: datetime,
    user: str,
    *,
    consented: bool,
    own: bool = False,
    dry_run: bool = False,
    silent: bool = False,
) -> tuple[TaskSpec, bool]:
    """Return the task as it will run, and whether the user has agreed to pay, for the task or, if
    `own` is not set, for the machine or the pool that it names. If the task names a machine, fields
    that the task does not set are copied from the machine, and the machine is stored unless
    `dry_run` is set. With `silent`, the providers have just not answered, and are not asked again.
    Raises ApiProblem if no offer and no machine can run the task,
    or if the user must first agree to pay.
    """
    if task.edge is not None:  # it needs no node
        check_devices(app_state, "edge")
        return task, consented
    if refusal := explain_image(policies, task):
        raise ApiProblem("policy-refused", str(refusal))
    # after the check of its name, so that the server calls only registries that are permitted
    login = await _open_login(app_state, task)
    task = await app_state.images.pin(task, policies, login)
    task = await app_state.images.fill_in_command(task, login)
    if task.pool is not None:
        return await _admit_to_pool(
            app_state, task, now, consented=consented, own=own, silent=silent
        )
    if task.machine is None:
        await check_offers(app_state, task, now, consented=consented, silent=silent)
        return task, consented
    machines = app_state.control_plane.machines
    try:
        found = await machines.prepare(task)
    except MachineUnfit as error:
        raise ApiProblem("machine-unfit", str(error)) from error
    if found.gang is None:
        await check_offers(app_state, found.task, now, consented=consented, silent=silent)
    elif refusal := explain_policy(policies, found.task, found.gang.offer):
        raise ApiProblem("policy-refused", str(refusal))
    elif found.machine is not None and found.machine.user == user and not own:
        consented |= found.machine.consented  # the user agreed to pay for the gang
    if found.gang is not None and found.gang.offer.rate.micros_per_hour and not consented:
        raise ApiProblem("consent-needed", describe_price(found.task, found.gang.offer))
    if not dry_run:
        await machines.record(found, user, consented=consented)
    return found.task, consented


async def _admit_to_pool(
    app_state: AppState,
    task: TaskSpec,
    now: datetime,
    *,
    consented: bool,
    own: bool,
    silent: bool = False,
) -> tuple[TaskSpec, bool]:
    """Return the task as it runs in its pool, and whether the user or, if `own` is not set, the
    user who applied the pool has agreed to pay. The job is also accepted while the pool has no
    offer. Raises ApiProblem if no node of the pool can run the task.
    """
    try:
        pool = await app_state.store.node_pools.get(task.project, task.pool or "")
    except RowNotFound as error:
        raise ApiProblem("pool-not-found", str(error)) from error
    if pool.join:
        reason = f"the nodes of pool {pool.name} belong to another cluster, which runs its own jobs"
        raise ApiProblem("pool-unfit", reason)
    if task.nodes > pool.max_nodes:
        most = format_count(pool.max_nodes, "node")
        reason = f"pool {pool.name} has at most {most}, but the task asks for {task.nodes}"
        raise ApiProblem("pool-unfit", reason)
    task = complete_pool_task(task, pool)
    consented |= pool.consented and not own
    try:
        if silent:
            raise TimeoutError
        found, of_pool = await _look_in_pool(app_state, task, pool, now)
    except TimeoutError:
        _ask_without_price(app_state, task, task.name, consented=consented)
        return task, consented
    if of_pool and found.hopeless:
        reason = f"no node of pool {pool.name} fits: {found.reason}"
        if task.topology is not None:
            labels = ", ".join(sorted(pool.labels)) or "none"
            reason += f"; the labels that the pool's own file states: {labels}"
        raise ApiProblem("pool-unfit", reason)
    if not consented and any(each.rate.micros_per_hour for each in found.offers):
        raise ApiProblem("consent-needed", describe_price(task, found.offers[0]))
    return task, consented


async def check_pool(app_state: AppState, pool: NodePool, now: datetime, *, consented: bool) -> str:
    """Return why the pool can have no nodes now, or why this is unknown, or "". Raises ApiProblem
    if the user must first agree to pay for its nodes.
    """
    task = make_cluster_node(pool, pool.name) if pool.join else make_pool_start(pool)
    if pool.join:
        await check_secrets(app_state, task)
    try:
        found, _ = await _look_in_pool(app_state, task, pool, now)
    except TimeoutError:
        what = f"each node of pool {pool.name}"
        _ask_without_price(app_state, task, what, consented=consented)
        return _SILENT
    rates = [each.rate for each in found.offers if each.rate.micros_per_hour]
    if rates and not consented:
        rate, most = format_rate(rates[0]), format_count(pool.max_nodes, "node")
        until = f"for {format_duration(pool.idle)} after their last work"
        if pool.join:
            until = "until their cluster releases them"
        raise ApiProblem(
            "consent-needed",
            f"pool {pool.name} costs {rate} for each node at {found.offers[0].key}, and more at "
            f"other offers; it has {pool.min_nodes} to {most}, which are billed {until}",
        )
    if pool.min_nodes and not pool.join:
        found = wait_for_offers(as_job(task, now, consented=True), found)
    return "" if found.offers else found.reason


async def list_pool_offers(app_state: AppState, pool: NodePool, now: datetime) -> tuple[Offer, ...]:
    """Return the offers from which the pool can get its next node, the best one first."""
    task = make_cluster_node(pool, pool.name) if pool.join else make_pool_start(pool)
    try:
        return (await _look_in_pool(app_state, task, pool, now))[0].offers
    except TimeoutError:
        return ()


def _ask_without_price(app_state: AppState, task: TaskSpec, what: str, *, consented: bool) -> None:
    """Raise ApiProblem if the user has not agreed to pay and the price is unknown, because the
    providers have not answered in time. This machine costs nothing."""
    names = {split_account(each)[0] for each in app_state.control_plane.pool.providers}
    if not consented and list_elsewhere(task, names):
        unknown = f"{what} may cost money, price unknown: the providers have not answered in time"
        raise ApiProblem("consent-needed", unknown)


async def _look_in_pool(
    app_state: AppState, task: TaskSpec, pool: NodePool, now: datetime
) -> tuple[Candidates, bool]:
    """Return the offers for the task in the pool, and whether the pool has any offer. Raises
    TimeoutError if the providers do not answer in time."""
    async with asyncio.timeout(_MARKET_WAIT_S):
        snapshot = await app_state.control_plane.pool.market(_MARKET_AGE)
    job, within = restrict_to_pool(as_job(task, now, consented=True), snapshot, pool)
    situation = PlanningContext(submitted_at=now)
    return await _look(app_state, job, within, situation), within is not snapshot


async def _open_login(app_state: AppState, task: TaskSpec) -> str | None:
    """Return the login of the registry that has the task's image."""
    if task.image_login is None:
        return None
    secrets = await app_state.store.secrets(task.project)
    sealed = next((each.sealed for each in secrets if each.name == task.image_login), None)
    if sealed is None:
        return None
    return await to_thread(app_state.sealer.unseal, task.project, task.image_login, sealed)


def read_ceiling(ask: wire.SubmitRequest) -> Money | None:
    return None if ask.ceiling_micros is None else Money(ask.ceiling_micros)


def is_of_now(app_state: AppState, key: str) -> bool:
    """Return whether a request with this key may make a job, because the key was made lately."""
    # After the machine's clock was set back, clients on this machine use the earlier time.
    times = (app_state.now(), app_state.machine_now())
    made = read_time(key)
    return made is not None and any(abs(made - each.timestamp()) <= _KEY_AGE_S for each in times)


async def read_made_before(
    app_state: AppState, project: str, key: str, origin: RunOrigin
) -> JobRecord | StoredArray:
    """Return what an earlier request with this key has made. Raises ApiProblem if it was another
    request, or if the key is too old to make a job."""
    job: JobRecord | StoredArray
    try:
        try:
            job = await app_state.store.job(key)
            text = job.origin.task_text
        except RowNotFound:
            job = await app_state.store.arrays.get(key)
            text = await app_state.store.arrays.text(key)
    except RowNotFound:
        raise ApiProblem(
            "invalid-request",
            f"the time in the idempotency key {key} differs by more than {_KEY_AGE_S // 60} "
            f"minutes from the server's time, {app_state.now():%Y-%m-%d %H:%M} UTC; set the clock "
            "of the client's machine, or make a new key",
        ) from None
    if job.project != project:  # the message must not name a job that the caller may not see
        raise ApiProblem("key-reused", f"the idempotency key {key} created another job")
    if text != origin.task_text:
        raise ApiProblem(
            "key-reused",
            f"the idempotency key {key} created the job {job.name} of project {job.project}",
        )
    return job


def read_text(ask: wire.SubmitRequest) -> str:
    """Return the submitted text of the task. If the task was submitted as an object, return the
    object's JSON, which is also valid YAML. Raises ApiProblem.
    """
    if ask.text is not None and isinstance(ask.task, msgspec.UnsetType):
        return ask.text
    if ask.text is None and not isinstance(ask.task, msgspec.UnsetType):
        return bytes(ask.task).decode()
    raise ApiProblem(
        "invalid-request", "send either `text` (the file's text) or `task` (the same as an object)"
    )


async def read_task(
    app_state: AppState,
    project: str,
    ask: wire.SubmitRequest,
    text: str,
    origin: RunOrigin,
    now: datetime,
    *,
    serves: bool = False,
) -> TaskSpec:
    """Parse the submitted task, or service if `serves` is set. Raises SpecError, ApiProblem."""
    parse = partial(parse_submitted, project, ask, text, origin, now, serves=serves)
    task = await _parse(app_state, len(text) + len(origin.overrides) + len(str(ask.params)), parse)
    return name_task(task, ask)


def parse_submitted(
    project: str,
    ask: wire.SubmitRequest,
    text: str,
    origin: RunOrigin,
    now: datetime,
    *,
    serves: bool = False,
) -> TaskSpec:
    """Parse the submitted task, or service if `serves` is set, under its own name. Raises
    SpecError."""
    options = ReadOptions(dialect=origin.dialect, overrides=origin.overrides, serves=serves)
    task = parse_task(text, file=ask.path, params=ask.params, now=now, options=options)
    return replace(task, project=project)


def name_task(task: TaskSpec, ask: wire.SubmitRequest) -> TaskSpec:
    """Return the task under the name that the request gives it, if any. Raises ApiProblem."""
    if ask.name is not None and not _NAME.fullmatch(ask.name):
        raise ApiProblem(
            "invalid-request",
            f"`name` must have 1 to 63 characters from a-z, 0-9 and -, not {ask.name!r}",
        )
    return replace(task, name=ask.name or task.name)


async def _parse(app_state: AppState, length: int, parse: Callable[[], TaskSpec]) -> TaskSpec:
    """Call `parse`, in a thread if so many characters would stop all other requests meanwhile."""
    if length <= _SHORT:
        return parse()
    async with app_state.parsing:
        return await to_thread(parse)


def read_origin(ask: wire.SubmitRequest, text: str) -> RunOrigin:
    """Return the run's `RunOrigin`. The origin's text is the submitted text, unless the client has
    sent a different text in `origin`. Raises ApiProblem.
    """
    if isinstance(ask.origin, msgspec.UnsetType):
        origin = RunOrigin()
    else:
        try:
            origin = _decode_origin(ask.origin)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ApiProblem(
                "invalid-request", f"the body cannot be read: {error} in `origin`"
            ) from error
    return origin if origin.task_text else replace(origin, task_text=text)


async def check_after(app_state: AppState, task: TaskSpec, beside: Collection[str] = ()) -> None:
    """Raise ApiProblem if the task waits for a job that does not exist or never ends. `beside` are
    the names of the tasks that are submitted together with it.
    """
    if task.after and task.schedule is not None and task.schedule.cron is not None:
        raise ApiProblem("invalid-task", "after: a job that repeats cannot wait for other jobs")
    for each in task.after:
        if each.job == task.name:
            raise ApiProblem(
                "invalid-task",
                f"after: the job {task.name} cannot wait for itself",
                "name an earlier job of the same name by its ID",
            )
        if each.job not in beside:
            await _check_earlier(app_state, task, each.job)


async def join_group(app_state: AppState, task: TaskSpec) -> tuple[TaskSpec, str | None]:
    """Return the task as it joins a group that exists already, and the group's ID, if the task
    names a group. Raises ApiProblem."""
    if task.group is None:
        return task, None
    name = task.group.name
    try:
        found = await app_state.store.arrays.find(task.project, name)
    except RowNotFound:
        found = None
    if found is None or found.started is None:
        raise ApiProblem(
            "invalid-task",
            f"group: project {task.project} has no group {name} that a job could join",
            "to make a group, write its tasks into one file, with `---` between them",
        )
    if JOB_ENDS.issuperset(found.counts):
        hint = f"`cavvy retry {name}` starts it again"
        raise ApiProblem("invalid-task", f"group: all jobs of the group {name} have ended", hint)
    return replace(task, group=replace(task.group, joins=True)), found.id


async def _check_earlier(app_state: AppState, task: TaskSpec, name: str) -> None:
    with suppress(RowNotFound):
        await app_state.store.arrays.find(task.project, name)
        return
    try:
        job = await app_state.store.find_job(task.project, name)
    except RowNotFound:
        page = await app_state.store.list_jobs(task.project, limit=_COMPARED)
        close = nearest(name, (each.name for each in reversed(page.jobs)))
        raise ApiProblem(
            "invalid-task",
            f"after: project {task.project} has no job {name}",
            f"did you mean {close}?" if close else "`cavvy ps` lists the jobs",
        ) from None
    if job.removing:
        raise ApiProblem("invalid-task", f"after: job {name} is being removed")
    if job.task.schedule is not None and job.task.schedule.cron is not None:
        raise ApiProblem(
            "invalid-task",
            f"after: job {name} repeats and never ends",
            "name one of its runs, which `cavvy ps` lists",
        )


def check_sweep(app_state: AppState, task: TaskSpec) -> None:
    """Raise ApiProblem if the server cannot decide which values the jobs of the sweep get, or when
    they are stopped early."""
    if task.search is None and task.stop_early is None:
        return
    sweeps = app_state.control_plane.sweeps
    if sweeps is None:
        raise ApiProblem(
            "invalid-task",
            f"`{'best' if task.search else 'stop_early'}`: {NO_SWEEPS}",
            "an admin installs the capability sweeps, and restarts the server; or remove the field",
        )
    if objection := sweeps.find_objection(task):
        raise ApiProblem("invalid-task", *objection)


async def check_secrets(app_state: AppState, task: TaskSpec) -> None:
    """Raise ApiProblem if the task names a secret that the project does not have."""
    if not list_secrets(task):
        return
    known = {secret.name for secret in await app_state.store.secrets(task.project)}
    if missing := list_missing(task, known):
        message, hint = explain_missing(task.project, missing)
        raise ApiProblem("secret-missing", message, hint)


async def measure_inputs(app_state: AppState, task: TaskSpec) -> TaskSpec:
    """Return the task with the sizes of its inputs in storages, so that the planner includes the
    same copies as `cavvy plan`. An input has no size if the size cannot be measured.
    """
    urls = [each.source for each in task.inputs if each.size_mib is None]
    urls = [each for each in urls if each.startswith(MEASURED)]
    if not urls:
        return task
    try:
        found = await app_state.control_plane.data.find_sizes(task.project, urls)
    except ObjectTryAgain:  # the storages of other jobs occupy all threads
        return task
    sizes = [found.get(each.source) if each.size_mib is None else None for each in task.inputs]
    pairs = zip(task.inputs, sizes, strict=True)
    inputs = [each if size is None else replace(each, size_mib=size) for each, size in pairs]
    return replace(task, inputs=tuple(inputs))


async def place_buckets(app_state: AppState, task: TaskSpec) -> TaskSpec:
    """Return the task with the regions of its buckets, as the storage services report them. Raises
    ApiProblem if a bucket is, or may be, outside the allowed regions.
    """
    urls = list_unknown(task)
    if not urls:
        return task
    problems: Mapping[str, str]
    try:
        found = await app_state.control_plane.data.find_regions(task.project, urls)
        regions, problems = found.regions, found.problems
    except ObjectTryAgain as error:  # the storages of other jobs occupy all threads
        regions, problems = {}, dict.fromkeys(urls, str(error))
    for outside in list_found_outside(task, regions):
        raise ApiProblem("invalid-task", str(outside), OUTSIDE_HINT)
    if doubts := say_unplaced(task, {**problems, **explain_unlocated(regions)}):
        statement, _, hint = doubts.rpartition("; ")
        raise ApiProblem("invalid-task", statement, hint)
    return fill_regions(task, regions)


async def check_snapshot(app_state: AppState, project: str, snapshot: str | None) -> None:
    """Raise ApiProblem if a file of the working folder's snapshot was not uploaded."""
    if snapshot is None or (project, snapshot) in app_state.snapshots:
        return
    missing = await to_thread(_missing_parts, app_state.blobs.of(project), snapshot)
    if missing:
        raise ApiProblem(
            "snapshot-missing",
            f"{len(missing)} files of the working folder {snapshot[:12]}… are missing on the "
            "server",
        )


def check_devices(app_state: AppState, field: str) -> None:
    """Raise ApiProblem if no capability knows the devices that this field of a task file needs."""
    if app_state.control_plane.devices is None:
        raise ApiProblem(
            "invalid-task",
            f"`{field}`: {NO_DEVICES}",
            "an admin installs the capability edge, and restarts the server; or remove the field",
        )


async def check_residency(
    app_state: AppState, task: TaskSpec, snapshot: str | None, rerun_of: str | None = None
) -> None:
    """Raise ApiProblem if the working folder has a published model, or samples that a job before
    the task or before the repeated job has collected, that must not come where the task may run."""
    if snapshot is None:
        return
    if (devices := app_state.control_plane.devices) is None:
        return
    found = await devices.find_bound(task, app_state.blobs.of(task.project), snapshot, rerun_of)
    if found is not None:
        told, place = found
        field = "resources.regions" if task.service is None else "service.residency"
        raise ApiProblem(
            "residency",
            f"the working folder has {told}, which must not leave {place}, but {task.name} could "
            "run elsewhere",
            f"set `{field}` to {place}",
        )


async def check_uses(app_state: AppState, task: TaskSpec, snapshot: str | None) -> None:
    """Raise ApiProblem if the setup uses files that are not in the working folder's snapshot."""
    if not task.setup_uses or snapshot is None:
        return
    manifest = await to_thread(read_manifest, app_state.blobs.of(task.project), snapshot)
    paths = {entry.path for entry in manifest.files}
    for message, hint in explain_unused(paths, task.setup_uses):
        raise ApiProblem("invalid-task", message, hint)


def _missing_parts(blobs: BlobStore, snapshot: str) -> Sequence[str]:
    if missing := blobs.missing([snapshot]):
        return missing
    try:
        return blobs.missing(read_manifest(blobs, snapshot).parts)
    except (NotManifest, HashMismatch, RowNotFound) as error:
        told = f"the blob {snapshot[:12]}… does not list a folder's files: {error}"
        raise ApiProblem("invalid-request", told) from error


async def ask_market(app_state: AppState, *, consented: bool = True) -> MarketSnapshot | None:
    """Return the current offers, or None if the providers do not answer in time. An own host that
    is met for the first time may need longer than a cloud."""
    try:
        async with asyncio.timeout(_MARKET_WAIT_S * (1 if consented else _PRICE_WAITS)):
            return await app_state.control_plane.pool.market(_MARKET_AGE)
    except TimeoutError:
        return None


async def check_offers(
    app_state: AppState, task: TaskSpec, now: datetime, *, consented: bool, silent: bool = False
) -> None:
    """Raise ApiProblem if no offer can ever run the task, or if the user must first agree to the
    costs. With `silent`, the providers have just not answered, and are not asked again.
    """
    snapshot = None if silent else await ask_market(app_state, consented=consented)
    if snapshot is None:
        _ask_without_price(app_state, task, task.name, consented=consented)
        return  # the queue detects other problems later, and reports them in the job's events
    job = as_job(task, now, consented=consented)
    egress = await app_state.control_plane.advisor.egress_of(task)
    situation = PlanningContext(submitted_at=now, egress=egress)
    candidates = await _look(app_state, job, snapshot, situation)
    if not candidates.hopeless:
        return
    paid = (
        candidates
        if consented
        else await _look(app_state, replace(job, consented=True), snapshot, situation)
    )
    if not paid.offers:
        reason = paid.reason or candidates.reason
        free = replace(snapshot, market=replace(snapshot.market, policies=PolicyBook()))
        without = await _look(app_state, replace(job, consented=True), free, situation)
        raise ApiProblem("policy-refused" if without.offers else "no-offer", reason)
    raise ApiProblem("consent-needed", describe_price(task, paid.offers[0]))


def as_job(task: TaskSpec, now: datetime, *, consented: bool) -> JobRecord:
    """Return the job that the task would be."""
    return JobRecord(
        id="",
        project=task.project,
        name=task.name,
        task=task,
        submitted_at=now,
        since=now,
        consented=consented,
    )


async def _take_turns(
    found: Iterator[tuple[JobRecord, Candidates]],
) -> Sequence[tuple[JobRecord, Candidates]]:
    """Return all of what is found; other requests have their turn in between."""
    taken = []
    for each in found:
        taken.append(each)
        await asyncio.sleep(0)
    return taken


async def _look(
    app_state: AppState, job: JobRecord, snapshot: MarketSnapshot, situation: PlanningContext
) -> Candidates:
    objections = app_state.control_plane.pool.objections
    now = job.submitted_at
    found = await _take_turns(find_placements(job, snapshot, objections, situation, now))
    ranked = rank_candidates(found, egress=situation.egress)
    first = tuple(
        offer for _, offers in ranked for offer in offers
    )  # offers of all alternatives, in the order in which they are tried
    return replace(merge_candidates(found), offers=first)


def describe_price(task: TaskSpec, offer: Offer) -> str:
    """Describe the best offer's cost per hour and the spending limit. The hourly cost includes
    disks and public addresses. The spending limit also includes the minimum charge. For an elastic
    task, the cost is that of the most nodes that it may get.
    """
    need, count = task.resources, task.nodes if task.elastic is None else task.elastic.most
    extras = expect_extras(offer, need.disk_gib, need.disk_type).times(count)
    rate = HourlyRate(offer.rate.times(count).micros_per_hour + extras.micros_per_hour)
    nodes = f" for {count} nodes" if count > 1 else ""
    if task.elastic is not None:
        nodes = f" on the {count} nodes that it may get at most"
    if extras.micros_per_hour:
        nodes += f", of which {format_rate(extras)} is for disks and public addresses,"
    if task.limits.budget is not None:
        ceiling = f"at most {format_usd(task.limits.budget)} (limits.budget)"
    elif task.limits.duration is not None:
        most = rate.over(max(task.limits.duration, offer.minimum_charge))
        ceiling = (
            f"about {format_usd(most)} at most "
            f"(limits.duration: {format_duration(task.limits.duration)})"
        )
    else:
        ceiling = "with no upper limit; to set one, use limits.budget or limits.duration"
    if task.machine is not None:
        kept = f"machine {task.machine} costs as much while it waits for work as while it works"
        ceiling += f"; {kept}, for at most {format_duration(task.keep)}"
    whose = task.name
    if is_array(task):
        whose = f"each of the {count_members(task):,} jobs of {task.name}"
    return f"{whose} costs {format_rate(rate)}{nodes} at {offer.key}, {ceiling}"
