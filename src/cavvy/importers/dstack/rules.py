"""dstack's rules for what runs: tasks, services and development environments."""

import re
from collections.abc import Callable, Mapping

from cavvy.importers.dstack.needs import NEEDS, SPOT, range_of, to_int
from cavvy.importers.dstack.scalars import (
    FLAG,
    REFERENCE,
    TEXT,
    choice,
    duration,
    is_text,
    number,
    switched,
    text,
    whole,
)
from cavvy.importers.readers import child, flag_at, items, mark_of, text_at
from cavvy.importers.shapes import (
    ListRule,
    OneOfRule,
    Rule,
    ScalarRule,
    ShapeRule,
    TableRule,
    optional,
)
from cavvy.importers.yaml11 import UnquotedDate, to_value
from cavvy.spec.problems import ProblemNotes, shown
from cavvy.spec.tree import ListNode, MapNode, Node, ScalarNode, describe

_BACKENDS = (
    "amddevcloud aws azure cloudrift crusoe cudo datacrunch daytona digitalocean dstack gcp "
    "hotaisle jarvislabs "
    "kubernetes lambda lium remote nebius oci runpod seeweb tensordock vastai verda vultr slurm"
)
BACKENDS = _BACKENDS.split()
_PYTHONS = ("3.9", "3.10", "3.11", "3.12", "3.13", "3.14", "3.15")
GROUP_NAME = text("a name of a-z, 0-9 and -", pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")
COMMANDS = ListRule(item=TEXT)
TEXTS = ListRule(item=TEXT)


def written(words: str, check: Callable[[str], str]) -> ScalarRule:
    """A text that YAML takes for one too. `check` says what is wrong with it, or ""."""

    def test(node: ScalarNode) -> str:
        if not isinstance(node.value, str) or isinstance(node.value, UnquotedDate):
            return f"{describe(node)} is not a text"
        return check(node.value)

    return ScalarRule(words=words, test=test)


def _check_tag(value: str) -> str:
    return (
        "" if re.match(r"^[a-zA-Z0-9 .:/=_\-+@]{0,256}$", value) else f"cannot use {shown(value)}"
    )


TAGS = TableRule(
    other=written("a text of at most 256 letters, digits and .:/=_-+@", _check_tag),
    key=r"[_\-a-zA-Z0-9]{1,60}",
)
BACKEND_OPTIONS = ListRule(
    item=TableRule(
        fields={
            "type": choice(("vastai",)),
            "offer_order": optional(choice(("score", "price"))),
            "min_reliability": optional(number(0, 1)),
            "min_score": optional(whole(0)),
        }
    ),
    most=1,
)


def _check_variable(node: ScalarNode) -> str:
    fits = is_text(node) and re.match(r"^[a-zA-Z_][a-zA-Z0-9_]*(=[^\n]*$|$)", str(node.value))
    return "" if fits else f"cannot use {shown(node.text)}"


def _check_env_list(node: ListNode, notes: ProblemNotes) -> None:
    seen: set[str] = set()
    for item in node.items:
        name = item.text.partition("=")[0] if isinstance(item, ScalarNode) else ""
        if name in seen:
            notes.add(item.mark, f"the variable {name} is there twice", suggestion="delete one")
        seen.add(name)


class _Variables:
    """A list of NAME=VALUE, whose names are unique."""

    items = ListRule(item=ScalarRule(words="NAME=VALUE or NAME", test=_check_variable))
    words = items.words

    def fits(self, node: Node) -> bool:
        return self.items.fits(node)

    def check(self, node: Node, path: str, notes: ProblemNotes) -> None:
        before = len(notes)
        self.items.check(node, path, notes)
        if len(notes) == before and isinstance(node, ListNode):
            _check_env_list(node, notes)


ENV = OneOfRule(
    shapes=(
        _Variables(),
        TableRule(
            other=OneOfRule(shapes=(TEXT, TableRule(fields={"key": TEXT}, required=("key",))))
        ),
    )
)

# placement and price

_RETRY = TableRule(
    fields={
        "on_events": optional(
            ListRule(item=choice(("no-capacity", "interruption", "error")), least=1)
        ),
        "duration": optional(duration()),
    }
)
RETRY = OneOfRule(shapes=(FLAG, _RETRY))
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


_CRON_LINE = text("a cron line such as 0 8 * * mon-fri", check=_check_cron)
_SELECTOR = OneOfRule(
    shapes=(
        written("an instance's name", lambda value: "" if value else "it is empty"),
        TableRule(fields={"name": text(pattern=".")}, required=("name",)),
        TableRule(fields={"hostname": text(pattern=".")}, required=("hostname",)),
        TableRule(
            fields={"fleet": REFERENCE, "instance": whole(0)}, required=("fleet", "instance")
        ),
    )
)
PLACEMENT: dict[str, ShapeRule] = {
    "backends": optional(ListRule(item=choice(BACKENDS))),
    "regions": optional(TEXTS),
    "availability_zones": optional(TEXTS),
    "instance_types": optional(TEXTS),
    "reservation": optional(TEXT),
    "spot_policy": optional(SPOT),
    "retry": optional(RETRY),
    "max_price": optional(number(0, above=True)),
    "idle_duration": optional(switched(None)),
    "tags": optional(TAGS),
    "backend_options": optional(BACKEND_OPTIONS),
}
PROFILE: dict[str, ShapeRule] = {
    **PLACEMENT,
    "max_duration": optional(switched()),
    "stop_duration": optional(switched()),
    "creation_policy": optional(choice(("reuse", "reuse-or-create"))),
    "utilization_policy": optional(
        TableRule(
            fields={"min_gpu_utilization": whole(0, 100), "time_window": duration(300)},
            required=("min_gpu_utilization", "time_window"),
        )
    ),
    "startup_order": optional(choice(("any", "master-first", "workers-first"))),
    "stop_criteria": optional(choice(("all-done", "master-done"))),
    "schedule": optional(
        TableRule(
            fields={"cron": OneOfRule(shapes=(_CRON_LINE, ListRule(item=_CRON_LINE, least=1)))},
            required=("cron",),
        )
    ),
    "fleets": optional(ListRule(item=REFERENCE)),
    "instances": optional(ListRule(item=_SELECTOR, least=1)),
}

# the container


def _check_python(node: ScalarNode) -> str:
    # The number 3.10 is 3.1; the text "3.1" is no version.
    known = str(node.value) in _PYTHONS or (isinstance(node.value, float) and node.value == 3.1)
    return "" if is_text(node) and known else f"cannot use {shown(node.text)}"


_PYTHON = ScalarRule(words="a version of Python such as 3.12", test=_check_python)


def _make_port(words: str, local: str) -> OneOfRule:
    """A port of the container, perhaps after one that matches `local`; or a table of the two."""

    def test(node: ScalarNode) -> str:
        match = re.fullmatch(rf"(?:({local}):)?(\d{{1,5}})", str(node.value))
        fits = match is not None and all(
            0 < int(each) <= 65_535 for each in match.groups() if each and each != "*"
        )
        return (
            ""
            if fits and not isinstance(node.value, bool | float)
            else f"cannot use {shown(node.text)}"
        )

    ports: dict[str, ShapeRule] = {
        "local_port": optional(whole(1, 65_535)),
        "container_port": whole(1, 65_535),
    }
    return OneOfRule(
        shapes=(
            ScalarRule(words=words, test=test),
            TableRule(fields=ports, required=("container_port",)),
        )
    )


PORT = _make_port("a port such as 8080, 80:8080 or *:8080", r"\d{1,5}|\*")
SERVICE_PORT = _make_port("a port such as 8080 or 80:8080", r"\d{1,5}")


def _check_mount(value: str) -> str:
    source, colon, path = value.partition(":")
    fits = colon and ":" not in path and source and not _check_path(path)
    fits = fits and not (source.startswith("/") and _check_path(source))
    return "" if fits else f"cannot use {shown(value)}"


def _check_path(path: str) -> str:
    return (
        ""
        if path.startswith("/") and ".." not in path.split("/")
        else f"{shown(path)} is not a full path"
    )


_PATH = text("a full path", check=_check_path)
_MOUNT = OneOfRule(
    shapes=(
        written("NAME:/PATH or /PATH:/PATH", _check_mount),
        TableRule(
            fields={"name": OneOfRule(shapes=(TEXT, TEXTS)), "path": _PATH},
            required=("name", "path"),
        ),
        TableRule(
            fields={"instance_path": _PATH, "path": _PATH, "optional": FLAG},
            required=("instance_path", "path"),
        ),
    )
)


def split_pair(value: str) -> list[str]:
    """Parts at the colons, those of a drive letter and of a git URL left alone."""
    parts = value.split(":")
    drive = len(parts) > 1 and re.fullmatch("[A-Za-z]", parts[0]) and parts[1][:1] in ("\\", "/")
    url = len(parts) > 1 and ("@" in parts[0] or parts[1].startswith("//"))
    return [f"{parts[0]}:{parts[1]}", *parts[2:]] if drive or url else parts


def _check_pair(value: str) -> str:
    return "" if value and len(split_pair(value)) <= 2 else f"cannot use {shown(value)}"


def _check_repo(table: MapNode, notes: ProblemNotes) -> None:
    if bool(text_at(table, "local_path")) == bool(text_at(table, "url")):
        notes.add(
            table.mark, "a repository is at a `local_path` or at a `url`", expected="one of them"
        )


_REPO = OneOfRule(
    shapes=(
        written("PATH or URL, with :PATH where it shall be", _check_pair),
        TableRule(
            fields={
                "local_path": optional(TEXT),
                "url": optional(TEXT),
                "branch": optional(TEXT),
                "hash": optional(TEXT),
                "path": TEXT,
                "if_exists": choice(("error", "skip")),
            },
            rule=_check_repo,
        ),
    )
)
_FILE = OneOfRule(
    shapes=(
        written("PATH, with :PATH where it shall be", _check_pair),
        TableRule(fields={"local_path": TEXT, "path": TEXT}, required=("local_path", "path")),
    )
)


def _check_user(value: str) -> str:
    parts = value.split(":")
    return (
        ""
        if len(parts) < 3 and all(parts) and not value.startswith("-")
        else f"cannot use {shown(value)}"
    )


CONTAINER: dict[str, ShapeRule] = {
    "name": optional(TEXT),
    "image": optional(TEXT),
    "user": optional(text("USER or USER:GROUP", check=_check_user)),
    "privileged": FLAG,
    "entrypoint": optional(TEXT),
    "working_dir": optional(TEXT),
    "home_dir": TEXT,
    "registry_auth": optional(
        TableRule(fields={"username": TEXT, "password": TEXT}, required=("username", "password")),
    ),
    "python": optional(_PYTHON),
    "nvcc": optional(FLAG),
    "single_branch": optional(FLAG),
    "env": ENV,
    "shell": optional(text("sh, bash or a full path", pattern=r"^(sh|bash|/.*)$")),
    "resources": NEEDS,
    "priority": optional(whole(0, 100)),
    "volumes": ListRule(item=_MOUNT),
    "docker": optional(FLAG),
    "repos": ListRule(item=_REPO, most=1),
    "files": ListRule(item=_FILE),
    "dstack": FLAG,
    "setup": COMMANDS,
}
RUN = {**PROFILE, **CONTAINER}
_EXCLUSIVE = (("image", "python"), ("image", "docker"), ("python", "docker"), ("nvcc", "docker"))


def is_set(table: Node, key: str) -> bool:
    """Whether a key says something; false says nothing."""
    node = child(table, key)
    return node is not None and to_value(node) not in (False, "", [])


def check_exclusive(table: MapNode, notes: ProblemNotes) -> None:
    """Note images, Pythons and Docker beside each other."""
    for one, other in _EXCLUSIVE:
        if is_set(table, one) and is_set(table, other):
            text = f"`{one}` and `{other}` exclude each other"
            notes.add(mark_of(table, other), text, suggestion="keep one of them")


def check_commands(table: MapNode, notes: ProblemNotes) -> None:
    """Note the absence of anything to run."""
    check_exclusive(table, notes)
    if (
        child(table, "groups") is None
        and not is_set(table, "commands")
        and not is_set(table, "image")
    ):
        notes.add(
            table.mark,
            "there is nothing to run",
            expected="`commands`, or an `image` that runs something",
        )


def check_groups(table: MapNode, forbidden: tuple[str, ...], notes: ProblemNotes) -> None:
    """Note groups whose names are taken, that run nothing, or that stand beside keys they
    replace.
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
                f"`{key}` stands beside `groups`",
                suggestion="write it into each group",
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


_NODE_GROUP = TableRule(
    fields={
        "name": optional(GROUP_NAME),
        "nodes": whole(1),
        "resources": NEEDS,
        "commands": COMMANDS,
        "ports": ListRule(item=PORT),
    }
)


def _check_task(table: MapNode, notes: ProblemNotes) -> None:
    check_commands(table, notes)
    if child(table, "groups") is not None and child(table, "nodes") is not None:
        notes.add(
            mark_of(table, "nodes"),
            "`nodes` and `groups` are both there",
            suggestion="keep one of them",
        )
    check_groups(table, ("commands", "ports", "entrypoint"), notes)


_HINTS = {
    **{
        key: f"write `resources: {{{key}: …}}`"
        for key in ("gpu", "cpu", "memory", "disk", "shm_size")
    },
    "run": "write `commands`",
    "command": "write `commands`",
    "envs": "write `env`",
    "num_nodes": "write `nodes`",
    "duration": "write `max_duration`",
    "region": "write `regions`",
    "backend": "write `backends`",
}


def make_run(
    kind: str, fields: Mapping[str, ShapeRule], rule: Rule, required: tuple[str, ...] = ()
) -> TableRule:
    """The rules of one kind of run."""
    return TableRule(
        fields={"type": choice((kind,)), **RUN, **fields},
        rule=rule,
        required=required,
        hints=_HINTS,
    )


TASK = make_run(
    "task",
    {
        "commands": COMMANDS,
        "ports": ListRule(item=PORT),
        "nodes": optional(whole(1)),
        "groups": optional(ListRule(item=_NODE_GROUP)),
    },
    _check_task,
)


def _check_environment(table: MapNode, notes: ProblemNotes) -> None:
    check_exclusive(table, notes)
    version, ide = text_at(table, "version"), text_at(table, "ide")
    if version and not ide:
        notes.add(mark_of(table, "version"), "`version` needs `ide`")
    elif version and ide == "windsurf" and re.match(r"^.+@[a-f0-9]+$", version) is None:
        notes.add(
            mark_of(table, "version"), "this is no version of windsurf", expected="VERSION@COMMIT"
        )
    if child(table, "entrypoint") is not None:
        notes.add(
            mark_of(table, "entrypoint"),
            "a dev-environment has no `entrypoint`",
            suggestion="delete it",
        )
    if flag_at(table, "dstack") and is_set(table, "inactivity_duration"):
        notes.add(mark_of(table, "dstack"), "`dstack` and `inactivity_duration` exclude each other")


ENVIRONMENT = make_run(
    "dev-environment",
    {
        "ports": ListRule(item=PORT),
        "ide": optional(choice(("vscode", "cursor", "windsurf", "zed"))),
        "version": optional(TEXT),
        "init": COMMANDS,
        "inactivity_duration": optional(switched()),
    },
    _check_environment,
)


def check_replicas(table: MapNode, notes: ProblemNotes) -> None:
    """Note a number of replicas without an end, or that varies without saying by what."""
    node = child(table, "replicas") or child(table, "count")
    scaling = child(table, "scaling")
    bounds = range_of(node, to_int) if node is not None else None
    if bounds is None or node is None:
        return
    low, high = bounds
    if high is None or (low is not None and low < 0):
        notes.add(
            node.mark,
            "the number of replicas needs an end",
            expected="a number, or a range such as 0..4",
        )
    elif (low or 0) != high and scaling is None:
        notes.add(node.mark, "a number of replicas that varies needs `scaling`")
    elif (low or 0) == high and scaling is not None:
        notes.add(
            scaling.mark,
            "`scaling` needs a number of replicas that varies",
            expected="such as replicas: 0..4",
        )
