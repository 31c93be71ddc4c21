"""Makes the ports of replicas on other machines reachable. This machine listens on a port for each
replica, and relays the port's connections through a tunnel to the replica's node. Requests for a
managed endpoint are forwarded to the endpoint's provider.

The node's agent opens the tunnel to the server, as for `cavvy forward`, so relays work on every
provider. The port is open only while the tunnel is open and the program listens. A connection to a
closed port is refused before the gateway sends a request, so no request is lost.

Assigns replicas to tiers by the round trip between their node and a gateway.

The shortest of the last round trips is compared with the bounds of the tiers, because a busy
program or network can only make round trips longer. The tier changes only if the shortest round
trip is beyond the bound by a margin, so that a replica near a bound does not keep changing its
tier.
"""

import asyncio
import logging
from bisect import bisect_right
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from secrets import token_hex
from time import monotonic

from cavvy.agent.access.frames import CHUNK, EOF
from cavvy.api.exec_carrier import ExecCarrier
from cavvy.api.execs import JobExecs
from cavvy.api.peers import PeerServers
from cavvy.capabilities.serving.replicas import ServiceReplica
from cavvy.capabilities.serving.server.endpoint_relay import EndpointRelay
from cavvy.client.tunnel import (
    NodeTunnel,
    RemoteError,
    TunnelCarrier,
    TunnelChannel,
    TunnelLost,
)
from cavvy.domain.values import Struct
from cavvy.providers.abilities import AnswersRequests
from cavvy.server.doors import LOCAL, hold_port

_RANK = 0  # the rank that answers the requests of its replica
_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0  # seconds between two attempts to open a tunnel
_MEASURED_S = 10.0  # seconds between two measurements of the round trip to a replica
_log = logging.getLogger(__name__)

# upper bounds of the tiers in seconds: a zone, a region, a continent; all others are farther
BOUNDS_S = (0.005, 0.03, 0.1)
FARTHEST = len(BOUNDS_S)
_KEPT = 6  # round trips
_MARGIN = 1.25


class ReplicaRelays:
    """The relays of all replicas that run on other machines, keyed by the replica's ID. `notify`
    informs the agents of a gang that a session is requested.
    """

    def __init__(self, execs: JobExecs) -> None:
        self._execs = execs
        self._relays: dict[str, ReplicaRelay | EndpointRelay] = {}
        # returns the provider of an account if its replicas are managed endpoints
        self.find_endpoints: Callable[[str], AnswersRequests | None] = lambda account: None
        self.notify: Callable[[str], None] = lambda gang: None
        self.peers: PeerServers | None = None  # the agents may be connected to these servers

    def keep(self, service: str, replicas: Mapping[str, ServiceReplica]) -> None:
        """Keep relays for these replicas, and remove all other relays of the service."""
        for each in [one for one in self._relays.values() if one.service == service]:
            if each.id not in replicas:
                self._relays.pop(each.id).close()
        for replica in replicas.values():
            if replica.gang:
                self._keep_one(service, replica)

    def _keep_one(self, service: str, replica: ServiceReplica) -> None:
        known, find = self._relays.get(replica.id), partial(self.find_endpoints, replica.account)
        if find() is None:
            if known is None:
                self._relays[replica.id] = ReplicaRelay(service, replica, self._reach)
        elif not isinstance(known, EndpointRelay):  # its account may have been unknown
            if known is not None:
                known.close()
            self._relays[replica.id] = EndpointRelay(service, replica, find)

    def port(self, replica: ServiceReplica) -> int:
        """Return the port on this machine that leads to the replica; 0 while the port is
        unknown.
        """
        if not replica.gang:
            return replica.port
        relay = self._relays.get(replica.id)
        return 0 if relay is None else relay.port

    def events_port(self, replica: ServiceReplica) -> int:
        """Return the port on this machine that leads to the events of the replica; 0 if it
        publishes none."""
        if not replica.gang:
            return replica.events_port
        relay = self._relays.get(replica.id)
        return relay.events_port if isinstance(relay, ReplicaRelay) else 0

    def tier(self, replica_id: str) -> int:
        """Return the network distance of a replica, as a tier: 0 for this machine, and more for
        a longer round trip."""
        relay = self._relays.get(replica_id)
        if relay is None:
            return 0  # the replica runs on this machine
        # endpoints are reached through their provider's API, and this is not measured
        return (relay.round_trips.tier or 0) if isinstance(relay, ReplicaRelay) else FARTHEST

    def close(self) -> None:
        for each in self._relays.values():
            each.close()
        self._relays.clear()

    def _reach(self, replica: ServiceReplica) -> NodeTunnel:
        """Return an unopened tunnel to the node of a replica."""

        async def open_carrier(
            heard: Callable[[bytes], None], over: Callable[[str], None]
        ) -> TunnelCarrier:
            exec_id = token_hex(8) if self.peers is None else self.peers.make_id()
            session = self._execs.start(exec_id, replica.id, replica.gang, _RANK, [], session=True)
            self.notify(replica.gang)
            return ExecCarrier(self._execs, session, self.peers, heard=heard, over=over)

        return NodeTunnel(open_carrier)


class ReplicaRelay:
    """One replica's port on this machine. The port stays the same when the tunnel is reopened. The
    port stays reserved while the tunnel is closed, because the gateway can still send requests to
    the port. A second port leads to the replica's events, if it publishes any.
    """

    def __init__(
        self,
        service: str,
        replica: ServiceReplica,
        reach: Callable[[ServiceReplica], NodeTunnel],
    ) -> None:
        self.service, self.id = service, replica.id
        self.port = self.events_port = 0
        self.round_trips = RoundTrips()
        self._replica, self._reach = replica, reach
        self._writers: set[asyncio.StreamWriter] = set()
        self._servers: list[asyncio.Server] = []
        # the sockets do not listen, so connections are refused
        self._held = [(hold_port(), replica.port)]
        if replica.events_port:
            self._held.append((hold_port(), replica.events_port))
            self.events_port = int(self._held[1][0].getsockname()[1])
        self._closed = asyncio.Event()  # the socket no longer listens
        self._pause_s = _PAUSE_S
        self._task = asyncio.create_task(self._run())

    def close(self) -> None:
        self._task.cancel()
        for held, _ in self._held:
            held.close()

    async def _run(self) -> None:
        while True:
            try:
                async with self._reach(self._replica) as tunnel:
                    await self._serve(tunnel)
            except (OSError, TunnelLost) as error:
                extra = {"replica": self.id, "problem": str(error)}
                _log.info("the tunnel to a replica is opened again", extra=extra)
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    async def _serve(self, tunnel: NodeTunnel) -> None:
        """Relay connections until the tunnel is lost. Raises OSError, TunnelLost."""
        beside = [self._end_with(tunnel), self._measure(tunnel)]
        tasks = [asyncio.create_task(each) for each in beside]
        try:
            while not tunnel.lost.is_set():
                if not await self._find_program(tunnel):
                    await asyncio.sleep(_PAUSE_S)
                    continue
                self._closed.clear()
                for held, target in self._held:
                    server = await asyncio.start_server(
                        partial(self._carry, tunnel, target),
                        LOCAL,
                        held.getsockname()[1],
                        backlog=1024,
                        reuse_address=True,
                    )
                    self._servers.append(server)
                self.port = int(self._servers[0].sockets[0].getsockname()[1])
                self._pause_s = _PAUSE_S
                await self._closed.wait()
                self._refuse()
        finally:
            for task in tasks:
                task.cancel()
            self._refuse()
            for writer in list(self._writers):
                writer.transport.abort()
        raise TunnelLost(tunnel.problem or "the connection was closed")

    async def _end_with(self, tunnel: NodeTunnel) -> None:
        await tunnel.lost.wait()
        self._refuse()

    async def _measure(self, tunnel: NodeTunnel) -> None:
        """Measure the round trip regularly."""
        with suppress(OSError, TunnelLost):
            while True:
                await asyncio.sleep(_MEASURED_S)
                await self._find_program(tunnel)

    async def _find_program(self, tunnel: NodeTunnel) -> bool:
        """Return whether the program listens, and measure the round trip. Raises TunnelLost."""
        begun = monotonic()
        try:
            (await tunnel.connect(LOCAL, self._replica.port)).close()
        except RemoteError:
            return False
        self.round_trips = add_round_trip(self.round_trips, monotonic() - begun)
        return True

    def _refuse(self) -> None:
        """Stop listening."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        self._closed.set()

    async def _carry(
        self,
        tunnel: NodeTunnel,
        target: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Relay one connection to a port of the node. If the program has ended, the port refuses
        new connections before the gateway notices that this connection has ended. The closed port
        prevents the gateway from repeating a failed request on this port.
        """
        self._writers.add(writer)
        sending = None
        try:
            channel = tunnel.begin_connect(LOCAL, target)
            sending = asyncio.create_task(_send(reader, channel))
            while (piece := await channel.read()) is not None and piece[0] != EOF:
                writer.write(piece[1])
                await writer.drain()
            if not reader.at_eof() and not await self._find_program(tunnel):
                self._refuse()
        except TunnelLost:
            self._refuse()
        except OSError:  # the gateway has closed the connection
            pass
        finally:
            if sending is not None:
                sending.cancel()
                channel.close()
            self._writers.discard(writer)
            writer.close()


async def _send(reader: asyncio.StreamReader, channel: TunnelChannel) -> None:
    with suppress(OSError):
        while data := await reader.read(CHUNK):
            await channel.write(data)
        channel.end()


class RoundTrips(Struct, frozen=True, kw_only=True):
    """The last round trips to a replica in seconds, oldest first, and the tier of the replica. The
    tier is None until the first round trip has been measured.
    """

    last: tuple[float, ...] = ()
    tier: int | None = None


def add_round_trip(known: RoundTrips, seconds: float) -> RoundTrips:
    """Add a measurement to the round trips, and return them with the updated tier."""
    last = (*known.last, seconds)[-_KEPT:]
    shortest = min(last)
    if known.tier is None:
        return RoundTrips(last=last, tier=bisect_right(BOUNDS_S, shortest))
    least = bisect_right(BOUNDS_S, shortest / _MARGIN)
    most = bisect_right(BOUNDS_S, shortest * _MARGIN)
    return RoundTrips(last=last, tier=min(max(known.tier, least), most))
