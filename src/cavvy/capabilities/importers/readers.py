"""Helpers for reading a tree that has already been checked. A key without a value is treated as
absent.
"""

from collections.abc import Iterator, Mapping

from cavvy.capabilities.importers.shapes import is_null
from cavvy.spec.kept_keys import mark_of
from cavvy.spec.tree import ListNode, MapNode, Node, ScalarNode


def child(table: Node | None, key: str) -> Node | None:
    """Return the value of a key, or None if the key is absent or has no value."""
    node = table.get(key) if isinstance(table, MapNode) else None
    return None if node is None or is_null(node) else node


def entries(table: Node | None) -> Iterator[tuple[ScalarNode, Node]]:
    """Yield each key with its value. Yields nothing if the node is not a table."""
    if isinstance(table, MapNode):
        yield from ((key, value) for key, value in table.entries if not is_null(value))


def items(node: Node | None) -> tuple[Node, ...]:
    """Return the items of a list, or () if the node is not a list."""
    return node.items if isinstance(node, ListNode) else ()


def text_at(table: Node | None, key: str) -> str | None:
    """Return the value of a key as a string, or None if the key is absent. A number is formatted as
    by Python's `str`.
    """
    node = child(table, key)
    return as_text(node) if isinstance(node, ScalarNode) else None


def as_text(node: ScalarNode) -> str:
    """Return a value as a string, converted with `str()` as in SkyPilot and dstack."""
    return str(node.value)


def int_at(table: Node | None, key: str) -> int | None:
    """Return the value of a key as a whole number, or None if absent."""
    text = text_at(table, key)
    return None if text is None else int(float(text))


def flag_at(table: Node | None, key: str) -> bool:
    """Return whether the value of a key is true."""
    node = child(table, key)
    return isinstance(node, ScalarNode) and node.value is True


def set_variables(root: Node, key: str, variables: Mapping[str, str]) -> Node:
    """Set variables in a document. The document has its variables under `key`, as a table or as a
    list of NAME=VALUE.
    """
    if not variables or not isinstance(root, MapNode):
        return root
    old = root.get(key)
    mark = mark_of(root, key)

    def scalar(text: str) -> ScalarNode:
        return ScalarNode(mark=mark, text=text, value=text, plain=False)

    new: Node
    if isinstance(old, ListNode):
        stays = (
            each
            for each in old.items
            if not isinstance(each, ScalarNode) or each.text.partition("=")[0] not in variables
        )
        added = (scalar(f"{name}={value}") for name, value in variables.items())
        new = ListNode(mark=old.mark, items=(*stays, *added))
    else:
        kept = old.entries if isinstance(old, MapNode) else ()
        new = MapNode(
            mark=mark,
            entries=(
                *(each for each in kept if each[0].text not in variables),
                *((scalar(name), scalar(value)) for name, value in variables.items()),
            ),
        )
    return MapNode(
        mark=root.mark,
        entries=(*(each for each in root.entries if each[0].text != key), (scalar(key), new)),
    )
