"""The HAProxy data plane keeps the contract of both planes."""

import asyncio
import os
import signal
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.contract.gateway_model_suite import ModelSuite
from tests.contract.gateway_process import GatewayProcess, describe_replicas, wait_for
from tests.contract.gateway_suite import (
    CANARY,
    KEYED,
    KEYED_MODEL,
    MODEL,
    RATED,
    SERVICE,
    GatewaySuite,
    replicas,
)
from tests.contract.http_talk import Background, ask
from tests.contract.replica_stand_in import ReplicaStandIn
from tests.system.packages import install_packages
from tests.system.ports import free_port
from tests.waits import START_S

from cavvy.api.serving.haproxy_plane import HaproxyPlane
from cavvy.api.serving.listener import ServiceListener
from cavvy.control.decide.traffic import ServiceTraffic
from cavvy.gateway.config import ReplicaAddress, ServiceRoute
from cavvy.gateway.haproxy.configuration import HOLD, name_backend
from cavvy.gateway.haproxy.program import HaproxyMissing, find_haproxy
from cavvy.gateway.haproxy.runtime import HaproxyRuntime


class HaproxyPlaneProcess(GatewayProcess):
    lacks = {  # noqa: RUF012
        "half-closed": "HAProxy takes a half-closed client for one that has left",
        "x-private": "HAProxy passes fields on that Connection names",
        "both": "HAProxy ignores the length of a response with both, and writes one reading",
        "both lengths": "HAProxy ignores the length of a request with both, and writes one reading",
        "NUL in a value": "HAProxy passes NUL in values",
        "bare LF": "HAProxy reads LF as the end of a line, and writes CRLF",
        "a folded line": "HAProxy joins folded lines",
        "two spaces": "HAProxy reads several spaces as one",
        "version 2": "HAProxy does not refuse a version that it does not know",
    }

    def __init__(self, program: Any, tls: dict[str, str] | None = None, **config: Any) -> None:
        super().__init__(behind_proxy=True, **config)
        self._gateway_port, self.port = self.port, free_port()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        listener = ServiceListener(port=self.port, **(tls or {}))
        self.program = program
        self.plane = HaproxyPlane(self.folder, str(self.folder / "haproxy"), listener, program)
        self._routes = msgspec.convert(config["services"], tuple[ServiceRoute, ...])
        self._replicas: dict[str, tuple[ReplicaAddress, ...]] = {}
        self.keep()

    def do(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(START_S)

    def keep(self) -> None:
        """As the server does once a second, and when something changes."""
        self.do(self.plane.keep(self._routes, self._replicas, self._gateway_port))

    def add_route(self, route: dict[str, Any]) -> None:
        self._routes = (*self._routes, msgspec.convert(route, ServiceRoute))
        self.keep()

    def count(self, service: str) -> ServiceTraffic:
        traffic: ServiceTraffic = self.do(self.plane.count(service, ServiceTraffic(at_s=0)))
        return traffic

    def set_replicas(self, service: str, replicas: Sequence[ReplicaStandIn], **more: Any) -> None:
        super().set_replicas(service, replicas, **more)
        if service == "svc":
            rows = describe_replicas(replicas, **more)
            self._replicas[service] = msgspec.convert(rows, tuple[ReplicaAddress, ...])
            self.keep()

    def count_waiting(self, service: str) -> int:
        held: int = self.facts(service)["backlog"]
        return held + self.count(service).backlog

    def stop_checks(self, service: str) -> None:
        runtime, backend = HaproxyRuntime(self.folder / "haproxy"), name_backend(service)
        for line in runtime.command("show stat").splitlines():
            group, server, *_ = line.split(",")
            if group == backend and server not in (HOLD, "BACKEND"):
                runtime.command(f"disable health {backend}/{server}")

    def remove(self) -> None:
        self.do(self.plane.end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_S)
        self._loop.close()
        super().remove()


@pytest.fixture(scope="module")
def plane() -> Iterator[HaproxyPlaneProcess]:
    try:
        program = find_haproxy()
    except HaproxyMissing as error:
        if why := install_packages(["haproxy"]):
            pytest.skip(f"{error}; {why}")
        program = find_haproxy()
    plane = HaproxyPlaneProcess(
        program, services=(SERVICE, KEYED, RATED, MODEL, KEYED_MODEL, CANARY)
    )
    yield plane
    plane.remove()


class TestHaproxy(GatewaySuite, ModelSuite):
    pass


__all__ = ["plane", "replicas"]  # fixtures


def find_haproxies(plane: HaproxyPlaneProcess) -> list[int]:
    config = str(plane.folder / "haproxy.cfg").encode()
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if config in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found


def test_a_killed_process_is_started_again_with_its_services(
    plane: HaproxyPlaneProcess, replicas: list[ReplicaStandIn]
) -> None:
    plane.set_replicas("svc", replicas[:2])
    before = plane.count("svc")
    assert ask(plane.port, "GET", "/echo").status == 200
    # a request counts as answered once HAProxy has closed its session, just after the last byte
    wait_for(lambda: plane.count("svc").answered == before.answered + 1)
    counted = plane.count("svc")
    assert counted.arrivals == before.arrivals + 1
    [pid] = find_haproxies(plane)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not find_haproxies(plane))

    def revive() -> bool:
        plane.keep()  # the plane learns a moment later that its process has ended
        return bool(find_haproxies(plane))

    wait_for(revive)
    # more than the killed process has counted, so that its end does not show in the counts
    more = counted.arrivals + 6
    assert {ask(plane.port, "GET", "/echo").json["replica"] for _ in range(more)} == {
        each.name for each in replicas[:2]
    }
    after = plane.count("svc")
    assert after.arrivals == counted.arrivals + more, "what the killed process counted is not lost"


def test_a_503_of_a_replica_is_not_taken_for_one_of_haproxy(
    plane: HaproxyPlaneProcess, replicas: list[ReplicaStandIn]
) -> None:
    plane.set_replicas("svc", replicas[:1])
    assert ask(plane.port, "POST", "/status?code=503").status == 503
    gone = [ReplicaStandIn(name=name, port=free_port()) for name in ("gone", "away")]
    plane.set_replicas("svc", gone)
    plane.stop_checks("svc")
    # Both refuse the connection, so HAProxy answers itself. With checks, HAProxy may find out about
    # both in the second before the next try, and pass the request on to the gateway.
    reply = ask(plane.port, "POST", "/echo", b"x")
    assert (reply.status, reply.json["error"]["code"]) == (502, "replica-lost")
    assert reply.headers["x-request-id"] == reply.json["error"]["request_id"]
    assert "x-cavvy-lost" not in reply.headers


def test_another_set_of_services_loses_no_request(
    plane: HaproxyPlaneProcess, replicas: list[ReplicaStandIn]
) -> None:
    for each in replicas:
        each.reset()
    plane.set_replicas("svc", replicas[:1])
    [former] = find_haproxies(plane)
    held = Background(ask, plane.port, "GET", "/hold")
    wait_for(lambda: replicas[0].in_flight == 1)
    plane.add_route({"name": "more", "hosts": ["more.example"]})
    assert len(find_haproxies(plane)) == 2
    assert ask(plane.port, "GET", "/echo").json["replica"] == replicas[0].name
    assert not plane.count("svc").whole, "the former process may have requests in flight"
    replicas[0].release.set()
    assert held.result().status == 200
    wait_for(lambda: former not in find_haproxies(plane))
    wait_for(lambda: plane.count("svc").whole)


def test_requests_that_haproxy_passes_on_are_counted_by_replica(
    plane: HaproxyPlaneProcess, replicas: list[ReplicaStandIn]
) -> None:
    """The counts outlive HAProxy and the server that reads them. Requests after the last reading of
    a killed HAProxy are lost.
    """

    def count() -> int:
        work = plane.count("svc").work
        return sum(
            each.requests for of in work.values() for keys in of.values() for each in keys.values()
        )

    plane.set_replicas("svc", replicas[:2])
    before = count()
    for _ in range(5):
        assert ask(plane.port, "GET", "/echo").status == 200
    assert count() == before + 5
    (former,) = plane.count("svc").work
    [pid] = find_haproxies(plane)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not find_haproxies(plane))

    def revive() -> bool:
        plane.keep()
        return bool(find_haproxies(plane))

    wait_for(revive)
    for _ in range(3):
        assert ask(plane.port, "GET", "/echo").status == 200
    assert count() == before + 8
    plane.do(plane.plane.end())
    plane.keep()
    assert ask(plane.port, "GET", "/echo").status == 200
    assert count() == before + 9
    work = plane.count("svc").work
    assert [*work] == [former]
    assert all(each[""].work_us > 0 for each in work[former].values() if each[""].requests)
