"""Reads the values of a bill's rows: numbers, times, tags and texts."""

import json
import re
from collections.abc import Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache
from typing import Any

from cavvy.costs.bills import USD, BillFault
from cavvy.importers.bills.rows import BillRow

# A comma is accepted only if a decimal point follows, because `1,234` means 1.234 in some
# countries.
_NUMBER = re.compile(r"[-+]?\$?(\d+|\d{1,3}(,\d{3})+(?=\.))?(\.\d+)?([eE][-+]?\d{1,3})?")
_FIRST_YEAR, _LAST_YEAR = 2000, 2999
_AMERICAN = re.compile(r"(\d{1,2})/(\d{1,2})/(\d{4})")


class WrongBillValue(Exception):
    """Raised if a value in a row of the bill cannot be read."""

    def __init__(self, fault: BillFault, column: str, value: object) -> None:
        super().__init__(f"{column}: {value!r}")
        self.fault, self.column, self.value = fault, column, str(value)[:60]


def text(row: BillRow, *columns: str) -> str:
    """Return the first value that is not empty, or ""."""
    return next((str(row[name]).strip() for name in columns if row.get(name) not in (None, "")), "")


def currency(row: BillRow, *columns: str) -> str:
    """Return the code of the currency in capital letters, or USD if the bill does not state it."""
    return text(row, *columns).upper() or USD


def number(row: BillRow, *columns: str) -> Decimal | None:
    """Return the first value that is not empty, as a number, or None if all are empty."""
    for column in columns:
        value = row.get(column)
        if value in (None, ""):
            continue
        written = str(value).strip()
        if not re.search(r"\d", written) or not _NUMBER.fullmatch(written):
            raise WrongBillValue(BillFault.NUMBER, column, value)
        return Decimal(written.replace(",", "").replace("$", ""))
    return None


def amount(row: BillRow, *columns: str) -> Decimal:
    """Return the amount, or 0 if the text is empty."""
    return number(row, *columns) or Decimal(0)


def moment(row: BillRow, *columns: str, zone: timedelta = timedelta(0)) -> datetime:
    """Return the time in UTC. If the bill states a time without a zone, `zone` applies. If the bill
    states only a date, the time is midnight.
    """
    value = next((row[name] for name in columns if row.get(name) not in (None, "")), "")
    if isinstance(value, datetime):
        found = value
    elif isinstance(value, date):
        found = datetime.combine(value, time())
    else:
        found = _parse_time(str(value).strip(), columns[0])
    if not _FIRST_YEAR <= found.year <= _LAST_YEAR:
        raise WrongBillValue(BillFault.TIME, columns[0], value)
    if found.tzinfo is None:
        found = found.replace(tzinfo=UTC) - zone
    return found.astimezone(UTC)


@lru_cache(maxsize=4096)  # cached, because many lines have the same hour
def _parse_time(written: str, column: str) -> datetime:
    american = _AMERICAN.fullmatch(written)
    try:
        if american:  # of Azure: MM/DD/YYYY
            month, day, year = map(int, american.groups())
            return datetime(year, month, day)  # noqa: DTZ001  # the caller sets the zone
        return datetime.fromisoformat(written.removesuffix(" UTC"))
    except ValueError:
        raise WrongBillValue(BillFault.TIME, column, written) from None


def tags_of(value: Any) -> Mapping[str, str]:
    """Return the tags in a column. The value is a map, a list of pairs, a list of keys and values,
    or any of these as JSON. The JSON may lack its outer braces. Returns {} for a text that contains
    no tags.
    """
    if isinstance(value, str):
        written = value.strip()
        if not written:
            return {}
        if not written.startswith(("{", "[")):
            written = f"{{{written}}}"
        try:
            value = json.loads(written)
        except (ValueError, RecursionError):
            return {}
    if isinstance(value, Mapping):
        return {str(key): str(each) for key, each in value.items()}
    found = {}
    for each in value if isinstance(value, list | tuple) else ():
        if isinstance(each, Mapping) and "key" in each:
            found[str(each["key"])] = str(each.get("value", ""))
        elif isinstance(each, list | tuple) and len(each) == 2:
            found[str(each[0])] = str(each[1])
    return found
