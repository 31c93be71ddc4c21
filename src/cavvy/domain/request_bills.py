"""The bills of replicas, and their division among the requests of their services."""

from collections.abc import Mapping
from datetime import datetime

from cavvy.domain.ledger import EntryKind
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import Struct, field

# The counts of each gateway for a replica since the gateway was started: keyed by the gateway's
# epoch, then by the client's key
RequestCounts = Mapping[str, Mapping[str, "KeyWork"]]


class KeyWork(Struct, frozen=True, kw_only=True):
    """The number of started requests of a client's key ("" for requests without a key), and their
    share of a replica's time.
    """

    requests: int
    work_us: int


class DividedBill(Struct, frozen=True, kw_only=True):
    """The divided part of an attempt's bill: the charges until a given time, by kind, and the
    counts that were used, by the epoch of the gateway and the client's key.
    """

    attempt_id: str
    until: datetime
    moved: dict[EntryKind, int] = field(default_factory=dict)
    counted: dict[str, dict[str, KeyWork]] = field(default_factory=dict)
    ready_at: datetime | None = None
    version: int = 0


class ReplicaBill(Struct, frozen=True, kw_only=True):
    """The charges of a replica's attempt, added up by kind, and their divided part."""

    attempt_id: str
    job_id: str
    since: datetime
    until: datetime
    amounts: Mapping[EntryKind, int]
    rate: HourlyRate  # of all its nodes, by the newest charges
    divided: DividedBill | None
