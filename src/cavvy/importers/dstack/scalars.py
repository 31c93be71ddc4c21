"""Scalars as dstack takes them (pydantic's lax mode): "8" is a number, 8 is a text, but true is
no text.
"""

import re
from collections.abc import Callable, Iterable

from cavvy.importers.shapes import OneOfRule, ScalarRule, ShapeRule, TableRule
from cavvy.importers.yaml11 import UnquotedDate
from cavvy.spec.problems import listed, nearest, shown
from cavvy.spec.tree import ScalarNode, describe

_TRUTHS = {*("true", "t", "yes", "y", "on", "1"), *("false", "f", "no", "n", "off", "0")}
_DURATION = re.compile(r"(\d{1,12}) *([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_SIZE = re.compile(r"([\d.eE+-]+)(tb|gb|mb)?")
_SIZES = {"tb": 1024 * 1024, "gb": 1024, "mb": 1}


def is_text(node: ScalarNode) -> bool:
    """Whether a value can stand for a text: a text or a number."""
    value = node.value
    return isinstance(value, str | int | float) and not isinstance(value, bool | UnquotedDate)


def text(
    words: str = "a text", *, pattern: str = "", check: Callable[[str], str] | None = None
) -> ScalarRule:
    """A text or a number. `check` says what is wrong with it, or ""."""

    def test(node: ScalarNode) -> str:
        if not is_text(node):
            return f"{_described(node)} is not a text"
        value = str(node.value)
        if pattern and not re.search(pattern, value):
            return f"cannot use {shown(value)}"
        return check(value) if check else ""

    return ScalarRule(words=words, test=test)


def choice(names: Iterable[str]) -> ScalarRule:
    """One of several words, as they are written."""
    known = list(names)

    def test(node: ScalarNode) -> str:
        if node.value in known:
            return ""
        close = nearest(node.text, known)
        return f"{_described(node)} is no choice here" + (
            f"; did you mean {close}?" if close else ""
        )

    return ScalarRule(words=listed(known), test=test)


def to_number(node: ScalarNode) -> float | None:
    """A number, or a text that is one; true is neither here, though pydantic would take it for
    1.
    """
    value = None if isinstance(node.value, bool) else node.value
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    return float(value) if isinstance(value, int | float) and abs(value) < 1e30 else None


def number(
    low: float | None = None,
    high: float | None = None,
    *,
    above: bool = False,
    fraction: bool = True,
) -> ScalarRule:
    """A number within bounds; `above`: more than `low`; without `fraction` a whole one."""

    def test(node: ScalarNode) -> str:
        value = to_number(node)
        if value is None or (not fraction and not value.is_integer()):
            return f"{_described(node)} is not a {'number' if fraction else 'whole number'}"
        if low is not None and (value < low or (above and value == low)):
            return f"{node.text} is too small"
        return f"{node.text} is too large" if high is not None and value > high else ""

    bound = (
        f" above {low:g}"
        if above and low is not None
        else f" of at least {low:g}"
        if low is not None
        else ""
    )
    return ScalarRule(words=f"a {'' if fraction else 'whole '}number{bound}", test=test)


def whole(low: int | None = None, high: int | None = None) -> ScalarRule:
    """A whole number within bounds."""
    return number(low, high, fraction=False)


def read_duration(node: ScalarNode) -> int | None:
    """Seconds of 90, "90", 1h or "10 m"; None where it is no such length."""
    if isinstance(node.value, bool):
        return None
    if isinstance(node.value, int | float) and abs(node.value) < 1e12:
        return int(node.value)
    match = _DURATION.fullmatch(node.text)
    if match is not None:
        return int(match[1]) * _SECONDS[match[2]]
    return int(node.text) if re.fullmatch(r"[-+]?\d{1,12}", node.text.strip()) else None


def duration(low: int | None = None) -> ScalarRule:
    """A length of time of at least `low` seconds."""

    def test(node: ScalarNode) -> str:
        value = None if isinstance(node.value, UnquotedDate) else read_duration(node)
        if value is None:
            return f"{_described(node)} is not a length of time"
        return f"{node.text} is too short" if low is not None and value < low else ""

    return ScalarRule(words="a length of time such as 90, 30s, 10m, 2h or 1d", test=test)


def switched(low: int | None = 0) -> ScalarRule:
    """A length of time, or `off`, or true for the default."""
    length = duration(low)

    def test(node: ScalarNode) -> str:
        return (
            ""
            if node.value is None or isinstance(node.value, bool) or node.value == "off"
            else length.test(node)
        )

    return ScalarRule(words=f"{length.words}, or off", test=test)


def read_size_mib(text: str) -> float | None:
    """MiB of 16, 16GB, 512MB or 1TB (a bare number is GiB); None where it is no size."""
    match = _SIZE.fullmatch(text.replace(" ", "").lower())
    try:
        return float(match[1]) * _SIZES[match[2] or "gb"] if match else None
    except ValueError:
        return None


def _is_flag(node: ScalarNode) -> str:
    fits = isinstance(node.value, bool) or node.value in (0, 1)
    fits = fits or (isinstance(node.value, str) and node.value.lower() in _TRUTHS)
    return "" if fits else f"{_described(node)} is neither true nor false"


def _is_size(node: ScalarNode) -> str:
    return (
        ""
        if is_text(node) and read_size_mib(str(node.value)) is not None
        else f"{_described(node)} is not a size"
    )


def _described(node: ScalarNode) -> str:
    if isinstance(node.value, bool) and node.text.lower() not in ("true", "false"):
        return f"{node.text}, which YAML reads as {str(node.value).lower()},"
    return describe(node)


FLAG = ScalarRule(words="true or false", test=_is_flag)
TEXT = text()
SIZE = ScalarRule(words="a size such as 16GB", test=_is_size)
REFERENCE: ShapeRule = OneOfRule(
    shapes=(
        text("NAME or PROJECT/NAME", pattern=r"^[^/]+(/[^/]+)?$"),
        TableRule(fields={"project": TEXT, "name": TEXT}, required=("name",)),
    )
)
