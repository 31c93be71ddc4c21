"""Computes the cost of extras, which providers bill in addition to machines: disks, public
addresses, and the data that nodes send out of their clouds (checkpoints, outputs and logs).

A price per month is divided by the hours of that month, as AWS does
(https://aws.amazon.com/ebs/pricing/). Therefore the charges for a disk are split at the beginning
of each month in UTC.

The agent reports the number of bytes when the bytes are sent. If a node is lost while it uploads a
checkpoint, the number of sent bytes is unknown, and only a lower and an upper limit of the upload's
cost can be computed.

Computes the cost of volumes for the time in which no job uses them.

While a job uses a volume, the volume is charged to the job as a disk of its node. The volume has a
bill of its own for the time in which no job used the volume. The bill begins when the volume is
created, and ends when the provider last listed the volume. The whole bill is computed each time,
and the store posts the difference. Therefore, if a job's use of the volume is reported late, the
bill is corrected.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta

from cavvy.costs.metering import Rates, bill, charge_node, list_prices, list_stretches
from cavvy.domain.events import Charge, ChargeKind
from cavvy.domain.gangs import NodeExtra, NodeSeen, list_extras
from cavvy.domain.jobs import Attempt, Node, NodePhase, SentKind
from cavvy.domain.ledger import (
    STORAGE_LINE,
    EntryKind,
    LedgerPosting,
    LedgerSubject,
    list_months,
    month_of,
    next_month,
    post,
)
from cavvy.domain.offers import ExtraPrice, Offer
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace
from cavvy.domain.volumes import KeptVolume, VolumeBill, VolumeTerms, VolumeUse

_HOUR = timedelta(hours=1)
_USUAL_MONTH_H = 730  # hours of an average month

# the time for which late reports about a job can still correct a bill
SETTLED_AFTER = timedelta(days=62)
_STEP = timedelta(days=31)  # rounded, so that most checks change nothing


def bill_extras(
    attempt: Attempt,
    node: NodeSeen,
    *,
    since: datetime,
    until: datetime,
    earlier: Iterable[Charge] = (),
    final: bool,
) -> list[Charge]:
    """Return the charges for the node's extras in [`since`, `until`), at the prices of the
    attempt's offer. An extra that has no price is not charged.

    If the provider no longer reports the node's extras, the rates of the `earlier` charges of the
    same rank are used. If `final` is set, the node ended at `until`, and each extra is charged for
    at least its minimum time.
    """
    charges: list[Charge] = []
    for kind in ChargeKind:
        if not kind.is_extra:
            continue
        priced = _find_prices(attempt.offer, node.extras, kind)
        end = until
        if final and node.started_at is not None:
            least = max((price.minimum for price, _ in priced), default=timedelta(0))
            end = max(until, node.started_at + least)
        rates = _list_rates(kind, priced, since, end) or [
            (charge.since, charge.rate)
            for charge in earlier
            if (charge.attempt_id, charge.rank, charge.kind) == (attempt.id, node.rank, kind)
        ]
        if not rates:
            continue
        charges += [
            replace(charge, kind=kind)
            for charge in bill(
                attempt=attempt, rank=node.rank, started=since, until=end, rates=rates, final=False
            )
        ]
    return charges


def rate_extras(offer: Offer, extras: Sequence[NodeExtra], now: datetime) -> HourlyRate:
    """Return the hourly rate of a node's extras at the time `now`."""
    rates = [
        _list_rates(kind, _find_prices(offer, extras, kind), now, now)
        for kind in ChargeKind
        if kind.is_extra
    ]
    return HourlyRate(sum(each[0][1].micros_per_hour for each in rates if each))


def expect_extras(
    offer: Offer, disk_gib: int | None = None, disk_type: str | None = None
) -> HourlyRate:
    """Return the expected hourly rate of the extras of one node of the offer, in a month of average
    length; see `list_extras`.
    """
    if not offer.extras:
        return HourlyRate()
    extras, micros = list_extras(offer, disk_gib, disk_type), 0.0
    for kind in {each.kind for each in extras}:
        hours = _USUAL_MONTH_H if kind is ChargeKind.DISK else 1
        priced = _find_prices(offer, extras, kind)
        micros += sum(price.price.micros * units for price, units in priced) / hours
    return HourlyRate(round(micros))


def _find_prices(
    offer: Offer, extras: Sequence[NodeExtra], kind: ChargeKind
) -> list[tuple[ExtraPrice, int]]:
    """Return the prices of the extras of one kind. Each price is paired with the number of times
    that the price is billed.
    """
    found = []
    for extra in extras:
        prices = [
            each
            for each in offer.extras
            if (each.kind, each.name) == (kind, extra.name)
            and (not each.up_to_gib or each.up_to_gib >= extra.units)
        ]
        if extra.kind is kind and prices and extra.units:
            price = min(prices, key=lambda each: each.up_to_gib)
            found.append((price, 1 if price.up_to_gib else extra.units))
    return found


def _list_rates(
    kind: ChargeKind, priced: Sequence[tuple[ExtraPrice, int]], since: datetime, until: datetime
) -> Rates:
    """Return the hourly rates from `since` to `until`, each with the time from which it applies."""
    micros = sum(price.price.micros * units for price, units in priced)
    if not priced:
        return ()
    if kind is not ChargeKind.DISK:
        return [(since, HourlyRate(micros))]
    return list_monthly_rates(micros, since, until)


def list_monthly_rates(micros: int, since: datetime, until: datetime) -> Rates:
    """Convert a price in micro-dollars per month to one hourly rate for each month in UTC, because
    months have different numbers of hours. Each rate is returned with the time from which the rate
    applies.
    """
    rates = []
    for at in (since, *list_months(since, until)):
        hours = (next_month(at) - month_of(at)) // _HOUR
        rates.append((at, HourlyRate((2 * micros + hours) // (2 * hours))))
    return rates


_GB = 10**9  # bytes; clouds publish prices of egress per GB


# The most that a machine is assumed to send, 100 Gbit/s: the agent's uploads are far slower.
_BYTES_PER_S = 12_500_000_000


def bill_traffic(attempt: Attempt, nodes: Iterable[Node]) -> list[Charge]:
    """Return a charge for each node that has sent data. The charge covers the time from the start
    of the node's work until the node's last message. Each kind of data has the price that applied
    when the first bytes of this kind were sent. Data without a known price is not charged.
    """
    charges = []
    for node in nodes:
        amount = Money(sum(price_sent(each.egress, each.bytes).micros for each in node.sent))
        if node.attempt_id != attempt.id or not amount.micros:
            continue
        since = node.claimed_at or attempt.created_at
        until = max(since, node.heard_at or since)
        charge = charge_node(attempt, node.rank, since, until, HourlyRate(), ChargeKind.TRAFFIC)
        sent = sum(each.bytes for each in node.sent if each.egress)
        charges.append(replace(charge, amount=amount, bytes=sent))
    return charges


def bound_upload(length: timedelta) -> int:
    """Return the maximum number of bytes that a node can have sent in the time `length`. Nodes are
    not trusted, so no budget is charged for more bytes than a node's network can have sent.
    """
    return max(0, length // timedelta(microseconds=1) * _BYTES_PER_S // 1_000_000)


def bound_lost_traffic(attempt: Attempt, nodes: Iterable[Node], now: datetime) -> Money:
    """Return the maximum cost of checkpoint uploads that were interrupted when nodes were lost. For
    each lost node, the maximum is the smaller of two amounts: the size of the newest complete
    checkpoint, and the most that the node can have sent since the node's last message.
    """
    most = Money()
    for node in nodes:
        silent = now - (node.heard_at or attempt.created_at)
        size = min(attempt.checkpoint_bytes, bound_upload(silent))
        for each in node.sent if node.phase is not NodePhase.EXITED else ():
            if each.kind is SentKind.CHECKPOINTS:
                most += price_sent(each.egress, size)
    return most


def price_sent(per_gb: Money | None, size: int) -> Money:
    """Return the cost of `size` bytes at a price per GB, or 0 if the price is unknown."""
    return Money((2 * per_gb.micros * size + _GB) // (2 * _GB)) if per_gb else Money(0)


def begin_bill(volume: KeptVolume, subject: LedgerSubject, metered_since: datetime) -> VolumeBill:
    """Return the empty bill of a volume that was seen for the first time. The time before the
    installation began to meter volumes is not charged.
    """
    since = max(volume.created_at, metered_since)
    return VolumeBill(subject=subject, since=since, seen_at=since)


def observe_volume(bill: VolumeBill, volume: KeptVolume, now: datetime) -> VolumeBill:
    """Return the bill, updated by the provider's current report. A changed size, type or price of
    the volume applies from `now` on. If the bill contains no price yet, the reported price also
    applies to the time before `now`. If the clock was set back, the time of the last report is used
    instead of `now`.
    """
    gangs = tuple(dict.fromkeys((*bill.gangs, *volume.used_by)))
    now = max(now, bill.seen_at)
    bill = replace(bill, seen_at=now, gangs=gangs)
    price = volume.price
    if price is None:
        return bill
    terms = VolumeTerms(
        since=now if bill.terms else bill.since,
        size_gib=volume.size_gib,
        type=volume.type,
        micros_per_month=price.price.micros * (1 if price.up_to_gib else volume.size_gib),
        source=price.source,
        as_of=price.as_of,
    )
    if bill.terms:
        last = bill.terms[-1]
        if replace(terms, since=last.since, source=last.source, as_of=last.as_of) == last:
            return bill
    return replace(bill, terms=(*bill.terms, terms))


def settle_bill(bill: VolumeBill, uses: Mapping[str, Sequence[VolumeUse]]) -> VolumeBill:
    """Return the bill without the lines that are older than two months, so that the bill stays
    small. Once a line is older than two months, the line's ledger entries no longer change. If only
    part of a line is older than two months, the whole line is kept. `uses` contains the periods in
    which the bill's gangs used the volume.
    """
    since = bill.seen_at - SETTLED_AFTER
    since = next((each.since for each in bill.lines if each.since < since < each.until), since)
    if since - bill.since < _STEP:
        return bill
    ends = [*(each.since for each in bill.terms[1:]), None]
    return replace(
        bill,
        since=since,
        gangs=tuple(
            gang
            for gang in bill.gangs
            if any(use.until is None or use.until > since for use in uses.get(gang, ()))
        ),
        terms=tuple(
            each for each, end in zip(bill.terms, ends, strict=False) if end is None or end > since
        ),
        lines=tuple(each for each in bill.lines if each.since >= since),
    )


def bill_volume(bill: VolumeBill, uses: Iterable[VolumeUse]) -> tuple[Charge, ...]:
    """Return the charges, each at one rate, for the time in which no job pays for the volume."""
    rates = _list_volume_rates(bill)
    if not rates:
        return ()
    return tuple(
        _charge(bill, start, end, rate)
        for since, until in _list_gaps(bill.since, bill.seen_at, uses)
        for start, end, rate in list_stretches(list_prices(rates, since), until)
    )


def _list_volume_rates(bill: VolumeBill) -> list[tuple[datetime, HourlyRate]]:
    """Return the hourly rates for the volume's whole existence, each with the time from which it
    applies."""
    ends = [*(each.since for each in bill.terms[1:]), bill.seen_at]
    found: list[tuple[datetime, HourlyRate]] = []
    for terms, end in zip(bill.terms, ends, strict=False):
        found += list_monthly_rates(terms.micros_per_month, terms.since, end)
    return found


def _list_gaps(
    since: datetime, until: datetime, uses: Iterable[VolumeUse]
) -> Iterator[tuple[datetime, datetime]]:
    """Yield the intervals of the period in which no job used the volume."""
    at = since
    for use in sorted(uses, key=lambda each: each.since):
        if use.since > at:
            yield at, min(use.since, until)
        at = max(at, until if use.until is None else use.until)
        if at >= until:
            return
    if at < until:
        yield at, until


def _charge(bill: VolumeBill, since: datetime, until: datetime, rate: HourlyRate) -> Charge:
    return Charge(
        project=bill.subject.project,
        job_id="",
        attempt_id=bill.subject.id,
        rank=0,
        kind=ChargeKind.DISK,
        since=since,
        until=until,
        rate=rate,
        amount=rate.over(until - since),
    )


def post_storage(before: Iterable[Charge], after: Iterable[Charge]) -> list[LedgerPosting]:
    """Return the ledger entries for the change of a volume's charges from `before` to `after`."""
    return [
        replace(
            each,
            kind=EntryKind.STORAGE if each.kind is EntryKind.DISK else each.kind,
            line=STORAGE_LINE,
        )
        for each in post(before, after)
    ]
