"""Measures how much longer a program takes to start through Cavvy than through the Kubernetes API,
from the submission on.

    python benchmarks/kubernetes.py [--pairs 20]

The benchmark makes a real cluster on this machine (see tests/system/kubernetes for what this
needs). It starts the same image with the same resource requests in turn through Kubernetes and
through Cavvy. The program reports when it began, by the machine's own clock (/proc/uptime, in steps
of 10 ms). The time is measured from the request that creates the pod: one POST to the API server,
or the client's call to a running server. The plain pod is made with the cluster's defaults,
including the token of its service account. The result is the median of the differences between the
two times of each pair.
"""

import json
import ssl
import sys
import time
import urllib.request
from pathlib import Path

from measure import ROOT, fresh_home
from pairs import PROGRAM, WAIT_S, cavvy_s, compare, make_parser, now_s

sys.path.insert(0, str(ROOT))

from tests.system.kubernetes.cluster import Cluster, shared

from cavvy.client import connect


def plain_s(cluster: Cluster, name: str) -> float:
    config = json.loads(cluster.kubeconfig.read_text())
    pod = {
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "containers": [
                {
                    "name": "main",
                    "image": "localhost/python:1",
                    "command": ["sh", "-c", PROGRAM],
                    "resources": {
                        "requests": {"cpu": "1", "memory": "512Mi"},
                        "limits": {"memory": "512Mi"},
                    },
                }
            ],
        },
    }
    trust = ssl.create_default_context()
    trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
    request = urllib.request.Request(
        config["clusters"][0]["cluster"]["server"] + "/api/v1/namespaces/default/pods",
        data=json.dumps(pod).encode(),
        headers={"Authorization": "Bearer admin-token", "Content-Type": "application/json"},
    )
    began = now_s()
    with urllib.request.urlopen(request, context=trust):
        pass
    give_up = time.monotonic() + WAIT_S
    while not (said := cluster.kubectl("logs", name, check=False))[
        :1
    ].isdigit():  # a kubelet may still seek the file
        if time.monotonic() > give_up:
            raise TimeoutError(f"{name} never ran")
        time.sleep(0.5)
    cluster.kubectl("delete", "pod", name, "--wait=false")
    return float(said.split()[0]) - began


def calm(cluster: Cluster) -> None:
    give_up = time.monotonic() + WAIT_S
    while cluster.kubectl("get", "pods", "--no-headers").strip():
        if time.monotonic() > give_up:
            raise TimeoutError("pods are left")
        time.sleep(0.3)
    time.sleep(1)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--kubeconfig", type=Path, help="of a cluster that tests.system.kubernetes.cluster has made"
    )
    arguments = parser.parse_args()
    cluster = shared() if arguments.kubeconfig is None else Cluster(arguments.kubeconfig.parent)
    if not isinstance(cluster, Cluster):
        print(f"skipped: {cluster}")
        return
    with fresh_home() as env:
        Path(env["CAVVY_CONFIG"]).write_text(
            "[providers.local]\nenabled = false\n[providers.kubernetes]\nkubeconfig = "
            f'"{cluster.kubeconfig}"\n'
            'image = "localhost/python:1"\n'
        )
        with connect() as client:
            compare(
                "a pod by the API",
                lambda number: plain_s(cluster, f"plain{number}"),
                lambda _: cavvy_s(client, "{cpu: 1, memory: 512MiB}"),
                lambda: calm(cluster),
                pairs=arguments.pairs,
            )


if __name__ == "__main__":
    main()
