"""Whatever another tool's file holds, it is understood or refused with places; and a planted
error is always found.
"""

import random
import re
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cavvy.capabilities.importers.dstack import TABLES
from cavvy.capabilities.importers.shapes import ListRule, OneOfRule, ShapeRule, TableRule
from cavvy.capabilities.importers.skypilot.rules import TASK as SKYPILOT
from cavvy.spec import SpecError
from cavvy.task_files import parse_file, parse_task


def list_keys(shape: object) -> set[str]:
    match shape:
        case TableRule():
            return {
                *shape.fields,
                *(key for inner in shape.fields.values() for key in list_keys(inner)),
            }
        case ListRule():
            return list_keys(shape.item)
        case OneOfRule():
            return {key for each in shape.shapes for key in list_keys(each)}
        case _:
            return set()


SERVICE = TABLES["service"]
NAMES = sorted(
    list_keys(SKYPILOT).union(*map(list_keys, (TABLES["task"], SERVICE, TABLES["fleet"])))
)
ODD = (
    "~ true no on -1 0 1e999 010 0x 1:30 8+ 8..32 ..8 64GB.. H100:8 A100:80GB:1..4 tpu-v4-8 4x "
    "&a *a !t | ' [ { ${A} $"
)
VALUES = st.one_of(
    st.sampled_from(ODD.split()),
    st.sampled_from(
        (
            "true",
            "off",
            "1.5",
            "",
            "9" * 400,
            "2024-13-45",
            "2024-01-01",
            "0b_",
            "=",
            "<<",
            "\x00",
            "\ud800",
            "[]",
            "{}",
            "- a",
        )
    ),
    st.text(max_size=12),
    st.integers().map(str),
    st.floats().map(str),
)
LINES = st.builds(
    lambda indent, dash, key, value: f"{' ' * indent}{dash}{key}: {value}",
    st.integers(0, 6),
    st.sampled_from(["", "", "", "- "]),
    st.sampled_from([*NAMES, "<<", "A"]),
    VALUES,
)
HEADS = st.sampled_from(
    (
        *("num_nodes: 1", "run: x\nenvs: {}", "name: a\n---\nnum_nodes: 1"),
        *("type: task\ncommands: [x]", "type: service\nport: 1\ncommands: [x]"),
        *("type: fleet", "type: volume\nbackend: aws", "type: preset\nbase: m"),
    )
)


def check(text: str) -> None:
    lines = text.count("\n") + len(re.findall("[\r\x85\u2028\u2029]", text)) + 1
    try:
        found = parse_file(text)
    except SpecError as error:
        for problem in error.problems:
            assert problem.message
            assert 0 <= problem.line <= lines
            assert str(problem)
        return
    for task in found.tasks:
        assert re.fullmatch("[a-z0-9-]{1,63}", task.name)
    for kept in found.kept:
        assert 0 < kept.line <= lines
        assert kept.reason
    try:
        assert parse_task(text).run
    except SpecError:
        services = any(task.service is not None for task in found.tasks)
        assert found.refused or services


@settings(max_examples=150, deadline=None)
@given(HEADS, st.lists(LINES, max_size=6))
def test_any_lines_give_a_meaning_or_problems(head: str, lines: list[str]) -> None:
    check("\n".join([head, *lines]))


@settings(max_examples=80, deadline=None)
@given(HEADS, st.sampled_from(NAMES), VALUES)
def test_any_value_of_any_key(head: str, key: str, value: str) -> None:
    check(f"{head}\n{key}: {value}")


Tree = Mapping[str, object]
SKY_TREE: Tree = {
    "name": "train",
    "num_nodes": 2,
    "workdir": ".",
    "resources": {
        "infra": "aws/us-east-1",
        "accelerators": "H100:8",
        "cpus": "32+",
        "memory": "128+",
        "disk_size": 500,
        "use_spot": True,
        "ports": [8080],
        "autostop": {"idle_minutes": 10, "down": True},
        "job_recovery": "FAILOVER",
    },
    "file_mounts": {"/data": {"name": "b", "store": "s3", "mode": "MOUNT"}},
    "service": {"readiness_probe": {"path": "/health"}, "replicas": 2},
    "setup": "pip install torch",
    "run": "train",
}
DSTACK_TREE: Tree = {
    "type": "service",
    "name": "serve",
    "port": 8000,
    "commands": ["serve"],
    "image": "a/b:1",
    "resources": {"gpu": "H100:8", "cpu": "16..", "memory": "64GB..", "disk": "100GB.."},
    "spot_policy": "auto",
    "max_duration": "6h",
    "retry": {"on_events": ["interruption"], "duration": "1h"},
    "replicas": "1..4",
    "scaling": {"metric": "rps", "target": 10},
    "volumes": [{"name": "v", "path": "/data"}],
    "probes": [{"type": "http", "url": "/health"}],
}


def list_tables(
    shape: object, tree: object, path: tuple[object, ...] = ()
) -> list[tuple[tuple[object, ...], TableRule]]:
    """Every table of a tree whose keys are all known, with the place it is at."""
    found: list[tuple[tuple[object, ...], TableRule]] = []
    match shape, tree:
        case OneOfRule(), _:
            for each in shape.shapes:
                found += list_tables(each, tree, path)
        case ListRule(), list():
            for number, item in enumerate(tree):
                found += list_tables(shape.item, item, (*path, number))
        case TableRule(), dict():
            if shape.other is None:
                found.append((path, shape))
            for key, value in tree.items():
                inner: ShapeRule | None = shape.fields.get(key, shape.other)
                found += list_tables(inner, value, (*path, key))
    return found


def as_text(tree: object) -> str:
    import json

    return json.dumps(tree)


def control_plane(tree: Tree, path: tuple[object, ...], key: str, value: object) -> str:
    import copy

    planted = copy.deepcopy(dict(tree))
    place: object = planted
    for step in path:
        place = place[step]  # type: ignore[index]  # the path was taken from this very tree
    assert isinstance(place, dict)
    place[key] = value
    return as_text(planted)


CASES = [(SKYPILOT, SKY_TREE), (SERVICE, DSTACK_TREE)]


@pytest.mark.parametrize(("shape", "tree"), CASES, ids=["SkyPilot", "dstack"])
def test_an_unknown_key_is_found_in_every_table(shape: TableRule, tree: Tree) -> None:
    assert parse_file(as_text(tree)).tasks
    tables = list_tables(shape, dict(tree))
    assert len(tables) >= 4
    for path, _ in tables:
        with pytest.raises(SpecError, match="planted"):
            parse_file(control_plane(tree, path, "planted", 1))


@pytest.mark.parametrize(("shape", "tree"), CASES, ids=["SkyPilot", "dstack"])
def test_a_wrong_type_is_found_at_every_key(shape: TableRule, tree: Tree) -> None:
    rng = random.Random(3)
    count = 0
    for path, keys in list_tables(shape, dict(tree)):
        for key in keys.fields:
            if key in ("count", "replicas") or key.startswith("_"):
                continue
            value = rng.choice(([["x", ["y"]]], {"planted": [1]}))
            if not any(inner.fits_anything for inner in [_Probe(keys.fields[key])]):
                with pytest.raises(SpecError):
                    parse_file(control_plane(tree, path, key, value))
                count += 1
    assert count > 30


class _Probe:
    """Whether a shape lets any table or list pass, as where the other tool does not look either."""

    def __init__(self, shape: ShapeRule) -> None:
        options = shape.shapes if isinstance(shape, OneOfRule) else (shape,)
        self.fits_anything = any(
            isinstance(each, TableRule) and each.other is not None for each in options
        )
