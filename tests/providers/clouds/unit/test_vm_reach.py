"""How the layer for clouds of virtual machines reaches machines by SSH, with links in memory."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from math import ceil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.providers.clouds.contract.test_provider_vm import REACHED
from tests.providers.clouds.unit.test_vm_layer import OURS, make_gang
from tests.waits import patience

from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import replace
from cavvy.providers.base import GangSeen, GangSpec, GangState, ProviderContext
from cavvy.providers.contract.memory_cloud import BOOT, MANIFEST, MemoryPlace, Rented
from cavvy.providers.hosts.connection import CannotConnect
from cavvy.providers.hosts.fleet.host_link import HostSetup
from cavvy.providers.hosts.ssh_link import LinkDependencies
from cavvy.providers.hosts.userdata import PATIENCE
from cavvy.providers.vm import reach
from cavvy.providers.vm.cloud import CloudMachine, SshTarget
from cavvy.providers.vm.provider import VmProvider
from cavvy.providers.vm.reach import ReachedMachine


class Machines:
    """The machines behind SSH, by name, and what they were asked to start."""

    def __init__(self) -> None:
        self.silent: set[str] = set()
        self.odd: set[str] = set()  # their answers cause an error that the link does not expect
        self.started: dict[str, dict[str, Any]] = {}
        self.over: set[str] = set()
        self.waiting = 0  # machines that are being connected now
        self.gate: asyncio.Event | None = None  # connections wait for it

    def link(self, entry: ReachedMachine, base: LinkDependencies, dial: object) -> "Link":
        return Link(self, entry.name)


class Link:
    """Implements `MachineLink`."""

    problem = ""

    def __init__(self, machines: Machines, name: str) -> None:
        self._machines, self._name = machines, name

    async def connect(self) -> HostSetup:
        if self._machines.gate is not None:
            self._machines.waiting += 1
            await self._machines.gate.wait()
        if self._name in self._machines.silent:
            raise CannotConnect("connection refused")
        if self._name in self._machines.odd:
            raise ValueError("embedded null byte")
        return HostSetup(root="/r", cache="/c", agent=("python3",), supervisor=("python3",))

    async def ask(self, do: str, kind: type[Any], **fields: object) -> Any:
        if do == "launch":
            assert self._name not in self._machines.started
            self._machines.started[self._name] = fields
            return kind()
        given = self._machines.started.get(self._name)
        state = "over" if self._name in self._machines.over else "runs"
        ranks = [{"rank": each["rank"], "state": state} for each in given["ranks"]] if given else []  # type: ignore[attr-defined]
        gangs = [{"name": given["gang"], "ranks": ranks}] if given else []
        return msgspec.convert({"now": 0, "gangs": gangs}, kind)

    async def close(self) -> None:
        return None


@asynccontextmanager
async def relaying(provider: VmProvider) -> AsyncIterator[None]:
    """The provider's relay runs until the end of the block, which closes the provider."""
    relay = asyncio.create_task(provider.relay())
    try:
        yield
    finally:
        relay.cancel()
        await asyncio.wait([relay])
        await provider.close()


class Scene:
    """A cloud, its machines, and servers that come and go."""

    def __init__(self, home: Path) -> None:
        self.place, self.machines = MemoryPlace(REACHED, home), Machines()
        self.context = ProviderContext(
            installation=OURS,
            home=home,
            state=self.place.states[OURS],
            agent_archive=lambda: b"",
            now=self.place.cloud.now,
        )

    @asynccontextmanager
    async def server(self) -> AsyncIterator[VmProvider]:
        cloud = self.place.cloud
        provider = VmProvider(MANIFEST, self.context, cloud, make_link=self.machines.link)
        async with relaying(provider):
            yield provider

    async def launch(self, provider: VmProvider, gang: GangSpec) -> list[str]:
        """Launch a gang whose machines have SSH addresses; returns the machines' ids."""
        await provider.launch(gang)
        for each in self.place.cloud.machines:
            self.place.cloud.targets[each.id] = SshTarget(address="192.0.2.1", port=2200)
        await self.place.wait(BOOT)
        return [each.id for each in self.place.cloud.machines]


async def until(true: Callable[[], object]) -> None:
    async with patience():
        while not true():
            await asyncio.sleep(0.01)


async def pass_time(scene: Scene, length: timedelta) -> None:
    """Let the time pass in small steps: one long step looks like a suspended computer."""
    for _ in range(ceil(length / timedelta(seconds=30))):
        await scene.place.wait(timedelta(seconds=30))
        await asyncio.sleep(0.02)


async def one_with_an_end(provider: VmProvider, gang: str) -> GangSeen:
    """Poll the gang until one of its nodes has ended: a poll skips a gang that the relay changes at
    the same time.
    """
    async with patience():
        while True:
            (seen,) = await provider.gangs(gang)
            if any(node.ended_at is not None for node in seen.nodes):
                return seen
            await asyncio.sleep(0.01)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    for name in ("_SOON_S", "_CALM_S", "_LIST_S"):
        monkeypatch.setattr(reach, name, 0.01)
    return Scene(tmp_path)


async def test_all_machines_of_a_gang_are_reached_at_the_same_time(scene: Scene) -> None:
    spec = make_gang(scene.place)
    scene.machines.gate = asyncio.Event()
    async with scene.server() as provider:
        ids = await scene.launch(provider, replace(spec, nodes=20))
        await until(lambda: scene.machines.waiting == 20)
        scene.machines.gate.set()
        await until(lambda: len(scene.machines.started) == 20)
    configs = {each: scene.machines.started[each]["ranks"][0]["config"] for each in ids}
    assert [each["rank"] for each in configs.values()] == list(range(20))
    assert configs[ids[0]]["address"] == "unix:/r/sock"
    assert (configs[ids[0]]["token"], configs[ids[0]]["node_address"]) == ("t", "10.0.0.1")


async def test_a_machine_that_cannot_be_reached_says_why_until_it_is_reached(scene: Scene) -> None:
    spec = make_gang(scene.place)
    scene.machines.silent.add("vm-000002")
    async with scene.server() as provider:
        await scene.launch(provider, replace(spec, nodes=2))
        await until(lambda: "vm-000001" in scene.machines.started)
        (seen,) = await provider.gangs(spec.name)
        assert seen.reason == ""  # most machines accept no connections while they boot
        await pass_time(scene, PATIENCE - 2 * BOOT)
        assert scene.place.billed() == 2
        (seen,) = await provider.gangs(spec.name)
        assert seen.reason == "no agent by SSH yet: connection refused"
        scene.machines.silent.clear()
        await until(lambda: "vm-000002" in scene.machines.started)
        (seen,) = await provider.gangs(spec.name)
        assert seen.reason == ""
        await provider.remove(spec.name)
    assert scene.place.billed() == 0


async def test_a_machine_that_never_answers_is_deleted_and_its_node_has_ended(scene: Scene) -> None:
    spec = make_gang(scene.place)
    scene.machines.silent.add("vm-000002")
    async with scene.server() as provider:
        await scene.launch(provider, replace(spec, nodes=2))
        await until(lambda: "vm-000001" in scene.machines.started)
        await pass_time(scene, PATIENCE - 2 * BOOT)
        assert scene.place.billed() == 2
        await pass_time(scene, 2 * BOOT)
        await until(lambda: scene.place.billed() == 1)
        await scene.place.wait(timedelta(minutes=2))
        seen = await one_with_an_end(provider, spec.name)
        assert [node.ended_at is None for node in seen.nodes] == [True, False]
        assert seen.reason == (
            "no agent could be started by SSH within 15 minutes: connection refused"
        )
        await provider.remove(spec.name)
        await until(lambda: not provider._reach or not provider._reach._visits)
    assert scene.place.billed() == 0


async def test_a_suspended_server_tries_again_before_it_deletes_a_machine(scene: Scene) -> None:
    scene.machines.silent.add("vm-000001")
    spec = make_gang(scene.place)
    async with scene.server() as provider:
        await scene.launch(provider, spec)
        await until(lambda: provider._reach and provider._reach._visits)
        await scene.place.wait(2 * PATIENCE)  # the laptop slept
        await pass_time(scene, timedelta(minutes=1))
        assert scene.place.billed() == 1
        scene.machines.silent.clear()  # its network is up again
        await until(lambda: "vm-000001" in scene.machines.started)
        assert scene.place.billed() == 1


async def test_an_unexpected_error_ends_only_the_machine_that_causes_it(scene: Scene) -> None:
    spec = make_gang(scene.place)
    scene.machines.odd.add("vm-000001")
    async with scene.server() as provider:
        await scene.launch(provider, replace(spec, nodes=2))
        await until(lambda: "vm-000002" in scene.machines.started)
        await pass_time(scene, PATIENCE)
        await until(lambda: scene.place.billed() == 1)
        await scene.place.wait(timedelta(minutes=2))
        seen = await one_with_an_end(provider, spec.name)
        assert [node.ended_at is None for node in seen.nodes] == [False, True]
        assert seen.reason.endswith("by SSH within 15 minutes: embedded null byte")


async def test_a_visit_that_fails_begins_again(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """A link that cannot even be made does not end the relay."""
    failures = iter([OSError("no space left on device")])

    def link(entry: ReachedMachine, base: LinkDependencies, dial: object) -> Link:
        for error in failures:
            raise error
        return Link(scene.machines, entry.name)

    spec = make_gang(scene.place)
    scene.machines.link = link  # type: ignore[method-assign]
    async with scene.server() as provider:
        (machine,) = await scene.launch(provider, spec)
        await until(lambda: machine in scene.machines.started)
    assert [each.message for each in caplog.records] == ["a machine could not be visited"]


async def test_a_machine_without_an_address_is_deleted_too(scene: Scene) -> None:
    spec = make_gang(scene.place)
    async with scene.server() as provider:
        await provider.launch(spec)
        await scene.place.wait(BOOT)
        await until(lambda: provider._reach and provider._reach._visits)
        await pass_time(scene, PATIENCE)
        await until(lambda: scene.place.billed() == 0)


async def test_a_new_server_starts_the_agents_that_the_last_one_did_not(scene: Scene) -> None:
    def read() -> str:
        found = scene.context.state._documents  # type: ignore[attr-defined]
        return "".join(each.body for key, each in found.items() if key[0] == "reach")

    spec = make_gang(scene.place)
    scene.machines.silent.add("vm-000002")
    async with scene.server() as provider:
        await scene.launch(provider, replace(spec, nodes=2))
        await until(lambda: "vm-000001" in scene.machines.started)
    scene.machines.silent.clear()
    async with scene.server() as provider:  # it has no gang's description, only the records
        await until(lambda: "vm-000002" in scene.machines.started)
        (given,) = scene.machines.started["vm-000002"]["ranks"]
        assert given["config"]["token"] == "t"
        await until(lambda: '"token":""' in read())
        await provider.remove(spec.name)
        await until(lambda: not read())
    assert scene.place.billed() == 0


async def test_a_machine_that_another_server_has_launched_is_kept(scene: Scene) -> None:
    spec = make_gang(scene.place)
    async with scene.server() as provider:
        await until(lambda: provider._reach and provider._reach._listed)
        link = scene.machines.link
        other = VmProvider(MANIFEST, scene.context, scene.place.cloud, make_link=link)
        (machine,) = await scene.launch(other, spec)  # this server's relay does not run
        await provider.gangs(spec.name)
        await until(lambda: machine in scene.machines.started or not scene.place.billed())
        assert scene.place.billed() == 1
        await other.close()


async def test_a_machine_whose_agent_has_ended_is_deleted(scene: Scene) -> None:
    spec = make_gang(scene.place)
    async with scene.server() as provider:
        (machine,) = await scene.launch(provider, spec)
        await until(lambda: machine in scene.machines.started)
        scene.machines.over.add(machine)
        await until(lambda: scene.place.billed() == 0)
        await scene.place.wait(timedelta(minutes=2))
        seen = await one_with_an_end(provider, spec.name)
        assert (seen.state, seen.reason) == (GangState.ENDED, "the agent on the machine has ended")


def test_the_reason_of_a_deletion_outlives_what_the_cloud_reports(scene: Scene) -> None:
    async def scenario() -> None:
        async with scene.server() as provider:
            (machine,) = await scene.launch(provider, spec)
            await until(lambda: machine in scene.machines.started)
            scene.machines.over.add(machine)
            await until(lambda: scene.place.billed() == 0)
            seen = await one_with_an_end(provider, spec.name)
            assert seen.reason == "the agent on the machine has ended"

    spec, cloud = make_gang(scene.place), scene.place.cloud
    show = cloud._show

    def tell(rented: Rented) -> CloudMachine | None:
        machine = show(rented)
        return machine and replace(machine, reason="it was deleted" if rented.ended else "")

    cloud._show = tell  # type: ignore[method-assign]
    asyncio.run(scenario())


async def test_a_server_that_machines_cannot_call_has_no_objection(scene: Scene) -> None:
    async with scene.server() as provider:
        assert provider.check(TaskSpec(name="t", run="true")) == []
        assert dict(await provider.whoami())["nodes"] == "reached by SSH"
