"""Binds jobs to their elastic pool: what the pool adds to a task, which offers it permits, and what
changes when an idle gang makes room (see `autoscaler.node_pools`)."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

from cavvy.control.decide.job import is_free_only
from cavvy.control.decide.placement import MarketSnapshot
from cavvy.control.decide.rows import RowChanges, make_event
from cavvy.domain.jobs import Attempt, AttemptPhase, JobRecord
from cavvy.domain.node_pools import CLUSTER_NODE_TAG, POOL_TAG, NodePool
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import ResourceSpec, SpotPolicy, StatedNeeds, TaskSpec, TopologyNeed
from cavvy.domain.values import replace
from cavvy.planner.calendar import find_interval
from cavvy.planner.candidates import Candidates
from cavvy.scheduler.node_pools import MARKETS, PoolGang

LOWEST_PRIORITY = -100
Lines = Sequence[tuple[JobRecord, tuple[Offer, ...]]]


def complete_pool_task(task: TaskSpec, pool: NodePool) -> TaskSpec:
    """Return the task as it runs in the pool, whose values apply where the task sets none. The pool
    decides about spot, and how long idle nodes are kept. It starts one gang at a time. A task that
    an older file of the pool has completed gets the values of the present one.
    """
    own = task.stated or StatedNeeds(
        resources=task.resources,
        image=task.image,
        image_login=task.image_login,
        topology=task.topology,
    )
    need = pool.resources if own.resources == ResourceSpec() else own.resources
    need = _complete_need(need, pool)
    need = replace(need, any_of=tuple(_complete_need(each, pool) for each in need.any_of))
    image, login = own.image, own.image_login
    if image is None and task.image_build is None:
        image, login = pool.image, pool.image_login
    retry = replace(task.retry, parallel=1)
    keep = (
        timedelta(0) if pool.join else pool.idle
    )  # a node that has joined a cluster is not reused
    return replace(
        task,
        resources=need,
        image=image,
        image_login=login,
        keep=keep,
        retry=retry,
        topology=_drop_satisfied(own.topology, pool),
        stated=own,
    )


def follow_pool(job: JobRecord, pool: NodePool) -> JobRecord:
    """Return a waiting job as it runs in its pool, whose file may have changed since its
    submission. A job that has run keeps the alternative that it had. The jobs of an array keep
    their image: the store has one task for all of them, also for those that run."""
    task = complete_pool_task(job.task, pool)
    if job.attempt and job.task.resources in task.resources.choices:
        task = replace(task, resources=job.task.resources)
    if job.member is not None:
        task = replace(task, image=job.task.image, image_login=job.task.image_login)
    consented = job.consented or (pool.consented and not is_free_only(job))
    return replace(job, task=task, consented=consented)


def _drop_satisfied(need: TopologyNeed | None, pool: NodePool) -> TopologyNeed | None:
    """Return what is left of the request for close nodes: all nodes of the pool have the same
    values of its labels."""
    if need is None or need.same in pool.labels:
        return None
    if need.prefer not in pool.labels:
        return need
    return None if need.same is None else replace(need, prefer=None)


def _complete_need(need: ResourceSpec, pool: NodePool) -> ResourceSpec:
    """Return the request with the properties that all nodes of a pool should share, so that jobs
    can use each other's nodes."""
    own = pool.resources
    return replace(
        need,
        spot=SpotPolicy.AUTO if pool.spot_share else SpotPolicy.NEVER,
        disk_gib=own.disk_gib if need.disk_gib is None else need.disk_gib,
        disk_type=own.disk_type if need.disk_type is None else need.disk_type,
        network=own.network if need.network is None else need.network,
        options=need.options or own.options,
    )


def make_pool_start(pool: NodePool) -> TaskSpec:
    """Return the task that starts one node of the pool's minimum. It does no work, and the jobs of
    users go first.
    """
    task = TaskSpec(
        name=f"{pool.name}-node",
        project=pool.project,
        run="true",
        pool=pool.name,
        priority=LOWEST_PRIORITY,
        tags={POOL_TAG: pool.name},
    )
    return complete_pool_task(task, pool)


def make_cluster_node(pool: NodePool, name: str) -> TaskSpec:
    """Return the task that is a node of another cluster until it is stopped. Its script `join`
    reads from variables what identifies the node in Slurm or Kubernetes."""
    task = TaskSpec(
        name=name,
        project=pool.project,
        run=pool.join,
        env={
            "CLUSTER_NODE": name,
            "CLUSTER_PROVIDER_ID": make_provider_id(pool, name),
            "CLUSTER_NODE_LABELS": ",".join(f"{k}={v}" for k, v in make_node_labels(pool).items()),
        },
        secrets=pool.secrets,
        pool=pool.name,
        tags={CLUSTER_NODE_TAG: name},
    )
    return complete_pool_task(task, pool)


def make_provider_id(pool: NodePool, name: str) -> str:
    """Return the ID by which an autoscaler of Kubernetes recognizes the node."""
    return f"cavvy://{pool.project}/{pool.name}/{name}"


def make_node_labels(pool: NodePool) -> Mapping[str, str]:
    """Return the labels of the pool's nodes in another cluster: its own, and those of Cavvy."""
    wanted = pool.resources.choices[0].accelerators
    gpu = {"cavvy/gpu": wanted[0].name} if wanted and wanted[0].name else {}
    return {**pool.labels, "cavvy/pool": pool.name, **gpu}


def opens_at(pool: NodePool, now: datetime) -> datetime | None:
    """Return when the pool opens, or None if it is open."""
    if pool.hours is None:
        return None
    interval = find_interval(pool.hours, ZoneInfo(pool.hours.time_zone), now)
    return interval.start if now < interval.start else None


def as_pool_gangs(attempts: Iterable[Attempt], now: datetime) -> Sequence[PoolGang]:
    return [as_pool_gang(each, now) for each in attempts]


def as_pool_gang(attempt: Attempt, now: datetime) -> PoolGang:
    kept = attempt.phase is AttemptPhase.KEPT
    over = kept and attempt.kept_until is not None and attempt.kept_until <= now
    return PoolGang(
        id=attempt.id,
        nodes=attempt.nodes,
        purchase=_market_of(attempt.offer),
        idle_since=(attempt.kept_since or attempt.since) if kept and not over else None,
        leaving=over or attempt.phase is AttemptPhase.ENDING,
    )


def restrict_to_pool(
    job: JobRecord,
    snapshot: MarketSnapshot,
    pool: NodePool,
    markets: Collection[Purchase] = MARKETS,
) -> tuple[JobRecord, MarketSnapshot]:
    """Return the part of the market that suits the pool and these purchase options. If there is no
    such part, return the whole market and the job with the pool's request, so that its candidates
    explain why.
    """
    spot = SpotPolicy.AUTO if Purchase.SPOT in markets else SpotPolicy.NEVER
    wishes = [_request(job, replace(need, spot=spot)) for need in pool.resources.choices]
    fitting = {offer.key for each in wishes for offer in snapshot.match(each).offers}
    if not fitting:
        return _request(
            job, complete_pool_task(TaskSpec(name="", run=""), pool).resources
        ), snapshot
    offers = [each for each in snapshot.market.offers if each.key in fitting]
    market = replace(snapshot.market, offers=offers)
    return job, MarketSnapshot(market=market, as_of=snapshot.as_of, used=snapshot.used)


def _request(job: JobRecord, need: ResourceSpec) -> JobRecord:
    return replace(job, task=replace(job.task, resources=need))


def order_markets(lines: Lines) -> Lines:
    """Return the offers in the order of the markets that a pool uses, else in the given order."""
    found = []
    for market in MARKETS:
        for job, offers in lines:
            if some := tuple(each for each in offers if _market_of(each) is market):
                found.append((job, some))
    return found


def _market_of(offer: Offer) -> Purchase:
    """Return the market of an offer. What is paid for anyway counts as reserved."""
    paid = offer.reserved or offer.owned or not offer.rate.micros_per_hour
    return Purchase.RESERVED if paid else offer.purchase


def release_for(job: JobRecord, owner: JobRecord, gang: Attempt, now: datetime) -> RowChanges:
    """Remove an idle gang, which is kept after the job `owner`, to make room for the job."""
    text = f"removed from pool {job.task.pool} to make room for job {job.name}"
    return RowChanges(
        attempts=(replace(gang, kept_until=now),),
        events=(make_event(owner, now, "kept", text, gang.number),),
    )


def wait_for_offers(job: JobRecord, found: Candidates) -> Candidates:
    """Return the candidates of a job in a pool. If the pool has no offer now, the job waits: prices
    change, and the pool may be applied again. A job of the pool's minimum needs a node that can be
    kept.
    """
    if POOL_TAG not in job.task.tags or not found.offers:
        return replace(found, hopeless=False)
    offers = tuple(each for each in found.offers if not each.shared)
    reason = "the pool has only hosts, whose nodes need no minimum because they always exist"
    return replace(found, offers=offers, reason=found.reason if offers else reason)


def explain_no_pool(job: JobRecord) -> str:
    """Return why a job waits whose pool was removed after its submission."""
    return (
        f"project {job.project} has no pool {job.task.pool}; `cavvy pool apply FILE` creates a "
        f"pool, and `cavvy stop {job.name}` stops this job"
    )
