"""Computes the cost of volumes for the time in which no job uses them.

While a job uses a volume, the volume is charged to the job as a disk of its node. The volume has a
bill of its own for the time in which no job used the volume. The bill begins when the volume is
created, and ends when the provider last listed the volume. The whole bill is computed each time,
and the store posts the difference. Therefore, if a job's use of the volume is reported late, the
bill is corrected.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta

from cavvy.costs.extras import list_monthly_rates
from cavvy.costs.metering import list_prices, list_stretches
from cavvy.domain.events import Charge, ChargeKind
from cavvy.domain.ledger import STORAGE_LINE, EntryKind, LedgerPosting, LedgerSubject
from cavvy.domain.postings import post
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.domain.volumes import KeptVolume, VolumeBill, VolumeTerms, VolumeUse

# the time for which late reports about a job can still correct a bill
SETTLED_AFTER = timedelta(days=62)
_STEP = timedelta(days=31)  # rounded, so that most checks change nothing


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
    rates = _list_rates(bill)
    if not rates:
        return ()
    return tuple(
        _charge(bill, start, end, rate)
        for since, until in _list_gaps(bill.since, bill.seen_at, uses)
        for start, end, rate in list_stretches(list_prices(rates, since), until)
    )


def _list_rates(bill: VolumeBill) -> list[tuple[datetime, HourlyRate]]:
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
