"""Reads a line of an ignore file, by the rules of gitignore(5), and matches paths with it.

The file may be hostile, so no pattern may take long. Python's regular expressions try all ways to
divide a text among several `*`. Here, what stands between two stars is searched from the left once
and never again: an earlier place leaves more room for the rest, so no match is lost. The same holds
for `**` and the folders between. The time grows with the lengths of path and pattern only.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

_NEVER = "(?!)"
_ESCAPED_SLASH = re.compile(r"((?<!\\)(?:\\\\)*)\\/")
_ONE = "[^/]"
_CLASSES = {
    "alnum": "0-9A-Za-z",
    "alpha": "A-Za-z",
    "blank": r" \t",
    "cntrl": r"\x00-\x1f\x7f",
    "digit": "0-9",
    "graph": r"\x21-\x7e",
    "lower": "a-z",
    "print": r"\x20-\x7e",
    "punct": r"\x21-\x2f\x3a-\x40\x5b-\x60\x7b-\x7e",
    "space": r"\x20\x09-\x0d",
    "upper": "A-Z",
    "xdigit": "0-9A-Fa-f",
}


class _Invalid(Exception):
    """Raised for a pattern that matches nothing, as in git."""


@dataclass(frozen=True, slots=True)
class IgnorePattern:
    """One line: whether what it names is ignored or, after `!`, included again."""

    include: bool
    only_folders: bool
    only_name: bool  # the pattern has no slash, and names entries of all folders below
    regex: re.Pattern[str]

    def names(self, path: str, *, is_folder: bool) -> bool:
        """Return whether the pattern names this entry itself. The path is relative to the folder
        of the ignore file."""
        if self.only_folders and not is_folder:
            return False
        text = path.rpartition("/")[2] if self.only_name else path
        return self.regex.fullmatch(text) is not None


@lru_cache(maxsize=4096)
def read_pattern(line: str) -> IgnorePattern | None:
    """Return the pattern of a line, or None for an empty line, a comment and a pattern that matches
    nothing, such as `a\\`.
    """
    line = _strip(line.removesuffix("\r"))
    if not line or line.startswith("#"):
        return None
    include = not line.startswith("!")
    line = _ESCAPED_SLASH.sub(r"\1/", line if include else line[1:])
    only_folders = line.endswith("/")
    line = line.removesuffix("/")
    only_name = "/" not in line
    line = line.removeprefix("/")
    if not line:
        return None
    try:
        text = "".join(_segment(line)) if only_name else _path(line.split("/"))
        regex = re.compile(text, re.DOTALL)
    except (_Invalid, re.error):
        return None
    return IgnorePattern(include, only_folders, only_name, regex)


def _strip(line: str) -> str:
    """Return the line without spaces at its end, except a space after a backslash."""
    kept = line.rstrip(" ")
    slashes = len(kept) - len(kept.rstrip("\\"))
    return kept + " " if len(kept) < len(line) and slashes % 2 else kept


def _path(segments: list[str]) -> str:
    """Return the regular expression of a pattern with slashes."""
    groups: list[list[str]] = [[]]
    for segment in segments:
        if segment == "**":
            groups.append([])
        else:
            groups[-1].append("".join(_segment(segment)))
    first, *more = ["/".join(each) for each in groups]
    if not more:
        return first
    *middle, last = more
    made = f"{first}/" if groups[0] else ""
    made += "".join(f"(?>(?:[^/]+/)*?{each}/)" for each in middle if each)
    # `a/**` names what is in the folder, and not the folder
    return made + (f"(?:[^/]+/)*{last}" if groups[-1] else ".+")


def _segment(text: str) -> Iterator[str]:
    """Yield the parts of the regular expression for one name of a path."""
    chunks = [""]
    for each in _tokens(text):
        if each is None:
            chunks.append("")
        else:
            chunks[-1] += each
    yield chunks[0]
    if len(chunks) > 1:
        yield from (f"(?>{_ONE}*?{chunk})" for chunk in chunks[1:-1] if chunk)
        yield f"{_ONE}*{chunks[-1]}"


def _tokens(text: str) -> Iterator[str | None]:
    """Yield the regular expression of each character or class, and None for stars."""
    at = 0
    while at < len(text):
        char = text[at]
        at += 1
        if char == "*":
            while text[at : at + 1] == "*":
                at += 1
            yield None
        elif char == "?":
            yield _ONE
        elif char == "[":
            made, at = _read_class(text, at)
            yield made
        elif char == "\\":
            if at == len(text):
                raise _Invalid
            yield re.escape(text[at])
            at += 1
        else:
            yield re.escape(char)


def _read_class(text: str, at: int) -> tuple[str, int]:
    """Read a class such as `[a-z]` from behind its bracket. Return its regular expression, and
    where it ends. Raises _Invalid.
    """
    negated = text[at : at + 1] in ("!", "^")
    at += negated
    body, before, first = "", "", True
    while first or text[at : at + 1] != "]":
        first = False
        if named := re.compile(r"\[:([^\]]*):\]").match(text, at):
            if named[1] not in _CLASSES:
                raise _Invalid
            body, before, at = body + _CLASSES[named[1]], "", named.end()
            continue
        is_range = text[at : at + 1] == "-" and before and text[at + 1 : at + 2] not in ("", "]")
        at += bool(is_range)
        at += text[at : at + 1] == "\\"
        char = text[at : at + 1]
        if not char:
            raise _Invalid
        at += 1
        if is_range:
            body += f"{re.escape(before)}-{re.escape(char)}" if before <= char else ""
            before = ""
        else:
            body, before = body + re.escape(char), char
    if negated:
        return f"[^/{body}]", at + 1
    return (f"(?!/)[{body}]" if body else _NEVER), at + 1
