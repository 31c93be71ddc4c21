"""Jobs of a real server on a real Ray cluster: to their end, as gangs, taken back, lost, left
behind.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.digits import ARGUMENTS, train_undisturbed, write_digits
from tests.system.ray_cluster import PROOF, Cluster, RayHost, installed, shared_cluster
from tests.system.trust import User, counting, user_at, wait_until
from tests.system.vm_jobs import GANG

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(300, func_only=True),
]  # Ray may have to be installed first

LONG_S = 150.0  # of a wait on a machine that is busy with others
SMALL = "resources: {cpu: 1, memory: 1GB}"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    found = shared_cluster()
    with found.lab.entered():
        yield found


@pytest.fixture
def user(cluster: Cluster, tmp_path: Path) -> Iterator[User]:
    with user_at(tmp_path / "user") as user:
        user.settings(
            "[server]\ntls_listen = '10.99.0.254:7443'\n[providers.local]\nenabled = false\n"
            f"[providers.ray]\naddresses = 'lab={cluster.url}'\nprice_usd_gpu_hr = '3600'\n"
        )
        yield user
        user.cli("down", "--all", "--yes", code=None)
        check_gone(cluster)


def check_gone(cluster: Cluster) -> None:
    """Nothing is reserved, no agent runs, and no node keeps anything of a gang."""
    wait_until(lambda: not cluster.groups(), lambda: f"reserved: {cluster.groups()}")
    wait_until(lambda: not cluster.agents(), lambda: f"left: {cluster.agents()}")
    wait_until(lambda: not cluster.folders(), lambda: f"left: {cluster.folders()}")


def wait_for_log(user: User, name: str, text: str) -> None:
    user.wait(name, "running", LONG_S)
    wait_until(lambda: text in user.said(name), lambda: user.said(name))


@pytest.fixture
def spare(cluster: Cluster) -> list[RayHost]:
    """Two nodes of one kind that no other test uses, of which one may be taken away."""
    cluster.spare += [cluster.add(gpus=1, kind="A10G") for _ in range(2 - len(cluster.spare))]
    cluster.wait(cluster.spare)
    return cluster.spare


def take(cluster: Cluster, hosts: list[RayHost]) -> RayHost:
    """The host on which the one gang is; no other test gets it. Ray's dashboard is behind the
    cluster: it may not know the gang's node yet.
    """

    def find() -> RayHost | None:
        taken = {each["node_id"] for group in cluster.groups() for each in group["bundles"]}
        addresses = {each["node_ip"] for each in cluster.nodes() if each["node_id"] in taken}
        return next((host for host in hosts if host.address in addresses), None)

    wait_until(find, lambda: f"{cluster.groups()} {cluster.nodes()} {hosts}")
    host = find()
    assert host is not None
    hosts.remove(host)
    return host


def drain(cluster: Cluster, host: RayHost) -> None:
    """Have Ray take the node back, as before a preemption."""
    node = next(each["node_id"] for each in cluster.nodes() if each["node_ip"] == host.address)
    words = [
        "drain-node",
        "--address",
        "10.99.0.1:6379",
        "--node-id",
        node,
        "--reason-message",
        "spot",
    ]
    words += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--deadline-remaining-seconds", "60"]
    subprocess.run([installed() / "ray", *words], check=True, capture_output=True, timeout=60)


def test_a_job_runs_and_is_billed_its_gpus(user: User, cluster: Cluster) -> None:
    name = user.submit(
        "name: hello\nresources: {gpu: T4:1}\nrun: echo gpu=$CUDA_VISIBLE_DEVICES on $(hostname)\n",
        "--yes",
    )
    job = user.wait(name, "done", LONG_S)
    assert "on h2" in (said := user.log(name))
    assert said.partition("gpu=")[2][0] in "01"
    job = user.ended(name)
    (charge,) = [
        charge for charge in user.json("cost", job.id)["charges"] if charge["kind"] == "node"
    ]
    assert charge["rate_micros_per_hour"] == 3_600_000_000
    (told,) = [each for each in cluster.jobs() if job.attempts[0].gang in each["submission_id"]]
    assert told["status"] in (
        "SUCCEEDED",
        "STOPPED",
    )  # the gang is given back as soon as its work is done


def test_no_token_is_in_a_job_or_its_log(user: User, cluster: Cluster) -> None:
    name = user.submit(
        f"name: quiet\n{SMALL}\nrun: cat $HOME/.cavvy-ray/*/gangs/$CAVVY_GANG/0/config.json\n"
    )
    job = user.ended(name)
    assert job.phase == "done"
    config = json.loads(user.log(name))
    (told,) = [each for each in cluster.jobs() if job.attempts[0].gang in each["submission_id"]]
    assert config["token"]
    assert config["token"] not in json.dumps(told)
    assert config["token"] not in cluster.log(told["submission_id"])


def test_check_says_what_there_is(user: User, cluster: Cluster) -> None:
    said = user.cli("check", "ray")
    assert "Ray 2." in said
    assert "2 x T4" in said
    assert "https://10.99.0.254:7443" in said


@pytest.mark.proves(PROOF, "gang")
def test_two_nodes_talk_to_each_other(user: User) -> None:
    (user.work / "gang.py").write_text(GANG)
    name = user.submit(
        "name: gang\nnodes: 2\nresources: {cpu: 2, memory: 2GB}\nworkdir: .\n"
        f"run: exec {sys.executable} gang.py\n"
    )
    user.wait(name, "done", LONG_S)
    assert "called from" in user.said(name, 0)
    assert "answered by rank 0 of 2" in user.said(name, 1)
    user.ended(name)


@pytest.mark.proves(PROOF, "notice")
def test_a_drained_node_is_a_preemption_with_notice_and_the_job_resumes(
    user: User, cluster: Cluster, spare: list[RayHost]
) -> None:
    user.submit(
        f"name: taken\nresources: {{gpu: A10G}}\ncheckpoint: state\nrun: |{counting()}", "--yes"
    )
    wait_for_log(user, "taken", "step 2")
    drain(cluster, take(cluster, spare))
    job = user.wait("taken", lambda job: job.attempt == 2, LONG_S)
    assert job.attempts[0].outcome == "preempted", job.attempts[0]
    assert any(kind == "notice" and "Ray" in text for kind, text in user.scenario("taken")), (
        user.scenario("taken")
    )
    assert "told to go" in user.log("taken", "--attempt", "1")
    user.wait("taken", "done", LONG_S)
    assert "begins at 2" in user.log("taken")
    user.ended("taken")


@pytest.mark.proves(PROOF, "notice")
def test_digits_that_a_drained_node_interrupts_end_with_the_weights_of_one_run(
    user: User, cluster: Cluster, spare: list[RayHost]
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    write_digits(user.work)
    task = user.task(
        "name: digits\nresources: {gpu: A10G}\nworkdir: .\ncheckpoint: {path: checkpoints, every: "
        "2s}\nenv: {HOLDS: '1'}\n"
        f"run: exec {sys.executable} slow.py {' '.join(ARGUMENTS)}\n"
    )
    user.cli("run", "-d", "--yes", task)
    wait_for_log(user, "digits", "epoch   1/")
    drain(cluster, take(cluster, spare))
    user.wait("digits", "done", LONG_S)
    job = user.ended("digits")
    assert [attempt.outcome for attempt in job.attempts] == ["preempted", "succeeded"], job.attempts
    said = user.log("digits")
    assert said.count("resumed at") == 1
    assert said.partition("weights ")[2].split()[0] == train_undisturbed()


def test_a_killed_node_is_a_failure_of_the_node(
    user: User, cluster: Cluster, spare: list[RayHost]
) -> None:
    user.submit(
        f"name: lost\nresources: {{gpu: A10G}}\ncheckpoint: state\nrun: |{counting()}", "--yes"
    )
    wait_for_log(user, "lost", "step 2")
    host = take(cluster, spare)
    host.kill()
    job = user.wait("lost", lambda job: job.attempt == 2, LONG_S)
    assert (job.attempts[0].outcome, "is lost" in job.attempts[0].reason) == ("node", True), (
        job.attempts[0]
    )
    job = user.wait("lost", lambda job: job.phase in ("done", "failed"), LONG_S)
    assert (job.phase, job.attempt) == ("done", 2)
    user.ended("lost")


@pytest.mark.proves(PROOF, "self-end")
def test_a_lease_that_ends_ends_the_gang(user: User, cluster: Cluster) -> None:
    """The server is gone for good: the agents leave, and the driver gives back what it reserved."""
    name = user.submit(
        f"name: alone\nnodes: 2\n{SMALL}\nlimits: {{unattended: 10s}}\nrun: sleep 1000\ngrace: 1s\n"
    )
    user.wait(name, "running", LONG_S)
    user.kill_server()
    wait_until(lambda: not cluster.groups(), lambda: str(cluster.groups()))
    wait_until(lambda: not cluster.agents(), lambda: str(cluster.agents()))


def test_a_lost_server_finds_its_work_done(user: User, cluster: Cluster) -> None:
    name = user.submit(f"name: long\n{SMALL}\nrun: sleep 6; echo did it\n")
    user.wait(name, "running", LONG_S)
    user.kill_server()
    assert user.ended(name).phase == "done"
    assert "did it" in user.log(name)


def test_what_is_stopped_is_no_preemption(user: User, cluster: Cluster) -> None:
    user.submit(f"{{name: no, {SMALL}, run: 'echo here; sleep 300'}}")
    user.wait("no", "running", LONG_S)
    user.cli("stop", "no")
    job = user.ended("no")
    assert (job.phase, [attempt.outcome for attempt in job.attempts]) == ("stopped", ["stopped"])
    check_gone(cluster)


def test_a_job_stopped_in_ray_is_tried_again(user: User, cluster: Cluster) -> None:
    user.submit(f"name: other\n{SMALL}\ncheckpoint: state\nrun: |{counting()}")
    wait_for_log(user, "other", "step 2")
    (running,) = [job for job in cluster.jobs() if job["status"] == "RUNNING"]
    cluster.ask("POST", f"/api/jobs/{running['submission_id']}/stop")
    job = user.wait("other", lambda job: job.phase in ("done", "failed"), LONG_S)
    assert (job.phase, job.attempts[0].outcome) == ("done", "preempted"), job.attempts
    assert "begins at 2" in user.log("other")
    user.ended("other")


def test_short_jobs_share_out_the_room_there_is(user: User) -> None:
    """Two of three get a GPU at once, and the third when one of them has ended."""
    task = "{{name: short{}, resources: {{gpu: 'T4:1'}}, run: 'true'}}"
    names = [user.submit(task.format(number), "--yes") for number in range(3)]
    jobs = [user.wait(name, lambda job: job.phase in ("done", "failed"), LONG_S) for name in names]
    assert [(job.phase, job.reason) for job in jobs if job.phase != "done"] == []
    for name in names:
        user.ended(name)
