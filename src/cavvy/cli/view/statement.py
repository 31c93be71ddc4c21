"""Writes a statement as an HTML page, or its FOCUS rows as CSV or Parquet."""

from collections.abc import Callable, Sequence
from datetime import datetime
from decimal import Decimal
from html import escape
from pathlib import Path
from typing import IO, TextIO

from cavvy.cli.view.output import write_rows
from cavvy.costs.statements import COLUMNS, NUMBERS, TIMES, hours_of, make_focus_row, total_of
from cavvy.domain.ledger import EntryKind, LedgerLine
from cavvy.domain.units import Money

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; color: #222 }}
table {{ border-collapse: collapse; width: 100%; margin: 1rem 0 2rem }}
th, td {{ padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: left }}
td.n, th.n {{ text-align: right; font-variant-numeric: tabular-nums }}
</style></head><body>
<h1>{title}</h1>
<p>Charges in US dollars, from {since} to {until} (UTC). Total: <b>{total}</b>.</p>
{tables}
</body></html>
"""


def write_page(
    file: IO[str], title: str, period: tuple[datetime, datetime], lines: Sequence[LedgerLine]
) -> None:
    """Write an HTML page with all lines, and with the sums by user, kind of charge and GPU."""
    idle = [line for line in lines if line.entry.kind is EntryKind.IDLE]
    tables = [
        _sums("By user", "user", lines, lambda line: line.subject.user or "-"),
        _sums("By kind of charge", "kind", lines, lambda line: str(line.entry.kind)),
        _sums("Paid while no job ran", "charge", idle, lambda line: line.entry.line),
        _sums("By GPU", "GPU", lines, lambda line: line.subject.accelerator or "none"),
        _details(lines),
    ]
    text = _PAGE.format(
        title=escape(title),
        since=f"{period[0]:%Y-%m-%d}",
        until=f"{period[1]:%Y-%m-%d}",
        total=_usd(total_of(lines)),
        tables="\n".join(tables),
    )
    file.write(text)


def _sums(
    title: str, head: str, lines: Sequence[LedgerLine], key: Callable[[LedgerLine], str]
) -> str:
    sums: dict[str, int] = {}
    for line in lines:
        sums[key(line)] = sums.get(key(line), 0) + line.entry.amount.micros
    rows = [[name, _usd(Money(sums[name]))] for name in sorted(sums, key=lambda each: -sums[each])]
    return _table(title, [head, "cost"], rows, numbers=1)


def _details(lines: Sequence[LedgerLine]) -> str:
    heads = ["job, volume or service", "user", "machine", "charge", "from (UTC)", "hours", "cost"]
    rows = [
        [
            line.subject.job or line.subject.volume or line.subject.service,
            line.subject.user,
            f"{line.subject.provider} {line.subject.instance_type}",
            f"{line.entry.line} ({line.entry.kind})",
            f"{line.entry.since:%Y-%m-%d %H:%M}",
            f"{hours_of(line.entry):.3f}",
            _usd(line.entry.amount),
        ]
        for line in lines
    ]
    return _table("All charges", heads, rows, numbers=2)


def _table(title: str, heads: list[str], rows: list[list[str]], numbers: int) -> str:
    """Return an HTML table whose last `numbers` columns contain numbers."""
    first = len(heads) - numbers

    def cells(tag: str, row: list[str]) -> str:
        marks = [f'<{tag} class="n">' if i >= first else f"<{tag}>" for i in range(len(row))]
        parts = (f"{mark}{escape(cell)}</{tag}>" for mark, cell in zip(marks, row, strict=True))
        return f"<tr>{''.join(parts)}</tr>"

    body = "\n".join(cells("td", row) for row in rows)
    return f"<h2>{escape(title)}</h2>\n<table>{cells('th', heads)}\n{body}</table>"


def _usd(money: Money) -> str:
    return f"{money.usd:,.6f}"


def write_csv(file: TextIO, lines: Sequence[LedgerLine]) -> None:
    """Write the FOCUS rows as CSV. Empty fields are null."""
    rows = map(make_focus_row, lines)
    write_rows(file, [COLUMNS])
    write_rows(file, ([_csv_cell(*each) for each in row.items()] for row in rows))


def _csv_cell(name: str, value: str | Decimal | datetime | None) -> str:
    match value:
        case None:
            return ""
        case Decimal():
            return f"{value:.12f}" if "Quantity" in name else f"{value:.6f}"
        case datetime():
            return value.isoformat().replace("+00:00", "Z")
        case _:
            return value


def write_parquet(path: Path, lines: Sequence[LedgerLine]) -> None:
    """Write the FOCUS rows as Parquet. Raises ImportError if pyarrow is not installed."""
    import pyarrow as arrow  # type: ignore[import-untyped]  # ships no types
    from pyarrow import parquet

    time, number, text = arrow.timestamp("us", tz="UTC"), arrow.float64(), arrow.string()
    kinds = [time if name in TIMES else number if name in NUMBERS else text for name in COLUMNS]
    rows = [make_focus_row(line) for line in lines]
    columns = [
        arrow.array([_parquet_cell(row[name]) for row in rows], type=kind)
        for name, kind in zip(COLUMNS, kinds, strict=True)
    ]
    schema = arrow.schema(list(zip(COLUMNS, kinds, strict=True)))
    parquet.write_table(arrow.Table.from_arrays(columns, schema=schema), path)


def _parquet_cell(value: str | Decimal | datetime | None) -> object:
    return float(value) if isinstance(value, Decimal) else value
