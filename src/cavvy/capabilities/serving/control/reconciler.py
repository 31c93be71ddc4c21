"""Moves one service a step closer to its wanted state: observes its replicas and its traffic,
decides what to do, and executes the decision.

Each replica is a job of the project. The replica's row is stored with the service before the
replica's job is submitted under the same ID. The state of each replica is stored before the gateway
is notified which replicas are ready.

Finds the markets in which replicas of a service may run, from the offers of all providers.
"""

from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timedelta

from cavvy.capabilities.serving.control.front import ServiceFront, ServingParts
from cavvy.capabilities.serving.control.request_bills import RequestBills
from cavvy.capabilities.serving.decide.replica_groups import (
    EVENTS_PORT,
    SECOND_PORTS,
    find_group,
    find_network,
    hold_back,
    prepare_role,
    scale_replicas,
)
from cavvy.capabilities.serving.decide.replica_markets import (
    ANYWHERE,
    find_holder,
    find_loss,
    keep_at,
    list_markets,
    merge_markets,
    uses_spot,
)
from cavvy.capabilities.serving.decide.service import (
    ReplicaSeen,
    ServiceSnapshot,
    ServiceStep,
    change_last,
    list_serving,
    make_replica_task,
    order_replica,
)
from cavvy.capabilities.serving.decide.service_figures import (
    ServiceMinute,
    count_minute,
    make_block,
    record_level,
)
from cavvy.capabilities.serving.decide.traffic import SCALED_EVERY, ServiceTraffic
from cavvy.capabilities.serving.decide.update import as_revision, decide_update
from cavvy.capabilities.serving.replicas import ReplicaState, ServiceReplica, name_replica
from cavvy.capabilities.serving.service_rows import services_of
from cavvy.capabilities.serving.stored_services import StoredService, note_uses
from cavvy.control.decide.placement import list_usable
from cavvy.control.decide.rows import taken_at
from cavvy.control.decide.task_places import list_elsewhere, place_in_regions
from cavvy.control.provider_pool import ProviderPool
from cavvy.control.worklist import calls_key
from cavvy.domain.credentials import split_account
from cavvy.domain.jobs import JobPhase, JobRecord
from cavvy.domain.services import HERE, ReplicaRole
from cavvy.domain.tasks import find_router
from cavvy.domain.values import Struct, copy_fields, replace, view
from cavvy.store.base import AtomicWrite, RowNotFound, StaleVersion

_PREFIX = "service:"
_STORED_EVERY = timedelta(seconds=30)  # maximum age of the stored state of the autoscaler
_AT_ONCE = timedelta(0)
_BILLED_EVERY = timedelta(seconds=0.5)  # until the bills of a service that ends are complete
# a signal of the server that reconciles the service may be lost
_FOLLOWED_EVERY = timedelta(seconds=5)
_GONE = frozenset({ReplicaState.ENDING, ReplicaState.ENDED})
_DECIDED = ("target", "why", "scaling", "placement", "groups")

_AGE = timedelta(minutes=1)  # maximum age of a service's markets


def service_key(project: str, name: str) -> str:
    """Return the worklist's key of a service."""
    return f"{_PREFIX}{project}/{name}"


def is_service_key(key: str) -> bool:
    return key.startswith(_PREFIX)


class _Scaled(Struct, frozen=True, kw_only=True):
    """The autoscaler's last decision, in the fields `_DECIDED` and `level` of the service."""

    service: StoredService
    at: datetime
    stored_at: datetime
    traffic: ServiceTraffic


class ServiceReconciler:
    """Reconciles services. If `front` is None, there are no services."""

    def __init__(self, parts: ServingParts) -> None:
        self._store, self._clock, self._jobs = parts.store, parts.clock, parts.jobs
        self._front, self._hint, self._announce = parts.front, parts.hint, parts.announce
        self._pool, self._markets = parts.pool, ServiceMarkets(parts.pool)
        self._bills, self._budgets = RequestBills(parts.store), parts.budgets
        self._scaled: dict[str, _Scaled] = {}  # by key
        self._minutes: dict[str, ServiceMinute] = {}  # of the figures, by key
        self._services: dict[str, str] = {}  # ID of a replica -> key of its service
        self._shown: dict[str, StoredService] = {}  # the services that the gateway serves, by key

    async def unfinished(self) -> list[str]:
        """Return the keys of all services and of their queues."""
        if self._front is None:
            return []
        found = await services_of(self._store).list()
        keys = [service_key(each.project, each.name) for each in found]
        return [*keys, *(calls_key(each) for each in keys)]

    async def note_job(self, job_id: str) -> None:
        """Handle a reconciled job. If the job is a replica, reconcile the replica's service or, if
        the service no longer exists, divide the replica's bill.
        """
        if key := self._services.get(job_id):
            self._hint(key)
        await self._bills.note_job(job_id)

    async def run(self) -> None:
        """Keep the gateway running."""
        if self._front is not None:
            await self._front.run(await services_of(self._store).list(), self._wake)

    def _wake(self, service: StoredService) -> None:
        self._hint(service_key(service.project, service.name))

    async def reconcile(self, key: str) -> timedelta | None:
        service = await self._find(key)
        if self._front is None or service is None:
            return None
        with suppress(StaleVersion):
            return await self._pass(key, service, self._front)
        return _AT_ONCE

    async def follow(self, key: str) -> timedelta | None:
        """Let this server's gateway serve a service that another server reconciles."""
        self._forget(key)
        service = await self._find(key)
        if self._front is None or service is None:
            return None
        self._note_replicas(key, service)
        await self._show(key, service, self._front, owns=False)
        return _FOLLOWED_EVERY

    async def _find(self, key: str) -> StoredService | None:
        """Return the service to which a key of the worklist belongs. If the service no longer
        exists, the gateway stops serving it.
        """
        project, _, name = key.removeprefix(_PREFIX).partition("/")
        try:
            return await services_of(self._store).get(project, name)
        except RowNotFound:
            if self._front is not None:
                await self._withdraw(key, self._front)
            return None

    async def _show(
        self, key: str, service: StoredService, front: ServiceFront, *, owns: bool = True
    ) -> None:
        """Let the gateway serve the stored version of the service. `owns` means that this server
        reconciles it, and therefore gives its routers their workers.
        """
        shown = self._shown.get(key)
        if shown is not None and shown.id != service.id:  # another service with the same name
            await front.withdraw(shown)
        self._shown[key] = service
        running = [each for each in service.open if each.running_at and each.state not in _GONE]
        front.watch(service, running, owns=owns)
        await front.publish(service, list_serving(service))

    async def _withdraw(self, key: str, front: ServiceFront) -> None:
        self._forget(key)
        if (shown := self._shown.pop(key, None)) is not None:
            await front.withdraw(shown)

    def _forget(self, key: str) -> None:
        self._scaled.pop(key, None)
        self._minutes.pop(key, None)

    async def _pass(self, key: str, stored: StoredService, front: ServiceFront) -> timedelta | None:
        now = self._clock.now()
        traffic = await front.read_traffic(stored)
        found = {each.id: await self._look(stored, each, traffic, front) for each in stored.open}
        seen = _hold_back(stored, found, front)
        service = await self._markets.update(stored, now)
        if traffic is not None:
            service = note_uses(service, traffic.keys_used)
            before = self._scaled.get(key)
            service = self._scale(key, service, traffic, now, seen)
            if self._scaled[key] is not before:
                await self._count_minute(key, stored, before, traffic, now)
        stop = await self._budgets.find_service_stop(service.task, service.user, service.spec.drain)
        view = ServiceSnapshot(service=service, seen=seen, stop=stop)
        if traffic is not None:
            view = replace(
                view, backlog=traffic.backlog, places=traffic.places, tried=traffic.tried
            )
        step = decide_update(view, now)
        step, stored = await self._store_step(key, step, stored, front, now)
        self._note_replicas(key, stored)
        await self._show(key, stored, front)
        await self._act(step, stored)
        last = step.finished and await self._bills.is_billed(stored, now)
        answered = traffic is not None and traffic.answered > 0
        await self._bills.divide(
            stored, lambda: front.read_work(stored), now, answered=answered, last=last
        )
        if last:
            await self._delete(key, stored, front)
            return None
        return _BILLED_EVERY if step.finished else step.after

    async def _delete(self, key: str, service: StoredService, front: ServiceFront) -> None:
        await self._withdraw(key, front)
        await services_of(self._store).delete(service)
        self._announce(key)

    def _note_replicas(self, key: str, service: StoredService) -> None:
        for replica in service.replicas:
            if replica.state is ReplicaState.ENDED:
                self._services.pop(replica.id, None)
            else:
                self._services[replica.id] = key

    async def _look(
        self,
        service: StoredService,
        replica: ServiceReplica,
        traffic: ServiceTraffic | None,
        front: ServiceFront,
    ) -> ReplicaSeen:
        probed = front.probe(replica.id)
        try:
            job = await self._store.job(replica.id)
        except RowNotFound:
            return ReplicaSeen()
        in_flight = _count_in_flight(replica, traffic, service)
        seen = view(ReplicaSeen, probed, phase=job.phase, reason=job.reason, in_flight=in_flight)
        return await self._look_at_attempt(job, seen)

    async def _look_at_attempt(self, job: JobRecord, seen: ReplicaSeen) -> ReplicaSeen:
        """Return the replica's state, completed with the facts about the job's current attempt."""
        attempts = await self._store.attempts(job.id) if job.attempt else ()
        attempt = next((each for each in attempts if each.number == job.attempt), None)
        if attempt is None:
            return seen
        runs = job.phase is JobPhase.RUNNING
        nodes = await self._store.nodes(attempt.id) if runs else ()
        used = [each.telemetry["gpu_percent"] for each in nodes if "gpu_percent" in each.telemetry]
        claims = [each.claimed_at for each in nodes if each.claimed_at is not None]
        return replace(
            seen,
            gpu_use=sum(used) / len(used) / 100 if used else None,
            offer=attempt.offer,
            rate=self._bills.rates.get(job.id, attempt.offer.rate.times(attempt.nodes)),
            gang=attempt.gang,
            address=next((each.address or "" for each in nodes if each.rank == 0), ""),
            placed_at=attempt.created_at,
            claimed_at=max(claims, default=None),
            tried=True,
            reclaimed=runs and taken_at(attempt, nodes) is not None,
            loss=find_loss(attempt),
            waits="" if runs or attempt.wait is None else attempt.standing,
        )

    def _scale(
        self,
        key: str,
        service: StoredService,
        traffic: ServiceTraffic,
        now: datetime,
        seen: Mapping[str, ReplicaSeen],
    ) -> StoredService:
        """Return the service with a new decision of the autoscaler if a decision is due, otherwise
        with the last decision, which may not be stored yet.
        """
        known = self._scaled.get(key)
        if known is not None and known.service.id != service.id:
            known = None
        if known is not None:
            service = replace(service, level=known.service.level)
        if known is not None and known.service.revision == service.revision:
            decided = {name: getattr(known.service, name) for name in _DECIDED}
            service = replace(service, **decided)
            waits = traffic.backlog and not service.target
            if now - known.at < SCALED_EVERY and not waits:
                return service
        before = None if known is None else known.traffic
        service = scale_replicas(service, before, traffic, now, seen)
        service = record_level(service, before, traffic, now)
        self._scaled[key] = _Scaled(
            service=service,
            at=now,
            stored_at=now if known is None else known.stored_at,
            traffic=traffic,
        )
        return service

    async def _count_minute(
        self,
        key: str,
        service: StoredService,
        before: _Scaled | None,
        traffic: ServiceTraffic,
        now: datetime,
    ) -> None:
        """Add the traffic since the last decision to the figures of this minute, and store those of
        the minute before once it is over.
        """
        ended = self._minutes.get(key)
        former = None if before is None or before.service.id != service.id else before.traffic
        minute = count_minute(ended, service, former, traffic, now)
        if ended is not None and minute.number != ended.number and (block := make_block(ended)):
            await self._store.commit(AtomicWrite(figures=[block]))
        self._minutes[key] = minute

    async def _store_step(
        self,
        key: str,
        step: ServiceStep,
        stored: StoredService,
        front: ServiceFront,
        now: datetime,
    ) -> tuple[ServiceStep, StoredService]:
        """Store the service of the step, including the replicas that the step orders. Return the
        step, with the ordered replicas added, and the stored service.
        """
        service = await self._order_all(step, front, now)
        ordered = service.replicas[len(step.service.replicas) :]
        step = replace(step, service=service, start=(*step.start, *ordered))
        scaled = self._scaled.get(key)
        old = scaled is not None and now - scaled.stored_at >= _STORED_EVERY
        compared = service
        if not old:
            compared = copy_fields(service, stored, "scaling", "groups", "level", "why", "keys")
        if compared == stored:
            return step, stored
        if scaled is not None:
            self._scaled[key] = replace(scaled, stored_at=now)
        service = await services_of(self._store).put(service)
        self._announce(key)
        return step, service

    async def _order_all(
        self, step: ServiceStep, front: ServiceFront, now: datetime
    ) -> StoredService:
        """Return the service with the replicas that the step orders."""
        service = step.service
        for each in step.bound:
            before = len(service.replicas)
            service = await self._order(service, service.revision, each.market, front, now)
            if len(service.replicas) > before:
                service = change_last(service, bound_to=each.places)
        for market in step.orders:
            service = await self._order(service, service.revision, market, front, now)
        for _ in range(step.candidates):
            service = await self._order(service, service.tried, ANYWHERE, front, now)
        for name in step.grouped:
            service = self._order_of_group(service, service.revision, name, front, now, step)
        for name in step.candidate_groups:
            service = self._order_of_group(service, service.tried, name, front, now, step)
        return service

    @property
    def _is_alone(self) -> bool:
        """Whether replicas can run only on the server's machine."""
        return {split_account(each)[0] for each in self._pool.providers} == {HERE}

    def _order_of_group(
        self,
        service: StoredService,
        revision: int,
        name: str,
        front: ServiceFront,
        now: datetime,
        step: ServiceStep,
    ) -> StoredService:
        """Return the service with one more replica of a group. If the service has a router, the
        first replica decides in which network the others run.
        """
        wanted = as_revision(service, revision)
        group, near = find_group(wanted.task, name), None
        if find_router(wanted.task) is not None and not self._is_alone:
            near = find_network(service, revision)
            if near is None and any(each.revision == revision for each in service.open):
                return service  # until the first one has a node
        port = wanted.spec.port if wanted.spec.fixed_port else front.find_port()
        second = front.find_port() if group.role in SECOND_PORTS else 0
        provider, places = (None, ()) if near is None else near
        return change_last(
            order_replica(service, self._jobs.make_id(), port, now, revision=revision),
            group=group.name,
            role=group.role,
            second_port=group.bootstrap_port or second,
            members=step.members.get(revision, ()) if group.role is ReplicaRole.ROUTER else (),
            providers=() if provider is None else (provider,),
            bound_to=places,
        )

    async def _order(
        self,
        service: StoredService,
        revision: int,
        market: str,
        front: ServiceFront,
        now: datetime,
    ) -> StoredService:
        """Return the service with one more replica, if the service may have another replica."""
        spec, before = as_revision(service, revision).spec, len(service.replicas)
        if spec.fixed_port:
            service = await self._order_at_port(service, revision, market, now)
        else:
            replica_id, port = self._jobs.make_id(), front.find_port()
            service = order_replica(service, replica_id, port, now, market, revision)
        if spec.routing is None or not spec.routing.events or len(service.replicas) == before:
            return service
        return change_last(service, second_port=front.find_port())

    async def _order_at_port(
        self, service: StoredService, revision: int, market: str, now: datetime
    ) -> StoredService:
        """Return the service with one more replica, whose program listens on the port in the task
        file. If another replica already uses this port on the server's machine, the new replica is
        ordered at another provider. If the service may run only on the server's machine, no replica
        is ordered.
        """
        wanted, replica_id = as_revision(service, revision), self._jobs.make_id()
        port, services = wanted.spec.port, await services_of(self._store).list()
        holder = find_holder(wanted, services, replaces=revision == service.revision)
        if not service.failures:
            service = replace(service, problem="")  # the result of an earlier lease holder
        if not holder:
            return order_replica(service, replica_id, port, now, market, revision)
        names = {split_account(each)[0] for each in self._pool.providers}
        elsewhere = list_elsewhere(wanted.task, names)
        if elsewhere:
            service = order_replica(service, replica_id, port, now, market, revision)
            return change_last(service, providers=elsewhere)
        problem = f"port {port} of the server's machine is used by a replica of {holder}, and this "
        problem += "service permits no provider except the server's own machine"
        return replace(service, problem=problem)

    async def _act(self, step: ServiceStep, service: StoredService) -> None:
        """Start and stop jobs of replicas. The method may be called again with the same step."""
        for replica in step.start:
            await self._submit(service, replica)
        for replica in step.stop:
            reason = f"service {service.name}: {replica.reason}"
            with suppress(RowNotFound):  # the job was not submitted, or was removed
                await self._jobs.stop(service.project, replica.id, reason)

    async def _submit(self, service: StoredService, replica: ServiceReplica) -> None:
        name = name_replica(service.name, replica.number)
        market = next((each for each in service.markets if each.name == replica.market), None)
        replicas, service = service.open, as_revision(service, replica.revision)
        base = service.task
        if replica.role is not None:
            host = "127.0.0.1" if self._is_alone else "0.0.0.0"
            found = prepare_role(base, replica, replicas, host)
            if found is None:
                return  # a later pass knows the addresses that the program needs
            base = found
        if replica.events_port:
            base = replace(base, env={**base.env, EVENTS_PORT: str(replica.events_port)})
        task = make_replica_task(base, name, replica.port, market, replica.bound_to)
        if replica.providers:
            task = keep_at(task, replica.providers)
        try:
            await self._jobs.submit(
                task,
                service.origin,
                service.project,
                user=service.user,
                consented=service.consented,
                ceiling=service.ceiling,
                job_id=replica.id,
            )
        except StaleVersion:
            return  # an earlier pass has submitted the job
        self._wake(service)


def _hold_back(
    service: StoredService, seen: Mapping[str, ReplicaSeen], front: ServiceFront
) -> Mapping[str, ReplicaSeen]:
    joined = {
        each.id: front.list_joined(each.id) | {*each.members}
        for each in service.open
        if each.role is ReplicaRole.ROUTER
    }
    for revision in {service.revision, service.tried} - {0}:
        task = as_revision(service, revision).task
        seen = hold_back(task, revision, service.open, seen, joined)
    return seen


def _count_in_flight(
    replica: ServiceReplica, traffic: ServiceTraffic | None, service: StoredService
) -> int | None:
    """Return the number of a replica's requests in flight, or None if some gateways have not
    reported their numbers, or only a router knows the number.
    """
    if traffic is None or not traffic.whole:
        return None
    ours = {each.role for each in service.open if each.revision == replica.revision}
    if replica.is_worker and ReplicaRole.ROUTER in ours:
        return None
    return traffic.replicas.get(replica.id, 0)


class ServiceMarkets:
    """The markets of services that may use spot capacity. Services that may not use spot capacity
    have no markets: the planner places their replicas like ordinary jobs.
    """

    def __init__(self, pool: ProviderPool) -> None:
        self._pool = pool
        self._read: dict[str, tuple[int, datetime]] = {}  # ID of a service -> revision, time

    async def update(self, service: StoredService, now: datetime) -> StoredService:
        """Return the service with the markets that its replicas may use now."""
        if not uses_spot(service.task):  # an older revision may have used this market
            return replace(service, markets=(), placement={}) if service.markets else service
        revision, at = self._read.get(service.id, (0, now))
        if service.markets and revision == service.revision and now - at < _AGE:
            return service
        snapshot = await self._pool.market(_AGE)
        job = JobRecord(
            id=service.id,
            project=service.project,
            name=service.name,
            task=place_in_regions(service.task),
            submitted_at=now,
            since=now,
            consented=service.consented,
        )
        offers = list_usable(job, snapshot, self._pool.objections)
        self._read[service.id] = (service.revision, now)
        return merge_markets(service, list_markets(offers))
