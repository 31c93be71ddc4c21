"""What this installation has launched, on its own disk: intents before calls, ends for as long as bills need them."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from remuda.providers.hosts.records import read, write

KEPT = timedelta(days=2)  # after its end


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One node as it was last seen."""

    id: str
    rank: int
    started_at: datetime
    ended_at: datetime | None = None
    address: str | None = None
    reason: str = ""
    preempted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One gang. What is chosen is written before it is asked for, so that asking again asks for the same."""

    name: str
    region: str
    zone: str | None
    type: str
    spot: bool
    nodes: int
    intended_at: datetime
    image: str
    root: str
    disk_gib: int
    subnet: str | None = None
    reservation: str | None = None
    block: bool = False
    makes_group: bool = False  # a security group of its own
    group: str | None = None  # its id, once it is made
    makes_placement: bool = False
    launched: bool = False  # EC2 said so
    removed: bool = False  # it is to go, or is gone: whatever shows of it is ended
    instances: Sequence[Instance] = ()
    ended_at: datetime | None = None
    tidy: bool = False  # nothing made for it is left
    rates: Sequence[tuple[datetime, int]] = ()  # of spot instances, micro-dollars per hour, since when


class Books:
    """Records by gang; one file each."""

    def __init__(self, home: Path, now: Callable[[], datetime]) -> None:
        self._folder, self._now = home / "gangs", now
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._locks: dict[str, asyncio.Lock] = {}
        found = [read(path, Record) for path in self._folder.glob("[!.]*.json")]
        self.records = {record.name: record for record in found if record is not None}

    def lock(self, name: str) -> asyncio.Lock:
        """Held while a gang is launched or removed."""
        return self._locks.setdefault(name, asyncio.Lock())

    def get(self, name: str) -> Record | None:
        return self.records.get(name)

    def put(self, record: Record) -> None:
        if self.records.get(record.name) != record:
            write(self._folder / f"{record.name}.json", record)
            self.records[record.name] = record

    def drop(self, name: str) -> None:
        self.records.pop(name, None)
        (self._folder / f"{name}.json").unlink(missing_ok=True)

    def clear_old(self) -> None:
        """Forget what ended long ago and has left nothing."""
        now = self._now()
        for record in list(self.records.values()):
            if record.ended_at is not None and record.tidy and now - record.ended_at >= KEPT:
                self.drop(record.name)
                self._locks.pop(record.name, None)
