"""Kubernetes Deployments as services."""

import json
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from cavvy.capabilities.importers.kubernetes.deployment import read_quantity
from cavvy.cli.main import cli
from cavvy.domain.services import ReplicaCount, ReplicaTarget, TargetKind
from cavvy.domain.tasks import TaskSpec, VolumeKind
from cavvy.providers.kubernetes.export import make_export
from cavvy.providers.kubernetes.options import read_options
from cavvy.spec import SpecError
from cavvy.task_files import ReadOptions, Translation, parse_file, parse_task

FILE = """\
apiVersion: apps/v1
kind: Deployment
metadata: {name: chat}
spec:
  replicas: 2
  selector: {matchLabels: {app: chat}}
  template:
    metadata: {labels: {app: chat}}
    spec:
      nodeSelector: {cloud.google.com/gke-accelerator: nvidia-l4, disk: fast}
      terminationGracePeriodSeconds: 45
      containers:
        - name: server
          image: registry.example.com/chat:1
          command: [python, serve.py]
          args: ["--model", "$(MODEL)", "--say", "it's $$(1)"]
          env:
            - {name: MODEL, value: tiny}
            - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: hf, key: token}}}
          ports: [{name: http, containerPort: 8080}]
          resources: {limits: {nvidia.com/gpu: 1, memory: 16Gi}, requests: {cpu: 500m}}
          readinessProbe:
            httpGet: {path: /ready, port: http, httpHeaders: [{name: X-Probe, value: "yes"}]}
            failureThreshold: 5
          startupProbe: {httpGet: {path: /ready, port: http}, failureThreshold: 60}
          volumeMounts: [{name: weights, mountPath: /weights}, {name: shm, mountPath: /dev/shm}]
      volumes:
        - {name: weights, persistentVolumeClaim: {claimName: chat-weights}}
        - {name: shm, emptyDir: {medium: Memory}}
---
apiVersion: v1
kind: Service
metadata: {name: chat}
spec: {selector: {app: chat}, ports: [{port: 80, targetPort: http}]}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: chat-weights}
spec: {storageClassName: fast, resources: {requests: {storage: 50Gi}}}
---
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata: {name: chat}
spec: {scaleTargetRef: {kind: Deployment, name: chat}, minReplicas: 1, maxReplicas: 6, metrics: [{}]}
"""


def read(text: str) -> tuple[Translation, TaskSpec]:
    found = parse_file(text)
    (task,) = found.tasks
    return found, task


@pytest.mark.parametrize(
    ("metrics", "target", "reasons"),
    [
        (
            "[{type: Resource, resource: {name: cpu, target: {averageUtilization: 80}}}]",
            ReplicaTarget(),
            ["cpu: no target"],
        ),
        (
            "[{type: Resource, resource: {name: cpu, target: {averageUtilization: 80}}},"
            " {type: External, external: {metric: {name: app-requests-per-second},"
            " target: {averageValue: 1500m}}}]",
            ReplicaTarget(kind=TargetKind.RATE, value=1.5),
            ["cpu: no target"],
        ),
        (
            "[{type: Pods, pods: {metric: {name: concurrent_requests},"
            " target: {averageValue: 8}}},"
            " {type: Pods, pods: {metric: {name: qps}, target: {averageValue: 1k}}}]",
            ReplicaTarget(kind=TargetKind.CONCURRENCY, value=8),
            ["qps: a service has one target"],
        ),
        (
            "[{type: External, external: {metric:"
            " {name: 'kubernetes.io|container|accelerator|duty_cycle'},"
            " target: {averageValue: 60}}}]",
            ReplicaTarget(kind=TargetKind.GPU_UTILISATION, value=0.6),
            [],
        ),
        *(
            (f"[{metric}]", ReplicaTarget(kind=TargetKind.GPU_UTILISATION, value=0.8), [])
            for metric in (
                "{type: External, external: {metric: {name: gpu_utilization},"
                " target: {type: Value, value: 80}}}",
                "{type: Object, object: {metric: {name: gpu_utilization},"
                " target: {type: Value, value: 800m}, describedObject: {kind: Service}}}",
                "{type: External, external: {metricName: gpu_utilization, targetValue: 80}}",
                "{type: Pods, pods: {metricName: gpu_utilization, targetAverageValue: 80}}",
            )
        ),
        (
            "[{type: Pods, pods: {metric: {name: queue_size}, target: {averageValue: '10'}}}]",
            ReplicaTarget(kind=TargetKind.METRIC, value=10, metric="queue_size"),
            ["/metrics must contain queue_size"],
        ),
        (
            "[{type: External, external: {metric: {name: sqs}, target: {averageValue: 30}}}]",
            ReplicaTarget(),
            ["sqs: no target"],
        ),
        (
            "[{type: Object, object: {metric: {name: rps}, target: {value: 10k}}}]",
            ReplicaTarget(),
            ["rps: no target"],
        ),
    ],
)
def test_the_metrics_of_a_scaler_are_the_target(
    metrics: str, target: ReplicaTarget, reasons: list[str]
) -> None:
    found, task = read(FILE.replace("metrics: [{}]", f"metrics: {metrics}"))
    assert task.service is not None
    assert task.service.replicas == ReplicaCount(least=1, most=6, target=target)
    notes = [each.reason for each in found.kept if each.key.endswith(".metrics")]
    assert len(notes) == len(reasons)
    assert all(part in note for part, note in zip(reasons, notes, strict=True))


def test_a_deployment_is_a_service() -> None:
    found, task = read(FILE)
    assert (found.kind, task.name, task.image) == (
        "Kubernetes",
        "chat",
        "registry.example.com/chat:1",
    )
    assert task.run == """exec python serve.py --model "${MODEL}" --say 'it'"'"'s $(1)'"""
    assert (task.env, task.secrets) == ({"MODEL": "tiny"}, ("HF_TOKEN",))
    needs = task.resources
    assert (needs.cpus_min, needs.memory_min_mib) == (0.5, 16384)
    assert [(each.name, each.count_min) for each in needs.accelerators] == [("L4", 1)]
    (volume,) = task.volumes
    assert (volume.kind, volume.source, volume.path) == (
        VolumeKind.NAMED,
        "chat-weights",
        "/weights",
    )
    assert (volume.size_gib, volume.type) == (50, "fast")
    service = task.service
    assert service is not None
    assert (service.port, service.fixed_port, service.drain) == (8080, True, timedelta(seconds=45))
    assert service.replicas == ReplicaCount(least=1, most=6)
    probe = service.probe
    assert (probe.path, probe.failures, probe.start) == ("/ready", 5, timedelta(minutes=10))
    assert probe.headers == (("X-Probe", "yes"),)
    assert {each.key for each in found.kept} == {
        "HorizontalPodAutoscaler.spec.metrics",
        "env.HF_TOKEN",
        "nodeSelector.disk",
        "volumes.shm",
    }
    assert found.refused == ()
    assert parse_task(FILE, options=ReadOptions(serves=True)) == task


def test_without_a_command_the_images_own_entry_point_starts() -> None:
    found, task = read(FILE.replace("command: [python, serve.py]", ""))
    assert found.refused == ()
    assert task.run.startswith("exec ${{ image.entrypoint }} --model ")
    bare = re.sub(r"args: \[.*\]", "", FILE.replace("command: [python, serve.py]", ""))
    assert read(bare)[1].run == "exec ${{ image.command }}"


def export(task: TaskSpec) -> list[Any]:
    return list(yaml.safe_load_all(make_export(task, None, 1, read_options({}))))


@pytest.mark.parametrize(
    "text",
    [
        "image: vllm/vllm-openai\nresources: {gpu: 1, cpu: 4+, memory: 16GiB+}\n"
        "volumes: [{name: weights, path: /weights}]\nenv: {A: x y}\n"
        "service: {engine: vllm, model: org/tiny, replicas: {min: 1, max: 3}, drain: 90s}",
        "image: a\nrun: |\n  cd /app\n  exec ./serve --port $PORT\n"
        "service: {port: 80, replicas: 2, probe: {path: /, headers: {a: b}, "
        "every: 5s, timeout: 2s, start: 1m}}",
    ],
)
def test_what_is_exported_is_read_back_as_the_same_objects(text: str) -> None:
    (task,) = parse_file(f"name: chat\n{text}").tasks
    exported = make_export(task, None, 1, read_options({}))
    found, back = read(exported)
    assert found.refused == ()
    assert back.run.strip() == task.run.strip()
    assert back.service is not None
    assert not back.service.fixed_port
    assert export(back) == export(task)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("ports: [{name: http, containerPort: 8080}]", "", "no port is named"),
        ("secretKeyRef", "configMapKeyRef", "configMapKeyRef has no equivalent"),
        ("emptyDir: {medium: Memory}", "secret: {secretName: a}", "secret has no equivalent"),
        ("nvidia-l4", "abacus", "abacus is not a GPU of the catalog"),
        ("X-Probe", "Connection", "Cavvy sets the header Connection itself"),
        ("port: http, httpHeaders", "port: 9090, httpHeaders", "only the service's port 8080"),
        ("port: http, httpHeaders", "port: http, scheme: HTTPS, httpHeaders", "without TLS"),
        ("mountPath: /weights}", "mountPath: /weights, subPath: a}", "mount the volume"),
        (
            "key: token}}}",
            "key: token}}}\n            - {name: URL, value: a$(HF_TOKEN)}",
            "known only on the node",
        ),
        ("      containers:", "      initContainers: [{}]\n      containers:", "in `setup`"),
        ("kind: Deployment\nmetadata", "kind: DaemonSet\nmetadata", "has DaemonSet"),
        ("v1\nkind: Service\n", "apps/v1\nkind: Deployment\n", "one Deployment"),
        ("nvidia.com/gpu: 1,", "google.com/tpu: 4,", "cannot request this resource"),
        ("nvidia.com/gpu: 1,", "nvidia.com/mig-1g.10gb: 1,", "cannot request this resource"),
        (
            "          image:",
            "          securityContext: {privileged: true}\n          image:",
            "no p",
        ),
        ("          image:", "          volumeDevices: [{name: a}]\n          image:", "no equiv"),
        ("      containers:", "      hostPID: true\n      containers:", "no equivalent"),
        ("  replicas: 2", "  paused: true", "do not start"),
    ],
)
def test_what_the_service_would_lack_is_refused(old: str, new: str, said: str) -> None:
    assert old in FILE
    text = FILE.replace(old, new)
    if "no port" in said:
        text = text.replace("targetPort: http", "name: http")
        text = text.replace("kind: Service\n", "kind: Ingress\n")
    with pytest.raises(SpecError, match=said):
        parse_task(text, options=ReadOptions(serves=True))


def test_what_the_service_does_differently_is_noted() -> None:
    text = FILE.replace("metadata: {name: chat}", "metadata: {name: chat, namespace: ml}", 1)
    text = text.replace("  replicas: 2", "  replicas: 2\n  strategy: {type: Recreate}")
    text = text.replace("metadata: {labels", "metadata: {annotations: {a: b}, labels")
    text = text.replace("      containers:", "      hostIPC: true\n      containers:")
    text = text.replace(
        "          image:", "          livenessProbe: {}\n          tty: true\n          image:"
    )
    text = text.replace("targetPort: http}]", "targetPort: http}, {port: 81}]")
    found, _ = read(text)
    assert found.refused == ()
    pod = "spec.template.spec"
    assert {each.key for each in found.kept} >= {
        "metadata.namespace",
        "spec.strategy",
        "spec.template.metadata.annotations",
        f"{pod}.hostIPC",
        f"{pod}.containers.tty",
        "Service.spec.ports",
    }
    assert not [each for each in found.kept if "livenessProbe" in each.key], "an empty value"


def test_the_required_affinity_names_products_of_gpus() -> None:
    rule = {"key": "nvidia.com/gpu.product", "operator": "In"}
    rules = [{**rule, "values": ["NVIDIA-H100-80GB-HBM3", "NVIDIA-L4"]}]
    terms = {"nodeSelectorTerms": [{"matchExpressions": rules}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    selector = "nodeSelector: {cloud.google.com/gke-accelerator: nvidia-l4, disk: fast}"
    text = FILE.replace(selector, f"affinity: {json.dumps(affinity)}")
    found, task = read(text)
    assert [(each.name, each.count_min) for each in task.resources.accelerators] == [
        ("H100", 1),
        ("L4", 1),
    ]
    assert found.refused == ()
    unknown = read(text.replace("NVIDIA-L4", "abacus"))[0]
    assert [each.key for each in unknown.refused] == ["affinity"]


def test_a_list_of_kubectl_is_its_objects() -> None:
    objects = list(yaml.safe_load_all(FILE))
    listed = yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": objects})
    assert read(listed)[1] == read(FILE)[1]


def test_times_of_probes_and_disk() -> None:
    text = FILE.replace(
        "failureThreshold: 60}", "failureThreshold: 60, initialDelaySeconds: 90, periodSeconds: 5}"
    )
    times = "periodSeconds: 5\n            timeoutSeconds: 20"
    text = text.replace("failureThreshold: 5", times)
    text = text.replace("cpu: 500m}", "cpu: 500m, ephemeral-storage: 200Gi}")
    _, task = read(text)
    assert task.resources.disk_gib == 200
    assert task.service is not None
    probe = task.service.probe
    assert probe.start == timedelta(seconds=90 + 60 * 5)
    assert (probe.every, probe.timeout) == (timedelta(seconds=20), timedelta(seconds=20))


def test_quantities() -> None:
    amounts = ["250m", "2", "1k", "1Gi", "0.5", "3M", "1Pi", "2E", "1e3"]
    wanted = [0.25, 2, 1000, 1 << 30, 0.5, 3e6, 1 << 50, 2e18, 1000]
    assert [read_quantity(each) for each in amounts] == wanted


@pytest.mark.parametrize(
    ("command", "run"),
    [
        # Kubernetes leaves references to other names, which the shell then runs
        (["sh", "-c", "./serve $(hostname) $(date +%s)"], "./serve $(hostname) $(date +%s)"),
        (["sh", "-c", "./serve $(MODEL) $$(MODEL) $$$$"], './serve "${MODEL}" $(MODEL) $$'),
        (
            ["./serve", "$(hostname)", "$(MODEL)-$$(MODEL)"],
            "exec ./serve '$(hostname)' \"${MODEL}\"'-$(MODEL)'",
        ),
        (["./serve", "$$HOME", "$(MODEL"], "exec ./serve '$HOME' '$(MODEL'"),
    ],
)
def test_references_mean_what_they_mean_in_kubernetes(command: list[str], run: str) -> None:
    text = FILE.replace("[python, serve.py]", json.dumps(command))
    text = text.replace("""          args: ["--model", "$(MODEL)", "--say", "it's $$(1)"]\n""", "")
    assert read(text)[1].run == run


def test_a_program_runs_in_its_folder_with_its_variables() -> None:
    text = FILE.replace("command: [", "workingDir: /my app\n          command: [")
    text = text.replace(
        "value: tiny}",
        "value: tiny}\n            - {name: PATHS, value: /m/$(MODEL):$(X):$$(MODEL)}",
    )
    _, task = read(text)
    assert task.run.startswith("cd '/my app'\nexec python serve.py")
    assert task.env == {"MODEL": "tiny", "PATHS": "/m/tiny:$(X):$(MODEL)"}


@pytest.mark.parametrize("old", ["containers:\n", "replicas: 2", "50Gi", "maxReplicas: 6"])
def test_a_wrong_form_is_told(old: str) -> None:
    wrong = {"containers:\n": "containers: {}\n      x:\n", "replicas: 2": "replicas: [2]"}
    text = FILE.replace(old, wrong.get(old, "maxReplicas: many" if "max" in old else "lots"))
    if old == "replicas: 2":
        text = text.replace("kind: HorizontalPodAutoscaler", "kind: Role")
    with pytest.raises(SpecError):
        parse_task(text, options=ReadOptions(serves=True))


@pytest.mark.parametrize(
    ("old", "new", "code", "said"),
    [
        ("      containers:", "      hostPID: true\n      containers:", 1, "serve` would refuse"),
        ("", "", 0, "`cavvy serve` starts this service"),
        ("command: [python, serve.py]", "command: 7", 2, "`command` is no list"),
    ],
)
def test_validate_says_whether_serve_accepts_a_file(
    tmp_path: Path, old: str, new: str, code: int, said: str
) -> None:
    path = tmp_path / "web.yaml"
    path.write_text(FILE.replace(old, new) if old else FILE)
    shown = CliRunner().invoke(cli, ["validate", str(path)])
    assert (shown.exit_code, said in shown.output) == (code, True), shown.output
    assert "object" not in shown.stderr, "no text of Python's"
    assert ("`cavvy serve` starts" in shown.output) == (code == 0)
