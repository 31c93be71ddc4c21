"""Builds the offers of a Ray cluster from its nodes and their free resources, and builds the
resource requests of gangs. The module does no I/O.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cavvy.catalog.accelerators import find_accelerator
from cavvy.domain.offers import Offer
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import Struct, replace
from cavvy.providers.batch import shapes

Object = Mapping[str, Any]

MARKET = "ray.io/market-type"
_KIND = "accelerator_type:"  # prefix of a resource that names a node's accelerators
# the amount of such a resource that a gang requests in order to select nodes that have it
_SLIVER = 0.001
# Ray's resource names for accelerators.
_ACCELERATORS = ("GPU", "TPU", "neuron_cores", "HPU", "NPU")
_MAKERS = re.compile(r"^(AMD-Instinct|AMD-Radeon|Intel|NVIDIA|aws)-|-(OAM|HF)$", re.IGNORECASE)
_MIB = 1024 * 1024
# memory is rounded down to a multiple of this, because nodes of one kind differ slightly
_STEP_MIB = 256
# The name of a whole placement group's resource in `cluster_status`. Names of a single bundle's
# resources have more digits.
_RESERVED = re.compile(r"(.+)Group([0-9A-Fa-f]{36})")


class RayNode(Struct, frozen=True, kw_only=True):
    """A node, the resources that jobs may use, and the free part of these resources."""

    id: str
    address: str
    shape: shapes.NodeShape
    resource: str = ""  # the resource that schedules the accelerators; "" if there are none
    kind: str = ""  # the resource that names the accelerators; "" if there is none
    spot: bool = False
    cpus: float = 0
    memory_mib: int = 0
    gpus: float = 0

    def fits(self, offer: Offer) -> int:
        """Return how many nodes of this offer fit on the Ray node now."""
        if not shapes.is_of(self.shape, offer, spot=self.spot):
            return 0
        rooms = [self.cpus / offer.vcpus, self.memory_mib / offer.memory_mib]
        rooms += [self.gpus / offer.accelerator_count] if offer.accelerator_count else []
        return max(0, int(min(rooms) + 1e-6))

    def less(self, offer: Offer, count: int) -> "RayNode":
        """Return the Ray node, without the resources that `count` nodes of the offer need."""
        return replace(
            self,
            cpus=self.cpus - count * offer.vcpus,
            memory_mib=self.memory_mib - count * offer.memory_mib,
            gpus=self.gpus - count * offer.accelerator_count,
        )


def read_nodes(
    nodes: Sequence[Object], usage: Mapping[str, Object], groups: Sequence[Object]
) -> Sequence[RayNode]:
    """Return the nodes that are alive, from /api/v0/nodes, `usageByNode` of /api/cluster_status,
    and /api/v0/placement_groups.

    The reservations of placement groups are current, but the usage data are some seconds old.
    Therefore only the resources outside of placement groups are taken from the usage data.
    """
    reserved: dict[str, dict[str, float]] = {}
    for group in groups:
        if group.get("state") in ("CREATED", "RESCHEDULING", "PREPARED"):
            for bundle in group.get("bundles") or ():
                held = reserved.setdefault(str(bundle.get("node_id") or ""), {})
                for name, amount in (bundle.get("unit_resources") or {}).items():
                    held[name] = held.get(name, 0) + float(amount)
    return [
        _read_node(
            node, usage.get(str(node["node_id"])) or {}, reserved.get(str(node["node_id"])) or {}
        )
        for node in nodes
        if node.get("state") == "ALIVE"
        and float((node.get("resources_total") or {}).get("CPU", 0)) >= 1
    ]


def _read_node(node: Object, usage: Object, reserved: Mapping[str, float]) -> RayNode:
    total: Mapping[str, float] = node["resources_total"]
    labels = node.get("labels") or {}
    resource = _find_resource(total)
    kind = _find_kind(total) if resource in _ACCELERATORS else ""
    told = kind.removeprefix(_KIND) or labels.get("ray.io/accelerator-type", "")
    word = told if resource in _ACCELERATORS else resource

    def free(name: str) -> float:
        return max(0.0, float(total.get(name, 0)) - _used(usage, name) - reserved.get(name, 0.0))

    memory = int(float(total.get("memory", 0))) // _MIB
    return RayNode(
        id=str(node["node_id"]),
        address=str(node.get("node_ip", "")),
        shape=shapes.NodeShape(
            cpus=int(total["CPU"]),
            memory_mib=memory // _STEP_MIB * _STEP_MIB if memory >= _STEP_MIB else memory,
            gpus=int(total.get(resource, 0)) if resource else 0,
            gpu=name_accelerator(word) if resource else "",
        ),
        resource=resource,
        kind=kind,
        spot=str(labels.get(MARKET, "")).lower() == "spot",
        cpus=free("CPU"),
        memory_mib=int(free("memory")) // _MIB,
        gpus=free(resource) if resource else 0,
    )


def _find_kind(total: Mapping[str, float]) -> str:
    return next((name for name in sorted(total) if name.startswith(_KIND)), "")


def _used(usage: Object, name: str) -> float:
    """Return the amount of a resource that is used outside of placement groups."""
    seen = usage.get(_camel(name))
    of_groups = sum(
        float(pair[1])
        for key, pair in usage.items()
        if (found := _RESERVED.fullmatch(key)) and found[1] == _camel(name)
    )
    return max(0.0, (float(seen[0]) if seen else 0.0) - of_groups)


def _find_resource(total: Mapping[str, float]) -> str:
    """Return the name of the resource with which Ray schedules accelerators. The name is one of
    Ray's own resource names or, if the node has no such resource, the name of a known accelerator.
    The result is "" if no resource of the node is an accelerator.
    """
    for name in _ACCELERATORS:
        if total.get(name, 0) >= 1:
            return name
    return next((name for name in sorted(total) if total[name] >= 1 and find_accelerator(name)), "")


def name_accelerator(word: str) -> str:
    """Return the catalog's name for the accelerator that Ray calls `word`. Ray's name for an
    accelerator can start with the manufacturer's name. If the accelerator is not in the catalog,
    `word` is returned.
    """
    plain = _MAKERS.sub("", _MAKERS.sub("", word))
    known = find_accelerator(word) or find_accelerator(plain)
    return known.accelerator.name if known else word


def _camel(name: str) -> str:
    """Return a resource name as the dashboard writes it: "accelerator_type:A100" becomes
    "acceleratorType:A100".
    """
    first, *rest = name.split("_")
    return first + "".join(part[:1].upper() + part[1:] for part in rest)


def promise(nodes: Sequence[RayNode], offer: Offer, count: int) -> Sequence[RayNode]:
    """Return the Ray nodes with fewer resources. The resources of `count` nodes of the offer, which
    were requested but not placed yet, are subtracted.
    """
    left = []
    for node in nodes:
        here = min(count, node.fits(offer))
        count -= here
        left.append(node.less(offer, here) if here else node)
    return left


def list_offers(
    nodes: Sequence[RayNode],
    *,
    region: str,
    gpu_rate: Callable[[str], HourlyRate],
    node_rate: HourlyRate,
    waits: bool,
) -> Sequence[Offer]:
    """Return one offer for each size. A size is a number of accelerators of one model or, for nodes
    without accelerators, a part of a node.
    """
    widest = max((node.shape.cpus for node in nodes), default=1)
    kinds: dict[tuple[shapes.NodeShape, str, bool], list[RayNode]] = {}
    for node in nodes:
        if node.shape.memory_mib:
            kinds.setdefault((node.shape, node.resource, node.spot), []).append(node)
    sizes: dict[str, list[tuple[Offer, Sequence[RayNode]]]] = {}
    for (shape, _, spot), alike in sorted(kinds.items(), key=lambda kind: str(kind[0])):
        place = shapes.OfferLocation(
            provider="ray", cluster=region, queue="", taken=spot, widest=widest, pool=""
        )
        for part in shapes.list_parts(shape):
            prices = shapes.PartPrices(gpu=gpu_rate(shape.gpu), node=node_rate)
            offer = replace(
                shapes.make_offer(place, shape, part, prices, capacity=None, source=""), zone=None
            )
            sizes.setdefault(offer.key, []).append((offer, alike))
    return _merge_all(list(sizes.values()), waits)


def _merge_all(
    sizes: Sequence[Sequence[tuple[Offer, Sequence[RayNode]]]], waits: bool
) -> Sequence[Offer]:
    groups = [{node.id for _, alike in kinds_of for node in alike} for kinds_of in sizes]
    return [_merge(kinds_of, groups, waits) for kinds_of in sizes]


def _merge(
    kinds_of: Sequence[tuple[Offer, Sequence[RayNode]]], groups: Sequence[set[str]], waits: bool
) -> Offer:
    """Merge the offers of one size into a single offer that covers all kinds of nodes with this
    size, at the highest price.
    """
    nodes = [node for _, alike in kinds_of for node in alike]
    smallest = min((offer for offer, _ in kinds_of), key=lambda offer: offer.memory_mib)
    room = [node.fits(smallest) for node in nodes]
    return replace(
        smallest,
        rate=max((offer.rate for offer, _ in kinds_of), key=lambda rate: rate.micros_per_hour),
        capacity=None if waits else sum(room),
        pool=shapes.name_pool((node.id for node in nodes), groups),
        source=f"Ray, {sum(each > 0 for each in room)} of {len(nodes)} nodes free",
    )


def make_bundle(offer: Offer, node: RayNode) -> Mapping[str, float]:
    """Return the resources that Ray reserves for each node of a gang. `node` is one of the offer's
    nodes.
    """
    bundle: dict[str, float] = {"CPU": offer.vcpus, "memory": offer.memory_mib * _MIB}
    if offer.accelerator_count:
        bundle[node.resource] = offer.accelerator_count
        if node.kind:
            bundle[node.kind] = _SLIVER
    return bundle
