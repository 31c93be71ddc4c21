"""Elastic pools: answers the questions of the queue and of idle gangs, keeps the minimum of each
pool, and handles users' requests about pools.

The jobs of a pool start its nodes themselves: a job that waits gets a gang, which is kept after the
job for the pool's next job. Only the nodes of a minimum are started by jobs that do no work. Such
a job's ID is stored with the pool before the job is submitted, so that a server that was killed in
between submits it again instead of another one. The same applies to a pool with `join`, whose nodes
another cluster orders by name: each of them is a job that runs until the cluster releases the node.

Errors, which are subclasses of JobServiceError:

* PoolInUse: the pool still has unfinished jobs
* NotOfCluster: the nodes of the pool do not belong to another cluster, or are too many
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta

from cavvy.control.clock import ControlClock
from cavvy.control.decide.node_pools import (
    as_pool_gang,
    as_pool_gangs,
    make_cluster_node,
    make_pool_start,
    opens_at,
)
from cavvy.control.decide.requests import is_stopping
from cavvy.control.job_service import JobService, JobServiceError
from cavvy.control.running_costs import sum_gang
from cavvy.control.worklist import QUEUE
from cavvy.domain.jobs import JOB_ENDS, Attempt, AttemptPhase, JobPhase, JobRecord, RunOrigin
from cavvy.domain.node_pools import CLUSTER_NODE_TAG, MOST_NODES, NodePool, OrderedNode
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import Money, format_count
from cavvy.domain.values import Struct, replace
from cavvy.scheduler.node_pools import (
    KeepIdle,
    PoolGang,
    count_missing,
    decide_idle,
)
from cavvy.store.base import ProjectFilter, RowNotFound, StaleVersion
from cavvy.store.sql import Store

_PREFIX = "pool:"
_LOOK_AGAIN = timedelta(seconds=30)  # interval between two checks of a pool with a minimum
_SOON = timedelta(seconds=5)  # the same while jobs start nodes of the minimum
_RETRY = timedelta(minutes=5)  # after a job failed that should have started a node
_AT_ONCE = timedelta(0)
_NAMED = 4  # jobs that a message names
_RELEASED = "the cluster released the node"
_TRIES = 10  # tries of a write that fails because a row was changed meanwhile


class PoolInUse(JobServiceError):
    """Raised if the pool still has unfinished jobs."""


class NotOfCluster(JobServiceError):
    """Raised if a node is ordered by name from a pool without `join`, or too many are ordered."""


class ClusterNodeStatus(Struct, frozen=True, kw_only=True):
    """A node that another cluster has ordered: its job, if it has been submitted, and the newest
    attempt of the job, which may have ended."""

    node: OrderedNode
    job: JobRecord | None
    attempt: Attempt | None


class PoolStatus(Struct, frozen=True, kw_only=True):
    """A pool, its gangs, and how many jobs run and wait. `spent` is the cost of its gangs so far,
    and `opens_at` is None while it is open."""

    pool: NodePool
    gangs: Sequence[PoolGang]
    attempts: Sequence[Attempt]
    running: int
    waiting: int
    opens_at: datetime | None
    spent: Money


def pool_key(project: str, name: str) -> str:
    """Return the worklist's key of a pool."""
    return f"{_PREFIX}{project}/{name}"


def is_pool_key(key: str) -> bool:
    return key.startswith(_PREFIX)


class PoolNodes:
    """Reads the pool of a job, and the pool's gangs."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def read(self, project: str, name: str) -> NodePool | None:
        """Return the pool, or None if no such pool exists."""
        try:
            return await self._store.node_pools.get(project, name)
        except RowNotFound:
            return None

    async def list_attempts(self, project: str, name: str) -> Sequence[Attempt]:
        """Return the attempts whose gangs belong to the pool and may exist."""
        return await self._store.node_pools.attempts(project, name)

    async def decide_idle(self, job: JobRecord, attempt: Attempt, now: datetime) -> KeepIdle | None:
        """Return how long the idle gang, which is kept after the job, stays in the job's pool. The
        result is None if the job has no pool."""
        if job.task.pool is None:
            return None
        pool = await self.read(job.project, job.task.pool)
        others = [] if pool is None else await self.list_attempts(job.project, job.task.pool)
        mine = as_pool_gang(attempt, now)
        if mine.idle_since is None:
            return None
        gangs = [mine, *(as_pool_gang(each, now) for each in others if each.id != attempt.id)]
        opens = None if pool is None else opens_at(pool, now)
        return decide_idle(pool, gangs, mine, opens, now)


class PoolService:
    """Keeps the minimum of each pool, and handles users' requests about pools. `hint` adds a key to
    the worklist."""

    def __init__(
        self,
        store: Store,
        clock: ControlClock,
        jobs: JobService,
        hint: Callable[[str], None],
    ) -> None:
        self._store, self._clock, self._jobs, self._hint = store, clock, jobs, hint
        self._nodes = PoolNodes(store)

    # Users' requests

    async def list(self, projects: ProjectFilter) -> Sequence[PoolStatus]:
        """Return the pools of these projects."""
        return [await self._status(each) for each in await self._store.node_pools.list(projects)]

    async def get(self, project: str, name: str) -> PoolStatus:
        """Return one pool. Raises RowNotFound."""
        return await self._status(await self._store.node_pools.get(project, name))

    async def apply(self, pool: NodePool) -> NodePool:
        """Store the pool, or replace the definition of the pool with its name."""
        for _ in range(_TRIES):
            old = await self._nodes.read(pool.project, pool.name)
            if old is not None:
                pool = replace(pool, ordered=old.ordered, members=old.members, version=old.version)
            with suppress(StaleVersion):
                stored = await self._store.node_pools.put(pool)
                await self._look(stored.project, stored.name)
                return stored
            pool = replace(pool, version=0, ordered=(), members=())
        raise StaleVersion(f"pool {pool.name} kept changing during the request; try again")

    async def remove(self, project: str, name: str) -> None:
        """Delete the pool, whose idle nodes are then removed. Raises RowNotFound, PoolInUse."""
        for _ in range(_TRIES):
            pool = await self._store.node_pools.get(project, name)
            jobs = await self._read_jobs(pool)
            if jobs:
                waiting = sum(phase is JobPhase.QUEUED for phase in jobs.values())
                named = [(await self._store.job(each)).name for each in list(jobs)[:_NAMED]]
                raise PoolInUse(
                    f"pool {name} has {format_count(len(jobs), 'unfinished job')}, {waiting:,} of "
                    f"them waiting: {', '.join(named)}{', …' if len(jobs) > _NAMED else ''}"
                )
            with suppress(StaleVersion):
                await self._store.node_pools.delete(pool)
                await self._stop(pool.ordered, project, f"pool {name} was removed")
                await self._look(project, name)
                return
        raise StaleVersion(f"pool {name} kept changing during the request; try again")

    async def stop_all(self, project: str | None = None) -> None:
        """Stop the pools of a project, or all pools, until they are applied again."""
        for _ in range(_TRIES):
            with suppress(StaleVersion):
                for pool in await self._store.node_pools.list(project):
                    if not pool.stopped:
                        await self._store.node_pools.put(replace(pool, stopped=True))
                        await self._look(pool.project, pool.name)
                return
        raise StaleVersion("pools kept changing during the request; try again")

    async def any(self) -> bool:
        """Return whether a pool has a minimum, which needs a server."""
        return any(each.min_nodes and not (each.stopped or each.join) for each in await self._all())

    async def unfinished(self) -> Sequence[str]:
        """Return the keys of the pools that need a reconciler."""
        return [pool_key(each.project, each.name) for each in await self._all()]

    # Nodes of another cluster

    async def order_nodes(self, project: str, name: str, nodes: Sequence[str]) -> None:
        """Start these nodes of the cluster, except those that the cluster has already. A node that
        has ended is started again. Raises RowNotFound, NotOfCluster.
        """
        for _ in range(_TRIES):
            pool = await self._store.node_pools.get(project, name)
            if not pool.join:
                raise NotOfCluster(
                    f"pool {name} has no `join`, so its nodes cannot be given to another cluster"
                )
            jobs = {each.node.name: each for each in await self.list_nodes(pool)}
            fresh = {each: None for each in nodes if not _is_live(jobs.get(each))}
            members = [each for each in pool.members if each.name not in fresh]
            if fresh and len(members) + len(fresh) > MOST_NODES:
                raise NotOfCluster(
                    f"pool {name} has {len(members):,} nodes, and with these it would have more "
                    f"than {MOST_NODES:,}",
                    "release nodes that the cluster no longer needs",
                )
            added = [OrderedNode(name=each, job_id=self._jobs.make_id()) for each in fresh]
            with suppress(StaleVersion):
                if added:
                    changed = replace(pool, members=(*members, *added))
                    pool = await self._store.node_pools.put(changed)
                for each in added:
                    await self._join(pool, each)
                self._hint(pool_key(project, name))
                return
        raise StaleVersion(f"pool {name} kept changing during the request; try again")

    async def release_nodes(self, project: str, name: str, nodes: Sequence[str]) -> None:
        """Give these nodes of the cluster back. Names that the cluster does not have are ignored,
        because a release may be repeated. Raises RowNotFound.
        """
        wanted = set(nodes)
        for _ in range(_TRIES):
            pool = await self._store.node_pools.get(project, name)
            gone = [each for each in pool.members if each.name in wanted]
            with suppress(StaleVersion):
                if gone:
                    left = tuple(each for each in pool.members if each.name not in wanted)
                    await self._store.node_pools.put(replace(pool, members=left))
                # If the server is killed here, `reconcile` stops the jobs.
                await self._stop([each.job_id for each in gone], project, _RELEASED)
                self._hint(pool_key(project, name))
                return
        raise StaleVersion(f"pool {name} kept changing during the request; try again")

    async def list_nodes(self, pool: NodePool) -> Sequence[ClusterNodeStatus]:
        """Return the nodes that the cluster has ordered."""
        found = []
        for each in pool.members:
            job: JobRecord | None = None
            attempts: Sequence[Attempt] = ()
            with suppress(RowNotFound):
                job = await self._store.job(each.job_id)
                attempts = await self._store.attempts(each.job_id)
            newest = max(attempts, key=lambda attempt: attempt.number, default=None)
            found.append(ClusterNodeStatus(node=each, job=job, attempt=newest))
        return found

    async def _join(self, pool: NodePool, node: OrderedNode) -> JobRecord:
        """Submit the job of a node, unless it was submitted before."""
        return await self._submit(pool, make_cluster_node(pool, node.name), node.job_id)

    async def _keep_members(self, pool: NodePool) -> None:
        """Submit the jobs of ordered nodes, and stop those of released nodes, that a server which
        was killed has not submitted or stopped."""
        noted = []
        for each in pool.members:
            if each.problem:
                noted.append(each)
                continue
            try:
                job = await self._store.job(each.job_id)
            except RowNotFound:
                job = await self._join(pool, each)
            problem = job.reason or f"its job {job.name} has ended"
            noted.append(replace(each, problem=problem) if job.phase in JOB_ENDS else each)
        if tuple(noted) != pool.members:
            pool = await self._store.node_pools.put(replace(pool, members=tuple(noted)))
        jobs = await self._store.node_pools.jobs(pool.project, pool.name)
        # A node becomes a member before its job is submitted, so the members are read after the
        # jobs. A node that the cluster orders meanwhile would look released otherwise.
        newest = await self._nodes.read(pool.project, pool.name)
        members = {each.job_id for each in newest.members} if newest else set()
        for job_id in jobs:
            job = await self._store.job(job_id)
            if CLUSTER_NODE_TAG in job.task.tags and job_id not in members:
                await self._stop([job_id], pool.project, _RELEASED)

    # The minimum

    async def reconcile(self, key: str) -> timedelta | None:
        """Order nodes for the pool's minimum, or stop orders that are no longer needed. If the
        nodes belong to another cluster, complete the orders of this cluster."""
        project, _, name = key.removeprefix(_PREFIX).partition("/")
        pool = await self._nodes.read(project, name)
        if pool is not None and (pool.join or pool.members):
            with suppress(StaleVersion):
                await self._keep_members(pool)
                return _LOOK_AGAIN
            return _AT_ONCE
        if pool is None or not (pool.min_nodes or pool.ordered):
            return None
        with suppress(StaleVersion):
            await self._keep_minimum(pool, self._clock.now())
            return _SOON if pool.ordered else _LOOK_AGAIN
        return _AT_ONCE

    async def _keep_minimum(self, pool: NodePool, now: datetime) -> None:
        waiting, pool = await self._read_orders(pool, now)
        attempts = await self._nodes.list_attempts(pool.project, pool.name)
        placed = {each.job_id for each in attempts}  # some of them since their jobs were read
        waiting = [each for each in waiting if each not in placed]
        gangs = as_pool_gangs(attempts, now)
        missing = count_missing(pool, gangs, len(waiting), opens_at(pool, now))
        if missing < 0:
            surplus = waiting[missing:]
            await self._stop(surplus, pool.project, f"pool {pool.name} needs no more nodes")
        elif missing and (pool.retry_at is None or pool.retry_at <= now):
            fresh = tuple(self._jobs.make_id() for _ in range(missing))
            ordered = (*pool.ordered, *fresh)
            pool = await self._store.node_pools.put(replace(pool, ordered=ordered))
            for job_id in fresh:
                await self._order(pool, job_id)

    async def _read_orders(self, pool: NodePool, now: datetime) -> tuple[Sequence[str], NodePool]:
        """Return the IDs of the jobs that still wait for their node, and the pool without the jobs
        that have ended. Submit the jobs that an earlier server has not submitted."""
        waiting, ended = [], []
        for job_id in pool.ordered:
            try:
                job = await self._store.job(job_id)
            except RowNotFound:
                job = await self._order(pool, job_id)
            if job.phase in JOB_ENDS:
                ended.append(job)
            elif job.phase is JobPhase.QUEUED and job.stop_reason is None:
                waiting.append(job.id)
        left = tuple(each for each in pool.ordered if each not in {job.id for job in ended})
        if ended:
            failed = [job for job in ended if job.phase is JobPhase.FAILED]
            problem, retry_at = (failed[-1].reason, now + _RETRY) if failed else ("", None)
            pool = replace(pool, ordered=left, problem=problem, retry_at=retry_at)
            pool = await self._store.node_pools.put(pool)
        return waiting, pool

    async def _order(self, pool: NodePool, job_id: str) -> JobRecord:
        """Submit the job that starts a node, unless it was submitted before."""
        return await self._submit(pool, make_pool_start(pool), job_id)

    async def _submit(self, pool: NodePool, task: TaskSpec, job_id: str) -> JobRecord:
        """Submit a job of the pool itself, unless it was submitted before."""
        try:
            return await self._jobs.submit(
                task,
                RunOrigin(),
                pool.project,
                user=pool.user,
                account=pool.account,
                consented=pool.consented,
                job_id=job_id,
            )
        except StaleVersion:
            return await self._store.job(job_id)

    async def _stop(self, ordered: Sequence[str], project: str, reason: str) -> None:
        for job_id in ordered:
            with suppress(RowNotFound):
                await self._jobs.stop(project, job_id, reason)

    # Reading

    async def _all(self) -> Sequence[NodePool]:
        return await self._store.node_pools.list()

    async def _read_jobs(self, pool: NodePool) -> Mapping[str, JobPhase]:
        """Return the phases of the pool's unfinished jobs by ID, except those that the pool itself
        has submitted."""
        found = await self._store.node_pools.jobs(pool.project, pool.name)
        return {job_id: phase for job_id, phase in found.items() if job_id not in pool.ordered}

    async def _status(self, pool: NodePool) -> PoolStatus:
        now = self._clock.now()
        attempts = await self._nodes.list_attempts(pool.project, pool.name)
        jobs = await self._read_jobs(pool)
        waiting = sum(phase is JobPhase.QUEUED for phase in jobs.values())
        spent = [await sum_gang(self._store, each, now) for each in attempts]
        return PoolStatus(
            pool=replace(pool, problem=pool.problem or await self._find_problem(pool)),
            gangs=as_pool_gangs(attempts, now),
            attempts=attempts,
            running=len(jobs) - waiting,
            waiting=waiting,
            opens_at=opens_at(pool, now),
            spent=Money(sum(each.micros for each in spent)),
        )

    async def _find_problem(self, pool: NodePool) -> str:
        """Return why a job that should start a node of the minimum waits, or ""."""
        with suppress(RowNotFound):
            for job_id in pool.ordered[:1]:
                job = await self._store.job(job_id)
                explained = job.version > 1  # by a pass of the queue
                return job.reason if job.phase is JobPhase.QUEUED and explained else ""
        return ""

    async def _look(self, project: str, name: str) -> None:
        """Let the pool's minimum, its waiting jobs and its idle gangs be decided again now."""
        self._hint(pool_key(project, name))
        self._hint(QUEUE)
        for each in await self._nodes.list_attempts(project, name):
            if each.phase is AttemptPhase.KEPT:
                self._hint(each.job_id)


def _is_live(node: ClusterNodeStatus | None) -> bool:
    """Return whether the node exists, or will exist without another order."""
    if node is None or node.node.problem:
        return False
    return node.job is None or not is_stopping(node.job)
