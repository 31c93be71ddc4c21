"""Writes reports as one HTML page, or as PDF by Chromium or Chrome. A report ends with a list of
all its figures with their sources and dates.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from html import escape
from pathlib import Path

from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.output_file import open_output, write_text
from cavvy.domain.facts import Fact
from cavvy.domain.values import Struct

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_PRINT_S = 120
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="color-scheme" content="light dark">
<meta name="viewport" content="width=device-width"><title>{title}</title><style>
body{{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:78rem;padding:0 1rem}}
table{{border-collapse:collapse;margin:1rem 0 2rem;font-size:13px}}
th,td{{padding:.2rem .5rem;border-bottom:1px solid #8c959f55;text-align:left;vertical-align:top}}
td.number{{text-align:right;font-variant-numeric:tabular-nums}}svg{{max-width:100%;height:auto}}
@media print{{body{{max-width:none;margin:0}}svg{{break-inside:avoid}}}}
</style></head><body><h1>{title}</h1>
{parts}
</body></html>
"""


class ReportTable(Struct, frozen=True, kw_only=True):
    heads: Sequence[str]
    rows: Sequence[Sequence[object]]


class ReportSection(Struct, frozen=True, kw_only=True):
    """A part of a report: sentences, then pictures as SVG, then a table."""

    title: str
    texts: Sequence[str] = ()
    pictures: Sequence[str] = ()
    table: ReportTable | None = None


def make_page(title: str, sections: Sequence[ReportSection], facts: Sequence[Fact]) -> str:
    """Return the page of a report, which ends with the figures in `facts`, if there are any. All
    texts are escaped."""
    listed = ReportTable(
        heads=("figure", "value", "unit", "source", "date", "computed as"),
        rows=[
            (each.name, each.value, each.unit, each.source, each.as_of or "none", each.formula)
            for each in facts
        ],
    )
    last = ReportSection(title="Every figure and its source", table=listed)
    shown = [*sections, last] if facts else sections
    return _PAGE.format(title=escape(title), parts="\n".join(map(_show, shown)))


def _show(section: ReportSection) -> str:
    texts = "".join(f"<p>{escape(each)}</p>\n" for each in section.texts)
    table = _show_table(section.table) if section.table else ""
    return f"<h2>{escape(section.title)}</h2>\n{texts}{''.join(section.pictures)}{table}"


def _show_table(table: ReportTable) -> str:
    heads = "".join(f"<th>{escape(each)}</th>" for each in table.heads)
    rows = "".join(f"<tr>{''.join(map(_show_cell, row))}</tr>\n" for row in table.rows)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>\n{rows}</tbody></table>"


def _show_cell(value: object) -> str:
    if value is None:
        return "<td></td>"
    if isinstance(value, int | float):
        text = f"{value:,.6g}" if abs(value) < 1e6 else f"{value:,.0f}"
        return f'<td class="number">{text}</td>'
    return f"<td>{escape(str(value))}</td>"


def write_report(path: Path, page: str) -> None:
    """Write a page as HTML or PDF, by the ending of the file's name. Raises CommandFailure."""
    match path.suffix.lower():
        case ".pdf":
            _print(path, page)
        case ".html" | ".htm":
            write_text(path, page)
        case _:
            hint = "end the name with .html or .pdf"
            raise CommandFailure(f"{path}: reports are HTML or PDF files", hint, 2)


def _print(path: Path, page: str) -> None:
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        hint = "install Chromium or Chrome, or write a page (report.html) and print it in a browser"
        raise CommandFailure("a PDF needs Chromium or Chrome, which was not found", hint)
    root = ["--no-sandbox"] if os.geteuid() == 0 else []  # its sandbox refuses to run as root
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "report.html", Path(folder) / "report.pdf"
        source.write_text(page, encoding="utf-8")
        try:
            done = subprocess.run(
                [
                    *(browser, "--headless", "--disable-gpu", "--no-pdf-header-footer", *root),
                    *(f"--user-data-dir={folder}/profile", f"--print-to-pdf={target}"),
                    source.as_uri(),
                ],
                capture_output=True,
                text=True,
                timeout=_PRINT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise CommandFailure(f"{browser} did not print within {_PRINT_S} s") from error
        if not target.exists():
            last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
            raise CommandFailure(f"{browser} wrote no PDF: {last}")
        with open_output(path) as out:
            out.write(target.read_bytes())
