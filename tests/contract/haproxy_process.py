"""HAProxy in front of the gateway, as the server runs both."""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.contract.gateway_process import OWNER_TOKEN, GatewayProcess, describe_replicas
from tests.contract.replica_stand_in import ReplicaStandIn
from tests.system.packages import install_packages
from tests.system.ports import free_port
from tests.waits import START_S

from cavvy.capabilities.serving.decide.traffic import ServiceTraffic
from cavvy.capabilities.serving.gateway.config import ReplicaAddress, ServiceRoute
from cavvy.capabilities.serving.gateway.haproxy.configuration import HOLD, is_direct, name_backend
from cavvy.capabilities.serving.gateway.haproxy.runtime import (
    HaproxyMissing,
    HaproxyRuntime,
    find_haproxy,
)
from cavvy.capabilities.serving.gateway.own_values import describe_owner
from cavvy.capabilities.serving.server.haproxy_plane import HaproxyPlane
from cavvy.capabilities.serving.server.listener import ServiceListener


def need_haproxy() -> Path:
    """HAProxy, which is installed where it is missing. Skips the test if that fails."""
    try:
        return find_haproxy()
    except HaproxyMissing as error:
        if why := install_packages(["haproxy"]):
            pytest.skip(f"{error}; {why}")
        return find_haproxy()


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
        "an LF in a response": "HAProxy reads LF as the end of a line, and writes CRLF",
        "two equal lengths": "HAProxy reads two equal lengths as one",
        "a 204 with a length": "HAProxy uses the connection of a 204 with a length again",
        "reasons": "HAProxy does not say what is wrong with a response",
        "version 2": "HAProxy does not refuse a version that it does not know",
    }

    def __init__(self, program: Any, tls: dict[str, str] | None = None, **config: Any) -> None:
        super().__init__(behind_proxy=True, **config)
        self._gateway_port, self.port = self.port, free_port()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        listener = ServiceListener(port=self.port, owner=describe_owner(OWNER_TOKEN), **(tls or {}))
        self.program = program
        self._listener = listener
        self.plane: Any = None
        self.forget_all()
        self._routes = msgspec.convert(config["services"], tuple[ServiceRoute, ...])
        self._replicas: dict[str, tuple[ReplicaAddress, ...]] = {}
        self.keep()

    def do(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(START_S)

    def keep(self) -> None:
        """As the server does once a second, and when something changes."""
        self.do(self.plane.keep(self._routes, self._replicas, self._gateway_port))

    def forget_all(self) -> None:
        """Replace the server's part by a new one, which knows only what is in files."""
        if self.plane is not None and self.plane._requests is not None:
            self.plane._requests.close()
        path = str(self.folder / "haproxy")
        self.plane = HaproxyPlane(self.folder, path, self._listener, self.program)

    def add_route(self, route: dict[str, Any]) -> None:
        self._routes = (*self._routes, msgspec.convert(route, ServiceRoute))
        self.keep()

    def count(self, service: str) -> ServiceTraffic:
        traffic: ServiceTraffic = self.do(self.plane.count(service, ServiceTraffic(at_s=0)))
        return traffic

    def set_replicas(self, service: str, replicas: Sequence[ReplicaStandIn], **more: Any) -> None:
        super().set_replicas(service, replicas, **more)
        if is_direct(next(each for each in self._routes if each.name == service)):
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
        self.do(self.plane.end(0.1))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_S)
        self._loop.close()
        super().remove()
