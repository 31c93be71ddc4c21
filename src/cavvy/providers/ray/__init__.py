"""Ray clusters: each gang is a Ray job that reserves its nodes and supervises an agent on each
node.
"""

from collections.abc import Mapping
from datetime import timedelta

from cavvy.providers.abilities import CHECKS_TASKS, CLOSEABLE, HAS_PARTS, WHO_AM_I
from cavvy.providers.base import Feature, Manifest, explain_results
from cavvy.providers.settings import flag, gpu_rates, node_price, text

UNSUPPORTED: Mapping[Feature, str] = {
    Feature.IMAGE: "jobs run on Ray's nodes, outside Ray's own processes, and the nodes boot the "
    "cluster's own image",
    Feature.BUILD: "jobs run on Ray's nodes, outside Ray's own processes; `cavvy image build "
    "TASK.YAML --push NAME` builds an image elsewhere",
    Feature.LOGIN: "jobs cannot run in images",
    Feature.VOLUMES: "a Ray cluster has no named volumes to attach; use a `host` folder of its "
    "nodes",
    Feature.NETWORK: "Ray does not report the network's speed, and nodes cannot be chosen by speed",
    Feature.REPAIR: "Cavvy does not replace single workers of a job yet",
    Feature.RESULTS: explain_results("a job's folder is deleted when the job ends", "the job"),
    Feature.DISK: "jobs use the nodes' own disks; size and type cannot be chosen",
}


MANIFEST = Manifest(
    name="ray",
    title="Ray clusters",
    cloud="cavvy.providers.ray.provider:RayProvider",
    no_project_accounts="Cavvy reaches a cluster by an address in the server's network, usually "
    "without a credential",
    unsupported=UNSUPPORTED,
    abilities=(HAS_PARTS, CHECKS_TASKS, WHO_AM_I, CLOSEABLE),
    visibility_delay=timedelta(0),
    docs="docs/guides/ray.md",
    settings=(
        text(
            "addresses",
            "The addresses of the clusters' dashboards, separated by spaces, for example "
            "`main=http://10.0.0.5:8265`. Each cluster is a region. The cluster's name precedes "
            "`=`; without a name, the name of the host is used. The default address is "
            "`http://127.0.0.1:8265`.",
        ).for_setup(),
        text(
            "token_file",
            "A file with the token for clusters that require a token (`RAY_AUTH_MODE=token`). "
            "By default, no token is sent.",
        ),
        text(
            "headers_file",
            "A file of HTTP headers, one `Name: value` on each line. The headers are sent with "
            "every request, for example to a proxy in front of the dashboards.",
        ),
        text(
            "ca_file",
            "The certificates that verify `https` dashboards. The default is the system's "
            "certificates.",
        ),
        text("namespace", "The Ray namespace of the actors that supervise agents.", "cavvy"),
        text(
            "python",
            "The command that starts the cluster's Python in a shell on the head node. This Python "
            "must be able to import `ray`.",
            "python",
        ),
        text(
            "folder",
            "A folder on each node for agents, work and caches, owned by the user that runs Ray.",
            "~/.cavvy-ray",
        ),
        gpu_rates(),
        node_price(),
        flag(
            "spread",
            "If `true`, the ranks of a gang always run on different nodes (`STRICT_SPREAD`). If "
            "`false`, the ranks run on different nodes only if enough nodes are free (`SPREAD`).",
        ),
        flag(
            "wait",
            "If `true`, gangs may wait in Ray for nodes from an autoscaler. If `false`, Cavvy "
            "queues jobs until enough nodes are free.",
        ),
    ),
)
