"""The rows of a file (CSV, CSV in gzip, Parquet, or JSON with an object on each line), and their
values: numbers, times, tags and texts. The rows are read one by one, so that a long file does not
need much memory.
"""

import csv
import gzip
import io
import json
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from cavvy.costs.bills import USD, BadBillLine, BillFault

_GZIP, _ZIP, _PARQUET = b"\x1f\x8b", b"PK\x03\x04", b"PAR1"
_LONGEST_VALUE = (
    10_000_000  # maximum characters of a value; a file with longer values is not a bill
)
_BATCH = 20_000  # maximum rows of a Parquet file in memory
BillRow = Mapping[str, Any]


class BillFileError(Exception):
    """Raised if the file is not a readable bill. `hint` tells the user how to fix the problem."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def read_rows(file: Path) -> Iterator[tuple[int, BillRow | BadBillLine]]:
    """Yield the rows with their line numbers: in CSV the header is line 1; in the other formats the
    first row is line 1. Raises BillFileError, also between rows, and ImportError if the file is in
    Parquet and pyarrow is not installed.
    """
    try:
        with file.open("rb") as opened:
            begin = opened.read(4)
            if begin == _PARQUET:
                yield from _read_parquet(file)
                return
            if begin == _ZIP:
                raise BillFileError(f"{file} is a zip archive", "unpack it first")
            opened.seek(0)
            plain: IO[bytes] = opened
            if begin[:2] == _GZIP:
                plain = gzip.GzipFile(fileobj=opened)  # type: ignore[assignment]  # binary, too
            text = io.TextIOWrapper(plain, encoding="utf-8-sig", newline="")
            yield from (_read_json(text) if _is_json(file, text) else _read_csv(file, text))
    except UnicodeDecodeError as error:
        raise BillFileError(
            f"{file} is not text in UTF-8",
            f"convert it, for example with `iconv -t UTF-8`; byte {error.start} is not valid",
        ) from error
    except (OSError, EOFError) as error:
        raise BillFileError(f"{file} cannot be read: {error}") from error


def _is_json(file: Path, text: IO[str]) -> bool:
    begin = text.read(1)
    text.seek(0)
    if begin == "[":
        raise BillFileError(
            f"{file} is a single JSON array", "export JSON with an object on each line instead"
        )
    return begin == "{"


def _read_csv(file: Path, text: IO[str]) -> Iterator[tuple[int, BillRow | BadBillLine]]:
    csv.field_size_limit(_LONGEST_VALUE)
    rows = csv.reader(text)
    try:
        names = [name.strip() for name in next(rows, [])]
        if len(names) < 2:
            raise BillFileError(
                f"line 1 of {file} has no columns", "expected names, separated by commas"
            )
        twice = sorted({name for name in names if names.count(name) > 1 and name})
        if twice:
            raise BillFileError(
                f"{file} has several columns with the name {twice[0]!r}",
                "rename or remove one of them",
            )
        for values in rows:
            number = rows.line_num
            if not values:
                continue
            if len(values) != len(names):
                yield (
                    number,
                    BadBillLine(number=number, fault=BillFault.COLUMNS, value=str(len(values))),
                )
                continue
            yield number, dict(zip(names, values, strict=True))
    except csv.Error as error:
        raise BillFileError(f"{file}: line {rows.line_num}: {error}") from error


def _read_json(text: IO[str]) -> Iterator[tuple[int, BillRow | BadBillLine]]:
    for number, line in enumerate(text, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_float=str, parse_int=str)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            yield number, BadBillLine(number=number, fault=BillFault.COLUMNS, value=line[:40])
            continue
        yield number, _flatten(row)


def _flatten(row: Mapping[str, Any]) -> BillRow:
    """Flatten a row: a field `inner` of an object `outer` gets the name `outer.inner`."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            found.update({f"{name}.{inner}": each for inner, each in value.items()})
        else:
            found[name] = value
    return found


def _read_parquet(file: Path) -> Iterator[tuple[int, BillRow | BadBillLine]]:
    import pyarrow  # type: ignore[import-untyped]  # ships no types
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches(_BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except pyarrow.ArrowException as error:
        raise BillFileError(f"{file} is a damaged Parquet file: {error}") from error


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
