"""Finds the service of each request, and holds the services."""

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any, Protocol, cast

from cavvy.capabilities.serving.gateway.admission import Admission
from cavvy.capabilities.serving.gateway.config import (
    GatewayConfig,
    GatewayConfigError,
    ReplicaAddress,
    ServiceRoute,
    check_routes,
)
from cavvy.capabilities.serving.gateway.deferred import DeferredCalls
from cavvy.capabilities.serving.gateway.fallbacks import Fallbacks
from cavvy.capabilities.serving.gateway.heads import HeadMemo, RequestHead
from cavvy.capabilities.serving.gateway.kept_counts import KeptCounts
from cavvy.capabilities.serving.gateway.own_answers import Answer, AnswerCode, OwnAnswer
from cavvy.capabilities.serving.gateway.own_values import OwnValues
from cavvy.capabilities.serving.gateway.redirects import misses_slash, write_redirect
from cavvy.capabilities.serving.gateway.routing import Routes, strip_prefix
from cavvy.capabilities.serving.gateway.seams import ClientRequest, OpenRequest
from cavvy.capabilities.serving.gateway.service_queue import ServiceQueue
from cavvy.capabilities.serving.gateway.statistics import ServiceFacts
from cavvy.capabilities.serving.gateway.traces import RequestTraces
from cavvy.domain.targets import host_name, is_loopback_name
from cavvy.frame.discover import load_all

_KNOWN_HOSTS_MAX = 1000
_REQUEST_ID = re.compile(rb"[0-9A-Za-z-]{1,100}")
_NO_SERVICE = OwnAnswer(404, AnswerCode.NO_SERVICE, "no service has this host name and path")

Open = Callable[[ClientRequest, ServiceQueue], OpenRequest | Answer]


class SharedPaths(Protocol):
    """Paths of the gateway that belong to no single service, such as those of models. A capability
    makes them from the gateway's configuration, and what opens a request at a service.
    """

    def set_services(self, services: Iterable[ServiceQueue]) -> None:
        """Learn which services there are."""

    def find(self, head: RequestHead) -> Any | None:
        """Return which of these paths a request is for, or None. They take precedence over a
        service whose path prefix matches the request.
        """

    def open_request(self, request: ClientRequest, at: Any) -> OpenRequest | Answer | None:
        """Return the open request for what `find` has found, or its answer, or None if it is one of
        an unknown path.
        """

    def explain(self, head: RequestHead) -> Answer | None:
        """Return the answer to a request that is for none of them, but resembles one, or None."""

    def tick(self, now: float) -> None:
        """Called once a second, with the monotonic time."""

    def stop(self) -> None:
        """Begin no more work of its own."""

    async def close(self) -> None:
        """End what it does."""


class Door:
    """Opens each request at the service that its host name, its path or its model names."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        start: str,
        calls: DeferredCalls,
        kept: KeptCounts,
        traces: RequestTraces | None = None,
    ) -> None:
        self.memo = HeadMemo(config.limits, OwnValues(config.owner))
        self.services: dict[str, ServiceQueue] = {}
        self.cold: set[str] = set()  # services that need a replica and are not reported yet
        self.cold_event = asyncio.Event()
        self.fallbacks = Fallbacks(self.memo, lambda name: self.services.get(name))
        self._admission = Admission(config, calls, self.fallbacks, traces)
        self._routes: Routes[ServiceQueue] = Routes(())
        self._state = Path(config.state)
        self.shared = find_shared_paths(config, self._admission.open)
        self._behind_proxy = config.behind_proxy
        self._any_name = config.any_name or not is_loopback_name(config.host)
        self._known_hosts: dict[bytes, bool] = {}  # whether requests with this Host are answered
        self._start = start.encode() + b"-"  # prefix of request IDs; differs between processes
        self._numbers = count(1)
        self._kept = kept

    # Methods that the process and the control socket call

    def set_services(self, routes: tuple[ServiceRoute, ...]) -> None:
        """Replace the services. Services that exist before and after this call keep their replicas
        and requests. Raises GatewayConfigError.
        """
        check_routes(routes)
        services = {}
        for route in routes:
            old = self.services.pop(route.name, None)
            if old is not None and old.route == route:
                services[route.name] = old
                continue
            state = self._state if old is None else None
            new = ServiceQueue(route, self.memo, self._tell_cold, self._kept, state)
            services[route.name] = new
            if old is None:
                new.resume_work()
            else:
                new.adopt(old)
        gone, self.services = self.services, services
        self._routes = Routes((service.route, service) for service in services.values())
        if self.shared is not None:
            self.shared.set_services(services.values())
        self._known_hosts.clear()
        for old in gone.values():
            old.close()
            old.meters.remove()
        self._kept.keep_only(services)
        self.fallbacks.keep_only(services)

    def set_replicas(self, name: str, addresses: Iterable[ReplicaAddress]) -> None:
        """Raises GatewayConfigError."""
        service = self.services.get(name)
        if service is None:
            raise GatewayConfigError(f"there is no service {name}")
        service.set_replicas(addresses)

    def count_elsewhere(self, name: str, used: Mapping[str, tuple[int, int]]) -> None:
        """Count what other gateways have served in the limits of keys."""
        if (service := self.services.get(name)) is not None:
            service.count_elsewhere(used)

    def describe(self) -> tuple[ServiceFacts, ...]:
        return tuple(service.describe() for service in self.services.values())

    def end_second(self) -> None:
        """Called once a second."""
        for service in self.services.values():
            service.counters.end_second()
        self.keep_work()

    def keep_work(self) -> None:
        """Store the replica time that each client's requests have used so far."""
        for service in self.services.values():
            service.keep_work()

    def take_cold(self) -> tuple[str, ...]:
        """Return the services that have no replica but have received a request since the last call
        of this method.
        """
        found = tuple(sorted(self.cold))
        self.cold.clear()
        self.cold_event.clear()
        return found

    def _tell_cold(self, name: str) -> None:
        self.cold.add(name)
        self.cold_event.set()

    # what clients' connections call

    def make_request_id(self) -> bytes:
        return b"%b%x" % (self._start, next(self._numbers))

    def open_request(self, request: ClientRequest) -> OpenRequest | Answer:
        """Return the open request, or the answer to a request that is not opened."""
        head = request.head
        request.id = self.make_request_id()
        if self._behind_proxy:
            _trust_proxy(request)
        service = self._routes.find(head.host, head.target)
        if service is None:
            return self._open_unrouted(request)
        if not self._known_hosts.get(head.host) and not self._answers(head.host):
            return _refuse_host(head)
        route = service.route
        if route.prefix:
            # a project or service named v1 must not get the requests, and the keys, that are for
            # models
            if self.shared is not None and self.shared.find(head) is not None:
                return self._open_unrouted(request)
            if route.strip_prefix and misses_slash(head, route):
                request.shares = bool(service.keys and head.origin)
                return write_redirect(head, route)
            request.below = strip_prefix(head.target, route.prefix.encode())
            if route.strip_prefix:
                request.target = request.below
        return self._admission.open(request, service)

    def _open_unrouted(self, request: ClientRequest) -> OpenRequest | Answer:
        """Open a request whose path belongs to no single service."""
        if self.shared is None:
            return _NO_SERVICE
        at = self.shared.find(request.head)
        if at is None:
            return self.shared.explain(request.head) or _NO_SERVICE
        if not self._answers(request.head.host):
            return _refuse_host(request.head)
        return self.shared.open_request(request, at) or _NO_SERVICE

    def _answers(self, host: bytes) -> bool:
        """Return whether the gateway answers requests with this Host. A loopback address answers
        only to names that no web site can have.
        """
        known = self._known_hosts.get(host)
        if known is None:
            name, names = host_name(host.decode("latin-1")), self._admission.names
            known = self._any_name or name in names or is_loopback_name(name) or not host
            known = known or self._routes.has_host(name)
            if len(self._known_hosts) >= _KNOWN_HOSTS_MAX:
                self._known_hosts.clear()
            self._known_hosts[host] = known
        return known


def find_shared_paths(config: GatewayConfig, admit: Open) -> SharedPaths | None:
    """Return the paths that belong to no single service, or None if no capability has any."""
    for _, make in load_all(lambda each: (each.gateway_paths,) if each.gateway_paths else ()):
        return cast(SharedPaths, make(config, admit))
    return None


def _trust_proxy(request: ClientRequest) -> None:
    """Use the ID and the client's address that the proxy in front of the gateway states."""
    head = request.head
    if _REQUEST_ID.fullmatch(head.request_id):
        request.id = head.request_id
    if head.forwarded_for:
        request.client = head.forwarded_for.rpartition(b",")[2].strip()


def _refuse_host(head: RequestHead) -> OwnAnswer:
    text = (
        f"{head.host.decode('latin-1')} is not a name of this gateway, which serves this "
        "machine as 127.0.0.1 or localhost; if a proxy passes this name on, set services.name "
        "to it"
    )
    return OwnAnswer(421, AnswerCode.OTHER_HOST, text)
