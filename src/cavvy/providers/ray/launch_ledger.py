"""The launch ledger's record of a gang on a Ray cluster."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cavvy.domain.offers import Offer

KEPT = timedelta(days=2)  # after the gang's end


@dataclass(frozen=True, slots=True, kw_only=True)
class RayRank:
    """One node, as the gang's driver reported it."""

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
    """One gang, as requested and last seen."""

    name: str
    cluster: str
    nodes: int
    intended_at: datetime
    offer: Offer | None = None  # None: found on the cluster, and missing in the ledger
    session: str = ""  # id of the cluster's head at the launch
    launched: bool = False  # Ray confirmed the launch
    removed: bool = False  # the gang is being removed: a job that appears later is stopped
    placed: bool = False  # its placement group exists, or existed
    ranks: Sequence[RayRank] = ()
    ended_at: datetime | None = None
    reason: str = ""
    preempted: bool = False
