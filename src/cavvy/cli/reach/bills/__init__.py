"""Readers of the bills of clouds: these modules convert the rows of a file to `BillLine`s.

The formats of bills: the columns that a file must have, and how its rows are read. For any other
table, the user names the columns: `--map amount=Total --map since=Day`.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from itertools import chain
from pathlib import Path

from cavvy.cli.reach.bills import aws, azure, google
from cavvy.cli.reach.bills.rows import (
    BillFileError,
    BillRow,
    WrongBillValue,
    amount,
    currency,
    moment,
    number,
    read_rows,
    text,
)
from cavvy.costs.bills import BadBillLine, BillCategory, BilledKind, BillFault, BillLine
from cavvy.domain.values import Struct

__all__ = ["FORMATS", "BillFileError", "BillFormat", "UnknownBill", "find_format", "read_bill"]

ReadRow = Callable[[BillRow, int], Iterator[BillLine]]
_LONGEST = timedelta(days=400)  # maximum days that a line covers; a longer line is damaged
_MOST_NAMES = 12  # maximum number of column names that an error lists


class BillFormat(Struct, frozen=True, kw_only=True):
    """A format of bills. A file must have one column of each group of names in `required`."""

    name: str
    title: str
    required: tuple[tuple[str, ...], ...]
    read: ReadRow


class UnknownBill(BillFileError):
    """Raised if no format fits the columns of the file."""


FORMATS = {
    each.name: each
    for each in (
        BillFormat(
            name="aws",
            title="AWS Cost and Usage Report",
            required=aws.REQUIRED,
            read=aws.read_row,
        ),
        BillFormat(
            name="azure", title="Azure cost export", required=azure.REQUIRED, read=azure.read_row
        ),
        BillFormat(
            name="gcp",
            title="Google billing export",
            required=google.REQUIRED,
            read=google.read_row,
        ),
    )
}


def find_format(name: str | None, columns: Mapping[str, str]) -> BillFormat | None:
    """Return the format with this name. `columns` maps the columns of a generic table. Returns None
    if the format must be detected from the columns of the file. Raises BillFileError if the map
    lacks a column.
    """
    if name == "csv" or (name is None and columns):
        required, read = make_reader(columns)
        return BillFormat(name="csv", title="table", required=required, read=read)
    return None if name is None else FORMATS[name]


def read_bill(
    file: Path, wanted: BillFormat | None
) -> tuple[BillFormat, Iterator[BillLine | BadBillLine]]:
    """Return the format of the file, and an iterator that reads its lines. Raises BillFileError or
    ImportError.
    """
    rows = read_rows(file)
    first = next(rows, None)
    if first is None:
        raise BillFileError(f"{file} has no rows")
    if isinstance(first[1], BadBillLine):
        raise BillFileError(f"{file}: line {first[0]} does not have the columns of the header")
    form = wanted or _detect(file, first[1])
    lacking = [names for names in form.required if not any(name in first[1] for name in names)]
    if lacking:
        wrong = " and ".join(" or ".join(names) for names in lacking)
        has = ", ".join(list(first[1])[:_MOST_NAMES])
        raise BillFileError(
            f"{file} does not contain the column {wrong}, which every {form.title} has",
            f"the file has the columns {has}; choose the format with --provider, or name columns "
            "with --map",
        )
    return form, _read_lines(form, chain([first], rows))


def _detect(file: Path, row: BillRow) -> BillFormat:
    for form in FORMATS.values():
        if all(any(name in row for name in names) for names in form.required):
            return form
    raise UnknownBill(
        f"the columns of {file} do not match any known bill format",
        "choose the format with --provider, or name the columns with --map",
    )


def _read_lines(
    form: BillFormat, rows: Iterator[tuple[int, BillRow | BadBillLine]]
) -> Iterator[BillLine | BadBillLine]:
    for line_number, row in rows:
        if isinstance(row, BadBillLine):
            yield row
            continue
        try:
            lines = list(form.read(row, line_number))
        except WrongBillValue as wrong:
            yield BadBillLine(
                number=line_number, fault=wrong.fault, column=wrong.column, value=wrong.value
            )
            continue
        for line in lines:
            if not line.since <= line.until <= line.since + _LONGEST:
                yield BadBillLine(number=line_number, fault=BillFault.PERIOD)
            else:
                yield line


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
