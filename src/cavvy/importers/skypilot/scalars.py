"""Scalars as JSON Schema takes them, which is how SkyPilot checks its files: a number is no
text, true is no number.
"""

import re
from collections.abc import Callable, Iterable

from cavvy.importers.shapes import ScalarRule
from cavvy.importers.yaml11 import UnquotedDate
from cavvy.spec.problems import listed, nearest, shown
from cavvy.spec.tree import ScalarNode, describe


def text(
    words: str = "a text", *, pattern: str = "", check: Callable[[str], str] | None = None
) -> ScalarRule:
    """A text. `check` says what is wrong with it, or ""."""

    def test(node: ScalarNode) -> str:
        if not isinstance(node.value, str) or isinstance(node.value, UnquotedDate):
            return f"{_described(node)} is not a text"
        if pattern and not re.search(pattern, node.value):
            return f"cannot use {shown(node.value)}"
        return check(node.value) if check else ""

    return ScalarRule(words=words, test=test)


def choice(names: Iterable[str], *, any_case: bool = True) -> ScalarRule:
    """One of several words."""
    known = list(names)

    def check(value: str) -> str:
        if value in known or (any_case and value.lower() in {name.lower() for name in known}):
            return ""
        close = nearest(value, known)
        return f"{shown(value)} is no choice here" + (f"; did you mean {close}?" if close else "")

    return text(listed(known), check=check)


def whole(low: int | None = None, high: int | None = None, *, exact: bool = False) -> ScalarRule:
    """A whole number within bounds; `exact`: not 2.0 either, which JSON Schema takes for one."""

    def test(node: ScalarNode) -> str:
        value = node.value
        if isinstance(value, float) and value.is_integer() and not exact:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            return f"{_described(node)} is not a whole number"
        return bounds(value, low, high)

    return ScalarRule(words=_bounded("a whole number", low, high), test=test)


def number(low: float | None = None, *, above: bool = False) -> ScalarRule:
    """A number; `above`: more than `low`."""

    def test(node: ScalarNode) -> str:
        if isinstance(node.value, bool) or not isinstance(node.value, int | float):
            return f"{_described(node)} is not a number"
        if above and low is not None and node.value <= low:
            return f"{node.text} is too small"
        return bounds(node.value, low, None)

    return ScalarRule(
        words=f"a number above {low:g}" if above else _bounded("a number", low, None), test=test
    )


def bounds(value: float, low: float | None, high: float | None) -> str:
    """What is wrong with a number outside of its bounds, or ""."""
    if low is not None and not value >= low:
        return f"{value} is too small"
    if high is not None and not value <= high:
        return f"{value} is too large"
    return ""


def _bounded(words: str, low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"{words} from {low:g} to {high:g}"
    return f"{words} of at least {low:g}" if low is not None else words


def _described(node: ScalarNode) -> str:
    """A node by the value that YAML 1.1 gives it, where `describe` would call `yes` a text."""
    if isinstance(node.value, bool) and node.text.lower() not in ("true", "false"):
        return f"{node.text}, which YAML reads as {str(node.value).lower()},"
    return describe(node)


def _is_flag(node: ScalarNode) -> str:
    return "" if isinstance(node.value, bool) else f"{_described(node)} is neither true nor false"


FLAG = ScalarRule(words="true or false", test=_is_flag)
TEXT = text()
