"""Jobs, CronJobs, Pods and PyTorchJobs of Kubernetes as tasks."""

import json
import os
import subprocess
from datetime import timedelta
from typing import Any

import pytest
import yaml

from cavvy.domain.tasks import Fabric, IndexRange, JobSchedule, NetworkNeed, TaskSpec
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


def make_gang(
    kind: str, key: str, /, spec: dict[str, Any] | None = None, **roles: int
) -> dict[str, Any]:
    pods = {"restartPolicy": "Never", "template": {"spec": make_pod()}}
    replicas = {name: {**pods, "replicas": count} for name, count in roles.items()}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": kind,
        "metadata": {"name": "gang"},
        "spec": {key: replicas, **(spec or {})},
    }


def make_job_set(name: str = "x", replicas: int = 2, **spec: Any) -> dict[str, Any]:
    pod = make_pod(container={"args": ["--peer", name]})
    part = {
        "name": "part",
        "replicas": replicas,
        "template": {"spec": {"template": {"spec": pod}, **spec}},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "a"},
        "spec": {"replicatedJobs": [part], "failurePolicy": {"maxRestarts": 3}},
    }


def run_lines(text: str, **variables: str) -> str:
    """Return what the lines before a command print."""
    env = {"PATH": os.environ["PATH"], "CAVVY_HOSTS": "10.0.0.1,10.0.0.2,10.0.0.3", **variables}
    done = subprocess.run(["sh", "-ec", text], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


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
        (make_job(backoffLimit=-5), "`backoffLimit`: '-5' is no count"),
        (make_job(completions=3, parallelism=-1), "parallel"),
        (make_job(activeDeadlineSeconds=0), "limits.duration"),
        (make_job(activeDeadlineSeconds=10**12), "limits.duration"),
        (make_job(backoffLimit=10**12), "retry"),
        (make_job(make_pod(terminationGracePeriodSeconds=-1)), "terminationGracePeriodSeconds"),
        (make_job(make_pod(container={"image": 5})), "kubectl apply"),
        (make_job(make_pod(container={"image": "a\x1b[2J"})), "is not an image name"),
        (make_job(make_pod(container={"resources": {"limits": {"cpu": "1e30"}}})), "resources.cpu"),
        (make_job(make_pod(container={"resources": {"limits": {"cpu": -1}}})), "is no quantity"),
        (
            make_job(make_pod(container={"resources": {"limits": {"memory": "-1"}}})),
            "is no quantity",
        ),
        (
            make_job(make_pod(container={"resources": {"limits": {"nvidia.com/gpu": -1}}})),
            "is no quantity",
        ),
        (make_job(make_pod(container={"env": [{"name": "A;B", "value": "1"}]})), "`env.A;B`"),
        (make_job(make_pod(container={"env": [{"name": "A", "value": "\0"}]})), "NUL byte"),
        (make_pytorch(10**12), "nodes"),
        (make_job(parallelism=4), "a queue of work"),
        (make_job(completions=4, parallelism=0), "0 starts nothing"),
        (make_job(make_pod(subdomain="train")), "spec.subdomain"),
        (make_job(podFailurePolicy={"rules": []} | {"x": 1}), "podFailurePolicy"),
        (make_job(madeUp=1), "spec.madeUp"),
        (make_job(make_pod(initContainers=[{**CONTAINER, "image": "x"}])), "is not that of the"),
        (
            make_job(
                make_pod(
                    initContainers=[
                        {**CONTAINER, "volumeMounts": [{"name": "a", "mountPath": "/a"}]}
                    ]
                )
            ),
            "has the volume a at another path",
        ),
        (make_gang("TFJob", "tfReplicaSpecs", PS=1, Worker=2), "spec.tfReplicaSpecs.PS"),
        (make_gang("MPIJob", "mpiReplicaSpecs", Worker=2), "expected Launcher and Worker"),
        (make_job_set(parallelism=2, completions=4), "no gang"),
        (make_job_set(name="a-part-0-0"), "the name a-part-0-0 does not exist here"),
        (
            {
                "apiVersion": "x/v1",
                "kind": "TrainJob",
                "metadata": {"name": "a"},
                "spec": {"runtimeRef": {"name": "t"}},
            },
            "the runtime t has the image",
        ),
        (make_job({**make_pod(), "containers": [CONTAINER, CONTAINER]}), "one container"),
        (
            make_job(make_pod(container={"resources": {"limits": {"cpu": "many"}}})),
            "is no quantity",
        ),
        (make_pytorch(1, elasticPolicy={"minReplicas": 1}), "elasticPolicy"),
        (
            {**make_pytorch(1), "kind": "PaddleJob"},
            "the kinds Deployment, StatefulSet, LeaderWorkerSet, InferenceService, JobSet, ",
        ),
    ],
)
def test_what_a_job_cannot_have_is_refused(job: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as error:
        read(job)
    assert said in str(error.value)


def test_the_gangs_of_training_operators() -> None:
    task = read(make_gang("XGBoostJob", "xgbReplicaSpecs", Master=1, Worker=2))
    assert task.nodes == 3
    shown = task.run.replace("exec python train.py --lr 0.1", 'echo "$WORKER_ADDRS $RANK"')
    assert run_lines(shown, NODE_RANK="1", NNODES="3", MASTER_PORT="5") == "10.0.0.2,10.0.0.3 1"

    for chief, rank, kind, index in (
        (1, 0, "chief", 0),
        (1, 2, "worker", 1),
        (0, 0, "worker", 0),
        (0, 2, "worker", 2),
    ):
        roles = {"Chief": 1, "Worker": 2} if chief else {"Worker": 3}
        task = read(make_gang("TFJob", "tfReplicaSpecs", **roles))
        assert task.nodes == 3
        shown = task.run.replace("exec python train.py --lr 0.1", 'echo "$TF_CONFIG"')
        found = json.loads(run_lines(shown, NODE_RANK=str(rank), NNODES="3", MASTER_PORT="5"))
        assert found["task"] == {"type": kind, "index": index}
        places = [f"10.0.0.{each + 1}:{15 + each}" for each in range(3)]
        wanted = {"chief": places[:1], "worker": places[1:]} if chief else {"worker": places}
        assert found["cluster"] == wanted


def test_an_mpi_job_runs_its_launcher_on_the_workers() -> None:
    job = make_gang("MPIJob", "mpiReplicaSpecs", {"slotsPerWorker": 2}, Launcher=1, Worker=4)
    task = read(job)
    assert task.nodes == 4
    assert task.run == (
        "export NPROC_PER_NODE=2\nexec $CAVVY_MPI sh -c 'exec python train.py --lr 0.1'"
    )
    assert task.resources.accelerators[0].count_min == 2
    pods = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]
    pods["containers"][0] = {**CONTAINER, "args": ["--hostfile", "/etc/mpi/hostfile"]}
    with pytest.raises(SpecError, match="mpirun knows the nodes"):
        read(job)


@pytest.mark.parametrize(
    ("kind", "key", "retries"),
    [
        ("PyTorchJob", "pytorchReplicaSpecs", None),
        ("TFJob", "tfReplicaSpecs", 0),
        ("JAXJob", "jaxReplicaSpecs", 0),
        ("XGBoostJob", "xgbReplicaSpecs", 0),
        ("MPIJob", "mpiReplicaSpecs", 0),
    ],
)
def test_each_operator_has_its_own_default_of_restarts(
    kind: str, key: str, retries: int | None
) -> None:
    roles = {"Launcher": 1, "Worker": 2} if kind == "MPIJob" else {"Worker": 2}
    job = make_gang(kind, key, **roles)
    for role in job["spec"][key].values():
        del role["restartPolicy"]
    assert read(job).retry.exit == retries
    for role in job["spec"][key].values():
        role["restartPolicy"] = "OnFailure"
    assert read(job).retry.exit is None
    assert read({**job, "spec": {**job["spec"], "runPolicy": {"backoffLimit": 2}}}).retry.exit == 2


@pytest.mark.parametrize(("policy", "retries"), [({}, 6), ({"backoffLimit": 0}, 0)])
def test_the_launcher_of_the_second_mpi_operator_is_a_job(
    policy: dict[str, int], retries: int
) -> None:
    job = make_gang("MPIJob", "mpiReplicaSpecs", {"runPolicy": policy}, Launcher=1, Worker=2)
    job["apiVersion"] = "kubeflow.org/v2beta1"
    assert read(job).retry.exit == retries  # also with restartPolicy: Never
    del job["spec"]["mpiReplicaSpecs"]["Launcher"]["restartPolicy"]
    assert read(job).retry.exit == retries


def test_a_train_job() -> None:
    trainer = {"image": "x", "command": ["torchrun", "a.py"], "numNodes": 3, "numProcPerNode": 4}
    trainer["resourcesPerNode"] = {"limits": {"nvidia.com/gpu": 4}}
    spec = {"trainer": trainer, "activeDeadlineSeconds": 3600, "failurePolicy": {"maxRestarts": 2}}
    task = read(
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": "fine"},
            "spec": {**spec, "runtimeRef": {"name": "torch-distributed"}},
        }
    )
    assert (task.name, task.nodes, task.image, task.retry.exit) == ("fine", 3, "x", 2)
    assert task.limits.duration == timedelta(hours=1)
    assert "PET_NPROC_PER_NODE=4\nexec torchrun a.py" in task.run
    assert task.resources.accelerators[0].count_min == 4
    with pytest.raises(SpecError, match="the runtime mpi-horovod starts processes in another way"):
        read(
            {
                "apiVersion": "trainer.kubeflow.org/v1alpha1",
                "kind": "TrainJob",
                "metadata": {"name": "fine"},
                "spec": {**spec, "runtimeRef": {"name": "mpi-horovod"}},
            }
        )


def test_a_job_set_is_a_gang() -> None:
    task = read(make_job_set(replicas=2, parallelism=2, completions=2, backoffLimit=0))
    assert (task.nodes, task.retry.exit) == (4, 3)
    # each of the four tries of the set has seven tries of a job, by Kubernetes' default
    assert read(make_job_set()).retry.exit == 27
    shown = task.run.replace(
        "exec python train.py --peer x", "echo $JOB_INDEX $JOB_COMPLETION_INDEX"
    )
    assert run_lines(shown, NODE_RANK="3") == "1 1"


def test_init_containers_run_before_and_sidecars_beside() -> None:
    shell = {"name": "a", "image": CONTAINER["image"], "command": ["sh", "-c"]}
    init = [
        {
            **shell,
            "args": ["echo $A first; false || true"],
            "env": [{"name": "A", "value": "it's"}],
        },
        {**shell, "args": ["echo beside; wait"], "restartPolicy": "Always"},
    ]
    main = {"command": ["sh", "-c"], "args": ["wait; echo main $A"]}
    run = read(make_job(make_pod(container=main, initContainers=init))).run
    assert run_lines(run) == "it's first\nbeside\nmain"
    init[0]["args"] = ["exit 3"]
    run = read(make_job(make_pod(container=main, initContainers=init))).run
    done = subprocess.run(["sh", "-c", run], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "")


def test_init_containers_have_the_variables_of_config_maps() -> None:
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}}
    config["data"] = {"LR": "0.1"}
    init = {"name": "a", "image": CONTAINER["image"], "command": ["sh", "-c", 'echo "$LR"']}
    init["envFrom"] = [{"configMapRef": {"name": "c"}}]
    main = {"command": ["sh", "-c", "echo main $LR"], "args": []}
    run = read(make_job(make_pod(container=main, initContainers=[init])), config).run
    assert run_lines(run) == "0.1\nmain"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"envFrom": [{"secretRef": {"name": "s"}}]}, "initContainers.envFrom"),
        ({"envFrom": [{"configMapRef": {"name": "gone"}}]}, "no ConfigMap gone"),
        ({"securityContext": {"privileged": True}}, "no privileges"),
        ({"lifecycle": {"postStart": {}}}, "initContainers.a.lifecycle"),
        ({"madeup": 1}, "initContainers.a.madeup"),
    ],
)
def test_what_init_containers_cannot_have_is_refused(changes: dict[str, Any], said: str) -> None:
    init = {"name": "a", "image": CONTAINER["image"], "command": ["x"], **changes}
    with pytest.raises(SpecError, match=said):
        read(make_job(make_pod(initContainers=[init])))


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


def test_a_shell_goes_on_after_a_failure_as_in_kubernetes() -> None:
    task = read(make_job(make_pod(container={"command": ["sh", "-c"], "args": ["false; echo on"]})))
    done = subprocess.run(["sh", "-e", "-c", task.run], capture_output=True, text=True, check=True)
    assert done.stdout == "on\n"


def test_a_job_asks_for_its_limit_of_memory() -> None:
    asks = {"requests": {"memory": "16Mi", "cpu": 1}, "limits": {"memory": "512Mi", "cpu": 4}}
    pod = make_pod(container={"resources": asks})
    needs = read(make_job(pod)).resources
    assert (needs.memory_min_mib, needs.cpus_min) == (512, 1)
    (note,) = find(make_job(pod)).kept
    assert (note.key, note.refused) == ("containers.resources.requests.memory", False)


@pytest.mark.parametrize(
    "job",
    [
        make_job(suspend=True, parallelism=4, completions=4),
        make_pytorch(1, runPolicy={"suspend": True}),
    ],
)
def test_a_job_that_kueue_would_start_starts(job: dict[str, Any]) -> None:
    labels = {"kueue.x-k8s.io/queue-name": "team"}
    least = {"kueue.x-k8s.io/job-min-parallelism": "2"}
    queued = {**job, "metadata": {"name": "a", "labels": labels, "annotations": least}}
    kept = find(queued).kept
    assert [each.refused for each in kept] == [False] * len(kept)
    assert set(labels) | set(least) <= {each.key for each in kept}
    assert any(each.refused for each in find(job).kept)


def make_mpi(launcher: dict[str, Any], worker: dict[str, Any]) -> dict[str, Any]:
    job = make_gang("MPIJob", "mpiReplicaSpecs", Launcher=1, Worker=2)
    for name, pod in (("Launcher", launcher), ("Worker", worker)):
        role = job["spec"]["mpiReplicaSpecs"][name]
        role["template"] = {"spec": pod}
    return job


def mount(name: str, path: str = "/data") -> dict[str, Any]:
    return {
        "container": {"volumeMounts": [{"name": name, "mountPath": path}]},
        "volumes": [{"name": name, "persistentVolumeClaim": {"claimName": name}}],
    }


def add_rights(*names: str) -> dict[str, Any]:
    return {"securityContext": {"capabilities": {"add": [*names]}}}


def test_the_nodes_of_an_mpi_job_have_the_volumes_of_both_roles() -> None:
    task = read(make_mpi(make_pod(**mount("logs", "/logs")), make_pod(**mount("data"))))
    assert {(each.source, each.path) for each in task.volumes} == {
        ("data", "/data"),
        ("logs", "/logs"),
    }


@pytest.mark.parametrize(
    ("launcher", "worker", "said"),
    [
        (make_pod(**mount("a")), make_pod(**mount("b")), "differ in /data"),
        (make_pod(initContainers=[CONTAINER]), make_pod(), "no node of its own"),
        (make_pod(), {**make_pod(), "containers": [CONTAINER] * 2}, "expected one"),
        (make_pod(), make_pod(imagePullSecrets=[{"name": "a"}]), "image_login"),
        (make_pod(), make_pod(hostNetwork=True), "the network of their host"),
        (make_pod(madeup=1), make_pod(), "madeup"),
        (make_pod(), make_pod(container={"madeup": 1}), "madeup"),
        (make_pod(container={"lifecycle": {"preStop": {"exec": {}}}}), make_pod(), "lifecycle"),
        (make_pod(), make_pod(container=add_rights("SYS_ADMIN", "IPC_LOCK")), "no privileges"),
        (make_pod(container=add_rights("IPC_LOCK")), make_pod(), "no privileges"),
        (
            make_pod(),
            make_pod(container={"securityContext": {"privileged": True}}),
            "no privileges",
        ),
    ],
)
def test_what_the_nodes_of_an_mpi_job_cannot_have_is_refused(
    launcher: dict[str, Any], worker: dict[str, Any], said: str
) -> None:
    with pytest.raises(SpecError, match=said):
        read(make_mpi(launcher, worker))


def test_all_that_the_nodes_of_an_mpi_job_lack_is_noted() -> None:
    env = [{"name": "SAME", "value": "1"}, {"name": "OTHER", "value": "1"}]
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}}
    config["data"] = {"LR": "0.1"}
    source = {"configMapRef": {"name": "c"}}
    own = [env[0], {"name": "OTHER", "value": "2"}, {"name": "ALONE", "value": "3"}]
    launcher = make_pod(
        serviceAccountName="a",
        terminationGracePeriodSeconds=5,
        container={"env": env, "resources": {"limits": {"cpu": 1}}},
    )
    container = {"env": own, "envFrom": [source], "workingDir": "/w", "command": ["sshd"]}
    found = find(make_mpi(launcher, make_pod(container=container)), config)
    spec = "spec.mpiReplicaSpecs"
    pod = f"{spec}.Launcher.template.spec"
    assert {each.key for each in found.kept} == {
        f"{pod}.serviceAccountName",
        f"{pod}.terminationGracePeriodSeconds",
        f"{pod}.containers.resources",
        f"{spec}.Worker.command",
        f"{spec}.Worker.args",
        f"{spec}.Worker.workingDir",
        f"{spec}.Worker.env.OTHER",
        f"{spec}.Worker.env.ALONE",
        f"{spec}.Worker.envFrom",
    }
    assert found.refused == ()
    launcher["containers"][0] |= {"env": own, "envFrom": [source], "workingDir": "/w"}
    task = read(make_mpi(launcher, make_pod(container=container)), config)
    assert task.env == {"SAME": "1", "OTHER": "2", "ALONE": "3", "LR": "0.1"}


def test_what_the_server_of_a_worker_and_the_place_of_a_launcher_need_is_noted() -> None:
    launcher = make_pod(
        hostname="main",
        hostNetwork=True,
        imagePullSecrets=[{"name": "a"}],
    )
    container = {
        "lifecycle": {"postStart": {"exec": {"command": ["mkdir", "/run/sshd"]}}},
        **add_rights("CAP_IPC_LOCK", "SYS_CHROOT"),
    }
    found = find(make_mpi(launcher, make_pod(container=container)))
    assert found.refused == ()
    spec = "spec.mpiReplicaSpecs"
    pod = f"{spec}.Launcher.template.spec"
    under = f"{spec}.Worker.template.spec.containers"
    assert {
        f"{pod}.hostname",
        f"{pod}.hostNetwork",
        f"{pod}.imagePullSecrets",
        f"{under}.lifecycle",
        f"{under}.securityContext.capabilities.add",
    } <= {each.key for each in found.kept}


@pytest.mark.parametrize(
    ("label", "value", "name"),
    [
        ("gpu.nvidia.com/model", "RTX_A4000", "A4000"),
        ("gpu.nvidia.com/class", "A100_NVLINK_80GB", "A100"),
        ("example.com/gpu-type", "rtx-2080-ti", "RTX2080Ti"),
        ("example.com/disk", "fast", None),
    ],
)
def test_labels_that_name_a_gpu_of_the_catalog_choose_it(
    label: str, value: str, name: str | None
) -> None:
    term = {"matchExpressions": [{"key": label, "operator": "In", "values": [value]}]}
    affinity = {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}
        }
    }
    for pod in (make_pod(affinity=affinity), make_pod(nodeSelector={label: value})):
        (need,) = read(make_job(pod)).resources.accelerators
        assert (need.name, need.count_min) == (name, 2)


def test_a_resource_that_names_its_gpu() -> None:
    limits = {"nvidia.com/a100": 2, "cpu": 4}
    (need,) = read(
        make_job(make_pod(container={"resources": {"limits": limits}}))
    ).resources.accelerators
    assert (need.name, need.count_min) == ("A100", 2)


A100_80 = ("A100", 81920)


@pytest.mark.parametrize(
    ("resource", "labels", "expected"),
    [
        ("nvidia.com/a100", {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}, A100_80),
        ("nvidia.com/a100-80gb", {"gpu.nvidia.com/class": "A100_NVLINK"}, A100_80),
        ("nvidia.com/a100", {"pool": "l4"}, ("A100", None)),
        ("nvidia.com/h100", {"nvidia.com/gpu.product": "NVIDIA-H100-NVL"}, ("H100-NVL", None)),
        ("nvidia.com/gpu", {"pool": "l4", "nvidia.com/gpu.product": "NVIDIA-H200"}, ("H200", None)),
        (
            "nvidia.com/gpu",
            {
                "cloud.google.com/gke-accelerator": "nvidia-tesla-a100",
                "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB",
            },
            A100_80,
        ),
        ("nvidia.com/gpu", {"pool": "a100", "kind": "a100-80gb"}, A100_80),
        ("nvidia.com/a100", {"nvidia.com/gpu.product": "NVIDIA-H200"}, None),
        ("nvidia.com/a100-40gb", {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}, None),
        (
            "nvidia.com/gpu",
            {"nvidia.com/gpu.product": "NVIDIA-H200", "gpu.nvidia.com/model": "A100"},
            None,
        ),
        ("nvidia.com/gpu", {"pool": "a100", "kind": "l4"}, None),
    ],
)
def test_all_that_names_a_gpu_is_read_together(
    resource: str, labels: dict[str, str], expected: tuple[str, int | None] | None
) -> None:
    term = [{"key": key, "operator": "In", "values": [each]} for key, each in labels.items()]
    terms = {"nodeSelectorTerms": [{"matchExpressions": term}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    container = {"resources": {"limits": {resource: 1}}}
    for placed in (
        {"nodeSelector": labels},
        {"affinity": affinity},
        {"affinity": affinity, "nodeSelector": labels},
    ):
        job = make_job(make_pod(container=container, **placed))
        if expected is None:
            with pytest.raises(SpecError, match=r"the pod asks for .* and no node has both"):
                read(job)
            continue
        (need,) = read(job).resources.accelerators
        assert (need.name, need.memory_min_mib) == expected
        if "nodeSelector" in placed and "pool" in labels and len(set(labels.values())) > 1:
            noted = "nodeSelector.pool" in {each.key for each in find(job).kept}
            assert noted == (labels["pool"] == "l4")


def test_the_selector_chooses_among_the_products_of_the_affinity() -> None:
    rule = {"key": "nvidia.com/gpu.product", "operator": "In"}
    terms = [
        {"matchExpressions": [{**rule, "values": [name]}]}
        for name in ("NVIDIA-L4", "NVIDIA-A100-SXM4-80GB")
    ]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    pod = make_pod(affinity={"nodeAffinity": required})
    assert [each.name for each in read(make_job(pod)).resources.accelerators] == ["L4", "A100"]
    pod["nodeSelector"] = {"cloud.google.com/gke-accelerator": "nvidia-tesla-a100"}
    (need,) = read(make_job(pod)).resources.accelerators
    assert (need.name, need.memory_min_mib) == A100_80
    pod["nodeSelector"] = {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
    with pytest.raises(SpecError, match="asks for H100 with 80 GiB and for L4, A100 with 80 GiB"):
        read(make_job(pod))


def make_affine(*terms: dict[str, list[str]]) -> dict[str, Any]:
    """Return an affinity with a term for each table of labels and the values that they may have."""
    made = [
        {
            "matchExpressions": [
                {"key": key, "operator": "In", "values": values} for key, values in term.items()
            ]
        }
        for term in terms
    ]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": made}}
    return {"nodeAffinity": required}


PRODUCT, GKE = "nvidia.com/gpu.product", "cloud.google.com/gke-accelerator"
H100_PCIE = ("H100-PCIe", 81920)


@pytest.mark.parametrize(
    ("resource", "selector", "terms", "expected", "noted"),
    [
        # one GPU by two names
        (
            "nvidia.com/gpu",
            {PRODUCT: "A100-SXM4-80GB"},
            [{PRODUCT: ["NVIDIA-A100", "NVIDIA-A100-SXM4-80GB"]}],
            [A100_80],
            [],
        ),
        (
            "nvidia.com/gpu",
            {GKE: "nvidia-h100-80gb", PRODUCT: "NVIDIA-H100-PCIe"},
            [],
            [H100_PCIE],
            [],
        ),
        ("nvidia.com/h100-80gb", {PRODUCT: "NVIDIA-H100-PCIe"}, [], [H100_PCIE], []),
        ("nvidia.com/h100-80gb", {}, [{PRODUCT: ["NVIDIA-H100-PCIe"]}], [H100_PCIE], []),
        ("nvidia.com/h100-80gb", {PRODUCT: "NVIDIA-H100-NVL"}, [], None, []),
        # a label of another name counts only if none names a product
        (
            "nvidia.com/gpu",
            {PRODUCT: "NVIDIA-H200"},
            [{"pool": ["l4", "cpu"]}],
            [("H200", None)],
            [],
        ),
        (
            "nvidia.com/gpu",
            {"pool": "l4"},
            [{PRODUCT: ["NVIDIA-H200"]}],
            [("H200", None)],
            ["pool"],
        ),
        ("nvidia.com/gpu", {"pool": "a100"}, [{"kind": ["a100-80gb", "l4"]}], [A100_80], []),
        # a node meets one of the terms
        (
            "nvidia.com/gpu",
            {"pool": "l4"},
            [{PRODUCT: ["NVIDIA-H200"]}, {"zone": ["a"]}],
            [("H200", None), ("L4", None)],
            [],
        ),
        (
            "nvidia.com/gpu",
            {PRODUCT: "NVIDIA-H200"},
            [{PRODUCT: ["NVIDIA-L4"]}, {GKE: ["nvidia-h200-141gb"]}],
            [("H200", 144384)],
            [],
        ),
    ],
)
def test_the_selector_and_the_affinity_name_a_gpu_together(
    resource: str,
    selector: dict[str, str],
    terms: list[dict[str, list[str]]],
    expected: list[tuple[str, int | None]] | None,
    noted: list[str],
) -> None:
    container = {"resources": {"limits": {resource: 1}}}
    job = make_job(
        make_pod(container=container, nodeSelector=selector, affinity=make_affine(*terms))
    )
    if expected is None:
        with pytest.raises(SpecError, match="no node has both"):
            read(job)
        return
    needs = read(job).resources.accelerators
    assert [(each.name, each.memory_min_mib) for each in needs] == expected
    selected = [each.key for each in find(job).kept if each.key.startswith("nodeSelector")]
    assert selected == [f"nodeSelector.{each}" for each in noted]


@pytest.mark.parametrize(
    ("name", "fabric"), [("vpc.amazonaws.com/efa", Fabric.EFA), ("rdma/ib", Fabric.INFINIBAND)]
)
def test_resources_of_rdma_networks_choose_the_fabric(name: str, fabric: Fabric) -> None:
    limits = {"nvidia.com/gpu": 8, name: 4}
    task = read(make_mpi(make_pod(), make_pod(container={"resources": {"limits": limits}})))
    assert task.resources.network == NetworkNeed(fabric=fabric)
    assert read(make_job()).resources.network is None


@pytest.mark.parametrize(("count", "said"), [("1", True), ("2", False), ("$(GPUS)", False)])
def test_variables_that_only_services_have_are_kept_as_is_an_own_number_of_processes(
    count: str, said: bool
) -> None:
    own = {"PORT": "8000", "SERVE_HOST": "::", "NPROC_PER_NODE": count, "MASTER_PORT": "29500"}
    env = [{"name": name, "value": value} for name, value in own.items()]
    task = read(make_job(make_pod(container={"env": env})))
    assert task.env == {"PORT": "8000", "SERVE_HOST": "::"}
    assert task.run.startswith("export NPROC_PER_NODE=1\n") == said
    task = read(make_job(make_pod(container={"env": env, "resources": {}})))
    assert "export" not in task.run or count == "2"


def test_fields_of_a_pod_are_known_on_the_node() -> None:
    paths = {"POD": "metadata.name", "NODE": "spec.nodeName", "IP": "status.podIP"}
    env = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in paths.items()
    ]
    container = {"env": env, "command": ["sh", "-c", "echo $POD $IP $NODE"], "args": []}
    task = read(make_job(make_pod(container=container)))
    known = {"CAVVY_JOB": "train", "CAVVY_HOSTS": "10.0.0.1,10.0.0.2", "NODE_RANK": "1"}
    done = subprocess.run(
        ["sh", "-c", task.run],
        env={**os.environ, **known},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["train-1", "10.0.0.2", os.uname().nodename]


def test_mistakes_in_an_image_are_at_its_line() -> None:
    text = """\
apiVersion: batch/v1
kind: Job
metadata: {name: a}
spec:
  template:
    spec:
      containers:
      - name: main
        image: <REGISTRY>/a
"""
    with pytest.raises(SpecError) as error:
        parse_file(text)
    assert error.value.problems[0].line == 9


def test_a_job_of_another_operator_is_named() -> None:
    job = {**make_job(), "apiVersion": "batch.volcano.sh/v1alpha1"}
    with pytest.raises(SpecError, match=r"does not read a Job of 'batch\.volcano\.sh'"):
        read(job)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"configMapRef": {"name": "settings"}}, "has no ConfigMap settings"),
        ({"secretRef": {"name": "keys"}}, "cavvy secret set NAME"),
    ],
)
def test_variables_of_what_the_file_lacks_are_refused(source: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        read(make_job(make_pod(container={"envFrom": [source]})))
    optional = {key: {**value, "optional": True} for key, value in source.items()}
    assert read(make_job(make_pod(container={"envFrom": [optional]}))).env == {}
