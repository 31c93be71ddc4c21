"""The ssh provider keeps the contract, with real SSH servers on two hosts and a stand-in for the
agent there.
"""

import shutil
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.contract.stand_in import StandInPlace, pack_stand_in
from tests.proofs import Proof
from tests.system.hosts import Lab, two_hosts_at
from tests.waits import PATIENCE_S

from cavvy.providers import ssh
from cavvy.providers.base import GangState, Provider, ProviderContext
from cavvy.providers.contract import ProviderContract, ProviderUnderTest, RepairTests
from cavvy.providers.contract.harness import OURS
from cavvy.providers.registry import check_settings, make_from
from cavvy.providers.ssh import MANIFEST
from cavvy.providers.state import MemoryProviderState, ProviderState

PROOF = Proof("ssh", True, "OpenSSH servers in network namespaces")

pytestmark = pytest.mark.system


class HostsPlace(StandInPlace):
    """Hosts with supervisors, which keep their records below `.cavvy-agent`."""

    @property
    @abstractmethod
    def own_lab(self) -> Lab: ...

    @property
    @abstractmethod
    def ours(self) -> Provider:
        """The newest provider of the installation whose gangs lose ranks."""

    def _folders(self, gang: str) -> list[Path]:
        paths = [
            path
            for host in self.own_lab.hosts
            for path in host.home.glob(f".cavvy-agent/*/*/agents/{gang}/*")
        ]
        return [path for path in paths if path.is_dir()]

    async def lose(self, rank: int) -> None:
        [seen] = await self.ours.gangs()
        for folder in self._folders(seen.name):
            if folder.name == str(rank):
                (folder / "finish").touch()

        async def ended() -> bool:
            [seen] = await self.ours.gangs()
            return any(node.ended_at for node in seen.nodes if node.rank == rank)

        await self._until(ended)

    def billed(self) -> int:
        # in this order, because an ended gang may be deleted meanwhile
        return sum(
            not (path / "dead.json").exists() and (path / "run.json").exists()
            for path in self._folders("*")
        )


class SshPlace(HostsPlace):
    """Two hosts; `later` shifts the providers' clock. Each installation keeps its records in a
    folder of its own. Only its newest provider is asked: an earlier one that connects again would
    end the newest one's supervisor.
    """

    def __init__(self, lab: Lab, root: Path) -> None:
        self.lab, self.root = lab, root
        self.later = timedelta(0)
        self.newest: dict[str, Provider] = {}
        self.states: dict[str, ProviderState] = defaultdict(MemoryProviderState)

    def provider(self, installation: str) -> Provider:
        home = self.root / installation
        home.mkdir(exist_ok=True)
        context = ProviderContext(
            installation=installation,
            home=home,
            state=self.states[installation],
            settings=check_settings(
                MANIFEST,
                {"hosts": "h1 h2", "ssh_config": str(self.lab.ssh_config), "price_usd_hr": 3.6},
            ),
            agent_archive=pack_stand_in,
            now=lambda: datetime.now(UTC) + self.later,
        )
        self.newest[installation] = make_from(ssh, context)
        return self.newest[installation]

    @property
    def own_lab(self) -> Lab:
        return self.lab

    @property
    def ours(self) -> Provider:
        return self.newest[OURS]

    async def _settled(self) -> bool:
        for provider in self.newest.values():
            for gang in await provider.gangs():
                up = [(folder / "lock").exists() for folder in self._folders(gang.name)]
                ends = any(node.ended_at for node in gang.nodes)
                # a removal goes on when the first of the hosts has ended its rank
                waits = gang.reason == "being removed" or (gang.reason and not ends)
                if gang.state is not GangState.ENDED and (waits or not up or not all(up)):
                    return False
        return True

    async def end(self, gang: str) -> None:
        for folder in self._folders(gang):
            (folder / "finish").touch()
        await self.until_ended(gang, self.newest.values())


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with two_hosts_at(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


class TestSsh(ProviderContract, RepairTests):
    crowd = 40  # processes of this machine

    @pytest.fixture
    def place(self, lab: Lab, tmp_path: Path) -> Iterator[ProviderUnderTest]:
        yield SshPlace(lab, tmp_path)
        deadline = time.monotonic() + PATIENCE_S
        while left := list_left(lab):
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.05)
        for (
            host
        ) in lab.hosts:  # the hosts remember names that are over; the next test uses them again
            shutil.rmtree(host.home / ".cavvy-agent", ignore_errors=True)


def list_left(lab: Lab) -> list[str]:
    """Command lines of supervisors, agents and what they started, on the lab's hosts."""
    lines = [b" ".join(words).decode() for host in lab.hosts for _, words in host.processes()]
    return [line for line in lines if "/.cavvy-agent/" in line]
