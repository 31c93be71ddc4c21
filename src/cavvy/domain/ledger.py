"""The ledger: all charged amounts, as entries that are only added and never changed."""

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum

from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import Struct, field

STORAGE_LINE = "storage"  # the `line` of entries for a volume
VOLUME_SUBJECT = "volume:"  # prefix of the IDs of volumes
OF_SUBJECT = -1  # the `rank` of entries that belong to a whole subject and not to one node


class EntryKind(StrEnum):
    """The kind of cost that a ledger entry records."""

    NODE = "node"
    DISK = "disk"
    ADDRESS = "address"
    STORAGE = "storage"  # volumes while no job pays for them
    TRAFFIC = "traffic"
    # paid machine time in which no job ran: warm nodes, the unused part of a minimum charge,
    # machines of launches that failed, and replicas between requests
    IDLE = "idle"
    COLD_START = "cold start"  # replicas of services until they are ready
    REQUEST = "request"  # replicas of services while they worked on requests
    # the difference between a bill and the amounts that were posted for it before
    CORRECTION = "correction"
    DISCOUNT = "discount"  # always 0 or less, unless it takes back a part of an earlier discount


class EntrySource(StrEnum):
    """The source of an entry's amount."""

    METER = "meter"  # measured by Cavvy, from the provider's reports
    OPENING = "opening"  # a charge that was stored before the ledger existed
    SETTING = "setting"  # a discount in the settings
    DIVISION = "division"  # a replica's bill, divided among the requests of its service


class QuantityUnit(StrEnum):
    """The unit of an entry's quantity."""

    MICROSECONDS = "us"  # microseconds of one node, or of its disks or addresses
    BYTES = "bytes"
    REQUESTS = "requests"
    NONE = ""


class LedgerSubject(Struct, frozen=True, kw_only=True):
    """What an entry of the ledger is about. There are three kinds: an attempt of a job, on one kind
    of machine; a volume that no job uses; and the work of a replica for one key of its service. A
    subject never changes, so a job's later names or tags do not change what was charged. Text
    fields that do not apply to the kind of subject are empty.
    """

    id: str  # the number of the attempt, if the subject is an attempt
    project: str
    user: str
    job_id: str = ""
    job: str = ""
    machine: str = ""  # name of the machine on which the job ran
    service: str = ""
    attempt: int = 0
    provider: str
    account: str  # the account at the provider; see `domain/credentials.py`
    region: str = ""
    zone: str = ""
    instance_type: str = ""
    accelerator: str = ""
    accelerators: float = 0  # of each node
    purchase: str = ""
    tags: dict[str, str] = field(default_factory=dict)
    volume: str = ""  # the volume, for storage between jobs
    key: str = ""  # for requests: the client's key for the service


class LedgerPosting(Struct, frozen=True, kw_only=True):
    """An amount for the half-open period [since, until). A posting does not have a position in the
    ledger yet. The store assigns the position. `line` and `line_since` (the kind and the start of
    the charge) identify the line of the bill to which the posting belongs. The amounts of all
    entries for one line of the bill add up to the amount of the charge.
    """

    kind: EntryKind
    line: str
    line_since: datetime
    since: datetime
    until: datetime
    quantity: int
    unit: QuantityUnit
    rate: HourlyRate  # 0 for costs that are not billed by time
    amount: Money
    source: EntrySource = EntrySource.METER


class LedgerEntry(LedgerPosting, frozen=True, kw_only=True):
    """A posting with its position in the ledger. `subject`, `rank` and `sequence` identify the
    entry: `sequence` counts the entries of the rank. In a correction, `corrects` is the sequence
    number of the newest earlier entry of the corrected line.
    """

    number: int = 0  # set by the store; later entries have higher numbers
    subject: str
    project: str
    rank: int
    sequence: int
    corrects: int | None = None

    @property
    def id(self) -> str:
        return f"{self.subject}/{self.rank}/{self.sequence}"


class LedgerLine(Struct, frozen=True, kw_only=True):
    """An entry together with its subject, as statements list it."""

    entry: LedgerEntry
    subject: LedgerSubject


class EnergyUse(Struct, frozen=True, kw_only=True):
    """The energy that nodes in a region measured."""

    provider: str
    region: str
    joules: int


class LedgerSum(Struct, frozen=True, kw_only=True):
    """The sum of the entries of one group. `groups` contains a value for each dimension of the
    group. `amount` is the sum of all entries, and `discount` is the sum of the discounts among
    them. `since` and `until` are the begin and the end of the time that the other entries cover;
    both are None if there are only discounts.
    """

    groups: Mapping[str, str]
    amount: Money
    discount: Money
    jobs: int
    since: datetime | None = None
    until: datetime | None = None


class MonthDiscounts(Struct, frozen=True, kw_only=True):
    """The discounts of the month that begins at `month`. `spread` maps the name of each discount to
    the discounted amount of each attempt, in micro-dollars, 0 or more. `periods` contains, for each
    attempt, the time in the month for which the attempt was charged.
    """

    month: datetime
    spread: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    periods: Mapping[str, tuple[datetime, datetime]] = field(default_factory=dict)
