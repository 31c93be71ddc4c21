"""The values of a Compose file, with its variables filled in, by
https://docs.docker.com/reference/compose-file/interpolation and
https://docs.docker.com/compose/how-tos/environment-variables/variable-interpolation.
"""

import re
from collections.abc import Container, Iterator, Mapping
from pathlib import Path

from cavvy.named_files import read_named
from cavvy.spec.kept_keys import TranslationNotes
from cavvy.spec.problems import ProblemNotes, SourceMark
from cavvy.spec.tree import ListNode, MapNode, Node, ScalarNode

_REFERENCE = re.compile(
    r"\$(?:(?P<dollar>\$)|(?P<plain>[A-Za-z_]\w*)"
    r"|\{(?P<name>[A-Za-z_]\w*)(?:(?P<how>:?[-+?])(?P<other>[^{}]*))?\})"
)
_VARIABLE = re.compile(r"\s*(?:export\s+)?([A-Za-z_][\w.-]*)\s*(?:[=:]\s*(.*))?")
_MOST_BYTES = 1 << 20


class ComposeReader:
    """Reads nodes of the file. `variables` are those of `.env`, and those that the command line
    has named. Others of this machine (`machine`) do not leave it, since a file that was cloned may
    name any token. `root` is the whole file.
    """

    def __init__(
        self,
        folder: Path,
        variables: Mapping[str, str],
        machine: Container[str],
        notes: ProblemNotes,
        kept: TranslationNotes,
        root: Node | None = None,
    ) -> None:
        self.folder, self.notes, self.kept, self.root = folder, notes, kept, root
        self._variables, self._machine = variables, machine

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

    def find(self, name: str, mark: SourceMark) -> str | None:
        """Return the value of a variable, or None. One that only this machine has is refused."""
        if name not in self._variables and name in self._machine:
            reason = f"variables of this machine are not sent; --env {name} sends this one"
            self.kept.refuse(mark, name, f"{reason}, or write it in {_ENV} beside the file")
        return self._variables.get(name)

    def read_env_file(self, path: str, mark: SourceMark, *, required: bool) -> dict[str, str]:
        """Return the variables of a file beside the Compose file."""
        file = find_inside(self.folder, path)
        if file is None:
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
            how, other = found["how"] or "", found["other"] or ""
            if how.endswith(("-", "+")):
                value = self._variables.get(name)
                if value is None and name in self._machine:
                    reason = f"its value on this machine is not used; --env {name} sends it"
                    self.kept.note(mark, name, reason)
            else:
                value = self.find(name, mark)
            there = value if how.startswith(":") else value is not None
            if how.endswith("+"):
                return other if there else ""
            if there or (value is not None and not how):
                return value or ""
            if how.endswith("?") and name not in self._machine:
                self.notes.add(mark, f"the variable {name} is not set: {other}")
            elif not how and name not in self._machine:
                reason = f"the variable is not set, so it is empty; set it, or write it in {_ENV}"
                self.kept.note(mark, name, reason)
            return other if how.endswith("-") else ""

        return _REFERENCE.sub(find, text)


_ENV = ".env"


def read_variables(file: Path) -> dict[str, str]:
    """Return the variables of a file with lines NAME=VALUE. Raises OSError."""
    found: dict[str, str] = {}
    text = read_named(file, _MOST_BYTES).decode(errors="replace")
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


def read_dot_env(folder: Path, notes: ProblemNotes) -> dict[str, str]:
    """Return the variables of the file `.env` in the folder, or {} without it."""
    file = find_inside(folder, _ENV)
    if file is None:
        message = f"{_ENV} is a link out of the folder of this file, which is not read"
        notes.add(SourceMark(line=1, column=1), message, suggestion="copy it into the folder")
        return {}
    try:
        return read_variables(file) if file.is_file() else {}
    except OSError:
        return {}


def find_inside(folder: Path, path: str) -> Path | None:
    """Return where a path in the folder leads, or None if this is outside of the folder."""
    file = (folder / path).resolve()
    return file if file.is_relative_to(folder.resolve()) else None
