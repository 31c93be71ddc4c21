"""The bills of replicas, and how they were divided among the requests of their services."""

from collections.abc import Mapping
from datetime import datetime

from cavvy.domain.ledger import EntryKind
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import Struct, field

# What each gateway has counted for a replica since it began: by the gateway's epoch, then by the
# client's key
RequestCounts = Mapping[str, Mapping[str, "KeyWork"]]


class KeyWork(Struct, frozen=True, kw_only=True):
    """The requests of a client's key ("" without one) that have begun, and their shares of a
    replica's time.
    """

    requests: int
    work_us: int


class DividedBill(Struct, frozen=True, kw_only=True):
    """What was divided of an attempt's bill: its charges until a time, by kind, and the counters
    that were used, by the epoch of their gateway and the client's key.
    """

    attempt_id: str
    until: datetime
    moved: dict[EntryKind, int] = field(default_factory=dict)
    counted: dict[str, dict[str, KeyWork]] = field(default_factory=dict)
    ready_at: datetime | None = None
    version: int = 0


class ReplicaBill(Struct, frozen=True, kw_only=True):
    """The charges of a replica's attempt, added up by kind, and what was divided of them."""

    attempt_id: str
    job_id: str
    since: datetime
    until: datetime
    amounts: Mapping[EntryKind, int]
    rate: HourlyRate  # of all its nodes, by the newest charges
    divided: DividedBill | None
