"""dstack's rules for services, fleets, volumes, gateways and presets that `keys.yaml` cannot
express.
"""

import ipaddress
import re
from collections.abc import Mapping

from cavvy.capabilities.importers.dstack.rules import (
    check_commands,
    check_exclusive,
    check_groups,
    check_replicas,
    check_without_groups,
    is_set,
)
from cavvy.capabilities.importers.dstack.scalars import read_duration, text, written
from cavvy.capabilities.importers.readers import child, items, text_at
from cavvy.capabilities.importers.shapes import ShapeRule, fitting
from cavvy.spec.kept_keys import mark_of
from cavvy.spec.problems import ProblemNotes, shown
from cavvy.spec.tree import ListNode, MapNode, ScalarNode, to_value

_SOURCES = ("image", "docker", "python", "nvcc")
_SYNTHETIC = ("input_tokens", "output_tokens", "shared_prefix_tokens")


def _check_probe(table: MapNode, notes: ProblemNotes) -> None:
    if child(table, "body") is not None and text_at(table, "method") in ("get", "head"):
        notes.add(
            mark_of(table, "body"), f"a `{text_at(table, 'method')}` request cannot have a body"
        )


def _check_group(table: MapNode, notes: ProblemNotes) -> None:
    check_exclusive(table, notes)
    check_replicas(table, notes)
    if child(table, "replicas") is None and child(table, "count") is None:
        notes.add(table.mark, "the group has no number of replicas", expected="`replicas`")
    if is_set(table, "docker") and text_at(table, "privileged") == "False":
        notes.add(
            mark_of(table, "privileged"), "`docker` needs `privileged`", suggestion="delete it"
        )


def _check_service(table: MapNode, notes: ProblemNotes) -> None:
    legacy = isinstance(child(table, "replicas"), ListNode)
    if not legacy:
        check_replicas(table, notes)
        check_commands(table, notes)
    check_without_groups(table, notes, "replicas")
    prefixes = [text_at(each, "prefix") or "/" for each in items(child(table, "rate_limits"))]
    if len(set(prefixes)) < len(prefixes):
        notes.add(mark_of(table, "rate_limits"), "two limits have the same prefix")
    probes = [repr(_plain(each)) for each in items(child(table, "probes"))]
    if len(set(probes)) < len(probes):
        notes.add(mark_of(table, "probes"), "a probe appears twice", suggestion="delete one")
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
                group.mark,
                "a group with a `router` must have one replica",
                expected="`replicas: 1`",
            )
        for key in (*_SOURCES, "privileged", "spot_policy", "reservation"):
            if is_set(table, key) and child(group, key) is not None:
                hint = "write the key in only one place"
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
                        f"`{other}` and the file's `{one}` cannot be used together",
                    )


def _plain(node: object) -> object:
    return to_value(node) if isinstance(node, MapNode) else node


def _is_private(value: str, *, network: bool) -> str:
    try:
        private = (
            ipaddress.ip_network(value, strict=False) if network else ipaddress.ip_address(value)
        )
    except ValueError:
        return f"cannot use {shown(value)}"
    return "" if private.is_private else f"{value} is not a private address"


def _check_nodes(table: MapNode, notes: ProblemNotes) -> None:
    low = float(text_at(table, "min") or 0)
    target = float(text_at(table, "target") or low)
    high = text_at(table, "max")
    if low < 0 or target < low or (high is not None and float(high) < max(low, target)):
        notes.add(
            table.mark, "these numbers are inconsistent", expected="0 <= min <= target <= max"
        )


def _check_preset(table: MapNode, notes: ProblemNotes) -> None:
    there = [key for key in ("model", "base", "repo") if child(table, key) is not None]
    if len(there) != 1:
        problem = (
            f"`{there[0]}` and `{there[1]}` cannot be used together"
            if there
            else "the preset has no model"
        )
        notes.add(table.mark, problem, expected="one of `model`, `base` and `repo`")
    for key in _SYNTHETIC:
        if child(table, "dataset") is not None and child(table, key) is not None:
            notes.add(mark_of(table, key), f"`{key}` and `dataset` cannot be used together")
    shared = float(text_at(table, "shared_prefix_tokens") or 0)
    if shared >= float(text_at(table, "input_tokens") or 1024) and shared:
        notes.add(
            mark_of(table, "shared_prefix_tokens"),
            "the shared prefix must be shorter than the whole input",
        )
    agent = child(table, "agent")
    if text_at(agent, "provider") == "codex" and text_at(agent, "effort") == "max":
        notes.add(mark_of(agent, "effort"), "codex does not support the effort `max`")


def _is_count(node: ScalarNode) -> bool:
    pattern = r" *(\d{1,9}|\d{1,9} *\.\.( *\d{1,9})?|\.\. *\d{1,9}) *"
    ends = [int(end) for end in str(node.value).split("..") if end.strip().isdecimal()]
    return re.fullmatch(pattern, str(node.value)) is not None and ends == sorted(ends)


SHAPES: Mapping[str, ShapeRule] = {
    "window": fitting("30s, 60s or 300s", lambda node: read_duration(node) in (30, 60, 300)),
    "model_name": written("a model's name"),
    "private_address": text(
        "a private address", check=lambda value: _is_private(value, network=False)
    ),
    "private_network": text(
        "a private network", check=lambda value: _is_private(value, network=True)
    ),
    "node_count": fitting("a number or a range such as 0..2", _is_count),
}
RULES = (_check_probe, _check_group, _check_service, _check_nodes, _check_preset)
