"""The ledger: all charged amounts, as entries that are only added and never changed; and the
entries for the changes of a bill.

A bill is the list of a node's charges. The store calls `post` in the transaction that replaces the
charges, so the entries of each line of the bill always add up to the line's charge.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from itertools import pairwise

from cavvy.domain.events import Charge, ChargeKind
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import Struct, field, replace

STORAGE_LINE = "storage"  # the `line` of entries for a volume
REQUEST_LINE = "requests"  # of those for requests to an API
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


class TokenUse(Struct, frozen=True, kw_only=True):
    """Tokens of language models. `cached` is the part of `prompt` that the engine held in its
    cache; `estimated` is the part of all tokens that the gateway estimated, because the engine did
    not state them.
    """

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    estimated: int = 0

    def __bool__(self) -> bool:
        return bool(self.prompt or self.completion)

    def combine(self, of: Callable[[int, int], int], other: "TokenUse") -> "TokenUse":
        """Combine each count with that of `other` by a function such as `max`."""
        return TokenUse(
            prompt=of(self.prompt, other.prompt),
            cached=of(self.cached, other.cached),
            completion=of(self.completion, other.completion),
            estimated=of(self.estimated, other.estimated),
        )


_NO_TOKENS = TokenUse()


def combine_tokens(
    of: Callable[[int, int], int], one: Mapping[str, TokenUse], other: Mapping[str, TokenUse]
) -> dict[str, TokenUse]:
    """Combine the counts of each model by a function such as `max`."""
    pairs = {model: (one.get(model, _NO_TOKENS), other.get(model, _NO_TOKENS)) for model in one}
    pairs |= {model: (_NO_TOKENS, use) for model, use in other.items() if model not in one}
    return {model: mine.combine(of, others) for model, (mine, others) in pairs.items()}


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


ChargedPeriod = tuple[datetime, datetime]
_MICROSECOND = timedelta(microseconds=1)
KINDS = {
    ChargeKind.NODE: EntryKind.NODE,
    ChargeKind.KEPT: EntryKind.IDLE,
    ChargeKind.MINIMUM: EntryKind.IDLE,
    ChargeKind.ROLLED_BACK: EntryKind.IDLE,
    ChargeKind.DISK: EntryKind.DISK,
    ChargeKind.ADDRESS: EntryKind.ADDRESS,
    ChargeKind.TRAFFIC: EntryKind.TRAFFIC,
}


def post(before: Iterable[Charge], after: Iterable[Charge]) -> list[LedgerPosting]:
    """Return the postings that turn the charges `before` of one node into the charges `after`.

    If only the period of a line has become longer, an entry for the added time is posted. All
    changes except longer periods are corrections: for example, a shorter period, another price, or
    the removal of a line. No posting crosses the beginning of a month. Unchanged charges need no
    postings.
    """
    old = {(charge.kind, charge.since): charge for charge in before}
    new = {(charge.kind, charge.since): charge for charge in after}
    found: list[LedgerPosting] = []
    for key in sorted({**old, **new}, key=lambda each: (each[1], each[0])):
        posting = _post_line(old.get(key), new.get(key))
        if posting is not None:
            found += split_months(posting)
    return found


def _post_line(old: Charge | None, new: Charge | None) -> LedgerPosting | None:
    if old is None:
        return None if new is None else _posting(new, KINDS[new.kind], new.since, new.until)
    if new is None:
        return _posting(old, EntryKind.CORRECTION, old.since, old.until, sign=-1)
    if (old.until, old.amount, old.bytes) == (new.until, new.amount, new.bytes):
        return None
    same_rate = old.rate == new.rate
    more = _posting(new, KINDS[new.kind], old.until, new.until, less=old)
    longer = new.until > old.until or new.kind is ChargeKind.TRAFFIC
    if same_rate and longer and new.until >= old.until and more.amount.micros >= 0:
        return more
    since = min(old.until, new.until) if same_rate and old.until != new.until else new.since
    until = max(old.until, new.until)
    return replace(more, kind=EntryKind.CORRECTION, since=since, until=until)


def _posting(
    charge: Charge,
    kind: EntryKind,
    since: datetime,
    until: datetime,
    *,
    sign: int = 1,
    less: Charge | None = None,
) -> LedgerPosting:
    """Return a posting of `charge`. If `less` is given, its quantity and amount are subtracted."""
    sent = charge.kind is ChargeKind.TRAFFIC
    quantity = _quantity(charge) - (0 if less is None else _quantity(less))
    amount = charge.amount.micros - (0 if less is None else less.amount.micros)
    return LedgerPosting(
        kind=kind,
        line=str(charge.kind),
        line_since=charge.since,
        since=since,
        until=until,
        quantity=sign * quantity,
        unit=QuantityUnit.BYTES if sent else QuantityUnit.MICROSECONDS,
        rate=charge.rate,
        amount=Money(sign * amount),
        source=EntrySource.METER,
    )


def _quantity(charge: Charge) -> int:
    if charge.kind is ChargeKind.TRAFFIC:
        return charge.bytes
    return (charge.until - charge.since) // _MICROSECOND


def split_months(posting: LedgerPosting) -> Iterator[LedgerPosting]:
    """Split the posting at the beginning of each month in UTC, and yield the parts. The parts add
    up to the whole.
    """
    months = list_months(posting.since, posting.until)
    if not months:
        yield posting
        return
    for since, until in pairwise([posting.since, *months, posting.until]):
        whole = (posting.since, posting.until)
        yield replace(
            posting,
            since=since,
            until=until,
            quantity=share_of(posting.quantity, *whole, since, until),
            amount=Money(share_of(posting.amount.micros, *whole, since, until)),
        )


def list_months(since: datetime, until: datetime) -> Sequence[datetime]:
    """Return the beginnings of months after `since` and before `until`."""
    found, at = [], since
    while (at := next_month(at)) < until:
        found.append(at)
    return found


def next_month(at: datetime) -> datetime:
    """Return the beginning of the month after the month that contains the time."""
    return (month_of(at) + timedelta(days=32)).replace(day=1)


def month_of(at: datetime) -> datetime:
    """Return the beginning of the month, in UTC, that contains the time. The given time may have
    another time zone: Google reports times in Pacific time.
    """
    return at.astimezone(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)


def find_discounted(
    charged: ChargedPeriod, posted: ChargedPeriod | None, more: int
) -> ChargedPeriod:
    """Return the period of a discount's new entry with the amount `more`. `charged` is the time in
    the month for which a subject was charged, and `posted` the time that earlier entries of the
    discount cover. If the discount has grown because newer time was charged, the entry covers the
    newer time. Otherwise, the entry covers the whole charged time. Therefore the discount accrues
    in the same days as the charges.
    """
    if posted is None or more > 0 or not charged[0] <= posted[1] < charged[1]:
        return charged
    return posted[1], charged[1]


def share_of(
    whole: int,
    since: datetime,
    until: datetime,
    first: datetime | None,
    last: datetime | None,
) -> int:
    """Return the part of `whole` that falls into [first, last), if `whole` accrues evenly in
    [since, until). If `first` or `last` is None, the window is unlimited on this side. The parts of
    adjacent windows add up exactly, because each part is the difference of two values that are
    rounded down in the same way. If the period [since, until) is empty, the whole amount belongs to
    the window that contains `since`.
    """
    if until <= since:
        inside = (first is None or first <= since) and (last is None or since < last)
        return whole if inside else 0
    begin = since if first is None else min(max(first, since), until)
    end = until if last is None else min(max(last, since), until)
    length = (until - since) // _MICROSECOND
    reached = [whole * ((at - since) // _MICROSECOND) // length for at in (begin, max(begin, end))]
    return reached[1] - reached[0]
