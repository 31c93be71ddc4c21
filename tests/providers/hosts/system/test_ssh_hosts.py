"""Hosts as they are found: keys, jumps, inventories, nothing but a busybox, neighbours, silence
and broken launches.
"""

import asyncio
import os
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.contract.stand_in import pack_stand_in
from tests.records import make_gang_spec, make_offer
from tests.system.hosts import Lab, LabHost, lab_at
from tests.waits import patience

from cavvy.agent.bundle import make_archive
from cavvy.domain.allocations import Allocation
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Scalar, Volume, VolumeKind
from cavvy.domain.values import replace
from cavvy.providers import ssh
from cavvy.providers.base import (
    AgentEndpoint,
    GangSeen,
    GangSpec,
    GangState,
    NoCapacity,
    ProviderContext,
    Refused,
    TryAgain,
)
from cavvy.providers.hosts import connection
from cavvy.providers.registry import check_settings, make_from
from cavvy.providers.ssh import MANIFEST
from cavvy.providers.ssh.provider import SshProvider
from cavvy.providers.state import MemoryProviderState, ProviderState

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with lab_at(tmp_path_factory.mktemp("lab")) as lab:
        lab.add(gpus=2)
        lab.add()
        with lab.entered():
            yield lab


@pytest.fixture
def around(lab: Lab, tmp_path: Path) -> "Around":
    return Around(lab, tmp_path)


class Around:
    """Makes providers over the lab's hosts."""

    def __init__(self, lab: Lab, root: Path) -> None:
        self.lab, self.root = lab, root
        self.states: dict[str, ProviderState] = defaultdict(MemoryProviderState)

    @asynccontextmanager
    async def provider(self, installation: str = "ours", **settings: Scalar):  # type: ignore[no-untyped-def]
        address = str(settings.pop("server_address", ""))
        given = {"hosts": "h1 h2", "ssh_config": str(self.lab.ssh_config), **settings}
        home = self.root / installation
        home.mkdir(exist_ok=True)
        made = make_from(
            ssh,
            ProviderContext(
                installation=installation,
                home=home,
                state=self.states[installation],
                settings=check_settings(MANIFEST, given),
                agent_archive=pack_stand_in,
                server_address=address,
                now=lambda: datetime.now(UTC),
            ),
        )
        assert isinstance(made, SshProvider)
        try:
            yield made
        finally:
            await made.close()


async def offer_of(provider: SshProvider, zone: str | None, count: int = 0) -> Offer:
    offers = [
        each
        for each in await provider.offers()
        if each.zone == zone and each.accelerator_count == count
    ]
    assert len(offers) == 1
    return offers[0]


def spec(
    offer: Offer, name: str, *, hosts: tuple[str, ...], devices: tuple[str, ...] = ()
) -> GangSpec:
    allocations = [
        Allocation(
            host=f"ssh/{host}",
            gang=name,
            rank=rank,
            project="p",
            cpus=1,
            memory_mib=0,
            devices=devices,
        )
        for rank, host in enumerate(hosts)
    ]
    return make_gang_spec(
        offer,
        name=name,
        installation="ours",
        nodes=len(hosts),
        agent_endpoint=AgentEndpoint(address="unix:/nonexistent", token="t"),
        allocations=allocations,
        grace=timedelta(seconds=1),
    )


async def until(
    provider: SshProvider, name: str, good: Callable[[list[GangSeen]], bool]
) -> list[GangSeen]:
    async with patience():
        while not good(seen := list(await provider.gangs(name))):
            await asyncio.sleep(0.05)
    return seen


def is_ended(seen: list[GangSeen]) -> bool:
    return bool(seen) and seen[0].state is GangState.ENDED


async def facts(provider: SshProvider) -> dict[str, str]:
    found: dict[str, str] = {}
    for what, value in await provider.whoami():
        found[what] = f"{found[what]}; {value}" if what in found else value
    return found


def play(scenario: Awaitable[None]) -> None:
    async def run() -> None:
        await scenario

    asyncio.run(run())


def test_check_says_who_and_what(around: Around) -> None:
    async def scenario() -> None:
        async with around.provider(
            hosts="h1, h2 gone none-*", ssh_config=str(around.lab.ssh_config)
        ) as provider:
            told = await facts(provider)
            assert told["h1"].startswith("root@10.99.0.1: accelerators 2 x T4")
            assert "none" in told["h2"]
            assert "the name has no address" in told["gone"]
            assert told["none-*"] == "the pattern matches no Host of the SSH configuration"
            assert {offer.zone for offer in await provider.offers()} == {"h1", "h2", None}

    play(scenario())


def test_a_host_of_root_is_asked_and_runs_one_project_at_a_time(
    around: Around, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with around.provider(hosts="h1", isolation="namespaces") as provider:
            told = await facts(provider)
            assert (
                "one project at a time, because namespaces need a user other than root"
                in told["h1"]
            )
            (host,) = await provider.hosts()
            assert (host.separates, "other than root" in host.obstacle) == (False, True)

    monkeypatch.setattr(f"{__name__}.pack_stand_in", make_archive)  # the agent itself
    play(scenario())


def test_unknown_host_keys_are_refused_with_what_to_do(around: Around) -> None:
    async def scenario() -> None:
        empty = around.root / "config"
        text = around.lab.ssh_config.read_text().replace(
            str(around.lab.known_hosts), str(around.root / "none")
        )
        empty.write_text(text)
        async with around.provider(ssh_config=str(empty)) as provider:
            with pytest.raises(TryAgain, match=r"known_hosts.*accept-new"):
                await facts(provider)
            with pytest.raises((NoCapacity, Refused)):
                await provider.launch(spec(_offer(), "rm-0-refused", hosts=("h1",)))
        async with around.provider(ssh_config=str(empty), host_keys="accept-new") as provider:
            assert "Python" in (await facts(provider))["h1"]
        async with around.provider(ssh_config=str(empty), host_keys="accept-new") as provider:
            file = around.root / "ours/known_hosts"
            assert file.stat().st_mode & 0o777 == 0o600
            other = (around.lab.root / "id.pub").read_text().split()[1]
            file.write_text("".join(f"10.99.0.{n} ssh-ed25519 {other}\n" for n in (1, 2)))
            with pytest.raises(TryAgain, match="differs from the key there"):
                await facts(provider)

    play(scenario())


def _offer() -> Offer:

    return make_offer("ssh/hosts/h1/cpu", 0, shared=True)


def test_a_server_that_forwards_nothing_is_told(lab: Lab, around: Around) -> None:
    host = lab.add(sshd="AllowStreamLocalForwarding no\n")

    async def scenario() -> None:
        async with around.provider(hosts=host.name) as provider:
            assert "AllowStreamLocalForwarding yes" in (await facts(provider))[host.name]
        async with around.provider(hosts=host.name, server_address="unix:/nonexistent") as provider:
            assert {offer.capacity for offer in await provider.offers()} == {0}
            with pytest.raises(TryAgain, match="AllowStreamLocalForwarding yes"):
                await facts(provider)

    try:
        play(scenario())
    finally:
        lab.remove(host)


def test_keys_that_are_not_accepted_are_told(around: Around) -> None:
    async def scenario() -> None:
        config = around.root / "config"
        config.write_text(around.lab.ssh_config.read_text().replace("User root", "User nobody"))
        async with around.provider(ssh_config=str(config)) as provider:
            with pytest.raises(TryAgain, match="none of your keys is accepted"):
                await facts(provider)

    play(scenario())


def test_a_jump_host_leads_to_hosts_behind_it(around: Around) -> None:
    async def scenario() -> None:
        lab = around.lab
        config = around.root / "config"
        inner = (
            f"\nHost inner\n  HostName 10.99.0.2\n  User root\n  IdentityFile {lab.root}/id\n  "
            "ProxyJump h1\n"
        )
        config.write_text(
            lab.ssh_config.read_text() + inner + f"  UserKnownHostsFile {lab.known_hosts}\n"
        )
        async with around.provider(ssh_config=str(config), hosts="inn*") as provider:
            assert (await facts(provider))["inner"].startswith("root@10.99.0.2")
            route = provider._links["inner"].route
            assert route is not None
            assert list(route.jumps) == ["h1"]

    play(scenario())


def test_an_inventory_has_prices_groups_and_ways(around: Around) -> None:
    async def scenario() -> None:
        file = around.root / "hosts.toml"
        key = around.lab.root / "id"
        file.write_text(
            '[groups.lab]\nhosts = ["h1", "h2"]\nprice_usd_hr = 2\n[hosts.h2]\nprice_usd_hr = '
            "5\ncpus = 1\n"
            '[hosts.third]\ngroup = "lab"\naddress = "10.99.0.2"\nuser = "root"\nidentity_file = '
            f'"{key}"\n'
            f'folder = "~/other"\n'
        )
        async with around.provider(
            hosts="",
            inventory=str(file),
            host_keys="accept-new",
            ssh_config=str(around.lab.ssh_config),
        ) as provider:
            told = await facts(provider)
            assert "Python" in told["third"]
            rates = {(o.zone, o.accelerator_count): o.rate.usd for o in await provider.offers()}
            assert rates["h1", 2] == 4
            assert rates["h2", 0] == 5
            assert rates[None, 0] == 2
            hosts = {host.name: host for host in await provider.hosts()}
            assert hosts["ssh/h1"].group == "ssh/lab" == hosts["ssh/third"].group
            assert hosts["ssh/h2"].group == "ssh/h2"
            assert hosts["ssh/h2"].cpus == 1
            assert around.lab.hosts[1].file("~/other").is_dir()
            file.write_text("[hosts.h1]\nprise = 3\n")
            with pytest.raises(Refused, match="prise"):
                await provider.offers()

    play(scenario())


def test_a_gang_that_one_host_cannot_start_starts_nowhere(around: Around) -> None:
    async def scenario() -> None:
        async with around.provider() as provider:
            group = await offer_of(provider, None)
            host = around.lab.hosts[1]
            folder = next(host.file("~/.cavvy-agent").glob("*/h2"))
            blocked = folder / "agents/rm-0-half"
            folder.joinpath("agents").mkdir(exist_ok=True)
            blocked.write_text("in the way")
            with pytest.raises(NoCapacity):
                await provider.launch(spec(group, "rm-0-half", hosts=("h1", "h2")))
            blocked.unlink()
            assert await provider.gangs("rm-0-half") == []
            async with patience():
                while list(
                    around.lab.hosts[0].file("~/.cavvy-agent").glob("*/h1/agents/rm-0-half")
                ):
                    await provider.gangs()
                    await asyncio.sleep(0.05)
            with pytest.raises(NoCapacity):  # given up is given up
                await provider.launch(spec(group, "rm-0-half", hosts=("h1", "h2")))

    play(scenario())


def test_two_installations_do_not_share_a_gpu(around: Around) -> None:
    async def scenario() -> None:
        async with around.provider() as ours, around.provider("theirs") as theirs:
            offer = await offer_of(ours, "h1", 1)
            await theirs.offers()
            device = ("GPU-0001-0000",)
            await ours.launch(spec(offer, "rm-0-mine", hosts=("h1",), devices=device))
            other = replace(
                spec(offer, "rm-1-yours", hosts=("h1",), devices=device), installation="theirs"
            )
            with pytest.raises(NoCapacity, match="gang rm-0-mine is using"):
                await theirs.launch(other)
            assert await theirs.gangs() == []
            await ours.remove("rm-0-mine")
            await until(ours, "rm-0-mine", is_ended)
            await theirs.launch(replace(other, name="rm-1-again"))
            await theirs.remove("rm-1-again")
            await until(theirs, "rm-1-again", is_ended)

    play(scenario())


def test_what_a_killed_agent_left_is_killed(around: Around) -> None:
    async def scenario() -> None:
        host = around.lab.hosts[0]
        async with around.provider() as provider:
            offer = await offer_of(provider, "h1")
            await provider.offers()
            base = next(host.file("~/.cavvy-agent").glob("*/h1"))
            (base / "work.sh").write_text("echo $$ > $0.pid; exec sleep 1000")
            await provider.launch(spec(offer, "rm-0-killed", hosts=("h1",)))
            pid_file = base / "work.sh.pid"
            async with patience():
                while not pid_file.exists():
                    await asyncio.sleep(0.05)
            host.run("pkill -9 -f rm-0-killed/0/config.json")
            (seen,) = await until(provider, "rm-0-killed", is_ended)
            assert "killed or failed" in seen.reason
            assert host.run("pgrep -f '[s]leep 1000' || echo none").strip() == "none"
            (base / "work.sh").unlink()
            (again,) = await provider.gangs("rm-0-killed")
            assert again == seen

    play(scenario())


def test_a_host_that_is_silent_is_unknown_then_lost_then_cleaned(
    around: Around, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT_S", 1)

    async def scenario() -> None:
        host = around.lab.hosts[0]
        async with around.provider(lost_after_s=3) as provider:
            carrying = asyncio.create_task(provider.relay())
            await provider.launch(
                spec(await offer_of(provider, "h1"), "rm-0-silent", hosts=("h1",))
            )
            host.cut()
            provider._links["h1"].hang_up()  # what keep-alives would find out later
            try:
                with pytest.raises(TryAgain):
                    await provider.gangs("rm-0-silent")
                while True:
                    try:
                        (seen,) = await until(provider, "rm-0-silent", is_ended)
                        break
                    except TryAgain:
                        await asyncio.sleep(0.1)
                assert "counts as dead" in seen.reason
                assert (await offer_of(provider, "h1")).capacity == 0
            finally:
                host.mend()
            async with patience():
                while list(host.file("~/.cavvy-agent").glob("*/h1/agents/rm-0-silent")):
                    await provider.gangs()
                    await asyncio.sleep(0.2)
            assert list(await provider.gangs("rm-0-silent")) == [seen]
            carrying.cancel()
            await asyncio.wait([carrying])

    play(scenario())


def test_a_host_with_nothing_but_busybox(lab: Lab, around: Around) -> None:
    bare = lab.add(bare=True)
    try:
        play(_on_bare(around, bare))
    finally:
        lab.remove(bare)


async def _on_bare(around: Around, bare: LabHost) -> None:
    assert "not found" in bare.run("python3 2>&1 || true")
    async with around.provider(hosts=bare.name) as provider:
        async with patience():
            told = ""
            while "Python" not in told:
                with suppress(TryAgain):  # a busy machine may need more than the first wait
                    told = (await facts(provider))[bare.name]
                await asyncio.sleep(0.2)
        assert told.startswith("root@")
        offer = await offer_of(provider, bare.name)
        await provider.launch(spec(offer, "rm-0-bare", hosts=(bare.name,)))
        await until(provider, "rm-0-bare", lambda seen: seen[0].state is GangState.RUNNING)
        (folder,) = bare.file("~/.cavvy-agent").glob("*/*/agents/rm-0-bare/0")
        assert os.stat(folder / "config.json").st_mode & 0o777 == 0o600
        (folder / "finish").touch()
        (seen,) = await until(provider, "rm-0-bare", is_ended)
        assert seen.exit_code == 0


def test_a_volume_is_known_again_after_the_supervisor_and_the_database_are_lost(
    around: Around,
) -> None:
    async def scenario() -> None:
        host = around.lab.hosts[1]
        volume = Volume(kind=VolumeKind.NAMED, source="models", path="/cache")

        async def where(provider: SshProvider) -> list[tuple[str, str | None, str]]:
            await provider.offers()
            return [(each.names[0], each.zone, each.project) for each in await provider.volumes()]

        async with around.provider() as provider:
            offer = await offer_of(provider, "h2")
            gang = replace(spec(offer, "rm-0-volume", hosts=("h2",)), volumes=[volume])
            await provider.launch(gang)
            (path,) = host.file("~/.cavvy-agent").glob("*/h2/volumes/p/models")
            host.run("pkill -9 -f '[s]upervisor serve'")
            assert await where(provider) == [("models", "h2", "p")]
            elsewhere = await offer_of(provider, "h1")
            second = replace(spec(elsewhere, "rm-0-second", hosts=("h1",)), volumes=[volume])
            with pytest.raises(NoCapacity, match="the volume models is on h2"):
                await provider.launch(second)
            spread = replace(
                spec(await offer_of(provider, None), "rm-0-spread", hosts=("h1", "h2")),
                volumes=[volume],
            )
            with pytest.raises(Refused, match="each node of a gang gets its own host"):
                await provider.launch(spread)
            async with patience():
                while list(host.file("~/.cavvy-agent").glob("*/h2/agents/rm-0-volume")):
                    with suppress(TryAgain):  # until the host is connected again
                        await provider.remove("rm-0-volume")
                        await provider.gangs("rm-0-volume")
                    await asyncio.sleep(0.05)
        around.states.clear()
        async with around.provider() as provider:
            assert await where(provider) == [("models", "h2", "p")]
            (found,) = await provider.folders("p")
            assert (found.name, found.host, found.files, found.problem) == ("models", "h2", 0, "")
            assert await provider.folders("q") == []
            assert await provider.remove_folder("p", "models")
            assert not path.exists()
            assert await where(provider) == []

    play(scenario())
