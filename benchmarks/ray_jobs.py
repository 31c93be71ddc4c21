"""Measures how much longer a program takes to start through Cavvy than through Ray's own job API,
from the submission on.

    python benchmarks/ray_jobs.py [--pairs 20]

The benchmark makes a real cluster on this machine (see tests/system/ray_cluster.py for what this
needs). It starts the same program in turn through Ray and through Cavvy. The program reports when
it began, by the machine's own clock (/proc/uptime, in steps of 10 ms). The time is measured from
the request that creates the job: one POST to the dashboard, or the client's call to a running
server. The plain job has one entrypoint with the same CPUs and memory, and Ray starts a supervisor
for it, as for every job. A gang of Cavvy also needs a driver and an actor, with which all its nodes
are reserved at once. The result is the median of the differences between the two times of each
pair.
"""

import json
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from measure import ROOT, fresh_home
from pairs import PROGRAM, WAIT_S, cavvy_s, compare, make_parser, now_s

sys.path.insert(0, str(ROOT))

from tests.system.ray_cluster import Cluster, shared_cluster

from cavvy.client import connect

OVER = ("SUCCEEDED", "FAILED", "STOPPED")
SETTINGS = """
[server]
tls_listen = '10.99.0.254:7443'
[providers.local]
enabled = false
[providers.ray]
addresses = 'lab={url}'
"""


def plain_s(cluster: Cluster, name: str) -> float:
    job = {
        "submission_id": name,
        "entrypoint": PROGRAM,
        "entrypoint_num_cpus": 1,
        "entrypoint_memory": 512 * 1024**2,
    }
    request = urllib.request.Request(
        f"{cluster.url}/api/jobs/",
        data=json.dumps(job).encode(),
        headers={"Content-Type": "application/json"},
    )
    began = now_s()
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=WAIT_S):
        pass
    wait(cluster)
    said = next(
        line
        for line in cluster.log(name).splitlines()
        if line[:1].isdigit() and len(line.split()) == 2
    )
    return float(said.split()[0]) - began


def wait(cluster: Cluster) -> None:
    """Wait until every job has ended and nothing is reserved."""
    give_up = time.monotonic() + WAIT_S
    while cluster.groups() or any(job["status"] not in OVER for job in cluster.jobs()):
        if time.monotonic() > give_up:
            raise TimeoutError("jobs are left")
        time.sleep(0.3)


def calm(cluster: Cluster) -> None:
    wait(cluster)
    time.sleep(2)  # Ray starts new workers in place of those that were used


def main() -> None:
    pairs = make_parser(__doc__).parse_args().pairs
    try:
        cluster = shared_cluster()
    except pytest.skip.Exception as reason:
        print(f"skipped: {reason}")
        return
    with cluster.lab.entered(), fresh_home() as env:
        Path(env["CAVVY_CONFIG"]).write_text(SETTINGS.format(url=cluster.url))
        with connect() as client:
            compare(
                "a job by Ray's API",
                lambda number: plain_s(cluster, f"plain{number}"),
                lambda _: cavvy_s(client, "{cpu: 1, memory: 512MiB}"),
                lambda: calm(cluster),
                pairs=pairs,
            )


if __name__ == "__main__":
    main()
