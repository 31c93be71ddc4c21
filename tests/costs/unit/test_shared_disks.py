"""Disks that a bill and the ledger assign to different gangs are compared as one sum."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from cavvy.costs.bills import BilledKind, BillLine
from cavvy.costs.reconcile import BillSummary, add_up_ledger, match_gangs, reconcile
from cavvy.costs.shared_disks import group_disks, name_disk
from cavvy.domain.ledger import (
    EntryKind,
    EntrySource,
    LedgerEntry,
    LedgerLine,
    LedgerSubject,
    QuantityUnit,
)
from cavvy.domain.units import HourlyRate, Money

MONTH = datetime(2026, 11, 1, tzinfo=UTC)
VOLUME = "volume:aws:vol-1"
GANGS = {"a-1": "n-a-1", "b-1": "n-b-1", "c-1": "n-c-1"}


def hour(number: float) -> datetime:
    return MONTH + timedelta(hours=number)


def entry(subject: str, since: float, until: float, sign: int = 1) -> LedgerLine:
    """A dollar an hour for a volume, or for the disks of an attempt."""
    length = hour(until) - hour(since)
    line = "storage" if subject.startswith("volume:") else "disk"
    return LedgerLine(
        entry=LedgerEntry(
            number=1,
            subject=subject,
            project="default",
            rank=0,
            sequence=1,
            kind=EntryKind(line) if sign > 0 else EntryKind.CORRECTION,
            line=line,
            line_since=hour(since),
            since=hour(since),
            until=hour(until),
            quantity=sign * (length // timedelta(microseconds=1)),
            unit=QuantityUnit.MICROSECONDS,
            rate=HourlyRate(1_000_000),
            amount=Money(sign * round((until - since) * 1_000_000)),
            source=EntrySource.METER,
        ),
        subject=LedgerSubject(
            id=subject, project="default", user="ada", provider="aws", account="aws"
        ),
    )


def grouped(*lines: LedgerLine, tags: dict[str, str] | None = None) -> list[set[str]]:
    groups = group_disks(lines, "aws", GANGS, tags or {})
    found: dict[str, set[str]] = {}
    for name, group in groups.items():
        found.setdefault(group, set()).add(name)
    return sorted(found.values(), key=min)


@pytest.mark.parametrize(
    "lines",
    [
        [entry(VOLUME, 0, 5), entry("b-1", 5, 9)],
        [entry("b-1", 5, 7), entry("b-1", 7, 9), entry(VOLUME, 9, 12), entry(VOLUME, 12, 15)],
        # the volume was charged until 8 before its use from 5 on became known
        [entry(VOLUME, 0, 8), entry(VOLUME, 5, 8, -1), entry("b-1", 5, 9)],
    ],
)
def test_a_job_whose_disks_fill_a_gap_of_the_volume_had_it(lines: list[LedgerLine]) -> None:
    assert grouped(*lines) == [{"n-b-1", VOLUME}]
    assert grouped(*lines, tags={"vol-1": "n-a-1"}) == [{"n-a-1", "n-b-1", VOLUME}]


def test_other_jobs_and_charges_that_are_split_at_a_month_do_not_share() -> None:
    whole = [entry(VOLUME, -5, 0), entry(VOLUME, 0, 5), entry("a-1", -3, 0), entry("a-1", 0, 3)]
    assert grouped(*whole) == [{VOLUME}]
    assert grouped(entry("a-1", 0, 3), entry("b-1", 3, 5)) == []


def test_volumes_of_one_job_are_one_group() -> None:
    other = "volume:aws:vol-2"
    lines = [entry(VOLUME, 0, 5), entry("a-1", 5, 6), entry(other, 8, 9), entry("b-1", 6, 8)]
    apart = [{"n-a-1", VOLUME}, {"n-b-1", other}]
    assert grouped(*lines) == apart
    tags = {"vol-1": "n-c-1", "vol-2": "n-c-1"}
    assert grouped(*lines, tags=tags) == [{"n-a-1", "n-b-1", "n-c-1", VOLUME, other}]


@pytest.mark.parametrize(
    "resource",
    [
        "vol-1",
        "arn:aws:ec2:us-east-1:1:volume/vol-1",
        "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/disks/VOL-1",
        "//compute.googleapis.com/projects/p/zones/z/disk/vol-1",
    ],
)
def test_a_bill_with_the_volume_between_jobs_agrees(resource: str) -> None:
    assert name_disk(resource) == "vol-1"
    bill = BillSummary()
    for number in range(48):
        tag = "n-a-1" if number < 47 else ""
        bill.add(
            BillLine(
                number=number + 2,
                resource=resource,
                gang=tag,
                kind=BilledKind.DISK,
                since=hour(number),
                until=hour(number + 1),
                amount=Decimal(1),
            )
        )
    lines = [
        entry("a-1", 0, 10),
        entry(VOLUME, 10, 30),
        entry("b-1", 30, 40),
        entry(VOLUME, 40, 47),
    ]
    ledger, _ = add_up_ledger(lines, "aws", hour(0), hour(48))
    gangs = match_gangs(bill.resources, {"a-1", "b-1"})
    bill.join_disks(group_disks(lines, "aws", gangs, bill.disks))
    assert reconcile(bill, ledger, gangs) == []
    ledger, _ = add_up_ledger(lines[:-1], "aws", hour(0), hour(48))
    assert [str(each.cause) for each in reconcile(bill, ledger, gangs)] == ["other amount"]
