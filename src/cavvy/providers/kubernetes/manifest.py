"""The manifest of the Kubernetes provider."""

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
    "NAME` builds and pushes one",
    Feature.LOGIN: "the cluster pulls images with its own secrets, set with `pull_secrets`",
    Feature.NETWORK: "Kubernetes does not report the network's speed, and nodes cannot be chosen "
    "by it",
    Feature.DISK: "pods use the nodes' own disks; size and type cannot be chosen",
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
    options={
        "pod": "fields of its pods, merged as in a patch: {spec: {…}, metadata: {…}}",
        "docker": "a container engine beside the work: `all`, or `build` for image builds only; "
        "{mode: …, cache: CLAIM} keeps its data",
    },
    settings=(
        text(
            "kubeconfig",
            "The file that names clusters and users. The default is `KUBECONFIG`, then "
            "`~/.kube/config`, then the service account of the pod that the server runs in.",
        ),
        text(
            "contexts",
            "Names of contexts, separated by commas; each is its own region. "
            "The default is the current context.",
        ),
        text(
            "namespace",
            "The namespace of pods. The default is the context's own namespace, or else `default`.",
        ),
        text("image", "The image of tasks that name none.", "python:3.12"),
        gpu_rates(),
        node_price(),
        text(
            "queue",
            "The local queue of Kueue to which gangs are submitted. All pods of a gang start at "
            "the same time.",
        ),
        flag(
            "wait",
            "If `true`, pods may wait for nodes from an autoscaler. If `false`, Cavvy holds jobs "
            "until enough nodes are free. With a `queue`, jobs wait in any case.",
        ),
        text(
            "pools",
            "A YAML file of node pools that an autoscaler can start from zero nodes: each a Node "
            "object, or `{name, cloud, instance}` with `spot`, `labels` and `taints`. Cavvy finds "
            "the pools of Karpenter, GKE compute classes and the Cluster API by itself.",
        ),
        text(
            "priority_class",
            "The priority class of pods. The default is the cluster's own default.",
        ),
        text(
            "service_account",
            "The service account of pods. The default is the namespace's default account, whose "
            "token is not mounted.",
        ),
        text(
            "pull_secrets",
            "Names of the secrets for pulling images, separated by commas.",
        ),
        text(
            "pod",
            "Fields of every pod, merged as in a patch: YAML such as `{spec: {hostIPC: true}}`, or "
            "the path of a YAML file. A task adds its own with `resources.options`.",
        ),
        text("runtime_class", "The runtime class of pods, such as `nvidia`."),
        text("scheduler", "The scheduler of pods. The default is the cluster's own default."),
        text("node_selector", "Only nodes with these labels are used: `pool=gpu zone=a`."),
        text(
            "tolerations",
            "Tolerated taints: `key=value:effect`, `key:effect` or `key`, separated by spaces. "
            "Pods with accelerators also tolerate the taints of their keys, such as "
            "`nvidia.com/gpu`.",
        ),
        number(
            "lost_after_s",
            "A node that is not ready for this long (in addition to the cluster's own delay) "
            "counts as lost, and so does its gang.",
            default=60,
            minimum=1,
            unit="seconds",
            whole=True,
        ),
    ),
)
