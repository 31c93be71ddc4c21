"""The launch ledger of gangs on hosts: records requested launches and ended gangs."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta

from cavvy.domain.values import Struct
from cavvy.providers.base import NodeSeen
from cavvy.providers.ledger import LaunchLedger
from cavvy.providers.state import ProviderState

REMEMBERED = timedelta(
    hours=2
)  # how long records of ended gangs are kept; the provider interface requires one hour


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
    separates: bool = False  # True: the work is separated from that of other projects

    @property
    def used(self) -> Sequence[str]:
        """The gang's hosts, each listed once."""
        return list(dict.fromkeys(self.hosts))


class FleetGangEnd(Struct, frozen=True, kw_only=True):
    """The record of an ended gang. `owing` names the hosts that have not confirmed yet that the
    gang has ended. Cavvy kills the gang's agents that still run on these unconfirmed hosts.
    """

    name: str
    installation: str
    reason: str
    exit_code: int | None
    ranks: Sequence[NodeSeen]
    seen_at: datetime
    owing: Sequence[str] = ()


class FleetLedger:
    """The launches of one installation: the `intents` of gangs that have not ended, and the records
    of `ended` gangs.
    """

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

    async def end(self, ended: FleetGangEnd) -> None:
        """Record that a gang has ended. Raises TryAgain."""
        await self._ended.put(ended)
        await self.drop(ended.name)
