"""What a user of a real Kubernetes is told while pods do not start, and before any is made."""

import pytest
from tests.system.kubernetes import users
from tests.system.kubernetes.cluster import Cluster
from tests.system.kubernetes.users import SMALL, configure
from tests.system.trust import User

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(300, func_only=True),
]  # a cluster may have to be built first

cluster, user = users.cluster, users.user


def test_why_a_pod_does_not_start_is_told_while_it_does_not(user: User) -> None:
    name = user.submit(f"{{name: nowhere, image: 'localhost/nowhere:1', {SMALL}, run: 'true'}}")
    job = user.wait(name, lambda job: "Image" in job.reason)
    assert job.reason.startswith("starts at kubernetes: ")
    assert any(
        kind == "waits" and "localhost/nowhere:1" in text for kind, text in user.scenario(name)
    ), user.scenario(name)
    user.cli("stop", name)
    user.ended(name)


def test_why_a_placed_pod_does_not_start_is_told(user: User) -> None:
    volumes = "[{name: notes, configMap: {name: nowhere}}]"
    containers = "[{volumeMounts: [{name: notes, mountPath: /notes}]}]"
    pod = f"{{spec: {{volumes: {volumes}, containers: {containers}}}}}"
    small = SMALL.replace("}", f", options: {{kubernetes: {{pod: {pod}}}}}}}")
    name = user.submit(f"{{name: mounts, {small}, run: 'true'}}")
    job = user.wait(name, lambda job: "FailedMount" in job.reason)
    assert 'configmap "nowhere" not found' in job.reason
    user.cli("stop", name)
    user.ended(name)


def test_settings_that_no_pod_can_have_are_told_beforehand(user: User, cluster: Cluster) -> None:
    assert "ready" in user.cli("check", "kubernetes")
    configure(user, cluster, 'namespace = "nowhere"\n')
    assert 'every pod would be refused: namespaces "nowhere" not found' in user.cli(
        "check", "kubernetes", code=1
    )
    configure(user, cluster, 'priority_class = "urgent"\n')
    assert "no PriorityClass with name urgent" in user.cli("check", "kubernetes", code=1)
    assert not cluster.pods()


def test_an_export_asks_the_cluster_for_the_kind_of_gpu(user: User, cluster: Cluster) -> None:
    task = user.task(
        "{name: out, nodes: 2, params: {fast: true}, resources: {gpu: H100:4}, run: torchrun "
        "train.py}"
    )
    text = user.cli("export", "kubernetes", task)
    assert "nvidia.com/gpu.product" in text
    said = cluster.kubectl("apply", "--dry-run=server", "-f", "-", stdin=text)
    assert [line.split()[0] for line in said.splitlines()] == [
        "service/out",
        "pod/out-0",
        "pod/out-1",
    ]
    assert "add a nodeSelector for H100" in user.cli("export", "kubernetes", task, "--blind")
