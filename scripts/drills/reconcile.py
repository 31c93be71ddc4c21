"""Plants differences in a Cost and Usage Report made from a ledger, and counts which are found.

    python scripts/drills/reconcile.py --planted 200 --seeds 1 2 3
    python scripts/drills/reconcile.py --form cur2.parquet

The report is written from what truly ran, in exact decimals, by code that shares nothing with the
comparison, and holds lines of machines that are not Cavvy's. Each fourth gang makes a volume that
outlives it and that another job has later; the report tags it with the first gang for its whole
life. Each planted difference changes one resource on one day. The exit code is 1 if one is not
found, with its cause, or another is reported.
"""

import argparse
import csv
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from cavvy.cli.reach.bills import find_format, read_bill
from cavvy.costs.reconcile import (
    Difference,
    DifferenceCause,
    add_up_bill,
    add_up_ledger,
    find_lacking,
    match_gangs,
    reconcile,
)
from cavvy.costs.shared_disks import group_disks
from cavvy.domain.ledger import (
    EntryKind,
    EntrySource,
    LedgerEntry,
    LedgerLine,
    LedgerSubject,
    QuantityUnit,
    share_of,
)
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace

BEGAN = datetime(2026, 10, 5, tzinfo=UTC)
DAYS = 20
_HOUR = timedelta(hours=1)
_US = timedelta(microseconds=1)
_EXACT = Decimal("0.0000000001")  # AWS writes ten decimals
CUR1 = {
    "id": "identity/LineItemId",
    "interval": "identity/TimeInterval",
    "type": "lineItem/LineItemType",
    "since": "lineItem/UsageStartDate",
    "until": "lineItem/UsageEndDate",
    "resource": "lineItem/ResourceId",
    "usage": "lineItem/UsageType",
    "quantity": "lineItem/UsageAmount",
    "currency": "lineItem/CurrencyCode",
    "cost": "lineItem/UnblendedCost",
    "gang": "resourceTags/user:cavvy:gang",
}
CUR2 = {
    "id": "identity_line_item_id",
    "interval": "identity_time_interval",
    "type": "line_item_line_item_type",
    "since": "line_item_usage_start_date",
    "until": "line_item_usage_end_date",
    "resource": "line_item_resource_id",
    "usage": "line_item_usage_type",
    "quantity": "line_item_usage_amount",
    "currency": "line_item_currency_code",
    "cost": "line_item_unblended_cost",
    "gang": "resource_tags_user_cavvy_gang",
}
Row = dict[str, Any]
Planted = tuple[DifferenceCause, date | None]


class DrilledBill:
    """A ledger, and the report that a cloud would make of the same machines."""

    def __init__(self, dice: random.Random, gangs: int) -> None:
        self.dice = dice
        self.lines: list[LedgerLine] = []
        self.rows: list[Row] = []
        self.extra: list[Row] = []  # rows that belong to no gang
        self.planted: list[Planted] = []
        self.taken = {""}  # gangs with a planted difference
        self.taken_volumes: set[str] = set()
        self.volumes: dict[str, str] = {}  # by the gang in the tag
        self.sharers: dict[str, str] = {}  # the gang that had the volume of another gang
        for number in range(gangs):
            if number % 4:
                self._run(number)
            else:
                self._keep_volume(number)
        for number in range(gangs):  # what other people run in the account
            at = BEGAN + timedelta(hours=number % 400)
            self._foreign(f"i-other{number}", at, at + 5 * _HOUR)
        end = BEGAN + timedelta(days=DAYS, hours=13)
        self._foreign("i-last", end - _HOUR, end)

    def _run(self, number: int) -> None:
        dice, attempt = self.dice, f"j{number:04}-1"
        since = BEGAN + dice.random() * timedelta(days=DAYS - 6)
        rate = HourlyRate(dice.randrange(500_000, 98_000_000))
        for rank in range(dice.randint(1, 2)):
            until = since + timedelta(hours=1) + dice.random() * timedelta(hours=60)
            self._enter(attempt, rank, "node", since, until, rate)
            self._bill(attempt, rank, "USE1-BoxUsage:p5", since, until, rate.usd)
            if dice.random() < 0.5:
                disk = HourlyRate(dice.randrange(10_000, 500_000))
                self._enter(attempt, rank, "disk", since, until, disk)
                self._bill(attempt, rank, "USE1-EBS:VolumeUsage.gp3", since, until, disk.usd)

    def _keep_volume(self, number: int) -> None:
        """Two jobs, one after the other, with a volume whose own entries fill the time between."""
        dice, first, second = self.dice, f"j{number:04}-1", f"k{number:04}-1"
        born = BEGAN + dice.random() * timedelta(days=DAYS - 12)
        volume, gone = f"vol-kept{number}", born + timedelta(days=11, hours=dice.random())
        own, root = (HourlyRate(dice.randrange(20_000, 900_000)) for _ in range(2))
        both = HourlyRate(own.micros_per_hour + root.micros_per_hour)
        at = born
        for attempt in (first, second):
            since = at + _HOUR * dice.uniform(0.01, 50)
            until = since + _HOUR * dice.uniform(2, 60)
            rate = HourlyRate(dice.randrange(500_000, 98_000_000))
            self._enter(attempt, 0, "node", since, until, rate)
            self._bill(attempt, 0, "USE1-BoxUsage:p5", since, until, rate.usd)
            self._enter(attempt, 0, "disk", since, until, both)
            self._bill(attempt, 0, "USE1-EBS:VolumeUsage.gp3", since, until, root.usd)
            self._enter(f"volume:aws:{volume}", 0, "storage", at, since, own)
            at = until
        self._enter(f"volume:aws:{volume}", 0, "storage", at, gone, own)
        self._bill(first, 0, "USE1-EBS:VolumeUsage.gp3", born, gone, own.usd, volume)
        self.volumes[f"north-1-{first}"] = volume
        self.sharers[f"north-1-{second}"] = f"north-1-{first}"

    def _enter(
        self, attempt: str, rank: int, line: str, since: datetime, until: datetime, rate: HourlyRate
    ) -> None:
        """Entries of the ledger, each from one poll to the next."""
        at = since
        while at < until:
            end = min(until, at + timedelta(seconds=self.dice.randrange(1200, 20_000)))
            kind = EntryKind(line)
            entry = LedgerEntry(
                number=len(self.lines) + 1,
                subject=attempt,
                project="default",
                rank=rank,
                sequence=len(self.lines) + 1,
                kind=kind,
                line=line,
                line_since=since,
                since=at,
                until=end,
                quantity=(end - at) // _US,
                unit=QuantityUnit.MICROSECONDS,
                rate=rate,
                amount=Money((rate.over(end - since) - rate.over(at - since)).micros),
                source=EntrySource.METER,
            )
            subject = LedgerSubject(
                id=attempt,
                project="default",
                user="ada",
                job=attempt,
                provider="aws",
                account="aws",
            )
            self.lines.append(LedgerLine(entry=entry, subject=subject))
            at = end

    def _bill(
        self,
        attempt: str,
        rank: int,
        usage: str,
        since: datetime,
        until: datetime,
        rate: Decimal,
        disk: str = "",
    ) -> None:
        """A row for each hour of the clock."""
        at = since
        while at < until:
            begin = at.replace(minute=0, second=0, microsecond=0)
            end = min(until, begin + _HOUR)
            hours = Decimal((end - at) // _US) / Decimal(3_600_000_000)
            self.rows.append(
                self._row(
                    since=begin,
                    until=begin + _HOUR,
                    resource=disk or f"{'i' if 'Box' in usage else 'vol'}-{attempt}{rank}",
                    usage=usage,
                    quantity=hours,
                    cost=hours * rate,
                    gang=f"north-1-{attempt}",
                )
            )
            at = end

    def _foreign(self, resource: str, since: datetime, until: datetime) -> None:
        hours = Decimal((until - since) // _US) / Decimal(3_600_000_000)
        cost = hours * Decimal(self.dice.randrange(1, 99_000_000)) / 10**6
        self.extra.append(
            self._row(since=since, until=until, resource=resource, quantity=hours, cost=cost)
        )

    def _row(self, **values: Any) -> Row:
        blank = {"type": "Usage", "usage": "USE1-BoxUsage:p5", "currency": "USD", "gang": ""}
        row = {"resource": "", "quantity": Decimal(0), **blank, **values}
        row["cost"] = Decimal(row["cost"]).quantize(_EXACT)
        row["id"] = f"{self.dice.getrandbits(160):040x}"
        row["interval"] = f"{row['since']:%Y-%m-%dT%H:%M:%SZ}/{row['until']:%Y-%m-%dT%H:%M:%SZ}"
        return row

    def pick(self, *, disk: bool = False, whole: bool = False) -> tuple[list[Row], date]:
        """The rows of a gang on a day on which nothing is planted yet, and the day. With `whole`,
        its rows on all days, of which there are several.
        """
        while True:
            gang = self.dice.choice(sorted({row["gang"] for row in self.rows} - self.taken))
            rows = [
                row for row in self.rows if row["gang"] == gang and ("EBS" in row["usage"]) == disk
            ]
            days = sorted({row["since"].date() for row in rows})
            if disk and gang in self.sharers | self.volumes:
                continue  # these disks are sums of several gangs
            if not days or (whole and len(days) < 2):
                continue
            self.taken.add(gang)
            if whole:
                return rows, days[0]
            day = self.dice.choice(days)
            return [row for row in rows if row["since"].date() == day], day

    def pick_volume(self) -> tuple[list[Row], date]:
        """The rows of a volume on a day on which no job had it, and on which nothing else of its
        gangs' disks is billed.
        """
        while True:
            gang = self.dice.choice(sorted(self.volumes.keys() - self.taken_volumes))
            self.taken_volumes.add(gang)
            group = {gang, *(each for each, first in self.sharers.items() if first == gang)}
            disks = [row for row in self.rows if row["gang"] in group and "EBS" in row["usage"]]
            own = {row["since"].date() for row in disks}
            own -= {row["since"].date() for row in disks if row["resource"] != self.volumes[gang]}
            if own:
                day = self.dice.choice(sorted(own))
                return [row for row in disks if row["since"].date() == day], day

    def plant(self, cause: DifferenceCause, *, volume: bool = False) -> None:
        """Plant one difference."""
        planters = _OF_VOLUMES if volume else _PLANTERS
        self.planted.append((cause, planters[cause](self)))


def _change(
    factor: str, *, hours: bool = False, disk: bool = False
) -> Callable[[DrilledBill], date]:
    """The cost becomes more or less by a random factor, at least by the given part."""

    def plant(bill: DrilledBill) -> date:
        rows, day = bill.pick(disk=disk)
        by = 1 + Decimal(factor) * bill.dice.choice([1, 2, 7, Decimal("-0.5")])
        for row in rows:
            row["cost"] = (row["cost"] * by).quantize(_EXACT)
            if hours:
                row["quantity"] *= by
        return day

    return plant


def _remove(bill: DrilledBill) -> date:
    return _drop(bill, *bill.pick())


def _drop(bill: DrilledBill, rows: Sequence[Row], day: date) -> date:
    gone = {row["id"] for row in rows}
    bill.rows = [row for row in bill.rows if row["id"] not in gone]
    return day


def _forget(bill: DrilledBill) -> date:
    """The ledger loses a day of an attempt: entries are cut at its ends, as postings would be."""
    rows, day = bill.pick(whole=True)
    attempt = rows[0]["gang"].removeprefix("north-1-")
    days = sorted({row["since"].date() for row in rows})
    kept = [
        line for line in bill.lines if line.entry.subject != attempt or line.entry.line == "disk"
    ]
    bill.lines = kept
    for later in days[1:]:  # the attempt is wholly unknown, on each of its days
        bill.planted.append((DifferenceCause.NOT_IN_LEDGER, later))
    return day


def _change_volume(bill: DrilledBill) -> date:
    rows, day = bill.pick_volume()
    for row in rows:
        row["cost"] = (row["cost"] * Decimal("1.3")).quantize(_EXACT)
    return day


def _remove_volume(bill: DrilledBill) -> date:
    return _drop(bill, *bill.pick_volume())


def _forget_volume(bill: DrilledBill) -> date:
    """The ledger loses a day of a volume between jobs: its entries are cut out of the day."""
    rows, day = bill.pick_volume()
    subject = f"volume:aws:{rows[0]['resource']}"
    since = datetime.combine(day, time(), UTC)
    until, kept = since + timedelta(days=1), []
    for line in bill.lines:
        entry = line.entry
        if entry.subject != subject or entry.until <= since or entry.since >= until:
            kept.append(line)
            continue
        for first, last in ((entry.since, since), (until, entry.until)):
            if first < last:
                share = share_of(entry.amount.micros, entry.since, entry.until, first, last)
                part = replace(entry, since=first, until=last, amount=Money(share))
                kept.append(replace(line, entry=part))
    bill.lines = kept
    return day


def _untag_volume(bill: DrilledBill) -> date:
    rows, day = bill.pick_volume()
    for row in rows:
        row["gang"] = ""
    return day


def _round_cents(bill: DrilledBill) -> date:
    while True:
        rows, day = bill.pick()
        cents = [row["cost"].quantize(Decimal("0.01")) for row in rows]
        exact = sum(row["cost"] for row in rows)
        if abs(sum(cents) - exact) > Decimal("0.001"):
            break
    for row, cost in zip(rows, cents, strict=True):
        row["cost"] = cost
    return day


def _other_currency(bill: DrilledBill) -> date:
    rows, day = bill.pick()
    for row in rows:
        row["currency"] = "EUR"
    return day


def _untag(bill: DrilledBill) -> date:
    while True:
        rows, day = bill.pick()
        if len({row["resource"] for row in rows}) == 1:
            break
    for row in rows:
        row["gang"] = ""
    return day


def _shift(bill: DrilledBill) -> date:
    rows, day = bill.pick(whole=True)
    for row in rows:
        row["since"] += timedelta(hours=9)
        row["until"] += timedelta(hours=9)
    return day


def _repeat(bill: DrilledBill) -> date:
    rows, day = bill.pick()
    bill.extra.append(dict(bill.dice.choice(rows)))
    return day


def _garble(bill: DrilledBill) -> None:
    row = bill._row(since=BEGAN, until=BEGAN + _HOUR, resource="i-bad", cost=1)
    row["cost"] = bill.dice.choice(["1.234,50", "1,5", "--", "five", "1,234"])
    bill.extra.append(row)


def _delay(bill: DrilledBill) -> date:
    """The ledger has a machine until noon of the last day, of which the bill has only a part."""
    attempt = f"late{len(bill.planted)}-1"
    since = BEGAN + timedelta(days=DAYS, seconds=bill.dice.randrange(9000))
    rate = HourlyRate(bill.dice.randrange(500_000, 98_000_000))
    bill._enter(attempt, 0, "node", since, since + 9 * _HOUR, rate)
    if bill.dice.random() < 0.5:
        bill._bill(attempt, 0, "USE1-BoxUsage:p5", since, since + 3 * _HOUR, rate.usd)
        bill.taken.add(f"north-1-{attempt}")
    return since.date()


def _add(kind: str, sign: int) -> Callable[[DrilledBill], date]:
    def plant(bill: DrilledBill) -> date:
        at = BEGAN + timedelta(hours=bill.dice.randrange(24 * DAYS))
        cost = sign * bill.dice.randrange(1, 10**9)
        row = bill._row(type=kind, usage="", since=at, until=at + _HOUR, cost=Decimal(cost) / 10**6)
        bill.extra.append(row)
        return at.date()

    return plant


_PLANTERS: dict[DifferenceCause, Callable[[DrilledBill], date | None]] = {
    DifferenceCause.NOT_IN_LEDGER: _forget,
    DifferenceCause.NOT_IN_BILL: _remove,
    DifferenceCause.RATE: _change("0.1"),
    DifferenceCause.DURATION: _change("0.1", hours=True),
    DifferenceCause.AMOUNT: _change("0.3", disk=True),
    DifferenceCause.DAYS: _shift,
    DifferenceCause.ROUNDING: _round_cents,
    DifferenceCause.TAX: _add("Tax", 1),
    DifferenceCause.CREDIT: _add("Credit", -1),
    DifferenceCause.DISCOUNT: _add("EdpDiscount", -1),
    DifferenceCause.FEE: _add("RIFee", 1),
    DifferenceCause.CURRENCY: _other_currency,
    DifferenceCause.UNTAGGED: _untag,
    DifferenceCause.DELAYED: _delay,
    DifferenceCause.DUPLICATE: _repeat,
    DifferenceCause.UNREADABLE: _garble,
}


_OF_VOLUMES: dict[DifferenceCause, Callable[[DrilledBill], date]] = {
    DifferenceCause.NOT_IN_LEDGER: _forget_volume,
    DifferenceCause.NOT_IN_BILL: _remove_volume,
    DifferenceCause.AMOUNT: _change_volume,
    DifferenceCause.UNTAGGED: _untag_volume,
}


def write_report(bill: DrilledBill, file: Path) -> None:
    """The report, in a random order: file names begin with cur1 or cur2."""
    names = CUR1 if file.name.startswith("cur1") else CUR2
    rows = [*bill.rows, *bill.extra]
    bill.dice.shuffle(rows)
    if file.suffix == ".parquet":
        _write_parquet(rows, file)
        return
    with file.open("w", encoding="utf-8", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(names.values())
        for row in rows:
            writer.writerow([_written(row[name]) for name in names])


def _written(value: object) -> str:
    return f"{value:%Y-%m-%dT%H:%M:%SZ}" if isinstance(value, datetime) else str(value)


def _write_parquet(rows: Sequence[Row], file: Path) -> None:
    """CUR 2.0 as its dictionary types it: doubles, timestamps, and tags in a map."""
    import pyarrow
    from pyarrow import parquet

    columns: dict[str, Any] = {
        column: [row[name] for row in rows] for name, column in CUR2.items() if name != "gang"
    }
    for column in ("line_item_usage_amount", "line_item_unblended_cost"):
        columns[column] = [float(each) for each in columns[column]]
    tags = [[("user_cavvy_gang", row["gang"])] if row["gang"] else [] for row in rows]
    kind = pyarrow.map_(pyarrow.string(), pyarrow.string())
    parquet.write_table(
        pyarrow.table({**columns, "resource_tags": pyarrow.array(tags, kind)}), file
    )


def compare(bill: DrilledBill, file: Path) -> list[Difference]:
    """What the comparison finds in the report."""
    form, lines = read_bill(file, find_format(None, {}))
    summary = add_up_bill(lines)
    period = BEGAN, BEGAN + timedelta(days=DAYS + 1)
    ledger, discounts = add_up_ledger(bill.lines, "aws", *period)
    gangs = match_gangs(summary.resources, {key.resource for key in ledger})
    summary.join_disks(group_disks(bill.lines, "aws", gangs, summary.disks))
    lacking = find_lacking(summary, ledger, gangs)
    for line in read_bill(file, form)[1]:
        summary.add_untagged(line, lacking)
    return reconcile(summary, ledger, gangs, discounts)


def drill(planted: int, seed: int, form: str = "cur1.csv") -> tuple[Counter[Planted], ...]:
    """Play one seed. Returns what was planted but not found, and what was found but not planted."""
    dice = random.Random(seed)
    bill = DrilledBill(dice, planted + 20)
    causes = [each for each in _PLANTERS if not (form.endswith("parquet") and each is _GARBLED)]
    while len(bill.planted) < planted:
        at = len(bill.planted)
        if at % 8:
            bill.plant(causes[(at - at // 8 - 1) % len(causes)])
        else:
            bill.plant(tuple(_OF_VOLUMES)[at // 8 % len(_OF_VOLUMES)], volume=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, form)
        write_report(bill, file)
        found = compare(bill, file)
    wanted = Counter(bill.planted)
    told = Counter((each.cause, each.day) for each in found)
    return wanted - told, told - wanted, wanted


_GARBLED = DifferenceCause.UNREADABLE  # a column of numbers in Parquet has no such values


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--planted", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--form", default="cur1.csv", help="cur1.csv, cur2.csv or cur2.parquet")
    asked = parser.parse_args()
    wrong = False
    for seed in asked.seeds:
        missed, invented, wanted = drill(asked.planted, seed, asked.form)
        count = wanted.total()
        print(
            f"seed {seed}: {count} planted, {count - missed.total()} found, "
            f"{invented.total()} invented"
        )
        for name, rows in (("missed", missed), ("invented", invented)):
            for (cause, day), times in rows.items():
                print(f"  {name}: {cause} on {day}, {times} times")
        wrong = wrong or bool(missed or invented)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
