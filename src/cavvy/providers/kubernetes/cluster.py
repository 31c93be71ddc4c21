"""What a cluster has and what of it is free, as offers. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.units import HourlyRate
from cavvy.providers.batch.shapes import (
    AcceleratorRates,
    NodeShape,
    OfferLocation,
    PartPrices,
    gpu_of,
    list_parts,
    make_offer,
    name_pool,
)
from cavvy.providers.kubernetes.options import Toleration

Object = Mapping[str, Any]

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_UNITS |= {f"{letter}i": 1024**power for power, letter in enumerate("KMGTPE", 1)}
_QUANTITY = re.compile(r"([0-9.]+(?:e[0-9+-]+)?)(m|[kMGTP]|[KMGTPE]i)?", re.IGNORECASE)
# Resources by which device plugins hand out accelerators; whole ones, slices of one (MIG), and
# shared ones.
_ACCELERATORS = re.compile(
    r"nvidia\.com/(gpu|gpu\.shared|mig-[0-9a-z.+-]+)|amd\.com/gpu|gpu\.intel\.com/(i915|xe)|"
    r"habana\.ai/gaudi|google\.com/tpu|aws\.amazon\.com/(neuron|neuroncore)"
)
# Labels that say what a node's accelerators are, the most exact first: of NVIDIA's and AMD's own
# discovery, then of Google, Amazon's and Azure's node groups, CoreWeave, and the plain ones that
# people give.
_PRODUCTS = (
    "nvidia.com/gpu.product",
    "amd.com/gpu.product-name",
    "beta.amd.com/gpu.product-name",
    "gpu.nvidia.com/model",
    "cloud.google.com/gke-accelerator",
    "cloud.google.com/gke-tpu-accelerator",
    "k8s.amazonaws.com/accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
    "skypilot.co/accelerator",
    "gpu.type",
    "accelerator",
)
# Labels of nodes that are taken back, and their values in lower case.
SPOT = (
    ("cloud.google.com/gke-spot", "true"),
    ("cloud.google.com/gke-preemptible", "true"),
    ("eks.amazonaws.com/capacityType", "spot"),
    ("karpenter.sh/capacity-type", "spot"),
    ("kubernetes.azure.com/scalesetpriority", "spot"),
)
_MIB = 1024 * 1024
_STEP_MIB = 256  # nodes of one kind differ by a little


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceAmount:
    """An amount of CPUs, memory and accelerators."""

    cpus: Fraction = Fraction(0)
    memory: int = 0  # bytes
    gpus: int = 0
    pods: int = 0

    def less(self, other: "ResourceAmount") -> "ResourceAmount":
        return ResourceAmount(
            cpus=self.cpus - other.cpus,
            memory=self.memory - other.memory,
            gpus=self.gpus - other.gpus,
            pods=self.pods - other.pods,
        )

    def plus(self, other: "ResourceAmount") -> "ResourceAmount":
        return ResourceAmount(
            cpus=self.cpus + other.cpus,
            memory=self.memory + other.memory,
            gpus=self.gpus + other.gpus,
            pods=self.pods + other.pods,
        )

    def widest(self, other: "ResourceAmount") -> "ResourceAmount":
        return ResourceAmount(
            cpus=max(self.cpus, other.cpus),
            memory=max(self.memory, other.memory),
            gpus=max(self.gpus, other.gpus),
            pods=max(self.pods, other.pods),
        )

    def covers(self, other: "ResourceAmount") -> bool:
        enough = self.cpus >= other.cpus and self.memory >= other.memory
        return enough and self.gpus >= other.gpus and self.pods >= other.pods


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesNode:
    """One node, what a job may have of it, and what is free of that now; `why_not` says why it
    takes no pods.
    """

    name: str
    resource: str  # by which its accelerators are asked for; "" without any
    shape: NodeShape
    product: str = ""
    label: str = ""  # that says what its accelerators are; "" where none does
    label_value: str = ""
    spot_label: str = ""  # that says that it may be taken back; "" where none does
    spot_value: str = ""
    free: ResourceAmount = ResourceAmount()
    why_not: str = ""
    broken: int = 0  # accelerators that the node has and nobody may use

    @property
    def spot(self) -> bool:
        return bool(self.spot_label)


def read_quantity(text: object) -> Fraction:
    """Kubernetes' notation of amounts: 2, 500m, 16Gi."""
    found = _QUANTITY.fullmatch(str(text).strip())
    if found is None:
        return Fraction(0)
    if found[2] == "m":
        return Fraction(Decimal(found[1])) / 1000
    return Fraction(Decimal(found[1])) * _UNITS.get(found[2] or "", 1)


def read_nodes(
    nodes: Sequence[Object],
    pods: Sequence[Object],
    selector: Mapping[str, str],
    borne: Sequence[Toleration],
) -> Sequence[KubernetesNode]:
    """The nodes that jobs may use; a node with several kinds of accelerators is one entry for each.

    Pods of ours that have no node yet are counted where there is room for them.
    """
    by_node: dict[str, list[Object]] = {}
    unplaced = []
    for pod in pods:
        name = pod["spec"].get("nodeName")
        if pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
            continue
        if name:
            by_node.setdefault(name, []).append(pod)
        elif (pod["metadata"].get("labels") or {}).get("app.kubernetes.io/managed-by") == "cavvy":
            unplaced.append(pod)
    found: list[KubernetesNode] = []
    for node in nodes:
        labels = node["metadata"].get("labels") or {}
        if all(labels.get(name) == value for name, value in selector.items()):
            found += _read_node(node, by_node.get(node["metadata"]["name"], []), borne)
    for pod in unplaced:
        found = promise(
            found, {resource: requested(pod, resource) for resource in _resources_of(pod)}, 1
        )
    return found


def _resources_of(pod: Object) -> Sequence[str]:
    """The accelerators that a pod asks for; "" where it asks for none."""
    asked = {
        name
        for container in pod["spec"]["containers"]
        for name in (container.get("resources") or {}).get("limits") or {}
    }
    return [name for name in sorted(asked) if _ACCELERATORS.fullmatch(name)] or [""]


def promise(
    nodes: Sequence[KubernetesNode], parts: Mapping[str, ResourceAmount], count: int
) -> list[KubernetesNode]:
    """The nodes without the room that `count` pods will take; `parts` are their sizes by what
    accelerators they ask for, "" for any node.
    """
    left = list(nodes)
    for _ in range(count):
        for chosen in left:
            part = parts.get(chosen.resource, parts.get(""))
            if part is not None and count_fitting(chosen, part):
                # A node with several kinds of accelerators is listed once for each.
                other = replace(part, gpus=0)
                left = [
                    replace(node, free=node.free.less(part if node is chosen else other))
                    if node.name == chosen.name
                    else node
                    for node in left
                ]
                break
    return left


def _read_node(
    node: Object, pods: Sequence[Object], borne: Sequence[Toleration]
) -> Sequence[KubernetesNode]:
    labels, status = node["metadata"].get("labels") or {}, node.get("status") or {}
    allocatable, capacity = status.get("allocatable") or {}, status.get("capacity") or {}
    resources = [name for name in {**capacity, **allocatable} if _ACCELERATORS.fullmatch(name)]
    resources = [name for name in resources if read_quantity(capacity.get(name, 0)) > 0] or [""]
    why_not = _why_not(node, borne, bool(resources[0]))
    spot = next((name for name, value in SPOT if str(labels.get(name)).lower() == value), "")
    found = []
    for resource in resources:
        whole = ResourceAmount(
            cpus=read_quantity(allocatable.get("cpu", 0)),
            memory=int(read_quantity(allocatable.get("memory", 0))),
            gpus=int(read_quantity(allocatable.get(resource, 0))) if resource else 0,
            pods=int(read_quantity(allocatable.get("pods", 110))),
        )
        usual, free = whole, whole
        for pod in pods:
            used = requested(pod, resource)
            free = free.less(used)
            if _belongs_to_node(pod):
                usual = usual.less(used)
        count = int(read_quantity(capacity.get(resource, 0))) if resource else 0
        label = next((name for name in _PRODUCTS if resource and labels.get(name)), "")
        product = _product(labels.get(label, ""), resource)
        memory_mib = int(usual.memory // _MIB) // _STEP_MIB * _STEP_MIB
        shape = NodeShape(
            cpus=max(0, int(usual.cpus)), memory_mib=max(0, memory_mib), gpus=count, gpu=product
        )
        found.append(
            KubernetesNode(
                name=node["metadata"]["name"],
                resource=resource,
                product=product,
                label=label,
                label_value=labels.get(label, ""),
                spot_label=spot,
                spot_value=labels.get(spot, ""),
                shape=shape,
                free=free,
                why_not=why_not,
                broken=count - whole.gpus,
            )
        )
    return found


def requested(pod: Object, resource: str) -> ResourceAmount:
    """What a pod holds of its node, as the scheduler counts it: the sum of its containers and
    sidecars, or of one that goes before them and the sidecars that run by then, if that is more;
    or what the pod as a whole asks for.
    """
    spec = pod["spec"]
    sides, peak = ResourceAmount(), ResourceAmount()
    for container in spec.get("initContainers") or ():
        own = _requests(container, resource)
        if container.get("restartPolicy") == "Always":
            sides = sides.plus(own)
        peak = peak.widest(sides if container.get("restartPolicy") == "Always" else sides.plus(own))
    whole = sides
    for container in spec.get("containers") or ():
        whole = whole.plus(_requests(container, resource))
    whole = whole.widest(peak)
    asked = (spec.get("resources") or {}).get("requests") or {}
    whole = replace(
        whole,
        cpus=read_quantity(asked["cpu"]) if "cpu" in asked else whole.cpus,
        memory=int(read_quantity(asked["memory"])) if "memory" in asked else whole.memory,
    )
    return replace(
        whole.plus(_requests({"resources": {"requests": spec.get("overhead") or {}}}, resource)),
        pods=1,
    )


def _requests(container: Object, resource: str) -> ResourceAmount:
    resources = container.get("resources") or {}
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return ResourceAmount(
        cpus=read_quantity(asked.get("cpu", 0)),
        memory=int(read_quantity(asked.get("memory", 0))),
        gpus=int(read_quantity(asked.get(resource, 0))) if resource else 0,
    )


def _belongs_to_node(pod: Object) -> bool:
    owners = pod["metadata"].get("ownerReferences") or ()
    return any(owner.get("kind") in ("DaemonSet", "Node") for owner in owners)


def _why_not(node: Object, borne: Sequence[Toleration], accelerated: bool) -> str:
    conditions = {each["type"]: each for each in (node.get("status") or {}).get("conditions") or ()}
    ready = conditions.get("Ready", {})
    if ready.get("status") != "True":
        return f"not ready: {ready.get('reason') or 'unknown'}"
    if node["spec"].get("unschedulable"):
        return "cordoned"
    for taint in node["spec"].get("taints") or ():
        if taint.get("effect") == "PreferNoSchedule" or any(each.bears(taint) for each in borne):
            continue
        if accelerated and _ACCELERATORS.fullmatch(taint.get("key", "")):
            continue
        return f"tainted {taint.get('key')}:{taint.get('effect')}"
    return ""


def _product(word: str, resource: str) -> str:
    slice_of = resource.partition("/mig-")[2]
    if slice_of and "MIG" not in word.upper():
        return f"{word or 'gpu'}-MIG-{slice_of}"
    if resource.endswith(".shared") and not word.endswith("-SHARED"):
        return f"{word or 'gpu'}-SHARED"
    return word


def list_offers(
    nodes: Sequence[KubernetesNode],
    *,
    region: str,
    zone: str,
    gpu_rate: AcceleratorRates,
    node_rate: HourlyRate,
    waits: bool,
) -> Sequence[Offer]:
    """One offer for each kind of node and number of accelerators, or size where there are none."""
    usable = [node for node in nodes if not node.why_not]
    widest = max((node.shape.cpus for node in usable), default=1)
    offers: dict[str, Offer] = {}
    kinds = sorted(
        {_kind(node) for node in usable if node.shape.cpus and node.shape.memory_mib}, key=str
    )
    groups = [{node.name for node in usable if _kind(node) == kind} for kind in kinds]
    for kind in kinds:
        alike = [node for node in usable if _kind(node) == kind]
        pool = name_pool((node.name for node in alike), groups)
        for part in list_parts(alike[0].shape):
            free = sum(count_fitting(node, part_of(part)) > 0 for node in alike)
            offer = make_offer(
                OfferLocation(
                    provider="kubernetes",
                    cluster=region,
                    queue=zone,
                    taken=alike[0].spot,
                    widest=widest,
                    pool=pool,
                ),
                alike[0].shape,
                part,
                PartPrices(gpu=gpu_rate(alike[0].product), node=node_rate),
                capacity=None
                if waits
                else sum(count_fitting(node, part_of(part)) for node in alike),
                source=f"Kubernetes, {free} of {len(alike)} nodes free",
            )
            if offer.key not in offers or (offer.capacity or 0) > (offers[offer.key].capacity or 0):
                offers[offer.key] = offer
    return list(offers.values())


def _kind(node: KubernetesNode) -> tuple[NodeShape, str, bool]:
    return node.shape, node.resource, node.spot


def part_of(part: NodeShape) -> ResourceAmount:
    """What a pod of this size asks for."""
    return ResourceAmount(
        cpus=Fraction(part.cpus), memory=part.memory_mib * _MIB, gpus=part.gpus, pods=1
    )


def count_fitting(node: KubernetesNode, part: ResourceAmount) -> int:
    """How many such pods the node has room for now."""
    if node.why_not or not node.free.covers(part):
        return 0
    free = node.free
    rooms = [
        int(free.cpus / part.cpus) if part.cpus else 1,
        free.memory // part.memory if part.memory else 1,
    ]
    rooms += [free.gpus // part.gpus] if part.gpus else []
    return max(0, min(*rooms, free.pods))


def nodes_for(nodes: Sequence[KubernetesNode], offer: Offer) -> Sequence[KubernetesNode]:
    """The nodes that an offer is of, whatever is free of them."""
    kind = gpu_of(offer)
    return [
        node
        for node in nodes
        if bool(node.resource) >= bool(offer.accelerator_count)
        and node.shape.gpus >= offer.accelerator_count
        and (not offer.accelerator_count or (node.product or "gpu") == (kind or "gpu"))
        and node.shape.cpus >= offer.vcpus
        and node.shape.memory_mib >= offer.memory_mib
        and node.spot == (offer.purchase is Purchase.SPOT)
    ]
