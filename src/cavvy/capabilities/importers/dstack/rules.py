"""dstack's rules for tasks, services and dev environments that `keys.yaml` cannot express."""

import re
from collections.abc import Mapping

from cavvy.capabilities.importers.dstack.scalars import is_text, range_of, text, to_int, written
from cavvy.capabilities.importers.readers import child, flag_at, items, text_at
from cavvy.capabilities.importers.shapes import ListRule, ScalarRule, ShapeRule, fitting
from cavvy.spec.kept_keys import mark_of
from cavvy.spec.problems import ProblemNotes, shown
from cavvy.spec.tree import MapNode, Node, ScalarNode, to_value

_PYTHONS = ("3.9", "3.10", "3.11", "3.12", "3.13", "3.14", "3.15")


def _is_variable(node: ScalarNode) -> bool:
    return is_text(node) and bool(re.match(r"^[a-zA-Z_][a-zA-Z0-9_]*(=[^\n]*$|$)", str(node.value)))


class _Variables:
    """A rule for a list with entries NAME=VALUE or NAME, in which each name appears once."""

    items = ListRule(fitting("NAME=VALUE or NAME", _is_variable))
    words = items.words

    def fits(self, node: Node) -> bool:
        return self.items.fits(node)

    def check(self, node: Node, path: str, notes: ProblemNotes) -> None:
        before = len(notes)
        self.items.check(node, path, notes)
        seen: set[str] = set()
        for item in items(node) if len(notes) == before else ():
            name = item.text.partition("=")[0] if isinstance(item, ScalarNode) else ""
            if name in seen:
                notes.add(item.mark, f"the variable {name} appears twice", suggestion="delete one")
            seen.add(name)


_WEEKDAYS = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_CRON: tuple[tuple[int, int, list[str]], ...] = (
    (0, 59, []),
    (0, 23, []),
    (1, 31, ["last"]),
    (1, 12, _MONTHS),
    (0, 6, _WEEKDAYS),
)


def _check_cron(value: str) -> str:
    fields = value.split()
    if len(fields) != 5:
        return f"a cron line has five fields, not {len(fields)}"
    for field, (low, high, names) in zip(fields, _CRON, strict=True):
        for part in field.lower().split(","):
            match = re.fullmatch(r"(?:\*|(\w+)(?:-(\w+))?)(?:/([1-9]\d*))?", part)
            ends = [end for end in match.groups()[:2] if end] if match else ["?"]
            values = [
                low + names.index(end) if end in names else int(end[:4]) if end.isdecimal() else -1
                for end in ends
            ]
            if not all(low <= value <= high for value in values) or values != sorted(values):
                return f"cannot use {shown(part)} in a cron line"
    return ""


def _is_python(node: ScalarNode) -> bool:
    # YAML reads an unquoted 3.10 as the number 3.1, so the number 3.1 is accepted. The string "3.1"
    # is not.
    known = str(node.value) in _PYTHONS or (isinstance(node.value, float) and node.value == 3.1)
    return is_text(node) and known


def _make_port(words: str, local: str) -> ScalarRule:
    """Return a rule for PORT or LOCAL:PORT. PORT is a port of the container; LOCAL must match the
    regular expression `local`.
    """

    def fits(node: ScalarNode) -> bool:
        match = re.fullmatch(rf"(?:({local}):)?(\d{{1,5}})", str(node.value))
        return (
            match is not None
            and not isinstance(node.value, bool | float)
            and all(0 < int(each) <= 65_535 for each in match.groups() if each and each != "*")
        )

    return fitting(words, fits)


def _is_mount(value: str) -> bool:
    source, colon, path = value.partition(":")
    fits = bool(colon and ":" not in path and source and _is_path(path))
    return fits and not (source.startswith("/") and not _is_path(source))


def _is_path(path: str) -> bool:
    return path.startswith("/") and ".." not in path.split("/")


def split_pair(value: str) -> list[str]:
    """Split a string at its colons, except at the colon of a drive letter or a git URL."""
    parts = value.split(":")
    drive = len(parts) > 1 and re.fullmatch("[A-Za-z]", parts[0]) and parts[1][:1] in ("\\", "/")
    url = len(parts) > 1 and ("@" in parts[0] or parts[1].startswith("//"))
    return [f"{parts[0]}:{parts[1]}", *parts[2:]] if drive or url else parts


def _is_pair(value: str) -> bool:
    return bool(value) and len(split_pair(value)) <= 2


def _is_user(value: str) -> bool:
    parts = value.split(":")
    return len(parts) < 3 and all(parts) and not value.startswith("-")


SHAPES: Mapping[str, ShapeRule] = {
    "variables": _Variables(),
    "tag": written(
        "a string of at most 256 letters, digits and .:/=_-+@",
        pattern=r"^[a-zA-Z0-9 .:/=_\-+@]{0,256}$",
    ),
    "cron_line": text("a cron line such as 0 8 * * mon-fri", check=_check_cron),
    "instance_name": written(
        "an instance's name", check=lambda value: "" if value else "the name is empty"
    ),
    "python": fitting("a Python version such as 3.12", _is_python),
    "port_text": _make_port("a port such as 8080, 80:8080 or *:8080", r"\d{1,5}|\*"),
    "service_port_text": _make_port("a port such as 8080 or 80:8080", r"\d{1,5}"),
    "path": text(
        "a full path",
        check=lambda path: "" if _is_path(path) else f"{shown(path)} is not an absolute path",
    ),
    "mount_text": written("NAME:/PATH or /PATH:/PATH", fits=_is_mount),
    "repo_text": written("PATH or URL, with :PATH for the target", fits=_is_pair),
    "file_text": written("PATH, with :PATH for the target", fits=_is_pair),
    "user": text("USER or USER:GROUP", fits=_is_user),
}
_EXCLUSIVE = (("image", "python"), ("image", "docker"), ("python", "docker"), ("nvcc", "docker"))


def is_set(table: Node, key: str) -> bool:
    """Return whether a key has a value. The values false, "" and an empty list are treated as no
    value.
    """
    node = child(table, key)
    return node is not None and to_value(node) not in (False, "", [])


def check_exclusive(table: MapNode, notes: ProblemNotes) -> None:
    """Add a problem if the file combines keys that cannot be used together, such as `image` and
    `python`.
    """
    for one, other in _EXCLUSIVE:
        if is_set(table, one) and is_set(table, other):
            text = f"`{one}` and `{other}` cannot be used together"
            notes.add(mark_of(table, other), text, suggestion="keep one of them")


def check_commands(table: MapNode, notes: ProblemNotes) -> None:
    """Add problems for keys that exclude each other, and for files without commands."""
    check_exclusive(table, notes)
    if (
        child(table, "groups") is None
        and not is_set(table, "commands")
        and not is_set(table, "image")
    ):
        notes.add(
            table.mark,
            "the file has nothing to run",
            expected="`commands`, or an `image` that runs something",
        )


def check_groups(table: MapNode, forbidden: tuple[str, ...], notes: ProblemNotes) -> None:
    """Add problems for groups with equal names, for groups without commands, and for `forbidden`
    keys outside the groups.
    """
    groups = child(table, "groups")
    if groups is None:
        return
    if not items(groups):
        notes.add(groups.mark, "`groups` is empty")
    for key in forbidden:
        if is_set(table, key):
            notes.add(
                mark_of(table, key),
                f"`{key}` and `groups` cannot be used together",
                suggestion="write the key into each group",
            )
    seen: set[str] = set()
    for number_, group in enumerate(items(groups)):
        name = text_at(group, "name") or str(number_)
        if name in seen:
            notes.add(group.mark, f"two groups are called {name}", suggestion="rename one")
        seen.add(name)
        if (
            not is_set(group, "commands")
            and not is_set(group, "image")
            and not is_set(table, "image")
        ):
            notes.add(
                group.mark,
                f"the group {name} has nothing to run",
                expected="`commands`, or an `image`",
            )


def _check_repo(table: MapNode, notes: ProblemNotes) -> None:
    if bool(text_at(table, "local_path")) == bool(text_at(table, "url")):
        notes.add(
            table.mark,
            "a repository needs either a `local_path` or a `url`",
            expected="one of them",
        )


def check_without_groups(table: MapNode, notes: ProblemNotes, key: str) -> None:
    """Note that a file with `groups` also has `key`, which a group states instead."""
    if child(table, "groups") is not None and child(table, key) is not None:
        notes.add(
            mark_of(table, key),
            f"`{key}` and `groups` cannot be used together",
            suggestion="keep one of them",
        )


def _check_task(table: MapNode, notes: ProblemNotes) -> None:
    check_commands(table, notes)
    check_without_groups(table, notes, "nodes")
    check_groups(table, ("commands", "ports", "entrypoint"), notes)


def _check_environment(table: MapNode, notes: ProblemNotes) -> None:
    check_exclusive(table, notes)
    version, ide = text_at(table, "version"), text_at(table, "ide")
    if version and not ide:
        notes.add(mark_of(table, "version"), "`version` needs `ide`")
    elif version and ide == "windsurf" and re.match(r"^.+@[a-f0-9]+$", version) is None:
        notes.add(
            mark_of(table, "version"), "this is not a windsurf version", expected="VERSION@COMMIT"
        )
    if child(table, "entrypoint") is not None:
        notes.add(
            mark_of(table, "entrypoint"),
            "a dev-environment cannot have an `entrypoint`",
            suggestion="delete it",
        )
    if flag_at(table, "dstack") and is_set(table, "inactivity_duration"):
        notes.add(
            mark_of(table, "dstack"), "`dstack` and `inactivity_duration` cannot be used together"
        )


def check_replicas(table: MapNode, notes: ProblemNotes) -> None:
    """Add a problem if the number of replicas has no maximum, if the number varies but `scaling` is
    missing, or if the number is fixed but `scaling` is present.
    """
    node = child(table, "replicas") or child(table, "count")
    scaling = child(table, "scaling")
    bounds = range_of(node, to_int) if node is not None else None
    if bounds is None or node is None:
        return
    low, high = bounds
    if high is None or (low is not None and low < 0):
        notes.add(
            node.mark,
            "the number of replicas needs a maximum",
            expected="a number, or a range such as 0..4",
        )
    elif (low or 0) != high and scaling is None:
        notes.add(node.mark, "a variable number of replicas needs `scaling`")
    elif (low or 0) == high and scaling is not None:
        notes.add(
            scaling.mark,
            "`scaling` needs a variable number of replicas",
            expected="such as replicas: 0..4",
        )


RULES = (_check_repo, _check_task, _check_environment)
