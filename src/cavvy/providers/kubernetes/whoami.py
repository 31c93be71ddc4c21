"""Describes a context for `cavvy check`: its user, nodes and limits, and missing permissions.
Writes manifests for `kubectl apply` with the permissions that the Kubernetes provider needs.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from cavvy.domain.units import format_count
from cavvy.providers.base import NoCapacity, Refused
from cavvy.providers.batch.shapes import identify_gpu, say_accelerators
from cavvy.providers.kubernetes.api import ApiServerRefused
from cavvy.providers.kubernetes.cluster import KubernetesNode
from cavvy.providers.kubernetes.context import ClusterContext
from cavvy.providers.kubernetes.node_pools import LISTS
from cavvy.providers.kubernetes.obstacles import probe_queue
from cavvy.providers.kubernetes.options import PodOptions
from cavvy.providers.kubernetes.pod_fields import find_refused
from cavvy.providers.kubernetes.pods import (
    CONTAINER,
    RANK,
    join_queue,
    labels_of,
    make_place,
    make_resources,
)
from cavvy.providers.kubernetes.profiles import PLUGIN, PROFILES
from cavvy.providers.kubernetes.quota import list_quotas

# A right is (API group, resource, verbs). Depending on their version, clusters check an exec
# request as GET or POST.
Right = tuple[str, str, tuple[str, ...]]
_NAMESPACED: tuple[Right, ...] = (
    ("", "pods", ("create", "delete", "get", "list", "watch")),
    ("", "pods/exec", ("create", "get")),
    ("", "configmaps", ("create", "delete", "get", "list", "patch")),
    ("", "secrets", ("create", "delete")),
    ("", "resourcequotas", ("list",)),
    ("", "limitranges", ("list",)),
    ("", "events", ("list",)),
    ("", "persistentvolumeclaims", ("create", "get")),
)
# additional rights for gangs submitted to a Kueue queue
_QUEUE: tuple[Right, ...] = (
    ("kueue.x-k8s.io", "localqueues", ("get",)),
    ("kueue.x-k8s.io", "workloads", ("delete", "get")),
)
CLUSTER: tuple[Right, ...] = (
    ("", "nodes", ("get", "list")),
    ("", "pods", ("list",)),
)
# optional rights that let Cavvy claim devices by Dynamic Resource Allocation
_CLAIMS: tuple[Right, ...] = (("resource.k8s.io", "resourceclaimtemplates", ("create",)),)
_DEVICES: tuple[Right, ...] = tuple(
    ("resource.k8s.io", each, ("list",))
    for each in ("deviceclasses", "resourceslices", "resourceclaims")
)
# optional cluster-wide rights that let Cavvy offer node pools without nodes
_POOLS: tuple[Right, ...] = tuple(
    (group, resource, ("list",)) for group, _, resource in (path.split("/") for path in LISTS)
)
# The rights without which Cavvy cannot run or remove any gang. All other rights are optional.
_NEEDED = {
    "list nodes of all namespaces",
    "create pods",
    "delete pods",
    "list pods",
    "create secrets",
    "delete secrets",
}
_NEEDED |= {f"{verb} configmaps" for verb in ("create", "delete", "get", "list", "patch")}
_EXEC = {
    "create pods/exec",
    "get pods/exec",
}  # which of these rights is needed depends on the cluster's version
SERVICE = "service"
_TRIAL = "cavvy-check"
# Errors that mean that the API server refuses every pod in this namespace with these settings.
# Other refusals may depend on a task's image and size.
_FOR_ALL = re.compile(
    r"no PriorityClass with name|RuntimeClass \S+ not found|error looking up service "
    r"account|violates PodSecurity|"
    r"failed quota: .*must specify|because it is being terminated",
    re.IGNORECASE,
)


# returns nodes with the prices of their machines; may block
PutPrices = Callable[[Sequence[KubernetesNode]], Sequence[KubernetesNode]]


async def whoami(
    cluster: ClusterContext, options: PodOptions, mark: str, put_prices: PutPrices
) -> Sequence[tuple[str, str]]:
    """Return (label, value) facts about the context. Raises TryAgain, Refused."""
    context = cluster.api.context
    try:
        version = (await cluster.api.get("/version")).get("gitVersion", "")
        missing = await _list_missing(cluster, list_rights(options.queue))
    except ApiServerRefused as error:
        raise error.provider_error from error
    facts = [
        ("context", f"{context.name}, {context.cluster.server}, Kubernetes {version}"),
        ("user", context.login.impersonate or context.user),
        ("namespace", context.namespace),
    ]
    if missing:
        told = (
            f"{', '.join(missing)}; `cavvy check kubernetes --policy` prints all rights that "
            "Cavvy needs"
        )
        if _NEEDED & set(missing) or _EXEC.issubset(missing):
            raise Refused(
                f"{context.login.impersonate or context.user} does not have the rights to {told}"
            )
        facts.append(("missing rights", told))
    if problem := await _try_pod(cluster, options, mark):
        facts.append(("a plain pod would be refused", problem))
    if options.queue:
        facts.append(("queue", await _say_queue(cluster, options.queue)))
    try:
        nodes = await asyncio.to_thread(put_prices, await cluster.nodes())
        facts += _say_nodes(nodes)
    except Refused as error:
        facts.append(("nodes", str(error)))
    for each in list_quotas(await cluster.quotas()):
        text = f"{_plain(each.used)} of {_plain(each.hard)} used"
        facts.append((f"quota {each.resource}", text))
    return facts


def _say_nodes(nodes: Sequence[KubernetesNode]) -> list[tuple[str, str]]:
    pools = [node for node in nodes if node.pool]
    nodes = [node for node in nodes if not node.pool]
    usable = [node for node in nodes if not node.why_not]
    names = {node.name for node in nodes}
    facts = [("nodes", f"{len({node.name for node in usable})} of {len(names)} usable")]
    gpus = [
        (identify_gpu(node.product)[0], node.shape.gpus, max(0, node.free.gpus))
        for node in usable
        if node.resource
    ]
    facts.append(("accelerators", say_accelerators(gpus)))
    facts += [*say_services(nodes), *say_machines(nodes)]
    for node in pools:
        what = f"{node.shape.gpus} x {node.product}" if node.resource else "no accelerators"
        text = node.why_not or f"can add nodes with {what}, {node.shape.cpus} CPUs"
        facts.append((f"pool {node.pool}", text))
    for node in nodes:
        if node.why_not:
            facts.append((f"node {node.name}", node.why_not))
        elif node.broken > 0:
            facts.append(
                (
                    f"node {node.name}",
                    f"{node.broken} of {node.shape.gpus} {node.resource} are unhealthy",
                )
            )
    return facts


def say_services(nodes: Sequence[KubernetesNode]) -> list[tuple[str, str]]:
    """Return the clouds' Kubernetes services that run the nodes, and what their nodes with
    accelerators lack. The labels are `service NAME`."""
    facts = []
    for profile in PROFILES:
        mine = [node for node in nodes if node.service == profile.name]
        if not mine:
            continue
        text = f"{profile.title}; machines have the prices of {profile.cloud}"
        if spot := sum(node.spot for node in mine):
            text += f"; {format_count(spot, 'spot node')}"
        if len({node.service for node in nodes}) > 1:
            text += "; the cluster also has other nodes, so its offers are only of kubernetes"
        facts.append((f"{SERVICE} {profile.name}", text))
    for (unseen, service), count in Counter(
        (node.unseen, node.service) for node in nodes if node.unseen
    ).items():
        plugin = next((each.plugin for each in PROFILES if each.name == service), PLUGIN)
        many = count != 1
        text = (
            f"{format_count(count, 'node')} should have {unseen}, but report{'' if many else 's'} "
            f"none: {plugin}"
        )
        facts.append(("missing accelerators", text))
    return facts


def say_machines(nodes: Sequence[KubernetesNode]) -> list[tuple[str, str]]:
    """Return the machines of clouds, with their catalog prices and RDMA networks."""
    known = [node for node in nodes if node.machine.cloud]
    counts = Counter((node.machine, node.spot, node.rate, node.rdma) for node in known)
    facts = []
    for (machine, spot, rate, rdma), count in sorted(counts.items(), key=str):
        price = f"${rate.usd:.4g} an hour" if rate.micros_per_hour else "no price"
        text = f"{format_count(count, 'node')}{' on spot' if spot else ''}"
        text += f" in {machine.region}" if machine.region else ""
        text += f", {price} in the catalog" + (f", RDMA as {rdma}" if rdma else "")
        facts.append((f"machine {machine.cloud} {machine.instance}", text))
    return facts


async def _list_missing(cluster: ClusterContext, namespaced: Sequence[Right]) -> list[str]:
    """Return the permissions that Cavvy uses but the user does not have."""
    wanted = [(cluster.api.context.namespace, *right) for right in namespaced] + [
        ("", *right) for right in CLUSTER
    ]
    asked = [
        (namespace, group, *resource.partition("/")[::2], verb)
        for namespace, group, resource, verbs in wanted
        for verb in verbs
    ]
    answers = await asyncio.gather(*(_may(cluster, *each) for each in asked))
    return [
        f"{verb} {resource}{'/' + sub if sub else ''}{'' if namespace else ' of all namespaces'}"
        for (namespace, _, resource, sub, verb), may in zip(asked, answers, strict=True)
        if not may
    ]


async def _may(
    cluster: ClusterContext, namespace: str, group: str, resource: str, sub: str, verb: str
) -> bool:
    attributes = {
        "namespace": namespace,
        "group": group,
        "resource": resource,
        "subresource": sub,
        "verb": verb,
    }
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {
            "resourceAttributes": {name: value for name, value in attributes.items() if value}
        },
    }
    answer = await cluster.api.make(
        "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review
    )
    return bool(((answer or {}).get("status") or {}).get("allowed"))


async def _try_pod(cluster: ClusterContext, options: PodOptions, mark: str) -> str:
    """Submit a plain pod as a dry run, which creates nothing. Return the reason why the API server
    would refuse the pod, or "" if it would accept the pod. Raises Refused if every pod would be
    refused.
    """
    # A cluster's policies may require the labels that all of Cavvy's pods have.
    labels = {**labels_of(mark, _TRIAL), RANK: "0"}
    metadata: dict[str, Any] = {"generateName": f"{_TRIAL}-", "labels": labels}
    join_queue(metadata, options.queue, _TRIAL, 1)
    container = {
        "name": CONTAINER,
        "image": options.image,
        "resources": make_resources(1, 256, "", 0),
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {**make_place(0, None, options), "containers": [container]},
    }
    path = f"/api/v1/namespaces/{cluster.api.context.namespace}/pods"
    if refused := await find_refused(cluster.api, path, pod, options.pod) if options.pod else ():
        raise Refused(f"[providers.kubernetes] pod: {'; '.join(refused)}")
    try:
        await cluster.api.make(path, pod, dry_run=True)
    except ApiServerRefused as error:
        # An exhausted quota is reported separately, and some webhooks do not support dry runs.
        if not isinstance(error.provider_error, Refused) or "dry run" in str(error):
            return ""
        if error.status == 404 or _FOR_ALL.search(str(error)):
            raise Refused(f"every pod would be refused: {error}") from error
        return str(error)
    return ""


async def _say_queue(cluster: ClusterContext, queue: str) -> str:
    """Describe the queue. Raises Refused if no job could start through the queue."""
    try:
        await probe_queue(cluster.api, queue)
    except NoCapacity as error:
        raise Refused(str(error)) from error
    except ApiServerRefused as error:
        return f"{queue}: could not be checked: {error}"
    return queue


def _plain(value: object) -> str:
    number = float(str(float(value)))  # type: ignore[arg-type]  # a Fraction
    return f"{number:g}"


def list_rights(queue: str) -> Sequence[Right]:
    """Return the permissions needed in the namespace."""
    return (*_NAMESPACED, *_QUEUE) if queue else _NAMESPACED


def make_policy(namespace: str, queue: str = "") -> str:
    """Return manifests of a service account, its permissions in one namespace, and its permissions
    in the cluster.
    """
    who = [{"kind": "ServiceAccount", "name": "cavvy", "namespace": namespace}]
    role = {"apiGroup": "rbac.authorization.k8s.io", "name": "cavvy"}
    rights = "rbac.authorization.k8s.io/v1"
    place = {"name": "cavvy", "namespace": namespace}
    documents = [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": place},
        {
            "apiVersion": rights,
            "kind": "Role",
            "metadata": place,
            "rules": _rules((*list_rights(queue), *_CLAIMS)),
        },
        {
            "apiVersion": rights,
            "kind": "RoleBinding",
            "metadata": place,
            "roleRef": {**role, "kind": "Role"},
            "subjects": who,
        },
        {
            "apiVersion": rights,
            "kind": "ClusterRole",
            "metadata": {"name": "cavvy"},
            "rules": _rules((*CLUSTER, *_POOLS, *_DEVICES)),
        },
        {
            "apiVersion": rights,
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "cavvy"},
            "roleRef": {**role, "kind": "ClusterRole"},
            "subjects": who,
        },
    ]
    return yaml.safe_dump_all(documents, sort_keys=False)


def _rules(rights: Sequence[Right]) -> list[dict[str, list[str]]]:
    return [
        {"apiGroups": [group], "resources": [resource], "verbs": list(verbs)}
        for group, resource, verbs in rights
    ]
