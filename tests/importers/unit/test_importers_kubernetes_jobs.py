"""Jobs, CronJobs, Pods and PyTorchJobs of Kubernetes as tasks."""

from datetime import timedelta
from typing import Any

import pytest
import yaml

from cavvy.domain.tasks import IndexRange, JobSchedule, TaskSpec
from cavvy.spec import SpecError
from cavvy.task_files import Translation, parse_file, parse_task

CONTAINER: dict[str, Any] = {
    "name": "main",
    "image": "ghcr.io/team/train:1",
    "command": ["python", "train.py"],
    "args": ["--lr", "0.1"],
    "resources": {"limits": {"nvidia.com/gpu": 2, "memory": "16Gi"}},
}


def make_pod(**changes: Any) -> dict[str, Any]:
    container = {**CONTAINER, **changes.pop("container", {})}
    return {"containers": [container], "restartPolicy": "Never", **changes}


def make_job(pod: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    template = {"spec": pod or make_pod()}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "train"},
        "spec": {"template": template, **spec},
    }


def make_pytorch(workers: int, **spec: Any) -> dict[str, Any]:
    role = {"replicas": 1, "restartPolicy": "OnFailure", "template": {"spec": make_pod()}}
    roles = {"Master": role, "Worker": {**role, "replicas": workers}}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "ddp", "namespace": "team"},
        "spec": {"pytorchReplicaSpecs": roles, **spec},
    }


def find(*objects: dict[str, Any]) -> Translation:
    return parse_file("---\n".join(map(yaml.safe_dump, objects)), file="job.yaml")


def read(*objects: dict[str, Any]) -> TaskSpec:
    return parse_task("---\n".join(map(yaml.safe_dump, objects)), file="job.yaml")


def test_a_job() -> None:
    task = read(make_job(activeDeadlineSeconds=3600, ttlSecondsAfterFinished=60))
    assert (task.name, task.run) == ("train", "exec python train.py --lr 0.1")
    assert (task.image, task.nodes) == ("ghcr.io/team/train:1", 1)
    (need,) = task.resources.accelerators
    assert (need.count_min, task.resources.memory_min_mib) == (2, 16384)
    assert task.limits.duration == timedelta(hours=1)
    assert (task.retry.exit, task.retry.delay) == (6, timedelta(seconds=10))  # Kubernetes' defaults
    assert task.grace == timedelta(seconds=30)
    assert read(make_job(backoffLimit=0)).retry.exit == 0


def test_completions_are_an_array() -> None:
    task = read(make_job(completions=5, parallelism=2, completionMode="Indexed"))
    assert (task.array, task.parallel) == ((IndexRange(0, 4),), 2)
    assert task.run.startswith('export JOB_COMPLETION_INDEX="$CAVVY_ARRAY_INDEX"\n')
    plain = read(make_job(completions=3))
    assert (plain.array, plain.parallel) == ((IndexRange(0, 2),), 1)
    assert read(make_job(completions=1)).array == ()


def test_variables_of_config_maps_of_the_file() -> None:
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}}
    config["data"] = {"LR": "0.1", "PRICE": "$(LR)"}
    env = [
        {"name": "RATE", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "LR"}}},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "t"}}},
    ]
    pod = make_pod(container={"env": env, "envFrom": [{"configMapRef": {"name": "c"}}]})
    task = read(make_job(pod), config)
    assert task.env == {"LR": "0.1", "PRICE": "$(LR)", "RATE": "0.1"}
    assert task.secrets == ("TOKEN",)
    with pytest.raises(SpecError, match="envFrom"):
        read(make_job(pod))


def test_a_cron_job() -> None:
    spec = {"schedule": "0 3 * * *", "timeZone": "Europe/Berlin"}
    job = {**make_job(), "kind": "CronJob"}
    job["spec"] = {**spec, "jobTemplate": {"spec": make_job()["spec"]}}
    assert read(job).schedule == JobSchedule(cron="0 3 * * *", time_zone="Europe/Berlin")
    wrong = {**job, "spec": {**job["spec"], "schedule": "nonsense"}}
    with pytest.raises(SpecError, match=r"spec\.schedule"):
        read(wrong)
    job["spec"]["concurrencyPolicy"] = "Replace"
    with pytest.raises(SpecError, match="concurrencyPolicy"):
        read(job)


def test_a_pod() -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"generateName": "smi-"}}
    assert read({**pod, "spec": make_pod()}).name == "smi"
    found = find({**pod, "spec": make_pod(restartPolicy="Always")})
    assert [each.key for each in found.kept] == ["spec.restartPolicy"]
    assert read({**pod, "spec": make_pod(restartPolicy="OnFailure")}).retry.exit is None


def test_a_pytorch_job_is_a_gang() -> None:
    policy = {"backoffLimit": 3, "activeDeadlineSeconds": 60, "cleanPodPolicy": "None"}
    task = read(make_pytorch(3, runPolicy=policy, nprocPerNode="2"))
    assert (task.nodes, task.retry.exit) == (4, 3)
    assert task.limits.duration == timedelta(minutes=1)
    assert 'export RANK="$NODE_RANK" WORLD_SIZE="$NNODES"' in task.run
    assert "PET_NPROC_PER_NODE=2\n" in task.run
    assert task.run.endswith("exec python train.py --lr 0.1")
    assert 'PET_NPROC_PER_NODE="$NPROC_PER_NODE"' in read(make_pytorch(1)).run
    differs = make_pytorch(1)
    worker = {**differs["spec"]["pytorchReplicaSpecs"]["Worker"]}
    worker["template"] = {"spec": make_pod(container={"args": ["--eval"]})}
    differs["spec"]["pytorchReplicaSpecs"]["Worker"] = worker
    with pytest.raises(SpecError, match=r"containers\.args"):
        read(differs)


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (make_job(suspend=True), "spec.suspend"),
        (make_job(completions=1_000_000_000), "an array has at most"),
        (make_job(backoffLimit=-5), "spec.backoffLimit"),
        (make_job(completions=3, parallelism=-1), "parallel"),
        (make_job(activeDeadlineSeconds=0), "limits.duration"),
        (make_job(activeDeadlineSeconds=10**12), "limits.duration"),
        (make_job(backoffLimit=10**12), "retry"),
        (make_job(make_pod(terminationGracePeriodSeconds=-1)), "grace"),
        (make_job(make_pod(container={"image": 5})), "kubectl apply"),
        (make_job(make_pod(container={"image": "a\x1b[2J"})), "is not an image name"),
        (make_job(make_pod(container={"resources": {"limits": {"cpu": "1e30"}}})), "resources.cpu"),
        (make_job(make_pod(container={"resources": {"limits": {"cpu": -1}}})), "kubectl apply"),
        (
            make_job(make_pod(container={"resources": {"limits": {"memory": "-1"}}})),
            "kubectl apply",
        ),
        (
            make_job(make_pod(container={"resources": {"limits": {"nvidia.com/gpu": -1}}})),
            "resources.gpu",
        ),
        (make_job(make_pod(container={"env": [{"name": "A;B", "value": "1"}]})), "'A;B'"),
        (make_job(make_pod(container={"env": [{"name": "A", "value": "\0"}]})), "NUL byte"),
        (make_pytorch(10**12), "nodes"),
        (make_job(parallelism=4), "a queue of work"),
        (make_job(completions=4, parallelism=0), "0 starts nothing"),
        (make_job(make_pod(subdomain="train")), "spec.subdomain"),
        (make_job(podFailurePolicy={"rules": []} | {"x": 1}), "podFailurePolicy"),
        (make_job(madeUp=1), "spec.madeUp"),
        (make_job(make_pod(initContainers=[CONTAINER])), "initContainers"),
        (make_job({**make_pod(), "containers": [CONTAINER, CONTAINER]}), "one container"),
        (make_job(make_pod(container={"resources": {"limits": {"cpu": "many"}}})), "kubectl apply"),
        (make_pytorch(1, elasticPolicy={"minReplicas": 1}), "elasticPolicy"),
        (
            {**make_pytorch(1), "kind": "TFJob"},
            "the kinds Deployment, Job, CronJob, Pod, PyTorchJob",
        ),
    ],
)
def test_what_a_job_cannot_have_is_refused(job: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as error:
        read(job)
    assert said in str(error.value)


def test_validate_refuses_the_same_values() -> None:
    with pytest.raises(SpecError, match="parallel"):
        find(make_job(completions=3, parallelism=-1))


def test_a_limit_of_zero_asks_for_nothing() -> None:
    limits = {"limits": {"nvidia.com/gpu": 0, "cpu": 0, "memory": 0}}
    need = read(make_job(make_pod(container={"resources": limits}))).resources
    assert (need.accelerators, need.cpus_min, need.memory_min_mib) == ((), None, None)


def test_two_jobs_are_refused_and_other_objects_noted() -> None:
    with pytest.raises(SpecError, match="expected one job in the file, not 2"):
        read(make_job(), make_job())
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}}
    assert [each.key for each in find(make_job(), service).kept] == ["Service"]
