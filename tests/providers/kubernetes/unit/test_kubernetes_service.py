"""A service as Kubernetes objects."""

import pytest
import yaml
from tests.own_parts import reads_other_tools

from cavvy.domain.services import ReplicaTarget, TargetKind
from cavvy.domain.values import replace
from cavvy.providers.kubernetes.export import make_export
from cavvy.providers.kubernetes.options import read_options
from cavvy.task_files import parse_file

FILE = """\
name: chat
image: vllm/vllm-openai
resources: {gpu: 'L4:1'}
service: {engine: vllm, model: org/tiny, replicas: {min: 0, max: 3}, drain: 90s, keys: true}
"""


def test_a_service_is_a_deployment_with_a_service_and_a_scaler() -> None:
    (task,) = parse_file(FILE).tasks
    text = make_export(task, None, 1, read_options({}))
    deployment, front, scaler = yaml.safe_load_all(text)
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert (
        deployment["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    )
    assert front["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    assert front["spec"]["ports"][0]["targetPort"] == container["ports"][0]["containerPort"] == 8000
    assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": 8000}
    assert container["startupProbe"]["failureThreshold"] == 120, "20 minutes, every 10 s"
    assert {"name": "PORT", "value": "8000"} in container["env"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert (pod["spec"]["restartPolicy"], pod["spec"]["terminationGracePeriodSeconds"]) == (
        "Always",
        90,
    )
    assert "activeDeadlineSeconds" not in pod["spec"], "Deployments cannot have it"
    assert (scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"]) == (1, 3)
    comments = [line for line in text.splitlines() if line.startswith("# service.")]
    assert len(comments) == 4


@reads_other_tools
@pytest.mark.parametrize(
    ("target", "metric", "value"),
    [
        ("concurrency: 2", "http_requests_in_flight", "2"),
        ("rate: 0.5", "http_requests_per_second", "500m"),
        ("gpu_utilisation: 70%", "DCGM_FI_DEV_GPU_UTIL", "70"),
        ("metric: 'vllm:num_requests_waiting', value: 2.5", "vllm:num_requests_waiting", "2500m"),
        ("queue_wait: 3s", "http_requests_in_flight", "16"),
    ],
)
def test_a_scaler_has_the_target_of_the_service_and_is_read_back(
    target: str, metric: str, value: str
) -> None:
    text = FILE.replace("max: 3}", f"max: 3, target: {{{target}}}}}, concurrency: 16")
    (task,) = parse_file(text).tasks
    written = make_export(task, None, 1, read_options({}))
    *_, scaler = yaml.safe_load_all(written)
    (found,) = scaler["spec"]["metrics"]
    assert found["type"] == "Pods"
    assert found["pods"]["metric"] == {"name": metric}
    assert found["pods"]["target"] == {"type": "AverageValue", "averageValue": value}
    assert f"the pods' metric {metric}" in written
    assert ("pods have no queue" in written) == target.startswith("queue_wait")
    (again,) = parse_file(written).tasks
    assert task.service is not None
    assert again.service is not None
    wanted = task.service.replicas.target
    if wanted.kind is TargetKind.QUEUE_WAIT:
        wanted = ReplicaTarget(kind=TargetKind.CONCURRENCY, value=16)
    assert again.service.replicas.target == wanted


def test_a_fixed_number_of_replicas_needs_no_scaler() -> None:
    (task,) = parse_file("run: x\nimage: a\nservice: {port: 80, replicas: 2}").tasks
    kinds = [
        each["kind"] for each in yaml.safe_load_all(make_export(task, None, 1, read_options({})))
    ]
    assert kinds == ["Deployment", "Service"]


@reads_other_tools
def test_a_probe_that_pods_cannot_have_is_noted() -> None:
    text = "resources: {{ports: 8000}}\nrun: serve\nservice: {{readiness_probe: {{path: /ready, {}}}}}\n"
    for more, expected in (
        ("post_data: {a: 1}", {"tcpSocket": {"port": 8000}}),
        (
            "headers: {A: b}",
            {
                "httpGet": {
                    "path": "/ready",
                    "port": 8000,
                    "httpHeaders": [{"name": "A", "value": "b"}],
                }
            },
        ),
    ):
        (task,) = parse_file(text.format(more)).tasks
        written = make_export(replace(task, image="x"), None, 1, read_options({}))
        deployment = next(iter(yaml.safe_load_all(written)))
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        found = container["readinessProbe"]
        assert {key: found[key] for key in expected} == expected
        assert ("probes of pods cannot be POST" in written) is ("tcpSocket" in expected)
