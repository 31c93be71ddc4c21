"""What this provider says about itself."""

from collections.abc import Mapping
from datetime import timedelta

from cavvy.providers.abilities import (
    CHECKS_TASKS,
    CLOSEABLE,
    EXPORTS_TASKS,
    HAS_PARTS,
    RELAYS_AGENTS,
    SIGNALS_CHANGES,
    STATES_POLICY,
    WHO_AM_I,
)
from cavvy.providers.base import Feature, Manifest
from cavvy.providers.settings import flag, gpu_rates, node_price, number, text

UNSUPPORTED: Mapping[Feature, str] = {
    Feature.BUILD: "pods start from images of a registry; `cavvy image build TASK.YAML --push "
    "NAME` makes one to name",
    Feature.LOGIN: "the cluster pulls images with its own secrets, which the setting "
    "`pull_secrets` names",
    Feature.NETWORK: "Kubernetes does not say how fast the network between its nodes is, and nodes "
    "choose none",
    Feature.DISK: "pods use the disks that the nodes have; size and type cannot be chosen",
}


MANIFEST = Manifest(
    name="kubernetes",
    title="Kubernetes clusters",
    docs="docs/guides/kubernetes.md",
    unsupported=UNSUPPORTED,
    abilities=(
        HAS_PARTS,
        SIGNALS_CHANGES,
        RELAYS_AGENTS,
        CHECKS_TASKS,
        WHO_AM_I,
        STATES_POLICY,
        EXPORTS_TASKS,
        CLOSEABLE,
    ),
    visibility_delay=timedelta(0),
    settings=(
        text(
            "kubeconfig",
            "The file that names clusters and users. Unset: `KUBECONFIG`, then `~/.kube/config`, "
            "then the service account of the pod that the server runs in.",
        ),
        text(
            "contexts",
            "Names of contexts with commas between them; each is a region of its own. "
            "Unset: the current context.",
        ),
        text(
            "namespace", "Where pods are made. Unset: the context's own namespace, else `default`."
        ),
        text("image", "What a task without an `image` runs in.", "python:3.12"),
        gpu_rates(),
        node_price(),
        text(
            "queue",
            "The local queue of Kueue that gangs are submitted to; they wait there, and start as "
            "one.",
        ),
        flag(
            "wait",
            "`true`: pods may wait for nodes, which an autoscaler adds. `false`: Cavvy keeps jobs "
            "until enough is free. With a `queue`, jobs wait in any case.",
        ),
        text("priority_class", "The priority class of pods. Unset: the cluster's default."),
        text(
            "service_account",
            "As whom pods act. Unset: the namespace's default, whose token is not mounted.",
        ),
        text(
            "pull_secrets",
            "Names of secrets, with commas between them, with which images are pulled.",
        ),
        text("runtime_class", "The runtime class of pods, such as `nvidia`."),
        text("scheduler", "The scheduler of pods. Unset: the cluster's default."),
        text("node_selector", "Only nodes with these labels are used: `pool=gpu zone=a`."),
        text(
            "tolerations",
            "Taints that are borne: `key=value:effect`, `key:effect` or `key`, with spaces "
            "between. Taints of the keys of accelerators, such as `nvidia.com/gpu`, are borne by "
            "pods that hold some.",
        ),
        number(
            "lost_after_s",
            "A node that has not been heard of for so long (beyond what the cluster itself waits) "
            "is lost, and its gang with it.",
            default=60,
            minimum=1,
            unit="seconds",
            whole=True,
        ),
    ),
)
