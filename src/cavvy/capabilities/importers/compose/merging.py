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
from cavvy.spec.tree import (
    MAX_CHARACTERS,
    ListNode,
    MapNode,
    Node,
    ScalarNode,
    check_single,
    compose_all,
)

# the files that `docker compose up` reads: the first of these, and the first that changes it
_BASES = ("compose.yaml", "compose.yml", "docker-compose.yml", "docker-compose.yaml")
_OVERRIDES = (
    *("compose.override.yml", "compose.override.yaml"),
    *("docker-compose.override.yml", "docker-compose.override.yaml"),
)
# the keys of a service that have rules of their own
_REPLACED = ("command", "entrypoint", "healthcheck.test")
_BY_NAME = (
    *("environment", "labels", "annotations", "depends_on", "networks", "sysctls"),
    *("build.args", "build.labels", "build.additional_contexts", "deploy.labels"),
)
_BY_TARGET = ("volumes", "devices", "secrets", "configs")
_HOSTS = ("extra_hosts", "build.extra_hosts")
_ONE_OR_MORE = ("env_file", "label_file", "dns", "dns_opt", "dns_search", "tmpfs")


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
    only = check_single(documents, apart) if documents else None
    apart.check()
    count = len(notes.lines)
    if only is None:
        return None
    second = _shift(only, count)
    base, change = (second, root) if names is _BASES else (root, second)
    said = (
        f"{named.name} changes {name}, so both were read, as by `docker compose -f {name} -f "
        f"{named.name}`"
    )
    if names is _OVERRIDES:
        said = f"{name} changes it, so both were read, as by `docker compose up`"
    return JoinedFiles(
        root=_merge(base, change, ()),
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


def _merge(base: Node, change: Node, path: tuple[str, ...]) -> Node:
    """Return what a file and the one that changes it say together of what is at a path."""
    if isinstance(change, ScalarNode) and change.value is None:
        return base
    key = ".".join(path[2:]) if path[:1] == ("services",) else ""
    if key in _REPLACED:
        return change
    base, change = _expand(base, key), _expand(change, key)
    if key in _BY_NAME and type(base) is not type(change):
        base, change = _name_items(base, key), _name_items(change, key)
    if isinstance(base, MapNode) and isinstance(change, MapNode):
        changed = {name.text: value for name, value in change.entries}
        entries = [
            (
                name,
                _merge(value, changed[name.text], (*path, name.text))
                if name.text in changed
                else value,
            )
            for name, value in base.entries
        ]
        own = {name.text for name, _ in base.entries}
        entries += [(name, value) for name, value in change.entries if name.text not in own]
        return MapNode(mark=base.mark, entries=tuple(entries))
    if isinstance(base, ListNode) and isinstance(change, ListNode):
        found: dict[str | int, Node] = {}
        for number, each in enumerate((*base.items, *change.items)):
            found[_find_name(each, key) or number] = each
        return ListNode(mark=base.mark, items=tuple(found.values()))
    return change


def _expand(node: Node, key: str) -> Node:
    """Return a value of a service in the longer of the forms that its key has, in which Docker
    joins two of them.
    """
    if isinstance(node, ScalarNode) and node.value is not None:
        if key == "build":
            name = ScalarNode(mark=node.mark, text="context", value="context")
            return MapNode(mark=node.mark, entries=((name, node),))
        if key in _ONE_OR_MORE:
            return ListNode(mark=node.mark, items=(node,))
    if key in _HOSTS and isinstance(node, MapNode):
        hosts = list[Node]()
        for name, value in node.entries:
            for each in value.items if isinstance(value, ListNode) else (value,):
                text = f"{name.text}={each.text}" if isinstance(each, ScalarNode) else name.text
                hosts.append(ScalarNode(mark=name.mark, text=text, value=text))
        return ListNode(mark=node.mark, items=tuple(hosts))
    return node


def _find_name(item: Node, key: str) -> str:
    """Return by what an item of a list is known in both files, or "" if each counts."""
    if isinstance(item, MapNode):
        names = {"env_file": ("path",), **dict.fromkeys(_BY_TARGET, ("target", "source"))}
        values = (item.get(each) for each in names.get(key, ()))
        found = next((each.text for each in values if isinstance(each, ScalarNode)), "")
    elif not isinstance(item, ScalarNode):
        return ""
    elif key in _BY_NAME:
        return item.text.partition("=")[0]
    elif key in ("volumes", "devices"):
        parts = _split(item.text)
        found = parts[1] if len(parts) > 1 else parts[0]
    else:
        return item.text
    return found.rstrip("/") if key == "volumes" and found != "/" else found


def _split(text: str) -> list[str]:
    """Split a text at its colons, but for those in references such as ${DATA:-data}."""
    parts, depth = [""], 0
    for each in text:
        depth += (each == "{") - (each == "}")
        if each == ":" and depth == 0:
            parts.append("")
        else:
            parts[-1] += each
    return parts


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
