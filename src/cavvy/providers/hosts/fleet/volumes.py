"""The named volumes on hosts: each is a folder on one host, the one on which a job first used it.

A record names the host of a volume from the moment before a job that makes it is launched. What the
hosts report then corrects the records: a volume that a host reports is recorded, even if the
database was lost, and a record is dropped if its host answers without the volume.
"""

from collections.abc import Collection, Mapping, Sequence

from cavvy.domain.allocations import VolumeLocation
from cavvy.providers.base import NoCapacity, Refused, TryAgain
from cavvy.providers.hosts.fleet.host_link import HostLink
from cavvy.providers.hosts.fleet.launch_ledger import FleetIntent, FleetLedger, HostVolume
from cavvy.providers.hosts.fleet.machines import KnownHost
from cavvy.providers.hosts.remote_calls import EmptyAnswer
from cavvy.providers.hosts.supervisor.volumes import NAME

_MOST_REPORTED = 1000  # volumes of a host; the work on it may have made folders of such names

SPREAD = (
    "a named volume is a folder on one host, but each node of a gang gets its own host; use an "
    "`nfs` export, or a `host` folder of a file system that the hosts share"
)


class FleetVolumes:
    """The volumes of one installation on the hosts of one provider. `links` and `known` are those
    of the fleet."""

    def __init__(
        self,
        provider: str,
        ledger: FleetLedger,
        links: Mapping[str, HostLink],
        known: Mapping[str, KnownHost],
    ) -> None:
        self._provider, self._ledger, self._links, self._known = provider, ledger, links, known
        self._records = ledger.volumes

    async def list_locations(self) -> Sequence[VolumeLocation]:
        """Return where the volumes of all projects are. Raises TryAgain."""
        await self._records.refresh()
        return [
            VolumeLocation(
                provider=self._provider,
                names=(each.volume,),
                region=self._find_region(each.host) or each.region,
                zone=each.host,
                project=each.project,
                problem="" if each.host in self._links else self._say_unlisted(each),
            )
            for each in self._records.records.values()
        ]

    async def list_of(self, project: str) -> Sequence[HostVolume]:
        """Return the records of a project's volumes. Raises TryAgain."""
        await self._records.refresh()
        found = (each for each in self._records.records.values() if each.project == project)
        return sorted(found, key=lambda each: each.name)

    def list_on(self, host: str) -> Collection[str]:
        """Return the names of the records of a host, as this server knows them."""
        return [each.name for each in self._records.records.values() if each.host == host]

    async def claim(self, intent: FleetIntent) -> None:
        """Record that the gang's host has its volumes. Raises NoCapacity if another host has one of
        them, and TryAgain."""
        for volume in intent.volumes:
            host, name = intent.hosts[0], f"{intent.project}/{volume}"
            await self._records.refresh(name)
            known = self._records.get(name)
            if known is not None and known.host != host:
                raise NoCapacity(
                    f"the volume {volume} is on {known.host} and can be used only there"
                )
            region = self._find_region(host)
            await self._records.put(HostVolume(name=name, host=host, region=region))

    async def note(
        self, host: str, report: Mapping[str, Sequence[str]] | None, before: Collection[str]
    ) -> None:
        """Compare a host's report with the records. `before` are the records that this server knew
        before it asked: later ones may be of volumes that were made after the host answered."""
        if report is None:
            return
        reported = {
            f"{project}/{each}"
            for project, names in report.items()
            for each in names
            if NAME.fullmatch(project) and NAME.fullmatch(each)
        }
        known_here = set(self.list_on(host))
        fresh = sorted(reported - known_here)[: max(0, _MOST_REPORTED - len(known_here))]
        try:
            for name in fresh:
                await self._records.refresh(name)
                known = self._records.get(name)
                if known is None or known.host not in self._links:
                    region = self._find_region(host)
                    await self._records.put(HostVolume(name=name, host=host, region=region))
            gone = [each for each in before if each not in reported]
            if gone:
                await self._ledger.refresh()  # a launch by another server may be about to make it
            for name in gone:
                known = self._records.get(name)
                if known is not None and known.host == host and not self._is_claimed(known):
                    await self._records.drop(name)
        except TryAgain:
            return  # the next report is compared again

    async def remove(self, project: str, volume: str) -> bool:
        """Delete a volume on its host; of a host that is no longer listed, only forget it. Return
        whether there was one. Raises Refused, TryAgain."""
        name = f"{project}/{volume}"
        await self._records.refresh(name)
        known = self._records.get(name)
        if known is None:
            return False
        link = self._links.get(known.host)
        if link is not None:
            if not link.up:
                raise TryAgain(
                    f"the volume {volume} is on {known.host}, which cannot be reached now: "
                    f"{link.problem or 'it has not answered yet'}"
                )
            await self._ledger.refresh()
            if self._is_claimed(known):
                raise Refused(f"a job on {known.host} uses the volume {volume}")
            await link.ask("remove_volume", EmptyAnswer, project=project, name=volume)
        await self._records.drop(name)
        return True

    def _is_claimed(self, volume: HostVolume) -> bool:
        """Return whether a gang that has not ended uses the volume on its host."""
        return any(
            volume.host in each.hosts
            and each.project == volume.project
            and volume.volume in each.volumes
            and not each.given_up
            for each in self._ledger.intents.values()
        )

    def _find_region(self, host: str) -> str:
        known = self._known.get(host)
        return known.entry.group if known is not None else ""

    def _say_unlisted(self, volume: HostVolume) -> str:
        return (
            f"{volume.host}, which is no longer in the inventory: list it again, or "
            f"forget the volume with `cavvy state rm volume {volume.volume} -p {volume.project}`"
        )
