"""Joins a Compose file with the one beside it that changes it, or that it changes, by
https://docs.docker.com/reference/compose-file/merge.
"""

from collections.abc import Sequence
from pathlib import Path

from cavvy.capabilities.importers.compose.values import find_inside
from cavvy.domain.values import Struct, replace
from cavvy.named_files import read_named
from cavvy.spec.problems import ProblemNotes, SourceMark, SpecProblem
from cavvy.spec.translation import KeptKey
from cavvy.spec.tree import MAX_CHARACTERS, ListNode, MapNode, Node, ScalarNode, compose_all

# the files that `docker compose up` reads: the first of these, and the first that changes it
_BASES = ("compose.yaml", "compose.yml", "docker-compose.yml", "docker-compose.yaml")
_OVERRIDES = (
    *("compose.override.yml", "compose.override.yaml"),
    *("docker-compose.override.yml", "docker-compose.override.yaml"),
)
_REPLACED = ("command", "entrypoint", "test")
_BY_NAME = ("environment", "labels", "annotations", "args", "depends_on", "networks", "sysctls")
_BY_TARGET = ("volumes", "devices", "secrets", "configs")


class JoinedFiles(Struct, frozen=True, kw_only=True):
    """Two Compose files as one. `notes` has the lines of both, those of `other` after `lines` lines
    of the named file. `said` tells the user.
    """

    root: Node
    notes: ProblemNotes
    other: str
    lines: int
    said: str

    def place(self, problems: Sequence[SpecProblem]) -> list[SpecProblem]:
        """Return the problems, each in its own file."""
        return [
            replace(each, file=self.other, line=each.line - self.lines)
            if each.line > self.lines
            else each
            for each in problems
        ]

    def place_keys(self, keys: Sequence[KeptKey]) -> list[KeptKey]:
        """Return the keys that were left out, with their lines in their own files."""
        return [
            replace(each, line=each.line - self.lines, reason=f"{each.reason} (in {self.other})")
            if each.line > self.lines
            else each
            for each in keys
        ]


def join_files(root: Node, notes: ProblemNotes) -> JoinedFiles | None:
    """Return a Compose file with the file beside it that `docker compose` reads, too; or, if it
    only changes services of such a file, with that one. Returns None if it stands alone. Raises
    SpecError for a second file that is no YAML.
    """
    named = Path(notes.file)
    folder = named.resolve().parent
    names = _OVERRIDES if named.name in _BASES else _BASES if _only_changes(root) else ()
    name = next((each for each in names if (folder / each).is_file()), None)
    file = find_inside(folder, name) if name else None
    if name is None or file is None or file == named.resolve():
        return None
    other = read_named(file, MAX_CHARACTERS).decode(errors="replace")
    apart = ProblemNotes(name, other, notes.now)
    documents = compose_all(other, apart)
    apart.check()
    count = len(notes.lines)
    if not documents:
        return None
    second = _shift(documents[0], count)
    base, change = (second, root) if names is _BASES else (root, second)
    said = (
        f"{named.name} changes {name}, so both were read, as by `docker compose -f {name} -f "
        f"{named.name}`"
    )
    if names is _OVERRIDES:
        said = f"{name} changes it, so both were read, as by `docker compose up`"
    return JoinedFiles(
        root=_merge(base, change, ""),
        notes=ProblemNotes(notes.file, "\n".join((*notes.lines, *apart.lines)), notes.now),
        other=name,
        lines=count,
        said=said,
    )


def _only_changes(root: Node) -> bool:
    """Return whether a service of the file has no image and says not what to build one of."""
    services = root.get("services") if isinstance(root, MapNode) else None
    tables = [value for _, value in services.entries] if isinstance(services, MapNode) else []
    return any(isinstance(each, MapNode) and not _can_start(each) for each in tables)


def _can_start(service: MapNode) -> bool:
    build = service.get("build")
    if isinstance(build, MapNode):
        return any(build.get(key) is not None for key in ("context", "dockerfile"))
    return build is not None or service.get("image") is not None


def _shift(node: Node, by: int) -> Node:
    """Return a node whose marks are `by` lines further down."""
    mark = SourceMark(line=node.mark.line + by, column=node.mark.column, width=node.mark.width)
    match node:
        case MapNode():
            entries = tuple(
                (replace(key, mark=_shift(key, by).mark), _shift(value, by))
                for key, value in node.entries
            )
            return MapNode(mark=mark, entries=entries)
        case ListNode():
            return ListNode(mark=mark, items=tuple(_shift(each, by) for each in node.items))
        case _:
            return replace(node, mark=mark)


def _merge(base: Node, change: Node, key: str) -> Node:
    """Return what a file and the one that changes it say of a key together."""
    if isinstance(change, ScalarNode) and change.value is None:
        return base
    if key in _REPLACED:
        return change
    if key in _BY_NAME and type(base) is not type(change):
        base, change = _name_items(base, key), _name_items(change, key)
    if key == "build" and isinstance(base, ScalarNode) and isinstance(change, MapNode):
        name = ScalarNode(mark=base.mark, text="context", value="context")
        base = MapNode(mark=base.mark, entries=((name, base),))
    if isinstance(base, MapNode) and isinstance(change, MapNode):
        changed = {name.text: value for name, value in change.entries}
        entries = [
            (name, _merge(value, changed[name.text], name.text) if name.text in changed else value)
            for name, value in base.entries
        ]
        own = {name.text for name, _ in base.entries}
        entries += [(name, value) for name, value in change.entries if name.text not in own]
        return MapNode(mark=base.mark, entries=tuple(entries))
    if isinstance(base, ListNode) and isinstance(change, ListNode):
        found: dict[str, Node] = {}
        for number, each in enumerate((*base.items, *change.items)):
            found[_find_name(each, key) or str(number)] = each
        return ListNode(mark=base.mark, items=tuple(found.values()))
    return change


def _find_name(item: Node, key: str) -> str:
    """Return by what an item of a list is known in both files, or "" if each counts."""
    if isinstance(item, MapNode):
        target = item.get("target") if key in _BY_TARGET else None
        return target.text if isinstance(target, ScalarNode) else ""
    if not isinstance(item, ScalarNode):
        return ""
    if key in _BY_NAME:
        return item.text.partition("=")[0]
    if key in ("volumes", "devices"):
        parts = item.text.split(":")
        return parts[1] if len(parts) > 1 else parts[0]
    return item.text


def _name_items(node: Node, key: str) -> Node:
    """Return a list of names, or of NAME=VALUE, as a table."""
    if not isinstance(node, ListNode):
        return node
    entries = list[tuple[ScalarNode, Node]]()
    for each in node.items:
        if isinstance(each, ScalarNode):
            name, given, value = each.text.partition("=")
            text = ScalarNode(mark=each.mark, text=value, value=value if given else None)
            table = MapNode(mark=each.mark, entries=())
            entries.append((replace(each, text=name), table if key == "depends_on" else text))
    return MapNode(mark=node.mark, entries=tuple(entries))
