"""dstack's rules for services, and for what only has a place or a price: fleets, volumes,
gateways, presets.
"""

import ipaddress
import re

from cavvy.importers.dstack.needs import NEEDS, SPOT, WHOLE_RANGE
from cavvy.importers.dstack.rules import (
    BACKENDS,
    COMMANDS,
    CONTAINER,
    ENV,
    GROUP_NAME,
    PLACEMENT,
    PROFILE,
    SERVICE_PORT,
    TAGS,
    TEXTS,
    check_commands,
    check_exclusive,
    check_groups,
    check_replicas,
    is_set,
    make_run,
    written,
)
from cavvy.importers.dstack.scalars import (
    FLAG,
    REFERENCE,
    SIZE,
    TEXT,
    choice,
    duration,
    number,
    switched,
    text,
    whole,
)
from cavvy.importers.readers import child, items, mark_of, text_at
from cavvy.importers.shapes import ListRule, OneOfRule, ScalarRule, ShapeRule, TableRule, optional
from cavvy.spec.problems import ProblemNotes, shown
from cavvy.spec.tree import ListNode, MapNode, ScalarNode

# services

_SCALING = TableRule(
    fields={
        "metric": choice(("rps",)),
        "target": number(0, above=True),
        "window": optional(
            OneOfRule(
                shapes=(
                    ScalarRule(words="30s, 60s or 300s", test=lambda node: _check_window(node)),
                )
            ),
        ),
        "scale_up_delay": duration(),
        "scale_down_delay": duration(),
    },
    required=("metric", "target"),
)


def _check_window(node: ScalarNode) -> str:
    from cavvy.importers.dstack.scalars import read_duration

    return "" if read_duration(node) in (30, 60, 300) else f"cannot use {shown(node.text)}"


_LIMIT_KEY = OneOfRule(
    shapes=(
        TableRule(fields={"type": choice(("ip_address",))}, required=("type",)),
        TableRule(
            fields={"type": choice(("header",)), "header": text(pattern=r"^[a-zA-Z0-9-_]{1,500}$")},
            required=("type", "header"),
        ),
    )
)
_LIMIT = TableRule(
    fields={
        "prefix": text("a path's beginning", pattern=r"^/[^\s\\{}]{0,4093}$"),
        "key": _LIMIT_KEY,
        "rps": number(1 / 60),
        "burst": whole(0),
    },
    required=("rps",),
)


def _check_probe(table: MapNode, notes: ProblemNotes) -> None:
    if child(table, "body") is not None and text_at(table, "method") in ("get", "head"):
        notes.add(mark_of(table, "body"), f"a request by `{text_at(table, 'method')}` has no body")


_PROBE = TableRule(
    fields={
        "type": choice(("http",)),
        "url": optional(text("a path that begins with /", pattern=r"^/.{0,2047}$")),
        "method": optional(choice(("get", "post", "put", "delete", "patch", "head"))),
        "headers": ListRule(
            item=TableRule(
                fields={
                    "name": text(pattern=r"^(?s:.{1,256})$"),
                    "value": text(pattern=r"^(?s:.{1,2048})$"),
                },
                required=("name", "value"),
            ),
            most=16,
        ),
        "body": optional(text(pattern=r"^(?s:.{1,2048})$")),
        "timeout": optional(duration(1)),
        "interval": optional(duration(1)),
        "ready_after": optional(whole(1)),
        "until_ready": optional(FLAG),
    },
    required=("type",),
    rule=_check_probe,
)
_CHAT: dict[str, ShapeRule] = {"type": choice(("chat",)), "name": TEXT}
_MODEL = OneOfRule(
    shapes=(
        written("a model's name", lambda value: ""),
        TableRule(
            fields={**_CHAT, "format": choice(("openai",)), "prefix": TEXT},
            required=("name", "format"),
        ),
        TableRule(
            fields={
                **_CHAT,
                "format": choice(("tgi",)),
                "chat_template": optional(TEXT),
                "eos_token": optional(TEXT),
            },
            required=("name", "format"),
        ),
    )
)


def _check_group(table: MapNode, notes: ProblemNotes) -> None:
    check_exclusive(table, notes)
    check_replicas(table, notes)
    if child(table, "replicas") is None and child(table, "count") is None:
        notes.add(
            table.mark, "the group does not say how many replicas it has", expected="`replicas`"
        )
    if is_set(table, "docker") and text_at(table, "privileged") == "False":
        notes.add(
            mark_of(table, "privileged"), "`docker` needs `privileged`", suggestion="delete it"
        )


_GROUP = TableRule(
    fields={
        "name": optional(GROUP_NAME),
        "replicas": WHOLE_RANGE,
        "count": WHOLE_RANGE,
        "scaling": optional(_SCALING),
        "resources": NEEDS,
        "spot_policy": optional(SPOT),
        "reservation": optional(TEXT),
        "commands": COMMANDS,
        **{key: CONTAINER[key] for key in ("image", "python", "nvcc", "docker")},
        "privileged": optional(FLAG),
        "router": optional(TableRule(fields={"type": choice(("smg", "dynamo", "sglang"))})),
    },
    rule=_check_group,
)
_SOURCES = ("image", "docker", "python", "nvcc")


def _check_service(table: MapNode, notes: ProblemNotes) -> None:
    legacy = isinstance(child(table, "replicas"), ListNode)
    if not legacy:
        check_replicas(table, notes)
        check_commands(table, notes)
    if child(table, "groups") is not None and child(table, "replicas") is not None:
        notes.add(
            mark_of(table, "replicas"),
            "`replicas` and `groups` are both there",
            suggestion="keep one of them",
        )
    prefixes = [text_at(each, "prefix") or "/" for each in items(child(table, "rate_limits"))]
    if len(set(prefixes)) < len(prefixes):
        notes.add(mark_of(table, "rate_limits"), "two limits have the same prefix")
    probes = [repr(_plain(each)) for each in items(child(table, "probes"))]
    if len(set(probes)) < len(probes):
        notes.add(mark_of(table, "probes"), "a probe is there twice", suggestion="delete one")
    _check_service_groups(table, legacy, notes)


def _check_service_groups(table: MapNode, legacy: bool, notes: ProblemNotes) -> None:
    if legacy:
        entries = tuple(
            (ScalarNode(mark=key.mark, text="groups", value="groups"), value)
            if key.text == "replicas"
            else (key, value)
            for key, value in table.entries
        )
        table = MapNode(mark=table.mark, entries=entries)
    check_groups(table, ("scaling", "commands"), notes)
    groups = items(child(table, "groups"))
    if len([each for each in groups if child(each, "router") is not None]) > 1:
        notes.add(mark_of(table, "groups"), "more than one group has a `router`")
    for group in groups:
        if (
            child(group, "router") is not None
            and (text_at(group, "replicas") or text_at(group, "count")) != "1"
        ):
            notes.add(
                group.mark, "a group with a `router` has one replica", expected="`replicas: 1`"
            )
        for key in (*_SOURCES, "privileged", "spot_policy", "reservation"):
            if is_set(table, key) and child(group, key) is not None:
                hint = "write it in one place only"
                notes.add(
                    mark_of(group, key), f"`{key}` is also at the top of the file", suggestion=hint
                )
        for one in _SOURCES:
            for other in _SOURCES:
                if (
                    {one, other} != {"python", "nvcc"}
                    and one != other
                    and is_set(table, one)
                    and is_set(group, other)
                ):
                    notes.add(
                        mark_of(group, other),
                        f"`{other}` and the file's `{one}` exclude each other",
                    )


def _plain(node: object) -> object:
    from cavvy.importers.yaml11 import to_value

    return to_value(node) if isinstance(node, MapNode) else node


SERVICE = make_run(
    "service",
    {
        "commands": COMMANDS,
        "port": SERVICE_PORT,
        "gateway": optional(OneOfRule(shapes=(FLAG, REFERENCE))),
        "strip_prefix": FLAG,
        "model": optional(_MODEL),
        "https": optional(OneOfRule(shapes=(FLAG, choice(("auto",))))),
        "auth": FLAG,
        "scaling": optional(_SCALING),
        "rate_limits": ListRule(item=_LIMIT),
        "probes": optional(ListRule(item=_PROBE)),
        "replicas": optional(
            OneOfRule(shapes=(*WHOLE_RANGE.shapes, ListRule(item=_GROUP, least=1)))
        ),
        "groups": optional(ListRule(item=_GROUP)),
    },
    _check_service,
    ("port",),
)

# fleets

_BLOCKS = OneOfRule(shapes=(choice(("auto",)), whole(1)))


def _is_private(value: str, *, network: bool) -> str:
    try:
        private = (
            ipaddress.ip_network(value, strict=False) if network else ipaddress.ip_address(value)
        )
    except ValueError:
        return f"cannot use {shown(value)}"
    return "" if private.is_private else f"{value} is not private"


_KEY = optional(TableRule(fields={"public": TEXT, "private": optional(TEXT)}, required=("public",)))
_PROXY = optional(
    TableRule(
        fields={
            "hostname": TEXT,
            "port": optional(whole()),
            "user": TEXT,
            "identity_file": TEXT,
            "ssh_key": _KEY,
        },
        required=("hostname", "user", "identity_file"),
    )
)
_HOST_KEYS: dict[str, ShapeRule] = {
    "port": optional(whole()),
    "user": optional(TEXT),
    "identity_file": optional(TEXT),
    "proxy_jump": _PROXY,
    "ssh_key": _KEY,
}
_HOST = TableRule(
    fields={
        "hostname": TEXT,
        **_HOST_KEYS,
        "internal_ip": optional(
            text("a private address", check=lambda value: _is_private(value, network=False))
        ),
        "blocks": optional(_BLOCKS),
    },
    required=("hostname",),
)
_SSH = TableRule(
    fields={
        **_HOST_KEYS,
        "hosts": ListRule(item=OneOfRule(shapes=(TEXT, _HOST))),
        "network": optional(
            text("a private network", check=lambda value: _is_private(value, network=True))
        ),
    },
    required=("hosts",),
)


def _check_nodes(table: MapNode, notes: ProblemNotes) -> None:
    low = float(text_at(table, "min") or 0)
    target = float(text_at(table, "target") or low)
    high = text_at(table, "max")
    if low < 0 or target < low or (high is not None and float(high) < max(low, target)):
        notes.add(
            table.mark, "these numbers do not fit together", expected="0 <= min <= target <= max"
        )


def _check_count(node: ScalarNode) -> str:
    fits = (
        re.fullmatch(r" *(\d{1,9}|\d{1,9} *\.\.( *\d{1,9})?|\.\. *\d{1,9}) *", str(node.value))
        is not None
    )
    ends = [int(end) for end in str(node.value).split("..") if end.strip().isdecimal()]
    return "" if fits and ends == sorted(ends) else f"cannot use {shown(node.text)}"


_NODES = OneOfRule(
    shapes=(
        ScalarRule(words="a number or a range such as 0..2", test=_check_count),
        TableRule(
            fields={
                "min": optional(whole()),
                "target": optional(whole()),
                "max": optional(whole()),
            },
            rule=_check_nodes,
        ),
    )
)
FLEET = TableRule(
    fields={
        "type": choice(("fleet",)),
        "name": optional(TEXT),
        "placement": optional(choice(("any", "cluster"))),
        "blocks": _BLOCKS,
        "nodes": optional(_NODES),
        "resources": optional(NEEDS),
        **PLACEMENT,
        "ssh_config": optional(_SSH),
        "env": ENV,
    }
)

# volumes and gateways

_VOLUME: dict[str, ShapeRule] = {
    "type": choice(("volume",)),
    "name": optional(TEXT),
    "auto_cleanup_duration": optional(switched(None)),
    "tags": optional(TAGS),
}
_DISK: dict[str, ShapeRule] = {
    **_VOLUME,
    "region": TEXT,
    "size": optional(SIZE),
    "volume_id": optional(TEXT),
    "availability_zone": optional(TEXT),
}
VOLUMES = {
    **{
        name: TableRule(
            fields={**_DISK, "backend": choice((name,))}, required=("backend", "region")
        )
        for name in ("aws", "gcp", "runpod")
    },
    "kubernetes": TableRule(
        fields={
            **_VOLUME,
            "backend": choice(("kubernetes",)),
            "region": TEXT,
            "size": optional(SIZE),
            "claim_name": optional(TEXT),
            "storage_class_name": optional(TEXT),
            "access_modes": TEXTS,
            "read_only": FLAG,
        }
    ),
    **{
        name: TableRule(fields={**_VOLUME, "backend": choice((name,)), "volume_id": optional(TEXT)})
        for name in ("daytona", "lium")
    },
}
_CERTIFICATE = OneOfRule(
    shapes=(
        TableRule(fields={"type": choice(("lets-encrypt",))}, required=("type",)),
        TableRule(fields={"type": choice(("acm",)), "arn": TEXT}, required=("type", "arn")),
        TableRule(fields={"type": choice(("gcp-cm",)), "name": TEXT}, required=("type", "name")),
    )
)
GATEWAY = TableRule(
    fields={
        "type": choice(("gateway",)),
        "name": optional(TEXT),
        "default": optional(FLAG),
        "backend": choice(BACKENDS),
        "region": TEXT,
        "instance_type": optional(text(pattern=".")),
        "domain": optional(TEXT),
        "public_ip": FLAG,
        "load_balancer": optional(TableRule(fields={"type": choice(("alb",))}, required=("type",))),
        "certificate": optional(_CERTIFICATE),
        "replicas": optional(whole(1)),
        "tags": optional(TAGS),
    },
    required=("backend", "region"),
)

# presets

_FILLED = text("a text", pattern=r"\S")
_PRESET_MODEL = OneOfRule(
    shapes=(
        _FILLED,
        TableRule(fields={"repo": _FILLED, "name": optional(_FILLED)}, required=("repo",)),
        TableRule(fields={"base": _FILLED}, required=("base",)),
    )
)
_SYNTHETIC = ("input_tokens", "output_tokens", "shared_prefix_tokens")


def _check_preset(table: MapNode, notes: ProblemNotes) -> None:
    there = [key for key in ("model", "base", "repo") if child(table, key) is not None]
    if len(there) != 1:
        problem = (
            f"`{there[0]}` and `{there[1]}` are both there"
            if there
            else "the preset names no model"
        )
        notes.add(table.mark, problem, expected="one of `model`, `base` and `repo`")
    for key in _SYNTHETIC:
        if child(table, "dataset") is not None and child(table, key) is not None:
            notes.add(mark_of(table, key), f"`{key}` and `dataset` exclude each other")
    shared = float(text_at(table, "shared_prefix_tokens") or 0)
    if shared >= float(text_at(table, "input_tokens") or 1024) and shared:
        notes.add(
            mark_of(table, "shared_prefix_tokens"),
            "the shared prefix is not shorter than the whole input",
        )
    agent = child(table, "agent")
    if text_at(agent, "provider") == "codex" and text_at(agent, "effort") == "max":
        notes.add(mark_of(agent, "effort"), "codex has no effort `max`")


PRESET = TableRule(
    fields={
        **PROFILE,
        "type": choice(("preset",)),
        "name": optional(TEXT),
        "model": _PRESET_MODEL,
        "base": optional(_FILLED),
        "repo": optional(_FILLED),
        "prompt": optional(
            OneOfRule(
                shapes=(
                    text(
                        "a text of at most 10,000 characters",
                        pattern=r"^(?=[\s\S]*\S)[\s\S]{1,10000}$",
                    ),
                    TableRule(fields={"path": _FILLED}, required=("path",)),
                )
            )
        ),
        **{
            key: optional(whole(1))
            for key in ("min_context_length", "max_ttft", "trials", "concurrency")
        },
        "previous": optional(TEXTS),
        "input_tokens": optional(whole(1)),
        "output_tokens": optional(whole(2)),
        "shared_prefix_tokens": optional(whole(0)),
        "dataset": optional(text("a data set's name", pattern=r"^(?!\s*random\s*$)(?=[\s\S]*\S)")),
        "baseline": optional(FLAG),
        "gateway": optional(OneOfRule(shapes=(FLAG, REFERENCE))),
        "agent": optional(
            TableRule(
                fields={
                    "provider": choice(("claude", "codex")),
                    "model": optional(TEXT),
                    "effort": optional(choice(("low", "medium", "high", "xhigh", "max"))),
                },
                required=("provider",),
            )
        ),
        "env": ENV,
    },
    rule=_check_preset,
)
