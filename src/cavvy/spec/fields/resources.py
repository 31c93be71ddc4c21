"""The section `resources`: the requirements for each node, with the accelerators, written in one
line or as a table. The field `topology`: which nodes of a task are close to each other.
"""

import json
import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any

from cavvy.domain.tasks import (
    LABEL_PATTERN,
    AcceleratorNeed,
    Fabric,
    NetworkNeed,
    NodeCheck,
    ProviderOptions,
    ResourceSpec,
    SpotPolicy,
    TopologyNeed,
)
from cavvy.domain.units import parse_rate
from cavvy.domain.values import Struct, field, replace
from cavvy.spec.fields.amounts import CPUS, DISK_SIZE, MEMORY, speed_kind
from cavvy.spec.fields.kinds import (
    FLAG,
    EitherKind,
    FieldSpec,
    ListKind,
    ScalarKind,
    Schema,
    SectionReader,
    ValueKind,
    WrongValue,
    choice,
    either,
    filled,
    matching,
    number,
    read_text,
    section,
    text_kind,
    whole,
)
from cavvy.spec.problems import ProblemNotes, shown
from cavvy.spec.tree import MapNode, Node, ScalarNode, describe, to_value


class ShareIsolation(StrEnum):
    """Whether a part of a GPU must be protected from the work on the rest of the GPU."""

    NONE = "none"
    REQUIRED = "required"


def _accelerators(text: str) -> tuple[AcceleratorNeed, ...]:
    from cavvy.catalog.needs import NeedError, parse_accelerator

    try:
        return parse_accelerator(text)
    except NeedError as error:
        hint = error.hint or ""
        raise WrongValue(str(error).removesuffix(f"; {hint}"), suggestion=hint) from error


def read_device(text: str) -> str:
    """Parse the devices of one node: accelerators such as A100:8 or A100:80GB:8, or CPUs such as
    cpu or cpu:16. Returns a key of `work.rates`. Raises WrongValue.
    """
    if re.fullmatch(r"cpu(:[1-9][0-9]{0,4})?", plain := filled(text).strip().lower()):
        return plain
    key = name_device(_accelerators(text))
    if key is None:
        raise WrongValue(f"{shown(text)} does not state exactly one accelerator and count")
    return key


def name_device(needs: Sequence[AcceleratorNeed]) -> str | None:
    """Return the key of `work.rates` that belongs to `needs`, such as A100-80GB:8. Returns None if
    `needs` accepts several accelerators or counts.
    """
    from cavvy.catalog.accelerators import find_accelerator

    if len(needs) != 1 or not needs[0].name or not find_accelerator(needs[0].name):
        return None
    [need] = needs
    low, high = need.memory_min_mib, need.memory_max_mib
    if need.count_max not in (None, need.count_min) or low != high or need.part < 1:
        return None
    return f"{need.name}{f'-{low // 1024}GB' if low else ''}:{need.count_min}"


def _no_colon(text: str) -> str:
    if ":" in filled(text):
        raise WrongValue(
            f"{shown(text)} contains a colon, but `name` accepts only an accelerator's name",
            suggestion="write `gpu: NAME:COUNT`, or use the keys `name`, `memory` and `count`",
        )
    return text.strip()


def _read_share(text: str) -> str:
    plain = _no_colon(text)
    if re.fullmatch(r"0?\.[0-9]+|[0-9]+/[0-9]+|[1-9]g\.[1-9][0-9]*gb.*", plain, re.IGNORECASE):
        return plain
    if "=" in plain or not re.fullmatch(r"[0-9].*[a-z]", plain, re.IGNORECASE):
        raise WrongValue(
            f"{shown(text)} is not a part of one GPU",
            suggestion="write a fraction such as 0.25, or memory with its unit, such as 10GB; "
            "`count` is for whole GPUs",
        )
    return f"share={plain}"


def _build_gpu(table: SectionReader) -> tuple[AcceleratorNeed, ...]:
    names, count, memory = table.get("name"), table.get("count"), table.get("memory")
    share: str | None = table.get("share")
    if share and count:
        table.wrong("share", "`count` and `share` exclude each other", suggestion="delete `count`")
        return ()
    isolated = "isolated" if table.get("isolation") is ShareIsolation.REQUIRED else None
    if memory and re.fullmatch(r"[0-9.]+", memory) and ".." not in memory:
        # In the table form, a number without a unit is in GiB, as in other keys; in the one-line
        # form, it is a count.
        memory += "GB"
    if table.has("name") and not names:
        return ()
    needs: list[AcceleratorNeed] = []
    for name in names or ("any",):
        try:
            parts = (name, memory, count or share, isolated)
            needs += _accelerators(":".join(part for part in parts if part))
        except WrongValue as error:
            table.notes.add(table.node.mark, str(error), suggestion=error.suggestion)
    return tuple(needs)


_TABLE = section(
    "resources.gpu",
    _build_gpu,
    name=ListKind(text_kind("an accelerator's name such as H100", _no_colon), single=True),
    count=text_kind("a count such as 8 or 1..4", numbers=True),
    memory=text_kind("memory such as 40GB or 40GB..80GB", _no_colon, numbers=True),
    share=text_kind(
        "the part of one GPU, as a fraction such as 0.25, memory such as 10GB, or a MIG profile",
        _read_share,
        numbers=True,
    ),
    isolation=choice(ShareIsolation),
)
_LINE = text_kind(
    "an accelerator such as H100:8, A100:40GB..80GB:1..4 or A100:80GB, or a list of alternatives",
    lambda text: _accelerators(filled(text)),
)
ACCELERATORS = ListKind(EitherKind((_LINE, _TABLE)), single=True, flat=True)


def _read_spot(node: ScalarNode) -> SpotPolicy:
    meant = {True: "only", False: "never"}.get(node.value) if isinstance(node.value, bool) else None
    meant = meant or {"yes": "only", "on": "only", "no": "never", "off": "never"}.get(
        node.text.lower()
    )
    if meant:
        both = " (or `auto`: whichever costs less in total)" if meant == "only" else ""
        raise WrongValue(
            f"{describe(node)} is ambiguous", suggestion=f"write `spot: {meant}`{both}"
        )
    policy: SpotPolicy = _SPOT.parse(node)
    return policy


def _read_instance(text: str) -> str:
    from cavvy.catalog.tables import find_retired

    name = filled(text).strip()
    retired = find_retired(name)
    if retired is not None:
        since = f" (since {retired.since})" if retired.since else ""
        hint = f"write `instance: {retired.successor}`, which replaces this type"
        raise WrongValue(f"{name} is retired{since}", suggestion=hint, expected="")
    return name


def _read_place(text: str) -> str:
    pattern = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
    if not pattern.fullmatch(text):
        lower = text.strip().lower()
        raise WrongValue(
            f"{shown(text)} is not a valid name",
            suggestion=f"did you mean {lower}?" if pattern.fullmatch(lower) else "",
        )
    return text


def _read_region(text: str) -> str:
    """Return the name of a region. A region of a batch system is a cluster, and may name one of its
    partitions, as in cluster/partition.
    """
    for part in text.split("/", 1):
        _read_place(part)
    return text


_SPOT = choice(
    SpotPolicy, {"always": SpotPolicy.ONLY, "required": SpotPolicy.ONLY, "none": SpotPolicy.NEVER}
)
_DISK = section(
    "resources.disk",
    lambda table: (table.get("size"), table.get("type")),
    size=DISK_SIZE,
    type=text_kind("the provider's name for a disk type, such as gp3", _read_place),
)
_SPEED = speed_kind("100Gbps")
_NAMED = text_kind(
    "a name or id that the provider uses",
    matching(r"[A-Za-z0-9][A-Za-z0-9 ._:/@+=-]{0,254}", "is not a valid name"),
)
_NETWORK = section(
    "resources.network",
    lambda table: table.make(NetworkNeed),
    min=FieldSpec(_SPEED, to=("min_mbps",)),
    fabric=choice(Fabric, {"ib": Fabric.INFINIBAND, "tcpxo": Fabric.TCPX}),
    vpc=_NAMED,
    subnet=_NAMED,
    security_groups=ListKind(_NAMED, single=True),
    key=_NAMED,
    public_ip=FLAG,
)
_CHECK = section(
    "resources.check",
    lambda table: table.make(NodeCheck),
    share=number("a share from 0.05 to 1", 0.05, 1),
    link=FieldSpec(speed_kind("10Gbps"), to=("link_mbps",)),
)
_GPU = FieldSpec(ACCELERATORS, to=("accelerators",))


class _OptionsKind(Struct, frozen=True):
    """A table with one table of options for each provider. Only the provider can check the keys of
    its options.
    """

    words: str = "providers' names, each with a table of its options"
    schema: Schema = field(
        default_factory=lambda: {"type": "object", "additionalProperties": {"type": "object"}}
    )

    def takes(self, node: Node) -> bool:
        return isinstance(node, MapNode)

    def read(self, node: Node, notes: ProblemNotes) -> tuple[ProviderOptions, ...] | None:
        pairs = node.entries if isinstance(node, MapNode) else ()
        if not pairs or not all(isinstance(value, MapNode) for _, value in pairs):
            notes.add(node.mark, f"{describe(node)} is not allowed here", expected=self.words)
            return None
        return tuple(
            ProviderOptions(provider=key.text, values=json.dumps(to_value(value)))
            for key, value in pairs
        )


# The keys that are allowed in the section and in each of its alternatives.
_ONE: dict[str, ValueKind | FieldSpec] = {
    "instance": text_kind("an instance type's name such as p5.48xlarge", _read_instance),
    "gpu": _GPU,
    "accelerator": _GPU,
    "cpu": FieldSpec(CPUS, to=("cpus_min", "cpus_max")),
    "memory": FieldSpec(MEMORY, to=("memory_min_mib", "memory_max_mib", "memory_per_cpu_mib")),
    "disk": FieldSpec(
        either(DISK_SIZE, lambda size: (size, None), _DISK), to=("disk_gib", "disk_type")
    ),
    "spot": ScalarKind("never, auto or only", _read_spot, _SPOT.schema),
    "providers": ListKind(text_kind("a provider's name", _read_place), single=True),
    "regions": ListKind(
        text_kind("a region's name, or an area such as eu, us or asia", _read_region), single=True
    ),
    "network": either(_SPEED, lambda mbps: NetworkNeed(min_mbps=mbps), _NETWORK),
    "max_price": FieldSpec(
        ScalarKind(
            "dollars per hour such as 15 or $15/h",
            lambda node: parse_rate(read_text(node)),
            {"type": ["number", "string"]},
        ),
        to=("max_rate",),
    ),
    "check": either(FLAG, lambda wanted: NodeCheck() if wanted else None, _CHECK),
    "options": _OptionsKind(),
}
# the values by attribute, and the set of keys that are present
Alternative = tuple[dict[str, Any], frozenset[str]]


def _read_one(table: SectionReader) -> Alternative:
    if table.has_all("gpu", "accelerator"):
        table.wrong(
            "accelerator", "`gpu` and `accelerator` are the same", suggestion="keep one of them"
        )
    return table.values(), frozenset(filter(table.has, _ONE))


# Each pass of the queue compares all offers with each alternative of each waiting job.
MOST_ALTERNATIVES = 100


def count_alternatives(choices: Iterable[ResourceSpec]) -> int:
    """Return the number of alternatives. A choice with several alternative accelerators counts once
    for each of them.
    """
    return sum(max(1, len(each.accelerators)) for each in choices)


def check_count(table: SectionReader, name: str, most: int) -> None:
    """Add a problem if a list has more than `most` entries."""
    found = len(table.get(name) or ())
    if found > most:
        table.wrong(name, f"{found:,} entries are too many", expected=f"at most {most:,} entries")


def _build(table: SectionReader) -> ResourceSpec:
    base, _ = _read_one(table)
    if table.has_all("any_of", "ordered"):
        table.wrong(
            "ordered",
            "`any_of` and `ordered` cannot be used together",
            suggestion="keep one of them",
        )
    choices: tuple[Alternative, ...] = table.get("any_of") or table.get("ordered") or ()
    found = tuple(ResourceSpec(**{**base, **said}) for said, _ in choices)
    count = count_alternatives(found or (ResourceSpec(**base),))
    if count > MOST_ALTERNATIVES:
        name = next(
            (each for each in ("any_of", "ordered", "gpu") if table.has(each)), "accelerator"
        )
        table.wrong(
            name,
            f"{count:,} alternatives are too many",
            expected=f"at most {MOST_ALTERNATIVES} alternatives",
        )
    if len(found) < 2:
        return found[0] if found else ResourceSpec(**base)
    return replace(found[0], any_of=found, ordered=table.has("ordered"))


def _alternatives(path: str) -> FieldSpec:
    return FieldSpec(ListKind(section(path, _read_one, **_ONE)), to=())


RESOURCES = section(
    "resources",
    _build,
    **_ONE,
    any_of=_alternatives("resources.any_of"),
    ordered=_alternatives("resources.ordered"),
)

_LABEL = text_kind(
    "a label of nodes such as rack",
    matching(
        LABEL_PATTERN,
        "cannot be a label",
        expected="letters, digits and . _ / -, at most 253",
    ),
)


def _build_topology(table: SectionReader) -> TopologyNeed | None:
    need = table.make(TopologyNeed)
    if need is None:
        return None
    if {key.text for key, _ in table.node.entries} <= {"slice"}:
        hint = "write, for example, `same: rack`"
        table.wrong("slice", "`topology` names no label", suggestion=hint)
    if need.same is not None and need.same == need.prefer:
        table.wrong("prefer", f"`same` already requires one {need.same}", suggestion="delete it")
    return need


def object_to_topology(need: TopologyNeed | None, nodes: int) -> str:
    """Return why a task with this number of nodes cannot have the topology, or ""."""
    if need is None:
        return ""
    if nodes == 1:
        return "`topology` has no meaning for a task of one node"
    if need.slice is not None and nodes % need.slice:
        sizes = [size for size in range(2, nodes + 1) if nodes % size == 0]
        close = sorted(sizes, key=lambda size: abs(size - (need.slice or 0)))[:2]
        return (
            f"{nodes:,} nodes cannot be divided into slices of {need.slice:,}; sizes that divide "
            f"{nodes:,} are, for example, {' and '.join(f'{each:,}' for each in sorted(close))}"
        )
    return ""


TOPOLOGY_HINT = "change `nodes`, or `topology`"

TOPOLOGY = section("topology", _build_topology, same=_LABEL, prefer=_LABEL, slice=whole(1, 10_000))
