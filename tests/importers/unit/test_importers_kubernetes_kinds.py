"""Objects of Kubernetes beside Deployments and Jobs: those of Ray, JAX, LWS and KServe, StatefulSets,
files of ConfigMaps, and the lines of keys that are left out.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from cavvy.domain.services import TargetKind
from cavvy.domain.tasks import TaskSpec
from cavvy.spec import SpecError
from cavvy.task_files import ReadOptions, Translation, parse_file, parse_task

GPU = {"limits": {"nvidia.com/gpu": 1, "memory": "8Gi"}}


def find(*objects: dict[str, Any]) -> Translation:
    return parse_file(yaml.safe_dump_all(objects, sort_keys=False), file="f.yaml")


def read(*objects: dict[str, Any], serves: bool = False) -> TaskSpec:
    text = yaml.safe_dump_all(objects, sort_keys=False)
    return parse_task(text, file="f.yaml", options=ReadOptions(serves=serves))


def make_config(**data: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "code"}, "data": data}


def make_job(mounts: list[dict[str, Any]], volume: dict[str, Any], **more: Any) -> dict[str, Any]:
    container = {
        **{"name": "main", "image": "python:3.12", "command": ["true"]},
        **{"volumeMounts": mounts, **more},
    }
    pod = {"restartPolicy": "Never", "containers": [container], "volumes": [volume]}
    return {
        **{"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}},
        "spec": {"template": {"spec": pod}},
    }


def make_ray(*workers: dict[str, Any], kind: str = "RayJob", **spec: Any) -> dict[str, Any]:
    head = make_group("head", {"limits": {"cpu": 2}}, **{"num-cpus": "0", "dashboard-host": "0"})
    cluster = {"rayVersion": "2.49.2", "headGroupSpec": head, "workerGroupSpecs": list(workers)}
    inner = {"entrypoint": "python a.py --x 'b c'", "rayClusterSpec": cluster, **spec}
    return {
        **{"apiVersion": "ray.io/v1", "kind": kind, "metadata": {"name": "r"}},
        "spec": inner if kind == "RayJob" else {**cluster, **spec},
    }


def make_group(name: str, resources: dict[str, Any], **params: str) -> dict[str, Any]:
    container = {"name": name, "image": "rayproject/ray:2.49.2", "resources": resources}
    container["lifecycle"] = {"preStop": {"exec": {"command": ["ray", "stop"]}}}
    return {"rayStartParams": params, "template": {"spec": {"containers": [container]}}}


def make_workers(**more: Any) -> dict[str, Any]:
    return {**make_group("worker", GPU, **{"num-gpus": "1"}), "groupName": "g", **more}


def test_files_of_a_config_map_are_written_before_the_work(tmp_path: Path) -> None:
    place = str(tmp_path / "scripts")
    config = make_config(**{"a.py": "print('$HOME')\n", "b.py": "2"})
    volume = {"name": "v", "configMap": {"name": "code"}}
    mounts = [
        {"name": "v", "mountPath": place},
        {"name": "v", "mountPath": f"{place}/one/c.py", "subPath": "b.py"},
    ]
    task = read(config, make_job(mounts, volume, command=["cat", f"{place}/a.py"]))
    done = subprocess.run(["sh", "-c", task.run], capture_output=True, text=True, check=True)
    assert done.stdout == "print('$HOME')\n"
    assert {str(path.relative_to(place)) for path in Path(place).rglob("*.py")} == {
        "a.py",
        "b.py",
        "one/c.py",
    }
    assert (Path(place) / "one" / "c.py").read_text() == "2\n"
    chosen = {"name": "v", "configMap": {"name": "code", "items": [{"key": "b.py", "path": "x/y"}]}}
    run = read(config, make_job(mounts[:1], chosen)).run
    assert f"{place}/x/y" in run
    assert "a.py" not in run


def test_a_missing_config_map_is_named() -> None:
    job = make_job([{"name": "v", "mountPath": "/x"}], {"name": "v", "configMap": {"name": "gone"}})
    with pytest.raises(SpecError, match=r"f\.yaml:1\d:.*the file has no ConfigMap gone"):
        read(job)
    job["spec"]["template"]["spec"]["volumes"][0]["configMap"]["optional"] = True
    assert read(job).volumes == ()


def test_a_ray_job() -> None:
    environment = "pip: [requests==2.26.0]\nenv_vars: {A: it's}\n"
    task = read(make_ray(make_workers(replicas=2), runtimeEnvYAML=environment, backoffLimit=1))
    assert (task.nodes, task.image, task.retry.exit) == (3, "rayproject/ray:2.49.2", 1)
    assert [each.count_min for each in task.resources.accelerators] == [1]
    assert (task.resources.cpus_min, task.resources.memory_min_mib) == (2, 8192)
    assert 'ray start --address "$RAY_ADDRESS" --num-gpus=1 ' in task.run
    assert "ray start --head --port 6379 --dashboard-host 0.0.0.0 --num-cpus=0 " in task.run
    said = run_ray(task, rank=0)
    assert said[-2][:4] == ["job", "submit", "--runtime-env-json", said[-2][3]]
    assert yaml.safe_load(said[-2][3]) == {
        "pip": ["requests==2.26.0"],
        "env_vars": {"A": "it's"},
    }
    assert said[-2][4:] == ["--", "sh", "-c", "python a.py --x 'b c'"]
    assert said[-1][0] == "stop"
    (note,) = [each for each in find(make_ray(make_workers())).kept if "larger" in each.reason]
    assert note.key == "spec.rayClusterSpec.headGroupSpec"


def run_ray(task: TaskSpec, rank: int) -> list[list[str]]:
    """The calls of a `ray` that does nothing, in the run of a task."""
    ray = "ray() { printf '%s\\0' \"$@\" END; [ $1 != health-check ]; }\npython3() { :; }\n"
    env = {**os.environ, "MASTER_ADDR": "h", "NNODES": "3", "NODE_RANK": str(rank)}
    done = subprocess.run(
        ["sh", "-c", ray + task.run.replace(">/dev/null 2>&1", "")],
        capture_output=True,
        text=True,
        env=env,
        check=True,
    )
    return [call.strip("\0").split("\0") for call in done.stdout.split("END\0") if call]


def add_to_pod(key: str, **container: str) -> dict[str, Any]:
    made = make_workers()
    made["template"]["spec"].setdefault(key, []).append(container)
    return made


def add_env(value: str) -> dict[str, Any]:
    made = make_workers()
    made["template"]["spec"]["containers"][0]["env"] = [{"name": "A", "value": value}]
    return made


def test_several_groups_of_ray_workers_start_with_their_own_options() -> None:
    few = {**make_group("few", {"limits": {"cpu": 8}}, **{"num-gpus": "0"}), "replicas": 2}
    few["template"]["spec"]["initContainers"] = [{"name": "w", "command": ["nslookup", "head"]}]
    made = make_ray(few, make_workers(replicas=1), kind="RayCluster")
    task = read(made)
    assert (task.nodes, task.resources.cpus_min) == (4, 8)
    assert [each.count_min for each in task.resources.accelerators] == [1]
    for rank, said in ((1, "--num-gpus=0"), (2, "--num-gpus=0"), (3, "--num-gpus=1")):
        assert run_ray(task, rank=rank)[0] == ["start", "--address", "h:6379", said]
    assert any("initContainers.w" in each.key for each in find(made).kept)


def test_a_ray_cluster_stays_until_it_is_stopped() -> None:
    task = read(make_ray(make_workers(minReplicas=3, maxReplicas=9), kind="RayCluster"))
    assert task.nodes == 4
    assert "job submit" not in task.run
    assert "trap" in task.run


def test_a_jax_job() -> None:
    pod = {"containers": [{"name": "jax", "image": "i", "command": ["python", "a.py"]}]}
    role = {"replicas": 2, "restartPolicy": "OnFailure", "template": {"spec": pod}}
    job = {"apiVersion": "kubeflow.org/v1", "kind": "JAXJob", "metadata": {"name": "j"}}
    task = read({**job, "spec": {"jaxReplicaSpecs": {"Worker": role}}})
    assert task.nodes == 2
    assert 'NUM_PROCESSES="$NNODES" PROCESS_ID="$NODE_RANK"' in task.run


def make_lws(worker: dict[str, Any] | None = None, **leader: Any) -> dict[str, Any]:
    first = {
        **{"name": "leader", "image": "vllm/vllm-openai", "resources": GPU},
        "command": ["sh", "-c", "echo lead $(LWS_GROUP_SIZE) $A"],
        "env": [{"name": "A", "value": "1"}],
        "ports": [{"containerPort": 8080}],
        **leader,
    }
    other = {**first, "command": ["echo", "work", "$(LWS_LEADER_ADDRESS)"], **(worker or {})}
    group: dict[str, Any] = {"size": 2, "restartPolicy": "RecreateGroupOnPodRestart"}
    if worker is not None:
        group["leaderTemplate"] = {"spec": {"containers": [first]}}
    group["workerTemplate"] = {"spec": {"containers": [first if worker is None else other]}}
    return {
        **{"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet"},
        **{"metadata": {"name": "lws"}, "spec": {"replicas": 3, "leaderWorkerTemplate": group}},
    }


def test_a_leader_worker_set_is_a_service_on_several_nodes() -> None:
    task = read(make_lws({"env": [{"name": "A", "value": "2"}]}), serves=True)
    assert (task.nodes, task.env) == (2, {"A": "1"})
    assert task.service is not None
    assert (task.service.port, task.service.replicas.least) == (8080, 3)
    said = [
        subprocess.run(
            ["sh", "-c", task.run],
            capture_output=True,
            text=True,
            env={**os.environ, "A": "1", "MASTER_ADDR": "h", "NNODES": "2", "NODE_RANK": rank},
            check=True,
        ).stdout
        for rank in ("0", "1")
    ]
    assert said == ["lead 2 1\n", "work h\n"]
    assert read(make_lws(), serves=True).run.count("lead") == 2


def make_stateful(replicas: int, **container: Any) -> dict[str, Any]:
    pod = {
        "containers": [{"name": "a", "image": "i", "ports": [{"containerPort": 80}], **container}]
    }
    spec = {"serviceName": "s", "replicas": replicas, "template": {"spec": pod}}
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "s"}, "spec": spec}


def test_a_stateful_set_is_a_service() -> None:
    task = read(make_stateful(2), serves=True)
    assert task.service is not None
    assert task.service.replicas.least == 2
    (note,) = find(make_stateful(1)).kept
    assert (note.key, note.line, note.refused) == ("spec.serviceName", 6, False)


def make_inference(**predictor: Any) -> dict[str, Any]:
    head = {"apiVersion": "serving.kserve.io/v1beta1", "kind": "InferenceService"}
    return {**head, "metadata": {"name": "llama"}, "spec": {"predictor": predictor}}


def test_an_inference_service_of_a_language_model() -> None:
    arguments = [
        "--model_name=m",
        "--model_id=a/b",
        "--max_model_len",
        "4096",
        "--trust_remote_code",
    ]
    model = {"modelFormat": {"name": "huggingface"}, "args": arguments, "resources": GPU}
    scaling = {"minReplicas": 0, "maxReplicas": 3, "scaleTarget": 4, "containerConcurrency": 9}
    task = read(make_inference(model=model, **scaling), serves=True)
    assert task.run == (
        "exec vllm serve a/b --host 0.0.0.0 --port 8080 --served-model-name m --max-model-len 4096 "
        "--trust-remote-code"
    )
    assert task.service is not None
    assert (task.service.models, task.service.concurrency) == (("m",), 9)
    replicas = task.service.replicas
    assert (replicas.least, replicas.most) == (0, 3)
    assert (replicas.target.kind, replicas.target.value) == (TargetKind.CONCURRENCY, 4)
    assert (task.service.port, task.service.probe.path) == (8080, "/health")


def test_an_inference_service_of_an_image() -> None:
    container = {"name": "kserve-container", "image": "me/model:1", "resources": GPU}
    task = read(
        make_inference(containers=[container], scaleMetric="rps", scaleTarget=5), serves=True
    )
    assert (task.image, task.service and task.service.port) == ("me/model:1", 8080)
    assert task.service is not None
    assert task.service.replicas.target.kind is TargetKind.RATE


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (make_ray(add_to_pod("containers", name="log")), "a node runs one container"),
        (make_ray(add_to_pod("initContainers", name="clone")), "put its work into the image"),
        (make_ray(add_env("1"), add_env("2")), "other values of A"),
        (make_ray(make_workers(numOfHosts=2)), "numOfHosts"),
        (make_ray(make_workers(), entrypoint=""), "spec.entrypoint"),
        (make_ray(make_workers(), clusterSelector={"a": "b"}), "clusterSelector"),
        (make_ray(make_workers(), runtimeEnvYAML="[]"), "expected a table"),
        (make_ray(make_workers(), madeUp=1), "spec.madeUp"),
        (make_ray(make_workers(replicas=10**9)), "nodes"),
        (make_lws({"image": "other"}), "differ in `image`"),
        (make_lws({"resources": {}}), "differ in `resources`"),
        (make_lws(None, ports=[]), "no port is named"),
        (make_stateful(2, command=["sh", "-c", "echo $HOSTNAME"]), "names of its replicas"),
        (make_stateful(2, env=[{"name": "A", "value": "s-0.s"}]), "names of its replicas"),
        (make_inference(sklearn={"storageUri": "gs://a/b"}), "names its server"),
        (make_inference(model={"modelFormat": {"name": "sklearn"}}), "are parts of KServe"),
        (
            make_inference(model={"modelFormat": {"name": "vLLM"}, "storageUri": "s3://a"}),
            "parts of",
        ),
        (make_inference(), "expected `model` or `containers`"),
        (
            make_inference(containers=[{"name": "a", "image": "i"}], canaryTrafficPercent=5),
            "canary",
        ),
        (
            make_inference(containers=[{"name": "a", "image": "i"}], minReplicas="x"),
            "`minReplicas`",
        ),
    ],
)
def test_what_these_kinds_lack_is_refused_at_its_line(made: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as error:
        read(made, serves=True)
    assert said in str(error.value)


def test_claims_of_each_replica_are_refused_once() -> None:
    made = make_stateful(2, volumeMounts=[{"name": "data", "mountPath": "/data"}])
    claim = {"metadata": {"name": "data"}, "spec": {"resources": {"requests": {"storage": "1Gi"}}}}
    made["spec"]["volumeClaimTemplates"] = [claim]
    refused = [each for each in find(made).kept if each.refused]
    assert [each.key for each in refused] == ["spec.volumeClaimTemplates"]


def test_the_claim_of_the_only_replica_is_a_volume() -> None:
    made = make_stateful(1, volumeMounts=[{"name": "data", "mountPath": "/data"}])
    made["spec"]["volumeClaimTemplates"] = [{"metadata": {"name": "data"}}]
    found = find(made)
    assert not [each for each in found.kept if each.refused]
    (volume,) = found.tasks[0].volumes
    name = made["metadata"]["name"]
    assert (volume.source, volume.path) == (f"data-{name}-0", "/data")


def test_labels_of_nodes_are_named_also_without_gpus() -> None:
    made = make_stateful(1)
    made["spec"]["template"]["spec"]["nodeSelector"] = {"disk": "fast"}
    assert "nodeSelector.disk" in [each.key for each in find(made).kept]


def test_keys_are_named_with_their_own_lines() -> None:
    text = """\
apiVersion: batch/v1
kind: Job
metadata: {name: a}
spec:
  podFailurePolicy: {rules: [1]}
  template:
    spec:
      hostNetwork: true
      containers:
      - name: main
        image: a
        env:
        - name: A
          value: b
        - name: NODE
          valueFrom: {fieldRef: {fieldPath: metadata.uid}}
        securityContext:
          privileged: true
        resources:
          limits:
            example.com/x: 1
"""
    lines = {each.key.rpartition(".")[2]: each.line for each in parse_file(text).kept}
    assert lines == {
        **{"podFailurePolicy": 5, "hostNetwork": 8, "NODE": 15, "securityContext": 17},
        **{"privileged": 18, "com/x": 21},
    }


def test_an_inference_service_of_a_model_in_its_storage() -> None:
    model = {"modelFormat": {"name": "vLLM"}, "storageUri": "hf://a/b", "resources": GPU}
    task = read(make_inference(model=model), serves=True)
    assert "vllm serve a/b --host" in task.run


def test_a_port_of_another_protocol_is_no_service() -> None:
    database = make_stateful(1, ports=[{"containerPort": 5432}])
    with pytest.raises(SpecError, match="port 5432 speaks PostgreSQL"):
        read(database, serves=True)
    named = make_stateful(1, ports=[{"containerPort": 5432, "name": "http"}])
    assert read(named, serves=True).service is not None


def make_train_job(runtime: str, **trainer: Any) -> dict[str, Any]:
    spec = {"runtimeRef": {"name": runtime}, "trainer": trainer}
    head = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob"}
    return {**head, "metadata": {"name": "t"}, "spec": spec}


def make_runtime(name: str, policy: dict[str, Any], **container: Any) -> dict[str, Any]:
    pod = {"template": {"spec": {"containers": [{"name": "node", **container}]}}}
    jobs = {"replicatedJobs": [{"name": "node", "template": {"spec": pod}}]}
    head = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainingRuntime"}
    spec = {"mlPolicy": policy, "template": {"spec": jobs}}
    return {**head, "metadata": {"name": name}, "spec": spec}


def test_a_train_job_takes_what_its_runtime_in_the_file_says() -> None:
    policy = {"numNodes": 2, "torch": {"numProcPerNode": 3}}
    env = [{"name": "A", "value": "1"}, {"name": "B", "value": "1"}]
    runtime = make_runtime("own", policy, image="img", env=env, resources=GPU)
    own = [{"name": "B", "value": "2"}]
    task = read(runtime, make_train_job("own", command=["python", "t.py"], env=own))
    assert (task.nodes, task.image, task.env) == (2, "img", {"A": "1", "B": "2"})
    assert task.resources.accelerators[0].count_min == 1
    assert "PET_NPROC_PER_NODE=3" in task.run
    assert read(runtime, make_train_job("own", command=["x"], numNodes=4)).nodes == 4
    beside = make_runtime("own", policy, image="img")
    beside["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"][
        "containers"
    ].append({"name": "proxy"})
    for other, said in (
        (beside, "several containers"),
        (make_runtime("own", {"mpi": {}}, image="img"), "another way than torchrun"),
        (make_runtime("else", policy, image="img"), "has the image; write `image` here"),
    ):
        found = find(other, make_train_job("own", command=["x"]))
        assert any(said in each.reason for each in found.refused)


def test_the_index_of_a_pod_is_known_on_the_node() -> None:
    path = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    env = [{"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": path}}}]
    job = make_job([], {"name": "v", "emptyDir": {}}, env=env, args=["$(RANK)"])
    job["spec"] |= {"completions": 2, "completionMode": "Indexed"}
    run = read(job).run
    lines = [
        'export JOB_COMPLETION_INDEX="$CAVVY_ARRAY_INDEX"',
        'export RANK="$JOB_COMPLETION_INDEX"',
        'exec true "${RANK}"',
    ]
    assert run.splitlines() == lines
    said = subprocess.run(
        ["sh", "-c", run.replace("exec true", "echo")],
        env={"PATH": os.environ["PATH"], "CAVVY_ARRAY_INDEX": "5"},
        capture_output=True,
        check=True,
    )
    assert said.stdout == b"5\n"
    env[0]["name"] = "a;touch x"
    assert any("in the name of a variable" in each.reason for each in find(job).refused)
    env[0]["name"] = "RANK"
    del job["spec"]["completionMode"]  # such pods have no index
    assert any("fieldRef" in each.reason for each in find(job).refused)


def test_a_schedule_of_several_pods_is_refused_at_once() -> None:
    inner = make_job([], {"name": "v", "emptyDir": {}})["spec"]
    inner["completions"] = 3
    spec = {"schedule": "0 * * * *", "jobTemplate": {"spec": inner}}
    job = {"apiVersion": "batch/v1", "kind": "CronJob", "metadata": {"name": "c"}, "spec": spec}
    assert [each.key for each in find(job).refused] == ["spec.jobTemplate.spec.completions"]


def test_a_model_that_kserve_would_copy_is_refused() -> None:
    container = {
        **{"name": "kserve-container", "image": "img", "command": ["serve"]},
        "env": [{"name": "STORAGE_URI", "value": "s3://b/model"}],
    }
    service = {
        **{"apiVersion": "serving.kserve.io/v1beta1", "kind": "InferenceService"},
        **{"metadata": {"name": "s"}, "spec": {"predictor": {"containers": [container]}}},
    }
    assert any(each.key == "env.STORAGE_URI" for each in find(service).refused)
