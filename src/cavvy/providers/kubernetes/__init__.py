"""Kubernetes clusters: each gang is a group of bare pods, with an agent in each pod."""

from collections.abc import Mapping
from datetime import timedelta

from cavvy.providers.abilities import (
    CHECKS_TASKS,
    CLOSEABLE,
    EXPORTS_TASKS,
    HAS_PARTS,
    RELAYS_AGENTS,
    REPLACES_NODES,
    SIGNALS_CHANGES,
    STATES_POLICY,
    WHO_AM_I,
)
from cavvy.providers.base import Feature, Manifest, explain_results
from cavvy.providers.kubernetes.profiles import PROFILES, describe_service
from cavvy.providers.settings import flag, gpu_rates, node_price, number, text

UNSUPPORTED: Mapping[Feature, str] = {
    Feature.BUILD: "pods start from images in a registry; `cavvy image build TASK.YAML --push "
    "NAME` builds an image and pushes it",
    Feature.LOGIN: "the cluster pulls images with its own secrets, which the setting "
    "`pull_secrets` names",
    Feature.NETWORK: "Kubernetes does not report the network's speed, so tasks cannot select nodes "
    "by network speed",
    Feature.RESULTS: explain_results("a pod's disk is deleted when the pod ends", "the pod"),
    Feature.DISK: "pods use the nodes' own disks, whose size and type cannot be chosen",
}


MANIFEST = Manifest(
    name="kubernetes",
    title="Kubernetes clusters",
    cloud="cavvy.providers.kubernetes.provider:KubernetesProvider",
    no_project_accounts="a kubeconfig can name programs and files on the server, and any address "
    "in the server's network",
    unsupported=UNSUPPORTED,
    abilities=(
        HAS_PARTS,
        SIGNALS_CHANGES,
        RELAYS_AGENTS,
        REPLACES_NODES,
        CHECKS_TASKS,
        WHO_AM_I,
        STATES_POLICY,
        EXPORTS_TASKS,
        CLOSEABLE,
    ),
    visibility_delay=timedelta(0),
    keeps_topology=True,
    options={
        "pod": "fields of the task's pods, merged as in a strategic merge patch: {spec: {…}, "
        "metadata: {…}}",
        "docker": "a container engine next to the work: `all`, or `build` for image builds only; "
        "with {mode: …, cache: CLAIM}, a volume claim keeps the engine's data",
    },
    docs="docs/guides/kubernetes.md",
    services={each.name: describe_service(each) for each in PROFILES},
    settings=(
        text(
            "kubeconfig",
            "The kubeconfig file, which names clusters and users. The default is `KUBECONFIG`, "
            "then "
            "`~/.kube/config`, then the service account of the pod that the server runs in.",
        ),
        text(
            "contexts",
            "The kubeconfig contexts to use, separated by commas. Each context is a separate "
            "region. The default is the current context.",
        ).for_setup(),
        text(
            "namespace",
            "The namespace of pods. The default is the context's own namespace or, without one, "
            "`default`.",
        ),
        text("image", "The image for tasks that name no image.", "python:3.12"),
        gpu_rates(),
        node_price(),
        flag(
            "catalog_prices",
            "If `true`, a pod on a machine of EKS, GKE, AKS or CoreWeave costs its share of the "
            "machine's catalog price, and jobs need consent to costs. The prices in "
            "`price_usd_gpu_hr` and `price_usd_node_hr`, if set, replace the catalog's price. Set "
            "`catalog_prices` to `false` if you have already paid for the machines.",
            default=True,
        ),
        text(
            "queue",
            "The Kueue local queue for gangs. All pods of a gang start at the same time.",
        ),
        text(
            "topology",
            "Names for labels of nodes in the key `topology` of tasks, such as "
            "`rack=example.com/rack block=example.com/block`. `zone`, `region`, `host` and "
            "`nvlink` have the usual labels; any other name is itself a label.",
        ),
        flag(
            "wait",
            "If `true`, pods may wait for nodes from an autoscaler. If `false`, Cavvy queues "
            "jobs until enough nodes are free. If `queue` is set, jobs always wait in Kueue's "
            "queue, and `wait` has no effect.",
        ),
        text(
            "pools",
            "The path of a YAML file with node pools that an autoscaler can start from zero "
            "nodes. Each pool is a Node object, or `{name, cloud, instance}` with optional "
            "`spot`, `labels` and `taints`. Cavvy finds pools of Karpenter, GKE compute classes "
            "and the Cluster API without this file.",
        ),
        text(
            "priority_class",
            "The priority class of pods. The default is the cluster's default priority class.",
        ),
        text(
            "service_account",
            "The service account of pods. The default is the namespace's default account, whose "
            "token is not mounted.",
        ),
        text(
            "pull_secrets",
            "The names of the secrets for pulling images, separated by commas.",
        ),
        text(
            "pod",
            "Fields of every pod, merged as in a strategic merge patch: YAML such as `{spec: "
            "{hostIPC: true}}`, or the path of a YAML file. A task can add fields to its own pods "
            "with `resources.options`.",
        ),
        text("runtime_class", "The runtime class of pods, such as `nvidia`."),
        text("scheduler", "The scheduler of pods. The default is the cluster's default scheduler."),
        text(
            "node_selector",
            "Cavvy uses only nodes with these labels, such as `pool=gpu zone=a`.",
        ),
        text(
            "tolerations",
            "The taints that pods tolerate, separated by spaces: `key=value:effect`, `key:effect` "
            "or `key`. Pods with accelerators also tolerate taints whose key is the accelerators' "
            "resource name, such as `nvidia.com/gpu`.",
        ),
        number(
            "lost_after_s",
            "A node that is reported as not ready for this long counts as lost, and so does its "
            "gang. The cluster itself reports a dead node only after a delay.",
            default=60,
            minimum=1,
            unit="seconds",
            whole=True,
        ),
    ),
)
