"""Reads a bill and the ledger for the days of the bill, for `cavvy cost reconcile`.

Describes in sentences how a bill differs from the ledger.
"""

from collections.abc import Collection, Mapping
from datetime import UTC, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from cavvy.costs.bills import USD, BadBillLine, BillFault
from cavvy.costs.reconcile import Difference, DifferenceCause
from cavvy.domain.local_time import to_local
from cavvy.domain.units import Money, format_usd
from cavvy.domain.values import Struct

if TYPE_CHECKING:
    from cavvy.cli.reach.bills import BillFormat
    from cavvy.client import ApiClient
    from cavvy.costs.reconcile import BilledSum, BillSummary, CellKey


_DAY, _MICROSECOND = timedelta(days=1), timedelta(microseconds=1)

_SENTENCES = {
    DifferenceCause.NOT_IN_LEDGER: "Cavvy's ledger lacks this charge; another server may have "
    "started the machine",
    DifferenceCause.NOT_IN_BILL: "the bill has no line for the charge, with or without Cavvy's tag",
    DifferenceCause.AMOUNT: "the amount differs, and the bill does not state the duration of "
    "the charge",
    DifferenceCause.DAYS: "the same sum appears on other days; the bill may use another time zone",
    DifferenceCause.ROUNDING: "the difference comes from rounding in the bill",
    DifferenceCause.TAX: "tax, which the ledger does not contain",
    DifferenceCause.CREDIT: "a credit or refund, which the ledger does not contain; with the "
    "setting costs.discounts, Cavvy adds credits to the ledger",
    DifferenceCause.DISCOUNT: "a discount; the setting costs.discounts posts discounts to the "
    "ledger",
    DifferenceCause.FEE: "a fee, such as for a reservation, which the ledger does not contain",
    DifferenceCause.UNTAGGED: "the bill has no line with Cavvy's tag for this charge, but an "
    "untagged line with the same cost; activate Cavvy's tag in the cloud's billing settings",
    DifferenceCause.DELAYED: "the bill does not cover the whole of this day yet",
    DifferenceCause.DUPLICATE: "the bill contains the line twice; the second line was not counted",
}


class ReconciliationReport(Struct, frozen=True, kw_only=True):
    """The differences between a bill and the ledger, and the extent of the comparison."""

    title: str  # name of the bill's format
    since: datetime
    until: datetime
    lines: int
    charges: int  # number of compared pairs of resource and day in the ledger
    found: list["Difference"]


def reconcile_file(
    client: "ApiClient",
    file: Path,
    form: str | None,
    columns: Mapping[str, str],
    provider: str | None,
    period: tuple[datetime | None, datetime | None],
) -> ReconciliationReport:
    """Compare the file with the ledger of all projects that the caller may see. By default,
    `period` is the days of the bill. The compared days in UTC have the same dates that `period` has
    in local time. Raises BillFileError, ImportError or ApiError.
    """
    from cavvy.cli.reach.bills import find_format, read_bill
    from cavvy.client.ledger_wire import list_entries, to_line
    from cavvy.costs.reconcile import add_up_bill, add_up_ledger, find_lacking, reconcile
    from cavvy.costs.shared_disks import group_disks

    known, lines = read_bill(file, find_format(form, columns))
    provider = provider or _find_provider(known)
    period = _name_days(period)
    bill = add_up_bill(lines, *period)
    since, until = _period(bill, period)
    entries = [to_line(each) for each in list_entries(client, since=since, until=until)]
    ledger, discounts = add_up_ledger(entries, provider, since, until)
    gangs = find_gangs(client, ledger, bill.resources)
    bill.join_disks(group_disks(entries, provider, gangs, bill.disks))
    if lacking := find_lacking(bill, ledger, gangs):
        for line in read_bill(file, known)[1]:
            bill.add_untagged(line, lacking)
    return ReconciliationReport(
        title=known.title,
        since=since,
        until=until,
        lines=bill.lines,
        charges=len(ledger),
        found=reconcile(bill, ledger, gangs, discounts),
    )


def _find_provider(form: "BillFormat") -> str:
    """Return the provider whose bills have this format. Raises BillFileError."""
    from cavvy.cli.reach.bills import BillFileError

    if form.name == "csv":
        hint = "name the provider, for example --of aws"
        raise BillFileError("the bill does not name its provider", hint)
    return form.name


def _name_days(
    period: tuple[datetime | None, datetime | None],
) -> tuple[datetime | None, datetime | None]:
    """Return the period from midnight to midnight in UTC that contains the same dates as the given
    period contains in local time.
    """
    first, end = period
    last = None if end is None else to_local(end - _MICROSECOND).date()
    return (
        None if first is None else datetime.combine(to_local(first).date(), time(), UTC),
        None if last is None else datetime.combine(last, time(), UTC) + _DAY,
    )


def _period(
    bill: "BillSummary", wanted: tuple[datetime | None, datetime | None]
) -> tuple[datetime, datetime]:
    """Return the period, which begins and ends at midnight UTC."""
    first = wanted[0] or bill.first or datetime.now(UTC)
    last = wanted[1] or bill.last or first
    since = datetime.combine(first.astimezone(UTC).date(), time(), UTC)
    until = datetime.combine(last.astimezone(UTC).date(), time(), UTC)
    return since, until if until == last and until > since else until + _DAY


def find_gangs(
    client: "ApiClient", ledger: "Mapping[CellKey, BilledSum]", named: Collection[str]
) -> dict[str, str]:
    """Return, for each attempt in the ledger, the name that its gang has in the bill. A warm gang
    that an attempt took over has the name of an earlier attempt. The name of a warm gang is read
    from the job, unless the job was removed.
    """
    from cavvy.client import ApiError
    from cavvy.costs.reconcile import match_gangs
    from cavvy.domain.ledger import VOLUME_SUBJECT

    projects = {key.resource: each.project for key, each in ledger.items()}
    known = match_gangs(named, projects)
    found: dict[str, str] = {}
    jobs: dict[str, str] = {}
    for attempt, project in projects.items():
        if attempt not in known and not attempt.startswith(VOLUME_SUBJECT):
            jobs[attempt.rpartition("-")[0]] = project
    for job, project in jobs.items():
        try:
            attempts = client.job(project, job).attempts
        except ApiError as error:
            if error.code not in ("job-not-found", "role-needed", "scope-needed"):
                raise
            continue
        found.update({each.id: each.gang.partition("@")[0] for each in attempts})
    return {**found, **known}


def explain_difference(found: Difference) -> str:
    """Return a sentence that names the likely cause and, if possible, a remedy."""
    match found.cause:
        case DifferenceCause.RATE:
            billed = _rate(found.bill, found.bill_hours)
            charged = _rate(found.ledger, found.ledger_hours)
            return f"the rate differs: {billed} in the bill, {charged} in the ledger"
        case DifferenceCause.DURATION:
            billed, charged = _hours(found.bill_hours), _hours(found.ledger_hours)
            return f"the time differs: {billed} in the bill, {charged} in the ledger"
        case DifferenceCause.CURRENCY:
            return f"the bill is in {found.billed_in}, and the ledger is in {USD}"
        case DifferenceCause.UNREADABLE:
            return f"the line was ignored: {_fault(found.bad)}" if found.bad else "not readable"
        case _:
            return _SENTENCES[found.cause]


def _rate(amount: Decimal | None, hours: Decimal | None) -> str:
    if amount is None or not hours:
        return "none"
    usd = amount / hours
    return f"{format_usd(Money(round(usd * 10**6)), 4 if usd >= 0.001 else 6)}/h"


def _hours(hours: Decimal | None) -> str:
    return f"{hours or 0:.4f} h"


def _fault(bad: BadBillLine) -> str:
    match bad.fault:
        case BillFault.NUMBER:
            return f"{bad.column} is {bad.value!r}, not a number such as 1234.56"
        case BillFault.TIME:
            return f"{bad.column} is {bad.value!r}, not a time such as 2026-11-03T14:00:00Z"
        case BillFault.COLUMNS:
            return "the number of columns differs from the header"
        case BillFault.PERIOD:
            return "the period ends before it begins, or more than 400 days after it begins"
        case _:
            assert_never(bad.fault)
