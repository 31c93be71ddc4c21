"""The gateway's entry point, which manages the clients' connections and the services."""

import asyncio
import re
import time
from collections.abc import Iterable
from itertools import count
from time import monotonic

from cavvy.domain.host_names import host_name, is_loopback_name
from cavvy.gateway.admission import (
    admit_client,
    refuse_closed,
    refuse_page,
    refuse_residency,
    refuse_size,
)
from cavvy.gateway.config import (
    GatewayConfig,
    GatewayConfigError,
    ReplicaAddress,
    ServiceRoute,
    check_routes,
)
from cavvy.gateway.deferred import RESULTS, DeferredCalls, DeferredRequest, ResultRequest
from cavvy.gateway.exchange import Exchange
from cavvy.gateway.heads import NO_LENGTH, HeadMemo, RequestHead
from cavvy.gateway.inbound import InboundConnection, OpenRequest
from cavvy.gateway.kept_counts import KeptCounts
from cavvy.gateway.model_route import ModelRoutes, read_model_path
from cavvy.gateway.other_origins import is_preflight, may_call
from cavvy.gateway.own_answers import AnswerCode
from cavvy.gateway.own_values import OwnValues
from cavvy.gateway.preferences import Preferences, read_prefer
from cavvy.gateway.redirects import misses_slash, write_redirect
from cavvy.gateway.routing import Routes, strip_prefix
from cavvy.gateway.service_queue import ServiceQueue
from cavvy.gateway.statistics import ServiceFacts

_KNOWN_HOSTS = 1000
_EXPIRE_EVERY = 60  # ticks
_NO_PREFERENCES = Preferences()
_REQUEST_ID = re.compile(rb"[0-9A-Za-z-]{1,100}")


class Door:
    def __init__(
        self, config: GatewayConfig, *, start: str, calls: DeferredCalls, kept: KeptCounts
    ) -> None:
        self.limits = config.limits
        self.memo = HeadMemo(config.limits, OwnValues(config.owner))
        self.stopping = False
        self.services: dict[str, ServiceQueue] = {}
        self.cold: set[str] = set()  # services that need a replica and are not reported yet
        self.cold_told = asyncio.Event()
        self._routes: Routes[ServiceQueue] = Routes(())
        self._models = ModelRoutes(self._open_model, config.limits)
        self._connections: set[InboundConnection] = set()
        self._scheme = b"http" if config.tls is None else b"https"
        self._behind_proxy = config.behind_proxy
        self._names = tuple(each.lower() for each in config.names)  # public ones
        self._any_name = config.any_name or not is_loopback_name(config.host)
        self._known_hosts: dict[bytes, bool] = {}  # whether requests with this Host are answered
        self._start = start.encode() + b"-"  # prefix of request IDs; differs between processes
        self._numbers = count(1)
        self._calls, self._kept = calls, kept
        self._ticks = 0

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
            new = services[route.name] = ServiceQueue(route, self.memo, self._tell_cold, self._kept)
            if old is None:
                new.resume_work()
            else:
                new.adopt(old)
        gone, self.services = self.services, services
        self._routes = Routes((service.route, service) for service in services.values())
        self._models.set_services(services.values())
        self._known_hosts.clear()
        for old in gone.values():
            old.close()
        self._kept.keep_only(services)

    def set_replicas(self, name: str, addresses: Iterable[ReplicaAddress]) -> None:
        """Raises GatewayConfigError."""
        service = self.services.get(name)
        if service is None:
            raise GatewayConfigError(f"there is no service {name}")
        service.set_replicas(addresses)

    def describe(self) -> tuple[ServiceFacts, ...]:
        return tuple(service.describe() for service in self.services.values())

    def tick(self) -> None:
        """Called once a second."""
        now = monotonic()
        for connection in tuple(self._connections):
            connection.check(now)
        self._calls.check(now)
        for service in self.services.values():
            service.counters.end_second()
        self.keep_work()
        self._ticks += 1
        if self._ticks % _EXPIRE_EVERY == 0:
            self._calls.expire()

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
        self.cold_told.clear()
        return found

    def _tell_cold(self, name: str) -> None:
        self.cold.add(name)
        self.cold_told.set()

    def count_connections(self) -> int:
        return len(self._connections)

    def close_idle(self) -> None:
        """Close idle connections, because the gateway stops. A connection with an open request
        closes after the response.
        """
        self.stopping = True
        for connection in tuple(self._connections):
            connection.close_idle()

    def refuse_waiting(self) -> None:
        """Refuse the requests that wait for a replica, because the gateway stops now. Deferred
        calls wait for the next gateway.
        """
        for connection in tuple(self._connections):
            connection.refuse_waiting()

    # what clients' connections call

    def enter(self, connection: InboundConnection) -> bool:
        """Register a client connection; return False if the gateway has too many connections."""
        self._connections.add(connection)
        return len(self._connections) <= self.limits.connections

    def leave(self, connection: InboundConnection) -> None:
        self._connections.discard(connection)

    def make_request_id(self) -> bytes:
        return b"%b%x" % (self._start, next(self._numbers))

    def find_request_id(self, head: RequestHead) -> bytes:
        """Return the ID that the proxy in front of the gateway gave the request, or a new ID."""
        if self._behind_proxy and _REQUEST_ID.fullmatch(head.request_id):
            return head.request_id
        return self.make_request_id()

    def find_client(self, head: RequestHead, address: bytes) -> bytes:
        """Return the client's address; `address` is the address of the connection's other end."""
        if self._behind_proxy and head.forwarded_for:
            return head.forwarded_for.rpartition(b",")[2].strip()
        return address

    def open_request(
        self, connection: InboundConnection, head: RequestHead, now: float
    ) -> OpenRequest | None:
        """Return the request of a head, or None if the request was refused."""
        service = self._routes.find(head.host, head.target)
        if (service is not None or read_model_path(head)) and not self._answers(head.host):
            self._refuse_host(connection, head)
            return None
        if service is None:
            return self._open_unrouted(connection, head, now)
        route = service.route
        # a project or service named v1 must not get the requests, and the keys, that are for models
        if route.prefix and read_model_path(head):
            return self._open_unrouted(connection, head, now)
        target = below = head.target
        if route.prefix:
            if route.strip_prefix and misses_slash(head, route):
                connection.shares = bool(service.keys and head.origin)
                connection.redirect(write_redirect(head, route), head)
                return None
            below = strip_prefix(target, route.prefix.encode())
            target = below if route.strip_prefix else target
        return self._open(connection, service, head, target, below, now)

    def _open_model(
        self,
        connection: InboundConnection,
        service: ServiceQueue,
        head: RequestHead,
        target: bytes,
        now: float,
    ) -> OpenRequest | None:
        return self._open(connection, service, head, target, target, now)

    def _answers(self, host: bytes) -> bool:
        """Return whether the gateway answers requests with this Host. A loopback address answers
        only to names that no web site can have.
        """
        known = self._known_hosts.get(host)
        if known is None:
            name = host_name(host.decode("latin-1"))
            known = self._any_name or name in self._names or is_loopback_name(name) or not host
            known = known or self._routes.has_host(name)
            if len(self._known_hosts) >= _KNOWN_HOSTS:
                self._known_hosts.clear()
            self._known_hosts[host] = known
        return known

    def _refuse_host(self, connection: InboundConnection, head: RequestHead) -> None:
        message = (
            f"{head.host.decode('latin-1')} is not a name of this gateway, which serves this "
            "machine as 127.0.0.1 or localhost; if a proxy passes this name on, set services.name "
            "to it"
        )
        connection.refuse(421, AnswerCode.OTHER_HOST, message, head)

    def _open_unrouted(
        self, connection: InboundConnection, head: RequestHead, now: float
    ) -> OpenRequest | None:
        request = self._models.answer(connection, head, now, time.time())
        if not isinstance(request, bool):
            return request
        connection.refuse(
            404, AnswerCode.NO_SERVICE, "no service has this host name and path", head
        )
        return None

    def _open(
        self,
        connection: InboundConnection,
        service: ServiceQueue,
        head: RequestHead,
        target: bytes,
        below: bytes,
        now: float,
    ) -> OpenRequest | None:
        """Open a request of the service. The replica receives `target`; `below` is the part of the
        path after the service's prefix.
        """
        route = service.route
        if (head.origin or head.fetch_site) and not self._admit_page(connection, service, head):
            return None
        key_id = self._admit(connection, service, head, below, now)
        if key_id is None:
            return None
        if below.startswith(RESULTS) and head.length == 0:
            call_id = below[len(RESULTS) :].decode()
            return ResultRequest(self._calls, connection, service, head, key_id, call_id)
        if route.closed:
            refuse_closed(connection, service, head)
            return None
        places = service.keys.bind(head, key_id) if key_id else head.places
        if places and not service.may_stay(places):
            refuse_residency(connection, service, head, places)
            return None
        preferences = read_prefer(head.prefer) if head.prefer else _NO_PREFERENCES
        if preferences.respond_async and not head.upgrade:
            about = self._write_forwarded(connection, service, head)
            return DeferredRequest(self._calls, connection, service, head, key_id, target, about)
        exchange = self._make_exchange(connection, service, head, target, now)
        if key_id:
            exchange.key_id = key_id
            exchange.places = places
        if preferences.wait_s is not None:
            exchange.wait_s = min(preferences.wait_s, route.wait_s)
        return exchange

    def _admit_page(
        self, connection: InboundConnection, service: ServiceQueue, head: RequestHead
    ) -> bool:
        """Return whether the page of a browser may call the service. Otherwise, or if the request
        only asks for this permission, the request is answered.
        """
        route, keyed = service.route, bool(service.keys)
        connection.shares = False
        if not may_call(head, route, keyed, self._names):
            refuse_page(connection, service, head)
            return False
        if route.origins and not keyed and is_preflight(head):
            connection.permit(head)
            return False
        return True

    def _admit(
        self,
        connection: InboundConnection,
        service: ServiceQueue,
        head: RequestHead,
        below: bytes,
        now: float,
    ) -> str | None:
        """Return the ID of the request's key, "" if the service needs no key, or None if the
        request was refused.
        """
        key_id: str | None = ""
        connection.shares = bool(head.origin and (service.keys or service.route.origins))
        if service.guarded:
            key_id = admit_client(connection, service, head, below, now)
        if key_id is not None and head.length > service.route.body_max:
            refuse_size(connection, service, head)
            return None
        return key_id

    def _make_exchange(
        self,
        connection: InboundConnection,
        service: ServiceQueue,
        head: RequestHead,
        target: bytes,
        now: float,
    ) -> Exchange:
        exchange = Exchange(
            connection,
            service,
            head,
            self._write_head(connection, service, head, target),
            now,
            self.limits.replay_bytes,
        )
        if head.expect:
            exchange.tells = True
        return exchange

    def _write_head(
        self,
        connection: InboundConnection,
        service: ServiceQueue,
        head: RequestHead,
        target: bytes,
    ) -> bytes:
        """Return the head that is sent to the replica."""
        more = b""
        if head.authorization or head.api_key:
            more = service.list_credentials(head)
        if head.length == NO_LENGTH:
            more += b"Transfer-Encoding: chunked\r\n"
        if head.upgrade:
            more += b"Connection: upgrade\r\nUpgrade: %b\r\n" % head.upgrade
        return b"%b %b HTTP/1.1\r\n%b%bX-Request-Id: %b\r\n%b\r\n" % (
            head.method,
            target,
            head.fields,
            more,
            connection.request_id,
            self._write_forwarded(connection, service, head),
        )

    def _write_forwarded(
        self, connection: InboundConnection, service: ServiceQueue, head: RequestHead
    ) -> bytes:
        """Return the header fields that inform the replica about the client's connection, and about
        the part of the path that the gateway removed.
        """
        scheme, addresses = self._scheme, head.forwarded_for
        if self._behind_proxy and addresses:
            scheme = head.forwarded_proto or scheme
        else:
            addresses = addresses + b", " + connection.peer if addresses else connection.peer
        fields = b"X-Forwarded-Proto: %b\r\nX-Forwarded-For: %b\r\n" % (scheme, addresses)
        if prefix := service.route.removed_prefix:
            fields += b"X-Forwarded-Prefix: %b\r\n" % prefix.encode()
        return fields
