"""The launch ledger's records of gangs on Ray clusters."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from cavvy.domain.offers import Offer
from cavvy.domain.values import Struct

KEPT = timedelta(days=2)  # how long a record is kept after the gang's end


class RayRank(Struct, frozen=True, kw_only=True):
    """One node, as reported by the gang's driver."""

    rank: int
    node: str
    started_at: datetime
    address: str = ""
    ended_at: datetime | None = None
    reason: str = ""
    preempted: bool = False
    exit_code: int | None = None


class RayGangRecord(Struct, frozen=True, kw_only=True):
    """One gang, as requested and last observed."""

    name: str
    cluster: str
    nodes: int
    intended_at: datetime
    offer: Offer | None = None  # None if the gang was found on the cluster but not in the ledger
    session: str = ""  # the session of the cluster's head node at the launch
    launched: bool = False  # True: Ray confirmed the launch
    removed: bool = False  # True: the gang is being removed; a job that appears later is stopped
    placed: bool = False  # True: the gang's placement group exists or has existed
    ranks: Sequence[RayRank] = ()
    ended_at: datetime | None = None
    reason: str = ""
    preempted: bool = False
