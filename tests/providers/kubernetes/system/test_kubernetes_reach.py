"""What users do beside their jobs on a real Kubernetes: reach into pods, keep them, store,
choose among contexts.
"""

import json
import os
import re
import signal
import socket
import time
import urllib.request
from collections import Counter
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from secrets import token_hex

import pytest
from tests.providers.kubernetes.contract.test_provider_kubernetes import PROOF
from tests.system.kubernetes import users
from tests.system.kubernetes.cluster import Cluster
from tests.system.kubernetes.users import SMALL, check_gone
from tests.system.trust import User, wait_until
from tests.verdict import SkippedForTime
from tests.waits import PATIENCE_S

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(300, func_only=True),
]  # a cluster may have to be built first

cluster, user = users.cluster, users.user


@pytest.mark.parametrize("image", ["localhost/python:1", "localhost/box:1"], ids=["python", "bare"])
def test_users_reach_into_pods(user: User, cluster: Cluster, image: str) -> None:
    page = "echo rank $CAVVY_RANK > /tmp/page; exec httpd -f -p 8123 -h /tmp"
    user.submit(f"{{name: open, image: '{image}', nodes: 2, {SMALL}, run: '{page}'}}")
    user.wait("open", "running")
    assert (
        user.output("exec", "open:1", "--", "sh", "-c", "cat /tmp/page; exit 4", code=4)
        == "rank 1\n"
    )
    assert (
        user.cli("ssh", "open", "--", "cat; echo $MADE_FROM", stdin="given\n")
        == "given\nan image\n"
    )
    data = os.urandom(600_000)
    (user.work / "data").write_bytes(data)
    user.cli("cp", str(user.work / "data"), "open:1:/tmp/there")
    user.cli("cp", "open:1:/tmp/there", str(user.work / "back"))
    assert (user.work / "back").read_bytes() == data
    forward = user.start("forward", "open:1", "0:8123")
    assert forward.stdout is not None
    found = re.search(r"127.0.0.1:(\d+) leads", forward.stdout.readline())
    assert found is not None
    with urllib.request.urlopen(f"http://127.0.0.1:{found[1]}/there", timeout=30) as answer:
        assert answer.read() == data
    forward.send_signal(signal.SIGINT)
    forward.communicate(timeout=PATIENCE_S)
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", int(found[1])), timeout=5):
        pass
    user.cli("stop", "open")
    user.ended("open")
    check_gone(cluster)


def test_a_kept_pod_serves_the_next_job_and_is_billed(user: User, cluster: Cluster) -> None:
    gpu = "resources: {gpu: H100:1}"
    user.submit(f"{{name: first, {gpu}, keep: 10m, run: 'echo one; hostname'}}", "--yes")
    user.wait("first", "done")
    (pod,) = cluster.pods()
    (node,) = user.json("nodes")
    assert node["phase"] == "kept", node
    user.submit(f"{{name: next, {gpu}, run: 'echo two; hostname'}}", "--yes")
    job = user.ended("next")
    assert job.phase == "done", job.reason
    assert (
        user.log("next").splitlines()[1]
        == user.log("first").splitlines()[1]
        == pod["metadata"]["name"]
    )
    billed = [charge for name in ("first", "next") for charge in user.json("cost", name)["charges"]]
    assert all(charge["rate_micros_per_hour"] == 3600 * 10**6 for charge in billed)
    pieces = sorted(
        tuple(datetime.fromisoformat(charge[at]) for at in ("since", "until")) for charge in billed
    )
    assert all(before[1] <= after[0] for before, after in pairwise(pieces)), pieces
    check_gone(cluster)


def test_a_kept_pod_ends_with_its_time(user: User, cluster: Cluster) -> None:
    user.submit(f"{{name: brief, {SMALL}, keep: 3s, run: 'true'}}")
    user.ended("brief")
    check_gone(cluster)


@pytest.mark.proves(PROOF, "self-end")
def test_a_pod_that_nobody_watches_is_ended_by_kubernetes(user: User, cluster: Cluster) -> None:
    user.submit(
        f"{{name: long, {SMALL}, limits: {{duration: 1h}}, retry: {{node: 0}}, run: 'echo here; "
        f"sleep 3000'}}"
    )
    user.wait("long", "running")
    (pod,) = cluster.pods()
    assert 3600 < pod["spec"]["activeDeadlineSeconds"] < 2 * 3600
    user.kill_server()
    name = pod["metadata"]["name"]
    cluster.kubectl(
        "patch", "pod", name, "-p", '{"spec": {"activeDeadlineSeconds": 5}}'
    )  # as if it were later
    wait_until(
        lambda: [each["status"].get("reason") for each in cluster.pods()] == ["DeadlineExceeded"],
        lambda: f"still there: {[each['status'] for each in cluster.pods()]}",
    )
    job = user.ended("long")
    assert "DeadlineExceeded" in job.attempts[0].reason, job.attempts
    check_gone(cluster)


@pytest.mark.proves(PROOF, "volumes")
def test_a_claim_is_made_and_outlives_its_job(user: User, cluster: Cluster, tmp_path: Path) -> None:
    downloads, ledger = (
        f"{name}-{token_hex(4)}" for name in ("downloads", "books")
    )  # an earlier try's may still be going
    place = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": downloads},
        "spec": {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": downloads,
            "hostPath": {"path": str(tmp_path / "downloads"), "type": "DirectoryOrCreate"},
        },
    }
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(place))
    volume = f"volumes: [{{name: {ledger}, path: /books, size: 1GiB, type: {downloads}}}]"
    try:
        user.submit(f"{{name: writes, {SMALL}, {volume}, run: 'echo kept > /books/one'}}")
        assert user.ended("writes").phase == "done"
        user.submit(f"{{name: reads, {SMALL}, {volume}, run: 'cat /books/one'}}")
        assert user.ended("reads").phase == "done"
        assert user.log("reads") == "kept\n"
    finally:
        cluster.kubectl("delete", f"pvc/{ledger}", f"pv/{downloads}", "--wait=false", check=False)
    check_gone(cluster)


def test_each_context_is_a_region_and_pods_carry_the_settings(user: User, cluster: Cluster) -> None:
    annex = f"annex-{token_hex(4)}"  # an earlier try's may still be going
    config = json.loads(cluster.kubeconfig.read_text())
    config["contexts"].append(
        {"name": "annex", "context": {"cluster": "meadow", "user": "ann", "namespace": annex}}
    )
    both = user.root / "both.conf"
    both.write_text(json.dumps(config))
    cluster.make_namespace(annex)
    high = {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": "calm"},
        "value": -10,
    }
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(high))
    user.settings(
        f'[providers.local]\nenabled = false\n[providers.kubernetes]\nkubeconfig = "{both}"\n'
        'contexts = "meadow, annex"\nimage = "localhost/python:1"\npull_secrets = "registry"\n'
        'service_account = "default"\npriority_class = "calm"\n'
    )
    try:
        user.submit("{name: here, resources: {cpu: 1, regions: [meadow]}, run: sleep 600}")
        user.submit("{name: there, resources: {cpu: 1, regions: [annex]}, run: sleep 600}")
        for name in ("here", "there"):
            user.wait(name, "running")
        (here,), (there,) = cluster.pods(), cluster.pods(annex)
        for pod in (here, there):
            inside = pod["spec"]
            assert inside["imagePullSecrets"] == [{"name": "registry"}]
            assert (inside["serviceAccountName"], inside["priorityClassName"]) == (
                "default",
                "calm",
            )
        assert "annex" in user.cli("check", "kubernetes")
        for name in ("here", "there"):
            user.cli("stop", name)
            user.ended(name)
        assert not cluster.pods(annex)
    finally:
        cluster.drop_namespace(annex)
        cluster.kubectl("delete", "priorityclass", "calm")


def test_twelve_short_jobs_take_turns(user: User, cluster: Cluster) -> None:
    """On two nodes of two CPUs, four at once. A machine that is busy otherwise gets four
    minutes: what has ended until then is judged.
    """
    names = [
        user.api.submit(
            f"{{name: short{number}, resources: {{cpu: 1, memory: 128MiB}}, run: 'true'}}"
        ).name
        for number in range(12)
    ]
    give_up = time.monotonic() + 240
    jobs = []
    for name in names:
        job = user.job(name)
        while job.phase not in ("done", "failed") and time.monotonic() < give_up:
            time.sleep(0.2)
            job = user.job(name)
        jobs.append(job)
    over = [job for job in jobs if job.phase in ("done", "failed")]
    assert [(job.phase, job.reason) for job in over if job.phase != "done"] == []
    tries = Counter(attempt.outcome for job in over for attempt in job.attempts)
    assert tries["succeeded"] == len(over)
    assert tries.total() - len(over) == tries["capacity"] < 4, tries  # room is not promised twice
    if len(over) < len(jobs):
        raise SkippedForTime(
            f"this machine is too busy: {len(over)} of 12 jobs have ended after 240 s, all well"
        )
    check_gone(cluster)
