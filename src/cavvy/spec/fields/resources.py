"""The `resources` section: what each node must have."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from cavvy.domain.tasks import AcceleratorNeed, NetworkNeed, NodeCheck, Resources, SpotPolicy
from cavvy.domain.units import UnitError, parse_memory_mib, parse_rate
from cavvy.spec.fields.kinds import (
    EitherKind,
    FieldSpec,
    ListKind,
    ScalarKind,
    SectionReader,
    SectionSpec,
    WrongValue,
    choice,
    filled,
    number,
    read_text,
    text_kind,
)
from cavvy.spec.problems import shown
from cavvy.spec.tree import ScalarNode, describe

_MOST_CPUS = 100_000.0
_MOST_MIB = 1 << 40  # an exbibyte
Range = tuple[float | None, float | None]
Memory = tuple[float | None, float | None, int | None]  # the last is for each CPU


def split_range(text: str, unit: Callable[[str], float]) -> Range:
    """Read `8`, `8+`, `8..32`, `8..` or `..32` into bounds; a number alone is the least. Raises
    WrongValue, UnitError.
    """
    stripped = text.strip()
    if ".." in stripped:
        low, _, high = (part.strip() for part in stripped.partition(".."))
        if not low and not high:
            raise WrongValue(f"{shown(text)} has no bound")
        least, most = unit(low) if low else None, unit(high) if high else None
        if least is not None and most is not None and least > most:
            raise WrongValue(f"{shown(text)} is upside down", suggestion=f"write {high}..{low}")
        return least, most
    return unit(stripped.removesuffix("+")), None


def _cpus(text: str) -> float:
    if not re.fullmatch(r"\d{1,6}(\.\d{1,3})?", text.strip()):
        if re.match(r"-", text.strip()):
            raise WrongValue(f"{shown(text)}: a number of CPUs is above 0")
        raise WrongValue(f"{shown(text)} is not a number of CPUs")
    value = float(text)
    if not 0 < value <= _MOST_CPUS:
        raise WrongValue(f"{text} CPUs are {'none' if value == 0 else 'too many'}")
    return value


def _memory(text: str) -> float:
    mib = parse_memory_mib(text)
    if not 0 < mib <= _MOST_MIB:
        raise WrongValue(f"{shown(text)} is {'no memory' if mib <= 0 else 'too much'}")
    return mib


def _read_cpus(node: ScalarNode) -> Range:
    return split_range(read_text(node), _cpus)


def _read_memory(node: ScalarNode) -> Memory:
    text = read_text(node)
    if (times := re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)x", text.strip())) is not None:
        each = round(_memory(times[1]))
        return None, None, each
    try:
        return *split_range(text, _memory), None
    except UnitError:
        hint = "numbers are GiB and have no sign" if text.strip().startswith("-") else ""
        raise WrongValue(f"cannot read {shown(text)} as memory", suggestion=hint) from None


def _read_size(node: ScalarNode) -> int:
    """Disk in whole GiB, rounded up."""
    text = read_text(node).strip().removesuffix("+")
    return -(-int(_memory(text)) // 1024)


def _read_speed(node: ScalarNode) -> NetworkNeed:
    match = re.fullmatch(
        r"(\d{1,9}(?:\.\d{1,6})?)\s*(g|m)(?:bps|bit/s|b/s)\+?",
        read_text(node).strip(),
        re.IGNORECASE,
    )
    if match is None:
        raise WrongValue(
            f"{describe(node)} is not a network speed", suggestion="name the unit, as in 100Gbps"
        )
    mbps = round(float(match[1]) * (1000 if match[2].lower() == "g" else 1))
    if not 0 < mbps <= 100_000_000:
        raise WrongValue(f"{shown(node.text)} is out of bounds")
    return NetworkNeed(min_mbps=mbps)


def _read_accelerators(node: ScalarNode) -> tuple[AcceleratorNeed, ...]:
    return _accelerators(filled(read_text(node)))


def _accelerators(text: str) -> tuple[AcceleratorNeed, ...]:
    from cavvy.catalog.needs import NeedError, parse_accelerator

    try:
        return parse_accelerator(text)
    except NeedError as error:
        hint = error.hint or ""
        raise WrongValue(str(error).removesuffix(f"; {hint}"), suggestion=hint) from error


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
    return _SPOT.parse(node)


def _read_instance(node: ScalarNode) -> str:
    from cavvy.catalog.retired import find_retired

    name = filled(read_text(node)).strip()
    retired = find_retired(name)
    if retired is not None:
        since = f" (since {retired.since})" if retired.since else ""
        hint = f"write `instance: {retired.successor}`, its successor"
        raise WrongValue(f"{name} is retired{since}", suggestion=hint, expected="")
    return name


def _read_place(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,62}", text):
        lower = text.strip().lower()
        fits = re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,62}", lower)
        raise WrongValue(
            f"{shown(text)} cannot be such a name",
            suggestion=f"did you mean {lower}?" if fits else "",
        )
    return text


_SPOT = choice(
    SpotPolicy, {"always": SpotPolicy.ONLY, "required": SpotPolicy.ONLY, "none": SpotPolicy.NEVER}
)
_GPU_TEXT = ScalarKind(
    words="an accelerator such as H100:8, A100:40GB..80GB:1..4 or A100:80GB, or a list of "
    "alternatives",
    parse=_read_accelerators,
    schema={"type": "string"},
)
_MEMORY_KIND = ScalarKind(
    words="memory such as 16GB, 64GB+ or 16GB..64GB (a bare number is GiB), or 4x",
    parse=_read_memory,
    schema={"type": ["string", "number"]},
)
SIZE_KIND = ScalarKind(
    words="a size such as 100GB", parse=_read_size, schema={"type": ["string", "number"]}
)
_CPU_KIND = ScalarKind(
    words="a number of CPUs such as 8, 8+ or 8..32",
    parse=_read_cpus,
    schema={"type": ["string", "number"]},
)
_COUNT_KIND = text_kind("a count such as 8 or 1..4", numbers=True)

GPU_NAME = FieldSpec(
    name="name",
    kind=ListKind(
        item=text_kind("an accelerator's name such as H100", lambda text: _no_colon(filled(text))),
        single=True,
    ),
    help="The accelerator's name, or several that will do.",
    example="name: A100",
)
GPU_COUNT = FieldSpec(
    name="count",
    kind=_COUNT_KIND,
    help="How many on each node: a number or a range.",
    example="count: 1..4",
    default="1",
)
GPU_MEMORY = FieldSpec(
    name="memory",
    kind=text_kind(
        "memory such as 40GB or 40GB..80GB", lambda text: _no_colon(filled(text)), numbers=True
    ),
    help="Memory of each accelerator.",
    example="memory: 40GB..80GB",
)


def _no_colon(text: str) -> str:
    if ":" in text:
        raise WrongValue(
            f"{shown(text)} is more than one thing",
            suggestion="write `gpu: NAME:COUNT`, or one key for each",
        )
    return text.strip()


def _build_gpu(table: SectionReader) -> tuple[AcceleratorNeed, ...]:

    count, memory = table.get(GPU_COUNT), table.get(GPU_MEMORY)
    if memory and re.fullmatch(r"[\d.]+", memory) and ".." not in memory:
        # a bare number is GiB here as everywhere; within the one-line form it would be a count
        memory += "GB"
    if table.has(GPU_NAME) and not table.get(GPU_NAME):
        return ()
    needs: list[AcceleratorNeed] = []
    for name in table.get(GPU_NAME) or ("any",):
        try:
            needs += _accelerators(":".join(part for part in (name, memory, count) if part))
        except WrongValue as error:
            table.notes.add(table.node.mark, str(error), suggestion=error.suggestion)
    return tuple(needs)


GPU_TABLE = SectionSpec(
    path="resources.gpu",
    help="Accelerators as a table, where one line such as H100:8 says too little.",
    fields=(GPU_NAME, GPU_COUNT, GPU_MEMORY),
    build=_build_gpu,
    hints={
        "type": "write `name`",
        "amount": "write `count`",
        "num": "write `count`",
        "vram": "write `memory`",
    },
)


_GPU_ONE: EitherKind[tuple[AcceleratorNeed, ...]] = EitherKind(kinds=(_GPU_TEXT, GPU_TABLE))
_GPU = ListKind(item=_GPU_ONE, single=True)
GPU = FieldSpec(
    name="gpu",
    kind=_GPU,
    help="Accelerators of each node: NAME, NAME:COUNT, NAME:MEMORY or NAME:MEMORY:COUNT, where "
    "memory and count may be "
    "ranges; a list of alternatives, any of which will do; or a table.",
    example="gpu: [H100:8, A100:80GB:8]",
    default="none",
)
ACCELERATOR = replace(
    GPU,
    name="accelerator",
    help="The same as `gpu`, for those that are none.",
    example="accelerator: TPU-v5e:8",
)
INSTANCE = FieldSpec(
    name="instance",
    kind=ScalarKind(
        words="an instance type's name such as p5.48xlarge",
        parse=_read_instance,
        schema={"type": "string"},
    ),
    help="One exact instance type by its provider's name.",
    example="instance: p5.48xlarge",
)
CPU = FieldSpec(
    name="cpu",
    kind=_CPU_KIND,
    help="CPUs of each node: at least so many, or a range.",
    example="cpu: 8..32",
)
MEMORY = FieldSpec(
    name="memory",
    kind=_MEMORY_KIND,
    help="Memory of each node: at least so much, or a range. A bare number is GiB; `4x` is at "
    "least four GiB for each "
    "CPU that the node has.",
    example="memory: 64GB",
)
DISK_SIZE = FieldSpec(
    name="size", kind=SIZE_KIND, help="The size. A bare number is GiB.", example="size: 200GB"
)
DISK_TYPE = FieldSpec(
    name="type",
    kind=text_kind("a disk type by its provider's name, such as gp3", _read_place),
    help="The type, by its provider's name. Refused where a provider has no choice of disks.",
    example="type: gp3",
)
Disk = tuple[int | None, str | None]
DISK_TABLE = SectionSpec(
    path="resources.disk",
    help="The disk of each node as a table.",
    fields=(DISK_SIZE, DISK_TYPE),
    build=lambda table: (table.get(DISK_SIZE), table.get(DISK_TYPE)),
    hints={"tier": "write `type`, with the provider's own name of it"},
)
_DISK_SIZE_ONLY = ScalarKind(
    words=SIZE_KIND.words, parse=lambda node: (_read_size(node), None), schema=SIZE_KIND.schema
)
DISK = FieldSpec(
    name="disk",
    kind=EitherKind(kinds=(_DISK_SIZE_ONLY, DISK_TABLE)),
    help="Disk of each node: a size, or a table.",
    example="disk: {size: 200GB, type: gp3}",
)
SPOT = FieldSpec(
    name="spot",
    kind=ScalarKind(words="never, auto or only", parse=_read_spot, schema=_SPOT.schema),
    help="Whether to use capacity that can be taken away at any time: `auto` takes whichever is "
    "cheaper in the end.",
    example="spot: auto",
    default="never",
)
PROVIDERS = FieldSpec(
    name="providers",
    kind=ListKind(item=text_kind("a provider's name", _read_place), single=True),
    help="Only these providers.",
    example="providers: [local]",
    default="all that are configured",
)
REGIONS = FieldSpec(
    name="regions",
    kind=ListKind(
        item=text_kind("a region's name, or an area such as eu, us or asia", _read_place),
        single=True,
    ),
    help="Only these regions: names, or areas such as eu, us and asia.",
    example="regions: [eu]",
    default="all",
)
_SPEED = ScalarKind(
    words="a network speed such as 100Gbps", parse=_read_speed, schema={"type": "string"}
)
NETWORK_MIN = FieldSpec(
    name="min", kind=_SPEED, help="The least speed of a node's network.", example="min: 100Gbps"
)


def _read_named(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9 ._:/@+=-]{0,254}", text):
        raise WrongValue(f"{shown(text)} cannot be such a name")
    return text


def _read_flag(node: ScalarNode) -> bool:
    if not isinstance(node.value, bool):
        raise WrongValue(f"{describe(node)} is neither true nor false")
    return node.value


_NAMED = "a name or id as its provider knows it"
NETWORK_VPC = FieldSpec(
    name="vpc",
    kind=text_kind(_NAMED, _read_named),
    help="Nodes are in this VPC of yours.",
    example="vpc: vpc-0a1b",
)
NETWORK_SUBNET = FieldSpec(
    name="subnet",
    kind=text_kind(_NAMED, _read_named),
    help="Nodes are in this subnet of yours.",
    example="subnet: subnet-0a1b",
)
NETWORK_GROUPS = FieldSpec(
    name="security_groups",
    kind=ListKind(item=text_kind(_NAMED, _read_named), single=True),
    help="Nodes have these security groups of yours. Left out: the provider makes one and removes "
    "it afterwards.",
    example="security_groups: [sg-0a1b]",
)
NETWORK_KEY = FieldSpec(
    name="key",
    kind=text_kind(_NAMED, _read_named),
    help="A key pair that the provider knows; nodes let it in.",
    example="key: my-laptop",
)
NETWORK_PUBLIC = FieldSpec(
    name="public_ip",
    kind=ScalarKind(words="true or false", parse=_read_flag, schema={"type": "boolean"}),
    help="Whether each node gets a public address.",
    example="public_ip: false",
    default="as the subnet is set up",
)


def _build_network(table: SectionReader) -> NetworkNeed:
    need: NetworkNeed = table.get(NETWORK_MIN, NetworkNeed())
    return replace(
        need,
        vpc=table.get(NETWORK_VPC),
        subnet=table.get(NETWORK_SUBNET),
        security_groups=table.get(NETWORK_GROUPS, ()),
        key=table.get(NETWORK_KEY),
        public_ip=table.get(NETWORK_PUBLIC),
    )


NETWORK_TABLE = SectionSpec(
    path="resources.network",
    help="The network of each node as a table.",
    fields=(NETWORK_MIN, NETWORK_VPC, NETWORK_SUBNET, NETWORK_GROUPS, NETWORK_KEY, NETWORK_PUBLIC),
    build=_build_network,
    hints={
        "vpc_id": "write `vpc`",
        "subnet_id": "write `subnet`",
        "public_address": "write `public_ip`",
    },
)
NETWORK = FieldSpec(
    name="network",
    kind=EitherKind(kinds=(_SPEED, NETWORK_TABLE)),
    help="The least network speed of each node. Refused where a provider does not know its own.",
    example="network: 100Gbps",
)


MAX_PRICE = FieldSpec(
    name="max_price",
    kind=ScalarKind(
        words="dollars per hour such as 15 or $15/h",
        parse=lambda node: parse_rate(read_text(node)),
        schema={"type": ["number", "string"]},
    ),
    help="The most that one node may cost per hour, in US dollars.",
    example="max_price: $15/h",
)


CHECK_SHARE = FieldSpec(
    name="share",
    kind=number("a share from 0.05 to 1", 0.05, 1),
    help="What each GPU must reach of the memory bandwidth on its kind's data sheet.",
    example="share: 0.7",
    default="0.6",
)
CHECK_LINK = FieldSpec(
    name="link",
    kind=ScalarKind(
        words="a network speed such as 10Gbps",
        parse=lambda node: _read_speed(node).min_mbps,
        schema={"type": "string"},
    ),
    help="The least that each node must receive from another of its gang.",
    example="link: 10Gbps",
    default="that share of `network`, else none",
)
CHECK_TABLE = SectionSpec(
    path="resources.check",
    help="The check of each node at its boot as a table.",
    fields=(CHECK_SHARE, CHECK_LINK),
    build=lambda table: NodeCheck(
        share=table.get(CHECK_SHARE, NodeCheck().share), link_mbps=table.get(CHECK_LINK)
    ),
    hints={"fraction": "write `share`", "network": "write `link`", "links": "write `link`"},
)
_CHECK_FLAG = ScalarKind(
    words="true or false",
    parse=lambda node: NodeCheck() if _read_flag(node) else None,
    schema={"type": "boolean"},
)
CHECK = FieldSpec(
    name="check",
    kind=EitherKind(kinds=(_CHECK_FLAG, CHECK_TABLE)),
    help="Whether each node shows, before the work starts, that its GPUs are all there, keep what "
    "is written to their "
    "memory and are about as fast as their kind, and that the links between nodes are: one that "
    "does not is given "
    "back and avoided. It takes some seconds.",
    example="check: true",
    default="false",
)


def _build_one(table: SectionReader) -> Resources:
    if table.has(GPU) and table.has(ACCELERATOR):
        table.wrong(
            ACCELERATOR, "`gpu` and `accelerator` are the same", suggestion="keep one of them"
        )
    groups = table.get(GPU) or table.get(ACCELERATOR) or ()
    cpus, memory = table.get(CPU, (None, None)), table.get(MEMORY, (None, None, None))
    disk_gib, disk_type = table.get(DISK, (None, None))
    return Resources(
        instance=table.get(INSTANCE),
        accelerators=tuple(need for group in groups for need in group),
        cpus_min=cpus[0],
        cpus_max=cpus[1],
        memory_min_mib=None if memory[0] is None else int(memory[0]),
        memory_max_mib=None if memory[1] is None else int(memory[1]),
        memory_per_cpu_mib=memory[2],
        disk_gib=disk_gib,
        disk_type=disk_type,
        spot=table.get(SPOT, SpotPolicy.NEVER),
        providers=table.get(PROVIDERS, ()),
        regions=table.get(REGIONS, ()),
        network=table.get(NETWORK),
        max_rate=table.get(MAX_PRICE),
        check=table.get(CHECK),
    )


# What each key says, in the task's own names.
_SAYS: Mapping[str, tuple[str, ...]] = {
    "instance": ("instance",),
    "gpu": ("accelerators",),
    "accelerator": ("accelerators",),
    "cpu": ("cpus_min", "cpus_max"),
    "memory": ("memory_min_mib", "memory_max_mib", "memory_per_cpu_mib"),
    "disk": ("disk_gib", "disk_type"),
    "spot": ("spot",),
    "providers": ("providers",),
    "regions": ("regions",),
    "network": ("network",),
    "max_price": ("max_rate",),
    "check": ("check",),
}
_ONE = (
    INSTANCE,
    GPU,
    ACCELERATOR,
    CPU,
    MEMORY,
    DISK,
    SPOT,
    PROVIDERS,
    REGIONS,
    NETWORK,
    MAX_PRICE,
    CHECK,
)
Choice = tuple[Resources, frozenset[str]]  # what an alternative says, and which keys it has


def _build_choice(table: SectionReader) -> Choice:
    return _build_one(table), frozenset(each.name for each in _ONE if table.has(each))


def _choices(path: str, help: str) -> ListKind[Choice]:
    hints = HINTS | {
        "any_of": "alternatives have none of their own",
        "ordered": "alternatives have none of their own",
    }
    return ListKind(
        item=SectionSpec(path=path, help=help, fields=_ONE, build=_build_choice, hints=hints)
    )


def _build(table: SectionReader) -> Resources:
    base = _build_one(table)
    if table.has(ANY_OF) and table.has(ORDERED):
        table.wrong(ORDERED, "`any_of` and `ordered` are both there", suggestion="keep one of them")
    choices = table.get(ANY_OF) or table.get(ORDERED) or ()
    found = tuple(_overlay(base, said, keys) for said, keys in choices)
    if len(found) < 2:
        return found[0] if found else base
    return replace(found[0], any_of=found, ordered=table.has(ORDERED))


def _overlay(base: Resources, said: Resources, keys: frozenset[str]) -> Resources:
    return replace(base, **{name: getattr(said, name) for key in keys for name in _SAYS[key]})


HINTS = {
    "accelerators": "write `gpu`, as in `gpu: H100:8`",
    "gpus": "write `gpu`, as in `gpu: H100:8`",
    "tpu": "write `accelerator`, as in `accelerator: TPU-v5e:8`",
    "cpus": "write `cpu`",
    "vcpus": "write `cpu`",
    "mem": "write `memory`",
    "ram": "write `memory`",
    "disk_size": "write `disk`, as in `disk: 200GB`",
    "disk_tier": "write `disk: {size: …, type: …}`",
    "shm_size": "there is no such key; the whole of a node's shared memory is the task's",
    "instance_type": "write `instance`",
    "instance_types": "write `instance`, with one type",
    "use_spot": "`use_spot: true` is `spot: only` here",
    "spot_policy": "write `spot: never`, `spot: auto` or `spot: only`",
    "cloud": "write `providers: [NAME]`",
    "clouds": "write `providers: [NAME]`",
    "backends": "write `providers: [NAME]`",
    "infra": "write `providers: [NAME]` and `regions: [NAME]`",
    "region": "write `regions: [NAME]`",
    "zone": "write `regions: [NAME]`; zones are chosen by price and capacity",
    "zones": "write `regions: [NAME]`; zones are chosen by price and capacity",
    "image_id": "write `image` at the top of the file",
    "network_tier": "write `network`, as in `network: 100Gbps`",
    "health": "write `check`",
    "health_check": "write `check`",
    "max_hourly_cost": "write `max_price`, as in `max_price: $15/h`",
    "job_recovery": "write `retry` at the top of the file",
    "spot_recovery": "write `retry` at the top of the file",
}
ANY_OF = FieldSpec(
    name="any_of",
    kind=_choices(
        "resources.any_of",
        "One of the alternatives: what it says stands in place of what is said beside.",
    ),
    help="Alternatives that differ in more than the GPU, each a table with some of these keys; "
    "what stands beside "
    "holds for all of them. The cheapest offer for any of them is taken.",
    example="any_of: [{gpu: H100:8, spot: only}, {gpu: A100:80GB:8, cpu: 64}]",
)
ORDERED = FieldSpec(
    name="ordered",
    kind=_choices(
        "resources.ordered",
        "One of the wishes, in order: what it says stands in place of what is beside.",
    ),
    help="The same, but the first of them that can be had is taken, whatever it costs.",
    example="ordered: [{gpu: H100:8}, {gpu: A100:80GB:8, max_price: 20}]",
)
RESOURCES = SectionSpec(
    path="resources",
    help="What each node must have. What is left out is no constraint.",
    fields=(*_ONE, ANY_OF, ORDERED),
    build=_build,
    hints=HINTS,
)
