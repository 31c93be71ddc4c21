"""Reads a line of an ignore file, by the rules of gitignore(5), and matches paths with it.

The file may be hostile, so no pattern may take long. Python's regular expressions try all ways to
divide a text among several `*`. Here, what stands between two stars is searched from the left once
and never again: an earlier place leaves more room for the rest, so no match is lost. The same holds
for `**` and the folders between. The time grows with the lengths of path and pattern only.
Git compares bytes, so a path and a pattern have one character here for each of their bytes.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

_NEVER = "(?!)"
_SPECIAL = re.compile(r"[*?[\\]")
_ONE = "[^/]"
# What stars stand for: a part of a name, folders and a slash or nothing, folders and a slash, all.
_STAR, _ANY_FOLDERS, _SOME_FOLDERS, _ALL = _STARS = ("*", "**/", "**\\/", "**")
_FOLDERS, _SOME_MORE = f"(?:{_ONE}*/)*", f"(?:{_ONE}*/)+"
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
    "space": r"\x20\t\n\r",  # as git has it
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
    body: re.Pattern[str] | str  # a text has no wildcards

    def names(self, path: str, *, is_folder: bool) -> bool:
        """Return whether the pattern names this entry itself. The path is relative to the folder
        of the ignore file, and as `to_bytes` returns it."""
        if self.only_folders and not is_folder:
            return False
        text = path.rpartition("/")[2] if self.only_name else path
        if isinstance(self.body, str):
            return self.body == text
        return self.body.fullmatch(text) is not None


def to_bytes(path: str) -> str:
    """Return a path with a character for each of its bytes: `?` and classes stand for one byte, as
    in git."""
    return path if path.isascii() else os.fsencode(path).decode("latin-1")


@lru_cache(maxsize=4096)
def read_pattern(line: bytes) -> IgnorePattern | None:
    """Return the pattern of a line, or None for an empty line, a comment and a pattern that matches
    nothing, such as `a\\`.
    """
    text = line.removesuffix(b"\r").partition(b"\0")[0].decode("latin-1")
    if text.startswith("#"):
        return None
    text = _strip(text)
    include = not text.startswith("!")
    text = text if include else text[1:]
    only_folders = text.endswith("/")
    text = text.removesuffix("/")
    only_name = "/" not in text
    text = text.removeprefix("/")
    if not text:
        return None
    body: re.Pattern[str] | str = text
    if _SPECIAL.search(text):
        try:
            body = re.compile(_name(text) if only_name else _path(text), re.DOTALL)
        except (_Invalid, re.error):
            return None
    return IgnorePattern(include, only_folders, only_name, body)


def _strip(line: str) -> str:
    """Return the line without spaces at its end, except a space after a backslash."""
    kept = line.rstrip(" ")
    slashes = len(kept) - len(kept.rstrip("\\"))
    return kept + " " if len(kept) < len(line) and slashes % 2 else kept


def _name(text: str) -> str:
    """Return the regular expression of a pattern without slashes."""
    return _segment([_STAR if each in _STARS else each for each in _tokens(text)])


def _path(text: str) -> str:
    """Return the regular expression of a pattern with slashes.

    As in git, what stands before the first of `*?[\\` is compared first, and the rest is a pattern
    of its own: `a**/b` names `ab` and `a/c/b`.
    """
    wild = _SPECIAL.search(text)
    assert wild is not None
    start = wild.start()
    groups = _group(list(_tokens(text[start:])))
    made = re.escape(text[:start]) + "/".join(map(_segment, groups[0][1]))
    for number, (opening, segments) in enumerate(groups[1:], 1):
        if opening == _ALL:
            return f"{made}.*"
        folders = _FOLDERS if opening == _ANY_FOLDERS else _SOME_MORE
        body = "/".join(map(_segment, segments))
        is_last = number == len(groups) - 1
        made += f"{folders}{body}" if is_last else f"(?>{folders}?{body})"
    return made


def _group(tokens: list[str]) -> list[tuple[str, list[list[str]]]]:
    """Return the segments of a pattern, divided before each `**` that stands for folders. What
    begins with it ends with a slash, unless it is the last.
    """
    groups: list[tuple[str, list[list[str]]]] = [("", [[]])]
    for token in tokens:
        if token in (_ANY_FOLDERS, _SOME_FOLDERS, _ALL):
            groups.append((token, [[]]))
        elif token == "/":
            groups[-1][1].append([])
        else:
            groups[-1][1][-1].append(token)
    return groups


def _segment(tokens: list[str]) -> str:
    """Return the regular expression for one name of a path, or for a part of it."""
    chunks = [""]
    for each in tokens:
        if each == _STAR:
            chunks.append("")
        else:
            chunks[-1] += each
    made = chunks[0]
    if len(chunks) > 1:
        made += "".join(f"(?>{_ONE}*?{chunk})" for chunk in chunks[1:-1] if chunk)
        made += f"{_ONE}*{chunks[-1]}"
    return made


def _tokens(text: str) -> Iterator[str]:
    """Yield the regular expression of each character or class, `/`, and names of stars."""
    at, before = 0, "/"
    while at < len(text):
        char = text[at]
        at += 1
        if char == "*":
            token, at = _read_stars(text, at, at_start=before == "/")
            yield token
            before = "/" if token in (_ANY_FOLDERS, _SOME_FOLDERS) else "*"
            continue
        before = char
        if char == "?":
            yield _ONE
        elif char == "[":
            made, at = _read_class(text, at)
            yield made
        elif char == "\\":
            if at == len(text):
                raise _Invalid
            before = text[at]
            yield "/" if before == "/" else re.escape(before)
            at += 1
        else:
            yield "/" if char == "/" else re.escape(char)


def _read_stars(text: str, at: int, *, at_start: bool) -> tuple[str, int]:
    """Return what one or more stars stand for, and where that ends. `at` is behind the first."""
    end = at
    while text[end : end + 1] == "*":
        end += 1
    if end == at or not at_start:
        return _STAR, end
    if end == len(text):
        return _ALL, end
    if text[end] == "/":
        return _ANY_FOLDERS, end + 1
    return (_SOME_FOLDERS, end + 2) if text.startswith("\\/", end) else (_STAR, end)


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
