"""The launch ledger of gangs on hosts: requested launches, and how they ended."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cavvy.providers.base import NodeSeen
from cavvy.providers.ledger import LaunchLedger
from cavvy.providers.state import ProviderState

REMEMBERED = timedelta(
    hours=2
)  # how long ended gangs are kept; the provider interface requires one hour


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetIntent:
    """A requested gang. `hosts` are listed by rank."""

    name: str
    installation: str
    hosts: Sequence[str]
    addresses: Sequence[str]
    launched_at: datetime
    grace_s: float
    launched: bool = False  # every host has confirmed
    removing: bool = False
    given_up: str = ""  # why the launch failed; agents that were started are removed

    @property
    def used(self) -> Sequence[str]:
        """Its hosts, each once."""
        return list(dict.fromkeys(self.hosts))


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetGangEnd:
    """An ended gang. Hosts in `owing` did not confirm it: agents that still live there are
    killed.
    """

    name: str
    installation: str
    reason: str
    exit_code: int | None
    ranks: Sequence[NodeSeen]
    seen_at: datetime
    owing: Sequence[str] = ()


class FleetLedger:
    """The launches of one installation: `intents` of gangs that are not over, and the `ended`
    ones."""

    def __init__(self, state: ProviderState, now: Callable[[], datetime]) -> None:
        self._intents = LaunchLedger(state, FleetIntent)
        self._ended = LaunchLedger(state, FleetGangEnd, "ended")
        self._now = now

    @property
    def intents(self) -> Mapping[str, FleetIntent]:
        return self._intents.records

    @property
    def ended(self) -> Mapping[str, FleetGangEnd]:
        return self._ended.records

    async def refresh(self, name: str | None = None) -> None:
        """As LaunchLedger.refresh. Without a name, also delete records of gangs that ended long ago
        and left nothing on any host.
        """
        await self._intents.refresh(name)
        await self._ended.refresh(name)
        oldest = self._now() - REMEMBERED
        for ended in list(self.ended.values()) if name is None else ():
            if ended.seen_at < oldest and not ended.owing:
                await self._ended.drop(ended.name)

    async def put(self, intent: FleetIntent) -> None:
        """As LaunchLedger.put."""
        await self._intents.put(intent)

    async def drop(self, name: str) -> None:
        """Delete an intent. Raises TryAgain."""
        await self._intents.drop(name)

    async def end(self, ended: FleetGangEnd) -> None:
        """Record the final end of a gang. Raises TryAgain."""
        await self._ended.put(ended)
        await self.drop(ended.name)
