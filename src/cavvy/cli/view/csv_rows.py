"""Writes rows as CSV that spreadsheets can open and terminals can show safely."""

import csv
import re
from collections.abc import Iterable, Sequence
from typing import TextIO

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
