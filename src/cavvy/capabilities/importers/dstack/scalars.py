"""Rules for scalars, which follow dstack's types (pydantic's lax mode): "8" is accepted as a number
and 8 as a string, but true is not accepted as a string. Also dstack's rules for `resources`, and
parsers for ranges, CPUs, accelerators and sizes.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial

from cavvy.capabilities.importers.readers import child, text_at
from cavvy.capabilities.importers.shapes import (
    ScalarRule,
    ShapeRule,
    UnquotedDate,
    describe_value,
    fitting,
    is_string,
    make_flag,
    make_text,
    no_choice,
)
from cavvy.domain.units import format_duration
from cavvy.domain.values import Struct
from cavvy.spec.problems import ProblemNotes, listed, shown
from cavvy.spec.tree import ListNode, MapNode, Node, ScalarNode

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


VENDORS = {
    "nvidia": "nvidia",
    "amd": "amd",
    "google": "google",
    "tpu": "google",
    "intel": "intel",
    "tenstorrent": "tenstorrent",
    "tt": "tenstorrent",
}
_ARCHITECTURES = ("x86", "arm")
Range = tuple[float | None, float | None]
Unit = Callable[[str], float | None]


def to_int(text: str) -> float | None:
    """Convert a string to a whole number by the rules of pydantic. Returns None if pydantic does
    not accept the string as a whole number.
    """
    return float(text) if re.fullmatch(r"[-+]?\d{1,15}(\.0+)?", text.strip()) else None


def read_range(value: str, unit: Unit) -> Range | None:
    """Return the bounds of a range such as 8, 2..8, 16GB.. or ..80GB. A single value is used as
    both bounds of the range. Returns None if the text is not a range or the range is reversed.
    """
    if ".." not in value:
        single = unit(value)
        return None if single is None else (single, single)
    ends = value.replace(" ", "").split("..")
    if len(ends) != 2 or not any(ends):
        return None
    low, high = (unit(end) if end else None for end in ends)
    if (ends[0] and low is None) or (ends[1] and high is None):
        return None
    return None if low is not None and high is not None and low > high else (low, high)


def range_of(node: Node | None, unit: Unit) -> Range | None:
    """Return the bounds of a range, which is written as a string or as a table with `min` and
    `max`. Returns None if `node` is None.
    """
    if isinstance(node, ScalarNode):
        return read_range(str(node.value), unit)
    if node is None:
        return None
    low, high = text_at(node, "min"), text_at(node, "max")
    return (unit(low) if low else None), (unit(high) if high else None)


def _range_text(words: str, unit: Unit) -> ScalarRule:
    return fitting(words, lambda node: is_text(node) and read_range(str(node.value), unit))


def _check_bounds(table: MapNode, unit: Unit, notes: ProblemNotes) -> None:
    low, high = range_of(table, unit) or (None, None)
    if low is None and high is None:
        notes.add(table.mark, "the range has no bounds", expected="`min`, `max` or both")
    elif low is not None and high is not None and low > high:
        notes.add(
            table.mark,
            "`min` of this range is larger than `max`",
            suggestion="swap `min` and `max`",
        )


def _check_whole_bounds(table: MapNode, notes: ProblemNotes) -> None:
    _check_bounds(table, to_int, notes)


def _check_size_bounds(table: MapNode, notes: ProblemNotes) -> None:
    _check_bounds(table, read_size_mib, notes)


class GpuRequest(Struct, frozen=True, kw_only=True):
    """One accelerator request, split into strings. A missing part is ""."""

    vendor: str = ""
    names: tuple[str, ...] = ()
    memory: str = ""
    count: str = ""


def split_gpu(value: str) -> GpuRequest | None:
    """Split a request such as `A100,H100:80GB:8`, `nvidia:24GB..` or `2` into its parts; None if
    the request is invalid.
    """
    found: dict[str, str] = {}
    for token in value.replace(" ", "").split(":"):
        if token.lower() in VENDORS:
            key, token = "vendor", VENDORS[token.lower()]
        elif token[:1].isalpha():
            key = "names"
        else:
            key = "memory" if any(char.isalpha() for char in token) else "count"
        if not token or key in found:
            return None
        found[key] = token
    names = tuple(found.get("names", "").split(",")) if "names" in found else ()
    count, memory = found.get("count", ""), found.get("memory", "")
    wrong = (count and read_range(count, to_int) is None) or (
        memory and read_range(memory, read_size_mib) is None
    )
    if not all(names) or wrong:
        return None
    return GpuRequest(vendor=found.get("vendor", ""), names=names, memory=memory, count=count)


def split_cpu(value: str) -> tuple[str, str] | None:
    """Split `8`, `arm:8..16` or `x86` into architecture and count. Returns None if the text is
    invalid."""
    found: dict[str, str] = {}
    for token in value.replace(" ", "").split(":"):
        key = "count" if ".." in token or token.isdigit() else "arch"
        token = token.lower() if key == "arch" else token
        if not token or key in found or (key == "arch" and token not in _ARCHITECTURES):
            return None
        found[key] = token
    count = found.get("count", "")
    return None if count and read_range(count, to_int) is None else (found.get("arch", ""), count)


def _splits(node: ScalarNode, split: Callable[[str], object]) -> bool:
    return (
        is_text(node) and not isinstance(node.value, float) and split(str(node.value)) is not None
    )


def _is_capability(node: ScalarNode) -> bool:
    return not isinstance(node.value, bool) and bool(
        re.fullmatch(r"\s*\d+\.\d+\s*", str(node.value))
    )


SHAPES: Mapping[str, ShapeRule] = {
    "whole_range_text": _range_text("a number or a range such as 2..8", to_int),
    "size_range_text": _range_text("a size or a range such as 16GB..80GB", read_size_mib),
    "vendor": text(
        "a vendor",
        check=lambda value: "" if value.lower() in VENDORS else f"unknown vendor {shown(value)}",
    ),
    "arch": text(
        "x86 or arm",
        check=lambda value: (
            "" if value.lower() in _ARCHITECTURES else f"{shown(value)} is not supported"
        ),
    ),
    "capability_text": fitting("a capability such as 8.0", _is_capability),
    "gpu_text": fitting(
        "accelerators such as H100:8, A100:40GB..80GB:1..4 or nvidia:24GB",
        lambda node: _splits(node, split_gpu),
    ),
    "cpu_text": fitting("CPUs such as 8, 8.. or arm:8", lambda node: _splits(node, split_cpu)),
}
RULES = (_check_whole_bounds, _check_size_bounds)


def read_gpu(node: Node | None) -> GpuRequest | None:
    """Read an accelerator request, which is a string or a table and has already been checked.
    Returns None if `node` is None.
    """
    if isinstance(node, ScalarNode):
        return split_gpu(str(node.value))
    if not isinstance(node, MapNode):
        return None
    name = child(node, "name")
    many = name.items if isinstance(name, ListNode) else (name,) if name is not None else ()
    return GpuRequest(
        vendor=VENDORS.get((text_at(node, "vendor") or "").lower(), ""),
        names=tuple(
            str(each.value).removeprefix("tpu-") for each in many if isinstance(each, ScalarNode)
        ),
        memory=_as_range(child(node, "memory")),
        count=_as_range(child(node, "count")),
    )


def _as_range(node: Node | None) -> str:
    if isinstance(node, ScalarNode):
        return str(node.value)
    return "" if node is None else f"{text_at(node, 'min') or ''}..{text_at(node, 'max') or ''}"
