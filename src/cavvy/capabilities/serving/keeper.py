"""What the control plane does for services: it reconciles them and the queues of their calls."""

import asyncio
from datetime import timedelta
from pathlib import Path

from cavvy.api.app_state import AppState
from cavvy.capabilities.serving.call_rows import calls_of
from cavvy.capabilities.serving.control.call_queue import CallQueue
from cavvy.capabilities.serving.control.front import ServiceFront, ServingParts, SuppliedFront
from cavvy.capabilities.serving.control.reconciler import ServiceReconciler, is_service_key
from cavvy.capabilities.serving.control.request_bills import RequestBills
from cavvy.capabilities.serving.control.requests import ServiceRequests
from cavvy.capabilities.serving.figures import add_service
from cavvy.capabilities.serving.gateway.own_values import describe_owner
from cavvy.capabilities.serving.server.front import FallbackSecrets, GatewayFront
from cavvy.capabilities.serving.server.haproxy_plane import HaproxyPlane
from cavvy.capabilities.serving.server.listener import read_listener
from cavvy.capabilities.serving.server.relays import ReplicaRelays
from cavvy.capabilities.serving.server.shared_traffic import SharedTraffic
from cavvy.capabilities.serving.service_rows import services_of
from cavvy.capabilities.serving.stored_services import StoredService
from cavvy.control.parts import ControlParts, KnownService, StandingReconciler
from cavvy.control.worklist import is_calls_key
from cavvy.domain.values import replace
from cavvy.server.parts import ServerParts
from cavvy.store.base import ProjectFilter
from cavvy.store.channel import GatewayReports
from cavvy.telemetry import Figures


class Serving(StandingReconciler):
    """The services of an installation. `requests` handles what users ask of them."""

    def __init__(self, parts: ControlParts) -> None:
        self._front = find_front(parts)
        self._store, self._clock = parts.store, parts.clock
        own = ServingParts(
            store=parts.store,
            clock=parts.clock,
            jobs=parts.jobs,
            pool=parts.pool,
            budgets=parts.budgets,
            front=self._front,
            hint=parts.hint,
            announce=parts.announce,
            owns=parts.owns_key,
        )
        self._calls = CallQueue(own, parts.data)
        self._services = ServiceReconciler(own)
        self.requests = ServiceRequests(own, self._calls.list_sent)

    def owns(self, key: str) -> bool:
        return is_service_key(key) or is_calls_key(key)

    async def unfinished(self) -> list[str]:
        return await self._services.unfinished()

    async def reconcile(self, key: str) -> timedelta | None:
        return await (self._calls if is_calls_key(key) else self._services).reconcile(key)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._services.run())
            group.create_task(self._calls.run())

    def follows(self, key: str) -> bool:
        return is_service_key(key)

    async def follow(self, key: str) -> timedelta | None:
        return await self._services.follow(key)

    async def note_job(self, job_id: str) -> None:
        await self._services.note_job(job_id)

    async def sweep(self) -> None:
        await RequestBills(self._store).sweep()
        await calls_of(self._store).expire(self._clock.now())

    async def is_needed(self) -> bool:
        return await self.requests.any()

    async def end_all(self, project: str | None) -> None:
        await self.requests.end_all(project)

    async def add_figures(self, figures: Figures, projects: ProjectFilter) -> None:
        for status in await self.requests.list(projects):
            add_service(figures, status)

    def find_problem(self) -> str:
        reason = self.requests.find_problem()
        return f"services cannot be reached: {reason}" if reason else ""

    async def list_known(self, project: str) -> list[KnownService]:
        found = await services_of(self._store).list(project)
        locate = (lambda each: "") if self._front is None else self._front.locate
        return [show(each, locate(each) if each.wanted else "") for each in found]


def show(service: StoredService, url: str) -> KnownService:
    """Return a service as other capabilities know it."""
    return KnownService(id=service.id, task=service.task, url=url)


def find_requests(app_state: AppState) -> ServiceRequests:
    """Return what handles users' requests about services on this server."""
    found = app_state.control_plane.find(Serving)
    assert found is not None  # it is made from the same description as the routes
    return found.requests


def find_front(parts: ControlParts) -> ServiceFront | None:
    """Return the gateway of a server, what a simulation has in its place, or None."""
    if (supplied := parts.find(SuppliedFront)) is not None:
        return supplied.front
    server = parts.find(ServerParts)
    return None if server is None else make_front(parts, server)


def make_front(parts: ControlParts, server: ServerParts) -> GatewayFront:
    """Return the gateway of a server. If several servers share the work, each has its own. Raises
    StateDirError if the settings contradict each other.
    """
    listener = read_listener(server.settings, shared=server.share is not None)
    listener = replace(listener, owner=describe_owner(server.files.token()))
    folder, shared, plane = Path(server.home.path) / "gateway", None, None
    if server.share is not None:
        shared = SharedTraffic(GatewayReports(server.share.url, server.share.me.id), server.share)
    if listener.haproxy is not None:
        plane = HaproxyPlane(folder, server.home.haproxy_path(), listener, listener.haproxy)
    relays = ReplicaRelays(server.execs)
    relays.peers, relays.notify = server.peers, parts.agents.notify
    relays.find_endpoints = parts.pool.find_endpoints
    secrets, control = make_fallback_secrets(parts), server.home.gateway_path()
    return GatewayFront(folder, control, listener, relays, shared, plane, secrets)


def make_fallback_secrets(parts: ControlParts) -> FallbackSecrets:
    """Return access to the keys of the APIs that fallbacks name. A project whose policies name
    regions may not use APIs, which may answer anywhere.
    """

    async def find(project: str, name: str) -> str | None:
        policies = (await parts.store.policies()).find(project)
        if any(each.policy.regions for each in policies):
            return None
        return (await parts.open_secrets(project, [name])).get(name) if name else ""

    return FallbackSecrets(find, parts.read_targets)
