"""Shows what jobs and replicas have printed. On a terminal, only colours and bold text are left of
their escape sequences: others set the window's title, clear the screen, write to the clipboard, or
make the terminal answer. What is not a terminal gets the bytes as they are.
"""

import re
import sys
from codecs import getincrementaldecoder

_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_SHOWN = "\t\n\r\b"
_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
# The beginnings of texts that end with BEL or ESC \: DCS, SOS, OSC, PM, APC (ECMA-48)
_TEXTS = "PX]^_"
_LONGEST = 4096  # characters of an escape sequence; what follows is shown


class EscapeFilter:
    """Leaves of a job's output what may be written to a terminal. The parts of the output may be
    cut anywhere.
    """

    def __init__(self) -> None:
        # bytes that are not UTF-8 could be control characters for the terminal
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")
        self._begun = ""  # an escape sequence that has not ended

    def take(self, data: bytes, *, final: bool = False) -> bytes:
        """Return what to write of the next part. What is not complete is kept, unless `final`."""
        text = self._decoder.decode(data, final)
        if not self._begun and _CONTROLS.search(text) is None:
            return text.encode()
        made = list[str]()
        for char in text:
            if self._begun:
                made.append(self._continue(char))
            elif char == "\x1b":
                self._begun = char
            elif char in _SHOWN or _CONTROLS.match(char) is None:
                made.append(char)
        if final:
            self._begun = ""
        return "".join(made).encode()

    def _continue(self, char: str) -> str:
        """Add a character to the begun sequence. Return what to show, if the sequence has ended."""
        before, self._begun = self._begun, self._begun + char
        if char in "\n\r\x18\x1a" or len(before) >= _LONGEST:
            self._begun = ""
            return char if char in "\n\r" or char.isprintable() else ""
        if char == "\x1b" and before[1:2] not in (*_TEXTS,):
            self._begun = char  # a new one, as in terminals
            return ""
        if before == "\x1b":
            self._begun = self._begun if char in (*_TEXTS, "[") or " " <= char <= "/" else ""
            return ""
        if before[1] in _TEXTS:
            if char == "\x07" or (before[-1] == "\x1b" and len(before) > 1):
                self._begun = ""
            return ""
        first = "@" if before[1] == "[" else "0"
        if first <= char <= "~":
            whole, self._begun = self._begun, ""
            return whole if _COLOURS.fullmatch(whole) else ""
        return ""


class JobOutput:
    """Writes the output of a job or replica to standard output."""

    def __init__(self, *, raw: bool = False) -> None:
        self._filter = None if raw or not sys.stdout.isatty() else EscapeFilter()

    def write(self, data: bytes) -> None:
        sys.stdout.buffer.write(data if self._filter is None else self._filter.take(data))
        sys.stdout.buffer.flush()


def show_whole(data: bytes) -> bytes:
    """Return a complete output as it may be written to standard output."""
    return EscapeFilter().take(data, final=True) if sys.stdout.isatty() else data
