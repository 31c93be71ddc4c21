"""The state and the cost of a job, as immutable values. Money is in US dollars, as exact decimals.
Times are in UTC.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from html import escape
from typing import TYPE_CHECKING, Literal, cast

from msgspec import convert

from cavvy.domain.units import HourlyRate, Money, format_duration, format_rate, format_usd
from cavvy.domain.values import replace

if TYPE_CHECKING:
    from cavvy.client import wire

Phase = Literal["queued", "starting", "running", "stopping", "done", "failed", "stopped"]
ENDS: frozenset[Phase] = frozenset({"done", "failed", "stopped"})
# colors that can be read on light and on dark pages
_COLORS = {
    "queued": "#b58900",
    "starting": "#2aa198",
    "running": "#3a9d23",
    "stopping": "#b58900",
    "done": "#3a9d23",
    "failed": "#dc322f",
    "stopped": "#a34fa8",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """One node of the newest attempt. `telemetry` is the measured use of CPUs, memory and GPUs.
    `progress` contains the values that the node's program last reported.
    """

    rank: int
    phase: str
    address: str | None
    exit_code: int | None
    telemetry: Mapping[str, float]
    progress: Mapping[str, float | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """The state of a job at one time.

    `placement` is the offer of the newest attempt, as provider/region/type/purchase.
    `rate_usd_per_hour` is the price of all nodes of this attempt together. The states of jobs in a
    list do not contain `rate_usd_per_hour`, `first_failed_rank`, `queue_position` and `nodes`.
    """

    id: str
    project: str
    name: str
    phase: Phase
    reason: str
    submitted_at: datetime
    since: datetime  # when the current phase began
    ended_at: datetime | None
    exit_code: int | None
    attempt: int
    placement: str | None
    rate_usd_per_hour: Decimal | None
    spent_usd: Decimal
    first_failed_rank: int | None = None
    queue_position: int | None = None
    nodes: tuple[NodeStatus, ...] = ()

    @property
    def ended(self) -> bool:
        return self.phase in ENDS

    def __str__(self) -> str:
        return f"{self.phase}: {self.reason}" if self.reason else self.phase

    def _repr_html_(self) -> str:
        return show_job(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostItem:
    """The charge for a period of one node at one rate."""

    attempt: int
    rank: int
    kind: str
    since: datetime
    until: datetime
    rate_usd_per_hour: Decimal
    amount_usd: Decimal


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCost:
    """The cost of a job, and the time that the job spent in each phase. `final` is False while new
    charges are possible. `lost` is running time whose work had to be repeated. `ended` is the time
    between the end of the job and a retry. If a provider did
    not report the start or the end of a node, the job may have cost up to `unsure_usd` more than
    `total_usd`.
    """

    total_usd: Decimal
    unsure_usd: Decimal
    final: bool
    queued: timedelta
    starting: timedelta
    running: timedelta
    lost: timedelta
    stopping: timedelta
    ended: timedelta
    items: tuple[CostItem, ...] = field(repr=False)

    def __str__(self) -> str:
        total = format_usd(Money(int(self.total_usd * 1_000_000)))
        return total if self.final else f"{total} so far"


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureSeries:
    """What one rank measured, or its program reported, under one name over time. The values belong
    to steps of the length `step`, of which the first begins at `start`. Each step has its lowest,
    mean and highest value; None if it has no value.
    """

    attempt: int
    rank: int
    name: str
    start: datetime
    step: timedelta
    low: tuple[float | None, ...] = field(repr=False)
    mean: tuple[float | None, ...] = field(repr=False)
    high: tuple[float | None, ...] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    """One event of a job, such as its submission or the loss of a node. `kind` is for programs,
    `text` for people.
    """

    id: int
    at: datetime
    attempt: int
    rank: int | None
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.at:%Y-%m-%d %H:%M:%S} {self.text}"


def read_figures(found: "wire.JobFigures") -> list[FigureSeries]:
    """Return the series of an answer."""
    return [
        FigureSeries(
            attempt=each.attempt,
            rank=each.rank,
            name=each.name,
            start=found.start,
            step=timedelta(seconds=found.step_s),
            low=tuple(each.low),
            mean=tuple(each.mean),
            high=tuple(each.high),
        )
        for each in found.series
    ]


def read_listing(job: "wire.JobListing") -> JobStatus:
    """Return the state of a job in a list."""
    return _make_status(job)


def read_detail(job: "wire.JobDetail") -> JobStatus:
    """Return the state of a job with all details."""
    own = next((each for each in job.attempts if each.number == job.attempt), None)
    if own is None:
        return replace(_make_status(job), queue_position=job.queue_position)
    rate = HourlyRate(own.rate_micros_per_hour).times(len(own.nodes)).usd
    nodes = tuple(convert(node, NodeStatus, from_attributes=True) for node in own.nodes)
    return replace(
        _make_status(job),
        rate_usd_per_hour=rate,
        first_failed_rank=own.first_failed_rank,
        queue_position=job.queue_position,
        nodes=nodes,
    )


def read_cost(job: "wire.JobDetail", cost: "wire.CostView") -> JobCost:
    items = tuple(
        CostItem(
            attempt=each.attempt,
            rank=each.rank,
            kind=each.kind,
            since=each.since,
            until=each.until,
            rate_usd_per_hour=HourlyRate(each.rate_micros_per_hour).usd,
            amount_usd=Money(each.amount_micros).usd,
        )
        for each in cost.charges
    )
    return JobCost(
        total_usd=Money(cost.total_micros).usd,
        unsure_usd=Money(cost.unsure_micros).usd,
        final=job.ended_at is not None and all(each.phase == "ended" for each in job.attempts),
        queued=timedelta(seconds=cost.queued_s),
        starting=timedelta(seconds=cost.starting_s),
        running=timedelta(seconds=cost.running_s),
        lost=timedelta(seconds=cost.lost_s),
        stopping=timedelta(seconds=cost.ending_s),
        ended=timedelta(seconds=cost.ended_s),
        items=items,
    )


def read_event(event: "wire.EventView") -> JobEvent:
    return convert(event, JobEvent, from_attributes=True)


def _make_status(job: "wire.JobListing") -> JobStatus:
    return JobStatus(
        id=job.id,
        project=job.project,
        name=job.name,
        phase=cast("Phase", job.phase),
        reason=job.reason,
        submitted_at=job.submitted_at,
        since=job.since,
        ended_at=job.ended_at,
        exit_code=job.exit_code,
        attempt=job.attempt,
        placement=job.placement,
        rate_usd_per_hour=None,
        spent_usd=Money(job.spent_micros).usd,
    )


def show_job(status: JobStatus, note: str = "") -> str:
    """Return an HTML table with the state, the offer, the price and the cost of a job."""
    color = _COLORS.get(status.phase, "inherit")
    rows = [
        ("job", f"{escape(status.name)} <small>({escape(status.id)})</small>"),
        ("state", f'<b style="color:{color}">{escape(status.phase)}</b>{_since(status)}'),
        ("reason", escape(status.reason)),
        ("place", escape(status.placement or "")),
        ("price", _price(status)),
        ("spent", format_usd(Money(_micros(status.spent_usd)))),
        ("note", escape(note)),
    ]
    cells = "".join(
        f'<tr><th style="text-align:left">{name}</th><td style="text-align:left">{text}</td></tr>'
        for name, text in rows
        if text
    )
    return f"<table>{cells}</table>"


def _since(status: JobStatus) -> str:
    end = status.ended_at
    if end is not None:
        return f" after {format_duration(end - status.submitted_at)}"
    return f" for {format_duration(max(datetime.now(UTC) - status.since, timedelta(0)))}"


def _price(status: JobStatus) -> str:
    rate = status.rate_usd_per_hour
    return "" if rate is None else format_rate(HourlyRate(_micros(rate)))


def _micros(usd: Decimal) -> int:
    return int(usd * 1_000_000)
