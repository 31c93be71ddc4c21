"""The HAProxy data plane keeps the contract of both planes."""

import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
from tests.contract.gateway_process import GatewayProcess, wait_for
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
from tests.contract.replica_stand_in import ReplicaStandIn
from tests.system.packages import install_packages
from tests.system.ports import free_port
from tests.system.tied import start_tied

from cavvy.gateway.config import GatewayLimits, ReplicaAddress, ServiceRoute
from cavvy.gateway.haproxy.configuration import HaproxyListener, write_configuration
from cavvy.gateway.haproxy.program import HaproxyMissing, find_haproxy, is_ready, list_arguments
from cavvy.gateway.haproxy.runtime import HaproxyRuntime


class HaproxyPlane(GatewayProcess):
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

    def __init__(self, program: Any, **config: Any) -> None:
        super().__init__(**config)
        self._gateway_port, self.port = self.port, free_port()
        socket = self.folder / "haproxy"
        listener = HaproxyListener(
            host="127.0.0.1",
            port=self.port,
            socket=socket,
            gateway_host="127.0.0.1",
            gateway_port=self._gateway_port,
        )
        services = msgspec.convert(config["services"], tuple[ServiceRoute, ...])
        path = self.folder / "haproxy.cfg"
        path.write_text(write_configuration(listener, services, GatewayLimits()))
        self.haproxy = start_tied(list_arguments(program, path), stderr=subprocess.DEVNULL)
        self.runtime = HaproxyRuntime(socket)
        wait_for(lambda: is_ready(self.runtime))

    def set_replicas(self, service: str, replicas: Sequence[ReplicaStandIn], **more: Any) -> None:
        super().set_replicas(service, replicas, **more)
        if service == "svc":
            rows = [ReplicaAddress(id=r.name, host="127.0.0.1", port=r.port) for r in replicas]
            self.runtime.set_replicas(service, rows, 4)

    def count_waiting(self, service: str) -> int:
        held: int = self.facts(service)["backlog"]
        return held + self.runtime.read_load(service).backlog

    def remove(self) -> None:
        self.haproxy.kill()
        self.haproxy.wait()
        super().remove()


@pytest.fixture(scope="module")
def plane() -> Iterator[HaproxyPlane]:
    try:
        program = find_haproxy()
    except HaproxyMissing as error:
        if why := install_packages(["haproxy"]):
            pytest.skip(f"{error}; {why}")
        program = find_haproxy()
    plane = HaproxyPlane(program, services=(SERVICE, KEYED, RATED, MODEL, KEYED_MODEL, CANARY))
    yield plane
    plane.remove()


class TestHaproxy(GatewaySuite):
    pass


__all__ = ["plane", "replicas"]  # fixtures
