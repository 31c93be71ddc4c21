"""The manifest of this provider."""

from collections.abc import Mapping
from datetime import timedelta

from cavvy.providers.abilities import CHECKS_TASKS, CLOSEABLE, HAS_PARTS, WHO_AM_I
from cavvy.providers.base import Feature, Manifest
from cavvy.providers.settings import flag, gpu_rates, node_price, text

UNSUPPORTED: Mapping[Feature, str] = {
    Feature.IMAGE: "jobs run beside Ray on its nodes, which boot the cluster's own image",
    Feature.BUILD: "jobs run beside Ray on its nodes; "
    "`cavvy image build TASK.YAML --push NAME` makes an image elsewhere",
    Feature.LOGIN: "jobs do not run in images here",
    Feature.VOLUMES: "a Ray cluster has no volumes to attach by name; give a `host` folder of its "
    "nodes",
    Feature.NETWORK: "Ray does not report the network's speed, and nodes cannot be chosen by it",
    Feature.DISK: "jobs use the nodes' own disks; size and type cannot be chosen",
}


MANIFEST = Manifest(
    name="ray",
    title="Ray clusters",
    docs="docs/guides/ray.md",
    unsupported=UNSUPPORTED,
    abilities=(HAS_PARTS, CHECKS_TASKS, WHO_AM_I, CLOSEABLE),
    visibility_delay=timedelta(0),
    settings=(
        text(
            "addresses",
            "The addresses of the clusters' dashboards, with spaces between them: "
            "`main=http://10.0.0.5:8265`; each is a region of that name. Without a name it is the "
            "host's. Unset: `http://127.0.0.1:8265`.",
        ),
        text(
            "token_file",
            "A file with the token of clusters that ask for one (`RAY_AUTH_MODE=token`). "
            "Unset: no token.",
        ),
        text(
            "headers_file",
            "A file with lines `Name: value`, sent with every request, for a proxy in front of the "
            "dashboards.",
        ),
        text(
            "ca_file",
            "The certificates that verify `https` dashboards. Unset: the system's.",
        ),
        text("namespace", "The Ray namespace of the actors that supervise agents.", "cavvy"),
        text(
            "python",
            "The cluster's Python, which can import `ray`, as its head's shell finds it.",
            "python",
        ),
        text(
            "folder",
            "A folder of Ray's user on each node, for agents, work and caches.",
            "~/.cavvy-ray",
        ),
        gpu_rates(),
        node_price(),
        flag(
            "spread",
            "`true`: the nodes of a gang are always different ones of the cluster "
            "(`STRICT_SPREAD`). `false`: as different as there is room for (`SPREAD`).",
        ),
        flag(
            "wait",
            "`true`: gangs may wait in Ray for nodes, which an autoscaler adds. `false`: Cavvy "
            "keeps jobs until enough is free.",
        ),
    ),
)
