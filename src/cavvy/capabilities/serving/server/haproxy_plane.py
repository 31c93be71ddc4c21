"""Runs HAProxy in front of the gateway, for services that HAProxy can serve without the gateway.

The server adds new replicas to HAProxy over HAProxy's runtime API. A new HAProxy process is started
only if the set of HAProxy's services, a certificate or the gateway's port changes. The new process
takes over the listening sockets of the previous process. The previous HAProxy process finishes its
requests, even if the server that started the process was killed.

`DirectRequests` counts the requests that HAProxy sends directly to replicas, without the gateway.
HAProxy counts requests separately for each HAProxy server. The names of HAProxy servers differ
between HAProxy processes, and a process loses its counts when it ends. So the counts are stored in
a file, by service, replica and HAProxy server. The total duration of the requests is estimated:
their number multiplied by the recent mean duration that HAProxy reports. The estimated duration of
the requests on one HAProxy server is at most the time since its counts were last read.
"""

import asyncio
import logging
import re
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from math import inf
from pathlib import Path
from secrets import token_hex
from signal import SIGKILL, SIGTERM, SIGUSR1
from time import monotonic

from cavvy.capabilities.serving.addresses import find_obstacle
from cavvy.capabilities.serving.bills import KeyWork, RequestWork
from cavvy.capabilities.serving.decide.traffic import ServiceTraffic
from cavvy.capabilities.serving.gateway.config import GatewayLimits, ReplicaAddress, ServiceRoute
from cavvy.capabilities.serving.gateway.haproxy.configuration import (
    HaproxyListener,
    is_direct,
    list_direct,
    make_ring,
    write_configuration,
)
from cavvy.capabilities.serving.gateway.haproxy.runtime import (
    HaproxyLoad,
    HaproxyRuntime,
    ServerRequests,
    list_arguments,
    make_environment,
    may_use_http2,
)
from cavvy.capabilities.serving.gateway.kept_counts import KeptCounts
from cavvy.capabilities.serving.gateway.own_values import OwnValues
from cavvy.capabilities.serving.server.listener import ServiceListener
from cavvy.client.state import write_private
from cavvy.domain.values import Struct, replace

_LOCAL = "127.0.0.1"
_START_S = 10.0
_END_S = 5.0
_PAUSE_S = 0.02
_log = logging.getLogger(__name__)


class DirectCount(Struct, frozen=True, kw_only=True):
    """The request counts of all HAProxy processes for a service, and the last statistics of the
    current process, which were read at `at_s`. `in_flight_s` is the sum of the times for which the
    requests in flight have run at least.
    """

    arrivals: int = 0
    answered: int = 0
    service_s: float = 0.0
    in_flight_s: float = 0.0
    at_s: float = 0.0
    last: HaproxyLoad = HaproxyLoad()


class StartedHaproxy(Struct, frozen=True, kw_only=True):
    """A HAProxy process of this server, and the file in which it lists its completed requests."""

    process: asyncio.subprocess.Process
    runtime: HaproxyRuntime
    ring: Path | None

    @property
    def ended(self) -> bool:
        return self.process.returncode is not None


class DirectRequests:
    """The counts of all HAProxy processes of this server."""

    def __init__(self, path: Path) -> None:
        self._kept = KeptCounts(path)
        self._read_at: dict[str, dict[str, float]] = {}  # by service and replica

    def note(self, service: str, found: Mapping[str, ServerRequests]) -> None:
        """Record the counts of requests that HAProxy reports for the replicas of a service."""
        now, before = monotonic(), self._read_at.get(service, {})
        for name, each in found.items():
            replica, _, server = name.rpartition(".")
            longest_s = now - before[replica] if replica in before else inf
            count = self._kept.find(service, replica, server)
            more = each.requests - count[0]
            if more > 0:
                count[1] += round(1e6 * min(more * each.mean_s, longest_s))
                count[0] = each.requests
        self._read_at[service] = {name.rpartition(".")[0]: now for name in found}
        known, current = self._kept.resume(service), self._read_at[service]
        gone = [replica for replica in known if replica not in current]
        for replica in gone[:-_GONE_KEPT]:
            self._kept.forget(service, replica)

    def describe(self, service: str) -> RequestWork:
        work = {
            replica: {
                "": KeyWork(
                    requests=sum(each[0] for each in counts.values()),
                    work_us=sum(each[1] for each in counts.values()),
                )
            }
            for replica, counts in self._kept.resume(service).items()
        }
        return {self._kept.epoch: work} if work else {}

    def keep_only(self, services: Iterable[str]) -> None:
        """Forget all other services."""
        kept = dict.fromkeys(services)
        self._kept.keep_only(kept)
        self._read_at = {name: times for name, times in self._read_at.items() if name in kept}

    def close(self) -> None:
        self._kept.close()


class HaproxyPlane:
    """Manages the process of HAProxy. `path` is the path of the runtime API's socket. Clients
    connect to `listener`."""

    def __init__(self, folder: Path, path: str, listener: ServiceListener, program: Path) -> None:
        self._folder, self._listener, self._program = folder, listener, program
        self._path = Path(path)
        self._http2 = may_use_http2(program)
        self._current: StartedHaproxy | None = None
        # former processes that finish their requests
        self._former: list[StartedHaproxy] = []
        self._runtime = HaproxyRuntime(self._path)
        self._serves: tuple[object, ...] = ()  # the settings with which the process was started
        self._set: dict[str, tuple[ReplicaAddress, ...]] = {}
        self._counts: dict[str, DirectCount] = {}
        self._requests: DirectRequests | None = None
        self._turn = asyncio.Lock()
        self.port = 0  # 0 while HAProxy does not run
        self._problem = ""  # why HAProxy could not be started at the last try

    async def keep(
        self,
        routes: Iterable[ServiceRoute],
        replicas: Mapping[str, tuple[ReplicaAddress, ...]],
        gateway_port: int,
    ) -> None:
        """Configure HAProxy to serve the services in `routes` with their replicas. Raises OSError,
        HaproxyRefused."""
        async with self._turn:
            routes = list(routes)
            requests = await self._open_requests()
            requests.keep_only(each.name for each in routes)
            direct = [each for each in routes if is_direct(each)]
            port = self.port or self._find_port()
            listener = self._make_listener(port, gateway_port)
            text = write_configuration(listener, tuple(direct), GatewayLimits())
            serves = (text, *self._read_stamps())
            await self._count_ended(requests)
            if self._current is None or serves != self._serves:
                self._problem = await self._start(text, port)
                if self._problem:
                    raise OSError(self._problem)
                self._serves, self.port = serves, port
            for route in direct:
                wanted = list_direct(replicas.get(route.name, ()))
                if self._set.get(route.name) != wanted:
                    most = route.concurrency
                    await asyncio.to_thread(self._runtime.set_replicas, route.name, wanted, most)
                    self._set[route.name] = wanted
                    self._take_served(requests)

    def find_problem(self) -> str:
        """Return why HAProxy cannot start, or "" if it runs, starts, or can start."""
        port = self._listener.port
        if self._problem or not port or self._current is not None or read_pid(self._runtime):
            return self._problem
        return self._find_obstacle(port)

    async def count(self, service: str, traffic: ServiceTraffic) -> ServiceTraffic:
        """Return `traffic` plus the requests that HAProxy passed directly to replicas."""
        if service not in self._set:
            return await self._add_work(service, traffic)
        with suppress(OSError):
            load = await asyncio.to_thread(self._runtime.read_load, service)
            self._counts[service] = add_load(
                self._counts.get(service, DirectCount()), load, traffic.at_s
            )
        traffic = await self._add_work(service, traffic)
        counted = self._counts.get(service)
        if counted is None:
            return replace(traffic, whole=False)
        return add_direct(traffic, counted, whole=all(each.ended for each in self._former))

    async def read_work(self, service: str) -> RequestWork:
        """Return the newest known counts of the requests that HAProxy has passed directly to the
        replicas.
        """
        requests = await self._open_requests()
        self._take_served(requests)
        return requests.describe(service)

    async def _add_work(self, service: str, traffic: ServiceTraffic) -> ServiceTraffic:
        return replace(traffic, work={**traffic.work, **await self.read_work(service)})

    async def _open_requests(self) -> DirectRequests:
        if self._requests is None:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            made = await asyncio.to_thread(DirectRequests, self._folder / "haproxy.counts")
            self._requests = self._requests or made
        return self._requests

    async def _read_served(self) -> None:
        with suppress(OSError):
            await asyncio.to_thread(self._runtime.read_served)
        if self._requests is not None:
            self._take_served(self._requests)

    def _take_served(self, requests: DirectRequests, runtime: HaproxyRuntime | None = None) -> None:
        for service, found in (runtime or self._runtime).take_served().items():
            requests.note(service, found)

    async def _count_ended(self, requests: DirectRequests) -> None:
        """Count the last requests of the processes that have ended, and forget these processes."""
        known = (*self._former, self._current)
        ended = [each for each in known if each is not None and each.ended]
        for each in ended:
            if each.ring is not None:
                with suppress(OSError):
                    await asyncio.to_thread(each.runtime.read_ended, each.ring)
                self._take_served(requests, each.runtime)
        self._former = [each for each in self._former if each not in ended]
        if self._current in ended:
            self._current = None

    async def _make_ring(self) -> Path | None:
        """Create the file for the next process. Before this server's first process, also count what
        the processes of former servers have listed.
        """
        if self._current is None and not self._former:
            for left in self._folder.glob("requests-*.ring"):
                with suppress(OSError):
                    await asyncio.to_thread(self._runtime.read_ended, left)
            if self._requests is not None:
                self._take_served(self._requests)
        ring = self._folder / f"requests-{token_hex(4)}.ring"
        try:
            await asyncio.to_thread(make_ring, ring)
        except OSError as error:
            _log.warning("requests of a killed HAProxy may be missing in bills: %s", error)
            return None
        return ring

    async def end(self, drain_s: float) -> None:
        """End HAProxy once its requests are answered, but after at most `drain_s` seconds. New
        connections are refused meanwhile.
        """
        await self._read_served()
        running = [each for each in (self._current, *self._former) if each is not None]
        await asyncio.gather(*(_end_process(each.process, drain_s) for each in running))
        if self._requests is not None:
            await self._count_ended(self._requests)
            self._requests.close()
            self._requests = None
        self._current, self._former, self._serves, self.port = None, [], (), 0
        self._set.clear()

    async def _start(self, text: str, port: int) -> str:
        """Start a HAProxy process that replaces the running process. Returns why the start failed,
        or "" on success. Raises OSError.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = self._folder / "haproxy.cfg"
        write_private(str(file), text.encode())
        await self._read_served()  # the statistics of the former process cannot be read later
        ring = await self._make_ring()
        former = await asyncio.to_thread(read_pid, self._runtime)
        command = list_arguments(self._program, file)
        if former:
            command += ["-x", str(self._path), "-sf", str(former)]
        with (self._folder / "haproxy.log").open("ab") as log:
            started = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=make_environment(ring),
            )
        if self._current is not None:
            self._former.append(self._current)
        self._runtime = HaproxyRuntime(self._path)
        self._current = StartedHaproxy(process=started, runtime=self._runtime, ring=ring)
        self._set.clear()
        for name, counted in self._counts.items():  # the new process counts from 0
            self._counts[name] = replace(counted, last=HaproxyLoad())
        return await self._await_start(started, port)

    async def _await_start(self, started: asyncio.subprocess.Process, port: int) -> str:
        """Return why HAProxy did not start, or "" once HAProxy answers. Raises OSError."""
        async with asyncio.timeout(_START_S):
            while await asyncio.to_thread(read_pid, self._runtime) != started.pid:
                if started.returncode is not None:
                    where = self._folder / "haproxy.log"
                    return self._find_obstacle(port) or f"HAProxy did not start; see {where}"
                await asyncio.sleep(_PAUSE_S)
        return ""

    def _find_obstacle(self, port: int) -> str:
        return find_obstacle(self._listener.host, port, reuse_port=True)  # as HAProxy listens

    def _make_listener(self, port: int, gateway_port: int) -> HaproxyListener:
        return HaproxyListener(
            host=self._listener.host,
            port=port,
            socket=self._path,
            gateway_host=_LOCAL,
            gateway_port=gateway_port,
            certificate=self._write_certificate(),
            http2=self._http2,
            signs=OwnValues(self._listener.owner).signs,
            certificates=Path(self._listener.folder) if self._listener.folder else None,
        )

    def _write_certificate(self) -> Path | None:
        """Write the certificate and its key to one file, as HAProxy requires. Returns the path."""
        if not self._listener.certificate:
            return None
        parts = (self._listener.certificate, self._listener.key)
        both = b"".join(Path(each).read_bytes() + b"\n" for each in parts)
        file = self._folder / "haproxy.pem"
        if not file.exists() or file.read_bytes() != both:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(str(file), both)
        return file

    def _read_stamps(self) -> tuple[object, ...]:
        """Return the certificate files' paths and times, which change with a renewal."""
        files = [Path(each) for each in (self._listener.certificate, self._listener.key) if each]
        if self._listener.folder:
            files += sorted(Path(self._listener.folder).glob("*.pem"))
        return tuple((str(each), each.stat().st_mtime_ns) for each in files)

    def _find_port(self) -> int:
        """Return HAProxy's port from the settings. If the settings name no port, return the last
        port if it is free or used by this server's HAProxy, otherwise any free port.
        """
        if self._listener.port:
            return self._listener.port
        file = self._folder / "haproxy.port"
        with suppress(OSError, ValueError):
            port = int(file.read_text())
            if read_pid(self._runtime) or _is_free(self._listener.host, port):
                return port
        with socket.socket() as found:
            found.bind((self._listener.host, 0))
            port = int(found.getsockname()[1])
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(str(file), str(port).encode())
        return port


async def _end_process(process: asyncio.subprocess.Process, drain_s: float) -> None:
    """End a HAProxy process: first after its requests, then at once."""
    for number, wait_s in ((SIGUSR1, drain_s), (SIGTERM, _END_S), (SIGKILL, None)):
        if process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            process.send_signal(number)
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await process.wait()


def add_load(counted: DirectCount, load: HaproxyLoad, at_s: float) -> DirectCount:
    """Return the counts after adding HAProxy's current statistics. The counters of a new HAProxy
    process start at 0.

    HAProxy does not report when requests started. Of the requests that were in flight before, at
    most as many have ended as were answered since; the others have run for the whole time between.
    """
    last = counted.last if load.arrivals >= counted.last.arrivals else HaproxyLoad()
    arrived = load.arrivals - last.arrivals
    answered = (load.arrivals - load.in_flight - load.backlog) - (
        last.arrivals - last.in_flight - last.backlog
    )
    stayed = min(load.in_flight, max(last.in_flight - max(answered, 0), 0))
    before_s = counted.in_flight_s / last.in_flight if stayed else 0.0
    return DirectCount(
        in_flight_s=stayed * (before_s + max(at_s - counted.at_s, 0.0)),
        at_s=at_s,
        arrivals=counted.arrivals + arrived,
        answered=counted.answered + max(answered, 0),
        service_s=counted.service_s + max(answered, 0) * load.answer_s,
        last=load,
    )


def add_direct(traffic: ServiceTraffic, counted: DirectCount, *, whole: bool) -> ServiceTraffic:
    """Return the sum of the traffic of the gateway and of HAProxy. HAProxy does not report how many
    of its waiting requests are late.
    """
    load, replicas = counted.last, dict(traffic.replicas)
    for name, count in load.replicas.items():
        replicas[name] = replicas.get(name, 0) + count
    return replace(
        traffic,
        arrivals=traffic.arrivals + counted.arrivals,
        answered=traffic.answered + counted.answered,
        started=traffic.started + counted.arrivals - load.backlog,
        service_s=traffic.service_s + counted.service_s,
        in_flight=traffic.in_flight + load.in_flight,
        in_flight_s=traffic.in_flight_s + counted.in_flight_s,
        backlog=traffic.backlog + load.backlog,
        per_s=traffic.per_s + load.per_s,
        replicas=replicas,
        whole=traffic.whole and whole,
    )


def read_pid(runtime: HaproxyRuntime) -> int:
    """Return the ID of the process that answers, or 0 if no process answers."""
    with suppress(OSError):
        found = re.search(r"^Pid: (\d+)$", runtime.command("show info"), re.MULTILINE)
        return int(found[1]) if found else 0
    return 0


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
        except OSError:
            return False
    return True


_GONE_KEPT = 32  # replicas that are no longer servers of HAProxy
