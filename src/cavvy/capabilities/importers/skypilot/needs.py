"""SkyPilot's rules for `resources`, and parsers for sizes, counts and accelerators.

Rules for scalars, which follow the types of JSON Schema, as SkyPilot does: a number is not a
string, and true is not a number.
"""

import math
import re
from collections.abc import Iterable, Mapping
from functools import partial

from cavvy.capabilities.importers import shapes
from cavvy.capabilities.importers.readers import child, flag_at, items
from cavvy.capabilities.importers.shapes import ShapeRule, is_null
from cavvy.spec.problems import ProblemNotes, listed, nearest, shown
from cavvy.spec.tree import ListNode, MapNode, Node, ScalarNode

_CLOUDS = (
    "aws azure gcp ibm lambda scp oci kubernetes runpod vast vsphere cudo fluidstack paperspace "
    "primeintellect do "
    "nebius ssh slurm hyperbolic seeweb shadeform yotta mithril verda"
)
CLOUDS = _CLOUDS.split()
DEFAULT_DISK_GIB = 256  # SkyPilot treats this size as if it were not set.
_UNITS = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "p": 2**50}
_GPU_MEMORY = re.compile(r"[0-9]+[GgMmTt][Bb]\+?")
_VENDORS = ("nvidia", "amd", "intel", "google", "aws")
# (number, suffix). Without a suffix, the number is exact. "+" means at least this number, and "x"
# means this number for each CPU.
Amount = tuple[float, str]

text = partial(shapes.make_text, shapes.is_string)
FLAG = shapes.make_flag(lambda node: isinstance(node.value, bool))
TEXT = text()


def choice(names: Iterable[str], *, any_case: bool = True) -> shapes.ScalarRule:
    """Return a rule that permits only the given words."""
    known = list(names)

    def check(value: str) -> str:
        if value in known or (any_case and value.lower() in {name.lower() for name in known}):
            return ""
        return shapes.no_choice(shown(value), value, known)

    return text(listed(known), check=check)


def whole(
    low: float | None = None, high: float | None = None, *, exact: bool = False
) -> shapes.ScalarRule:
    """Return a rule for a whole number from `low` to `high`. With `exact`, 2.0 is rejected,
    although JSON Schema accepts it as a whole number.
    """

    def test(node: ScalarNode) -> str:
        value = node.value
        if isinstance(value, float) and value.is_integer() and not exact:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            return f"{shapes.describe_value(node)} is not a whole number"
        return _check_bounds(value, low, high)

    return shapes.ScalarRule(_bounded("a whole number", low, high), test)


def number(
    low: float | None = None, high: float | None = None, *, above: bool = False
) -> shapes.ScalarRule:
    """Return a rule for a number from `low` to `high`. With `above`, the number must be greater
    than `low`.
    """

    def test(node: ScalarNode) -> str:
        if isinstance(node.value, bool) or not isinstance(node.value, int | float):
            return f"{shapes.describe_value(node)} is not a number"
        if above and low is not None and node.value <= low:
            return f"{node.text} is too small"
        return _check_bounds(node.value, low, high)

    return shapes.ScalarRule(
        f"a number above {low:g}" if above else _bounded("a number", low, high), test
    )


def _check_bounds(value: float, low: float | None, high: float | None) -> str:
    """Return the error message for a number outside its bounds; "" for a number within its
    bounds.
    """
    if low is not None and not value >= low:
        return f"{value} is too small"
    if high is not None and not value <= high:
        return f"{value} is too large"
    return ""


def _bounded(words: str, low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"{words} from {low:g} to {high:g}"
    return f"{words} of at least {low:g}" if low is not None else words


def read_cpus(value: str) -> Amount | None:
    """Parse a number of CPUs such as `8` or `8+`. Returns None if the string is not a positive
    number.
    """
    return _amount(value.removesuffix("+"), "+" if value.endswith("+") else "", "")


def read_memory(value: str) -> Amount | None:
    """Parse memory such as `16`, `16+`, `16GB` or `16GB+` into GiB, or `4x` into GiB for each CPU.
    Returns None if the string is not an amount of memory.
    """
    plus = value.endswith("+")
    rest = value.removesuffix("+")
    times = rest.endswith("x")
    if times and plus:
        return None
    rest = rest.removesuffix("x")
    match = re.fullmatch(r"(.*?)([kmgtpKMGTP])[bBiI]", rest)
    return _amount(
        match[1] if match else rest,
        "x" if times else "+" if plus else "",
        match[2] if match else "",
    )


def _amount(number: str, suffix: str, unit: str) -> Amount | None:
    try:
        value = float(number) * (_UNITS[unit.lower()] / _UNITS["g"] if unit else 1)
    except ValueError:
        return None
    return (value, suffix) if 0 < value < math.inf else None


def read_size(value: str) -> int | None:
    """Parse a size such as `100`, `100GB` or `1TB` into GiB. Returns None if the size is not a
    whole number of GiB.
    """
    match = re.fullmatch(r"([0-9]{1,12})(?:([kmgtpKMGTP])[bBiI])?", value)
    if match is None:
        return None
    size = int(match[1]) * _UNITS[(match[2] or "g").lower()]
    return size // _UNITS["g"] if size % _UNITS["g"] == 0 and size else None


def split_accelerator(value: str) -> tuple[str, str, float] | None:
    """Split `A100:8`, `80GB+` or `NVIDIA:24GB:2` into name, memory and count. Returns None if the
    string is not an accelerator request.
    """
    parts = value.split(":")
    name, memory, count = parts[0], "", "1"
    match parts:
        case [vendor, memory, count] if vendor.lower() in _VENDORS and _GPU_MEMORY.fullmatch(
            memory
        ):
            name = vendor
        case [memory, count] if _GPU_MEMORY.fullmatch(memory):
            name = ""
        case [vendor, memory] if vendor.lower() in _VENDORS and _GPU_MEMORY.fullmatch(memory):
            name = vendor
        case [memory] if _GPU_MEMORY.fullmatch(memory):
            name = ""
        case [name, count]:
            memory = ""
        case [name]:
            memory = ""
        case _:
            return None
    if (memory and not count.isdecimal()) or not (memory or name):
        return None
    try:
        number = float(count)
    except ValueError:
        return None
    return (name, memory, number) if 0 < number < 1e6 else None


def _check_infra(value: str) -> str:
    parts = value.strip().strip("/").split("/")
    cloud = parts[0].lower()
    if value != value.strip() or value.startswith("/") or value.endswith("/") or not all(parts):
        return f"{shown(value)} has an empty part"
    if cloud in ("k8s", "kubernetes"):
        return ""
    if cloud != "*" and cloud not in CLOUDS:
        close = nearest(cloud, CLOUDS)
        return f"unknown cloud {shown(parts[0])}" + (f"; did you mean {close}?" if close else "")
    return f"{shown(value)} has more than three parts" if len(parts) > 3 else ""


def list_ports(value: object) -> list[str]:
    """Split a string such as `8080`, `8080-8090` or `8000,9000` into its ports and ranges."""
    return [part.strip() for part in str(value).split(",") if part.strip()]


def _check_ports(value: str) -> str:
    for part in list_ports(value):
        ends = part.split("-")
        if len(ends) > 2 or not all(end.isdecimal() and 0 < int(end[:6]) <= 65_535 for end in ends):
            return f"{shown(part)} is not a port"
        if len(ends) == 2 and int(ends[0]) > int(ends[1]):
            return f"{shown(part)} is a reversed range"
    return ""


def _is_local_disk(value: str) -> bool:
    mode, colon, size = value.lower().strip().partition(":")
    if not colon and mode not in ("nvme", "ssd"):
        mode, size = "nvme", mode
    return (
        mode in ("nvme", "ssd")
        and bool(value)
        and (not (colon or size) or _amount(size.rstrip("+"), "", "") is not None)
    )


_ACCELERATOR = text("an accelerator such as H100:8, 80GB+ or NVIDIA:24GB:2", fits=split_accelerator)


SHAPES: Mapping[str, ShapeRule] = {
    "cloud": choice(CLOUDS),
    "infra": text(
        "a location such as aws, gcp/us-central1, k8s/context or */us-east-1", check=_check_infra
    ),
    "disk_size": text("a size such as 100GB", fits=read_size),
    "accelerator": _ACCELERATOR,
    "port_range": text("a port or a range such as 8080-8090", check=_check_ports),
    "cpus": text("a number such as 8 or 8+", fits=read_cpus),
    "memory": text("memory such as 32, 32+ or 32GB", fits=read_memory),
    "local_disk": text("a disk such as nvme:1000+", fits=_is_local_disk),
}


def _check_volume(table: MapNode, notes: ProblemNotes) -> None:
    kind = child(table, "storage_type")
    of_node = isinstance(kind, ScalarNode) and kind.text.lower() == "instance"
    if not of_node and table.get("name") is None:
        notes.add(
            table.mark,
            "a network volume needs a `name`",
            expected="`name`, or `storage_type: instance`",
        )


def _check_table(table: MapNode, notes: ProblemNotes) -> None:
    for key, value in table.entries:
        text = (
            key.text
            if is_null(value) or not isinstance(value, ScalarNode)
            else f"{key.text}:{value.value}"
        )
        if not split_accelerator(text):
            notes.add(key.mark, f"cannot use {shown(text)}", expected=_ACCELERATOR.words)


def _check_needs(table: MapNode, notes: ProblemNotes) -> None:
    any_of, ordered = child(table, "any_of"), child(table, "ordered")
    _check_choices(table, any_of, ordered, notes)
    alternatives = [
        each for node in (any_of, ordered) if isinstance(node, ListNode) for each in node.items
    ]
    for each in alternatives or [table]:
        alternative = each if isinstance(each, MapNode) else table
        _check_place(table, alternative, notes)
        _check_accelerator_place(table, alternative, notes)
        _check_instance(table, alternative, notes)
    priorities = [
        _find(table, each, "priority") for each in alternatives if isinstance(each, MapNode)
    ]
    known = [each for each in priorities if isinstance(each, ScalarNode)]
    for each in known:
        if each.value != known[0].value:
            notes.add(
                each.mark,
                f"the alternatives have the priorities {known[0].text} and {each.text}",
                expected="one",
            )


def _check_choices(
    table: MapNode, any_of: Node | None, ordered: Node | None, notes: ProblemNotes
) -> None:
    """Add a problem if the table lists alternatives in two ways that exclude each other."""
    if any_of is not None and ordered is not None:
        notes.add(
            ordered.mark,
            "`any_of` and `ordered` cannot be used together",
            suggestion="keep one of them",
        )
    several = child(table, "accelerators")
    if isinstance(several, ListNode | MapNode) and _length(several) > 1:
        if ordered is not None and _length(ordered):
            notes.add(several.mark, "several accelerators and `ordered` cannot be used together")
        elif any_of is not None and _length(any_of) and isinstance(several, ListNode):
            notes.add(
                several.mark,
                "a list of accelerators, which states an order, and `any_of`, "
                "which states none, cannot be used together",
            )


def _check_place(table: MapNode, alternative: MapNode, notes: ProblemNotes) -> None:
    infra = _find(table, alternative, "infra")
    for key in ("cloud", "region", "zone"):
        other = _find(table, alternative, key)
        if infra is not None and other is not None:
            hint = "write the whole location into `infra`, for example aws/us-east-1"
            notes.add(other.mark, f"`{key}` and `infra` cannot be used together", suggestion=hint)


def _check_accelerator_place(table: MapNode, alternative: MapNode, notes: ProblemNotes) -> None:
    cloud = _find_cloud(table, alternative)
    for name in _list_tpus(table, alternative):
        if cloud not in ("gcp", "kubernetes", "k8s", "*", ""):
            notes.add(
                name.mark,
                f"{name.text} is a TPU, which {cloud} does not have",
                expected="gcp or kubernetes",
            )


def _check_instance(table: MapNode, alternative: MapNode, notes: ProblemNotes) -> None:
    node, options = (
        _find(table, alternative, key) for key in ("instance_type", "accelerator_args")
    )
    is_vm = child(options, "tpu_vm") is None or flag_at(options, "tpu_vm")
    tpus = [each.text.partition(":")[0] for each in _list_tpus(table, alternative)]
    # TPU names with these endings are those of GKE. All others are those of GCP.
    of_gcp = [name for name in tpus if not name.endswith(("slice", "device"))]
    if (
        not isinstance(node, ScalarNode)
        or not of_gcp
        or _find_cloud(table, alternative) in ("kubernetes", "k8s")
    ):
        return
    if is_vm and node.text != "TPU-VM":
        notes.add(
            node.mark,
            "`instance_type` and a TPU, which is a separate machine, cannot be used together",
        )


def _find(table: MapNode, alternative: MapNode, key: str) -> Node | None:
    return child(alternative, key) or child(table, key)


def _find_cloud(table: MapNode, alternative: MapNode) -> str:
    place = _find(table, alternative, "infra") or _find(table, alternative, "cloud")
    return place.text.split("/")[0].lower() if isinstance(place, ScalarNode) else ""


def _list_tpus(table: MapNode, alternative: MapNode) -> list[ScalarNode]:
    node = _find(table, alternative, "accelerators")
    names = (
        [key for key, _ in node.entries] if isinstance(node, MapNode) else items(node) or (node,)
    )
    return [each for each in names if isinstance(each, ScalarNode) and "tpu" in each.text.lower()]


def _length(node: object) -> int:
    return (
        len(node.items)
        if isinstance(node, ListNode)
        else len(node.entries)
        if isinstance(node, MapNode)
        else 0
    )


ALIASES: Mapping[str, str] = {"gpus": "accelerators"}


RULES = (_check_needs, _check_table, _check_volume)


def unalias(table: MapNode, notes: ProblemNotes) -> MapNode:
    """Replace older names of keys with current names, in the table and in its alternatives."""
    found = []
    for key, value in table.entries:
        known = ALIASES.get(key.text)
        if known is not None and table.get(known) is not None:
            notes.add(
                key.mark, f"`{key.text}` and `{known}` are the same", suggestion="keep one of them"
            )
            continue
        name = key if known is None else ScalarNode(mark=key.mark, text=known, value=known)
        if key.text in ("any_of", "ordered") and isinstance(value, ListNode):
            items = tuple(
                unalias(each, notes) if isinstance(each, MapNode) else each for each in value.items
            )
            value = ListNode(mark=value.mark, items=items)
        found.append((name, value))
    return MapNode(mark=table.mark, entries=tuple(found))
