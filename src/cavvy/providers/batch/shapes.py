"""Builds offers for parts of nodes. A part consists of some of the node's accelerators with a
proportional share of the node's CPUs and memory, or of CPUs and memory only.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from fractions import Fraction

from cavvy.catalog.accelerators import (
    find_accelerator,
    instance_memory_mib,
    is_match,
    name_instance,
    nominal_memory,
    split_instance,
)
from cavvy.catalog.mig import find_families, find_part
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.units import HourlyRate, parse_rate
from cavvy.domain.values import Struct, replace


class NodeShape(Struct, frozen=True, kw_only=True):
    """The hardware of one kind of node. `gpu` is the cluster's name for the node's GPUs, or "" if
    the node has none. `model` names the GPUs of which MIG has made instances whose name in the
    cluster is only a profile. `shards` is the number of equal parts in which each GPU may be
    requested, and of a part of a node how many of them it has; 0 stands for whole GPUs.
    """

    cpus: int
    memory_mib: int
    gpus: int
    gpu: str
    model: str = ""
    shards: int = 0


# At the end of an instance type, 3of8 stands for three of the eight shards of a GPU.
_SHARDS = re.compile(r"-([0-9]+)of([0-9]+)$")
# MIG instances, as clusters name them: NVIDIA-A100-SXM4-40GB-MIG-1g.5gb, a100_1g.5gb, 1g.5gb
_INSTANCE = re.compile(
    r"(?:(?P<gpu>.*?)[-_. ])?(?:mig[-_. ])?(?P<profile>[1-9]g\.[1-9][0-9]*gb\S*)", re.IGNORECASE
)
# the parts of a GPU that are offered, rounded up to whole shards
_PARTS = sorted({Fraction(n, of) for of in (2, 3, 4, 5, 6, 7, 8, 10) for n in range(1, of)})


class PartPrices(Struct, frozen=True, kw_only=True):
    """The hourly prices of one accelerator (`gpu`) and of a node without accelerators (`node`)."""

    gpu: HourlyRate
    node: HourlyRate


class AcceleratorRates:
    """Parses the hourly prices of accelerators from a string such as "2.5" or "H100=2.5 A100=1.2
    1". A price without a name applies to all accelerators that the string does not name.
    """

    def __init__(self, text: str) -> None:
        words = text.replace(",", " ").split()
        self._named = [
            (name, parse_rate(rate))
            for name, equals, rate in (w.partition("=") for w in words)
            if equals
        ]
        plain = [parse_rate(word) for word in words if "=" not in word]
        if len(plain) > 1:
            raise ValueError(f"{text!r} has more than one price without a GPU name")
        self._rest = plain[0] if plain else HourlyRate(0)

    def __call__(self, product: str) -> HourlyRate:
        name, _ = identify_gpu(product)
        instance, named = split_instance(name), _INSTANCE.fullmatch(product)
        known = find_accelerator(named["gpu"]) if named and named["gpu"] else None
        part = find_part(*instance, known.memory_mib if known else None) if instance else None
        family, part = (instance[0], part) if instance and part else (name, 1)
        rate = next((rate for wish, rate in self._named if is_match(family, wish)), self._rest)
        return HourlyRate(round(rate.micros_per_hour * part))


class OfferLocation(Struct, frozen=True, kw_only=True):
    """The location of an offer. `taken` states whether the nodes can be reclaimed. `widest` is the
    highest number of CPUs of any node. `pool` is the name that `name_pool` returns for the group of
    nodes.
    """

    provider: str
    cluster: str
    queue: str
    taken: bool
    widest: int
    pool: str = ""


def list_parts(shape: NodeShape) -> Sequence[NodeShape]:
    """Return the parts of a node that Cavvy offers: one for each number of accelerators, and some
    parts without accelerators. The number of CPUs of a part without accelerators is a power of two,
    or all CPUs of the node. If a GPU has shards, there are parts of one GPU, too.
    """
    parts = [_part(shape, cpus / shape.cpus, 0) for cpus in _sizes(shape.cpus)]
    shards = sorted({-int(-shape.shards * part // 1) for part in _PARTS} - {0, shape.shards})
    shared = [(_part(shape, n / shape.shards / shape.gpus, 1), n) for n in shards]
    return [
        *parts,
        *(replace(part, shards=n) for part, n in shared),
        *(_part(shape, count / shape.gpus, count) for count in range(1, shape.gpus + 1)),
    ]


def make_offer(
    place: OfferLocation,
    shape: NodeShape,
    part: NodeShape,
    prices: PartPrices,
    *,
    capacity: int | None,
    source: str,
) -> Offer:
    """Return the offer for `part`, which is a share of each node with this shape."""
    name, memory = identify_gpu(shape.gpu, shape.model) if part.gpus else (None, 0)
    gpu_part = Fraction(part.shards, shape.shards) if part.shards else Fraction(1)
    # the number is padded with zeros, so that the smallest of several offers at one price comes
    # first
    width = len(str(place.widest))
    size = f"{part.cpus:0{width}}cpu-{round(part.memory_mib / 1024)}gb"
    kind = f"{shape.gpus}x{shape.gpu or 'gpu'}-{shape.cpus}cpu-{round(shape.memory_mib / 1024)}gb"
    kind += f"-{part.shards}of{shape.shards}" if part.shards else ""
    share = HourlyRate(prices.node.times(part.cpus).micros_per_hour // shape.cpus)
    return Offer(
        provider=place.provider,
        region=place.cluster,
        zone=place.queue,
        instance_type=kind if part.gpus else size,
        accelerator=name,
        accelerator_count=part.gpus,
        accelerator_memory_mib=int(memory * gpu_part),
        accelerator_part=float(gpu_part),
        vcpus=part.cpus,
        memory_mib=part.memory_mib,
        purchase=Purchase.SPOT if place.taken else Purchase.ON_DEMAND,
        rate=prices.gpu.times(part.gpus).divide(gpu_part) if part.gpus else share,
        capacity=capacity,
        pool=place.pool,
        owned=True,
        source=source,
    )


def count_gpus(shapes: Iterable[NodeShape]) -> str:
    """Describe nodes' GPUs for users, such as "8 x h100, 4 x a100"."""
    found = Counter[str]()
    for shape in shapes:
        if shape.gpus:
            found[shape.gpu or "gpu"] += shape.gpus
    return ", ".join(f"{count} x {name}" for name, count in found.items()) or "none"


def name_pool(nodes: Iterable[str], groups: Iterable[Collection[str]]) -> str:
    """Return a name for the pool that contains these nodes. If a group of nodes, such as a
    partition, has one node in the pool, the pool contains the whole group. The pool has the name of
    the alphabetically first node.
    """
    found, left = set(nodes), [set(group) for group in groups]
    while touching := [group for group in left if not found.isdisjoint(group)]:
        left = [group for group in left if found.isdisjoint(group)]
        found.update(*touching)
    return min(found)


def gpu_of(offer: Offer) -> str:
    """Return the cluster's name for the offer's accelerators, or "" if the offer has no
    accelerators."""
    if not offer.accelerator_count:
        return ""
    kind = _SHARDS.sub("", offer.instance_type).partition("x")[2].rsplit("-", 2)[0]
    return "" if kind == "gpu" else kind


def shards_of(offer: Offer) -> tuple[int, int]:
    """Return how many shards of a GPU the offer has, and how many each GPU has; (0, 0) for whole
    GPUs."""
    found = _SHARDS.search(offer.instance_type) if offer.accelerator_part < 1 else None
    return (int(found[1]), int(found[2])) if found else (0, 0)


def is_of(shape: NodeShape, offer: Offer, *, spot: bool) -> bool:
    """Return whether a node of this shape can be one of the offer's nodes. `spot` states whether
    jobs on the node can be preempted.
    """
    return (
        shape.gpus >= offer.accelerator_count
        and (not offer.accelerator_count or (shape.gpu or "gpu") == (gpu_of(offer) or "gpu"))
        and shape.cpus >= offer.vcpus
        and shape.memory_mib >= offer.memory_mib
        and spot == (offer.purchase is Purchase.SPOT)
    )


def is_instance(word: str) -> bool:
    """Return whether the cluster's name for a GPU is that of a MIG instance."""
    return _INSTANCE.fullmatch(word) is not None


def identify_gpu(word: str, model: str = "") -> tuple[str, int]:
    """Return the canonical name and the memory (MiB) of a GPU, from the cluster's name for the GPU.
    The memory is 0 if it is unknown or varies. A MIG instance, such as NVIDIA-A100-SXM4-40GB-MIG-
    1g.5gb, has the name and memory that instances of own hosts have. If its name is only a profile,
    it is one of a `model`, or of the only family that has this profile.
    """
    if instance := _INSTANCE.fullmatch(word):
        profile = instance["profile"].lower()
        known = find_accelerator(instance["gpu"] or model) if instance["gpu"] or model else None
        families = {known.accelerator.family} if known else find_families(profile)
        family = min(families) if len(families) == 1 else instance["gpu"] or "gpu"
        return name_instance(family, profile), instance_memory_mib(profile)
    known = find_accelerator(word) if word else None
    if known is None:
        return word or "gpu", 0
    return known.accelerator.name, known.memory_mib or nominal_memory(known.accelerator, None) or 0


def _sizes(cpus: int) -> Sequence[int]:
    powers = [1 << power for power in range(cpus.bit_length()) if 1 << power < cpus]
    return [*powers, cpus]


def _part(shape: NodeShape, share: float, gpus: int) -> NodeShape:
    cpus = max(1, int(shape.cpus * share))
    return NodeShape(
        cpus=cpus,
        memory_mib=int(shape.memory_mib * share),
        gpus=gpus,
        gpu=shape.gpu if gpus else "",
    )


def say_accelerators(gpus: Iterable[tuple[str, int, int]]) -> str:
    """Describe nodes' accelerators for users. `gpus` contains a tuple for each node: the kind of
    accelerator, the number of accelerators and the number of free accelerators.
    """
    has, free = Counter[str](), Counter[str]()
    for kind, count, left in gpus:
        has[kind] += count
        free[kind] += left
    return ", ".join(f"{has[n]} x {n}, {free[n]} free" for n in sorted(has) if has[n]) or "none"
