"""Jobs of a real server on a real Kubernetes: to their end, as gangs, refused, taken back, lost,
left behind.
"""

import base64
import json
import sys
import sysconfig
from pathlib import Path
from secrets import token_hex

import pytest
from tests.providers.kubernetes.contract.test_provider_kubernetes import PROOF
from tests.system.kubernetes import users
from tests.system.kubernetes.cluster import Cluster
from tests.system.kubernetes.users import SMALL, check_gone, configure
from tests.system.named_machines import play_machine
from tests.system.trust import User, counting, user_at, wait_until
from tests.waits import START_S

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(300, func_only=True),
]  # a cluster may have to be built first

ROOT = Path(__file__).resolve().parents[4]

cluster, user = users.cluster, users.user


def test_a_job_runs_and_is_billed_its_gpus(user: User, cluster: Cluster) -> None:
    name = user.submit(
        "{name: hello, resources: {gpu: H100:2}, run: 'echo $NVIDIA_VISIBLE_DEVICES; sleep 1'}",
        "--yes",
    )
    job = user.ended(name)
    assert job.phase == "done", job.reason
    assert user.log(name).count("GPU-") == 2
    (charge,) = user.json("cost", job.id)["charges"]
    assert charge["rate_micros_per_hour"] == 7200 * 10**6
    check_gone(cluster)


def test_jobs_share_a_machine(user: User, cluster: Cluster) -> None:
    def count_scheduled() -> int:
        found = cluster.api("/api/v1/namespaces/default/events")["items"]
        return sum(each["reason"] == "Scheduled" for each in found)

    play_machine(user, "resources: {gpu: H100:2}", count_scheduled)
    check_gone(cluster)


@pytest.mark.proves(PROOF, "image")
def test_an_image_without_python_gets_one(user: User, cluster: Cluster) -> None:
    name = user.submit(
        f"{{name: bare, image: 'localhost/box:1', {SMALL}, run: 'echo $MADE_FROM; python3 -V'}}"
    )
    job = user.ended(name)
    assert (job.phase, job.exit_code) == ("failed", 127), job.reason
    assert user.log(name).startswith("an image\n")
    check_gone(cluster)


def test_ranks_of_a_gang_meet(user: User, cluster: Cluster) -> None:
    from tests.agent.system.test_trust_gangs import check_ranks_meet

    check_ranks_meet(user, SMALL)
    check_gone(cluster)


@pytest.mark.proves(PROOF, "notice")
def test_preemption_by_kubernetes_is_a_preemption_and_the_job_resumes(
    user: User, cluster: Cluster
) -> None:
    user.submit(
        f"name: taken\nnodes: 2\nresources: {{gpu: H100:8}}\ncheckpoint: state\nrun: |{counting()}",
        "--yes",
    )
    wait_until(lambda: "step 2" in user.said("taken"))
    user.wait("taken", "running")
    high = {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": "high"},
        "value": 1000,
    }
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(high))
    limits = {"limits": {"nvidia.com/gpu": "8"}}
    container = {
        "name": "c",
        "image": "localhost/box:1",
        "command": ["sleep", "3"],
        "resources": limits,
    }
    name = f"other-{token_hex(4)}"  # one of an earlier try may still be going
    other = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"priorityClassName": "high", "restartPolicy": "Never", "containers": [container]},
    }
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(other))
    try:
        job = user.wait("taken", lambda job: job.attempt == 2, 120)
        assert job.attempts[0].outcome == "preempted", job.attempts[0]
        assert any(
            kind == "notice" and "Kubernetes" in text for kind, text in user.scenario("taken")
        ), user.scenario("taken")
        assert "told to go" in user.log("taken", "--attempt", "1")
        job = user.wait("taken", lambda job: job.phase in ("done", "failed"), 120)
        assert (job.phase, job.attempt) == ("done", 2)
        assert "begins at 2" in user.log("taken")
    finally:
        cluster.kubectl("delete", "pod", name, "--wait=false")
    check_gone(cluster)


def test_what_is_stopped_is_no_preemption(user: User, cluster: Cluster) -> None:
    user.submit(f"{{name: no, {SMALL}, run: 'echo here; sleep 300'}}")
    user.wait("no", "running")
    user.cli("stop", "no")
    assert user.ended("no").phase == "stopped"
    check_gone(cluster)


def test_a_quota_is_capacity_that_others_use_and_a_refusal_where_it_is_too_small(
    user: User, cluster: Cluster
) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "few"},
        "spec": {"hard": {"requests.nvidia.com/gpu": "2"}},
    }
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(quota))
    try:
        wait_until(
            lambda: "0" in cluster.kubectl("get", "quota", "few", "-o", "jsonpath={.status.used}")
        )
        assert "0 of 2 used" in user.cli("check", "kubernetes")
        user.submit("{name: large, resources: {gpu: H100:4}, run: 'true'}", "--yes")
        assert "waits for free capacity" in user.wait("large", lambda job: bool(job.reason)).reason
        name = user.submit("{name: small, resources: {gpu: H100:2}, run: echo here}", "--yes")
        assert user.ended(name).phase == "done"
    finally:
        cluster.kubectl("delete", "quota", "few")


def test_an_unhealthy_gpu_is_not_offered(user: User, cluster: Cluster) -> None:
    cluster.set_unhealthy(1, "GPU-3")
    try:
        wait_until(
            lambda: (
                "1 of 8 nvidia.com/gpu are unhealthy" in user.cli("check", "kubernetes", code=None)
            )
        )
        user.submit("{name: whole, nodes: 2, resources: {gpu: H100:8}, run: echo both}", "--yes")
        job = user.wait("whole", lambda job: bool(job.reason))
        assert job.phase == "queued", job.reason
    finally:
        cluster.set_unhealthy(1)
    assert user.wait("whole", lambda job: job.phase in ("done", "failed"), 120).phase == "done"


def test_a_second_installation_harms_nothing(user: User, cluster: Cluster, tmp_path: Path) -> None:
    user.submit(
        f"{{name: mine, {SMALL}, run: 'echo here; while [ ! -e /tmp/go ]; do sleep 0.1; done'}}"
    )
    user.wait("mine", "running")
    (pod,) = cluster.pods()
    with user_at(tmp_path / "other") as other:
        configure(other, cluster)
        name = other.submit(f"{{name: theirs, {SMALL}, run: echo there}}")
        assert other.ended(name).phase == "done"
        other.cli("gc", code=None)
        other.cli("down", "--all", code=None)
    uid = pod["metadata"]["uid"]
    wait_until(
        lambda: (
            uid in (uids := [each["metadata"]["uid"] for each in cluster.pods()]) and len(uids) == 1
        )
    )
    cluster.kubectl("exec", pod["metadata"]["name"], "--", "touch", "/tmp/go")
    assert user.ended("mine").phase == "done"


@pytest.mark.proves(PROOF, "self-end")
def test_a_lease_that_ends_ends_the_pod(user: User, cluster: Cluster) -> None:
    user.submit(
        f"{{name: alone, {SMALL}, limits: {{unattended: 10s}}, run: 'echo here; sleep 600'}}"
    )
    user.wait("alone", "running")
    user.kill_server()
    wait_until(
        lambda: [pod["status"]["phase"] for pod in cluster.pods()] in (["Succeeded"], ["Failed"]),
        lambda: f"still there: {[pod['status'] for pod in cluster.pods()]}",
    )


def test_no_token_is_in_a_pod(user: User, cluster: Cluster) -> None:
    user.submit(f"{{name: quiet, {SMALL}, run: 'echo here; sleep 300'}}")
    user.wait("quiet", "running")
    (secret,) = [
        each
        for each in json.loads(cluster.kubectl("get", "secrets", "-l", "cavvy/gang", "-o", "json"))[
            "items"
        ]
    ]
    token = json.loads(base64.b64decode(secret["data"]["config.json"]))["token"]
    (pod,) = cluster.pods()
    wait_until(
        lambda: cluster.kubectl("logs", pod["metadata"]["name"], check=False)
    )  # a kubelet tells it late
    told = json.dumps(pod) + cluster.kubectl("get", "configmaps,events", "-o", "json")
    told += cluster.kubectl("logs", pod["metadata"]["name"])
    told += cluster.kubectl(
        "exec",
        pod["metadata"]["name"],
        "--",
        "sh",
        "-c",
        "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ",
    )
    assert token not in told
    user.cli("stop", "quiet")
    user.ended("quiet")


# Tasks whose parts an API server could refuse: names, values, volumes, devices, services.
EXPORTED = (
    "{name: out, nodes: 2, resources: {gpu: H100:4}, env: {A: b}, run: torchrun train.py}",
    "{name: 3d-train, nodes: 3, resources: {gpu: H100:2, cpu: 8, memory: 64GB}, run: hostname}",
    f"{{name: a{'-long' * 12}er, nodes: 12, run: hostname}}",
    """{name: odd, env: {A: "x 'y' $(Z) $$", N: "007", Y: "yes", E: "", M: "a\\nb"}, run: 'echo "$A"'}""",
    """{name: disks, run: ls, volumes: [{name: data, path: /data, size: 10GiB},
    {host: /tmp, path: /scratch}, {nfs: 'files:/export', path: /files}]}""",
    """{name: private, secrets: [HF_TOKEN], resources: {gpu: 'A100:80GB:1..4'},
    limits: {duration: 90m}, retry: {exit: 2}, run: ls}""",
    "{name: chips, resources: {gpu: TPU-v5e:8}, run: ls}",
    """{name: amd, resources: {gpu: MI300X:8, memory: 500GiB, disk: 200GB}, params: {lr: 0.1},
    inputs: [{source: 's3://b/x', target: data}], checkpoint: c, run: 'echo ${{ params.lr }}'}""",
    """{name: choice, resources: {any_of: [{gpu: 'H100:8'}, {gpu: 'A100:8'}]}, setup: ls,
    tags: {team: "Vision & Co"}, run: ls}""",
    "{name: part, resources: {gpu: 'A10:0.5', memory: 1.5GiB, cpu: 2.5}, run: ls}",
    """{name: 2web, service: {port: 80, replicas: 2, probe: {path: /up}},
    image: 'r.example:5000/a/b@sha256:DIGEST', run: ls}""".replace("DIGEST", "0" * 64),
)


def test_what_is_exported_is_taken_by_the_api_server(user: User, cluster: Cluster) -> None:
    texts = [user.cli("export", "kubernetes", user.task(task), "--blind") for task in EXPORTED]
    together = "---\n".join(texts)
    said = cluster.kubectl("apply", "--dry-run=server", "-f", "-", stdin=together).splitlines()
    assert [line for line in said if not line.endswith(" created (server dry run)")] == []
    names = [line.split()[0] for line in said]
    assert names[:3] == ["service/out", "pod/out-0", "pod/out-1"]
    assert sum(name.startswith("pod/a-long") for name in names) == 12
    assert {"service/job-3d-train", "persistentvolumeclaim/data", "pod/part"} < {*names}
    assert {"deployment.apps/job-2web", "service/job-2web"} < {*names}


def test_an_exported_task_runs_without_cavvy(user: User, cluster: Cluster) -> None:
    text = user.cli(
        "export",
        "kubernetes",
        user.task(
            f"""{{name: alone, nodes: 2, {SMALL}, params: {{note: "it's $HOME $(x)"}},
            env: {{GREETING: "hello 'you' $(HOSTNAME) $$"}}, setup: echo ready > file, run: 'cat
            file; echo "$GREETING, $CAVVY_PARAM_NOTE"; echo "$NODE_RANK of $NNODES"; exit
            $NODE_RANK'}}"""
        ),
    )
    cluster.kubectl("apply", "-f", "-", stdin=text)
    path = "/api/v1/namespaces/default/pods/alone-"
    for rank, phase in enumerate(("Succeeded", "Failed")):
        wait_until(lambda: cluster.api(f"{path}{rank}")["status"]["phase"] == phase)  # noqa: B023
        logged = cluster.kubectl("logs", f"alone-{rank}")
        assert logged == f"ready\nhello 'you' $(HOSTNAME) $$, it's $HOME $(x)\n{rank} of 2\n"
    cluster.kubectl("delete", "--wait=false", "-f", "-", stdin=text)


def test_the_policy_is_enough(user: User, cluster: Cluster) -> None:
    cluster.kubectl("apply", "-f", "-", stdin=user.cli("check", "kubernetes", "--policy"))
    secret = cluster.kubectl("get", "serviceaccount", "cavvy", "-o", "jsonpath={.secrets[0].name}")
    token = base64.b64decode(
        cluster.kubectl("get", "secret", secret, "-o", "jsonpath={.data.token}")
    ).decode()
    config = json.loads(cluster.kubeconfig.read_text())
    config["users"] = [{"name": "ann", "user": {"token": token}}]
    path = user.root / "narrow.conf"
    path.write_text(json.dumps(config))
    user.settings(
        f'[providers.local]\nenabled = false\n[providers.kubernetes]\nkubeconfig = "{path}"\n'
        'image = "localhost/python:1"\n'
    )
    assert "missing rights" not in user.cli("check", "kubernetes")
    name = user.submit(f"{{name: narrow, {SMALL}, run: echo here}}")
    assert user.ended(name).phase == "done"
    check_gone(cluster)


def with_torch(nodes: int, command: str) -> str:
    """A task of this machine's Python and torch, which pods see as host folders; the image has
    their libraries.
    """
    own = "".join(
        f"  - {{host: {path}, path: {path}, read_only: true}}\n" for path in (ROOT, sys.base_prefix)
    )
    resources = "resources: {cpu: 1, memory: 2GiB}\nworkdir: .\ncheckpoint: checkpoints\n"
    environment = f"env: {{PYTHONPATH: {sysconfig.get_path('purelib')}, OMP_NUM_THREADS: '1'}}\n"
    run = f"run: {sys.base_prefix}/bin/python3 {command}"
    return f"nodes: {nodes}\n{resources}{environment}volumes:\n{own}{run}"


@pytest.mark.proves(PROOF, "mounts")
@pytest.mark.timeout(600)  # several imports of PyTorch on two busy cores
def test_two_nodes_of_two_processes_learn_as_one(user: User) -> None:
    pytest.importorskip("torch")
    start = (
        '-m torch.distributed.run --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node 2'
    )
    start += ' --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" train.py --epochs 6'
    (user.work / "train.py").write_text((ROOT / "examples/distributed/train.py").read_text())
    user.cli("run", "-d", user.task(f"name: learns\n{with_torch(2, start)}"))
    job = user.wait("learns", lambda job: job.phase in ("done", "failed"), 480)
    said = user.log("learns")
    assert job.phase == "done", (job.reason, said)
    assert "rank 0 of 4" in said
    assert "rank 1 of 4" in said
    assert float(said.partition("of 4: ")[2].split()[0]) > 0.8


def test_a_killed_node_is_a_failure_of_the_node(user: User, cluster: Cluster) -> None:
    configure(user, cluster, "lost_after_s = 5\n")
    user.submit(f"name: lost\n{SMALL}\ncheckpoint: state\nrun: |{counting()}")
    wait_until(lambda: "step 2" in user.said("lost"))
    user.wait("lost", "running")
    (pod,) = cluster.pods()
    number = int(pod["spec"]["nodeName"].removeprefix("n"))
    cluster.kill_node(number)
    try:
        job = user.wait("lost", lambda job: job.attempt == 2, START_S)
        assert (job.attempts[0].outcome, "is lost" in job.attempts[0].reason) == ("node", True), (
            job.attempts[0]
        )
        job = user.wait("lost", lambda job: job.phase in ("done", "failed"), START_S)
        assert (job.phase, job.attempt) == ("done", 2)
    finally:
        cluster.start_node(number)
