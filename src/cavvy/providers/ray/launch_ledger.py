"""What this installation has launched, on its own disk: intents before calls, ends for as long
as bills need them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from cavvy.domain.offers import Offer
from cavvy.providers.hosts.records import LaunchLedger

KEPT = timedelta(days=2)  # after its end


@dataclass(frozen=True, slots=True, kw_only=True)
class RayRank:
    """One node as its gang's driver told of it."""

    rank: int
    node: str
    started_at: datetime
    address: str = ""
    ended_at: datetime | None = None
    reason: str = ""
    preempted: bool = False
    exit_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RayGangRecord:
    """One gang, as it was asked for and last seen."""

    name: str
    cluster: str
    nodes: int
    intended_at: datetime
    offer: Offer | None = None  # None: found on the cluster, and not in these books
    session: str = ""  # of the cluster's head when it was launched
    launched: bool = False  # Ray said so
    removed: bool = False  # it is to go: whatever shows of it is ended
    placed: bool = False  # its placement group is there, or was
    ranks: Sequence[RayRank] = ()
    ended_at: datetime | None = None
    reason: str = ""
    preempted: bool = False


class RayLaunchLedger(LaunchLedger[RayGangRecord]):
    """Records by gang."""

    def __init__(self, home: Path, now: Callable[[], datetime]) -> None:
        super().__init__(home / "gangs", RayGangRecord)
        self._now = now

    def of(self, cluster: str) -> list[RayGangRecord]:
        return [record for record in self.records.values() if record.cluster == cluster]

    def is_old(self, record: RayGangRecord) -> bool:
        """Whether nobody needs to know of it any more."""
        return record.ended_at is not None and self._now() - record.ended_at >= KEPT
