"""The problems of a user's file, each with its position and a suggested fix.

Errors:

* SpecError      the user must change the file or a parameter; contains every problem that was found
"""

import re
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import ClassVar

from cavvy.domain.values import Struct

_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
MOST_PROBLEMS = 100  # after so many problems, the rest of a file is not read
_EXCERPT_WIDTH = 100  # maximum number of characters of a source line in an error message


class SourceMark(Struct, frozen=True, kw_only=True):
    """A range of characters in a file. `line` and `column` count from 1, and `index` counts
    characters from 0. `width` is the number of characters.
    """

    line: int
    column: int
    index: int = 0
    width: int = 1


class SpecProblem(Struct, frozen=True, kw_only=True):
    """One problem. Line 0 means that the problem is outside the file, for example in a parameter on
    the command line.
    """

    file: str
    line: int
    column: int
    message: str
    expected: str = ""
    suggestion: str = ""
    excerpt: str = ""  # the text of the line
    width: int = 1  # number of characters to underline

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        lines = [f"{place}: {self.message}", *self._source()]
        if self.expected:
            lines.append(f"  expected: {self.expected}")
        if self.suggestion:
            lines.append(f"  hint: {self.suggestion}")
        return "\n".join(lines)

    def _source(self) -> list[str]:
        if not self.line or not self.excerpt.strip():
            return []
        # If the line is long, only the part around the mistake is shown.
        start = max(0, self.column - 60)
        # Each unprintable character, including a tab, is shown as one space, so that the caret
        # stands below the mistake.
        shown = "".join(
            char if char.isprintable() else " "
            for char in self.excerpt[start : start + _EXCERPT_WIDTH]
        )
        caret = " " * (self.column - 1 - start) + "^" * max(
            1, min(self.width, len(shown) - self.column + 1 + start)
        )
        number = f"{self.line:>5} | "
        return [number + shown.rstrip(), " " * (len(number) - 2) + "| " + caret]


class SpecError(Exception):
    """Raised if a task file is invalid. `str()` formats all problems for the user."""

    code: ClassVar[str] = "invalid_task"
    status: ClassVar[int] = 422
    hint: ClassVar[str] = (
        "Fix the problems in the file, then run `cavvy validate FILE` to check it again."
    )

    def __init__(self, problems: Sequence[SpecProblem], guess: str = "") -> None:
        super().__init__(problems)
        self.problems = tuple(problems)
        self.guess = guess  # for which tool the file was read; "" for Cavvy's own files

    def __str__(self) -> str:
        count = len(self.problems)
        tail = f"\n\n{count} problems." if count > 1 else ""
        tail += f"\n\nnote: {self.guess}" if self.guess else ""
        return "\n\n".join(str(problem) for problem in self.problems) + tail


class ProblemNotes:
    """Collects the problems of one file during parsing. After MOST_PROBLEMS problems, the next one
    raises SpecError, because writing the messages for thousands of problems would take minutes.
    """

    _is_scratch = False

    def __init__(self, file: str, text: str, now: datetime | None = None) -> None:
        self.file = file
        self.text = text
        self.now = now  # the current time; if None, times in the past are not detected
        # suggests where an unknown key of the section at a path belongs, or returns ""
        self.place_key: Callable[[str, str], str] = lambda key, path: ""
        self._lines: list[str] | None = None
        self._problems: list[SpecProblem] = []

    def add(
        self, mark: SourceMark, message: str, *, expected: str = "", suggestion: str = ""
    ) -> None:
        excerpt = self.lines[mark.line - 1] if 0 < mark.line <= len(self.lines) else ""
        problem = SpecProblem(
            file=self.file,
            line=mark.line,
            column=mark.column,
            message=message,
            expected=expected,
            suggestion=suggestion,
            excerpt=excerpt,
            width=mark.width,
        )
        self._append(problem)

    def outside(
        self, place: str, message: str, *, expected: str = "", suggestion: str = ""
    ) -> None:
        """Add a problem that belongs to no line of the file."""
        self._append(
            SpecProblem(
                file=place,
                line=0,
                column=0,
                message=message,
                expected=expected,
                suggestion=suggestion,
            )
        )

    def _append(self, problem: SpecProblem) -> None:
        # If an anchor is used twice, a mistake in it is reported only once.
        if problem in self._problems:
            return
        if len(self._problems) < MOST_PROBLEMS:
            self._problems.append(problem)
        elif not self._is_scratch:
            rest = "the file has more problems, which are not listed"
            more = SpecProblem(file=self.file, line=0, column=0, message=rest)
            raise SpecError([*self._sorted(), more])

    @property
    def lines(self) -> list[str]:
        """The lines of the file, split at the line breaks of YAML."""
        if self._lines is None:
            self._lines = _BREAK.split(self.text)
        return self._lines

    def scratch(self) -> "ProblemNotes":
        """Return an empty collection of problems for this file. A caller uses this collection to
        try one way of reading a value, and then adopts or discards the collected problems.
        """
        notes = ProblemNotes(self.file, self.text, self.now)
        notes._lines, notes._is_scratch = self.lines, True
        notes.place_key = self.place_key
        return notes

    def adopt(self, other: "ProblemNotes") -> None:
        """Add the problems of another collection for this file."""
        for problem in other._problems:
            self._append(problem)

    def __len__(self) -> int:
        return len(self._problems)

    def check(self) -> None:
        """Raise SpecError if there is any problem. The error lists the problems in the order of
        their positions in the file.
        """
        if self._problems:
            raise SpecError(self._sorted())

    def _sorted(self) -> list[SpecProblem]:
        return sorted(self._problems, key=lambda problem: (problem.line, problem.column))


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """Return the entry of `choices` that `word` probably misspells, or None if no entry is
    similar."""
    from difflib import get_close_matches

    by_folded = {choice.lower().replace("-", "_"): choice for choice in choices}
    cutoff = 0.65 if len(word) > 3 else 0.5
    close = get_close_matches(word.lower().replace("-", "_")[:80], by_folded, n=1, cutoff=cutoff)
    return by_folded[close[0]] if close else None


def listed(words: Iterable[str], last: str = "or") -> str:
    """Join words for a message: "a, b or c"."""
    *most, end = list(words)
    return f"{', '.join(most)} {last} {end}" if most else end


def slug(text: str) -> str:
    """Convert `text` to a name of the characters [a-z0-9-]. Returns "" if no valid character
    remains.
    """
    from unicodedata import combining, normalize

    letters = "".join(
        char for char in normalize("NFKD", text) if not combining(char)
    )  # This converts accented letters to plain letters, for example ü to u.
    return re.sub(r"[^a-z0-9]+", "-", letters.lower()).strip("-")[:63].strip("-")


def shown(text: str, limit: int = 40) -> str:
    """Quote a user's text for an error message. A long text is truncated."""
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")
