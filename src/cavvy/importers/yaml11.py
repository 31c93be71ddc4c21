"""Converts unquoted values by the rules of YAML 1.1. SkyPilot and dstack both use PyYAML, which
reads `no` as false and 010 as 8.
"""

from typing import TYPE_CHECKING

from cavvy.domain.values import replace
from cavvy.spec.problems import ProblemNotes, shown
from cavvy.spec.tree import ListNode, MapNode, Node, ScalarNode

if TYPE_CHECKING:
    from yaml import SafeLoader


class UnquotedDate(str):
    """The value of an unquoted YAML date or time. Tools such as dstack do not accept an unquoted
    date as a string.
    """

    __slots__ = ()


def recast(node: Node, notes: ProblemNotes) -> Node:
    """Return the tree with the values that PyYAML's safe loader would return."""
    import yaml

    return _recast(node, notes, yaml.SafeLoader(""))


def _recast(node: Node, notes: ProblemNotes, loader: "SafeLoader") -> Node:
    match node:
        case ScalarNode(plain=True):
            return replace(node, value=_resolve(node, notes, loader))
        case ScalarNode():
            return node
        case ListNode():
            return replace(node, items=tuple(_recast(item, notes, loader) for item in node.items))
        case MapNode():
            entries = (
                (_recast_key(key, loader), _recast(value, notes, loader))
                for key, value in node.entries
            )
            return replace(node, entries=tuple(entries))


def _recast_key(key: ScalarNode, loader: "SafeLoader") -> ScalarNode:
    """Rename a key to "True" or "False" if YAML 1.1 reads it as a boolean, such as `on` or `no`.
    PyYAML does the same.
    """
    value = _resolve(key, ProblemNotes("", ""), loader) if key.plain else key.value
    return replace(key, text=str(value)) if isinstance(value, bool) else key


def _resolve(
    node: ScalarNode, notes: ProblemNotes, loader: "SafeLoader"
) -> str | int | float | bool | None:
    import yaml

    # the type stubs do not cover this attribute
    tag = loader.resolve(yaml.ScalarNode, node.text, (True, False))  # type: ignore[no-untyped-call]
    if tag == "tag:yaml.org,2002:str":
        return node.text
    try:
        value = loader.construct_object(yaml.ScalarNode(tag, node.text))
    except (ValueError, OverflowError, yaml.YAMLError):
        notes.add(
            node.mark,
            f"{shown(node.text)} looks like a number or a date to YAML, but is not a valid one",
            suggestion="quote it",
        )
        return node.text
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return UnquotedDate(value)
