"""Turns the nodes of a cluster, and their free resources, into offers. No I/O."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import reduce
from operator import add, ge, sub
from typing import Any, NamedTuple

from cavvy.catalog.accelerators import AcceleratorKind, Vendor, find_accelerator, nominal_memory
from cavvy.domain.offers import Offer
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import Struct, replace
from cavvy.providers.batch.shapes import (
    AcceleratorRates,
    NodeShape,
    OfferLocation,
    PartPrices,
    is_of,
    list_parts,
    make_offer,
    name_pool,
)
from cavvy.providers.kubernetes.options import Toleration
from cavvy.providers.kubernetes.profiles import PROFILES, find_cloud, find_profile

Object = Mapping[str, Any]
# returns the offer for a provider and its instance type
FindInstance = Callable[[str, str], Offer | None]

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_UNITS |= {f"{letter}i": 1024**power for power, letter in enumerate("KMGTPE", 1)}
_QUANTITY = re.compile(r"([0-9.]+(?:e[0-9+-]+)?)(m|[kMGTP]|[KMGTPE]i)?", re.IGNORECASE)
# The resource names that device plugins use for accelerators: whole accelerators, slices
# (MIG), and shared accelerators.
_ACCELERATORS = re.compile(
    r"nvidia\.com/(gpu|gpu\.shared|mig-[0-9a-z.+-]+)|amd\.com/gpu|gpu\.intel\.com/(i915|xe)|"
    r"habana\.ai/gaudi|google\.com/tpu|aws\.amazon\.com/(neuron|neuroncore)"
)
# The resource name of each vendor's device plugin, for whole accelerators.
_RESOURCES = {
    Vendor.AMD: "amd.com/gpu",
    Vendor.INTEL: "gpu.intel.com/i915",
    Vendor.GOOGLE: "google.com/tpu",
    Vendor.AWS: "aws.amazon.com/neuron",
}
# Labels that name a node's accelerators, the most exact first. These labels are set by the
# discovery tools of NVIDIA and AMD, by the node groups of Google, Amazon and Azure, by CoreWeave,
# and by users.
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
_EXACT = _PRODUCTS[:-2]  # without the labels of users, which may also be on other nodes
# Labels of nodes that may be preempted, with their values in lower case.
SPOT = (
    ("karpenter.sh/capacity-type", "spot"),
    *((name, value.lower()) for profile in PROFILES for name, value in profile.spot),
)
_INSTANCE, _REGION = "node.kubernetes.io/instance-type", "topology.kubernetes.io/region"
# The resources of RDMA networks, with the number that a pod requests; None: all of the node, which
# only a pod with all accelerators of the node can have. CoreWeave:
# https://docs.coreweave.com/docs/products/networking/hpc-interconnect; AKS:
# https://github.com/Azure/aks-rdma-infiniband; EKS:
# https://docs.aws.amazon.com/eks/latest/userguide/node-efa.html
_RDMA: Mapping[str, int | None] = {
    "rdma/ib": 1,
    "rdma/shared_ib": 1,
    "vpc.amazonaws.com/efa": None,
}
_MIB = 1024 * 1024
# memory is rounded down to a multiple of this, because nodes of one kind differ slightly
_STEP_MIB = 256


class ResourceAmount(NamedTuple):
    """Amounts of CPUs, memory (in bytes), accelerators and pods."""

    cpus: Fraction = Fraction(0)
    memory: int = 0
    gpus: int = 0
    pods: int = 0

    def less(self, other: "ResourceAmount") -> "ResourceAmount":
        return ResourceAmount(*self._pair(sub, other))

    def plus(self, other: "ResourceAmount") -> "ResourceAmount":
        return ResourceAmount(*self._pair(add, other))

    def widest(self, other: "ResourceAmount") -> "ResourceAmount":
        return ResourceAmount(*self._pair(max, other))

    def covers(self, other: "ResourceAmount") -> bool:
        return all(self._pair(ge, other))

    def _pair(self, by: Callable[[Any, Any], Any], other: "ResourceAmount") -> list[Any]:
        return [by(mine, its) for mine, its in zip(self, other, strict=True)]


_NOTHING = ResourceAmount()


class NodeMachine(NamedTuple):
    """A node's machine: the cloud's name in the catalog, the instance type and the region. Cloud,
    type and region are "" if the cloud is unknown or the node has several kinds of accelerators.
    """

    cloud: str = ""
    instance: str = ""
    region: str = ""


_UNKNOWN, _FREE = NodeMachine(), HourlyRate(0)


class DeviceClaim(Struct, frozen=True, kw_only=True):
    """What a pod claims: devices of a class with these attributes. `version` is that of the API."""

    version: str
    device_class: str
    product: str
    profile: str = ""  # of MIG instances


class KubernetesNode(Struct, frozen=True, kw_only=True):
    """One node, limited to one kind of the node's accelerators: the resources that jobs may use,
    and the free part of these resources.
    """

    name: str
    resource: str  # resource name of the accelerators; "" if there are none
    shape: NodeShape
    product: str = ""
    label: str = ""  # the label that names the accelerators; "" if there is none
    label_value: str = ""
    spot_label: str = ""  # the label that marks the node as preemptible; "" if there is none
    spot_value: str = ""
    free: ResourceAmount = _NOTHING
    pool: str = ""  # if set, the node does not exist yet, and an autoscaler can add it to this pool
    why_not: str = ""
    broken: int = 0  # accelerators that the node has but cannot allocate
    machine: NodeMachine = _UNKNOWN
    claim: DeviceClaim | None = None  # set if pods claim the accelerators; see `device_claims`
    rate: HourlyRate = _FREE  # the price of the whole machine; 0 if unknown
    service: str = ""  # the name of the cloud's Kubernetes service; "" if it has no profile
    unseen: str = ""  # accelerators that the node should have, but does not report
    rdma: str = ""  # the resource of the RDMA network; "" if there is none
    rdma_count: int = 0  # how many of it a pod requests that uses all accelerators

    def request_rdma(self, accelerators: int) -> Mapping[str, str]:
        """Return the RDMA resources of a pod with this number of accelerators."""
        whole = accelerators == self.shape.gpus or _RDMA.get(self.rdma) is not None
        return {self.rdma: str(self.rdma_count)} if accelerators and self.rdma and whole else {}

    @property
    def spot(self) -> bool:
        return bool(self.spot_label)


def read_quantity(text: object) -> Fraction:
    """Parse a quantity in Kubernetes' notation, such as 2, 500m or 16Gi; return 0 if the quantity
    is malformed."""
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
    accelerated: Collection[str] = (),
) -> Sequence[KubernetesNode]:
    """Return the nodes that jobs may use, with one entry for each kind of accelerator on a node.
    `accelerated` names nodes that have accelerators without a device plugin.

    Resources that unscheduled pods of Cavvy will use are deducted from nodes on which these pods
    fit.
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
            name = node["metadata"]["name"]
            found += _read_node(node, by_node.get(name, []), borne, name in accelerated)
    for pod in unplaced:
        found = promise(
            found, {resource: requested(pod, resource) for resource in _resources_of(pod)}, 1
        )
    return found


def add_catalog(nodes: Sequence[KubernetesNode], find: FindInstance) -> list[KubernetesNode]:
    """Return the nodes, with what the catalog knows of their machines. Accelerators whose labels
    name no known accelerator, such as `accelerator=nvidia` on AKS, get the name that the machine's
    type has in the catalog; pods then select this type. A node without the accelerators of its type
    is marked as such. May block.
    """
    found = {
        node.machine: find(node.machine.cloud, node.machine.instance)
        for node in nodes
        if node.machine.cloud and not node.claim
    }
    return [_add_catalog(node, found.get(node.machine)) for node in nodes]


def _add_catalog(node: KubernetesNode, machine: Offer | None) -> KubernetesNode:
    if machine is None or machine.accelerator is None:
        return node
    name, count = name_product(machine), machine.accelerator_count
    if not node.resource:
        return replace(node, unseen=node.unseen or f"{count} x {name}")
    whole = node.resource == find_resource(machine.accelerator) and node.shape.gpus == count
    is_named = node.product and find_accelerator(node.product) and machine.accelerator_part == 1
    if not whole or is_named:
        return node
    return replace(
        node,
        product=name,
        label=_INSTANCE,
        label_value=node.machine.instance,
        shape=replace(node.shape, gpu=name),
    )


def name_product(machine: Offer) -> str:
    """Return the name of a machine's accelerators, with their memory if there are several models of
    this name, such as A100-80GB. A part of an accelerator, as on Azure's NV6ads_A10_v5, is named
    like one that is shared: A10-4GB-SHARED. Returns "" without accelerators.
    """
    name, memory_mib = machine.accelerator or "", machine.accelerator_memory_mib
    known = find_accelerator(name)
    if machine.accelerator_part < 1:
        return f"{name}-{round(memory_mib / 1024)}GB-SHARED"
    if known is None or not memory_mib or nominal_memory(known.accelerator, None):
        return name
    return f"{name}-{round(memory_mib / 1024)}GB"


def share_service(nodes: Sequence[KubernetesNode]) -> list[KubernetesNode]:
    """Return the nodes of a context, all with the service that labels some of them: also hosts that
    joined such a cluster, and nodes that a pool can add.
    """
    found = {node.service for node in nodes if node.service}
    service = found.pop() if len(found) == 1 else ""
    return [replace(node, service=node.service or service) for node in nodes]


def list_labels(nodes: Iterable[Object]) -> Iterator[str]:
    """Yield the names of the nodes' labels."""
    return (name for node in nodes for name in node["metadata"].get("labels") or {})


def _resources_of(pod: Object) -> Sequence[str]:
    """Return the accelerator resources that a pod requests, or [""] if the pod requests no
    accelerators.
    """
    asked = {
        name
        for container in pod["spec"]["containers"]
        for name in (container.get("resources") or {}).get("limits") or {}
    }
    return [name for name in sorted(asked) if _ACCELERATORS.fullmatch(name)] or [""]


def promise(
    nodes: Sequence[KubernetesNode], parts: Mapping[str, ResourceAmount], count: int
) -> list[KubernetesNode]:
    """Deduct the resources of `count` pods from nodes where the pods fit. `parts` maps an
    accelerator resource to the amounts that a pod uses on nodes with this resource. If a node has
    no accelerators, or an accelerator resource that is not in `parts`, the amounts under the key ""
    apply.
    """
    left = list(nodes)
    for _ in range(count):
        for chosen in left:
            part = parts.get(chosen.resource, parts.get(""))
            if part is not None and not chosen.pool and count_fitting(chosen, part):
                # a node with several kinds of accelerators has one entry for each kind
                other = part._replace(gpus=0)
                left = [
                    replace(node, free=node.free.less(part if node is chosen else other))
                    if node.name == chosen.name
                    else node
                    for node in left
                ]
                break
    return left


def _read_node(
    node: Object, pods: Sequence[Object], borne: Sequence[Toleration], accelerated: bool
) -> Sequence[KubernetesNode]:
    capacity = (node.get("status") or {}).get("capacity") or {}
    resources = [
        name
        for name, count in capacity.items()
        if _ACCELERATORS.fullmatch(name) and read_quantity(count) > 0
    ] or [""]
    why_not = _why_not(node, borne, accelerated or bool(resources[0]))
    machine = _read_machine(node) if len(resources) == 1 else _UNKNOWN
    parts = [_read_part(node, pods, resource, why_not) for resource in resources]
    return [replace(part, machine=machine) for part in parts]


def _read_machine(node: Object) -> NodeMachine:
    labels, cloud = node["metadata"].get("labels") or {}, find_cloud(node)
    if not (cloud and labels.get(_INSTANCE)):
        return _UNKNOWN
    return NodeMachine(cloud, labels[_INSTANCE], labels.get(_REGION, ""))


def _read_part(node: Object, pods: Sequence[Object], resource: str, why_not: str) -> KubernetesNode:
    """Parse a node, limited to the accelerators of one resource name."""
    labels, status = node["metadata"].get("labels") or {}, node.get("status") or {}
    whole = _amount(status.get("allocatable") or {}, resource, pods=110)
    used = [requested(pod, resource) for pod in pods]
    free = reduce(ResourceAmount.less, used, whole)
    daemons = [each for each, pod in zip(used, pods, strict=True) if _belongs_to_node(pod)]
    usual = reduce(ResourceAmount.less, daemons, whole)
    count = _amount(status.get("capacity") or {}, resource).gpus
    label = next((name for name in _PRODUCTS if resource and labels.get(name)), "")
    product = _product(labels.get(label, ""), resource)
    spot = _find_spot_label(labels)
    shape = _shape(usual, count, product)
    given = status.get("allocatable") or {}
    has = {name: int(read_quantity(given.get(name, 0))) for name in _RDMA}
    rdma = next((name for name in _RDMA if resource and has[name]), "")
    profile = find_profile(labels)
    return KubernetesNode(
        service=profile.name if profile else "",
        unseen="" if resource else next((labels[name] for name in _EXACT if labels.get(name)), ""),
        rdma=rdma,
        rdma_count=(_RDMA[rdma] or has[rdma]) if rdma else 0,
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


def _shape(usual: ResourceAmount, gpus: int, product: str) -> NodeShape:
    memory_mib = usual.memory // _MIB // _STEP_MIB * _STEP_MIB
    return NodeShape(
        cpus=max(0, int(usual.cpus)), memory_mib=max(0, memory_mib), gpus=gpus, gpu=product
    )


def _find_spot_label(labels: Object) -> str:
    return next((name for name, value in SPOT if str(labels.get(name)).lower() == value), "")


def _amount(table: Object, resource: str, pods: int = 0) -> ResourceAmount:
    """Parse a table of quantities. `pods` is the number of pods to use if the table does not state
    the number of pods."""
    return ResourceAmount(
        cpus=read_quantity(table.get("cpu", 0)),
        memory=int(read_quantity(table.get("memory", 0))),
        gpus=int(read_quantity(table.get(resource, 0))),
        pods=int(read_quantity(table.get("pods", pods))),
    )


def requested(pod: Object, resource: str) -> ResourceAmount:
    """Return the resources that a pod uses on its node, as Kubernetes' scheduler counts them.

    The scheduler uses the larger of two amounts. The first amount is the sum of the requests of all
    containers and sidecars. The second amount is the peak while init containers run: the request of
    an init container plus the requests of the sidecars that start before it. If the pod as a whole
    requests CPUs or memory, that request replaces the amount for the containers.
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
    own = _amount(asked, resource)
    whole = whole._replace(
        cpus=own.cpus if "cpu" in asked else whole.cpus,
        memory=own.memory if "memory" in asked else whole.memory,
    )
    return whole.plus(_amount(spec.get("overhead") or {}, resource))._replace(pods=1)


def _requests(container: Object, resource: str) -> ResourceAmount:
    resources = container.get("resources") or {}
    return _amount(
        {**(resources.get("limits") or {}), **(resources.get("requests") or {})}, resource
    )


def _belongs_to_node(pod: Object) -> bool:
    owners = pod["metadata"].get("ownerReferences") or ()
    return any(owner.get("kind") in ("DaemonSet", "Node") for owner in owners)


def _why_not(node: Object, borne: Sequence[Toleration], accelerated: bool) -> str:
    conditions = {each["type"]: each for each in (node.get("status") or {}).get("conditions") or ()}
    ready = conditions.get("Ready", {})
    if ready.get("status") != "True":
        return f"not ready: {ready.get('reason') or 'unknown'}"
    labels = node["metadata"].get("labels") or {}
    if (profile := find_profile(labels)) and profile.states[0] in labels:
        state = labels[profile.states[0]]
        if state != profile.states[1]:
            return f"in the state {state}, not {profile.states[1]}"
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


def find_resource(accelerator: str) -> str:
    """Return the resource name that device plugins use for these accelerators."""
    known = find_accelerator(accelerator)
    if known is None:
        return "nvidia.com/gpu"
    chip = known.accelerator
    if (chip.vendor, chip.kind) == (Vendor.INTEL, AcceleratorKind.ASIC):
        return "habana.ai/gaudi"
    return _RESOURCES.get(chip.vendor, "nvidia.com/gpu")


def list_offers(
    nodes: Sequence[KubernetesNode],
    *,
    region: str,
    zone: str,
    gpu_rate: AcceleratorRates,
    node_rate: HourlyRate,
    waits: bool,
) -> Sequence[Offer]:
    """Return one offer for each kind of node and number of accelerators. For nodes without
    accelerators, one offer for each size is returned. If `gpu_rate` and `node_rate` are 0, a part
    of a node costs its share of the machine's own price. If similar nodes have different prices,
    the highest price is used.
    """
    usable = [node for node in nodes if not node.why_not]
    # a pod may get any node with its accelerators, so in a cluster of several services no offer
    # is of one of them
    services = {node.service for node in nodes}
    service = services.pop() if len(services) == 1 else ""
    kinds: dict[str, list[KubernetesNode]] = {}
    for node in usable:
        if node.shape.cpus and node.shape.memory_mib:
            kinds.setdefault(str((node.shape, node.resource, node.spot)), []).append(node)
    groups = [{node.name for node in alike} for alike in kinds.values()]
    offers: dict[str, Offer] = {}
    for _, alike in sorted(kinds.items()):
        location = OfferLocation(
            provider="kubernetes",
            cluster=region,
            queue=zone,
            taken=alike[0].spot,
            widest=max(node.shape.cpus for node in usable),
            pool=name_pool((node.name for node in alike), groups),
        )
        prices = _price(alike, gpu_rate(alike[0].product), node_rate)
        for offer in _list_parts(alike, location, prices, waits=waits):
            offer = replace(offer, service=service)
            known = offers.get(offer.key, offer)
            offers[offer.key] = max(known, offer, key=lambda each: each.capacity or 0)
    return list(offers.values())


def _price(
    alike: Sequence[KubernetesNode], gpu_rate: HourlyRate, node_rate: HourlyRate
) -> PartPrices:
    """Return the hourly prices of one GPU and of one whole node in a group of similar nodes. If the
    settings have no price of a node (0), the price is the highest of the machines in the group. If
    the settings have no price of a GPU (0), it is a GPU's share of this price.
    """
    whole = max(node.rate for node in alike)
    part = HourlyRate(whole.micros_per_hour // max(1, alike[0].shape.gpus))
    return PartPrices(
        gpu=part if gpu_rate == _FREE else gpu_rate,
        node=whole if node_rate == _FREE else node_rate,
    )


def _list_parts(
    alike: Sequence[KubernetesNode], location: OfferLocation, prices: PartPrices, *, waits: bool
) -> Iterator[Offer]:
    """Return the offers for similar nodes."""
    shape = alike[0].shape
    for part in list_parts(shape):
        fitting = [count_fitting(node, part_of(part)) for node in alike if not node.pool]
        pools = ", ".join(sorted({node.pool for node in alike if node.pool}))
        more = f", pool {pools} adds nodes" if pools else ""
        yield make_offer(
            location,
            shape,
            part,
            prices,
            capacity=None if waits or pools else sum(fitting),
            source=f"Kubernetes, {sum(map(bool, fitting))} of {len(fitting)} nodes free{more}",
        )


def part_of(part: NodeShape) -> ResourceAmount:
    """Return the resource requests of a pod of this size."""
    return ResourceAmount(
        cpus=Fraction(part.cpus), memory=part.memory_mib * _MIB, gpus=part.gpus, pods=1
    )


def count_fitting(node: KubernetesNode, part: ResourceAmount) -> int:
    """Return the number of pods of this size that fit on the node now."""
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
    """Return the nodes that match an offer, including nodes that are busy."""
    return [
        node
        for node in nodes
        if bool(node.resource) >= bool(offer.accelerator_count)
        and is_of(node.shape, offer, spot=node.spot)
    ]
