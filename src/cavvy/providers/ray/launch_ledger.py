"""The launch ledger's record of a gang on a Ray cluster."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cavvy.domain.offers import Offer

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
