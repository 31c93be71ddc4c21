"""Services of SkyPilot and dstack: each file means what it means to its tool.

The files are written after the tools' documentation: docs.skypilot.co/en/latest/serving (service
YAML, autoscaling, spot policy) and dstack.ai/docs/concepts/services.
"""

from datetime import timedelta
from typing import Any

import pytest

from cavvy.capabilities.importers.reader import READER
from cavvy.domain.services import RateScope, RequestRate, ServiceSpec, TargetKind
from cavvy.domain.tasks import ReplicaGroup, ResourceSpec
from cavvy.domain.values import asdict
from cavvy.spec import SpecError
from cavvy.task_files import ReadOptions, parse_file, parse_task

SKY = {
    "fixed_port": True,
    "concurrency": 1000,
    "replicas.least": 1,
    "probe.every": 15,
    "probe.timeout": 15,
    "probe.failures": 12,
    "timeouts.response": 120,
}
DSTACK = {
    "fixed_port": True,
    "concurrency": 1000,
    "replicas.least": 1,
    "probe.every": 15,
    "probe.timeout": 10,
    "keys": True,
}
NO_PROBE = {"probe.every": 10, "probe.timeout": 5, "probe.any_status": True}
LISTS = {**NO_PROBE, "probe.any_status": False, "probe.path": "/v1/models"}
ADDRESS = RateScope.ADDRESS
RATE = {"replicas.target.kind": TargetKind.RATE}


def flatten(value: object, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        found: dict[str, Any] = {}
        for key, each in value.items():
            found |= flatten(each, f"{path}.{key}" if path else key)
        return found
    return {path: value.total_seconds() if isinstance(value, timedelta) else value}


def check(text: str, kind: str, usual: dict[str, Any], expected: dict[str, Any]) -> None:
    found = parse_file(text)
    assert found.refused == (), [str(each) for each in found.refused]
    assert (found.kind, found.what) == (kind, "service")
    assert found.task is not None
    assert found.task.service is not None
    default = flatten(asdict(ServiceSpec(port=0)))
    assert flatten(asdict(found.task.service)) == {**default, **usual, **expected}


def sky(service: str, rest: str = "") -> str:
    return f"resources: {{ports: 8080, cpus: 2}}\nrun: serve --port 8080\nservice:{service}\n{rest}"


def dstack(rest: str) -> str:
    return f"type: service\nname: llm\ncommands: [serve]\n{rest}"


SKYPILOT_FILES: list[tuple[str, dict[str, Any]]] = [
    (sky(" {readiness_probe: /}"), {"port": 8080}),
    (
        sky(" {readiness_probe: /v1/models, replicas: 2}"),
        {"port": 8080, "probe.path": "/v1/models", "replicas.least": 2, "replicas.most": 2},
    ),
    (
        "envs: {MODEL: a/b, HF_TOKEN: }\nresources:\n  accelerators: {L4: 1, A10G: 1}\n"
        "  ports: 8081\nsetup: pip install vllm\nrun: vllm serve $MODEL --port 8081\nservice:\n"
        "  readiness_probe:\n    path: /health\n    initial_delay_seconds: 1800\n"
        "  replicas: 3\n",
        {
            "port": 8081,
            "probe.path": "/health",
            "probe.start": 1800,
            "replicas.least": 3,
            "replicas.most": 3,
        },
    ),
    (
        sky(
            "\n  readiness_probe: {path: /health, timeout_seconds: 30}\n  replica_policy:\n"
            "    min_replicas: 1\n    max_replicas: 3\n    target_qps_per_replica: 2.5"
        ),
        {
            "port": 8080,
            "probe.path": "/health",
            "probe.every": 30,
            "probe.timeout": 30,
            "probe.failures": 6,
            "replicas.most": 3,
            "replicas.idle": 1200,
            "replicas.target.value": 2.5,
            **RATE,
        },
    ),
    (
        sky(
            "\n  readiness_probe: /\n  replica_policy: {min_replicas: 0, max_replicas: 2, "
            "target_qps_per_replica: 1, upscale_delay_seconds: 60, downscale_delay_seconds: 240}"
        ),
        {
            "port": 8080,
            "replicas.least": 0,
            "replicas.most": 2,
            "replicas.idle": 240,
            "replicas.target.value": 1,
            **RATE,
        },
    ),
    (
        "resources: {ports: [9000], use_spot: true}\nrun: serve\nservice:\n  readiness_probe: /\n"
        "  replica_policy: {min_replicas: 2, max_replicas: 4, target_qps_per_replica: 5, "
        "dynamic_ondemand_fallback: true, base_ondemand_fallback_replicas: 1, "
        "spot_placer: dynamic_fallback, num_overprovision: 1}\n",
        {
            "port": 9000,
            "replicas.least": 2,
            "replicas.most": 4,
            "replicas.idle": 1200,
            "replicas.target.value": 5,
            **RATE,
        },
    ),
    (
        sky(
            "\n  readiness_probe: /\n  ports: 3000\n  load_balancing_policy: round_robin\n"
            "  load_balancer: {stream_timeout_seconds: 600}"
        ),
        {"port": 3000, "timeouts.response": 600},
    ),
    (
        sky("\n  readiness_probe: /\n  tls: {keyfile: key.pem, certfile: cert.pem}\n  replicas: 1"),
        {"port": 8080},
    ),
    (
        sky(
            "\n  readiness_probe: {path: /, endpoint_probe_interval_seconds: 5, "
            "consecutive_failure_threshold_timeout: 60}"
        ),
        {"port": 8080, "probe.failures": 4},
    ),
    (
        sky(
            "\n  readiness_probe: {path: /v1/completions, post_data: {model: $MODEL, max_tokens: 1}, "
            "headers: {Authorization: Bearer $KEY}}",
            "envs: {MODEL: a/b, KEY: k}",
        ),
        {
            "port": 8080,
            "probe.path": "/v1/completions",
            "probe.headers": (("Authorization", "Bearer k"),),
            "probe.body": '{"model": "a/b", "max_tokens": 1}',
        },
    ),
    (
        sky(""" {readiness_probe: {path: /, post_data: '{"a": 1}'}}"""),
        {
            "port": 8080,
            "probe.body": '{"a": 1}',
        },
    ),
    (
        "name: tgi\nresources: {ports: 8082, image_id: 'docker:ghcr.io/huggingface/tgi:3'}\n"
        "run: text-generation-launcher --model-id m --port 8082\n"
        "service: {readiness_probe: /health, replica_policy: {min_replicas: 2}}\n",
        {
            "port": 8082,
            "probe.path": "/health",
            "replicas.least": 2,
            "replicas.most": 2,
            "replicas.idle": 1200,
        },
    ),
]
PARTS = """
type: service
name: parts
image: lmsysorg/sglang:latest
port: 8000
model: m
replicas:
- count: 1..4
  scaling: {metric: rps, target: 3}
  commands:
  - |
    python -m sglang.launch_server --model-path m \\
      --disaggregation-mode prefill \\
      --disaggregation-bootstrap-port 8999
  resources: {gpu: H200}
- count: 2
  commands: [python -m sglang.launch_server --disaggregation-mode decode]
  resources: {gpu: H100}
"""
DSTACK_FILES: list[tuple[str, dict[str, Any]]] = [
    (dstack("port: 8000\n"), {"port": 8000, **NO_PROBE}),
    (dstack("port: 80:8000\nauth: false\n"), {"port": 8000, "keys": False, **NO_PROBE}),
    (
        dstack("port: 8000\nmodel: meta-llama/Llama-3.1-8B-Instruct\nresources: {gpu: 24GB}\n"),
        {"port": 8000, "models": ("meta-llama/Llama-3.1-8B-Instruct",), **LISTS},
    ),
    (
        dstack(
            "port: 80\nmodel: {type: chat, name: m, format: openai, prefix: /v1}\nhttps: auto\n"
        ),
        {"port": 80, "models": ("m",), **LISTS},
    ),
    (
        dstack(
            "port: 8000\nreplicas: 0..4\nscaling: {metric: rps, target: 10}\ngateway: true\n"
            "probes: [{type: http, url: /health}]\n"
        ),
        {
            "port": 8000,
            "replicas.least": 0,
            "replicas.most": 4,
            "replicas.idle": 600,
            "replicas.target.value": 10,
            "probe.path": "/health",
            **RATE,
        },
    ),
    (
        dstack(
            "port: 8000\nreplicas: 1..2\nscaling: {metric: rps, target: 3, window: 30s, "
            "scale_up_delay: 1m, scale_down_delay: 20m}\n"
        ),
        {
            "port": 8000,
            "replicas.most": 2,
            "replicas.idle": 1200,
            "replicas.target.value": 3,
            **RATE,
            **NO_PROBE,
        },
    ),
    (
        dstack("port: 1\nreplicas: 2\n"),
        {"port": 1, "replicas.least": 2, "replicas.most": 2, **NO_PROBE},
    ),
    (
        dstack(
            "port: 8000\nrate_limits:\n- {prefix: /api/, rps: 0.5, burst: 9}\n"
            "- {key: {type: header, header: X-User}, rps: 10}\n"
        ),
        {
            "port": 8000,
            "rates": (
                asdict(RequestRate(requests=0.5, burst=10, each=ADDRESS, prefix="/api")),
                asdict(RequestRate(requests=10, each=RateScope.HEADER, header="X-User")),
            ),
            **NO_PROBE,
        },
    ),
    (
        dstack(
            "port: 8000\nprobes: [{type: http, method: get, url: /ready, interval: 5s, timeout: 2s, "
            "ready_after: 2}]\n"
        ),
        {"port": 8000, "probe.path": "/ready", "probe.every": 5, "probe.timeout": 2},
    ),
    (
        dstack(
            "port: 8000\nprobes: [{type: http, method: post, url: /v1/completions, headers: "
            """[{name: Content-Type, value: application/json}], body: '{"max_tokens": 1}'}]\n"""
        ),
        {
            "port": 8000,
            "probe.path": "/v1/completions",
            "probe.headers": (("Content-Type", "application/json"),),
            "probe.body": '{"max_tokens": 1}',
        },
    ),
    (
        "type: service\nname: tgi\nimage: ghcr.io/huggingface/tgi:3\nenv: [HF_TOKEN, M=a/b]\n"
        "commands:\n- text-generation-launcher --port 8000\nport: 8000\nmodel: {type: chat, "
        "name: a/b, format: tgi}\nspot_policy: auto\nregions: [eu-west-1]\n",
        {"port": 8000, "models": ("a/b",), **LISTS},
    ),
    (
        dstack("port: {local_port: 80, container_port: 8001}\nhttps: false\n"),
        {"port": 8001, **NO_PROBE},
    ),
]


@pytest.mark.parametrize(("text", "expected"), SKYPILOT_FILES)
def test_a_skypilot_service_means_the_same(text: str, expected: dict[str, Any]) -> None:
    check(text, "SkyPilot", SKY, expected)


@pytest.mark.parametrize(("text", "expected"), DSTACK_FILES)
def test_a_dstack_service_means_the_same(text: str, expected: dict[str, Any]) -> None:
    check(text, "dstack", DSTACK, expected)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (
            sky(" {readiness_probe: {path: /, headers: {A: Bearer $KEY}}}"),
            "service.readiness_probe.headers",
        ),
        (
            sky(" {readiness_probe: {path: /, headers: {A B: c}}}"),
            "service.readiness_probe.headers",
        ),
        (
            sky(
                " {readiness_probe: /, load_balancing_policy: instance_aware_least_load, "
                "replica_policy: {min_replicas: 1, max_replicas: 2, "
                "target_qps_per_replica: {L4: 1}}}"
            ),
            "service.replica_policy.target_qps_per_replica",
        ),
        (
            sky(
                " {readiness_probe: /, replica_policy: {min_replicas: 0, max_replicas: 2, "
                "target_qps_per_replica: 0}}"
            ),
            "service.replica_policy.target_qps_per_replica",
        ),
        ("run: x\nservice: {readiness_probe: /}\nnum_nodes: 1\n", "service"),
        (dstack("port: 1\nprobes: [{type: http, method: put}]\n"), "probes.method"),
        (dstack("port: 1\nprobes: [{type: http, body: x}]\n"), "probes.body"),
        (
            dstack("port: 1\nprobes: [{type: http, method: post, body: '${{ env.A }}'}]\n"),
            "probes.body",
        ),
        (
            dstack('port: 1\nprobes: [{type: http, headers: [{name: A, value: "b\\nc"}]}]\n'),
            "probes.headers",
        ),
        (dstack("port: 1\nrate_limits: [{rps: 1, prefix: '/a*'}]\n"), "rate_limits.prefix"),
        (
            dstack(
                f"port: 1\nrate_limits: [{{rps: 1, key: {{type: header, header: {'x' * 101}}}}}]\n"
            ),
            "rate_limits.key.header",
        ),
        (PARTS, "replicas"),
        (PARTS.replace("replicas:", "groups:"), "groups"),
    ],
)
def test_what_a_service_cannot_have_is_refused_by_name(text: str, key: str) -> None:
    assert key in [each.key for each in parse_file(text).refused]


def test_groups_of_dstack_are_groups_with_roles() -> None:
    own = "- {name: way, count: 1, commands: [smg], resources: {cpu: 4}, router: {type: sglang}}\n"
    (task,) = parse_file(PARTS + own).tasks
    prefill, decode, router = task.replica_groups
    assert [each.name for each in task.replica_groups] == ["0", "1", "way"]
    assert [each.role for each in task.replica_groups] == ["prefill", "decode", "router"]
    assert (prefill.replicas.least, prefill.replicas.most) == (1, 4)
    assert prefill.replicas.target.value == 3
    assert prefill.bootstrap_port == 8999
    assert [each.accelerators[0].name for each in map(stated, (prefill, decode))] == [
        "H200",
        "H100",
    ]
    assert router.run == "smg"
    assert not stated(router).accelerators
    assert task.service
    assert task.service.replicas.least == 4
    assert task.service.fixed_port


def test_the_router_of_older_files_is_a_group() -> None:
    (task,) = parse_file(PARTS + "router: {type: sglang, pd_disaggregation: true}\n").tasks
    router = task.replica_groups[-1]
    assert router.role == "router"
    assert "launch_router" in (router.run or "")
    assert (router.run or "").endswith("--pd-disaggregation")


def test_groups_without_roles_are_workers() -> None:
    groups = "[{replicas: 1, commands: [x]}, {name: big, replicas: 2, commands: [y]}]"
    translation = parse_file(f"type: service\nport: 1\npython: 3.12\ngroups: {groups}\n")
    (task,) = translation.tasks
    assert not translation.refused
    assert [(each.name, each.role) for each in task.replica_groups] == [
        ("0", "worker"),
        ("big", "worker"),
    ]
    ready = READER.make_ready(task, translation)
    for group, command in zip(ready.replica_groups, ("x", "y"), strict=True):
        assert "DSTACK_" in (group.run or "")
        assert "venv" in (group.run or "")
        assert (group.run or "").endswith(command)


def stated(group: ReplicaGroup) -> ResourceSpec:
    assert group.resources is not None
    return group.resources


@pytest.mark.parametrize("text", [SKYPILOT_FILES[0][0], DSTACK_FILES[0][0]])
def test_run_points_to_serve(text: str) -> None:
    with pytest.raises(SpecError, match="describes a service, not a job"):
        parse_task(text)
    task = parse_task(text, options=ReadOptions(serves=True))
    assert task.service is not None


@pytest.mark.parametrize(
    ("env", "overrides"),
    [("[K=secret]", ""), ("{K: secret}", ""), ("[K]", "env: {K: secret}"), ("[K]", "")],
)
def test_probes_may_contain_variables(env: str, overrides: str) -> None:
    probe = "{type: http, headers: [{name: X-Key, value: 'is ${{ env.K }}'}]}"
    text = dstack(f"port: 1\nenv: {env}\nprobes: [{probe}]\n")
    found = parse_file(text, options=ReadOptions(overrides=overrides))
    known = "secret" in env + overrides
    assert [each.key for each in found.refused] == ([] if known else ["probes.headers"])
    assert found.task is not None
    assert found.task.service is not None
    if known:
        assert found.task.service.probe.headers == (("X-Key", "is secret"),)


def test_a_service_may_get_whole_paths() -> None:
    found = parse_file(dstack("port: 1\nstrip_prefix: false\nretry: true\n"))
    assert found.refused == ()
    assert [each.key for each in found.kept] == ["strip_prefix"]
    assert found.task is not None
    assert found.task.service is not None
    assert found.task.service.strip_prefix is False


def test_the_port_of_a_service_needs_no_note() -> None:
    for text, noted in (
        (sky(" {readiness_probe: /}"), False),
        (sky(" {readiness_probe: /, ports: 8080}"), False),
        (sky(" {readiness_probe: /, ports: 3000}"), True),
    ):
        assert ("resources.ports" in [each.key for each in parse_file(text).kept]) is noted


def test_notes_say_what_replaces_a_key() -> None:
    kept = {each.key: each.reason for each in parse_file(SKYPILOT_FILES[5][0]).kept}
    assert "chooses between spot and on-demand" in kept["service.replica_policy.spot_placer"]
    assert (
        "setting of the server"
        in {each.key: each.reason for each in parse_file(DSTACK_FILES[-1][0]).kept}["https"]
    )
