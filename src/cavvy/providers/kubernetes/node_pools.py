"""Reads the node pools to which an autoscaler can add nodes, including pools without nodes. No
I/O.

Each pool is described by a template: a Node object with the labels, taints and resources that a new
node will have. Pools come from Karpenter (NodePool), GKE (ComputeClass), the Cluster API (objects
with the annotations of the cluster autoscaler), and the file in the setting `pools`.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from cavvy.domain.offers import Offer
from cavvy.domain.values import Struct, field, replace
from cavvy.providers.base import Refused
from cavvy.providers.kubernetes.cluster import (
    FindInstance,
    KubernetesNode,
    NodeMachine,
    find_resource,
    name_product,
    read_nodes,
)
from cavvy.providers.kubernetes.options import Toleration
from cavvy.providers.kubernetes.profiles import PROFILES

Object = Mapping[str, Any]

KARPENTER, COMPUTE_CLASSES = "karpenter.sh/v1/nodepools", "cloud.google.com/v1/computeclasses"
MACHINES = ("cluster.x-k8s.io/v1beta1/machinedeployments", "cluster.x-k8s.io/v1beta1/machinepools")
LISTS = (KARPENTER, COMPUTE_CLASSES, *MACHINES)
_INSTANCE, _CAPACITY = "node.kubernetes.io/instance-type", "karpenter.sh/capacity-type"
_CLOUDS = {"karpenter.k8s.aws": "aws", "eks.amazonaws.com": "aws", "karpenter.azure.com": "azure"}
# The labels that managed Kubernetes gives to the nodes of a pool, and those of its spot nodes.
_POOL_LABELS = {each.cloud: (each.pool, dict(each.spot[:1])) for each in PROFILES if each.pool}
# https://github.com/kubernetes/autoscaler/tree/master/cluster-autoscaler/cloudprovider/clusterapi
_SCALING = "capacity.cluster-autoscaler.kubernetes.io/"
# The assumed fractions of a machine's CPUs and memory that pods can use. The system needs the rest.
_USABLE_CPUS, _USABLE_MEMORY = 0.95, 0.9


class PoolTemplate(Struct, frozen=True, kw_only=True):
    """A node that a pool can add. `product` names the node's accelerators. If `rule` (a label and
    its value) is set, pods with accelerators must select that label to run on the node.
    """

    pool: str
    labels: Mapping[str, str]
    resources: Mapping[str, str]
    taints: Sequence[Object] = field(default_factory=tuple)
    rule: tuple[str, str] | None = None
    product: str = ""
    machine: NodeMachine = field(default_factory=NodeMachine)  # the region is not set


def make_nodes(
    templates: Sequence[PoolTemplate], selector: Mapping[str, str], borne: Sequence[Toleration]
) -> Sequence[KubernetesNode]:
    """Return the nodes that the pools can add, one for each kind of node."""
    found: list[KubernetesNode] = []
    for each in templates:
        ready = {"conditions": [{"type": "Ready", "status": "True"}]}
        resources = {"capacity": each.resources, "allocatable": each.resources}
        node = {
            "metadata": {"name": f"pool {each.pool}", "labels": each.labels},
            "spec": {"taints": each.taints},
            "status": {**ready, **resources},
        }
        for made in read_nodes([node], (), selector, borne):
            made = replace(made, pool=each.pool, machine=each.machine, unseen="")
            if each.rule is not None and made.resource:
                label, value = each.rule
                shape = replace(made.shape, gpu=each.product)
                made = replace(
                    made, label=label, label_value=value, product=each.product, shape=shape
                )
            found.append(made)
    return found


def read_templates(source: str, item: Object, find: FindInstance) -> Sequence[PoolTemplate]:
    """Return the node templates that one pool object describes. `source` is the list that contains
    the object.
    """
    if source == KARPENTER:
        return list(_read_karpenter(item, find))
    if source == COMPUTE_CLASSES:
        return list(_read_compute_class(item, find))
    return list(_read_machines(item))


def _read_karpenter(item: Object, find: FindInstance) -> Iterator[PoolTemplate]:
    name, template = item["metadata"]["name"], item["spec"]["template"]
    spec = template["spec"]
    wanted = {
        each["key"]: each.get("values") or []
        for each in spec.get("requirements") or ()
        if each.get("operator") == "In"
    }
    reference = spec.get("nodeClassRef") or {}
    cloud = _CLOUDS.get(reference.get("group", ""), "gcp")
    families = wanted.get(f"{reference.get('group')}/instance-family", [])
    sizes = wanted.get(f"{reference.get('group')}/instance-size", [])
    instances = wanted.get(_INSTANCE) or [".".join(both) for both in product(families, sizes)]
    labels = {
        **(template.get("metadata") or {}).get("labels", {}),
        **{key: values[0] for key, values in wanted.items() if len(values) == 1},
        "karpenter.sh/nodepool": name,
    }
    for instance, purchase in product(instances, wanted.get(_CAPACITY) or ["on-demand"]):
        machine = find(cloud, instance)
        if machine is not None:
            own = {**labels, _INSTANCE: instance, _CAPACITY: purchase}
            taints = spec.get("taints") or ()
            yield _make_template(name, machine, own, taints, (_INSTANCE, instance))


def _read_compute_class(item: Object, find: FindInstance) -> Iterator[PoolTemplate]:
    name = item["metadata"]["name"]
    rule = ("cloud.google.com/compute-class", name)
    for each in item["spec"].get("priorities") or ():
        machine = find("gcp", each.get("machineType") or "")
        if machine is not None:
            spot = _POOL_LABELS["gcp"][1] if each.get("spot") else {}
            yield _make_template(name, machine, {**spot, rule[0]: name}, (), rule)


def _read_machines(item: Object) -> Iterator[PoolTemplate]:
    notes = item["metadata"].get("annotations") or {}
    told = {key.removeprefix(_SCALING): value for key, value in notes.items() if _SCALING in key}
    if {"cpu", "memory"} <= told.keys():
        count = told.get("gpu-count", "0")
        gpus = {told.get("gpu-type", "nvidia.com/gpu"): count} if count != "0" else {}
        taints = [_read_taint(word) for word in told.get("taints", "").split(",") if word]
        pairs = (word.partition("=") for word in told.get("labels", "").split(",") if word)
        yield PoolTemplate(
            pool=item["metadata"]["name"],
            labels={key: value for key, _, value in pairs},
            resources={"cpu": told["cpu"], "memory": told["memory"], **gpus},
            taints=taints,
        )


def read_declared(path: str, find: FindInstance) -> Sequence[PoolTemplate]:
    """Return the templates in the file that the setting `pools` names. Raises Refused."""
    what = f"[providers.kubernetes] pools: {path}"
    try:
        documents = list(yaml.safe_load_all(Path(path).expanduser().read_text("utf-8")))
        items = [
            item for each in documents for item in (each if isinstance(each, list) else [each])
        ]
        return [_read_declared(item, find) for item in items if item]
    except (OSError, yaml.YAMLError) as error:
        raise Refused(f"{what}: {error}") from error
    except (AttributeError, KeyError, TypeError) as error:
        raise Refused(
            f"{what}: each pool is a Node object, or has `name`, `cloud` and `instance`: {error!r}"
        ) from error


def _read_declared(item: Object, find: FindInstance) -> PoolTemplate:
    if item.get("kind") == "Node":
        return PoolTemplate(
            pool=item["metadata"]["name"],
            labels=item["metadata"].get("labels") or {},
            resources=item["status"].get("allocatable") or item["status"]["capacity"],
            taints=(item.get("spec") or {}).get("taints") or (),
        )
    name, cloud, instance = item["name"], item["cloud"], item["instance"]
    machine = find(cloud, instance)
    if machine is None:
        raise Refused(f"[providers.kubernetes] pools: {cloud} has no instance type {instance}")
    label, spot = _POOL_LABELS[cloud]
    labels = {label: name, **(spot if item.get("spot") else {}), **(item.get("labels") or {})}
    return _make_template(name, machine, labels, item.get("taints") or (), (label, name))


def _make_template(
    pool: str,
    machine: Offer,
    labels: Mapping[str, str],
    taints: Sequence[Object],
    rule: tuple[str, str],
) -> PoolTemplate:
    resources = {
        "cpu": str(int(machine.vcpus * _USABLE_CPUS)),
        "memory": f"{int(machine.memory_mib * _USABLE_MEMORY)}Mi",
    }
    if machine.accelerator is not None:
        resources[find_resource(machine.accelerator)] = str(machine.accelerator_count)
    return PoolTemplate(
        pool=pool,
        labels=labels,
        resources=resources,
        taints=taints,
        rule=rule,
        product=name_product(machine),
        machine=NodeMachine(machine.provider, machine.instance_type),
    )


def _read_taint(word: str) -> Object:
    pair, _, effect = word.partition(":")
    key, _, value = pair.partition("=")
    return {"key": key, "value": value, "effect": effect}
