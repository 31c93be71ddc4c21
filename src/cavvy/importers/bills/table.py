"""Reads a table with any columns, which the user names: `--map amount=Total --map since=Day`."""

import re
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta

from cavvy.costs.bills import BillCategory, BilledKind, BillLine
from cavvy.importers.bills.rows import BillFileError, BillRow
from cavvy.importers.bills.values import amount, currency, moment, number, text

_NEEDED = ("amount", "since", "gang")
FIELDS = (*_NEEDED, "until", "resource", "kind", "category", "hours", "currency", "id", "zone")
_ZONE = re.compile(r"([+-])(\d\d):(\d\d)")


def make_reader(
    columns: Mapping[str, str],
) -> tuple[tuple[tuple[str, ...], ...], Callable[[BillRow, int], Iterator[BillLine]]]:
    """Return the columns that a file must have, and the reader of a row. `columns` maps fields to
    columns; `zone` is the UTC offset of times without a zone, such as +02:00. Raises BillFileError.
    """
    unknown = sorted(set(columns) - set(FIELDS))
    if unknown:
        raise BillFileError(
            f"--map does not know {unknown[0]!r}", f"--map accepts {', '.join(FIELDS)}"
        )
    lacking = [name for name in _NEEDED if name not in columns]
    if lacking:
        raise BillFileError(
            f"--map lacks {', '.join(lacking)}", f"add for example --map {lacking[0]}=COLUMN"
        )
    zone = _read_zone(columns.get("zone", "+00:00"))

    def read_row(row: BillRow, line: int) -> Iterator[BillLine]:
        yield _read(row, line, columns, zone)

    return tuple((each,) for name, each in columns.items() if name != "zone"), read_row


def _read_zone(written: str) -> timedelta:
    match = _ZONE.fullmatch(written)
    if match is None:
        raise BillFileError(
            f"the time zone {written!r} is not an offset from UTC", "expected +02:00 or -05:30"
        )
    length = timedelta(hours=int(match[2]), minutes=int(match[3]))
    return length if match[1] == "+" else -length


def _read(row: BillRow, line: int, columns: Mapping[str, str], zone: timedelta) -> BillLine:
    def column(name: str) -> str:
        return columns.get(name, "")

    since = moment(row, column("since"), zone=zone)
    until = since + timedelta(days=1)
    if text(row, column("until")):
        until = moment(row, column("until"), zone=zone)
    kind, category = text(row, column("kind")).lower(), text(row, column("category")).lower()
    mark = text(row, column("id"))
    gang = text(row, column("gang"))
    return BillLine(
        number=line,
        resource=text(row, column("resource")) or gang,
        gang=gang,
        kind=BilledKind(kind) if kind in [*BilledKind] else BilledKind.MACHINE,
        category=BillCategory(category) if category in [*BillCategory] else BillCategory.USAGE,
        since=since,
        until=until,
        hours=number(row, column("hours")),
        amount=amount(row, column("amount")),
        currency=currency(row, column("currency")),
        identity=hash(mark or tuple(map(str, row.values()))),
    )
