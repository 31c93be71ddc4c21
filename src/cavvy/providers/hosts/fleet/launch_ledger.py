"""The launch ledger of gangs on hosts: records requested launches and ended gangs."""

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta

from cavvy.domain.gangs import NodeSeen
from cavvy.domain.values import Struct, field
from cavvy.providers.hosts.records import HostGangEnd
from cavvy.providers.ledger import LaunchLedger
from cavvy.providers.state import ProviderState

REMEMBERED = timedelta(
    hours=2
)  # how long records of ended gangs are kept; the provider interface requires one hour


class HostCaches(Struct, frozen=True, kw_only=True):
    """The names of a gang's caches on one host; see `agent.work.own_cache`."""

    own: str  # the cache of the gang's project
    fresh: str = ""  # a cache that no other project has seen


class HostTenant(Struct, frozen=True, kw_only=True):
    """The project that ran last on the host `name`, the name of its cache there, and the host's
    secret, from which the names of all projects' caches are computed. Jobs cannot guess the names,
    so no job can create a cache before its project does."""

    name: str
    secret: str
    project: str
    fresh: str


class FleetIntent(Struct, frozen=True, kw_only=True):
    """A requested gang. `hosts` and `addresses` are in the order of ranks."""

    name: str
    installation: str
    hosts: Sequence[str]
    addresses: Sequence[str]
    launched_at: datetime
    grace_s: float
    launched: bool = False  # True: every host has confirmed the launch
    removing: bool = False
    # why the launch failed, after which the started agents are removed; "" if it did not fail
    given_up: str = ""
    project: str = ""  # "" if it is unknown, as in records of earlier versions
    volumes: Sequence[str] = ()  # the project's named volumes that outlive the gang
    separates: bool = False  # True: the work is separated from that of other projects
    caches: Mapping[str, HostCaches] = field(default_factory=dict)  # by host
    # rank, as text -> the round (`GangSpec.round`) that replaced it last
    rounds: Mapping[str, int] = field(default_factory=dict)
    # rank -> when the new rank was requested, once its host has confirmed that it was started
    renewed_at: Mapping[str, datetime] = field(default_factory=dict)
    replaced: Sequence[NodeSeen] = ()  # ranks that were lost and replaced

    def start_of(self, rank: int) -> datetime | None:
        """Return when the rank was started; None if it waits to replace a lost one."""
        replaces = str(rank) in self.rounds
        return self.renewed_at.get(str(rank)) if replaces else self.launched_at

    @property
    def used(self) -> Sequence[str]:
        """The gang's hosts, each listed once."""
        return list(dict.fromkeys(self.hosts))


class FleetGangEnd(HostGangEnd, frozen=True, kw_only=True):
    """The record of an ended gang. `owing` names the hosts that have not confirmed yet that the
    gang has ended. Cavvy kills the gang's agents that still run on these unconfirmed hosts.
    """

    owing: Sequence[str] = ()


class HostVolume(Struct, frozen=True, kw_only=True):
    """The host that has a named volume of a project, or on which the volume is about to be made.
    `name` is that of the record, PROJECT/VOLUME."""

    name: str
    host: str
    region: str  # the host's group

    @property
    def project(self) -> str:
        return self.name.partition("/")[0]

    @property
    def volume(self) -> str:
        return self.name.partition("/")[2]


class FleetLedger:
    """The launches of one installation: the `intents` of gangs that have not ended, and the records
    of `ended` gangs.
    """

    def __init__(self, state: ProviderState, now: Callable[[], datetime]) -> None:
        self._intents = LaunchLedger(state, FleetIntent)
        self._ended = LaunchLedger(state, FleetGangEnd, "ended")
        self._tenants = LaunchLedger(state, HostTenant, "tenants")
        self.volumes = LaunchLedger(state, HostVolume, "volumes")
        self._now = now

    @property
    def intents(self) -> Mapping[str, FleetIntent]:
        return self._intents.records

    @property
    def ended(self) -> Mapping[str, FleetGangEnd]:
        return self._ended.records

    async def refresh(self, name: str | None = None) -> None:
        """See `LaunchLedger.refresh`. If `name` is None, also delete records of gangs that ended
        long ago and whose end all hosts have confirmed.
        """
        await self._intents.refresh(name)
        await self._ended.refresh(name)
        oldest = self._now() - REMEMBERED
        for ended in list(self.ended.values()) if name is None else ():
            if ended.seen_at < oldest and not ended.owing:
                await self._ended.drop(ended.name)

    async def put(self, intent: FleetIntent) -> None:
        """See `LaunchLedger.put`."""
        await self._intents.put(intent)

    async def drop(self, name: str) -> None:
        """Delete an intent. Raises TryAgain."""
        await self._intents.drop(name)

    async def take_host(self, host: str, project: str) -> HostTenant:
        """Record that the project now runs on the host. Raises TryAgain."""
        await self._tenants.refresh(host)
        known = self._tenants.get(host)
        if known is None or known.project != project:
            known = HostTenant(
                name=host,
                secret=os.urandom(16).hex() if known is None else known.secret,
                project=project,
                fresh=os.urandom(10).hex(),
            )
            await self._tenants.put(known)
        return known

    async def end(self, ended: FleetGangEnd) -> None:
        """Record that a gang has ended. Raises TryAgain."""
        await self._ended.put(ended)
        await self.drop(ended.name)
