"""The formats of bills: the columns that a file must have, and how its rows are read."""

from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from itertools import chain
from pathlib import Path

from cavvy.costs.bills import BadBillLine, BillFault, BillLine
from cavvy.domain.values import Struct
from cavvy.importers.bills import aws, azure, google, table
from cavvy.importers.bills.rows import BillFileError, BillRow, read_rows
from cavvy.importers.bills.values import WrongBillValue

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
        required, read = table.make_reader(columns)
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
    for number, row in rows:
        if isinstance(row, BadBillLine):
            yield row
            continue
        try:
            lines = list(form.read(row, number))
        except WrongBillValue as wrong:
            yield BadBillLine(
                number=number, fault=wrong.fault, column=wrong.column, value=wrong.value
            )
            continue
        for line in lines:
            if not line.since <= line.until <= line.since + _LONGEST:
                yield BadBillLine(number=number, fault=BillFault.PERIOD)
            else:
                yield line
