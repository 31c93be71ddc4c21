"""A request passes the files of the gateway in one direction."""

import ast
import asyncio
import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from graphlib import TopologicalSorter
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest

import cavvy.capabilities.serving.gateway
from cavvy.capabilities.serving.gateway.call_store import CallStore
from cavvy.capabilities.serving.gateway.config import GatewayConfig, ReplicaAddress
from cavvy.capabilities.serving.gateway.deferred import DeferredCalls
from cavvy.capabilities.serving.gateway.door import Door
from cavvy.capabilities.serving.gateway.inbound import ClientConnections, InboundConnection
from cavvy.capabilities.serving.gateway.kept_counts import KeptCounts

ROOM = Path(cavvy.capabilities.serving.gateway.__file__).parent
TO_THE_REPLICA = ["inbound", "door", "admission", "service_queue", "upstream"]
KEY = b"a key of the service"
RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
SERVICES: list[dict[str, Any]] = [
    {"name": "plain", "hosts": ["plain.example"]},
    {
        "name": "near",
        "prefix": "/near",
        "strip_prefix": True,
        "keys": [{"id": "k1", "sha256": sha256(KEY).hexdigest()}],
        "rates": [{"per_s": 9, "burst": 9}],
    },
    {"name": "sticky", "hosts": ["sticky.example"], "routing": {"by": "header"}},
]
REQUESTS = {
    "plain": (b"GET /x HTTP/1.1\r\nHost: plain.example\r\n\r\n", TO_THE_REPLICA),
    "for the replica of its path": (
        b"GET /x HTTP/1.1\r\nHost: sticky.example\r\n\r\n",
        TO_THE_REPLICA,
    ),
    "with a key, a rate, and a path that could be a model's": (
        b"GET /near/v1/x HTTP/1.1\r\nHost: localhost\r\nX-API-Key: %b\r\n\r\n" % KEY,
        TO_THE_REPLICA,
    ),
}


class Line:
    """A connection that keeps what is written to it."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.then: Callable[[], None] = lambda: None

    def get_extra_info(self, name: str) -> tuple[str, int]:
        return "127.0.0.1", 1

    def write(self, data: bytes) -> None:
        self.written.append(data)
        self.then()

    def is_closing(self) -> bool:
        return False

    def close(self) -> None: ...


class ReplicaLoop(asyncio.SelectorEventLoop):
    """An event loop in which each connection to a replica is a `Line`."""

    def __init__(self) -> None:
        super().__init__()
        self.replicas: list[asyncio.Protocol] = []

    async def create_connection(self, factory: Any, *_: Any, **__: Any) -> Any:
        line, protocol = Line(), factory()
        protocol.connection_made(line)
        self.replicas.append(protocol)
        return line, protocol


def list_imports(path: Path) -> set[str]:
    """The files of the gateway that a file imports, also if only for types."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(
            "cavvy.capabilities.serving.gateway"
        ):
            parts = str(node.module).split(".")[4:]
            found |= {parts[0]} if parts else {each.name for each in node.names}
    return found - {path.stem}


IMPORTS = {path.stem: list_imports(path) for path in ROOM.glob("*.py")}


def leads_to_a_replica(name: str) -> bool:
    if name == "extensions":  # without capabilities, its classes do nothing
        return False
    return name == "upstream" or any(leads_to_a_replica(each) for each in IMPORTS[name])


def test_the_architecture_shows_the_path_of_a_request() -> None:
    page = (ROOM.parents[4] / "ARCHITECTURE.md").read_text()
    for path in (["client", *TO_THE_REPLICA, "replica"], ["replica", "upstream", "responses"]):
        assert f" {' --> '.join(path)}\n" in page or f"{' <-- '.join(reversed(path))}\n" in page


def test_no_circle_of_files_imports_one_another() -> None:
    order = list(TopologicalSorter(IMPORTS).static_order())  # raises CycleError
    assert order.index("upstream") < order.index("service_queue") < order.index("inbound")


@contextmanager
def record_files() -> Iterator[list[str]]:
    """The files of the gateway whose functions are called, in the order of the calls."""
    files: list[str] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.parent == ROOM:
            files.append(path.stem)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield files
    finally:
        sys.setprofile(before)


def make_door(folder: Path, services: list[dict[str, Any]]) -> tuple[Door, GatewayConfig]:
    lines: Mapping[str, object] = {"control": "", "state": str(folder), "services": services}
    config = msgspec.convert(lines, GatewayConfig)
    calls = DeferredCalls(CallStore(folder), config.limits)
    door = Door(config, start="test", calls=calls, kept=KeptCounts())
    door.set_services(config.services)
    for each in services:
        door.set_replicas(each["name"], [ReplicaAddress(id="r", host="127.0.0.1", port=1)])
    return door, config


async def open_connection(
    loop: ReplicaLoop, folder: Path, request: bytes
) -> tuple[InboundConnection, Line, asyncio.Protocol]:
    """A client's connection, with a connection to the replica, after one request."""
    door, config = make_door(folder, SERVICES)
    client, line = InboundConnection(door, ClientConnections(config.limits)), Line()
    client.connection_made(line)  # type: ignore[arg-type]  # it has the methods that are called
    client.data_received(request)
    while not loop.replicas:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    (replica,) = loop.replicas
    replica.data_received(RESPONSE)
    return client, line, replica


@pytest.mark.parametrize(("request_bytes", "path"), REQUESTS.values(), ids=REQUESTS)
def test_a_request_returns_to_no_file(
    tmp_path: Path, request_bytes: bytes, path: list[str]
) -> None:
    """A step is a file from which imports lead to `upstream`. All other files on the way hold
    values and rules, so they cannot pass the request on.
    """
    loop = ReplicaLoop()

    async def run() -> tuple[list[str], list[str]]:
        client, line, replica = await open_connection(loop, tmp_path, request_bytes)
        line.written.clear()
        with record_files() as there:
            client.data_received(request_bytes)
        with record_files() as back:  # until the client has the response
            line.then = lambda: sys.setprofile(None)
            replica.data_received(RESPONSE)
        assert line.written[0].endswith(b"ok")
        return there, back

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        there, back = runner.run(run())
    back = [name for name in back if leads_to_a_replica(name) or name == "responses"]
    assert [name for name, _ in groupby(filter(leads_to_a_replica, there))] == path
    assert [name for name, _ in groupby(back)] == ["upstream", "responses"]


def test_a_closed_connection_leaves_no_circle_of_objects(tmp_path: Path) -> None:
    loop = ReplicaLoop()

    async def run() -> set[str]:
        client, line, _ = await open_connection(loop, tmp_path, REQUESTS["plain"][0])
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        client.connection_lost(None)
        del client, line
        gc.collect()
        gc.set_debug(0)
        found = {type(each).__name__ for each in gc.garbage}
        gc.garbage.clear()
        return found & {"ClientRequest", "ClientResponse", "InboundConnection"}

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        assert runner.run(run()) == set()
