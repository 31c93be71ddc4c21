"""dstack's rules for `resources`, and parsers for ranges, CPUs, accelerators and sizes."""

import re
from collections.abc import Callable, Mapping

from cavvy.domain.values import Struct
from cavvy.importers.dstack.scalars import is_text, read_size_mib, text
from cavvy.importers.readers import child, text_at
from cavvy.importers.shapes import ScalarRule, ShapeRule, fitting
from cavvy.spec.problems import ProblemNotes, shown
from cavvy.spec.tree import ListNode, MapNode, Node, ScalarNode

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
