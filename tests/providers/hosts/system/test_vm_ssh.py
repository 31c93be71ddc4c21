"""Machines of a cloud that the server reaches by SSH: OpenSSH servers in network namespaces, and a
cloud in memory that hands them out.
"""

import asyncio
import shutil
import subprocess
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from tests.contract.stand_in import pack_stand_in
from tests.providers.clouds.contract.test_provider_vm import REACHED
from tests.providers.clouds.unit.test_vm_reach import relaying
from tests.records import make_gang_spec
from tests.system.agent_server import GANG, TOKEN, Rig, make_rig
from tests.system.hosts import Lab, LabHost, two_hosts_at
from tests.waits import patience

from cavvy.agent.bundle import make_archive
from cavvy.domain.values import replace
from cavvy.providers.base import AgentEndpoint, GangSpec, GangState, ProviderContext
from cavvy.providers.contract.memory_cloud import BOOT, MANIFEST, MemoryCloud
from cavvy.providers.hosts.connection import LoginRefused
from cavvy.providers.state import MemoryProviderState, ProviderState
from cavvy.providers.vm.cloud import MachineRequest, SshTarget
from cavvy.providers.vm.provider import VmProvider
from cavvy.providers.vm.reach_keys import MachineDoor, load_keys

pytestmark = pytest.mark.system
OURS = "an installation"


class LabCloud(MemoryCloud):
    """A cloud whose machines are the hosts of a lab, in their order. New machines accept the key of
    their request.
    """

    def __init__(self, lab: Lab) -> None:
        super().__init__(replace(REACHED, list_lag=timedelta(0)))
        self.lab = lab

    async def create(self, request: MachineRequest) -> list[str]:
        with (self.lab.root / "id.pub").open("a") as keys:
            keys.write(f"{request.public_key}\n")
        ids = list(await super().create(request))
        for each in ids:
            self.targets[each] = SshTarget(address=self.host(each).address)
        self.time += BOOT
        return ids

    def host(self, machine: str) -> LabHost:
        return self.lab.hosts[int(machine.removeprefix("vm-")) - 1]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with two_hosts_at(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


@pytest.fixture(autouse=True)
def fresh_hosts(lab: Lab) -> Iterator[None]:
    """Machines that the cloud hands out again have forgotten their last gang."""
    yield
    for host in lab.hosts:
        shutil.rmtree(host.home / ".cavvy-agent", ignore_errors=True)


class Account:
    """A cloud, and the servers that use it one after the other."""

    def __init__(self, lab: Lab, home: Path, agent: bytes, address: str) -> None:
        self.cloud, self.home = LabCloud(lab), home
        self.agent, self.address = agent, address
        self.states: dict[str, ProviderState] = defaultdict(MemoryProviderState)

    @asynccontextmanager
    async def server(self) -> AsyncIterator[VmProvider]:
        """A server, which relays for its machines until the block ends."""
        context = ProviderContext(
            installation=OURS,
            home=self.home,
            state=self.states[OURS],
            agent_archive=lambda: self.agent,
            server_address=self.address,
            now=self.cloud.now,
        )
        provider = VmProvider(MANIFEST, context, self.cloud)
        async with relaying(provider):
            yield provider

    async def gang(self, nodes: int = 1) -> GangSpec:
        return make_gang_spec(
            (await self.cloud.offers())[0],
            name=GANG,
            installation=OURS,
            nodes=nodes,
            agent_endpoint=AgentEndpoint(address="unix:/nonexistent", token=TOKEN),
            grace=timedelta(seconds=1),
        )


async def until(rig: Rig, kind: str) -> None:
    async with patience():
        while kind not in rig.stub.kinds():
            await asyncio.sleep(0.05)


async def ended(account: Account, provider: VmProvider) -> str:
    """Wait for the end of the gang, and return its reason."""
    async with patience():
        while True:
            account.cloud.time += timedelta(seconds=10)
            (seen,) = await provider.gangs(GANG)
            if seen.state is GangState.ENDED:
                return seen.reason
            await asyncio.sleep(0.1)


def test_an_agent_is_started_by_ssh_and_survives_a_restart_of_the_server(
    lab: Lab, tmp_path: Path
) -> None:
    async def scenario(rig: Rig, gate: Path) -> None:
        account = Account(lab, tmp_path, make_archive(), rig.config["address"])  # type: ignore[arg-type]
        async with account.server() as provider:
            await provider.launch(await account.gang())
            await until(rig, "running")
        (document,) = await account.states[OURS].read("reach")
        assert TOKEN not in document.body  # it was needed for the start only
        gate.touch()  # the work ends while no server is there
        async with account.server() as provider:
            await until(rig, "exited")
            assert (rig.exited()["exit_code"], "after the gate" in rig.output()) == (0, True)
            assert await ended(account, provider) == "the agent on the machine has ended"
        assert account.cloud.billed() == []

    gate = tmp_path / "gate"
    with make_rig(run=f"while [ ! -e {gate} ]; do sleep 0.1; done; echo after the gate") as rig:
        asyncio.run(scenario(rig, gate))


def test_all_nodes_of_a_gang_are_reached(lab: Lab, tmp_path: Path) -> None:
    def folders() -> list[Path]:
        return [path for host in lab.hosts for path in host.home.glob(f"**/agents/{GANG}/*/starts")]

    async def scenario() -> None:
        account = Account(lab, tmp_path, pack_stand_in(), "unix:/nonexistent")
        async with account.server() as provider:
            await provider.launch(await account.gang(nodes=2))
            async with patience():
                while len(folders()) < 2:
                    await asyncio.sleep(0.05)
            assert sorted(path.parent.name for path in folders()) == ["0", "1"]
            for path in folders():
                (path.parent / "finish").touch()
            await ended(account, provider)
        assert account.cloud.billed() == []

    asyncio.run(scenario())


def test_the_host_key_of_the_first_contact_is_kept(lab: Lab, tmp_path: Path) -> None:
    pins: list[str] = []

    async def keep(pin: str) -> None:
        pins.append(pin)

    async def scenario() -> None:
        state = MemoryProviderState()
        keys = await load_keys(state)
        assert await load_keys(state) == keys
        with (lab.root / "id.pub").open("a") as file:
            file.write(f"{keys.public}\n")
        for number in range(2):
            folder = tmp_path / str(number)
            folder.mkdir()
            door = MachineDoor(
                alias="vm-1",
                target=SshTarget(address=lab.hosts[0].address),
                sockets=folder,
                read_pin=lambda: pins[0] if pins else "",
                keep_pin=keep,
                read_keys=lambda: load_keys(state),
            )
            link, _ = await door.dial()
            link.close()
            await link.closed()
        assert len(pins) == 1
        key = (lab.root / "host.pub").read_text().split()[:2]
        assert pins[0].split() == ["vm-1", *key]
        host, other = lab.hosts[0], lab.root / "other"
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)]
        subprocess.run(make, check=True, timeout=60)
        kept = (lab.root / "host").read_bytes()
        try:
            (lab.root / "host").write_bytes(other.read_bytes())
            host.kill()
            host.start()
            with pytest.raises(LoginRefused):
                await door.dial()
        finally:
            (lab.root / "host").write_bytes(kept)
            host.kill()
            host.start()

    asyncio.run(scenario())
