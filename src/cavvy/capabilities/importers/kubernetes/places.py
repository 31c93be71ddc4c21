"""Finds the line of a key that is named by its path, such as `spec.template.spec.hostNetwork`."""

from collections.abc import Iterator, Sequence

from cavvy.domain.values import replace
from cavvy.spec.problems import SourceMark
from cavvy.spec.translation import KeptKey
from cavvy.spec.tree import ListNode, MapNode, Node, ScalarNode


def place_keys(kept: Sequence[KeptKey], documents: Sequence[Node]) -> tuple[KeptKey, ...]:
    """Return the keys with their own lines, where they have those of their objects."""
    objects = {(each.mark.line, each.mark.column): each for each in _list_maps(documents)}
    placed = []
    for each in kept:
        root = objects.get((each.line, each.column))
        mark = None if root is None else find_key(root, each.key)
        placed.append(each if mark is None else replace(each, line=mark.line, column=mark.column))
    return tuple(sorted(placed, key=lambda each: (each.line, each.column, each.key)))


def find_key(root: Node, path: str) -> SourceMark | None:
    """Return the position of the deepest key of a path that exists, or None if none does. The path
    may begin below the root. An item of a list counts as named by its `name`.
    """
    words = path.split(".")
    starts = (root, *_list_inner(root))
    found = max((_follow(each, words) for each in starts), key=lambda each: each[0], default=None)
    return None if found is None or not found[0] else found[1]


def _follow(node: Node, words: Sequence[str]) -> tuple[int, SourceMark | None]:
    """Return how many words of a path lead to keys, and the position of the last one."""
    best: tuple[int, SourceMark | None] = (0, None)
    if isinstance(node, ListNode):
        for item in node.items:
            best = max(best, _follow(item, words), key=lambda each: each[0])
            if words and isinstance(item, MapNode) and _name_of(item) == words[0]:
                deeper, mark = _follow(item, words[1:])
                best = max(best, (deeper + 1, mark or item.mark), key=lambda each: each[0])
        return best
    if not isinstance(node, MapNode):
        return best
    for key, value in node.entries:
        for count in range(1, len(words) + 1):  # a key may have dots itself
            if key.text == ".".join(words[:count]):
                deeper, mark = _follow(value, words[count:])
                best = max(best, (count + deeper, mark or key.mark), key=lambda each: each[0])
    return best


def _name_of(node: MapNode) -> str:
    name = node.get("name")
    return name.text if isinstance(name, ScalarNode) else ""


def _list_maps(documents: Sequence[Node]) -> Iterator[MapNode]:
    for each in documents:
        if isinstance(each, MapNode):
            yield each
            kind, items = each.get("kind"), each.get("items")
            if isinstance(kind, ScalarNode) and kind.text == "List" and isinstance(items, ListNode):
                yield from (item for item in items.items if isinstance(item, MapNode))


def _list_inner(node: Node) -> Iterator[Node]:
    values = (
        [value for _, value in node.entries]
        if isinstance(node, MapNode)
        else node.items
        if isinstance(node, ListNode)
        else ()
    )
    for each in values:
        yield each
        yield from _list_inner(each)
