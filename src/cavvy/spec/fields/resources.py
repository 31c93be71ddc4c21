"""The `resources` section: what each node must have."""

import re
from dataclasses import replace
from typing import Any

from cavvy.domain.tasks import NetworkNeed, NodeCheck, Resources, SpotPolicy
from cavvy.domain.units import parse_rate
from cavvy.spec.fields.accelerators import ACCELERATORS
from cavvy.spec.fields.amounts import CPUS, DISK_SIZE, MEMORY, speed_kind
from cavvy.spec.fields.kinds import (
    FLAG,
    FieldSpec,
    ListKind,
    ScalarKind,
    SectionReader,
    SectionSpec,
    WrongValue,
    choice,
    either,
    filled,
    hints_for,
    matching,
    number,
    read_text,
    text_kind,
)
from cavvy.spec.problems import shown
from cavvy.spec.tree import ScalarNode, describe


def _read_spot(node: ScalarNode) -> SpotPolicy:
    meant = {True: "only", False: "never"}.get(node.value) if isinstance(node.value, bool) else None
    meant = meant or {"yes": "only", "on": "only", "no": "never", "off": "never"}.get(
        node.text.lower()
    )
    if meant:
        both = " (or `auto`: whichever is cheaper in the end)" if meant == "only" else ""
        raise WrongValue(
            f"{describe(node)} says too little", suggestion=f"write `spot: {meant}`{both}"
        )
    policy: SpotPolicy = _SPOT.parse(node)
    return policy


def _read_instance(text: str) -> str:
    from cavvy.catalog.retired import find_retired

    name = filled(text).strip()
    retired = find_retired(name)
    if retired is not None:
        since = f" (since {retired.since})" if retired.since else ""
        hint = f"write `instance: {retired.successor}`, its successor"
        raise WrongValue(f"{name} is retired{since}", suggestion=hint, expected="")
    return name


def _read_place(text: str) -> str:
    pattern = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
    if not pattern.fullmatch(text):
        lower = text.strip().lower()
        raise WrongValue(
            f"{shown(text)} cannot be such a name",
            suggestion=f"did you mean {lower}?" if pattern.fullmatch(lower) else "",
        )
    return text


_SPOT = choice(
    SpotPolicy, {"always": SpotPolicy.ONLY, "required": SpotPolicy.ONLY, "none": SpotPolicy.NEVER}
)
_DISK = SectionSpec(
    "resources.disk",
    "The disk of each node as a table.",
    (
        FieldSpec("size", DISK_SIZE, "The size. A bare number is GiB.", "200GB"),
        FieldSpec(
            "type",
            text_kind("a disk type by its provider's name, such as gp3", _read_place),
            "The type, by its provider's name. Refused where a provider has no choice of disks.",
            "gp3",
        ),
    ),
    lambda table: (table.get("size"), table.get("type")),
    {"tier": "write `type`, with the provider's own name of it"},
)
_SPEED = speed_kind("100Gbps")
_NAMED = text_kind(
    "a name or id as its provider knows it",
    matching(r"[A-Za-z0-9][A-Za-z0-9 ._:/@+=-]{0,254}", "cannot be such a name"),
)
_NETWORK = SectionSpec(
    "resources.network",
    "The network of each node as a table.",
    (
        FieldSpec(
            "min", _SPEED, "The least speed of a node's network.", "100Gbps", to=("min_mbps",)
        ),
        FieldSpec("vpc", _NAMED, "Nodes are in this VPC of yours.", "vpc-0a1b"),
        FieldSpec("subnet", _NAMED, "Nodes are in this subnet of yours.", "subnet-0a1b"),
        FieldSpec(
            "security_groups",
            ListKind(_NAMED, single=True),
            "Nodes have these security groups of yours. Left out: the provider makes one and "
            "removes it afterwards.",
            "[sg-0a1b]",
        ),
        FieldSpec(
            "key", _NAMED, "A key pair that the provider knows; nodes let it in.", "my-laptop"
        ),
        FieldSpec(
            "public_ip",
            FLAG,
            "Whether each node gets a public address.",
            "false",
            "as the subnet is set up",
        ),
    ),
    lambda table: table.make(NetworkNeed),
    hints_for(
        {
            "write `vpc`": "vpc_id",
            "write `subnet`": "subnet_id",
            "write `public_ip`": "public_address",
        }
    ),
)
_CHECK = SectionSpec(
    "resources.check",
    "The check of each node at its boot as a table.",
    (
        FieldSpec(
            "share",
            number("a share from 0.05 to 1", 0.05, 1),
            "What each GPU must reach of the memory bandwidth on its kind's data sheet.",
            "0.7",
            "0.6",
        ),
        FieldSpec(
            "link",
            speed_kind("10Gbps"),
            "The least that each node must receive from another of its gang.",
            "10Gbps",
            "that share of `network`, else none",
            to=("link_mbps",),
        ),
    ),
    lambda table: table.make(NodeCheck),
    hints_for({"write `share`": "fraction", "write `link`": "network links"}),
)
_GPU = FieldSpec(
    "gpu",
    ACCELERATORS,
    "Accelerators of each node: NAME, NAME:COUNT, NAME:MEMORY or NAME:MEMORY:COUNT, where memory "
    "and count may be ranges; a list of alternatives, any of which will do; or a table.",
    "[H100:8, A100:80GB:8]",
    "none",
    to=("accelerators",),
)
# What the whole section and each alternative may say.
_ONE = (
    FieldSpec(
        "instance",
        text_kind("an instance type's name such as p5.48xlarge", _read_instance),
        "One exact instance type by its provider's name.",
        "p5.48xlarge",
    ),
    _GPU,
    replace(
        _GPU,
        name="accelerator",
        help="The same as `gpu`, for those that are none.",
        sample="TPU-v5e:8",
    ),
    FieldSpec(
        "cpu",
        CPUS,
        "CPUs of each node: at least so many, or a range.",
        "8..32",
        to=("cpus_min", "cpus_max"),
    ),
    FieldSpec(
        "memory",
        MEMORY,
        "Memory of each node: at least so much, or a range. A bare number is GiB; `4x` is at least "
        "four GiB for each CPU that the node has.",
        "64GB",
        to=("memory_min_mib", "memory_max_mib", "memory_per_cpu_mib"),
    ),
    FieldSpec(
        "disk",
        either(DISK_SIZE, lambda size: (size, None), _DISK),
        "Disk of each node: a size, or a table.",
        "{size: 200GB, type: gp3}",
        to=("disk_gib", "disk_type"),
    ),
    FieldSpec(
        "spot",
        ScalarKind("never, auto or only", _read_spot, _SPOT.schema),
        "Whether to use capacity that can be taken away at any time: `auto` takes whichever is "
        "cheaper in the end.",
        "auto",
        "never",
    ),
    FieldSpec(
        "providers",
        ListKind(text_kind("a provider's name", _read_place), single=True),
        "Only these providers.",
        "[local]",
        "all that are configured",
    ),
    FieldSpec(
        "regions",
        ListKind(
            text_kind("a region's name, or an area such as eu, us or asia", _read_place),
            single=True,
        ),
        "Only these regions: names, or areas such as eu, us and asia.",
        "[eu]",
        "all",
    ),
    FieldSpec(
        "network",
        either(_SPEED, lambda mbps: NetworkNeed(min_mbps=mbps), _NETWORK),
        "The least network speed of each node. Refused where a provider does not know its own.",
        "100Gbps",
    ),
    FieldSpec(
        "max_price",
        ScalarKind(
            "dollars per hour such as 15 or $15/h",
            lambda node: parse_rate(read_text(node)),
            {"type": ["number", "string"]},
        ),
        "The most that one node may cost per hour, in US dollars.",
        "$15/h",
        to=("max_rate",),
    ),
    FieldSpec(
        "check",
        either(FLAG, lambda wanted: NodeCheck() if wanted else None, _CHECK),
        "Whether each node shows, before the work starts, that its GPUs are all there, keep what "
        "is written to their memory and are about as fast as their kind, and that the links "
        "between nodes are: one that does not is given back and avoided. It takes some seconds.",
        "true",
        "false",
    ),
)
_HINTS = hints_for(
    {
        "write `gpu`, as in `gpu: H100:8`": "accelerators gpus",
        "write `accelerator`, as in `accelerator: TPU-v5e:8`": "tpu",
        "write `cpu`": "cpus vcpus",
        "write `memory`": "mem ram",
        "write `disk`, as in `disk: 200GB`": "disk_size",
        "write `disk: {size: …, type: …}`": "disk_tier",
        "there is no such key; the whole of a node's shared memory is the task's": "shm_size",
        "write `instance`": "instance_type",
        "write `instance`, with one type": "instance_types",
        "`use_spot: true` is `spot: only` here": "use_spot",
        "write `spot: never`, `spot: auto` or `spot: only`": "spot_policy",
        "write `providers: [NAME]`": "cloud clouds backends",
        "write `providers: [NAME]` and `regions: [NAME]`": "infra",
        "write `regions: [NAME]`": "region",
        "write `regions: [NAME]`; zones are chosen by price and capacity": "zone zones",
        "write `image` at the top of the file": "image_id",
        "write `network`, as in `network: 100Gbps`": "network_tier",
        "write `check`": "health health_check",
        "write `max_price`, as in `max_price: $15/h`": "max_hourly_cost",
        "write `retry` at the top of the file": "job_recovery spot_recovery",
    }
)
Alternative = tuple[dict[str, Any], frozenset[str]]  # what it says, and which keys it has


def _read_one(table: SectionReader) -> Alternative:
    if table.has_all("gpu", "accelerator"):
        table.wrong(
            "accelerator", "`gpu` and `accelerator` are the same", suggestion="keep one of them"
        )
    return table.values(), frozenset(each.name for each in _ONE if table.has(each.name))


def _build(table: SectionReader) -> Resources:
    base, _ = _read_one(table)
    if table.has_all("any_of", "ordered"):
        table.wrong(
            "ordered", "`any_of` and `ordered` are both there", suggestion="keep one of them"
        )
    choices: tuple[Alternative, ...] = table.get("any_of") or table.get("ordered") or ()
    found = tuple(Resources(**{**base, **said}) for said, _ in choices)
    if len(found) < 2:
        return found[0] if found else Resources(**base)
    return replace(found[0], any_of=found, ordered=table.has("ordered"))


def _alternatives(path: str, help: str) -> ListKind:
    none = {"alternatives have none of their own": "any_of ordered"}
    return ListKind(SectionSpec(path, help, _ONE, _read_one, _HINTS | hints_for(none)))


RESOURCES = SectionSpec(
    "resources",
    "What each node must have. What is left out is no constraint.",
    (
        *_ONE,
        FieldSpec(
            "any_of",
            _alternatives(
                "resources.any_of",
                "One of the alternatives: what it says stands in place of what is said beside.",
            ),
            "Alternatives that differ in more than the GPU, each a table with some of these keys; "
            "what stands beside holds for all of them. The cheapest offer for any of them is "
            "taken.",
            "[{gpu: H100:8, spot: only}, {gpu: A100:80GB:8, cpu: 64}]",
            to=(),
        ),
        FieldSpec(
            "ordered",
            _alternatives(
                "resources.ordered",
                "One of the wishes, in order: what it says stands in place of what is beside.",
            ),
            "The same, but Cavvy takes the first one that is available, at any price.",
            "[{gpu: H100:8}, {gpu: A100:80GB:8, max_price: 20}]",
            to=(),
        ),
    ),
    _build,
    _HINTS,
)
