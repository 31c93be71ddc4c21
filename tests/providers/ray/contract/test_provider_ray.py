"""The Ray provider keeps the contract, on a real cluster; a stand-in for the agent is fetched
over HTTPS.
"""

import itertools
import ssl
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.contract.stand_in import StandInPlace, pack_stand_in
from tests.system.ray_cluster import PROOF as PROOF
from tests.system.ray_cluster import Cluster, shared_cluster
from tests.waits import wait_until

from cavvy.api.app_state import NodeDownloads
from cavvy.providers.base import (
    GangSpec,
    GangState,
    NodeEndpoint,
    Provider,
    ProviderContext,
    TryAgain,
)
from cavvy.providers.contract import ProviderContract, ProviderUnderTest
from cavvy.providers.ray import MANIFEST
from cavvy.providers.ray.provider import RayProvider
from cavvy.providers.registry import check_settings
from cavvy.providers.state import MemoryProviderState, ProviderState
from cavvy.server.node_tls import Certificate, load_certificate

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(300, func_only=True),
]  # Ray may have to be installed first
ADDRESS = "10.99.0.254"
_scenarios = itertools.count(1)


class Boot:
    """Gives files by their hash, as the control plane does for nodes from outside."""

    def __init__(self, root: Path) -> None:
        self.downloads = downloads = NodeDownloads(root / "downloads")
        self.certificate: Certificate = load_certificate(str(root / "tls.pem"))

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = downloads.find(self.path.rpartition("/")[2])
                self.send_response(200 if found else 404)
                self.end_headers()
                self.wfile.write(found.read_bytes() if found else b"")

            def log_message(self, *_: object) -> None:
                return

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate.file)
        self.server = ThreadingHTTPServer((ADDRESS, 0), Handler)
        self.server.daemon_threads = True
        self.server.socket = context.wrap_socket(
            self.server.socket, server_side=True, do_handshake_on_connect=False
        )
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def node_endpoint(self) -> NodeEndpoint:
        return NodeEndpoint(
            address=f"https://{ADDRESS}:{self.server.server_address[1]}",
            pin=self.certificate.pin,
            key_pin=self.certificate.key_pin,
            agent=lambda: self.downloads.put(pack_stand_in()),
            pythons=dict,
            publish=self.downloads.put,
            claim_token=lambda gang, rank: f"{gang}/{rank}",
        )


class RayPlace(StandInPlace):
    """One scenario; `later` shifts the providers' clock. Its installations are its own: Ray
    remembers names of gangs.
    """

    pause_s = 0.25

    def __init__(self, cluster: Cluster, boot: Boot, home: Path) -> None:
        self.cluster, self.boot, self.home, self.scenario = cluster, boot, home, next(_scenarios)
        self.later = timedelta(0)
        self.states: dict[str, ProviderState] = defaultdict(MemoryProviderState)
        self.current: dict[str, RayProvider] = {}

    def provider(self, installation: str) -> RayProvider:
        context = ProviderContext(
            installation=f"{installation}-{self.scenario}",
            home=self.home,
            state=self.states[installation],
            settings=check_settings(
                MANIFEST, {"addresses": f"lab={self.cluster.url}", "price_usd_gpu_hr": "2"}
            ),
            node_endpoint=self.boot.node_endpoint(),
            now=lambda: datetime.now(UTC) + self.later,
        )
        self.current[installation] = RayProvider(MANIFEST, context)
        return self.current[installation]

    async def _settled(self) -> bool:
        for provider in self.current.values():
            for gang in await provider.gangs():
                record = provider._ledger.get(gang.name)
                removed = record is not None and record.removed
                if gang.state is not GangState.ENDED and (
                    removed or gang.state is not GangState.RUNNING
                ):
                    return False
        return True

    async def end(self, gang: str) -> None:
        for folder in self._folders(gang):
            (folder / "finish").touch()
        await self.until_ended(gang, self.current.values())

    def _folders(self, gang: str) -> list[Path]:
        root = self.cluster.lab.root
        return [
            path for path in root.glob(f"*/home/.cavvy-ray/*/gangs/{gang}/*/work") if path.is_dir()
        ]


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Boot]]:
    cluster = shared_cluster()
    with cluster.lab.entered():
        boot = Boot(tmp_path_factory.mktemp("boot"))
        yield cluster, boot
        boot.server.shutdown()
        boot.server.server_close()


class TestRay(ProviderContract):
    @pytest.fixture
    def place(self, yard: tuple[Cluster, Boot], tmp_path: Path) -> Iterator[ProviderUnderTest]:
        """Each scenario must leave nothing."""
        cluster, boot = yard
        yield RayPlace(cluster, boot, tmp_path)
        wait_until(lambda: not cluster.groups(), lambda: f"left: {cluster.groups()}", pause_s=0.3)
        wait_until(lambda: not cluster.agents(), lambda: f"left: {cluster.agents()}", pause_s=0.3)

    async def lose_reply(
        self, place: ProviderUnderTest, provider: Provider, gang: GangSpec
    ) -> None:
        """The line is cut after Ray has done it."""
        assert isinstance(provider, RayProvider)
        api = next(iter(provider.sites().values())).api
        submit = api.submit

        async def lost(job: dict[str, object]) -> bool:
            await submit(job)
            raise TryAgain("the line was cut")

        api.submit = lost  # type: ignore[method-assign]
        try:
            with suppress(TryAgain):
                await provider.launch(gang)
        finally:
            api.submit = submit  # type: ignore[method-assign]
