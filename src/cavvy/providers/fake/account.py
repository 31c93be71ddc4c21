"""Separates the gangs of several installations on one fake cloud."""

from collections.abc import Sequence

from cavvy.domain.allocations import Host
from cavvy.domain.messages import AgentCalls
from cavvy.domain.offers import Offer
from cavvy.domain.values import replace
from cavvy.providers.abilities import SHARES_HOSTS
from cavvy.providers.base import GangSeen, GangSpec, Refused
from cavvy.providers.fake.cloud import FakeCloud


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
