"""Accelerators that drivers publish by Dynamic Resource Allocation (DRA), and the claims that pods
request them with. No I/O.

Names and structures are those of the API group resource.k8s.io, in its versions v1, v1beta2 and
v1beta1. Device classes contain expressions (CEL) that Cavvy does not evaluate, so only the classes
of NVIDIA's driver are used, whose meaning is documented (github.com/NVIDIA/k8s-dra-driver-gpu).
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from cavvy.domain.values import Struct, replace
from cavvy.providers.kubernetes.cluster import DeviceClaim, KubernetesNode, read_quantity

Object = Mapping[str, Any]
DeviceKey = tuple[str, str, str]  # driver, pool and name of a device

GROUP = "/apis/resource.k8s.io"
VERSIONS = ("v1", "v1beta2", "v1beta1")  # the first that the API server has is used
_DRIVER = "gpu.nvidia.com"
# device class -> the driver's type of its devices
_CLASSES = {"gpu.nvidia.com": "gpu", "mig.nvidia.com": "mig"}
_REQUEST = "gpu"  # the name of a claim's request, and of the claim in its pod


class DraObjects(Struct, frozen=True, kw_only=True):
    """The objects of the API group that a cluster has; `version` is "" if it has none."""

    version: str = ""
    classes: Sequence[Object] = ()
    slices: Sequence[Object] = ()
    claims: Sequence[Object] = ()

    def list_nodes(self) -> Set[str]:
        """Return the names of the nodes with devices that can be claimed."""
        return {each.node for each in _list_devices(self)}


class _Device(Struct, frozen=True, kw_only=True):
    key: DeviceKey
    node: str
    claim: DeviceClaim
    spec: Object


def choose_version(group: Object) -> str:
    """Return the version of the API group to use, or "" if there is none that Cavvy knows."""
    served = {each.get("version") for each in group.get("versions") or ()}
    return next((each for each in VERSIONS if each in served), "")


def add_devices(nodes: Sequence[KubernetesNode], found: DraObjects) -> Sequence[KubernetesNode]:
    """Return the nodes, with an entry for each kind of published device. A node whose device plugin
    offers NVIDIA's GPUs keeps those, because both would give out the same devices."""
    devices = _list_devices(found)
    if not devices:
        return nodes
    room = _DeviceCounters(found.slices)
    taken = set(_list_taken(found.claims))
    for each in devices:
        if each.key in taken:
            room.take(each)
    by_node: dict[str, list[KubernetesNode]] = {}
    for node in nodes:
        by_node.setdefault(node.name, []).append(node)
    result: list[KubernetesNode] = []
    for name, entries in by_node.items():
        plugin = any(each.resource.startswith("nvidia.com/") for each in entries)
        mine = [] if plugin else [each for each in devices if each.node == name]
        plain = [each for each in entries if each.resource or not mine]
        result += [*plain, *_make_entries(entries[0], mine, taken, room)]
    return result


def _make_entries(
    node: KubernetesNode, devices: Sequence[_Device], taken: set[DeviceKey], room: "_DeviceCounters"
) -> Iterable[KubernetesNode]:
    kinds = dict.fromkeys(each.claim for each in devices)
    for kind in kinds:
        mine = [each for each in devices if each.claim == kind]
        free = room.count([each for each in mine if each.key not in taken])
        most = _DeviceCounters(room.slices).count(mine)
        product = f"{kind.product}-MIG-{kind.profile}" if kind.profile else kind.product
        yield replace(
            node,
            resource=kind.device_class,
            product=product.replace(" ", "-"),
            label="",
            label_value="",
            shape=replace(node.shape, gpus=most, gpu=product.replace(" ", "-")),
            free=node.free._replace(gpus=free),
            broken=0,
            claim=kind,
        )


def _list_devices(found: DraObjects) -> Sequence[_Device]:
    """Return the devices of known classes that the cluster has."""
    classes = {each["metadata"]["name"] for each in found.classes} & set(_CLASSES)
    newest = Counter[tuple[str, str]]()
    for one in found.slices:
        pool = one["spec"]["pool"]
        key = one["spec"]["driver"], pool["name"]
        newest[key] = max(newest[key], pool.get("generation", 0))
    devices: list[_Device] = []
    for one in found.slices:
        spec = one["spec"]
        pool, node = spec["pool"], spec.get("nodeName")
        if spec["driver"] != _DRIVER or not node:
            continue
        if pool.get("generation", 0) < newest[_DRIVER, pool["name"]]:
            continue  # the driver is replacing this slice
        for each in spec.get("devices") or ():
            body = each.get("basic") or each  # v1beta1 has one level more
            claim = _read_claim(body, found.version, classes)
            if claim is not None and not body.get("taints"):
                key3 = (_DRIVER, pool["name"], each["name"])
                devices.append(_Device(key=key3, node=node, claim=claim, spec=body))
    return devices


def _read_claim(device: Object, version: str, classes: set[str]) -> DeviceClaim | None:
    attributes = {
        name.removeprefix(f"{_DRIVER}/"): value.get("string", "")
        for name, value in (device.get("attributes") or {}).items()
    }
    kind, product = attributes.get("type", ""), attributes.get("productName", "")
    name = next((each for each, of in _CLASSES.items() if of == kind and each in classes), None)
    if name is None or not product:
        return None
    profile = attributes.get("profile", "") if kind == "mig" else ""
    return DeviceClaim(version=version, device_class=name, product=product, profile=profile)


def _list_taken(claims: Iterable[Object]) -> Iterable[DeviceKey]:
    for claim in claims:
        allocation = (claim.get("status") or {}).get("allocation") or {}
        for each in (allocation.get("devices") or {}).get("results") or ():
            if not each.get("adminAccess"):  # a monitor watches the device and leaves it to others
                yield each["driver"], each["pool"], each["device"]


class _DeviceCounters:
    """What is left of the counters that devices of a pool share, such as the slices of a GPU's
    memory, from which MIG makes instances of several sizes."""

    def __init__(self, slices: Sequence[Object]) -> None:
        self.slices = slices
        self._left = {
            (one["spec"]["pool"]["name"], shared["name"], name): read_quantity(value["value"])
            for one in slices
            for shared in one["spec"].get("sharedCounters") or ()
            for name, value in shared["counters"].items()
        }

    def take(self, device: _Device) -> bool:
        """Take what the device consumes, and return True, if enough of it is left."""
        wanted = {
            (device.key[1], each["counterSet"], name): read_quantity(value["value"])
            for each in device.spec.get("consumesCounters") or ()
            for name, value in each["counters"].items()
        }
        if any(self._left.get(key, 0) < amount for key, amount in wanted.items()):
            return False
        for key, amount in wanted.items():
            self._left[key] -= amount
        return True

    def count(self, devices: Iterable[_Device]) -> int:
        """Return how many of the devices could be allocated at the same time."""
        before = dict(self._left)
        found = sum([self.take(each) for each in devices])
        self._left = before
        return found


def make_template(
    name: str, claim: DeviceClaim, count: int, metadata: Object | None = None
) -> dict[str, Any]:
    """Return the ResourceClaimTemplate from which each pod of a gang gets its claim."""
    conditions = {"productName": claim.product}
    if claim.profile:
        conditions["profile"] = claim.profile
    expression = " && ".join(
        f'device.attributes["{_DRIVER}"].{attribute} == {json.dumps(value)}'
        for attribute, value in conditions.items()
    )
    request: dict[str, Any] = {
        "deviceClassName": claim.device_class,
        "allocationMode": "ExactCount",
        "count": count,
        "selectors": [{"cel": {"expression": expression}}],
    }
    old = claim.version == "v1beta1"
    named = {"name": _REQUEST, **(request if old else {"exactly": request})}
    return {
        "apiVersion": f"resource.k8s.io/{claim.version}",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name, **(metadata or {})},
        "spec": {"spec": {"devices": {"requests": [named]}}},
    }


def add_claim(pod: dict[str, Any], container: dict[str, Any], template: str) -> None:
    """Let a container of a pod use the devices of the pod's claim."""
    pod["resourceClaims"] = [{"name": _REQUEST, "resourceClaimTemplateName": template}]
    container["resources"]["claims"] = [{"name": _REQUEST}]
    # The driver makes the claimed devices visible. Without this variable, some images make all
    # GPUs of the node visible.
    container["env"] = [*container["env"], {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]


def claims_path(claim: DeviceClaim, namespace: str) -> str:
    """Return the path of a namespace's ResourceClaimTemplates."""
    return f"{GROUP}/{claim.version}/namespaces/{namespace}/resourceclaimtemplates"
