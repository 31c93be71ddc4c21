"""Response types of the ledger routes, and client functions that call these routes."""

from collections.abc import Iterator, Sequence
from datetime import datetime

from msgspec import convert

from cavvy.client.client import ApiClient
from cavvy.client.paths import query
from cavvy.client.wire import Answer, EnergyView
from cavvy.domain.ledger import (
    EntryKind,
    EntrySource,
    LedgerEntry,
    LedgerLine,
    LedgerSubject,
    QuantityUnit,
)
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import field, replace

PAGE = 5000  # maximum number of entries in one answer


class TokensView(Answer, frozen=True, kw_only=True):
    """The tokens of a model. `cached` is a part of `prompt`; `estimated` is the part of `prompt`
    and `completion` that engines did not state.
    """

    model: str
    prompt: int
    cached: int
    completion: int
    estimated: int


class LedgerSumView(Answer, frozen=True, kw_only=True):
    """The sum of the entries of one group. `groups` contains a value for each requested dimension.
    `discount_micros` is the part of `amount_micros` that comes from discounts, 0 or less. `tokens`
    are those of language models, and `energy` what nodes measured, in the whole days of the period.
    """

    groups: dict[str, str]
    amount_micros: int
    discount_micros: int
    jobs: int
    tokens: list[TokensView] = field(default_factory=list)
    energy: EnergyView | None = None


class LedgerEntryView(Answer, frozen=True, kw_only=True):
    """An entry of the ledger, with its subject. `id` never changes; `corrects` is the ID of the
    entry that a correction corrects. `line` and `line_since` are the kind and the start of the
    charge to which the entry belongs. The quantity is in `unit`: us (microseconds of one node) or
    bytes.
    """

    number: int
    id: str
    corrects: str | None
    project: str
    user: str
    job: str
    job_id: str
    machine: str
    service: str
    attempt: int
    rank: int
    kind: str
    line: str
    line_since: datetime
    since: datetime
    until: datetime
    quantity: int
    unit: str
    rate_micros_per_hour: int
    amount_micros: int
    source: str
    provider: str
    account: str
    region: str
    zone: str
    instance_type: str
    accelerator: str
    accelerators: float
    purchase: str
    tags: dict[str, str]
    volume: str = ""
    key: str = ""


def sum_ledger(
    client: ApiClient,
    by: Sequence[str],
    *,
    project: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
) -> list[LedgerSumView]:
    """Return the spending in a period, for each value of the dimensions `by`, the largest first."""
    asked = _period(project, since, until) | {"by": ",".join(by)}
    return client.ask("/v1/ledger/sums" + query(**asked), list[LedgerSumView])


def list_entries(
    client: ApiClient,
    *,
    project: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
) -> Iterator[LedgerEntryView]:
    """Yield the entries that overlap a period, in the order in which they were posted."""
    after = 0
    while True:
        target = "/v1/ledger" + query(**_period(project, since, until), after=after)
        page = client.ask(target, list[LedgerEntryView])
        yield from page
        if len(page) < PAGE:
            return
        after = page[-1].number


def to_line(view: LedgerEntryView) -> LedgerLine:
    """Return the entry in the form that the modules for statements use."""
    subject, rank, sequence = view.id.rsplit("/", 2)
    corrects = None if view.corrects is None else int(view.corrects.rpartition("/")[2])
    return LedgerLine(
        entry=LedgerEntry(
            number=view.number,
            subject=subject,
            project=view.project,
            rank=int(rank),
            sequence=int(sequence),
            kind=EntryKind(view.kind),
            line=view.line,
            line_since=view.line_since,
            since=view.since,
            until=view.until,
            quantity=view.quantity,
            unit=QuantityUnit(view.unit),
            rate=HourlyRate(view.rate_micros_per_hour),
            amount=Money(view.amount_micros),
            source=EntrySource(view.source),
            corrects=corrects,
        ),
        subject=replace(convert(view, LedgerSubject, from_attributes=True), id=subject),
    )


def _period(
    project: str | None, since: datetime | None, until: datetime | None
) -> dict[str, str | None]:
    return {
        "project": project,
        "since": None if since is None else since.isoformat(),
        "until": None if until is None else until.isoformat(),
    }
