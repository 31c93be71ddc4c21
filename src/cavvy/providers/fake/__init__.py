"""A simulated cloud in memory, for tests, demos and the simulator. The provider is enabled only by
its table in the settings.

Separates the gangs of several installations on one fake cloud.
"""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from cavvy.domain.allocations import Host
from cavvy.domain.messages import AgentCalls
from cavvy.domain.offers import Offer
from cavvy.domain.values import replace
from cavvy.providers.abilities import (
    CLOSEABLE,
    REPLACES_NODES,
    RUNS_AGENTS_HERE,
    SHARES_HOSTS,
    SIGNALS_CHANGES,
)
from cavvy.providers.base import (
    Feature,
    GangSeen,
    GangSpec,
    Manifest,
    Provider,
    ProviderContext,
    ProviderSetting,
    Refused,
    SettingKind,
)
from cavvy.providers.fake.cloud import FakeCloud
from cavvy.providers.fake.script import DEFAULT, read_script
from cavvy.providers.settings import project_text, text

MANIFEST = Manifest(
    name="fake",
    title="A made-up cloud",
    test_double=True,
    docs="A simulated cloud in the server's memory. The simulated cloud costs nothing, and "
    "follows a script of prices, capacity and faults.",
    unsupported={
        Feature.IMAGE: "the nodes are simulated and run no containers",
        Feature.BUILD: "the nodes are simulated and build no images",
        Feature.LOGIN: "the nodes are simulated and pull no images",
        Feature.VOLUMES: "the cloud is simulated and stores no data",
        Feature.MOUNTS: "the nodes are simulated and have no file systems",
        Feature.NETWORK: "the nodes are simulated and have no network",
        Feature.DISK: "the nodes are simulated and have no disks",
    },
    abilities=(SIGNALS_CHANGES, RUNS_AGENTS_HERE, REPLACES_NODES, CLOSEABLE),
    settings=(
        text(
            "script",
            "The TOML file with the cloud's offers and faults. By default, the cloud has three "
            "offers and no faults.",
        ),
        ProviderSetting(
            name="key_file",
            kind=SettingKind.KEY_FILE,
            consequence="A file with a key. The cloud accepts every key except `wrong`.",
        ).for_projects(),
        project_text("regions", "Has no effect."),
    ),
    visibility_delay=timedelta(minutes=2),
)


def make(context: ProviderContext) -> Provider:
    """Return an account on a new fake cloud, which follows the script in the settings or, without
    one, the default script.
    """
    key_file = context.settings.get("key_file")
    if key_file is not None and Path(str(key_file)).read_text("utf-8").strip() == "wrong":
        raise Refused("[providers.fake]: the cloud does not accept the key")
    path = context.settings.get("script")
    script = read_script(Path(str(path)).expanduser()) if path is not None else DEFAULT
    account = FakeHostAccount if script.hosts else FakeAccount
    return account(FakeCloud(MANIFEST, script, context.now), context.installation)


class FakeAccount:
    """A provider on a fake cloud, which several installations can use."""

    def __init__(self, cloud: FakeCloud, installation: str) -> None:
        abilities = [each for each in cloud.manifest.abilities if each is not SHARES_HOSTS]
        self.manifest = replace(cloud.manifest, abilities=abilities)
        self._cloud = cloud
        self._installation = installation

    async def offers(self) -> Sequence[Offer]:
        return await self._cloud.offers()

    async def launch(self, gang: GangSpec) -> None:
        if gang.installation != self._installation:
            raise Refused(f"{gang.name} belongs to another installation")
        await self._cloud.launch(gang)

    async def replace(self, gang: GangSpec, ranks: Sequence[int]) -> None:
        if self._ours(gang.name):
            await self._cloud.replace(gang, ranks)

    async def gangs(self, name: str | None = None) -> Sequence[GangSeen]:
        return [seen for seen in await self._cloud.gangs(name) if self._ours(seen.name)]

    async def remove(self, name: str) -> None:
        if self._ours(name):
            await self._cloud.remove(name)

    async def changed(self) -> str:
        while True:
            name = await self._cloud.changed()
            if self._ours(name):
                return name

    def connect(self, control_plane: AgentCalls | None) -> None:
        self._cloud.connect(control_plane)

    async def close(self) -> None:
        await self._cloud.close()

    def _ours(self, name: str) -> bool:
        """Return whether this installation launched the gang with this name. The fake cloud records
        the installation of each gang, as real clouds do with tags.
        """
        found = self._cloud.find(name)
        return any(gang.spec.installation == self._installation for gang in found)


class FakeHostAccount(FakeAccount):
    """A provider on a fake cloud with shared hosts."""

    def __init__(self, cloud: FakeCloud, installation: str) -> None:
        super().__init__(cloud, installation)
        self.manifest = cloud.manifest

    async def hosts(self) -> Sequence[Host]:
        return await self._cloud.hosts()
