"""The profiles of clouds' Kubernetes services: how their nodes are recognized, whose prices the
nodes have, and what a node with accelerators needs there. Data, without I/O.

A profile has the name that stands for the service in `resources.providers`, see
`cavvy.domain.offers.CLUSTER_SERVICES`.
"""

from collections.abc import Mapping
from typing import Any

from cavvy.domain.values import Struct

Object = Mapping[str, Any]


class ClusterProfile(Struct, frozen=True, kw_only=True):
    """One service. Its nodes have one of the labels `marks`; a mark without a slash is the end of
    the label's prefix. `cloud` is the provider in the catalog that has the machines' prices.
    `spot` are labels of nodes that may be preempted, the newest first, and `pool` is the label that
    names a node's pool. `states` is a label with the node's state, and its only
    value at which work may start. `plugin` says how its nodes get the driver and the device plugin.
    """

    name: str
    title: str
    cloud: str
    marks: tuple[str, ...]
    spot: tuple[tuple[str, str], ...] = ()
    pool: str = ""
    states: tuple[str, str] = ("", "")
    plugin: str


# Sources: https://cloud.google.com/kubernetes-engine/docs/how-to/gpus and .../spot-vms,
# https://learn.microsoft.com/azure/aks/use-labels and .../use-nvidia-gpu,
# https://docs.aws.amazon.com/eks/latest/userguide/managed-node-groups.html,
# https://docs.coreweave.com/products/cks/clusters/scheduling/workload-scheduling
PROFILES = (
    ClusterProfile(
        name="gke",
        title="Google Kubernetes Engine",
        cloud="gcp",
        marks=("cloud.google.com/gke-nodepool",),
        spot=(
            ("cloud.google.com/gke-spot", "true"),
            ("cloud.google.com/gke-preemptible", "true"),
        ),
        pool="cloud.google.com/gke-nodepool",
        plugin="create the node pool with `--accelerator type=…,gpu-driver-version=default`, or "
        "install Google's driver DaemonSet: "
        "https://cloud.google.com/kubernetes-engine/docs/how-to/gpus",
    ),
    ClusterProfile(
        name="aks",
        title="Azure Kubernetes Service",
        cloud="azure",
        marks=("kubernetes.azure.com/cluster", "kubernetes.azure.com/agentpool"),
        spot=(("kubernetes.azure.com/scalesetpriority", "spot"),),
        pool="kubernetes.azure.com/agentpool",
        plugin="install NVIDIA's device plugin or GPU operator: "
        "https://learn.microsoft.com/azure/aks/use-nvidia-gpu",
    ),
    ClusterProfile(
        name="eks",
        title="Amazon Elastic Kubernetes Service",
        cloud="aws",
        marks=("eks.amazonaws.com", "karpenter.k8s.aws"),
        spot=(("eks.amazonaws.com/capacityType", "SPOT"),),
        pool="eks.amazonaws.com/nodegroup",
        plugin="use an accelerated AMI and install the device plugin: "
        "https://docs.aws.amazon.com/eks/latest/userguide/ml-eks-k8s-device-plugin.html",
    ),
    ClusterProfile(
        name="coreweave",
        title="CoreWeave Kubernetes Service",
        cloud="coreweave",
        marks=("coreweave.cloud",),
        states=("node.coreweave.cloud/state", "production"),
        plugin="CoreWeave installs the device plugin itself; if the node is not starting, ask "
        "CoreWeave's support",
    ),
)
# the same for nodes of other clusters
PLUGIN = "install the vendor's device plugin, such as https://github.com/NVIDIA/k8s-device-plugin"
# the scheme of the provider IDs that a cloud's controller gives to nodes -> cloud; also nodes of
# clusters that users run on machines of the cloud have them
_CLOUDS = {"aws": "aws", "gce": "gcp", "azure": "azure"}


def find_profile(labels: Mapping[str, str]) -> ClusterProfile | None:
    """Return the profile of the service that set these labels of a node, or None."""
    prefixes = {name.partition("/")[0] for name in labels}
    for profile in PROFILES:
        for mark in profile.marks:
            if mark in labels if "/" in mark else any(_is_within(each, mark) for each in prefixes):
                return profile
    return None


def find_cloud(node: Object) -> str:
    """Return the provider in the catalog that has the price of the node's machine, or ""."""
    if profile := find_profile(node["metadata"].get("labels") or {}):
        return profile.cloud
    scheme, _, _ = str((node.get("spec") or {}).get("providerID") or "").partition("://")
    return _CLOUDS.get(scheme, "")


def _is_within(prefix: str, domain: str) -> bool:
    return prefix == domain or prefix.endswith(f".{domain}")
