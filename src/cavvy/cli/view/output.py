"""Prints rows as a table, JSON or CSV. Every listing command uses this module.

A command passes its columns and its rows to this module; the rows contain raw values. Tables show
formatted values; JSON and CSV contain the raw values, except that CSV contains no formulas.

Writes rows as CSV that spreadsheets can open and terminals can show safely.
"""

import csv
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import TextIO, TypeVar

import click

from cavvy.cli.view import layout
from cavvy.cli.view.formatting import show_time, zone_name
from cavvy.cli.view.layout import TableColumn as TableColumn
from cavvy.domain.values import replace

_F = TypeVar("_F", bound=Callable[..., object])
_WIDE = "cavvy.wide"  # the key in the click context that makes a command print all columns


def _format_option(*formats: str) -> Callable[[_F], _F]:
    return click.option(
        "-o",
        "--output",
        type=click.Choice(["table", "wide", *formats]),
        default="table",
        callback=_read_format,
        help="Output format; wide is a table with all columns, also on a narrow terminal.",
    )


def _read_format(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """Return the value of --output for the command. For `wide`, return `table` and set a flag
    in the context, so that all columns are shown.
    """
    context.meta[_WIDE] = value == "wide"
    return "table" if value == "wide" else value


# control characters that `json.dumps` does not escape
_CONTROLS = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}

output_option = _format_option("json", "csv")
json_option = _format_option("json")  # for commands whose output is not a list


def rows_out(
    columns: Sequence[TableColumn | str],
    rows: Iterable[object],
    output: str = "table",
    title: str | None = None,
    *,
    empty: str = "",
    file: TextIO | None = None,
) -> None:
    """Print rows. A row is a sequence of cells, or a mapping or object with one value per column
    name. `title` is printed only above tables; `empty` is printed instead of a table without rows.
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
    """Print dictionaries, structs, lists and simple values as indented JSON. Times are printed in
    ISO 8601, durations in seconds. Characters that control terminals are printed as escapes.
    """
    import json

    text = json.dumps(value, indent=2, default=_plain, ensure_ascii=False).translate(_CONTROLS)
    (file or sys.stdout).write(text + "\n")


def pairs_out(pairs: Sequence[tuple[str, object]], file: TextIO | None = None) -> None:
    """Print names and values in aligned columns, one pair per line."""
    out = file or sys.stdout
    pairs = [(_printable(name), value) for name, value in pairs]  # a device names its facts
    before = max((layout.text_width(name) for name, _ in pairs), default=0) + len(layout.GAP)
    width = _width(out)
    for name, value in pairs:
        text, indent = _text(None, value), before
        if width is not None and layout.longest_word(text) > width - before:
            indent = len(layout.GAP)  # The value is printed below its name.
        lines = layout.wrap_text(text, width and width - indent)
        head = _bold(layout.pad(name, before - len(layout.GAP)), out)
        first = f"{head}{layout.GAP}{lines.pop(0)}" if indent == before else head.rstrip()
        for line in [first, *(" " * indent + line for line in lines)]:
            out.write(f"{line}\n")


def text_out(text: str, file: TextIO | None = None) -> None:
    """Print a sentence, wrapped between words if the output is a terminal. If `text` is empty,
    nothing is printed.
    """
    out = file or sys.stdout
    for line in layout.wrap_text(text, _width(out)) if text else ():
        out.write(f"{line}\n")


def _width(out: TextIO) -> int | None:
    """Return the width in characters that the output may use, or None if there is no limit."""
    context = click.get_current_context(silent=True)
    wide = context is not None and context.meta.get(_WIDE, False)
    return None if wide else layout.terminal_width(out)


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
        case _ if names := getattr(value, "__struct_fields__", ()):
            return {name: getattr(value, name) for name in names}
        case _:
            raise TypeError(f"cannot print {type(value).__name__} as JSON")


def _write_csv(heads: Sequence[TableColumn], rows: Iterable[Sequence[object]], out: TextIO) -> None:
    write_rows(out, [[head.name for head in heads]])
    write_rows(out, ([_csv_cell(cell) for cell in row] for row in rows))


def _csv_cell(cell: object) -> object:
    """Return a cell as a number or text: lists with spaces between their items, mappings as
    JSON."""
    match cell:
        case date() | timedelta() | Decimal():
            return _plain(cell)
        case list() | tuple() | set() | frozenset():
            return " ".join(map(str, cell))
        case Mapping():
            import json

            return json.dumps(cell, default=_plain) if cell else ""
        case _:
            return cell


def _write_table(
    heads: Sequence[TableColumn],
    rows: Sequence[Sequence[object]],
    out: TextIO,
    title: str | None,
    empty: str,
) -> None:
    width = _width(out)
    for text in title.split("\n") if title else ():
        for line in layout.wrap_text(_printable(text), width):
            out.write(f"{_bold(line, out)}\n")
    if not rows:
        text_out(empty, out)
        return
    columns = [
        _column(head, [row[index] for row in rows])
        for index, head in enumerate(heads)
        if not head.hidden
    ]
    shown = [head for head, _ in columns]
    titles, *table = zip(*(texts for _, texts in columns), strict=True)
    widths = layout.choose_widths(shown, [titles, *table], width)
    if widths is None:
        _write_cards(titles, table, out)
        return
    for number, texts in enumerate([titles, *table]):
        for line in layout.row_lines(shown, texts, widths):
            out.write(f"{line if number else _bold(line, out)}\n")


def _write_cards(titles: Sequence[str], table: Iterable[Sequence[str]], out: TextIO) -> None:
    """Print each row as a block of lines. Cells without a value are left out."""
    for number, texts in enumerate(table):
        out.write("\n" if number else "")
        pairs_out([pair for pair in zip(titles, texts, strict=True) if pair[1] != "-"], out)


def _column(head: TableColumn, values: Sequence[object]) -> tuple[TableColumn, list[str]]:
    """Return a column with its heading and its cells. If all times in the column have the same time
    zone, the heading shows the zone.
    """
    title = head.title if head.title is not None else head.name.replace("_", " ").upper()
    zones = {zone_name(value) for value in values if isinstance(value, datetime)}
    texts = [_text(head, value) for value in values]
    if head.show is None and len(zones) == 1:
        title += f" ({(zone := zones.pop())})"
        texts = [text.removesuffix(f" {zone}") for text in texts]
    return replace(head, right=head.right or _are_numbers(values)), [title, *texts]


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
        return show_time(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return _printable(str(value))


def _printable(text: str) -> str:
    """Return a text as one line. Text from nodes and files must not move the cursor."""
    return "".join(char if char.isprintable() else " " for char in text)


def _bold(text: str, out: TextIO) -> str:
    return f"\x1b[1m{text}\x1b[0m" if layout.takes_style(out) else text


# The texts that a spreadsheet may take for a formula; plain numbers are no formulas.
_FORMULA = re.compile(r"[=@\t\r]|[+-](?![\d.]*$)")
# Characters that control terminals, except tabs and the ends of lines.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


class _NewlineFile:
    """A file that ends each line with a newline character only. The csv module quotes a carriage
    return in a cell only if its own line ends contain a carriage return, too.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, row: str) -> None:
        self._file.write(row.removesuffix("\r\n") + "\n")


def write_rows(file: TextIO, rows: Iterable[Sequence[object]]) -> None:
    """Write rows of texts and numbers. Texts that begin like a formula get a leading apostrophe,
    because tags, users and messages come from people who may not run formulas on other people's
    computers. For the same reason, characters that control terminals are written as escapes.
    """
    writer = csv.writer(_NewlineFile(file), lineterminator="\r\n")
    writer.writerows([_guard(cell) for cell in row] for row in rows)


def _guard(cell: object) -> object:
    if not isinstance(cell, str):
        return cell
    text = _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", cell)
    return f"'{text}" if _FORMULA.match(text) else text
