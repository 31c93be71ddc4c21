"""Rules for scalars, which follow dstack's types (pydantic's lax mode): "8" is accepted as a number
and 8 as a string, but true is not accepted as a string.
"""

import re
from collections.abc import Iterable
from datetime import timedelta
from functools import partial

from cavvy.domain.units import format_duration
from cavvy.importers.shapes import (
    ScalarRule,
    UnquotedDate,
    describe_value,
    is_string,
    make_flag,
    make_text,
    no_choice,
)
from cavvy.spec.problems import listed
from cavvy.spec.tree import ScalarNode

_TRUTHS = {*("true", "t", "yes", "y", "on", "1"), *("false", "f", "no", "n", "off", "0")}
_DURATION = re.compile(r"(\d{1,12}) *([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_SIZE = re.compile(r"([\d.eE+-]+)(tb|gb|mb)?")
_SIZES = {"tb": 1024 * 1024, "gb": 1024, "mb": 1}


def is_text(node: ScalarNode) -> bool:
    """Return whether dstack accepts a value as a string. dstack accepts strings and numbers as
    strings.
    """
    value = node.value
    return isinstance(value, str | int | float) and not isinstance(value, bool | UnquotedDate)


text = partial(make_text, is_text)
written = partial(make_text, is_string)  # YAML must read the value as a string.


def choice(names: Iterable[str]) -> ScalarRule:
    """Return a rule for one of several words, which must be spelled exactly."""
    known = list(names)
    return ScalarRule(
        listed(known),
        lambda node: (
            "" if node.value in known else no_choice(describe_value(node), node.text, known)
        ),
    )


def to_number(node: ScalarNode) -> float | None:
    """Return the value as a number, which may also be written as a string, or None if it is not a
    number. In this function, true is not a number, although pydantic would read it as 1.
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
    """Return a rule for a number from `low` to `high`. With `above`, the number must be greater
    than `low`; without `fraction`, the number must be whole.
    """

    def test(node: ScalarNode) -> str:
        value = to_number(node)
        if value is None or (not fraction and not value.is_integer()):
            return f"{describe_value(node)} is not a {'number' if fraction else 'whole number'}"
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
    return ScalarRule(f"a {'' if fraction else 'whole '}number{bound}", test)


whole = partial(number, fraction=False)


def read_duration(node: ScalarNode) -> int | None:
    """Return the seconds of a duration such as 90, "90", 1h or "10 m", or None if the value is not
    a duration.
    """
    if isinstance(node.value, bool):
        return None
    if isinstance(node.value, int | float) and abs(node.value) < 1e12:
        return int(node.value)
    match = _DURATION.fullmatch(node.text)
    if match is not None:
        return int(match[1]) * _SECONDS[match[2]]
    return int(node.text) if re.fullmatch(r"[-+]?\d{1,12}", node.text.strip()) else None


def duration(low: float | None = None) -> ScalarRule:
    """Return a rule for a length of time of at least `low` seconds."""

    def test(node: ScalarNode) -> str:
        value = None if isinstance(node.value, UnquotedDate) else read_duration(node)
        if value is None:
            return f"{describe_value(node)} is not a length of time"
        return f"{node.text} is too short" if low is not None and value < low else ""

    bound = f" of at least {format_duration(timedelta(seconds=low))}" if low else ""
    return ScalarRule(f"a length of time{bound}, such as 90, 30s, 10m, 2h or 1d", test)


def switched(low: float | None = 0) -> ScalarRule:
    """Return a rule for a duration, for `off` or false (no duration), and for true (the default
    duration).
    """
    length = duration(low)

    def test(node: ScalarNode) -> str:
        return (
            ""
            if node.value is None or isinstance(node.value, bool) or node.value == "off"
            else length.test(node)
        )

    return ScalarRule(f"{length.words}, or off", test)


def read_size_mib(text: str) -> float | None:
    """Convert a size such as 16, 16GB, 512MB or 1TB to MiB. A number without a unit is in GiB.
    Returns None if the text is not a size.
    """
    match = _SIZE.fullmatch(text.replace(" ", "").lower())
    try:
        return float(match[1]) * _SIZES[match[2] or "gb"] if match else None
    except ValueError:
        return None


def _is_flag(node: ScalarNode) -> bool:
    if isinstance(node.value, str):
        return node.value.lower() in _TRUTHS
    return isinstance(node.value, bool) or node.value in (0, 1)


def _check_size(node: ScalarNode) -> str:
    fits = is_text(node) and read_size_mib(str(node.value)) is not None
    return "" if fits else f"{describe_value(node)} is not a size"


FLAG = make_flag(_is_flag)
TEXT = text()
SIZE = ScalarRule("a size such as 16GB", _check_size)
