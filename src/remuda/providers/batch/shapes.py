"""Parts of nodes as offers: so many accelerators with their share of CPUs and memory, or CPUs alone."""

from collections.abc import Sequence
from dataclasses import dataclass

from remuda.catalog.accelerators import find_accelerator, nominal_memory
from remuda.domain.offers import Offer, Purchase
from remuda.domain.units import HourlyRate


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What nodes of one kind have. `gpu` is what the cluster calls their GPUs, "" where it has no word for them."""

    cpus: int
    memory_mib: int
    gpus: int
    gpu: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Per hour of an accelerator, and of a node of which no accelerator is held."""

    gpu: HourlyRate
    node: HourlyRate


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an offer is: `taken` says that its nodes may be taken back, `widest` how many CPUs a node has at most."""

    provider: str
    cluster: str
    queue: str
    taken: bool
    widest: int


def list_parts(shape: Shape) -> Sequence[Shape]:
    """The parts of a node that are offered: each number of accelerators, and CPUs alone in powers of two."""
    parts = [_part(shape, cpus / shape.cpus, 0) for cpus in _sizes(shape.cpus)]
    return [*parts, *(_part(shape, count / shape.gpus, count) for count in range(1, shape.gpus + 1))]


def make_offer(place: Place, shape: Shape, part: Shape, prices: Prices, *, capacity: int | None, source: str) -> Offer:
    """The offer of a part of nodes of this shape."""
    name, memory = identify_gpu(shape.gpu) if part.gpus else (None, 0)
    width = len(str(place.widest))  # so that of equal prices the smallest comes first
    size = f"{part.cpus:0{width}}cpu-{round(part.memory_mib / 1024)}gb"
    kind = f"{shape.gpus}x{shape.gpu or 'gpu'}-{shape.cpus}cpu-{round(shape.memory_mib / 1024)}gb"
    share = HourlyRate(prices.node.times(part.cpus).micros_per_hour // shape.cpus)
    return Offer(
        provider=place.provider,
        region=place.cluster,
        zone=place.queue,
        instance_type=kind if part.gpus else size,
        accelerator=name,
        accelerator_count=part.gpus,
        accelerator_memory_mib=memory,
        vcpus=part.cpus,
        memory_mib=part.memory_mib,
        purchase=Purchase.SPOT if place.taken else Purchase.ON_DEMAND,
        rate=prices.gpu.times(part.gpus) if part.gpus else share,
        capacity=capacity,
        source=source,
    )


def gpu_of(offer: Offer) -> str:
    """What the cluster calls the offer's accelerators; "" where it has none, or no word for them."""
    if not offer.accelerator_count:
        return ""
    kind = offer.instance_type.partition("x")[2].rsplit("-", 2)[0]
    return "" if kind == "gpu" else kind


def identify_gpu(word: str) -> tuple[str, int]:
    """The canonical name and memory of what a cluster calls so; the memory is 0 where the product has several."""
    known = find_accelerator(word) if word else None
    if known is None:
        return word or "gpu", 0
    return known.accelerator.name, known.memory_mib or nominal_memory(known.accelerator, None) or 0


def _sizes(cpus: int) -> Sequence[int]:
    powers = [1 << power for power in range(cpus.bit_length()) if 1 << power < cpus]
    return [*powers, cpus]


def _part(shape: Shape, share: float, gpus: int) -> Shape:
    cpus = max(1, int(shape.cpus * share))
    return Shape(cpus=cpus, memory_mib=int(shape.memory_mib * share), gpus=gpus, gpu=shape.gpu if gpus else "")
