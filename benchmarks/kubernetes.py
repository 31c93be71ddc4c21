"""What Remuda adds to Kubernetes' own way from the submission to the running program: alternating pairs, one table.

    python benchmarks/kubernetes.py [--pairs 20]

A real cluster is made on this machine (tests/system/kubernetes says what that takes). Both sides run the same image
with the same requests; the program says when it began by the machine's own clock (/proc/uptime, 10 ms). Counted is
from before the request that makes the pod (one POST to the API server, or the client's call to a server that runs) to
that moment. The plain pod is as the cluster makes every pod, its service account's token included. The difference of
a pair is Remuda's; the median of the differences is the figure.
"""

import argparse
import json
import ssl
import statistics
import sys
import time
import urllib.request
from pathlib import Path

from measure import ROOT, fresh_home, table

sys.path.insert(0, str(ROOT))

from tests.system.kubernetes.cluster import Cluster, shared

from remuda.client import Client, connect

WAIT_S = 60.0
PROGRAM = "cat /proc/uptime"


def now_s() -> float:
    return float(Path("/proc/uptime").read_text().split()[0])


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
                    "resources": {"requests": {"cpu": "1", "memory": "512Mi"}, "limits": {"memory": "512Mi"}},
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
    while not (said := cluster.kubectl("logs", name, check=False)):
        if time.monotonic() > give_up:
            raise TimeoutError(f"{name} never ran")
        time.sleep(0.5)
    cluster.kubectl("delete", "pod", name, "--wait=false")
    return float(said.split()[0]) - began


def remuda_s(client: Client) -> float:
    began = now_s()
    name = client.submit(f"{{name: t, resources: {{cpu: 1, memory: 512MiB}}, run: {PROGRAM}}}").name
    for _ in client.follow("default", name):
        pass
    said = b"".join(client.logs("default", name)).decode()
    return float(said.split()[0]) - began


def calm(cluster: Cluster) -> None:
    give_up = time.monotonic() + WAIT_S
    while cluster.kubectl("get", "pods", "--no-headers").strip():
        if time.monotonic() > give_up:
            raise TimeoutError("pods are left")
        time.sleep(0.3)
    time.sleep(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    pairs = parser.parse_args().pairs
    cluster = shared()
    if isinstance(cluster, str):
        print(f"skipped: {cluster}")
        return
    plain, ours = [], []
    with fresh_home() as env:
        Path(env["REMUDA_CONFIG"]).write_text(
            f'[providers.local]\nenabled = false\n[providers.kubernetes]\nkubeconfig = "{cluster.kubeconfig}"\n'
            'image = "localhost/python:1"\n'
        )
        with connect() as client:
            for number in range(pairs + 1):
                one = plain_s(cluster, f"plain{number}")
                calm(cluster)
                other = remuda_s(client)
                calm(cluster)
                if number:  # the first pair warms up: the agent is placed then
                    plain.append(one)
                    ours.append(other)
    added = [b - a for a, b in zip(plain, ours, strict=True)]
    values = (("a pod by the API", plain, ""), ("Remuda", ours, ""), ("added by Remuda", added, "0.5"))
    rows = [(name, statistics.median(v), min(v), max(v), bar) for name, v, bar in values]
    table(f"submission to running program, s, {pairs} pairs", ("what", "median", "least", "most", "bar"), rows)


if __name__ == "__main__":
    main()
