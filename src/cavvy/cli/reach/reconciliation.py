"""Reads a bill and the ledger for the days of the bill, for `cavvy cost reconcile`."""

from collections.abc import Collection, Mapping
from datetime import UTC, datetime, time, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from cavvy.domain.values import Struct

if TYPE_CHECKING:
    from cavvy.client import ApiClient
    from cavvy.costs.reconcile import BilledSum, BillSummary, CellKey, Difference
    from cavvy.importers.bills import BillFormat

_DAY, _MICROSECOND = timedelta(days=1), timedelta(microseconds=1)


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
    from cavvy.client.ledger_wire import list_entries, to_line
    from cavvy.costs.reconcile import add_up_bill, add_up_ledger, find_lacking, reconcile
    from cavvy.costs.shared_disks import group_disks
    from cavvy.importers.bills import find_format, read_bill

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
    from cavvy.importers.bills import BillFileError

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
    last = None if end is None else (end - _MICROSECOND).astimezone().date()
    return (
        None if first is None else datetime.combine(first.astimezone().date(), time(), UTC),
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
