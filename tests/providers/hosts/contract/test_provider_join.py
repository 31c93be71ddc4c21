"""The join provider keeps the contract: two real hosts that joined over HTTPS, and a stand-in for
the agent there.

The hosts join both installations once; each scenario is a server that starts anew, to which they come
back.
"""

import asyncio
import hashlib
import os
import shutil
import socket
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.contract.stand_in import pack_stand_in
from tests.proofs import Proof
from tests.providers.hosts.contract.test_provider_ssh import HostsPlace, list_left
from tests.system.hosts import Lab, two_hosts_at
from tests.waits import PATIENCE_S, patience

from cavvy.api.app_state import NodeDownloads
from cavvy.domain.values import replace
from cavvy.providers import join
from cavvy.providers.abilities import SERVES_NODES, JoinTerms, ability
from cavvy.providers.base import (
    GangState,
    NodeEndpoint,
    NotFound,
    Provider,
    ProviderContext,
    Refused,
)
from cavvy.providers.contract import Play, ProviderContract, ProviderUnderTest, RepairTests
from cavvy.providers.contract.harness import FOREIGN, OURS
from cavvy.providers.join import MANIFEST
from cavvy.providers.registry import check_settings, make_from
from cavvy.providers.state import MemoryProviderState, ProviderState
from cavvy.server.doors import BoundedServer
from cavvy.server.node_tls import TlsContexts, load_certificate

PROOF = Proof("join", True, "hosts in network namespaces that joined over TLS")
pytestmark = pytest.mark.system
ADDRESS = "10.99.0.254"


class Yard:
    """What outlives scenarios: the hosts, the sockets that they call, the records of who joined."""

    def __init__(self, lab: Lab, root: Path) -> None:
        self.lab, self.root = lab, root
        self.downloads = NodeDownloads(root / "downloads")
        self.certificates = {
            name: load_certificate(str(root / f"{name}.pem")) for name in (OURS, FOREIGN)
        }
        self.sockets = {
            name: socket.create_server((ADDRESS, 0), backlog=64) for name in (OURS, FOREIGN)
        }
        for name, each in self.sockets.items():
            each.setblocking(False)
            (root / name).mkdir()
        self.states: dict[str, ProviderState] = defaultdict(MemoryProviderState)

    def node_endpoint(self, installation: str) -> NodeEndpoint:
        return NodeEndpoint(
            address=f"https://{ADDRESS}:{self.sockets[installation].getsockname()[1]}",
            pin=self.certificates[installation].pin,
            key_pin=self.certificates[installation].key_pin,
            agent=lambda: self.downloads.put(pack_stand_in()),
            pythons=dict,
            publish=self.downloads.put,
            claim_token=lambda gang, rank: f"{gang}/{rank}",
        )

    async def join(self) -> None:
        """Paste a line into each host for each installation, and wait until all are there."""
        place = JoinPlace(self)
        async with place.serving():
            for installation in (OURS, FOREIGN):
                provider = ability(place.provider(installation), SERVES_NODES)
                assert provider is not None
                for host in self.lab.hosts:
                    line = (
                        await provider.invite(
                            JoinTerms(name=host.name, group="lab", valid=timedelta(hours=1))
                        )
                    ).shell
                    line = line.replace("sh -s -- ", "sh -s -- --background ")
                    await asyncio.to_thread(host.run, line)
                async with patience():
                    while {machine.state for machine in await provider.machines()} != {"up"} or len(
                        await provider.machines()
                    ) != len(self.lab.hosts):
                        await asyncio.sleep(0.05)

    async def forget(self) -> None:
        """Names of gangs are used again by the next scenario."""
        for installation in (OURS, FOREIGN):
            mark = hashlib.sha256(installation.encode()).hexdigest()[:8]
            state = self.states[installation]
            for collection in ("gangs", "ended"):
                for each in await state.read(collection):
                    await state.swap(replace(each, version=each.version + 1), delete=True)
            for host in self.lab.hosts:
                for folder in ("agents", "gangs", "over", "trash"):
                    shutil.rmtree(
                        host.home / ".cavvy-agent" / mark / host.name / folder, ignore_errors=True
                    )


class JoinPlace(HostsPlace):
    """One scenario; `later` shifts the providers' clock."""

    def __init__(self, yard: Yard) -> None:
        self.yard = yard
        self.later = timedelta(0)
        self.providers: list[Provider] = []
        self.current: dict[str, Provider] = {}
        self.renewed = asyncio.Event()

    def provider(self, installation: str) -> Provider:
        context = ProviderContext(
            installation=installation,
            home=self.yard.root / installation,
            state=self.yard.states[installation],
            settings=check_settings(MANIFEST, {"price_usd_hr": 3.6}),
            node_endpoint=self.yard.node_endpoint(installation),
            now=lambda: datetime.now(UTC) + self.later,
        )
        self.providers.append(make_from(join, context))
        self.current[installation] = self.providers[-1]
        # what the one before was asked goes unanswered, as when a server is gone
        self.renewed.set()
        self.renewed = asyncio.Event()
        return self.providers[-1]

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Answer the hosts' calls."""
        servers, tasks = [], []
        for installation, each in self.yard.sockets.items():
            tls = TlsContexts(self.yard.certificates[installation].file)
            server = BoundedServer(self.app(installation), tls)
            servers.append(server)
            tasks.append(
                asyncio.create_task(server.serve([socket.socket(fileno=os.dup(each.fileno()))]))
            )
        try:
            yield
        finally:
            for server in servers:
                server.should_exit = server.force_exit = True
            self.renewed.set()
            await asyncio.gather(*tasks)

    def app(self, installation: str) -> Any:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            status, body = await self.answer(installation, scope, receive)
            await send(
                {
                    "type": "http.response.start",
                    "status": status,
                    "headers": [(b"connection", b"close")],
                }
            )
            await send({"type": "http.response.body", "body": body})

        return app

    async def answer(self, installation: str, scope: Any, receive: Any) -> tuple[int, bytes]:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        kind, _, rest = scope["path"].strip("/").partition("/")
        if kind == "boot":
            found = self.yard.downloads.find(rest.rpartition("/")[2])
            return (200, found.read_bytes()) if found else (404, b"")
        provider = self.current.get(installation)
        serving = provider and ability(provider, SERVES_NODES)
        if not serving:
            return 503, b"{}"
        if rest.endswith("/script"):
            return 200, await serving.script()
        token = dict(scope["headers"])[b"authorization"].decode().removeprefix("Bearer ")
        answering = asyncio.create_task(serving.answer(rest.rpartition("/")[2], token, body))
        renewed = asyncio.create_task(self.renewed.wait())
        await asyncio.wait([answering, renewed], return_when=asyncio.FIRST_COMPLETED)
        renewed.cancel()
        if not answering.done():
            answering.cancel()
            return 503, b"{}"
        try:
            return 200, answering.result()
        except (Refused, NotFound) as error:
            return 403, str(error).encode()

    async def _settled(self) -> bool:
        for provider in self.providers:
            if provider not in self.current.values():
                continue  # a server that is gone
            for gang in await provider.gangs():
                folders = self._folders(gang.name)
                up = [(folder / "lock").exists() for folder in folders]
                ends = any(node.ended_at for node in gang.nodes)
                # a removal goes on when the first of the hosts has ended its rank
                waits = gang.reason == "being removed" or (gang.reason and not ends)
                if gang.state is not GangState.ENDED and (waits or not up or not all(up)):
                    return False
        return True

    async def end(self, gang: str) -> None:
        for folder in self._folders(gang):
            (folder / "finish").touch()
        await self.until_ended(gang, self.current.values())

    @property
    def own_lab(self) -> Lab:
        return self.yard.lab

    @property
    def ours(self) -> Provider:
        return self.current[OURS]


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    with two_hosts_at(tmp_path_factory.mktemp("lab")) as lab:
        yard = Yard(lab, tmp_path_factory.mktemp("yard"))
        asyncio.run(yard.join())
        yield yard
        for each in yard.sockets.values():
            each.close()


class TestJoin(ProviderContract, RepairTests):
    crowd = 40  # processes of this machine

    @pytest.fixture
    def place(self, yard: Yard) -> Iterator[ProviderUnderTest]:
        yield JoinPlace(yard)
        deadline = time.monotonic() + PATIENCE_S
        while left := [line for line in list_left(yard.lab) if "/agents/" in line]:
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.05)
        asyncio.run(yard.forget())

    def make_play(self, place: ProviderUnderTest) -> Play:
        self._place = place
        return super().make_play(place)

    def run_scenario(self, scenario: Coroutine[Any, Any, None]) -> None:
        async def served() -> None:
            assert isinstance(self._place, JoinPlace)
            async with self._place.serving():
                await scenario

        asyncio.run(served())
