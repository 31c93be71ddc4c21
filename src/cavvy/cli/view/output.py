"""Prints rows as a table, JSON or CSV; used by every listing command.

A command passes its columns, and rows of raw values. Tables show formatted values; JSON and CSV
contain the raw values.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any, TextIO, TypeVar

import click

_F = TypeVar("_F", bound=Callable[..., object])
_GAP = "  "
_NARROWEST = 8  # a column is not shrunk to fewer characters than this


@dataclass(frozen=True, slots=True)
class TableColumn:
    """One column. `name` is the key in JSON and CSV, and its suffix is the unit; `title` is the
    heading in tables.

    `show` formats a raw value that is not None; without `show`, money is shown by the unit in
    `name`. Numbers, and columns with `right`, are aligned on the right. On a narrow terminal,
    `wide` columns are cut first. `hidden` columns appear only in JSON and CSV. A `wrap` column,
    which must be the last one, is wrapped instead of cut.
    """

    name: str
    title: str | None = None
    show: Callable[[Any], str] | None = None
    right: bool = False
    wide: bool = False
    hidden: bool = False
    wrap: bool = False


def _format_option(*formats: str) -> Callable[[_F], _F]:
    return click.option(
        "-o",
        "--output",
        type=click.Choice(formats),
        default="table",
        help="Output format.",
    )


output_option = _format_option("table", "json", "csv")
json_option = _format_option("table", "json")  # for commands whose output is not a list


def rows_out(
    columns: Sequence[TableColumn | str],
    rows: Iterable[object],
    output: str = "table",
    title: str | None = None,
    *,
    empty: str = "",
    file: TextIO | None = None,
) -> None:
    """Print rows. A row is a sequence of cells, or a mapping or object with a value for the name of
    each column. `title`, and `empty` (printed if there are no rows), appear only in tables.
    """
    heads = [TableColumn(column) if isinstance(column, str) else column for column in columns]
    out = file or sys.stdout
    table = [_cells(heads, row) for row in rows]
    match output:
        case "json":
            names = [head.name for head in heads]
            json_out([dict(zip(names, cells, strict=True)) for cells in table], file=out)
        case "csv":
            _write_csv(heads, table, out)
        case _:
            _write_table(heads, table, out, title, empty)


def _cells(heads: Sequence[TableColumn], row: object) -> Sequence[object]:
    if isinstance(row, Mapping):
        return [row[head.name] for head in heads]
    return row if isinstance(row, Sequence) else [getattr(row, head.name) for head in heads]


def json_out(value: object, *, file: TextIO | None = None) -> None:
    """Print plain containers as indented JSON, with times in ISO 8601 and durations in seconds."""
    import json

    text = json.dumps(value, indent=2, default=_plain, ensure_ascii=False)
    (file or sys.stdout).write(text + "\n")


def pairs_out(pairs: Sequence[tuple[str, object]], file: TextIO | None = None) -> None:
    """Print names and values in aligned columns, one pair per line."""
    out = file or sys.stdout
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        out.write(f"{_bold(name.ljust(width), out)}{_GAP}{_text(None, value)}\n")


def _plain(value: object) -> object:
    match value:
        case datetime() | date():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case Decimal():
            return int(value) if value == value.to_integral_value() else float(value)
        case set() | frozenset() | tuple():
            return list(value)
        case _:
            raise TypeError(f"cannot print {type(value).__name__} as JSON")


def _write_csv(heads: Sequence[TableColumn], rows: Iterable[Sequence[object]], out: TextIO) -> None:
    import csv

    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([head.name for head in heads])
    for row in rows:
        writer.writerow(
            [_plain(cell) if isinstance(cell, (date, timedelta, Decimal)) else cell for cell in row]
        )


def _write_table(
    heads: Sequence[TableColumn],
    rows: Sequence[Sequence[object]],
    out: TextIO,
    title: str | None,
    empty: str,
) -> None:
    if title:
        out.write(f"{_bold(title, out)}\n")
    if not rows:
        out.write(f"{empty}\n" if empty else "")
        return
    shown = [index for index, head in enumerate(heads) if not head.hidden]
    heads = [
        replace(heads[index], right=heads[index].right or _are_numbers(row[index] for row in rows))
        for index in shown
    ]
    texts = [
        [_text(head, row[index]) for head, index in zip(heads, shown, strict=True)] for row in rows
    ]
    titles = [
        head.title if head.title is not None else head.name.replace("_", " ").upper()
        for head in heads
    ]
    widths = [max(map(len, column)) for column in zip(titles, *texts, strict=True)]
    widths = _shrink(heads, widths, out)
    out.write(_bold(_line(heads, titles, widths), out) + "\n")
    for row_texts in texts:
        for line in _wrapped(heads, row_texts, widths):
            out.write(_line(heads, line, widths) + "\n")


def _are_numbers(values: Iterable[object]) -> bool:
    found = [value for value in values if value is not None]
    return bool(found) and all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in found
    )


def _text(head: TableColumn | None, value: object) -> str:
    if value is None or value == "":
        return "-"
    if head is not None and head.show is not None:
        return head.show(value)
    if head is not None and isinstance(value, int) and "_micros" in head.name:
        from cavvy.domain.units import HourlyRate, Money, format_rate, format_usd

        is_rate = head.name.endswith("_per_hour")
        return format_rate(HourlyRate(value)) if is_rate else format_usd(Money(value))
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S")
    if isinstance(value, bool):
        return "yes" if value else "no"
    # Each row is one line of the table, and text from nodes must not move the cursor.
    return "".join(char if char.isprintable() else " " for char in str(value))


def _line(heads: Sequence[TableColumn], texts: Sequence[str], widths: Sequence[int]) -> str:
    cells = [
        (text if len(text) <= width else text[: width - 1] + "…").rjust(width)
        if head.right
        else (text if len(text) <= width else text[: width - 1] + "…").ljust(width)
        for head, text, width in zip(heads, texts, widths, strict=True)
    ]
    return _GAP.join(cells).rstrip()


def _wrapped(
    heads: Sequence[TableColumn], texts: Sequence[str], widths: Sequence[int]
) -> list[Sequence[str]]:
    """The lines of a row whose last column is wrapped."""
    if not heads[-1].wrap or len(texts[-1]) <= widths[-1]:
        return [texts]
    import textwrap

    first, *more = textwrap.wrap(texts[-1], max(widths[-1], _NARROWEST)) or [""]
    return [[*texts[:-1], first], *([*("" for _ in texts[:-1]), line] for line in more)]


def _shrink(heads: Sequence[TableColumn], widths: list[int], out: TextIO) -> list[int]:
    """Shrink the wide columns, the widest first, to the width of the terminal. Output to a pipe is
    not shrunk.
    """
    if not out.isatty():
        return widths
    import shutil

    excess = sum(widths) + len(_GAP) * (len(widths) - 1) - shutil.get_terminal_size().columns
    while excess > 0:
        wide = [
            index
            for index, head in enumerate(heads)
            if (head.wide or head.wrap) and widths[index] > _NARROWEST
        ]
        if not wide:
            break
        widest = max(wide, key=lambda index: widths[index])
        widths[widest] -= 1
        excess -= 1
    return widths


def _bold(text: str, out: TextIO) -> str:
    import os

    return f"\x1b[1m{text}\x1b[0m" if out.isatty() and "NO_COLOR" not in os.environ else text
