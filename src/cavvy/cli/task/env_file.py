"""Reads files with environment variables, such as `.env`, for the option `--env-file`."""

import re
from pathlib import Path

from cavvy.cli.view.failure import CommandFailure

_VARIABLE = re.compile(
    r"""[ \t]*(?:export[ \t]+)?(?P<name>[A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*
    (?:'(?P<single>[^']*)'|"(?P<double>(?:[^"\\]|\\.)*)"|(?P<plain>(?!(?<=[ \t])\#)[^\n'"].*?|))
    [ \t]*(?:(?<=[\s'"])\#.*)?(?:\n|\Z)""",
    re.VERBOSE,
)
_SKIPPED = re.compile(r"[ \t]*(?:#.*)?(?:\n|\Z)")
_MOST_BYTES = 1 << 20
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


def read_env_file(path: str) -> dict[str, str]:
    """Return the variables in a file. Each line is empty, a comment that starts with #, or
    NAME=VALUE. A value in quotes can have several lines; a value in double quotes can have the
    escapes of C. Raises CommandFailure.
    """
    try:
        with Path(path).expanduser().open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            message = f"--env-file {path}: the file is larger than 1 MiB"
            raise CommandFailure(message, "name a file with lines NAME=VALUE", exit_code=2)
        text = content.decode("utf-8-sig").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the file is not UTF-8 text"
        raise CommandFailure(f"--env-file {path}: {reason}", exit_code=2) from error
    found: dict[str, str] = {}
    at, number = 0, 1
    while at < len(text):
        match = _SKIPPED.match(text, at) or _VARIABLE.match(text, at)
        line = f"--env-file {path}: line {number}"
        if match is None:
            hint = "write for example NAME=VALUE or NAME='a value with spaces'"
            raise CommandFailure(f"{line}: expected NAME=VALUE", hint, exit_code=2)
        if match.re is _VARIABLE:
            found[match["name"]] = _read_value(match, line)
        at = match.end()
        number += match[0].count("\n")
    return found


def _read_value(match: re.Match[str], line: str) -> str:
    """Return the value of a variable. Raises CommandFailure if the value names another variable."""
    if match["single"] is not None:
        return match["single"]
    value = match["plain"] or match["double"] or ""
    if named := re.search(r"(?<!\\)\$\{[^}]*\}", value):
        hint = f"write the value in full; in single quotes, {named[0]} is plain text"
        raise CommandFailure(
            f"{line}: Cavvy does not replace {named[0]} by the value of a variable",
            hint,
            exit_code=2,
        )
    if match["double"] is None:
        return value
    return re.sub(r"\\(.)", lambda escape: _ESCAPES.get(escape[1], escape[1]), value)
