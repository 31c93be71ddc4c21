"""What is kept on this machine about gangs on hosts: what was asked for, and how it ended.

gangs/NAME.json   written before any host is asked to start something
ended/NAME.json   what is remembered of a gang that is over
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypeVar

from cavvy.providers.hosts.records import note, read, write

_T = TypeVar("_T")
REMEMBERED = timedelta(hours=2)  # the seam asks for one at least


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetIntent:
    """A gang that was asked for. `hosts` are by rank."""

    name: str
    installation: str
    hosts: Sequence[str]
    addresses: Sequence[str]
    launched_at: datetime
    grace_s: float
    launched: bool = False  # every host has confirmed
    removing: bool = False
    given_up: str = ""  # why the launch failed: all or none, so that whatever was started goes

    @property
    def used(self) -> Sequence[str]:
        """Its hosts, each once."""
        return list(dict.fromkeys(self.hosts))


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRankEnd:
    rank: int
    engine_id: str
    address: str
    started_at: datetime
    ended_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetGangEnd:
    """A gang that is over. Hosts in `owing` have not said so themselves: what lives there still
    is killed.
    """

    name: str
    installation: str
    reason: str
    exit_code: int | None
    ranks: Sequence[FleetRankEnd]
    seen_at: datetime
    owing: Sequence[str] = ()


class FleetLedger:
    """The records of one installation."""

    def __init__(self, home: Path, installation: str, now: Callable[[], datetime]) -> None:
        self._home, self._installation, self._now = home, installation, now
        for folder in ("gangs", "ended"):
            (home / folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._intents = {
            each.name: each
            for each in self._scan("gangs", FleetIntent)
            if each.installation == installation
        }
        self._ended = {
            each.name: each
            for each in self._scan("ended", FleetGangEnd)
            if each.installation == installation
        }

    @property
    def intents(self) -> Mapping[str, FleetIntent]:
        return self._intents

    @property
    def ended(self) -> Mapping[str, FleetGangEnd]:
        return self._ended

    def put(self, intent: FleetIntent) -> None:
        """Write an intent down. Raises OSError."""
        write(self._home / "gangs" / f"{intent.name}.json", intent)
        self._intents[intent.name] = intent

    def drop(self, name: str) -> None:
        """Forget an intent."""
        (self._home / "gangs" / f"{name}.json").unlink(missing_ok=True)
        self._intents.pop(name, None)

    def end(self, ended: FleetGangEnd) -> None:
        """The gang is over, for good."""
        note(self._home / "ended" / f"{ended.name}.json", ended)
        self._ended[ended.name] = ended
        self.drop(ended.name)

    def forget_old(self) -> None:
        """Drop the records of gangs that ended long ago and of which no host may have anything
        left.
        """
        oldest = self._now() - REMEMBERED
        for name, ended in list(self._ended.items()):
            if ended.seen_at < oldest and not ended.owing:
                (self._home / "ended" / f"{name}.json").unlink(missing_ok=True)
                del self._ended[name]

    def _scan(self, folder: str, kind: type[_T]) -> Iterator[_T]:
        for path in (self._home / folder).glob("*.json"):
            record = read(path, kind)
            if record is not None:
                yield record
