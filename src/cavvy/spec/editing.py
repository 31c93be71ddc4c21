"""Changes a key of a task file and leaves the rest of its text, with its comments, as it is."""

from collections.abc import Sequence
from typing import NamedTuple

import yaml

_INDENT = "  "
_BEFORE = ("workdir", "setup", "run")  # keys before which a new mapping is put, if it has one


class NotEditable(Exception):
    """Raised if a text is no mapping in which a key could be set without a change of others."""


class _Entry(NamedTuple):
    key: yaml.Node
    value: yaml.Node


def read_key(text: str, path: Sequence[str]) -> str:
    """Return the text of a key's value, such as that of ("resources", "gpu"), or "". Raises
    NotEditable."""
    node: yaml.Node | None = _compose(text)
    for name in path:
        entry = _find(node, name) if isinstance(node, yaml.MappingNode) else None
        node = None if entry is None else entry.value
    if node is None:
        return ""
    if isinstance(node, yaml.ScalarNode):
        return str(node.value)
    return text[node.start_mark.index : node.end_mark.index].strip()


def set_key(text: str, path: Sequence[str], value: str) -> str:
    """Return the text in which a key in a table, such as ("resources", "gpu"), has a value, which
    is YAML in one line; "" removes the key. Raises NotEditable."""
    table, name = path
    root = _compose(text)
    entry = _find(root, table)
    if entry is None or _is_empty(entry.value):
        if not value:
            return text
        return _add_table(text, root, entry, f"{table}:\n{_INDENT}{name}: {value}\n")
    if not isinstance(entry.value, yaml.MappingNode):
        raise NotEditable(f"`{table}` is no table")
    known = _find(entry.value, name)
    if known is None:
        return _insert(text, entry.value, name, value) if value else text
    if value:
        if isinstance(known.value, yaml.ScalarNode) and known.value.style in ("|", ">"):
            raise NotEditable(f"`{table}.{name}` has several lines")
        begin, end = known.value.start_mark.index, _end_of(known.value)
        return text[:begin] + (" " if begin == end else "") + value + text[end:]
    return _remove(text, entry, known)


def _compose(text: str) -> yaml.MappingNode:
    try:
        found = [*yaml.compose_all(text, Loader=yaml.SafeLoader)]
    except (yaml.YAMLError, RecursionError) as error:
        raise NotEditable("the file is no YAML") from error
    if len(found) != 1 or not isinstance(found[0], yaml.MappingNode) or found[0].flow_style:
        raise NotEditable("the file is not one table of keys")
    _refuse_shared(text)
    return found[0]


def _refuse_shared(text: str) -> None:
    """Refuse anchors and aliases: what stands at one place is then the value of several keys."""
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.NodeEvent) and event.anchor is not None:
            where = "" if event.start_mark is None else f" in line {event.start_mark.line + 1}"
            raise NotEditable(f"the file has an anchor or an alias, {event.anchor},{where}")


def _find(table: yaml.MappingNode, name: str) -> _Entry | None:
    for key, value in table.value:
        if isinstance(key, yaml.ScalarNode) and key.value == name:
            return _Entry(key, value)
    return None


def _is_empty(value: yaml.Node) -> bool:
    return value.tag == "tag:yaml.org,2002:null"


def _add_table(text: str, root: yaml.MappingNode, empty: _Entry | None, added: str) -> str:
    if empty is not None:
        begin = _line_begin(text, empty.key.start_mark.index)
        end = _line_end(text, empty.key.start_mark.index)
        return text[:begin] + added + text[end:]
    found = [entry for name in _BEFORE if (entry := _find(root, name))]
    if not found:
        return text + ("" if text.endswith("\n") else "\n") + added
    at = min(_line_begin(text, each.key.start_mark.index) for each in found)
    return text[:at] + added + text[at:]


def _insert(text: str, table: yaml.MappingNode, name: str, value: str) -> str:
    begin = table.start_mark.index
    if table.flow_style:
        more = ", " if table.value else ""
        return f"{text[: begin + 1]}{name}: {value}{more}{text[begin + 1 :]}"
    first = table.value[0][0].start_mark
    indent = " " * first.column
    return f"{text[: first.index]}{name}: {value}\n{indent}{text[first.index :]}"


def _remove(text: str, owner: _Entry, known: _Entry) -> str:
    table = owner.value
    assert isinstance(table, yaml.MappingNode)
    if len(table.value) == 1:
        return _cut_lines(text, owner)
    if not table.flow_style:
        return _cut_lines(text, known)
    begin, end = known.key.start_mark.index, known.value.end_mark.index
    rest = text[end:]
    if rest.lstrip().startswith(","):
        return text[:begin] + rest.lstrip()[1:].lstrip(" ")
    return text[:begin].rstrip().rstrip(",") + rest


def _cut_lines(text: str, entry: _Entry) -> str:
    begin, end = entry.key.start_mark.index, _end_of(entry.value)
    return text[: _line_begin(text, begin)] + text[_line_end(text, max(begin, end - 1)) :]


def _end_of(node: yaml.Node) -> int:
    """Return where a value ends; comments behind a block belong to what follows."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end_of(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


def _line_begin(text: str, at: int) -> int:
    return text.rfind("\n", 0, at) + 1


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end + 1
