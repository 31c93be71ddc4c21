"""Writes manifests for `kubectl apply` with the permissions that the Kubernetes provider needs. No
I/O."""

from collections.abc import Sequence

import yaml

from cavvy.providers.kubernetes.node_pools import LISTS

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
