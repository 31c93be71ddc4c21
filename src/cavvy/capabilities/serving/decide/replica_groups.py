"""Decides the next step of a service whose replicas form groups, such as a router, prefill and
decode.

Each group is decided as if it were a service of its own. What connects the groups: they start and
end together, the first replicas of a revision become ready together, and each router gets only
workers of its own revision, since these have the same weights.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from cavvy.capabilities.serving.decide.service import (
    ReplicaSeen,
    ServiceSnapshot,
    ServiceStep,
    average_readings,
    count_wanted,
    decide_service,
    find_absent,
    list_serving,
)
from cavvy.capabilities.serving.decide.traffic import ServiceTraffic, scale
from cavvy.capabilities.serving.replicas import ROLE_TAG, SERVING, ReplicaState, ServiceReplica
from cavvy.capabilities.serving.stored_services import KEPT_ENDED, GroupScale, StoredService
from cavvy.domain.credentials import split_account
from cavvy.domain.jobs import JobPhase
from cavvy.domain.services import ReplicaCount, ReplicaRole, RouterApi
from cavvy.domain.tasks import (
    ReplicaGroup,
    TaskSpec,
    can_sleep,
    count_all,
    find_router,
    take_role,
)
from cavvy.domain.values import replace

_JOINS = frozenset({ReplicaState.STARTING, ReplicaState.READY})
# the roles whose programs listen on two ports, and the variable with the second one
SECOND_PORTS: Mapping[ReplicaRole, str] = {
    ReplicaRole.PREFILL: "CAVVY_BOOTSTRAP_PORT",
    ReplicaRole.ROUTER: "CAVVY_METRICS_PORT",
}
EVENTS_PORT = "CAVVY_EVENTS_PORT"  # of replicas without a role that publish events
_OUTDATED = -1  # the revision of a router that has other workers than the present ones
_OTHER = ReplicaGroup(name="", role=ReplicaRole.WORKER)  # replicas that belong to no present group


def as_group(service: StoredService, group: ReplicaGroup) -> StoredService:
    """Return the service as if it consisted only of this group."""
    known = {each.name: each for each in service.groups}
    last = known.get(group.name, GroupScale(name=group.name))
    return replace(
        service,
        task=take_role(service.task, group),
        replicas=tuple(each for each in service.replicas if each.group == group.name),
        target=last.target,
        why=last.why,
        scaling=last.scaling,
        markets=(),
        placement={},
        unplaced=(),
    )


def fix_count(service: StoredService, count: int) -> StoredService:
    """Return the service with this wanted number of replicas, regardless of its traffic."""
    spec = replace(service.spec, replicas=ReplicaCount(least=count, most=max(1, count)))
    return replace(service, task=replace(service.task, service=spec), target=count)


def scale_replicas(
    service: StoredService,
    before: ServiceTraffic | None,
    traffic: ServiceTraffic,
    now: datetime,
    seen: Mapping[str, ReplicaSeen],
) -> StoredService:
    """Return the service with a new decision of the autoscaler, for each of its groups."""
    groups = service.task.replica_groups
    if not groups:
        return scale(service, before, traffic, now, average_readings(service, seen))
    alone = [as_group(service, each) for each in groups]
    scaled = [
        scale(each, before, traffic, now, average_readings(each, seen), group.role)
        for group, each in zip(groups, alone, strict=True)
    ]
    done = {each.id: each for part in scaled for each in part.replicas}
    states = tuple(
        GroupScale(name=group.name, target=each.target, why=each.why, scaling=each.scaling)
        for group, each in zip(groups, scaled, strict=True)
    )
    service = replace(
        service,
        replicas=tuple(done.get(each.id, each) for each in service.replicas),
        groups=states,
    )
    workers = [
        each.why
        for group, each in zip(groups, scaled, strict=True)
        if group.role is not ReplicaRole.ROUTER
    ]
    wanted = count_groups(service, traffic.backlog)
    return replace(service, target=sum(wanted.values()), why="; ".join(dict.fromkeys(workers)))


def count_groups(service: StoredService, backlog: int) -> Mapping[str, int]:
    """Return the wanted number of replicas of each group. All groups have replicas or none has."""
    groups = service.task.replica_groups
    found = {each.name: count_wanted(as_group(service, each), backlog) for each in groups}
    if not service.wanted or service.stopped_by:
        return dict.fromkeys(found, 0)
    workers = [found[each.name] for each in groups if each.role is not ReplicaRole.ROUTER]
    if can_sleep(groups) and not any(workers):
        return dict.fromkeys(found, 0)
    return {name: max(1, count) for name, count in found.items()}


def count_replicas(service: StoredService, backlog: int) -> int:
    """Return the wanted number of replicas of the whole service."""
    if not service.task.replica_groups:
        return count_wanted(service, backlog)
    return sum(count_groups(service, backlog).values())


def fix_counts(service: StoredService, counts: Mapping[str, int], percent: int) -> StoredService:
    """Return a candidate whose groups have this share of the present replicas, at least one."""
    groups = service.task.replica_groups
    awake = any(counts.values())
    fixed = []
    for each in groups:
        count = counts.get(each.name, max(1, each.replicas.least))
        count = -(-count * percent // 100) if awake else 0
        fixed.append(replace(each, replicas=ReplicaCount(least=count, most=max(1, count))))
    spec = replace(service.spec, replicas=count_all(fixed))
    task = replace(service.task, replica_groups=tuple(fixed), service=spec)
    return replace(service, task=task, groups=(), target=0)


def decide_replicas(view: ServiceSnapshot, now: datetime) -> ServiceStep:
    """Return the next step of a service, with or without groups."""
    service = view.service
    groups = service.task.replica_groups
    named = {each.name for each in groups} if groups else {""}
    if not groups and all(not each.group for each in service.open):
        return decide_service(view, now)
    service = replace(service, stopped_by=view.stop.hard)
    serves = any(each.revision == service.revision for each in list_serving(service))
    others = tuple(
        each
        for each in service.replicas
        if each.group not in named or (each.revision != service.revision and not serves)
    )
    service = replace(service, replicas=tuple(e for e in service.replicas if e not in others))
    wanted = count_groups(service, view.backlog)
    parts = list[tuple[str | None, ServiceStep]]()
    for group in groups:
        alone = fix_count(as_group(service, group), wanted[group.name])
        part = replace(view, service=alone, places={})
        if group.role is ReplicaRole.ROUTER and group.router is RouterApi.LIST:
            parts.append((group.name, _decide_listed(part, service, now)))
        else:
            parts.append((group.name, decide_service(part, now)))
    if not groups:
        parts.append(("", decide_service(replace(view, service=service), now)))
    rest = replace(view, service=replace(service, replicas=others), places={})
    parts.append((None, _decide_others(rest, now, serves=serves)))
    return _merge(service, parts)


def _decide_listed(view: ServiceSnapshot, whole: StoredService, now: datetime) -> ServiceStep:
    """Return the step for routers that are started with a list of workers. A router with another
    list than the present workers is replaced like a replica of an older revision. Without a worker
    of each role, none starts.
    """
    workers = [
        each
        for each in whole.open
        if each.revision == whole.revision
        and each.is_worker
        and each.address
        and _is_up(each, view.seen)
    ]
    if find_absent({each.role for each in workers}):
        return replace(decide_service(view, now), orders=())
    present = tuple(sorted(each.id for each in workers))
    service, wanted = view.service, view.service.spec.replicas.least
    was = {each.id: each.revision for each in service.replicas}
    ours = [each for each in service.open if each.revision == service.revision]
    ready = [each for each in ours if each.state in SERVING and each.members == present]
    others = [each for each in ours if each.members != present]
    # routers with another list serve until enough with the present list are ready
    serving = [each.id for each in others if each.state in SERVING]
    kept = serving[-wanted:] if wanted and len(ready) < wanted else []
    marked = tuple(
        replace(each, revision=_OUTDATED) if each in others and each.id not in kept else each
        for each in service.replicas
    )
    service = fix_count(replace(service, replicas=marked), wanted + len(kept))
    step = decide_service(replace(view, service=service), now)

    def restore(replicas: Sequence[ServiceReplica]) -> tuple[ServiceReplica, ...]:
        return tuple(replace(each, revision=was[each.id]) for each in replicas)

    return replace(
        step,
        service=replace(step.service, replicas=restore(step.service.replicas)),
        start=restore(step.start),
        stop=restore(step.stop),
        members={service.revision: present},
    )


def _is_up(worker: ServiceReplica, seen: Mapping[str, ReplicaSeen]) -> bool:
    """Return whether a worker answers its probe, even if it waits for others."""
    found = seen.get(worker.id, ReplicaSeen())
    starts = worker.state is ReplicaState.STARTING and (found.answers or found.held)
    return found.phase is JobPhase.RUNNING and (starts or worker.state in SERVING)


def _decide_others(view: ServiceSnapshot, now: datetime, *, serves: bool) -> ServiceStep:
    """Return the step for replicas of earlier revisions, and of groups that the service no longer
    has. All of them are needed until the newest revision serves.
    """
    service = view.service
    ended = serves or not service.wanted or service.stopped_by
    count = 0 if ended else len(service.open)
    alone = fix_count(replace(service, markets=(), placement={}), count)
    return replace(decide_service(replace(view, service=alone), now), orders=(), bound=())


def _merge(service: StoredService, parts: Sequence[tuple[str | None, ServiceStep]]) -> ServiceStep:
    steps = [step for _, step in parts]
    found = [each for step in steps for each in step.service.replicas]
    found.sort(key=lambda each: (each.state is not ReplicaState.ENDED, each.number))
    ended = [each for each in found if each.state is ReplicaState.ENDED][-KEPT_ENDED:]
    living = [each for each in found if each.state is not ReplicaState.ENDED]
    mine = [step.service for name, step in parts if name is not None]
    worst = max(mine, key=lambda each: (each.failures, each.failed_at or each.created_at))
    merged = replace(
        service,
        replicas=(*ended, *living),
        failures=worst.failures,
        failed_at=worst.failed_at,
        problem=worst.problem,
        steady=all(each.steady for each in mine),
        worked=service.worked if any(each.worked for each in mine) else None,
        unplaced=tuple(each for part in mine for each in part.unplaced),
    )
    return ServiceStep(
        service=merged,
        orders=tuple(market for name, step in parts if not name for market in step.orders),
        grouped=tuple(name for name, step in parts if name for _ in step.orders),
        members={revision: ids for step in steps for revision, ids in step.members.items()},
        bound=tuple(each for step in steps for each in step.bound),
        start=tuple(each for step in steps for each in step.start),
        stop=tuple(each for step in steps for each in step.stop),
        finished=not service.wanted and not living,
        after=min((step.after for step in steps), default=timedelta(seconds=10)),
    )


# How replicas become ready


def find_group(task: TaskSpec, name: str) -> ReplicaGroup:
    return next((each for each in task.replica_groups if each.name == name), _OTHER)


def find_network(service: StoredService, revision: int) -> tuple[str, tuple[str, ...]] | None:
    """Return the provider and the region of the replicas of a revision, in which its other replicas
    must run to reach them, or None while none has a node.
    """
    for each in service.open:
        if each.revision == revision and each.role is not None and each.account:
            return split_account(each.account)[0], each.places
    return None


def list_members(
    router: ServiceReplica, replicas: Sequence[ServiceReplica]
) -> tuple[ServiceReplica, ...]:
    """Return the workers that the router may have: they are of its revision, and reachable."""
    return tuple(
        each
        for each in replicas
        if each.revision == router.revision
        and each.is_worker
        and each.state in _JOINS
        and each.address
    )


def count_room(service: StoredService, replica: ServiceReplica) -> int:
    """Return how many requests the gateway may send to a replica at the same time. A router gets as
    many as the ready workers of its revision can process, divided among the routers. `service` is
    of the replica's revision.
    """
    task = service.task
    room: dict[ReplicaRole | None, int] = {}
    routers = 0
    for each in service.open:
        if each.revision != replica.revision or each.state not in SERVING:
            continue
        group = find_group(task, each.group)
        count = group.concurrency or (1 if task.service is None else task.service.concurrency)
        if each.id == replica.id and each.role is not ReplicaRole.ROUTER:
            return count
        routers += each.role is ReplicaRole.ROUTER
        room[each.role] = room.get(each.role, 0) + count
    room.pop(ReplicaRole.ROUTER, None)
    return max(1, min(room.values(), default=1) // max(1, routers))


def prepare_role(
    task: TaskSpec, replica: ServiceReplica, replicas: Sequence[ServiceReplica], host: str
) -> TaskSpec | None:
    """Return the task of a replica with a role, and with the addresses of the other replicas that
    are known. Its program listens on `host`. Returns None if the program must find its router
    itself, and no router is known yet.
    """
    group = find_group(task, replica.group)
    others = [each for each in replicas if each.revision == replica.revision and each.address]
    if replica.members:
        others = [each for each in others if each.id in replica.members]
    found = {
        role: ",".join(sorted(url_of(each) for each in others if each.role is role))
        for role in ReplicaRole
    }
    router = find_router(task)
    waits = router is not None and router.router is RouterApi.NONE
    if waits and group.role is not ReplicaRole.ROUTER and not found[ReplicaRole.ROUTER]:
        return None
    env = {"CAVVY_ROLE": str(group.role), "SERVE_HOST": host}
    env |= {f"CAVVY_{role.upper()}_URLS": urls for role, urls in found.items() if urls}
    if replica.second_port:
        env[SECOND_PORTS[group.role]] = str(replica.second_port)
    alone = take_role(task, group)
    return replace(alone, env={**alone.env, **env}, tags={**alone.tags, ROLE_TAG: group.name})


def url_of(worker: ServiceReplica) -> str:
    """Return the URL of a replica's program for the programs of its network."""
    host = f"[{worker.address}]" if ":" in worker.address else worker.address
    return f"http://{host}:{worker.port}"


def hold_back(
    task: TaskSpec,
    revision: int,
    replicas: Sequence[ServiceReplica],
    seen: Mapping[str, ReplicaSeen],
    joined: Mapping[str, frozenset[str]],
) -> Mapping[str, ReplicaSeen]:
    """Return what was seen of the replicas of a revision. A replica that answers, but was never
    ready, counts as not ready while its revision has no router, a role is missing, or the routers
    do not have the worker yet. `joined` are the IDs of the workers that each router has.
    """
    ours = [each for each in replicas if each.revision == revision and each.role is not None]
    router = find_router(task)
    if not ours or router is None:
        return seen
    answering = [
        each
        for each in ours
        if each.state in SERVING
        or (each.state is ReplicaState.STARTING and each.id in seen and seen[each.id].answers)
    ]
    live = [each.id for each in answering if each.role is ReplicaRole.ROUTER]
    known = frozenset[str]().union(*(joined.get(each, frozenset()) for each in live))
    alone = router.router is RouterApi.NONE
    workers = [each for each in answering if each.is_worker]
    present = {each.role for each in workers if alone or each.id in known}
    absent = find_absent(present) if live else str(ReplicaRole.ROUTER)
    held = {}
    for each in answering:
        if each.ready_at is not None:
            continue
        problem = f"answers, and waits for a replica with the role {absent}" if absent else ""
        if not problem and each in workers and not alone and each.id not in known:
            problem = "answers, and waits until the router has added it"
        if problem:
            held[each.id] = replace(seen[each.id], answers=False, held=True, problem=problem)
    return {**seen, **held}
