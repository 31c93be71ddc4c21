"""What this provider says about itself."""

from collections.abc import Mapping
from datetime import timedelta

from remuda.providers.base import Feature, Manifest, Setting, SettingKind

LACKS: Mapping[Feature, str] = {
    Feature.BUILD: "the nodes of a cluster build no images; `remuda image build --push NAME` makes one to name here",
    Feature.LOGIN: "pods pull with the secrets that the setting `pull_secrets` names, not with a task's own",
    Feature.BUILD: "pods start from images of a registry; `remuda image build --push NAME` makes one to name",
    Feature.LOGIN: "the cluster pulls images with its own secrets, which the setting `pull_secrets` names",
    Feature.NETWORK: "Kubernetes does not say how fast the network between its nodes is, and nodes choose none",
    Feature.DISK: "pods use the disks that the nodes have; size and type cannot be chosen",
}


def _text(name: str, consequence: str, default: str | None = None) -> Setting:
    return Setting(name=name, kind=SettingKind.TEXT, default=default, consequence=consequence)


MANIFEST = Manifest(
    name="kubernetes",
    title="Kubernetes clusters",
    docs="docs/guides/kubernetes.md",
    lacks=LACKS,
    settle=timedelta(0),
    settings=(
        _text("kubeconfig", "The file that names clusters and users. Unset: `KUBECONFIG`, then `~/.kube/config`, then "
              "the service account of the pod that the server runs in."),
        _text("contexts", "Names of contexts with commas between them; each is a region of its own. "
              "Unset: the current context."),
        _text("namespace", "Where pods are made. Unset: the context's own namespace, else `default`."),
        _text("image", "What a task without an `image` runs in.", "python:3.12"),
        _text("price_usd_gpu_hr", "USD per hour of one accelerator: `2.5`, or by name, the rest last: "
              "`H100=2.5 A100=1.2 1`. Above 0 a job needs consent as on any paid offer.", "0"),
        Setting(
            name="price_usd_node_hr", kind=SettingKind.NUMBER, unit="USD per hour", default=0, minimum=0,
            consequence="Jobs are charged this for a node of which they hold no accelerators, or the share of it "
            "that they hold.",
        ),
        _text("queue", "The local queue of Kueue that gangs are submitted to; they wait there, and start as one."),
        Setting(
            name="wait", kind=SettingKind.FLAG, default=False,
            consequence="`true`: pods may wait for nodes, which an autoscaler adds. `false`: Remuda keeps jobs "
            "until enough is free. With a `queue`, jobs wait in any case.",
        ),
        _text("priority_class", "The priority class of pods. Unset: the cluster's default."),
        _text("service_account", "As whom pods act. Unset: the namespace's default, whose token is not mounted."),
        _text("pull_secrets", "Names of secrets, with commas between them, with which images are pulled."),
        _text("runtime_class", "The runtime class of pods, such as `nvidia`."),
        _text("scheduler", "The scheduler of pods. Unset: the cluster's default."),
        _text("node_selector", "Only nodes with these labels are used: `pool=gpu zone=a`."),
        _text("tolerations", "Taints that are borne: `key=value:effect`, `key:effect` or `key`, with spaces between. "
              "Taints of the keys of accelerators, such as `nvidia.com/gpu`, are borne by pods that hold some."),
        Setting(
            name="lost_after_s", kind=SettingKind.INTEGER, unit="seconds", default=60, minimum=1,
            consequence="A node that has not been heard of for so long (beyond what the cluster itself waits) is "
            "lost, and its gang with it.",
        ),
    ),
)  # fmt: skip
