"""Finds the line of a key that is named by its path, such as `spec.template.spec.hostNetwork`."""

from collections.abc import Iterator, Sequence

from cavvy.domain.values import replace
from cavvy.spec.problems import SourceMark
from cavvy.spec.translation import KeptKey
from cavvy.spec.tree import ListNode, MapNode, Node, ScalarNode

_MOST_SEARCHED = 100  # keys whose paths do not begin at the root, for which every table is searched


def place_keys(kept: Sequence[KeptKey], documents: Sequence[Node]) -> tuple[KeptKey, ...]:
    """Return the keys with their own lines, where they have those of their objects."""
    finders = {
        (each.mark.line, each.mark.column): _KeyFinder(each) for each in _list_maps(documents)
    }
    placed = []
    for each in kept:
        finder = finders.get((each.line, each.column))
        mark = None if finder is None else finder.find(each.key)
        placed.append(each if mark is None else replace(each, line=mark.line, column=mark.column))
    return tuple(sorted(placed, key=lambda each: (each.line, each.column, each.key)))


def find_marks(start: SourceMark, documents: Sequence[Node]) -> dict[str, SourceMark]:
    """Return where the object at `start` has the keys that a task has under the same name."""
    root = next((each for each in _list_maps(documents) if each.mark == start), None)
    mark = None if root is None else _KeyFinder(root).find("containers.image")
    return {} if mark is None else {"image": mark}


class _KeyFinder:
    """Finds keys in an object."""

    def __init__(self, root: MapNode) -> None:
        self._root = root
        self._inner: Sequence[Node] | None = None
        self._left = _MOST_SEARCHED
        # the keys of each table, and the items of each list that have a name
        self._tables: dict[int, dict[str, tuple[SourceMark, Node]]] = {}

    def find(self, path: str) -> SourceMark | None:
        """Return the position of the deepest key of a path that exists, or None if none does. The
        path may begin below the root. An item of a list counts as named by its `name`.
        """
        words = path.split(".")
        count, mark = self._follow(self._root, words)
        if count < len(words) and self._left:
            self._left -= 1
            if self._inner is None:
                self._inner = list(_list_inner(self._root))
            for each in self._inner:
                further, there = self._follow(each, words)
                if further > count:
                    count, mark = further, there
        return mark

    def _follow(self, node: Node, words: Sequence[str]) -> tuple[int, SourceMark | None]:
        """Return how many words of a path lead to keys, and the position of the last one."""
        best: tuple[int, SourceMark | None] = (0, None)
        table = self._index(node) if words else {}
        for count in range(1, len(words) + 1):  # a key may have dots itself
            if (found := table.get(".".join(words[:count]))) is not None:
                mark, value = found
                deeper, below = self._follow(value, words[count:])
                if count + deeper > best[0]:
                    best = (count + deeper, below or mark)
        if isinstance(node, ListNode) and not best[0]:
            for item in node.items:
                further, mark_below = self._follow(item, words)
                if further > best[0]:
                    best = (further, mark_below)
                if best[0] == len(words):
                    break
        return best

    def _index(self, node: Node) -> dict[str, tuple[SourceMark, Node]]:
        found = self._tables.get(id(node))
        if found is None:
            found = {}
            if isinstance(node, MapNode):
                found = {key.text: (key.mark, value) for key, value in node.entries}
            elif isinstance(node, ListNode):
                for item in node.items:
                    name = item.get("name") if isinstance(item, MapNode) else None
                    if isinstance(name, ScalarNode):
                        found.setdefault(name.text, (item.mark, item))
            self._tables[id(node)] = found
        return found


def _list_maps(documents: Sequence[Node]) -> Iterator[MapNode]:
    for each in documents:
        if isinstance(each, MapNode):
            yield each
            kind, items = each.get("kind"), each.get("items")
            if isinstance(kind, ScalarNode) and kind.text == "List" and isinstance(items, ListNode):
                yield from (item for item in items.items if isinstance(item, MapNode))


def _list_inner(node: Node) -> Iterator[Node]:
    values: Sequence[Node] = ()
    if isinstance(node, MapNode):
        values = [value for _, value in node.entries]
    elif isinstance(node, ListNode):
        values = node.items
    for each in values:
        yield each
        yield from _list_inner(each)
