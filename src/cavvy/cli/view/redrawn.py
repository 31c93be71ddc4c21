"""Follows how a program redraws its last lines, such as progress bars, as a terminal would."""

import re
from codecs import getincrementaldecoder

# maximum characters of a line that is not finished; a longer line is finished at once
_LONGEST = 1 << 20
_SHOWN = 4096  # maximum characters of an unfinished line that are shown
_DEEPEST = 16  # maximum lines above the cursor that a program can redraw
_LONGEST_SEQUENCE = 256  # characters; escape sequences that are longer are text
_COLOR = re.compile(r"\x1b\[[0-9;:]*m")
_CONTROL = re.compile(
    r"(\n|\r|\x08+"
    r"|\x1b\[[0-?]*[ -/]*[@-~]"  # colors, moves of the cursor
    r"|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)"  # titles, links
    r"|\x1b[ -/]*[0-Z\\-~])"
)
_INCOMPLETE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b\n]*\x1b?|[ -/]*)\Z")
_INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]|\x1b(?!\[[0-9;:]*m)")


class RedrawnLines:
    """The last lines of a program's output. A line is finished when at least as many lines are
    below it as the program has moved the cursor up so far.

    Text after a carriage return replaces the whole line, because progress bars are written so.
    """

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._incomplete = ""  # the beginning of an escape sequence
        self._lines = [""]
        self._at = 0  # the line in which the cursor is
        self._replaced = 0  # how many of the line's last characters the next text replaces
        self._colors = ""  # escape sequences before this text
        self._depth = 0  # how many lines the program has moved the cursor up so far

    def take(self, data: bytes) -> list[str]:
        """Add output. Returns the lines that are finished now. They contain no control characters
        and no escape sequences except colors.
        """
        text = self._incomplete + self._decoder.decode(data)
        rest = _INCOMPLETE.search(text, max(0, len(text) - _LONGEST_SEQUENCE))
        self._incomplete = rest[0] if rest else ""
        for index, piece in enumerate(_CONTROL.split(text[: rest.start()] if rest else text)):
            if index % 2:
                self._control(piece)
            elif piece:
                self._write(piece)
        return self._finish()

    def unfinished(self) -> list[str]:
        """Return the unfinished lines, without the empty lines at their end."""
        lines = [_visible(line[:_SHOWN]) for line in self._lines]
        while lines and not _COLOR.sub("", lines[-1]).strip():
            lines.pop()
        return lines

    def _finish(self) -> list[str]:
        count = max(0, self._at - self._depth)
        if len(self._lines[self._at]) > _LONGEST:
            count = self._at + 1
        finished = [_visible(line) for line in self._lines[:count]]
        self._lines = self._lines[count:] or [""]
        self._at = max(0, self._at - count)
        self._replaced = min(self._replaced, len(self._lines[self._at]))
        return finished

    def _write(self, text: str) -> None:
        kept = _cut(self._lines[self._at], self._replaced)
        self._lines[self._at] = kept + self._colors + text
        self._replaced, self._colors = 0, ""

    def _control(self, piece: str) -> None:
        line, end = self._lines[self._at], piece[-1]
        if piece == "\n":
            self._move(1, new=True)
        elif piece == "\r":
            self._replaced = len(line)
        elif end == "\x08":
            self._replaced = min(len(line), self._replaced + len(piece))
        elif _COLOR.fullmatch(piece):
            if self._replaced:
                self._colors += piece
            else:
                self._lines[self._at] += piece
        elif piece.startswith("\x1b[") and end in "ABEF":
            count = int(piece[2:-1]) if piece[2:-1].isdecimal() else 1
            self._move(count if end in "BE" else -count)
        elif piece == "\x1b[2K" or (piece in ("\x1b[K", "\x1b[0K") and self._replaced):
            kept = "" if piece == "\x1b[2K" else _cut(line, self._replaced)
            self._lines[self._at], self._replaced = kept, 0

    def _move(self, count: int, *, new: bool = False) -> None:
        """Move the cursor by `count` lines. If `new`, a line is added below the last one."""
        self._lines[self._at] += self._colors
        self._colors = ""
        if count < 0:
            up = min(-count, _DEEPEST)
            self._depth = max(self._depth, up)
            self._lines[:0] = [""] * (up - self._at)  # these lines were finished before
            self._at = max(0, self._at - up)
        else:
            if new and self._at == len(self._lines) - 1:
                self._lines.append("")
            self._at = min(len(self._lines) - 1, self._at + count)
        self._replaced = len(self._lines[self._at])


def _cut(line: str, count: int) -> str:
    """Return the line without its last `count` characters. If characters are kept, colors do not
    count."""
    if count >= len(line):
        return ""
    parts = re.split(f"({_COLOR.pattern})", line)
    for index in range(len(parts) - 1, -1, -2):
        cut = min(count, len(parts[index]))
        parts[index] = parts[index][: len(parts[index]) - cut]
        count -= cut
    return "".join(parts)


def _visible(line: str) -> str:
    return _INVISIBLE.sub("", line)
