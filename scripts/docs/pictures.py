"""Draws the pictures of docs/img, and those that the web console shows, by `cavvy catalog diagram` from the
shipped catalog, and writes the table of values of `cavvy tco`. A test fails when one is stale.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from cavvy.capabilities.choose.diagram import list_pictures
from cavvy.catalog.tables import read_table

_DOCS = Path(__file__).resolve().parents[2] / "docs"
FOLDER, PAGE = _DOCS / "img", _DOCS / "reference" / "choosing.md"
CONSOLE = _DOCS.parent / "src/cavvy/console/static"
_TABLE = re.compile(r"VALUES\n|\| value \| default \|.*?\n\n", re.DOTALL)


def make_page(text: str) -> str:
    """The page with the current table of values."""
    rows = [
        f"| `{row['name']}` | {_default(row)} | {row['unit']} | {_source(row)} |"
        for row in read_table("cavvy.capabilities.choose", "assumptions")
    ]
    table = "\n".join(["| value | default | unit | source |", "|---|---|---|---|", *rows])
    return _TABLE.sub(lambda _: f"{table}\n\n", text, count=1)


def _source(row: Mapping[str, str]) -> str:
    if not row["source"]:
        return f"required, or found: {row['meaning']}" if row["meaning"] else "required, or found"
    return f"{'weak: ' if row['weak'] else ''}{row['source']} {row['as_of']}".strip()


def _default(row: Mapping[str, str]) -> str:
    if not row["low"]:
        return row["value"]
    return f"{row['value']} ({row['low']} to {row['high']})"


def main() -> None:
    for name, draw in list_pictures().items():
        for folder in (FOLDER, CONSOLE):
            (folder / f"choose-{name}.svg").write_text(draw())
    PAGE.write_text(make_page(PAGE.read_text()))
    print("wrote docs/img/choose-*.svg and docs/reference/choosing.md")


if __name__ == "__main__":
    main()
