"""Keeps the gateway running and sends it the services and replicas."""

import asyncio
import errno
import logging
import random
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import monotonic

from cavvy.api.wire import view
from cavvy.capabilities.serving.bills import RequestWork
from cavvy.capabilities.serving.control.front import ProbeRecord
from cavvy.capabilities.serving.decide.replica_groups import as_group, find_group, list_members
from cavvy.capabilities.serving.decide.service import list_serving
from cavvy.capabilities.serving.decide.traffic import GatewayCount, ServiceTraffic
from cavvy.capabilities.serving.decide.update import as_revision
from cavvy.capabilities.serving.gateway.config import ReplicaAddress, ServiceRoute
from cavvy.capabilities.serving.gateway.control_socket import (
    AwaitCold,
    ControlReply,
    CountElsewhere,
    ReadStatistics,
    SetCredentials,
    SetReplicas,
    SetServices,
)
from cavvy.capabilities.serving.gateway.haproxy.runtime import HaproxyRefused
from cavvy.capabilities.serving.gateway.kept_counts import read_work
from cavvy.capabilities.serving.gateway.statistics import ServiceFacts
from cavvy.capabilities.serving.queued_calls import CallAnswer, QueuedCall
from cavvy.capabilities.serving.replicas import ServiceReplica
from cavvy.capabilities.serving.server.gateway_child import (
    GatewayCaller,
    GatewayChild,
    GatewayLink,
    GatewayLost,
    GatewayRefused,
)
from cavvy.capabilities.serving.server.gateway_route import (
    list_routes,
    make_address,
    make_route,
    name_credential,
)
from cavvy.capabilities.serving.server.haproxy_plane import HaproxyPlane
from cavvy.capabilities.serving.server.listener import ServiceListener
from cavvy.capabilities.serving.server.probes import ProbedPort, ReplicaProbes
from cavvy.capabilities.serving.server.relays import ReplicaRelays
from cavvy.capabilities.serving.server.router_members import RouterMembers, RouterTarget
from cavvy.capabilities.serving.server.shared_traffic import SharedTraffic
from cavvy.capabilities.serving.stored_services import StoredService
from cavvy.control.decide.task_places import stays_within
from cavvy.domain.services import ServiceSpec
from cavvy.domain.tasks import has_api
from cavvy.domain.values import Struct, replace
from cavvy.store.base import StoreError, StoreUnusable

_LOCAL = "127.0.0.1"
_POLL_S = 1.0
_RECEIVED_POLL_S = 0.02
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0  # seconds between two attempts to reach the gateway
_DRAIN_S = 2.0  # seconds for requests in flight when the server or the last service ends
# The ports of replicas' programs, which are bound minutes later: systems assign none of them to
# connections by themselves (Linux: from 32768), and the ranks of gangs meet at others (from 20000).
_REPLICA_PORTS, _MOST_TRIED = range(10_000, 20_000), 50
_REMEMBERED_PORTS = 64  # ports that were assigned to replicas, which may not listen on them yet
_SECRETS_EVERY_S = 5.0  # a changed secret reaches the gateway after this time
_RECENT_S = 10  # the period in seconds over which the shown rate of requests is computed
_log = logging.getLogger(__name__)


class FallbackSecrets(Struct, frozen=True):
    """What the gateway must know for the APIs that fallbacks name. `find` returns the secret of a
    project with an API's key, "" if the secret is not named, or None if the project has none or may
    not use APIs. `read_targets` returns the private targets that users may name.
    """

    find: Callable[[str, str], Awaitable[str | None]]
    read_targets: Callable[[], Awaitable[str]]


class PublishedService(Struct, frozen=True, kw_only=True):
    """The data about a service that the gateway needs."""

    service: StoredService
    route: ServiceRoute
    replicas: tuple[ReplicaAddress, ...]

    def is_same_route(self, other: "PublishedService") -> bool:
        """Return whether the gateway has the other route, too. Routes of single services do not
        name fallbacks, nor the regions by which they may be fallbacks.
        """
        fallbacks = self.service.spec.fallbacks == other.service.spec.fallbacks
        regions = stays_within(self.service.task, other.service.task) and stays_within(
            other.service.task, self.service.task
        )
        return fallbacks and regions and self.route == other.route


class GatewayFront:
    """Implements `ServiceFront` with a gateway that runs in its own process on this machine. The
    gateway runs while there are services, and is started again when it ends. `shared` contains the
    counts of the gateways of other servers, or None if there are no other servers. `plane` is
    the HAProxy in front of the gateway.
    """

    def __init__(
        self,
        folder: Path,
        control: str,
        listener: ServiceListener,
        relays: ReplicaRelays,
        shared: SharedTraffic | None = None,
        plane: HaproxyPlane | None = None,
        secrets: FallbackSecrets | None = None,
    ) -> None:
        self._listener, self._secrets = listener, secrets
        self._told: tuple[GatewayLink, SetCredentials] | None = None  # to the gateway
        self._told_at = 0.0
        self._plane = plane
        self._child = GatewayChild(folder, control, listener.of_gateway)
        self._caller = GatewayCaller(listener.of_gateway)
        self._relays = relays
        self._probes = ReplicaProbes()
        self._members = RouterMembers()
        self._shared = shared
        self._published: dict[str, PublishedService] = {}  # keyed by the ID of the service
        self._done: dict[str, int] = {}  # the version of each service that the gateway has received
        self._arrivals: dict[str, int] = {}
        self._given: deque[int] = deque(maxlen=_REMEMBERED_PORTS)
        self._needed = asyncio.Event()
        self._link: GatewayLink | None = None
        self._ending = asyncio.Lock()
        self._wake: Callable[[StoredService], None] = lambda service: None

    # methods that the reconciler calls

    def find_port(self) -> int:
        tried = [*random.sample(_REPLICA_PORTS, _MOST_TRIED), *([0] * _MOST_TRIED)]
        for wanted in tried:
            with socket.socket() as found, suppress(OSError):
                found.bind((_LOCAL, wanted))
                port = int(found.getsockname()[1])
                if port not in self._given and not self._is_used(port):
                    self._given.append(port)
                    return port
        raise OSError(errno.EADDRINUSE, "this machine has no free port for a replica")

    def _is_used(self, port: int) -> bool:
        """Return whether the port is assigned to a replica. The stored services are checked,
        because another server may have started the replica, or the replica's program may not be
        listening yet.
        """
        return any(
            port in (each.port, each.second_port)
            for service in self._stored()
            for each in service.open
        )

    def locate(self, service: StoredService) -> str:
        port = self._child.port if self._plane is None else self._plane.port
        return self._listener.locate(service.spec.hosts, service.path, port) if port else ""

    def find_problem(self) -> str:
        problem = self._child.find_problem()
        return problem or ("" if self._plane is None else self._plane.find_problem())

    def permits(self, host: str) -> bool:
        return self._listener.permits(host)

    def watch(
        self, service: StoredService, replicas: Sequence[ServiceReplica], *, owns: bool = True
    ) -> None:
        self._relays.keep(service.id, {each.id: each for each in replicas})
        ports = {}
        for each in replicas:
            spec = _spec_of(service, each)
            ports[each.id] = ProbedPort(
                partial(self._relays.port, each),
                spec.probe,
                ready=each.ready_at is not None,
                metric=spec.replicas.target.metric or "",
            )
        self._probes.watch(service.id, ports, lambda: self._wake(service))
        routers = {
            each.id: RouterTarget(
                partial(self._relays.port, each),
                list_members(each, replicas),
                lambda one: self._probes.record(one).answers,
            )
            for each in replicas
            if owns and _has_api(service, each)
        }
        self._members.keep(service.id, routers, lambda: self._wake(service))

    def probe(self, replica_id: str) -> ProbeRecord:
        return self._probes.record(replica_id)

    def list_joined(self, router_id: str) -> frozenset[str]:
        return self._members.joined(router_id)

    async def publish(self, service: StoredService, replicas: Sequence[ServiceReplica]) -> None:
        new, old = self._make_published(service, replicas), self._published.get(service.id)
        if old is not None and old.service.version > service.version:
            return  # this is an older state of the service; the newer state will arrive
        self._published[service.id] = new
        self._needed.set()
        link = self._link
        if link is None:
            return
        try:
            if old is None or not old.is_same_route(new):
                await self._set_services(link)
            if old is None or old.replicas != new.replicas:
                await link.ask(SetReplicas(service=service.id, replicas=new.replicas))
            if not await self._keep_plane():
                return
            self._done[service.id] = max(self._done.get(service.id, 0), service.version)
        except GatewayLost:
            link.close()  # this makes the next pass open another link and send all data again

    async def await_published(self, service: StoredService, timeout_s: float) -> None:
        for _ in range(round(timeout_s / _RECEIVED_POLL_S)):
            if self._has_received(service) or self.find_problem():
                return
            await asyncio.sleep(_RECEIVED_POLL_S)

    def _has_received(self, service: StoredService) -> bool:
        """Return whether the gateway has received this version of the service or a later change,
        such as the end of the service.
        """
        withdrawn = service.id not in self._published
        return withdrawn or self._done.get(service.id, 0) >= service.version

    async def withdraw(self, service: StoredService) -> None:
        if self._published.pop(service.id, None) is None:
            return
        self._probes.watch(service.id, {}, lambda: None)
        self._members.keep(service.id, {}, lambda: None)
        self._relays.keep(service.id, {})
        self._arrivals.pop(service.id, None)
        self._done.pop(service.id, None)
        if self._shared is not None:
            await self._shared.forget(service.id)
        if self._published:
            if self._link is not None:
                with suppress(GatewayLost):
                    await self._set_services(self._link)
                    await self._keep_plane()
            return
        self._needed.clear()
        await self._end_child()

    async def read_traffic(self, service: StoredService) -> ServiceTraffic | None:
        done = self._done.get(service.id, 0)
        found = (await self._read()).get(service.id)
        if self._shared is None:
            return None if found is None else await self._make_traffic(found)
        counted = None if found is None else await self._count(done, found)
        return await self._shared.read(service, counted)

    async def read_work(self, service: StoredService) -> RequestWork | None:
        found = (await self._read()).get(service.id)
        if found is not None:
            mine: RequestWork | None = (await self._make_traffic(found)).work
        else:  # the gateway is being restarted
            mine = (await asyncio.to_thread(read_work, self._child.counts)).get(service.id)
            if self._plane is not None:
                mine = {**(mine or {}), **await self._plane.read_work(service.id)} or None
        if self._shared is None:
            return mine
        return await self._shared.read_work(service.id, mine)

    async def call(
        self, service: StoredService, call: QueuedCall, body: bytes, timeout: timedelta
    ) -> CallAnswer:
        return await self._caller.call(self._child.port, service, call, body, timeout)

    # the gateway's life

    async def run(
        self, published: Sequence[StoredService], wake: Callable[[StoredService], None]
    ) -> None:
        self._wake = wake
        for service in published:
            self._published[service.id] = self._make_published(service, list_serving(service))
        if published:
            self._needed.set()
        elif problem := self.find_problem():
            _log.warning("services cannot be reached: %s", problem)
        pause_s = _PAUSE_S
        try:
            while True:
                await self._needed.wait()
                try:
                    link = await self._open()
                    pause_s = _PAUSE_S
                    self._wake_all()
                    await self._follow(link)
                except (OSError, GatewayLost) as error:
                    if self._link is not None:
                        self._link.close()
                        self._link = None
                    self._done.clear()
                    if self._needed.is_set():
                        _log.warning("the gateway does not run: %s", error)
                    if isinstance(error, GatewayRefused) and not self._child.started:
                        # A server of another version started the gateway and was killed.
                        await self._end_gateway()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        finally:
            self._probes.close()
            self._members.close()
            self._relays.close()
            await self._end_child()
            if self._shared is not None:
                await self._shared.close()

    async def _open(self) -> GatewayLink:
        """Return the link to a gateway process, after this process has received all services."""
        async with self._ending:
            known = self._list_routes()
            link = await self._child.reach(known)
            sent: dict[str, PublishedService] = {}
            while sent != self._published:  # more changes may arrive meanwhile
                sent = dict(self._published)
                await self._set_services(link)
                for name, each in sent.items():
                    await link.ask(SetReplicas(service=name, replicas=each.replicas))
            self._link = link
            if await self._keep_plane():
                self._done = {name: each.service.version for name, each in sent.items()}
            return link

    async def _end_child(self) -> None:
        async with self._ending:
            if self._link is not None:
                self._link.close()
                self._link = None
            if self._plane is not None:
                await self._plane.end(_DRAIN_S)
            await self._child.end(_DRAIN_S)

    async def _end_gateway(self) -> None:
        """End only the gateway. HAProxy continues, and uses the gateway that is started next."""
        async with self._ending:
            await self._child.end(_DRAIN_S)

    async def _follow(self, link: GatewayLink) -> None:
        """Until the gateway ends, wake the reconciler for each service that receives requests.
        Raises OSError, GatewayLost.
        """
        cold = await self._child.open_another()
        listening = asyncio.create_task(self._listen(cold, link))
        try:
            while True:
                await asyncio.wait((listening,), timeout=_POLL_S)
                if listening.done():
                    listening.result()
                await self._look(link)
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            cold.close()

    async def _listen(self, cold: GatewayLink, link: GatewayLink) -> None:
        """Wake a service immediately when one of the service's requests finds no replica. Raises
        GatewayLost."""
        while True:
            told = await cold.ask(AwaitCold(), timeout_s=None)
            if self._shared is not None:
                await self._look(link)  # the server that reconciles the service needs the count
            for name in told.cold or ():
                if name in self._published:
                    self._wake(self._published[name].service)

    async def _look(self, link: GatewayLink) -> None:
        """Send what has changed of replicas to the gateway, and wake the services with new
        traffic."""
        await self._send_changes(link)
        if monotonic() - self._told_at > _SECRETS_EVERY_S:
            await self._send_credentials(link)
        await self._keep_plane()
        done = dict(self._done)
        facts = _by_name(await link.ask(ReadStatistics()))
        found = {name: await self._count(done.get(name, 0), each) for name, each in facts.items()}
        if self._shared is not None:
            await self._shared.tell({name: each for name, each in found.items() if name in done})
            await self._share_limits(link, self._shared, found)
        for name, counted in found.items():
            seen = counted.traffic
            active = seen.backlog or seen.in_flight or self._arrivals.get(name) != seen.arrivals
            self._arrivals[name] = seen.arrivals
            if active and name in self._published:
                self._wake(self._published[name].service)

    async def _share_limits(
        self, link: GatewayLink, shared: SharedTraffic, found: Mapping[str, GatewayCount]
    ) -> None:
        """Tell the gateway what keys with limits have used at other gateways."""
        for name, counted in found.items():
            known = self._published.get(name)
            if known is None or not any(
                each.tokens_per_min or each.micros_per_day for each in known.service.keys
            ):
                continue
            rates = {each.id: each.rate_micros for each in known.replicas}
            try:
                used = await shared.read_use(name, counted.traffic.work, rates)
            except StoreError as error:
                _log.warning("the limits of keys were not shared: %s", error)
                return
            if used:
                await link.ask(CountElsewhere(service=name, used=used))

    async def _send_changes(self, link: GatewayLink) -> None:
        """Send the gateway a service's replicas if their network distances have changed, or what is
        known of their unused connections.
        """
        for name, known in list(self._published.items()):
            replicas = tuple(self._refresh(each) for each in known.replicas)
            if replicas == known.replicas:
                continue
            self._published[name] = replace(known, replicas=replicas)
            await link.ask(SetReplicas(service=name, replicas=replicas))

    def _refresh(self, known: ReplicaAddress) -> ReplicaAddress:
        tier, keeps = self._relays.tier(known.id), self._probes.record(known.id).keeps
        same = (tier, keeps) == (known.tier, known.keeps)
        return known if same else replace(known, tier=tier, keeps=keeps)

    async def _count(self, version: int, facts: ServiceFacts) -> GatewayCount:
        traffic, fresh = await self._make_traffic(facts), self._child.started
        return GatewayCount(version=version, traffic=traffic, fresh=fresh)

    async def _make_traffic(self, facts: ServiceFacts) -> ServiceTraffic:
        traffic = make_traffic(facts)
        return traffic if self._plane is None else await self._plane.count(facts.name, traffic)

    async def _keep_plane(self) -> bool:
        """Let HAProxy serve the gateway's services. Returns False on failure; the next pass tries
        again.
        """
        if self._plane is None or not self._child.port:
            return self._plane is None
        routes = self._list_routes()
        replicas = {name: each.replicas for name, each in self._published.items()}
        try:
            await self._plane.keep(routes, replicas, self._child.port)
        except (OSError, HaproxyRefused) as error:
            _log.warning("HAProxy does not serve all services: %s", error)
            return False
        return True

    def _make_published(
        self, service: StoredService, replicas: Sequence[ServiceReplica]
    ) -> PublishedService:
        addresses = []
        for each in replicas:
            if port := self._relays.port(each):
                tier, events = self._relays.tier(each.id), self._relays.events_port(each)
                address = make_address(service, each, port, tier, events)
                keeps = self._probes.record(each.id).keeps
                addresses.append(replace(address, keeps=keeps))
        return PublishedService(
            service=service,
            route=make_route(service, self._caller.hash_key(service.id)),
            replicas=tuple(addresses),
        )

    def _stored(self) -> list[StoredService]:
        return [each.service for each in self._published.values()]

    def _wake_all(self) -> None:
        for each in self._published.values():
            self._wake(each.service)

    def _list_routes(self) -> tuple[ServiceRoute, ...]:
        return list_routes(self._stored(), self._caller.hash_key, shared=self._shared is not None)

    async def _set_services(self, link: GatewayLink) -> None:
        routes = self._list_routes()
        await link.ask(SetServices(services=routes))
        await self._send_credentials(link)

    async def _send_credentials(self, link: GatewayLink) -> None:
        """Tell the gateway the keys of the APIs that fallbacks name, if they have changed."""
        if self._secrets is None:
            return
        self._told_at = monotonic()
        wanted = {
            (service.project, each.api.secret or "")
            for service in self._stored()
            for each in service.spec.fallbacks
            if each.api is not None
        }
        if not wanted and self._told is None:
            return
        values: dict[str, str] = {}
        for project, name in sorted(wanted):
            try:
                found = await self._secrets.find(project, name)
            except StoreUnusable as error:
                _log.warning("a fallback cannot be used: %s", error)
                continue
            if found is not None:
                values[name_credential(project, name)] = found
        line = SetCredentials(values=values, private_targets=await self._secrets.read_targets())
        if self._told != (link, line):
            await link.ask(line)
            self._told = link, line

    async def _read(self) -> dict[str, ServiceFacts]:
        if self._link is None:
            return {}
        try:
            return _by_name(await self._link.ask(ReadStatistics()))
        except GatewayLost:
            return {}


def _spec_of(service: StoredService, replica: ServiceReplica) -> ServiceSpec:
    """Return the settings of a replica, which may be those of its group."""
    alone = as_revision(service, replica.revision)
    named = {each.name: each for each in alone.task.replica_groups}
    if (group := named.get(replica.group)) is None:
        return alone.spec
    return as_group(alone, group).spec


def _has_api(service: StoredService, router: ServiceReplica) -> bool:
    return has_api(find_group(as_revision(service, router.revision).task, router.group))


def _by_name(reply: ControlReply) -> dict[str, ServiceFacts]:
    return {each.name: each for each in reply.services or ()}


def make_traffic(facts: ServiceFacts) -> ServiceTraffic:
    recent = facts.arrivals_per_s[-_RECENT_S:]
    in_flight: dict[str, int] = {}
    for each in facts.replicas:  # a revision that was just promoted is listed twice
        in_flight[each.id] = in_flight.get(each.id, 0) + each.in_flight
    return view(
        ServiceTraffic,
        facts,
        timed=facts.answered,
        latency=facts.latency_us,
        batches=0 if facts.batches is None else facts.batches.formed,
        joined=0 if facts.batches is None else facts.batches.joined,
        per_s=sum(recent) / len(recent) if recent else 0.0,
        replicas=in_flight,
        tried=facts.canary,
        work={facts.epoch: facts.work} if facts.work else {},
        batch=None if facts.batches is None else facts.batches.fit,
    )
