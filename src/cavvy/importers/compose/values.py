"""The values of a Compose file, with its variables filled in, by
https://docs.docker.com/reference/compose-file/interpolation and
https://docs.docker.com/compose/how-tos/environment-variables/variable-interpolation.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from cavvy.importers.kept_keys import TranslationNotes
from cavvy.spec.problems import ProblemNotes, SourceMark
from cavvy.spec.tree import ListNode, MapNode, Node, ScalarNode

_REFERENCE = re.compile(
    r"\$(?:(?P<dollar>\$)|(?P<plain>[A-Za-z_]\w*)"
    r"|\{(?P<name>[A-Za-z_]\w*)(?:(?P<how>:?[-+?])(?P<other>[^{}]*))?\})"
)
_VARIABLE = re.compile(r"\s*(?:export\s+)?([A-Za-z_][\w.-]*)\s*(?:[=:]\s*(.*))?")
_MOST_BYTES = 1 << 20


class ComposeReader:
    """Reads nodes of the file. `variables` are those of `.env` and of this machine."""

    def __init__(
        self,
        folder: Path,
        variables: Mapping[str, str],
        notes: ProblemNotes,
        kept: TranslationNotes,
    ) -> None:
        self.folder, self.notes, self.kept = folder, notes, kept
        self._variables = variables

    def text(self, node: Node | None) -> str:
        """Return a value as a string, or "" if it is absent or no scalar, which is noted."""
        if node is None or (isinstance(node, ScalarNode) and node.value is None):
            return ""
        if not isinstance(node, ScalarNode):
            self.notes.add(node.mark, "one value is expected here", expected="a string or a number")
            return ""
        if isinstance(node.value, bool):
            return str(node.value).lower()
        return self._fill(node.text, node.mark)

    def texts(self, node: Node | None) -> list[str]:
        """Return the strings of a list, or of one value."""
        if isinstance(node, ListNode):
            return [self.text(each) for each in node.items]
        return [self.text(node)] if node is not None else []

    def pairs(self, node: Node | None) -> Iterator[tuple[str, str | None, SourceMark]]:
        """Yield the names, values and marks of a table, or of a list of NAME=VALUE."""
        if isinstance(node, MapNode):
            for key, value in node.entries:
                empty = isinstance(value, ScalarNode) and value.value is None
                yield key.text, None if empty else self.text(value), key.mark
        for each in node.items if isinstance(node, ListNode) else ():
            name, given, text = self.text(each).partition("=")
            yield name, text if given else None, each.mark

    def find(self, name: str) -> str | None:
        """Return the value of a variable of this machine or of `.env`."""
        return self._variables.get(name)

    def read_env_file(self, path: str, mark: SourceMark, *, required: bool) -> dict[str, str]:
        """Return the variables of a file beside the Compose file."""
        file = (self.folder / path).resolve()
        if not file.is_relative_to(self.folder.resolve()):
            message = f"{path} is outside of the folder of this file, which is not read"
            self.notes.add(mark, message, suggestion="copy it into the folder")
            return {}
        if not file.is_file():
            if required:
                hint = "create it, or write `required: false` beside its path"
                self.notes.add(mark, f"there is no file {path}", suggestion=hint)
            return {}
        return read_variables(file)

    def _fill(self, text: str, mark: SourceMark) -> str:
        """Return a text with its variables filled in."""

        def find(found: re.Match[str]) -> str:
            if found["dollar"]:
                return "$"
            name = found["plain"] or found["name"]
            value, how, other = self.find(name), found["how"] or "", found["other"] or ""
            there = value if how.startswith(":") else value is not None
            if how.endswith("+"):
                return other if there else ""
            if there or (value is not None and not how):
                return value or ""
            if how.endswith("?"):
                self.notes.add(mark, f"the variable {name} is not set: {other}")
            elif not how:
                reason = f"the variable is not set, so it is empty; set it, or write it in {_ENV}"
                self.kept.note(mark, name, reason)
            return other if how.endswith("-") else ""

        return _REFERENCE.sub(find, text)


_ENV = ".env"


def read_variables(file: Path) -> dict[str, str]:
    """Return the variables of a file with lines NAME=VALUE. Raises OSError."""
    found: dict[str, str] = {}
    with file.open("r", encoding="utf-8", errors="replace") as lines:
        text = lines.read(_MOST_BYTES)
    for line in text.splitlines():
        match = _VARIABLE.fullmatch(line)
        if match is None or match[2] is None:
            continue
        value = match[2].strip()
        if len(value) > 1 and value[0] in "'\"" and value.find(value[0], 1) > 0:
            value = value[1 : value.find(value[0], 1)]
        else:
            value = re.split(r"\s#", value)[0].rstrip()
        found[match[1]] = value
    return found


def read_dot_env(folder: Path) -> dict[str, str]:
    """Return the variables of the file `.env` in the folder, or {} without it."""
    file = folder / _ENV
    try:
        return read_variables(file) if file.is_file() else {}
    except OSError:
        return {}
