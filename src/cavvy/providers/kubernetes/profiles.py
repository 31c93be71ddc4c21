"""The profiles of clouds' Kubernetes services: how their nodes are recognized, whose prices the
nodes have, and what a node with accelerators needs there. Data, without I/O.

A profile has the name that stands for the service in `resources.providers`, see
`cavvy.domain.offers.CLUSTER_SERVICES`.
"""

from collections.abc import Mapping
from typing import Any

from cavvy.domain.values import Struct
from cavvy.providers.base import ServicePage

Object = Mapping[str, Any]


class ClusterProfile(Struct, frozen=True, kw_only=True):
    """One service. Its nodes have one of the labels `marks`; a mark without a slash is the end of
    the label's prefix. `cloud` is the provider in the catalog that has the machines' prices.
    `spot` are labels of nodes that may be preempted, the newest first, and `pool` is the label that
    names a node's pool. `states` is a label with the node's state, and its only
    value at which work may start. `plugin` says how its nodes get the driver and the device plugin.
    `products` are its labels with the names of accelerators. `login` says how a kubeconfig logs in,
    `scaled` which pools without nodes are offered, `price` how the price of a machine is found, and
    `missing` what else differs from other clusters or is not supported.
    """

    name: str
    title: str
    cloud: str
    marks: tuple[str, ...]
    spot: tuple[tuple[str, str], ...] = ()
    pool: str = ""
    states: tuple[str, str] = ("", "")
    plugin: str
    products: tuple[str, ...]
    login: str
    scaled: str
    price: str
    missing: tuple[tuple[str, str], ...] = ()


_BY_TYPE = "by the machine's type and region"
_IN_FILE = "describe them in the file of the setting `pools`"
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
        products=("cloud.google.com/gke-accelerator", "cloud.google.com/gke-tpu-accelerator"),
        login="the plugin `gke-gcloud-auth-plugin` (`gcloud components install "
        "gke-gcloud-auth-plugin`)",
        scaled="those of compute classes with machine types are found; other node pools: "
        f"{_IN_FILE}",
        price=f"{_BY_TYPE}; GPUs that are attached to N1 machines count with them",
        missing=(
            (
                "RDMA",
                "pods request no GPUDirect networks; for them, add fields with the setting `pod`",
            ),
        ),
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
        products=(),
        login="the plugin `kubelogin` with Entra ID (`az aks install-cli`)",
        scaled="those of Karpenter (node auto-provisioning) are found; other node pools: "
        f"{_IN_FILE}",
        price=_BY_TYPE,
        missing=(
            (
                "names of GPUs",
                "AKS has no label for them: they are named by GPU feature discovery or by the "
                "machine's type",
            ),
            (
                "spot pools",
                "AKS taints their nodes: set `tolerations = "
                '"kubernetes.azure.com/scalesetpriority=spot:NoSchedule"`',
            ),
            (
                "InfiniBand",
                "pods of gangs request `rdma/shared_ib` if all fitting nodes have it: "
                "https://github.com/Azure/aks-rdma-infiniband",
            ),
        ),
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
        products=("k8s.amazonaws.com/accelerator", "karpenter.k8s.aws/instance-gpu-name"),
        login="`aws eks get-token` of the AWS CLI",
        scaled=f"those of Karpenter are found; node groups: {_IN_FILE}",
        price=_BY_TYPE,
        missing=(
            (
                "EFA",
                "only pods with all GPUs of a node request `vpc.amazonaws.com/efa`, which Amazon's "
                "device plugin must provide: "
                "https://docs.aws.amazon.com/eks/latest/userguide/node-efa.html",
            ),
        ),
    ),
    ClusterProfile(
        name="coreweave",
        title="CoreWeave Kubernetes Service",
        cloud="coreweave",
        marks=("coreweave.cloud",),
        states=("node.coreweave.cloud/state", "production"),
        plugin="CoreWeave installs the device plugin itself; if the node is not starting, ask "
        "CoreWeave's support",
        products=("gpu.nvidia.com/model",),
        login="a token in the kubeconfig file from CoreWeave's console; no plugin",
        scaled=_IN_FILE,
        price="by the model and the number of the node's GPUs",
        missing=(
            ("spot", "no label marks nodes that may be preempted, so none is offered as spot"),
            (
                "InfiniBand",
                "pods of gangs request `rdma/ib` if all fitting nodes have it",
            ),
        ),
    ),
)
# the same for nodes of other clusters
PLUGIN = "install the vendor's device plugin, such as https://github.com/NVIDIA/k8s-device-plugin"
# the scheme of the provider IDs that a cloud's controller gives to nodes -> cloud; also nodes of
# clusters that users run on machines of the cloud have them
_CLOUDS = {"aws": "aws", "gce": "gcp", "azure": "azure"}


def describe_service(profile: ClusterProfile) -> ServicePage:
    """Return what is special about the clusters of this service, for users."""
    spot = [f"{name}={value}" for name, value in profile.spot]
    if profile.name == "eks":
        spot.append("karpenter.sh/capacity-type=spot")
    state, works = profile.states
    facts = [
        ("its nodes", "have the label " + " or ".join(map(_show_mark, profile.marks))),
        ("GPU names", "from " + " or ".join([*profile.products, "nvidia.com/gpu.product"])),
        *([("spot", "nodes with " + " or ".join(spot))] if spot else []),
        *([("pool", f"in the label {profile.pool}")] if profile.pool else []),
        *([("state", f"work starts only on nodes with {state}={works}")] if state else []),
        ("pools of 0", profile.scaled),
        ("login", profile.login),
        ("prices", f"those of {profile.cloud} in the catalog, {profile.price}"),
    ]
    missing = [("drivers", profile.plugin), *profile.missing]
    return ServicePage(title=profile.title, cloud=profile.cloud, facts=facts, missing=missing)


def _show_mark(mark: str) -> str:
    return mark if "/" in mark else f"{mark}/…"


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
