"""A bill is compared with the ledger: planted differences are found, and nothing else is."""

import gzip
import json
import random
import time
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from click.testing import CliRunner
from scripts.drills.focus import make_lines
from scripts.drills.reconcile import DrilledBill, compare, drill, write_report
from tests.unit.cli_client import FakeClient, client, make_attempt, make_job

from cavvy.cli.main import cli
from cavvy.cli.reach.bills import BillFileError, find_format, read_bill
from cavvy.cli.reach.reconciliation import explain_difference, find_gangs
from cavvy.client import ApiError
from cavvy.client.ledger_wire import LedgerEntryView
from cavvy.client.wire import JobDetail
from cavvy.costs.bills import BadBillLine, BillCategory, BilledKind, BillFault, BillLine
from cavvy.costs.reconcile import (
    BilledSum,
    BillSummary,
    CellKey,
    Difference,
    DifferenceCause,
    add_up_bill,
    add_up_ledger,
    match_gangs,
    reconcile,
)
from cavvy.domain.ledger import EntryKind, LedgerLine, QuantityUnit
from cavvy.domain.units import Money
from cavvy.domain.values import asdict, replace

__all__ = ["client"]
DAY = datetime(2026, 11, 3, tzinfo=UTC)
HOUR = timedelta(hours=1)


@pytest.mark.parametrize("form", ["cur1.csv", "cur2.csv", "cur2.parquet"])
def test_planted_differences_are_found_and_no_others(form: str) -> None:
    missed, invented, wanted = drill(48, 7, form)
    assert (missed, invented) == ({}, {})
    assert wanted.total() >= 48


def test_a_bill_that_agrees_has_no_differences(tmp_path: Path) -> None:
    bill = DrilledBill(random.Random(3), 20)
    write_report(bill, tmp_path / "cur1.csv")
    assert compare(bill, tmp_path / "cur1.csv") == []


def read(file: Path, form: str | None = None, **columns: str) -> list[BillLine | BadBillLine]:
    return list(read_bill(file, find_format(form, columns))[1])


def line(**changes: object) -> BillLine:
    values = {"number": 2, "resource": "i-1", "gang": "n-j-1", "since": DAY, "until": DAY + HOUR}
    return BillLine(**{"amount": Decimal(1), "hours": Decimal(1), **values, **changes})  # type: ignore[arg-type]  # a test's shorthand


def summary(*lines: BillLine) -> BillSummary:
    found = BillSummary()
    end = line(number=99, gang="", resource="other", since=DAY + 47 * HOUR, until=DAY + 48 * HOUR)
    for each in (*lines, end):
        found.add(each)
    return found


def charged(amount: str, hours: str = "1", day: datetime = DAY) -> dict[CellKey, BilledSum]:
    each = BilledSum(amount=Decimal(amount), hours=Decimal(hours), count=1)
    return {CellKey("j-1", BilledKind.MACHINE, day.date()): each}


def causes(bill: BillSummary, own: dict[CellKey, BilledSum], discounts: str = "0") -> list[str]:
    gangs = match_gangs(bill.resources, {"j-1"})
    found = reconcile(bill, own, gangs, Decimal(discounts))
    assert all(explain_difference(each) for each in found)
    return [str(each.cause) for each in found]


@pytest.mark.parametrize(
    ("amount", "hours", "cause"),
    [
        ("1.0000004", "1", []),
        ("1.2", "1", ["other rate"]),
        ("1.2", "1.2", ["other duration"]),
        ("1.2", "1.1", ["other duration"]),
        ("0.99", "1", ["other rate"]),
        ("0", "1", ["other rate"]),
        ("-1", "1", ["other rate"]),
    ],
)
def test_the_cause_is_what_differs_more(amount: str, hours: str, cause: list[str]) -> None:
    bill = summary(line(amount=Decimal(amount), hours=Decimal(hours)))
    assert causes(bill, charged("1")) == cause


def test_rounding_is_allowed_half_of_the_last_decimal_on_each_line() -> None:
    parts = [line(number=each, amount=Decimal("0.33")) for each in (2, 3, 4)]
    assert causes(summary(*parts), charged("1.001")) == ["rounding"]
    assert causes(summary(*parts), charged("1.01", "3")) == ["other rate"]


def test_discounts_of_the_ledger_pay_for_credits_of_the_bill() -> None:
    parts = (BillCategory.CREDIT, Decimal(-3)), (BillCategory.DISCOUNT, Decimal(-2))
    lines = [line(number=2 + at, category=kind, amount=off) for at, (kind, off) in enumerate(parts)]
    bill = summary(line(number=9), *lines)
    assert causes(bill, charged("1"), "-5") == []
    assert causes(bill, charged("1")) == ["credit", "discount"]
    assert causes(bill, charged("1"), "-4") == ["credit", "discount", "discount"]


def test_discounts_of_other_programs_are_left_out() -> None:
    off = {"category": BillCategory.DISCOUNT, "amount": Decimal(-2)}
    untagged = line(number=3, gang="", **off)  # of a resource whose usage has the tag
    other = line(number=4, gang="", resource="theirs", **off)
    account = line(number=5, gang="", resource="", **off)
    bill = summary(line(), untagged, other, account)
    assert causes(bill, charged("1"), "-4") == []
    assert causes(bill, charged("1")) == ["discount", "discount"]


def test_a_long_line_is_compared_as_a_whole() -> None:
    whole = line(amount=Decimal(2), hours=Decimal(2), until=DAY + 48 * HOUR)
    own = charged("1.9", "1.9") | charged("0.1", "0.1", DAY + 24 * HOUR)
    assert causes(summary(whole), own) == []
    assert len(causes(summary(whole), charged("1.5"))) == 2


def test_gangs_that_took_over_a_machine_are_one_resource() -> None:
    bill = summary(line(amount=Decimal(3), hours=Decimal(3)))
    other = BilledSum(amount=Decimal(2), hours=Decimal(2), count=1)
    own = charged("1") | {CellKey("k-1", BilledKind.MACHINE, DAY.date()): other}
    assert reconcile(bill, own, {"j-1": "n-j-1", "k-1": "n-j-1"}) == []


def test_numbers_times_and_rows_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    file = tmp_path / "bill.csv"
    file.write_text(
        "cost,day,job,more\n"
        '"1,234.50",2026-11-03,n-j-1,x\n'
        '"1,234",2026-11-03,n-j-1,x\n'
        '"1.234,5",2026-11-03,n-j-1,x\n'
        "1,yesterday,n-j-1,x\n"
        "1,2026-11-03\n"
        "-2.5,2026-11-03T01:00:00+02:00,n-j-1,x\n"
        "NaN,2026-11-03,n-j-1,x\n"
        "1,0001-01-01,n-j-1,x\n"
    )
    found = read(file, "csv", amount="cost", since="day", gang="job", zone="-05:00")
    good = [each for each in found if isinstance(each, BillLine)]
    assert [(each.amount, each.since) for each in good] == [
        (Decimal("1234.50"), DAY + 5 * HOUR),
        (Decimal("-2.5"), DAY - HOUR),
    ]
    bad = [each for each in found if isinstance(each, BadBillLine)]
    assert [(each.number, each.fault) for each in bad] == [
        (3, BillFault.NUMBER),
        (4, BillFault.NUMBER),
        (5, BillFault.TIME),
        (6, BillFault.COLUMNS),
        (8, BillFault.NUMBER),
        (9, BillFault.TIME),
    ]
    for each in bad:
        told = Difference(cause=DifferenceCause.UNREADABLE, lines=(each.number,), bad=each)
        assert explain_difference(told).startswith("the line was ignored")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no columns"),
        (b"a,b\n", "has no rows"),
        (b"a,b\n1,2\n", "do not match any known bill format"),
        ("a,b\n1,ü\n".encode("utf-16"), "not text in UTF-8"),
        ("a,ü\n1,2\n".encode("latin-1"), "not text in UTF-8"),
        (b"PK\x03\x04rest", "a zip archive"),
        (b"PAR1nothing", "a damaged Parquet file"),
        (b"\x1f\x8bnothing", "cannot be read"),
        (b'[{"cost": 1}]', "a single JSON array"),
        (b"one\n1\n", "has no columns"),
        (b"a,a\n1,2\n", "several columns with the name 'a'"),
        (b"a,b\n1\n", "does not have the columns of the header"),
    ],
)
def test_a_file_that_is_no_bill_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "bill"
    file.write_bytes(content)
    with pytest.raises(BillFileError, match=message):
        read(file)


def test_wrong_columns_are_named(tmp_path: Path) -> None:
    file = tmp_path / "bill.csv"
    file.write_text("cost,day\n1,2026-11-03\n")
    with pytest.raises(
        BillFileError, match="does not contain the column lineItem/UnblendedCost or"
    ):
        read(file, "aws")
    with pytest.raises(BillFileError, match="does not contain the column job"):
        read(file, amount="cost", since="day", gang="job")
    for columns in ({"amount": "cost"}, {"price": "cost"}):
        with pytest.raises(BillFileError, match="--map"):
            read(file, "csv", **columns)
    with pytest.raises(BillFileError, match="not an offset"):
        read(file, amount="cost", since="day", gang="job", zone="CET")


def test_an_azure_export_is_read(tmp_path: Path) -> None:
    rows = (
        "Date,ResourceId,MeterCategory,MeterName,Quantity,UnitOfMeasure,CostInBillingCurrency,"
        "BillingCurrency,ChargeType,Tags\n"
        '11/03/2026,/vm/1,Virtual Machines,ND96,2.5,1 Hour,10.5,USD,Usage,"""cavvy-gang"": ""n-j-1"""\n'
        '11/03/2026,/disk/1,Storage,P10 LRS Disk,1,1/Month,0.5,USD,Usage,"{""cavvy-gang"": ""g""}"\n'
        "11/03/2026,,Virtual Machines,,1,1,-4,EUR,Refund,\n"
    )
    (tmp_path / "azure.csv").write_text("\ufeff" + rows)
    (tmp_path / "azure.csv.gz").write_bytes(gzip.compress(rows.encode()))
    assert read(tmp_path / "azure.csv") == read(tmp_path / "azure.csv.gz")
    machine, disk, refund = (
        each for each in read(tmp_path / "azure.csv") if isinstance(each, BillLine)
    )
    assert (machine.gang, machine.hours, machine.until) == (
        "n-j-1",
        Decimal("2.5"),
        DAY + 24 * HOUR,
    )
    assert (disk.gang, disk.kind, disk.hours) == ("g", BilledKind.DISK, None)
    assert (refund.category, refund.currency) == (BillCategory.CREDIT, "EUR")


def test_a_google_export_is_read(tmp_path: Path) -> None:
    row = {
        "usage_start_time": "2026-11-03 00:00:00 UTC",
        "usage_end_time": "2026-11-03 01:00:00 UTC",
        "sku": {"description": "Nvidia H100 GPU running in Americas"},
        "labels": [{"key": "cavvy-gang", "value": "n-j-1"}],
        "resource": {"name": "vm", "global_name": "//compute/vm"},
        "cost": 1e-07,
        "currency": "USD",
        "cost_type": "regular",
        "credits": [{"name": "SUD", "amount": -0.25}],
    }
    (tmp_path / "google.json").write_text(json.dumps(row) + "\n{broken\n" + json.dumps(row) + "\n")
    usage, credit, bad, *again = read(tmp_path / "google.json")
    assert isinstance(usage, BillLine)
    assert isinstance(credit, BillLine)
    assert (usage.gang, usage.kind, usage.amount) == ("n-j-1", BilledKind.MACHINE, Decimal("1e-7"))
    assert (credit.category, credit.amount) == (BillCategory.CREDIT, Decimal("-0.25"))
    assert isinstance(bad, BadBillLine)
    assert isinstance(again[0], BillLine)
    assert again[0].identity == usage.identity  # the same row again
    bill = add_up_bill([usage, credit, *again])
    assert [each.bill for each in bill.reductions] == [Decimal("-0.25")]
    assert [each.cause for each in bill.found] == ["duplicate"]


def test_the_command_lists_differences_and_exits_with_1(
    client: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bill = DrilledBill(random.Random(3), 4)
    entries = [to_view(each) for each in bill.lines]
    monkeypatch.setattr("cavvy.client.ledger_wire.list_entries", lambda *_, **__: entries)
    file = tmp_path / "cur1.csv"
    write_report(bill, file)
    agreed = CliRunner().invoke(cli, ["cost", "reconcile", str(file)])
    assert (agreed.exit_code, agreed.stdout.count("\n")) == (0, 2), agreed.output
    assert "0 differences" in agreed.stdout
    bill.plant(DifferenceCause.RATE)
    write_report(bill, file)
    told = CliRunner().invoke(cli, ["cost", "reconcile", str(file), "-o", "json"])
    [row] = json.loads(told.stdout)
    assert (told.exit_code, row["cause"], row["job"][0]) == (1, "other rate", "j")
    assert row["more_micros"] == row["bill_micros"] - row["ledger_micros"]
    assert row["text"].startswith("the rate differs: $")
    other = CliRunner().invoke(cli, ["cost", "reconcile", str(file), "-p", "other"])
    assert other.exit_code == 0
    wrong = CliRunner().invoke(cli, ["cost", "reconcile", str(file), "--provider", "azure"])
    assert (wrong.exit_code, "does not contain the column" in wrong.output) == (1, True)
    wrong = CliRunner().invoke(cli, ["cost", "reconcile", str(file), "--map", "amount"])
    assert wrong.exit_code == 2


def to_view(line: LedgerLine) -> LedgerEntryView:
    """The entry as the API answers it."""
    entry, subject = asdict(line.entry), asdict(line.subject)
    names = {"rate_micros_per_hour": line.entry.rate.micros_per_hour}
    both = {**subject, **entry, **names, "amount_micros": line.entry.amount.micros}
    wanted = LedgerEntryView.__struct_fields__
    both |= {"id": line.entry.id, "corrects": None}
    return LedgerEntryView(**{name: both[name] for name in wanted})


def test_an_attempt_that_took_over_a_gang_is_known_by_its_job(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = make_job("k", "done", attempts=[make_attempt(id="k-1", gang="n-j-1@k-1")])
    answers = {"k": taken}

    def answer(project: str, name: str) -> JobDetail:
        if name not in answers:
            raise ApiError("job-not-found", "there is no such job", "", 404)
        return answers[name]

    monkeypatch.setattr(client, "job", answer)
    each = BilledSum(project="default")
    names = ("j-1", "k-1", "gone-1")
    ledger = {CellKey(name, BilledKind.MACHINE, DAY.date()): each for name in names}
    assert find_gangs(client, ledger, ["n-j-1", "n-x-1"]) == {"j-1": "n-j-1", "k-1": "n-j-1"}  # type: ignore[arg-type]  # the fake client


def test_the_ledger_is_added_up_by_day_and_charges_of_one_moment_are_whole() -> None:
    known = next(make_lines(random.Random(1), 1))
    end = DAY + 24 * HOUR

    def entry(kind: str, since: datetime, until: datetime, micros: int) -> LedgerLine:
        us = (until - since) // timedelta(microseconds=1)
        entry = replace(
            known.entry,
            kind=EntryKind.NODE,
            line=kind,
            unit=QuantityUnit.MICROSECONDS if us else QuantityUnit.BYTES,
            since=since,
            until=until,
            quantity=us or 7,
            amount=Money(micros),
        )
        return LedgerLine(entry=entry, subject=replace(known.subject, id="j-1", provider="p"))

    lines = [
        entry("node", DAY - HOUR, DAY + HOUR, 2_000_000),
        entry("node", DAY + HOUR, DAY + 3 * HOUR, 2_000_000),
        entry("node", end - HOUR, end + HOUR, 2_000_000),
        entry("node", end, end + HOUR, 1_000_000),
        entry("node", DAY - HOUR, DAY, 1_000_000),
        entry("traffic", DAY, DAY, 300_000),
        entry("traffic", DAY + HOUR, DAY + HOUR, 400_000),
        entry("traffic", end, end, 500_000),
    ]
    sums, discounts = add_up_ledger(lines, "p", DAY, end)
    found = {(key.resource, key.kind, key.day): each for key, each in sums.items()}
    assert {key: (each.amount, each.hours, each.count) for key, each in found.items()} == {
        ("j-1", BilledKind.MACHINE, DAY.date()): (Decimal(4), Decimal(4), 3),
        ("j-1", BilledKind.TRAFFIC, DAY.date()): (Decimal("0.7"), None, 2),
    }
    assert discounts == 0
    assert add_up_ledger(lines, "other", DAY, end) == ({}, 0)


def test_a_day_that_the_bill_has_not_covered_yet_is_delayed() -> None:
    """A bill whose last line ends in the middle of the day."""
    own, bill = charged("2"), BillSummary()
    bill.add(line(amount=Decimal(1), until=DAY + 12 * HOUR, hours=Decimal(12)))
    assert causes(bill, own) == ["delayed"]
    assert causes(bill, charged("0.5", "12")) == ["other rate"], "it is higher already"
    bill.add(line(number=3, gang="", since=DAY + 23 * HOUR, until=DAY + 24 * HOUR))
    assert causes(bill, charged("2", "12")) == ["other rate"], "the day is over"


def test_only_the_wanted_days_of_the_bill_are_compared(
    client: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bill = DrilledBill(random.Random(3), 4)
    bill.plant(DifferenceCause.RATE)
    [(_, day)] = bill.planted
    assert day is not None
    entries = [to_view(each) for each in bill.lines]
    monkeypatch.setattr("cavvy.client.ledger_wire.list_entries", lambda *_, **__: entries)
    file = tmp_path / "cur1.csv"
    write_report(bill, file)

    def count(*options: str) -> int:
        done = CliRunner().invoke(cli, ["cost", "reconcile", str(file), "-o", "json", *options])
        assert done.exit_code in (0, 1), done.output
        return len(json.loads(done.stdout))

    after = str(day + timedelta(days=1))
    for zone in ("America/New_York", "Asia/Tokyo"):
        with monkeypatch.context() as patch:
            patch.setenv("TZ", zone)
            time.tzset()
            both = ("--since", str(day), "--until", after)
            assert [count(*both), count("--until", str(day))] == [1, 0]
            assert [count("--since", after), count("--since", str(day))] == [0, 1]
        time.tzset()
    wrong = CliRunner().invoke(
        cli, ["cost", "reconcile", str(file), "--since", after, "--until", after]
    )
    assert wrong.exit_code == 2


def test_an_amount_in_another_currency_is_not_shown_in_dollars(
    client: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cavvy.client.ledger_wire.list_entries", lambda *_, **__: [])
    file = tmp_path / "bill.csv"
    file.write_text("day,cost,tag,money\n2026-11-03,1500,n-j-1,jpy\n2026-11-04,2,n-j-1,usd\n")
    names = ("since=day", "amount=cost", "gang=tag", "currency=money")
    maps = [each for name in names for each in ("--map", name)]
    told = CliRunner().invoke(cli, ["cost", "reconcile", str(file), "--of", "p", *maps])
    yen, dollars, _ = told.stdout.splitlines()[1:]
    assert ("1,500.00" in yen, "JPY" in yen, "$" in yen) == (True, True, False)
    assert ("not in ledger" in dollars, "other currency" in yen) == (True, True)


def test_credits_and_fees_outside_the_wanted_days_are_left_out() -> None:
    whole = line(category=BillCategory.FEE, amount=Decimal(4), until=DAY + 96 * HOUR)
    bill = BillSummary(DAY, DAY + 24 * HOUR)
    bill.add(whole)
    bill.add(replace(whole, number=3, since=DAY + 24 * HOUR))
    assert [(each.cause, each.bill) for each in bill.found] == [(DifferenceCause.FEE, Decimal(1))]


def test_equal_numbers_in_two_currencies_do_not_agree() -> None:
    euros = line(currency="EUR", amount=Decimal(1), until=DAY + 48 * HOUR)
    own = charged("0.5") | charged("0.5", day=DAY + 24 * HOUR)
    assert causes(summary(euros), own) == ["other currency"] * 2
    credit = line(number=3, currency="EUR", category=BillCategory.CREDIT, amount=Decimal(-5))
    assert causes(summary(line(), credit), charged("1"), "-5") == ["credit", "discount"]
    assert causes(summary(line(), credit), charged("1")) == ["credit"]


def test_a_subscription_for_the_month_does_not_show_how_far_the_bill_reaches() -> None:
    bill = summary(line())
    bill.add(line(number=3, gang="", since=DAY - 48 * HOUR, until=DAY + 600 * HOUR))
    later = charged("1", day=DAY + 72 * HOUR)
    assert causes(bill, charged("1") | later) == ["delayed"]
