"""Routes for services: start, list, show and end them, and make their working folders from the
checkpoints of jobs.
"""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import sha256
from typing import Annotated, Any

from fastapi import Path
from msgspec import structs
from starlette.requests import Request

from cavvy.api.app_state import AppState
from cavvy.api.audit import note_change
from cavvy.api.errors import ApiProblem
from cavvy.api.routes import submission
from cavvy.api.routes.jobs import ProjectPath
from cavvy.api.routes.views import energy_view, view_tokens
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import in_path, in_query, name_user, require
from cavvy.api.wire import view
from cavvy.capabilities.serving.autoscaler.objectives import GoalEstimate
from cavvy.capabilities.serving.bill_rows import bills_of
from cavvy.capabilities.serving.bills import name_api, name_api_bill
from cavvy.capabilities.serving.control.requests import (
    NameTaken,
    ServiceRequests,
    ServiceStatus,
    make_admitted,
)
from cavvy.capabilities.serving.decide.queued_calls import find_next
from cavvy.capabilities.serving.decide.service import is_canary, state_of
from cavvy.capabilities.serving.decide.service_figures import LevelCounts, measure_level
from cavvy.capabilities.serving.decide.traffic import ServiceTraffic, read_goals, read_missed_aim
from cavvy.capabilities.serving.decide.update import as_revision, measure
from cavvy.capabilities.serving.decide.webhook_calls import LEAST, is_usable
from cavvy.capabilities.serving.keeper import find_requests, show
from cavvy.capabilities.serving.loads import read_places
from cavvy.capabilities.serving.queued_calls import CallState
from cavvy.capabilities.serving.replicas import (
    SERVING,
    ServiceReplica,
    UnplacedRequests,
    name_replica,
)
from cavvy.capabilities.serving.service_rows import services_of
from cavvy.capabilities.serving.stored_services import StoredService
from cavvy.capabilities.serving.wire import (
    AimView,
    CronView,
    FallbackView,
    LevelShares,
    LevelView,
    ObjectiveView,
    QueueView,
    ServedView,
    ServiceTrafficView,
    TokenSpeedView,
    TrialView,
    UnplacedView,
    WebhookView,
)
from cavvy.client import wire
from cavvy.client.addresses import name_host
from cavvy.client.service_wire import ReplicaView
from cavvy.client.state import host_name
from cavvy.control.decide.canary import CanaryTerms
from cavvy.control.running_costs import sum_to_now
from cavvy.domain.accounts import Permission
from cavvy.domain.ledger import EntryKind
from cavvy.domain.service_updates import PROMOTED
from cavvy.domain.services import FallbackRule, ServiceLevel
from cavvy.domain.tasks import TaskSpec, count_all, take_role
from cavvy.domain.values import replace
from cavvy.spec.support import object_to_service
from cavvy.store.base import LedgerFilter, ProjectFilter, RowNotFound

router = RouteGroup("services", prefix="/v1")
ServicePath = Annotated[
    str, Path(max_length=63, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", description="The name.")
]


@router.get("/services", rule=in_query(Permission.VIEW))
async def list_all(app_state: AppState, projects: ProjectFilter) -> list[ServedView]:
    """Services."""
    found = await find_requests(app_state).list(projects)
    return [await _view(app_state, each) for each in found]


@router.get(
    "/projects/{project}/services/{name}",
    rule=in_path(Permission.VIEW),
    when={RowNotFound: "service-not-found"},
)
async def get(app_state: AppState, project: ProjectPath, name: ServicePath) -> ServedView:
    """One service."""
    found = await find_requests(app_state).get(project, name)
    shown, devices = await _view(app_state, found), app_state.control_plane.devices
    return structs.replace(
        shown,
        queue=await view_queue(app_state, found.service),
        fallbacks=[
            await _view_fallback(app_state, found, each) for each in found.service.spec.fallbacks
        ],
        edge=[] if devices is None else await devices.list_paths(show(found.service, found.url)),
    )


@router.put(
    "/projects/{project}/services/{name}",
    rule=in_path(Permission.RUN),
    errors=(
        "invalid-task",
        "no-offer",
        "consent-needed",
        "secret-missing",
        "secret-too-short",
        "snapshot-missing",
        "residency",
        "too-large",
        "policy-refused",
    ),
    limit="server.request_mib",
)
async def put(
    request: Request,
    app_state: AppState,
    project: ProjectPath,
    name: ServicePath,
    ask: wire.SubmitRequest,
) -> ServedView:
    """Start a service, or deploy a new revision of it."""
    ask = structs.replace(ask, user=name_user(request, ask.user), name=name)
    digest = sha256(ask.text.encode()).hexdigest() if isinstance(ask.text, str) else None
    note_change(request, after={"name": name, "file_sha256": digest})
    found = await _start(request, app_state, project, ask)
    return await _view(app_state, found)


@router.delete(
    "/projects/{project}/services/{name}",
    rule=in_path(Permission.RUN),
    when={RowNotFound: "service-not-found"},
)
async def delete(app_state: AppState, project: ProjectPath, name: ServicePath) -> ServedView:
    """End a service. The service's replicas finish their requests; then the replicas and the
    service are removed.
    """
    found = await _services(app_state).end(project, name)
    return await _view(app_state, found)


def _check_edge(request: Request, app_state: AppState, task: TaskSpec) -> None:
    """Raise ApiProblem if devices send the service their requests and samples, and the caller may
    not choose which do, nor the program that gets them: that is a right of those who enrol
    devices."""
    if task.service and task.service.edge:
        submission.check_devices(app_state, "service.edge")
        require(request, Permission.OPERATE, task.project)


async def _start(
    request: Request, app_state: AppState, project: str, ask: wire.SubmitRequest
) -> ServiceStatus:
    """Run the checks that the jobs of the service's replicas would have to pass, then store the
    service."""
    now, text = app_state.now(), submission.read_text(ask)
    origin = submission.read_origin(ask, text)
    task = await submission.read_task(app_state, project, ask, text, origin, now, serves=True)
    if objection := object_to_service(task):
        raise ApiProblem("invalid-task", f"{ask.path}: {objection}")
    _check_edge(request, app_state, task)
    await submission.check_secrets(app_state, task)
    await _check_webhook_secrets(app_state, task)
    await submission.check_snapshot(app_state, project, origin.snapshot)
    await submission.check_residency(app_state, task, origin.snapshot)
    await submission.check_uses(app_state, task, origin.snapshot)
    policies = await app_state.store.policies_of(project)

    async def admit(asked: TaskSpec) -> dict[str, Any]:
        found, _ = await submission.admit_task(
            app_state, make_admitted(asked), policies, now, ask.user, consented=ask.consent
        )
        return {"run": found.run, "image": found.image, "image_signers": found.image_signers}

    if task.replica_groups:
        groups = [
            structs.replace(each, **await admit(take_role(task, each)))
            for each in task.replica_groups
        ]
        task = structs.replace(task, replica_groups=tuple(groups))
    else:
        task = structs.replace(task, **await admit(task))
    more = await _count_more(app_state, task)
    try:
        async with submission.count_new(app_state, policies, ask.user, more, what="service"):
            found = await _services(app_state).put(
                task,
                origin,
                user=ask.user,
                consented=ask.consent,
                ceiling=submission.read_ceiling(ask),
            )
    except NameTaken as error:
        raise ApiProblem("invalid-task", f"{ask.path}: service.{error.key}: {error}") from error
    if origin.snapshot is not None:
        app_state.snapshots.add((project, origin.snapshot))
    return found


async def _count_more(app_state: AppState, task: TaskSpec) -> int:
    """Return how many more replicas the service has at least than it had before."""
    before = 0
    with suppress(RowNotFound):
        known = await services_of(app_state.store).get(task.project, task.name)
        before = _count_least(known.task) if known.wanted else 0
    return max(0, _count_least(task) - before)


def _count_least(task: TaskSpec) -> int:
    if task.replica_groups:
        return count_all(task.replica_groups).least
    return 0 if task.service is None else task.service.replicas.least


async def _check_webhook_secrets(app_state: AppState, task: TaskSpec) -> None:
    """Raise ApiProblem if a webhook would refuse all requests because its secret is too short."""
    hooks = () if task.service is None else task.service.webhooks
    sealed = (
        {each.name: each.sealed for each in await app_state.store.secrets(task.project)}
        if hooks
        else {}
    )
    for each in hooks:
        value = await asyncio.to_thread(
            app_state.sealer.unseal, task.project, each.secret, sealed[each.secret]
        )
        if not is_usable(each.signature, value):
            raise ApiProblem(
                "secret-too-short",
                f"the secret {each.secret} of webhook {each.name} has fewer than {LEAST} bytes, "
                "so the webhook would refuse all requests",
                f"set a longer secret: cavvy secret set {each.secret} -p {task.project}",
            )


def _services(app_state: AppState) -> ServiceRequests:
    return find_requests(app_state)


async def _view(app_state: AppState, found: ServiceStatus) -> ServedView:
    service, traffic = found.service, found.traffic
    which = LedgerFilter(projects=service.project, tag=("service", service.name))
    sums = await sum_to_now(app_state.store, which, (), app_state.now())
    tokens = await app_state.store.meters.sum_tokens(which, ())
    energy = await app_state.store.meters.sum_energy(which, ())
    return view(
        ServedView,
        service,
        state="failing" if found.unreachable and service.wanted else state_of(service),
        url=found.url,
        unreachable=found.unreachable,
        tags=service.task.tags,
        models=list(service.spec.model_names),
        ready=sum(each.state in SERVING for each in service.replicas),
        least=service.spec.replicas.least,
        most=service.spec.replicas.most,
        unplaced=[_view_unplaced(service, each, traffic) for each in service.unplaced],
        replicas=[_view_replica(each, traffic) for each in service.replicas],
        traffic=None if traffic is None else _view_traffic(traffic),
        trial=_view_trial(service),
        slo=_view_level(service, app_state.now()),
        aim=_view_aim(service, app_state.now()),
        webhooks=view_webhooks(app_state, service),
        crons=view_crons(service, app_state.now()),
        spent_micros=sums[0].amount.micros if sums else 0,
        tokens=view_tokens(tokens.get((), {})),
        energy=energy_view(energy.get((), ())),
    )


def _view_unplaced(
    service: StoredService, found: UnplacedRequests, traffic: ServiceTraffic | None
) -> UnplacedView:
    load = None if traffic is None else traffic.places.get(found.places)
    return UnplacedView(
        places=sorted(read_places(found.places)),
        waiting=0 if load is None else load.waiting,
        instead=name_replica(service.name, found.instead),
    )


def _view_level(service: StoredService, now: datetime) -> LevelView | None:
    """Return the service level that the service has reached, or None if the service has no
    `slo`."""
    asked = service.spec.slo
    if asked == ServiceLevel():
        return None
    hour, day = measure_level(service, now)
    goals = read_goals(service)
    return LevelView(
        availability=asked.availability,
        p95_s=None if asked.p95 is None else asked.p95.total_seconds(),
        hour=_view_shares(hour),
        day=_view_shares(day),
        objectives=list(_view_objectives(asked, goals)),
        speed=None if goals is None else view(TokenSpeedView, goals.speeds),
    )


def _view_aim(service: StoredService, now: datetime) -> AimView | None:
    """Return why too few requests are on time, and what would be enough; None if enough are."""
    found = read_missed_aim(service, now)
    if found is None:
        return None
    serving = (each for each in service.replicas if each.state in SERVING)
    rate = max((each.rate.micros_per_hour for each in serving), default=0)
    more = max(0, found.needed - service.spec.replicas.least)
    next_s = found.next_s
    return view(
        AimView,
        found,
        cause=str(found.cause),
        next_at=None if next_s is None else datetime.fromtimestamp(next_s, UTC),
        more_micros_hr=more * rate if rate else None,
    )


def _view_objectives(asked: ServiceLevel, goals: GoalEstimate | None) -> Iterator[ObjectiveView]:
    for name, goal in (("ttft", asked.ttft), ("token_gap", asked.token_gap)):
        if goal is None:
            continue
        found = ObjectiveView(name=name, share=goal.share, limit_s=goal.limit_s)
        if goals is not None:
            first = name == "ttft"
            found = replace(
                found,
                needed=goals.needed,
                expected_s=goals.ttft_s if first else goals.gap_s,
                best_s=goals.best_ttft_s if first else goals.best_gap_s,
            )
        yield found


def _view_shares(counts: LevelCounts) -> LevelShares:
    return view(LevelShares, counts, requests=counts.answered + counts.failed)


def _view_trial(service: StoredService) -> TrialView | None:
    """Return the running trial of a revision, or the last trial that has ended."""
    tried, ended = service.candidate, service.outcome
    bound = 1 / CanaryTerms().alpha
    if tried is not None:
        update = as_revision(service, tried.revision).spec.update
        canary = is_canary(service)
        return view(
            TrialView,
            measure(tried),
            revision=tried.revision,
            end="",
            promoted=False,
            weight=update.weight if canary else None,
            asked=update.requests if canary else None,
            bound=bound,
            problem=tried.problem,
        )
    if ended is None:
        return None
    return view(
        TrialView, ended, promoted=ended.end in PROMOTED, weight=None, asked=None, bound=bound
    )


def _view_replica(replica: ServiceReplica, traffic: ServiceTraffic | None) -> ReplicaView:
    in_flight = None if traffic is None else traffic.replicas.get(replica.id, 0)
    return view(
        ReplicaView,
        replica,
        job=replica.id,
        state=str(replica.state),
        role="" if replica.role is None else str(replica.role),
        in_flight=in_flight,
        start_s={name: part.total_seconds() for name, part in replica.start_parts.items()},
    )


def _view_traffic(traffic: ServiceTraffic) -> ServiceTrafficView:
    return view(ServiceTrafficView, traffic, waiting=traffic.backlog)


async def _view_fallback(
    app_state: AppState, found: ServiceStatus, rule: FallbackRule
) -> FallbackView:
    service, api = found.service, rule.api
    if api is None:
        try:
            other = await find_requests(app_state).get(service.project, rule.service)
            fallback_id = other.service.id
        except RowNotFound:
            fallback_id = ""
        name, model, spent = rule.service, rule.model, None
    else:
        fallback_id = name_api(api.url, api.model)
        billed = await bills_of(app_state.store).division(name_api_bill(service.id, fallback_id))
        moved = {} if billed is None else billed.moved
        name, model = api.host, api.model
        spent = None if api.prices is None else moved.get(EntryKind.REQUEST, 0)
    answered = None if found.traffic is None else found.traffic.fallbacks.get(fallback_id, 0)
    return FallbackView(name=name, model=model, answered=answered, spent_micros=spent)


def view_webhooks(app_state: AppState, service: StoredService) -> list[WebhookView]:
    """Return the webhooks of a service, with their URLs at this server."""
    listen = app_state.listen
    base = name_host(listen, host_name()) if listen else ""
    where = f"{base}/hooks/v1/{service.project}/{service.name}"
    return [
        view(WebhookView, each, url=f"{where}/{each.name}", signature=str(each.signature))
        for each in service.spec.webhooks
    ]


def view_crons(service: StoredService, now: datetime) -> list[CronView]:
    """Return the cron lines of a service, and the time at which each line next applies."""
    return [
        view(CronView, each, next_at=find_next(each, now) if service.wanted else None)
        for each in service.spec.crons
    ]


async def view_queue(app_state: AppState, service: StoredService) -> QueueView:
    """Return the number of calls in the queue of a service."""
    calls = find_requests(app_state).calls
    counts = await calls.count(service.project, service.name)
    running = calls.list_running(service.project, service.name)
    return QueueView(
        waiting=counts.get(CallState.WAITING, 0),
        running=None if running is None else len(running),
        done=counts.get(CallState.DONE, 0),
        dead=counts.get(CallState.DEAD, 0),
    )
