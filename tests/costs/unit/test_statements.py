"""Statements add up to the ledger, as a page and as rows in FOCUS."""

import csv
import io
import os
import random
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest
from scripts.drills.focus import make_lines, validate

from cavvy.api.routes.budgets import _entry as make_entry_view
from cavvy.cli.view.statement import write_csv, write_page, write_parquet
from cavvy.client.ledger_wire import LedgerEntryView, to_line
from cavvy.costs.statements import COLUMNS, hours_of, make_focus_row, make_statement, total_of
from cavvy.domain.ledger import EntryKind, LedgerLine, QuantityUnit
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace

MONTH = datetime(2026, 11, 1, tzinfo=UTC), datetime(2026, 12, 1, tzinfo=UTC)
REQUIRED = [
    "BilledCost",
    "BillingAccountId",
    "BillingCurrency",
    "BillingPeriodEnd",
    "BillingPeriodStart",
    "ChargeCategory",
    "ChargePeriodEnd",
    "ChargePeriodStart",
    "ContractedCost",
    "EffectiveCost",
    "InvoiceIssuerName",
    "ListCost",
    "ProviderName",
    "PublisherName",
    "ServiceCategory",
    "ServiceName",
]


def lines(count: int = 60, seed: int = 1) -> list[LedgerLine]:
    return list(make_lines(random.Random(seed), count))


def test_the_client_reads_the_entries_that_the_server_sends() -> None:
    for line in lines():
        answer = msgspec.json.encode(make_entry_view(line))
        view = msgspec.json.decode(answer, type=LedgerEntryView)
        assert to_line(view) == line


def test_the_billing_account_is_the_one_that_paid() -> None:
    for line in lines():
        row = make_focus_row(line)
        assert row["BillingAccountId"] == row["BillingAccountName"] == line.subject.account


def node(number: int, since: datetime, until: datetime, micros: int) -> LedgerLine:
    line = next(each for each in lines() if each.entry.kind is EntryKind.NODE)
    entry = replace(
        line.entry,
        subject="j-1",
        number=number,
        sequence=number,
        line_since=MONTH[0],
        since=since,
        until=until,
        amount=Money(micros),
    )
    return replace(line, entry=entry)


def test_entries_of_a_running_node_are_one_line() -> None:
    first, second, third = (MONTH[0] + timedelta(hours=each) for each in (0, 1, 3))
    made = make_statement([node(1, first, second, 5), node(2, second, third, 7)], *MONTH)
    assert [(each.entry.since, each.entry.until) for each in made] == [(first, third)]
    assert made[0].entry.amount == Money(12)
    assert made[0].entry.id.endswith("/1")


def test_only_the_part_of_an_entry_in_the_month_is_stated() -> None:
    hour = timedelta(hours=1)
    across = node(1, MONTH[0] - hour, MONTH[0] + 2 * hour, 10)
    (line,) = make_statement([across], *MONTH)
    assert (line.entry.since, line.entry.amount) == (MONTH[0], Money(7))
    before = MONTH[0] - 30 * timedelta(days=1), MONTH[0]
    assert total_of(make_statement([across], *before)) == Money(3)
    assert make_statement([across], MONTH[1], MONTH[1] + hour) == []


def test_corrections_and_discounts_have_lines_of_their_own() -> None:
    given = lines()
    alone = [each for each in given if each.entry.kind in ("correction", "discount")]
    made = make_statement(given, *MONTH)
    assert {each.entry.id for each in alone} <= {each.entry.id for each in made}


def test_a_statement_in_csv_contains_no_formulas_of_users() -> None:
    (line, *_), out = lines(), io.StringIO()
    user = "=HYPERLINK(1)\r"
    less = replace(line.entry, amount=Money(-7))
    write_csv(out, [LedgerLine(entry=less, subject=replace(line.subject, user=user))])
    [row] = csv.DictReader(io.StringIO(out.getvalue(), newline=""))
    assert (row["x_User"], row["BilledCost"]) == (f"'{user}", "-0.000007")
    assert out.getvalue().count("\n") == 2


def test_rows_in_focus_add_up_and_have_what_the_specification_demands() -> None:
    made, out = lines(), io.StringIO()
    write_csv(out, made)
    rows = list(csv.DictReader(io.StringIO(out.getvalue())))
    assert tuple(rows[0]) == COLUMNS
    assert sum(Decimal(row["BilledCost"]) for row in rows) == total_of(made).usd
    for row in rows:
        assert all(row[name] for name in REQUIRED), row
        assert row["ChargePeriodStart"] < row["ChargePeriodEnd"]
        assert row["ChargeClass"] in ("", "Correction")
        assert bool(row["x_Corrects"]) is (row["ChargeClass"] == "Correction")
        assert (row["ChargeCategory"] == "Credit") is (row["x_Kind"] == "discount")
        assert row["PricingCategory"] or row["ChargeCategory"] == "Credit"


def test_parquet_has_the_same_rows(tmp_path: Path) -> None:
    made, file = lines(), tmp_path / "focus.parquet"
    write_parquet(file, made)
    table = pq.read_table(file)
    assert tuple(table.column_names) == COLUMNS
    assert table.column("x_EntryId").to_pylist() == [each.entry.id for each in made]
    micros = [round(each * 1_000_000) for each in table.column("BilledCost").to_pylist()]
    assert micros == [each.entry.amount.micros for each in made]


def test_a_page_shows_the_total_and_nothing_of_a_name_as_markup() -> None:
    made = lines()
    evil = replace(made[0], subject=replace(made[0].subject, job="<script>alert(1)</script>"))
    out = io.StringIO()
    write_page(out, "Project <p>", MONTH, [evil, *made[1:]])
    page = out.getvalue()
    assert f"<b>{total_of(made).usd:,.6f}</b>" in page
    assert "<script>" not in page
    assert "Project &lt;p&gt;" in page


@pytest.mark.skipif(
    "CAVVY_FOCUS_PYTHON" not in os.environ,
    reason="CAVVY_FOCUS_PYTHON names no Python with focus-validator; scripts/drills/focus.py "
    "says how to make one",
)
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_the_foundations_validator_passes_the_rows(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"focus{suffix}"
    made = lines(500, seed=7)
    if suffix == ".csv":
        with file.open("w", encoding="utf-8", newline="") as out:
            write_csv(out, made)
    else:
        write_parquet(file, made)
    assert validate(os.environ["CAVVY_FOCUS_PYTHON"], file, "1.0")


def describe(kind: EntryKind = EntryKind.NODE, **subject: str) -> LedgerLine:
    """Two hours of a node at 2.50 USD."""
    line = node(1, MONTH[0], MONTH[0] + timedelta(hours=2), 5_000_000)
    entry = replace(
        line.entry,
        kind=kind,
        line="node",
        rank=0,
        quantity=7_200_000_000,
        unit=QuantityUnit.MICROSECONDS,
        rate=HourlyRate(2_500_000),
    )
    paid = replace(
        line.subject,
        job=subject.get("job", "train"),
        volume=subject.get("volume", ""),
        service=subject.get("service", ""),
        region="r",
        purchase="spot",
        accelerator="H100",
        key="",
    )
    return LedgerLine(entry=entry, subject=paid)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (
            EntryKind.NODE,
            {
                "ChargeDescription": "node of job train, attempt 1, node 0",
                "ChargeFrequency": "Usage-Based",
                "ConsumedQuantity": Decimal(2),
                "ConsumedUnit": "Hours",
                "ListCost": Decimal(5),
                "ListUnitPrice": Decimal("2.5"),
                "PricingCategory": "Dynamic",
                "RegionId": "r",
                "x_Accelerator": "H100",
                "x_Key": None,
            },
        ),
        (
            EntryKind.DISCOUNT,
            {
                "BilledCost": Decimal(5),
                "ChargeFrequency": "One-Time",
                "ConsumedQuantity": None,
                "ConsumedUnit": None,
                "ListCost": Decimal(0),
                "ListUnitPrice": None,
                "PricingCategory": None,
                "PricingUnit": None,
            },
        ),
    ],
)
def test_a_row_in_focus_states_quantity_and_price_unless_it_is_a_discount(
    kind: EntryKind, expected: dict[str, object]
) -> None:
    row = make_focus_row(describe(kind))
    assert {name: row[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("subject", "description", "resource"),
    [
        ({"volume": "data", "job": ""}, "volume data between jobs", "data"),
        ({"service": "chat", "job": ""}, "node of service chat", "chat"),
    ],
)
def test_a_row_in_focus_names_what_is_paid_for(
    subject: dict[str, str], description: str, resource: str
) -> None:
    row = make_focus_row(describe(EntryKind.NODE, **subject))
    assert (row["ChargeDescription"], row["ResourceName"]) == (description, resource)


def test_only_time_counts_as_hours_of_a_node() -> None:
    entry = describe().entry
    assert hours_of(entry) == 2
    assert hours_of(replace(entry, unit=QuantityUnit.BYTES)) == 0
