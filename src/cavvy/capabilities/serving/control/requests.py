"""Handles users' requests about services: start, update, list and end.

What a service's fallbacks must not be: services that do not exist, that may answer outside of
the service's places, that do not know the requests' model, or from which requests would return to
the service.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from cavvy.capabilities.serving.control.call_queue import QueuedCallRequests, WebhookDeliveries
from cavvy.capabilities.serving.control.front import ServingParts
from cavvy.capabilities.serving.control.reconciler import service_key
from cavvy.capabilities.serving.decide.service import list_serving, make_replica_task
from cavvy.capabilities.serving.decide.traffic import ServiceTraffic
from cavvy.capabilities.serving.decide.update import begin_update, remember_former, remember_worked
from cavvy.capabilities.serving.replicas import CandidateRevision
from cavvy.capabilities.serving.service_rows import services_of
from cavvy.capabilities.serving.stored_services import (
    ServiceKey,
    StoredService,
    find_hosts,
    find_open_models,
    with_key,
    without_key,
)
from cavvy.control.decide.task_places import is_bound_to_places, stays_within
from cavvy.control.worklist import calls_key
from cavvy.domain.jobs import RunOrigin
from cavvy.domain.policies import BoundPolicy
from cavvy.domain.services import FallbackRule, ServiceSpec
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import Money
from cavvy.domain.values import Struct, replace
from cavvy.store.base import ProjectFilter, RowNotFound, StaleVersion

_TRIES = 10  # tries of a write that fails because a row was changed meanwhile
_REVOKED_WITHIN_S = 10.0


class NameTaken(Exception):
    """Raised if the `service` section of a task contains a host name, a model name, a fallback or
    an adapter that the service must not use. `key` is the key of the section with this name:
    `hosts`, `models`, `fallback`, `edge` or `adapters`.
    """

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


class ServiceStatus(Struct, frozen=True, kw_only=True):
    """A service, its URL ("" while the gateway starts) and its traffic, if known. `unreachable` is
    the reason why the gateway cannot listen.
    """

    service: StoredService
    url: str
    traffic: ServiceTraffic | None
    unreachable: str = ""


class ServiceRequests:
    """Handles users' requests about services. `list_sent` returns the IDs of the queued calls that
    this server has sent to the gateway, or None if another server sends the calls of the queue.
    """

    def __init__(
        self, parts: ServingParts, list_sent: Callable[[str], frozenset[str] | None]
    ) -> None:
        self._store, self._clock, self._jobs = parts.store, parts.clock, parts.jobs
        self._front, self._hint, self._announce = parts.front, parts.hint, parts.announce
        self.calls = QueuedCallRequests(parts, list_sent)
        self.deliveries = WebhookDeliveries(parts)

    def find_problem(self) -> str:
        """Return why no service can be reached, or "" if services can be reached."""
        return "" if self._front is None else self._front.find_problem()

    async def any(self) -> bool:
        """Return whether any service exists."""
        return bool(await services_of(self._store).list())

    async def list(self, projects: ProjectFilter) -> Sequence[ServiceStatus]:
        """Return the services of these projects."""
        return [
            await self._describe(each) for each in await services_of(self._store).list(projects)
        ]

    async def get(self, project: str, name: str) -> ServiceStatus:
        """Return one service. Raises RowNotFound."""
        return await self._describe(await services_of(self._store).get(project, name))

    async def put(
        self,
        task: TaskSpec,
        origin: RunOrigin,
        *,
        user: str,
        consented: bool,
        ceiling: Money | None,
    ) -> ServiceStatus:
        """Start a service with the name of the task, or add a new revision to the existing service
        with this name. If the task is unchanged, the call has no effect. Raises StaleVersion,
        NameTaken.
        """
        await self._check_names(task)
        asked = CandidateRevision(
            revision=0,
            task=task,
            origin=origin,
            user=user,
            consented=consented,
            ceiling=ceiling,
            created_at=self._clock.now(),
        )
        for _ in range(_TRIES):
            new = StoredService(
                project=task.project,
                name=task.name,
                id=self._jobs.make_id(),
                created_at=self._clock.now(),
                task=task,
            )
            with suppress(RowNotFound):
                new = await services_of(self._store).get(task.project, task.name)
                _check_numbers(new.task, task)
            same = new.version and (new.task, new.origin.snapshot) == (task, origin.snapshot)
            service = begin_update(new, asked) or replace(
                new,
                task=task,
                origin=origin,
                user=user,
                consented=consented,
                ceiling=ceiling,
                wanted=True,
                revision=new.newest + 1 if new.version and not same else new.revision,
                candidate=None,
                former=new.former if same else remember_former(new),
                steady=new.steady if same else False,
                worked=new.worked if same else remember_worked(new),
                failures=0,
                failed_at=None,
                problem="",
            )
            with suppress(StaleVersion):
                service = await services_of(self._store).put(service)
                return await self._publish(service)
        raise StaleVersion(f"service {task.name} kept changing during the request; try again")

    async def _check_names(self, task: TaskSpec) -> None:
        """Raise NameTaken if the service may not use one of its host names. Also raise NameTaken if
        the service has no keys, and another service of the project without keys has a model of the
        same name: for a request with this model, the gateway could not choose between the two
        services. Names of models in other projects do not matter, and are not disclosed.
        """
        spec = task.service
        hosts = frozenset() if spec is None else find_hosts(spec)
        models = frozenset() if spec is None else find_open_models(spec)
        for host in sorted(hosts):
            if self._front is not None and not self._front.permits(host):
                message = f"{host} is not below one of the domains in services.domains"
                raise NameTaken("hosts", message)
        await self._check_fallbacks(task)
        await self._check_edge(task)
        for other in await services_of(self._store).list() if hosts or models else ():
            if (other.project, other.name) == (task.project, task.name):
                continue
            if used := hosts & other.hosts:
                message = f"another service already uses the host name {min(used)}"
                raise NameTaken("hosts", message)
            if other.project == task.project and (used := models & other.open_models):
                message = f"the service {other.name} already has the model {min(used)} without keys"
                raise NameTaken("models", f"{message}; add `keys: true`, or rename the model")

    async def _check_fallbacks(self, task: TaskSpec) -> None:
        """Raise NameTaken if the service names a fallback that it must not have."""
        if task.service is None or not task.service.fallbacks:
            return
        stored = await services_of(self._store).list(task.project)
        others = {each.name: each.task for each in stored if each.name != task.name}
        policies = (await self._store.policies()).find(task.project)
        if problem := object_to_fallbacks(task, others, policies):
            raise NameTaken("fallback", problem)

    async def _check_edge(self, task: TaskSpec) -> None:
        """Raise NameTaken if devices of the service send their requests to another service."""
        mine = task.service.edge if task.service else ()
        for other in await services_of(self._store).list(task.project) if mine else ():
            if other.name == task.name:
                continue
            for rule in mine:
                if any(rule.overlaps(each) for each in other.spec.edge):
                    where = f"of site {rule.site}" if rule.site else "of all sites"
                    message = f"devices {where} that serve {rule.model} belong to service "
                    raise NameTaken("edge", message + other.name)

    async def end(self, project: str, name: str) -> ServiceStatus:
        """End a service: its replicas finish their requests and stop, and then the service is
        deleted. Raises RowNotFound.
        """
        ended = await self._change(project, name, lambda service: replace(service, wanted=False))
        self._hint(service_key(project, name))
        return await self._describe(ended)

    async def add_key(self, project: str, name: str, key: ServiceKey) -> None:
        """Permit a key to call the service. Raises RowNotFound, TooManyKeys."""
        service = await self._change(project, name, lambda service: with_key(service, key))
        await self._publish(service)

    async def remove_key(self, project: str, name: str, key_id: str) -> None:
        """Revoke a key's permission to call the service. The gateway may still be running from
        before a restart of the server, so wait until it no longer accepts the key. Raises
        RowNotFound, KeyUnknown.
        """
        service = await self._change(project, name, lambda service: without_key(service, key_id))
        await self._publish(service)
        if self._front is not None:
            await self._front.await_published(service, _REVOKED_WITHIN_S)

    async def _change(
        self, project: str, name: str, change: Callable[[StoredService], StoredService]
    ) -> StoredService:
        for _ in range(_TRIES):
            service = await services_of(self._store).get(project, name)
            with suppress(StaleVersion):
                changed = await services_of(self._store).put(change(service))
                self._announce(service_key(project, name))
                return changed
        raise StaleVersion(f"service {name} kept changing during the request; try again")

    async def end_all(self, projects: ProjectFilter = None) -> Sequence[StoredService]:
        """End all services of these projects. Returns them."""
        found = await services_of(self._store).list(projects)
        for service in found:
            with suppress(RowNotFound):  # the service has just been removed
                await self.end(service.project, service.name)
        return found

    async def _publish(self, service: StoredService) -> ServiceStatus:
        """Let the gateway serve the service, so that requests may arrive before its replicas are
        ready."""
        if self._front is not None:
            await self._front.publish(service, list_serving(service))
        key = service_key(service.project, service.name)
        self._announce(key)
        self._hint(key)
        self._hint(calls_key(key))
        return await self._describe(service)

    async def _describe(self, service: StoredService) -> ServiceStatus:
        if self._front is None:
            return ServiceStatus(service=service, url="", traffic=None)
        traffic = await self._front.read_traffic(service)
        url = self._front.locate(service)
        return ServiceStatus(
            service=service,
            url=url,
            traffic=traffic,
            unreachable="" if url else self._front.find_problem(),
        )


def make_admitted(task: TaskSpec) -> TaskSpec:
    """Return the job whose offers decide whether a replica can run."""
    return make_replica_task(task, task.name, 0)


def _check_numbers(before: TaskSpec, after: TaskSpec) -> None:
    """Raise NameTaken if replicas that run and replicas that start would know an adapter by
    different numbers: llama.cpp numbers adapters by their order."""
    rules = [task.service.adapters if task.service else None for task in (before, after)]
    if any(each is None or each.engine != "llama.cpp" for each in rules):
        return
    for old, new in zip(*(each.sources for each in rules if each is not None), strict=False):
        if old != new:
            raise NameTaken(
                "adapters",
                f"llama.cpp numbers adapters by their order, and {old} would get another number "
                "while replicas run; keep the order and add new adapters at the end, or end the "
                "service first",
            )


def object_to_fallbacks(
    task: TaskSpec, others: Mapping[str, TaskSpec], policies: Sequence[BoundPolicy] = ()
) -> str:
    """Return what is wrong with the fallbacks of a service, or "". `others` are the tasks of the
    project's other services by name, and `policies` those of the project.
    """
    spec = task.service
    assert spec is not None
    by_policy = any(each.policy.regions for each in policies)
    bound = is_bound_to_places(task)
    for each in spec.fallbacks:
        name = each.service
        if each.api is not None:
            if bound or by_policy:
                what = "`resources.regions`" if bound else "a policy of the project"
                return (
                    f"the API at {each.api.host} may answer in any place, but {what} names places; "
                    "delete one of the two"
                )
        elif name == task.name:
            return "a service cannot be its own fallback; name another service"
        elif name not in others:
            return f"the project has no service {name}; start it first, or correct the name"
        elif not stays_within(others[name], task):
            return (
                f"replicas of {name} may run outside of the places of {task.name}; give {name} "
                "the same `regions` or `residency`"
            )
        elif path := _find_way(name, task.name, others):
            return f"requests would go round: {' -> '.join((task.name, *path))}; delete a fallback"
        elif problem := _object_to_model(spec, each, others[name].service):
            return problem
    return ""


def _object_to_model(spec: ServiceSpec, rule: FallbackRule, other: ServiceSpec | None) -> str:
    """Return why another service does not know the model that requests would name, or ""."""
    known = () if other is None else other.model_names
    asked = (rule.model,) if rule.model else spec.model_names
    if not known or not asked or set(asked) & set(known):
        return ""
    return (
        f"requests to {rule.service} would name the model {asked[0]}, but it has "
        f"{', '.join(known)}; write `{{service: {rule.service}, model: {known[0]}}}`"
    )


def _find_way(start: str, end: str, others: Mapping[str, TaskSpec]) -> tuple[str, ...]:
    """Return the names on the way from one service to another over fallbacks, or ()."""
    ways: list[tuple[str, ...]] = [(start,)]
    seen = {start}
    while ways:
        way = ways.pop()
        known = others.get(way[-1])
        spec = None if known is None else known.service
        for each in () if spec is None else spec.fallbacks:
            if each.service == end:
                return (*way, end)
            if each.service and each.service not in seen:
                seen.add(each.service)
                ways.append((*way, each.service))
    return ()
