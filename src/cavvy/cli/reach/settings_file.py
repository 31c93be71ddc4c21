"""Changes a provider's table in the settings file. All other lines and all comments stay."""

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.new_file import new_file
from cavvy.domain.tasks import Scalar

_HEADER = re.compile(r"\s*\[")
_NO_WRITER = "add these lines yourself: "


def read_table(file: Path, provider: str) -> dict[str, Scalar]:
    """Return what the settings file itself, without variables, says of a provider."""
    table = _parse(_read(file)).get("providers", {})
    found = table.get(provider, {}) if isinstance(table, dict) else {}
    return dict(found) if isinstance(found, dict) else {}


def write_table(file: Path, provider: str, changes: Mapping[str, Scalar]) -> None:
    """Set these keys of a provider's table, and make the table if it is missing. Raises
    CommandFailure if the file is written in a form that cannot be changed so."""
    before = _read(file)
    after = change_table(before, provider, changes)
    if after is None:
        lines = [f"{key} = {write_value(value)}" for key, value in changes.items()]
        raise CommandFailure(
            f"{file} has no line [providers.{provider}] and cannot be changed safely",
            _NO_WRITER + "; ".join([f"[providers.{provider}]", *lines]),
        )
    real = file.resolve()  # a link stays a link
    try:
        real.parent.mkdir(parents=True, exist_ok=True)
        mode = real.stat().st_mode & 0o777 if real.exists() else 0o600
        with new_file(str(real)) as out:
            os.fchmod(out.fileno(), mode)
            out.write(after.encode())
    except OSError as error:
        raise CommandFailure(f"{file} cannot be written: {error.strerror}") from error


def change_table(text: str, provider: str, changes: Mapping[str, Scalar]) -> str | None:
    """Return the text of a settings file in which a provider's table has these keys, or None if
    that would change anything else."""
    lines = text.splitlines()
    begin = next((n for n, line in enumerate(lines) if _names(line, provider)), None)
    if begin is None:
        lines += ["", f"[providers.{provider}]"] if lines else [f"[providers.{provider}]"]
        begin = len(lines) - 1
    end = next((n for n in range(begin + 1, len(lines)) if _HEADER.match(lines[n])), len(lines))
    for key, value in changes.items():
        written = f"{key} = {write_value(value)}"
        own = re.compile(rf"\s*(?:{re.escape(key)}|\"{re.escape(key)}\")\s*=")
        at = next((n for n in range(begin + 1, end) if own.match(lines[n])), None)
        if at is not None:
            lines[at] = written + _find_comment(lines[at])
            continue
        last = max((n for n in range(begin, end) if n == begin or _is_key(lines[n])), default=begin)
        lines.insert(last + 1, written)
        end += 1
    after = "\n".join(lines) + "\n"
    return after if _is_right(text, after, provider, changes) else None


def write_value(value: Scalar) -> str:
    """Return a value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    escaped = "".join(
        f"\\u{ord(char):04x}" if ord(char) < 32 or ord(char) == 127 else char
        for char in value.replace("\\", "\\\\").replace('"', '\\"')
    )
    return f'"{escaped}"'


def _is_right(before: str, after: str, provider: str, changes: Mapping[str, Scalar]) -> bool:
    """Return whether only these keys differ: the text may have values of several lines."""
    try:
        wanted, found = _parse(before), tomllib.loads(after)
    except ValueError:
        return False
    providers = wanted.setdefault("providers", {})
    if not isinstance(providers, dict) or not isinstance(providers.get(provider, {}), dict):
        return False
    providers[provider] = {**providers.get(provider, {}), **changes}
    return wanted == found


def _names(line: str, provider: str) -> bool:
    name = re.escape(provider)
    header = rf"\s*\[\s*providers\s*\.\s*(?:{name}|\"{name}\"|'{name}')\s*\]"
    return re.match(header, line) is not None


def _is_key(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _find_comment(line: str) -> str:
    """Return the comment of a line with a simple value, with the blanks before it."""
    found = re.fullmatch(r"[^=]*=\s*(?:\"[^\"\\]*\"|'[^']*'|[^\"'#\s]+)(\s*#.*)?", line)
    return (found[1] or "") if found else ""


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise CommandFailure(f"{file} cannot be read: {error}") from error


def _parse(text: str) -> dict[str, object]:
    return tomllib.loads(text)
