"""SkyPilot's rules for a file: the tables of `keys.yaml`, and the rules that these tables cannot
express.
"""

import re
from functools import partial
from pathlib import Path

from cavvy.capabilities.importers.shapes import KeyTables, is_null
from cavvy.capabilities.importers.skypilot.needs import (
    FLAG,
    RULES,
    SHAPES,
    TEXT,
    choice,
    number,
    text,
    whole,
)
from cavvy.domain.values import replace
from cavvy.spec.problems import ProblemNotes
from cavvy.spec.tree import ListNode, MapNode, Node, ScalarNode, to_value

# The variables with the login for the registry of the image
LOGIN_VARIABLES = tuple(f"SKYPILOT_DOCKER_{part}" for part in ("USERNAME", "PASSWORD", "SERVER"))


def _check_storage(table: MapNode, notes: ProblemNotes) -> None:
    mode = _text(table, "mode").upper() or "MOUNT"
    config = table.get("config")
    inner = config if isinstance(config, MapNode) else None
    for key, needed, there in (
        ("type", "MOUNT_CACHED", table.get("type")),
        ("config.mount_cached", "MOUNT_CACHED", inner.get("mount_cached") if inner else None),
        ("config.mount", "MOUNT", inner.get("mount") if inner else None),
    ):
        if there is not None and not is_null(there) and mode != needed:
            notes.add(there.mark, f"`{key}` needs `mode: {needed}`, not {mode}")


def _check_mounts(table: MapNode, notes: ProblemNotes) -> None:
    for key, _ in table.entries:
        if re.match(r"([a-zA-Z][a-zA-Z0-9+.-]*:)?//[^/?#]", key.text):
            hint = "write the path on the node first, then the source"
            notes.add(
                key.mark, f"{key.text} cannot be a target", expected="a path", suggestion=hint
            )


def _check_policy(table: MapNode, notes: ProblemNotes) -> None:
    least, most = _number(table, "min_replicas"), _number(table, "max_replicas")
    goal = table.get("target_qps_per_replica")
    if most is not None and least is not None and most < least:
        notes.add(table.mark, f"max_replicas is {most:g}, which is below min_replicas ({least:g})")
    elif goal is not None and not is_null(goal) and most is None:
        notes.add(goal.mark, "`target_qps_per_replica` needs `max_replicas`")
    elif (goal is None or is_null(goal)) and most is not None and most != least:
        hint = "write `target_qps_per_replica`, or set a fixed number of replicas"
        notes.add(
            table.mark, "a variable number of replicas needs a scaling target", suggestion=hint
        )


def _check_pool(table: MapNode, notes: ProblemNotes) -> None:
    workers, least, most = (
        _number(table, key) for key in ("workers", "min_workers", "max_workers")
    )
    if workers is None and least is None and most is None:
        notes.add(
            table.mark,
            "the pool has no number of workers",
            expected="`workers`, or `min_workers` and `max_workers`",
        )
    for key in ("min_workers", "queue_length_threshold"):
        if _number(table, key) is not None and most is None:
            notes.add(table.mark, f"`{key}` needs `max_workers`")
    least = workers if least is None else least
    if most is None and any(
        _number(table, f"{way}scale_delay_seconds") is not None for way in ("up", "down")
    ):
        notes.add(table.mark, "a scaling delay needs `max_workers`")
    if most is not None and most < (1 if least is None else least):
        notes.add(
            table.mark, f"max_workers is {most:g}, which is below the minimum number of workers"
        )


def _check_service(table: MapNode, notes: ProblemNotes) -> None:
    there = {key.text for key, value in table.entries if not is_null(value)}
    probe = table.get("readiness_probe")
    if probe is not None and is_null(probe):
        notes.add(
            probe.mark,
            "`readiness_probe` is empty",
            expected="a path that begins with /, or a table",
        )
    for one, other in (
        ("replicas", "replica_policy"),
        ("replicas", "workers"),
        ("pool", "replica_policy"),
    ):
        if {one, other} <= there:
            notes.add(
                table.mark,
                f"`{one}` and `{other}` cannot be used together",
                suggestion="keep one of them",
            )
    policy = table.get("replica_policy")
    goal = policy.get("target_qps_per_replica") if isinstance(policy, MapNode) else None
    balanced = _text(table, "load_balancing_policy")
    if isinstance(goal, MapNode) != (balanced == "instance_aware_least_load"):
        text = (
            "`load_balancing_policy: instance_aware_least_load` and a table of "
            "`target_qps_per_replica`"
        )
        notes.add(table.mark, f"{text} belong together")


def _check_secrets(table: MapNode, notes: ProblemNotes) -> None:
    for key, value in table.entries:
        if key.text.startswith("secrets:") and not is_null(value):
            notes.add(
                value.mark,
                f"{key.text} is a reference and has no value",
                suggestion="delete the value",
            )


def _check_task(table: MapNode, notes: ProblemNotes) -> None:
    for key, value in table.entries:
        if key.text in ("envs", "inputs", "outputs") and is_null(value):
            notes.add(key.mark, f"`{key.text}` is empty", suggestion="delete the line")
    service, pool = table.get("service"), table.get("pool")
    if service is not None and pool is not None and not is_null(service) and not is_null(pool):
        notes.add(
            pool.mark, "`service` and `pool` cannot be used together", suggestion="keep one of them"
        )
    login = set(LOGIN_VARIABLES)
    there = {name: login & _names(table.get(name)) for name in ("envs", "secrets")}
    for name, known in there.items():
        if known and (known != login or all(there.values())):
            missing = ", ".join(sorted(login - known)) or "some are also set in the other section"
            notes.add(
                table.mark, f"the SKYPILOT_DOCKER_ variables must all be in `{name}`: {missing}"
            )
    volumes = table.get("volumes")
    for key, value in volumes.entries if isinstance(volumes, MapNode) else ():
        if isinstance(value, ListNode):
            notes.add(
                value.mark,
                f"`volumes.{key.text}` is a list",
                expected="a volume's name, or a table",
            )


def _check_json(value: str) -> str:
    import json

    try:
        json.loads(value)
    except ValueError as error:
        return f"this is not JSON: {error}"
    except RecursionError:
        return "this is nested too deeply"
    return ""


def _text(table: MapNode, key: str) -> str:
    node = table.get(key)
    return node.value if isinstance(node, ScalarNode) and isinstance(node.value, str) else ""


def _number(table: MapNode, key: str) -> float | None:
    node = table.get(key)
    value = to_value(node) if node is not None else None
    return value if isinstance(value, int | float) else None


def _names(node: Node | None) -> set[str]:
    return {key.text for key, _ in node.entries} if isinstance(node, MapNode) else set()


def is_safe_name(name: str) -> bool:
    """Return whether a string is a valid name for a job in a job group."""
    return re.fullmatch(r"[\w-]+", name) is not None


_TABLES = KeyTables(
    Path(__file__).with_name("keys.yaml"),
    shapes={
        "text": TEXT,
        "flag": FLAG,
        "json": text("JSON", check=_check_json),
        "script": text(
            "a script of at most 16 KiB",
            check=lambda value: "" if 0 < len(value) <= 16_384 else "its length",
        ),
        **SHAPES,
    },
    text=text,
    bounded={"whole": whole, "count": partial(whole, exact=True), "number": number},
    chosen={"one-of": choice, "exactly": partial(choice, any_case=False)},
    rules=(
        *RULES,
        _check_storage,
        _check_mounts,
        _check_policy,
        _check_pool,
        _check_service,
        _check_secrets,
        _check_task,
    ),
)
NEEDS = _TABLES.table("needs")
_KEYS = _TABLES.table("task")
_INDENT = "this key belongs in `resources`; is it indented too little?"
TASK = replace(
    _KEYS,
    hints={
        **dict.fromkeys(NEEDS.fields.keys() - _KEYS.fields.keys(), _INDENT),
        **_KEYS.hints,
    },
)
SERIAL_HEADER = _TABLES.table("serial_header")
GROUP_HEADER = _TABLES.table("group_header")
VOLUME = _TABLES.table("volume")
