"""Fits tables into the width of a terminal. Names are never shortened. On a narrow terminal,
columns are left out or texts are wrapped. If the narrowest form of a table is still too wide, each
row becomes a block of lines.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import zip_longest
from typing import Any, TextIO

from cavvy.domain.values import Struct

GAP = "  "
INDENT = "    "
_TEXT = 20  # minimum width of a text column in characters
_WORD = re.compile(r"(?:[^\s`]*`[^`]*`)+[^\s`]*|\S+")  # what is in backticks is one word
_SHOWN_LINE = re.compile(r" *\d* *\|")


class TableColumn(Struct, frozen=True):
    """One column. `name` is the key in JSON and CSV, and ends with the unit. `title` is the heading
    in tables.

    `show` formats a raw value other than None. Without `show`, amounts of money are formatted by
    the unit in `name`, and times are shown in local time. Numbers and columns with `right` are
    aligned on the right. `hidden` columns appear only in JSON and CSV.

    On a narrow terminal, columns with a `drop` are left out, the lowest `drop` first. The text of a
    `wrap` column continues on the next line, and the text of a `cut` column is shortened. Columns
    without `wrap` and `cut` contain names, which are never shortened. If other columns need the
    space, the names in a `below` column move to a separate line below each row.
    """

    name: str
    title: str | None = None
    show: Callable[[Any], str] | None = None
    right: bool = False
    hidden: bool = False
    drop: int = 0
    wrap: bool = False
    cut: bool = False
    below: bool = False


def terminal_width(out: TextIO) -> int | None:
    """Return the width of the terminal in characters, or None if the output is not a terminal."""
    if not out.isatty():
        return None
    import shutil

    return shutil.get_terminal_size().columns


def takes_style(out: TextIO) -> bool:
    """Return whether the output may contain colours and bold text: on a terminal that can show
    them, unless the user has set NO_COLOR (https://no-color.org)."""
    import os

    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return out.isatty() and not plain


def text_width(text: str) -> int:
    """Return the number of terminal cells that the text occupies."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(0 if combining(char) else 1 + (east_asian_width(char) in "WF") for char in text)


def wrap_text(text: str, width: int | None) -> list[str]:
    """Wrap a text between words, and return its lines. A word longer than `width` gets its own
    line.
    """
    if width is None or text_width(text) <= width:
        return [text]
    lines = [""]
    for word in text.split():
        if lines[-1] and text_width(lines[-1]) + 1 + text_width(word) > width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".lstrip()
    return lines


def wrap_message(text: str, width: int | None, first: int = 0) -> str:
    """Wrap each line of a message between words; the rest of a line keeps its indent. A command in
    backticks stays whole, so that it can be copied, and lines of a file that are shown (`3 | x`)
    stay as they are. `first` is the width of what stands before the first line.
    """
    if width is None:
        return text
    shown = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        if _SHOWN_LINE.match(line):
            shown.append(line)
            continue
        rows, room = [""], width - len(indent) - first
        for word in _WORD.findall(line):
            if rows[-1] and text_width(rows[-1]) + 1 + text_width(word) > room:
                rows.append(word)
                room = width - len(indent)
            else:
                rows[-1] = f"{rows[-1]} {word}" if rows[-1] else word
        shown += [indent + row for row in rows]
        first = 0
    return "\n".join(shown)


def longest_word(text: str) -> int:
    """Return the width of the longest word."""
    return max(map(text_width, text.split()), default=0)


def choose_widths(
    heads: Sequence[TableColumn], table: Sequence[Sequence[str]], width: int | None
) -> dict[int, int] | None:
    """Return the columns to show, as a dictionary from index to width, or None if no selection of
    columns fits into `width`. A column of width 0 is printed on a separate line below the row.

    `table` is the heading and the rows. Columns with the same value in all rows are dropped first.
    """
    found = _fit(heads, table, width, set(range(len(heads))))
    below = {index for index, head in enumerate(heads) if head.below}
    if width is None or not below or (found is not None and len(found) == len(heads)):
        return found
    if any(text_width(row[index]) + len(INDENT) > width for index in below for row in table):
        return found
    other = _fit(heads, table, width, set(range(len(heads))) - below)
    if other is None or (found is not None and len(found) >= len(other) + len(below)):
        return found
    return other | dict.fromkeys(below, 0)


def _fit(
    heads: Sequence[TableColumn],
    table: Sequence[Sequence[str]],
    width: int | None,
    among: Collection[int],
) -> dict[int, int] | None:
    """Choose widths like `choose_widths`, but place only the columns in `among`, and no cells on
    additional lines below a row.
    """
    columns = list(zip(*table, strict=True))
    full = [max(map(text_width, column)) for column in columns]
    if width is None:
        return dict(enumerate(full))
    least = list(map(_least, heads, columns, full))
    kept = sorted(among)
    order = [index for index in kept if heads[index].drop]
    order.sort(key=lambda index: (len(set(columns[index][1:])) > 1, heads[index].drop))
    while (room := width - len(GAP) * (len(kept) - 1)) < sum(least[index] for index in kept):
        if not order or len(kept) == 1:
            return None
        kept.remove(order.pop(0))
    while sum(full[index] for index in kept) > room:
        full[max(kept, key=lambda index: (full[index] > least[index], full[index]))] -= 1
    return {index: full[index] for index in kept}


def _least(head: TableColumn, cells: Sequence[str], full: int) -> int:
    """Return the smallest width that the column can have."""
    if head.wrap:
        return min(full, max(_TEXT, *map(longest_word, cells)))
    return min(full, _TEXT) if head.cut else full


def row_lines(
    heads: Sequence[TableColumn], texts: Sequence[str], widths: Mapping[int, int]
) -> list[str]:
    """Return the lines of one row. `widths` contains the columns that `choose_widths` selected."""
    beside = {index: width for index, width in widths.items() if width}
    cells = [
        wrap_text(texts[index], width) if heads[index].wrap else [_cut(texts[index], width)]
        for index, width in beside.items()
    ]
    lines = [
        GAP.join(
            pad(text, width, heads[index].right)
            for text, (index, width) in zip(line, beside.items(), strict=True)
        ).rstrip()
        for line in zip_longest(*cells, fillvalue="")
    ]
    return lines + [INDENT + texts[index] for index, width in widths.items() if not width]


def pad(text: str, width: int, right: bool = False) -> str:
    """Return the text, padded with spaces to the width. With `right`, the spaces precede the
    text.
    """
    spaces = " " * (width - text_width(text))
    return spaces + text if right else text + spaces


def _cut(text: str, width: int) -> str:
    if text_width(text) <= width:
        return text
    while text_width(text) >= width:
        text = text[:-1]
    return f"{text}…"
