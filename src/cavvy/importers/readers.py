"""Short ways to read a checked tree; a key without a value counts as absent."""

from collections.abc import Iterator

from cavvy.importers.shapes import is_null
from cavvy.spec.problems import SourceMark
from cavvy.spec.tree import ListNode, MapNode, Node, ScalarNode


def child(table: Node | None, key: str) -> Node | None:
    """A key's value; None where it is absent or empty."""
    node = table.get(key) if isinstance(table, MapNode) else None
    return None if node is None or is_null(node) else node


def entries(table: Node | None) -> Iterator[tuple[ScalarNode, Node]]:
    """Keys with values; nothing where it is no table."""
    if isinstance(table, MapNode):
        yield from ((key, value) for key, value in table.entries if not is_null(value))


def items(node: Node | None) -> tuple[Node, ...]:
    """A list's items; nothing where it is no list."""
    return node.items if isinstance(node, ListNode) else ()


def text_at(table: Node | None, key: str) -> str | None:
    """A key's text, a number's as Python writes it."""
    node = child(table, key)
    return as_text(node) if isinstance(node, ScalarNode) else None


def as_text(node: ScalarNode) -> str:
    """A value as a text, as the other tools make it: `str()` of what YAML read."""
    return str(node.value)


def int_at(table: Node | None, key: str) -> int | None:
    """A key's whole number."""
    text = text_at(table, key)
    return None if text is None else int(float(text))


def flag_at(table: Node | None, key: str) -> bool:
    """Whether a key says true."""
    node = child(table, key)
    return isinstance(node, ScalarNode) and node.value is True


def mark_of(table: Node | None, key: str) -> SourceMark:
    """Where a key stands; the table's own place where it is absent."""
    if isinstance(table, MapNode):
        return next((name.mark for name, _ in table.entries if name.text == key), table.mark)
    return SourceMark(line=1, column=1)
