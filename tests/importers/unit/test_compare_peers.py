"""The comparison with other tools notices a change of every field."""

from typing import Any

import pytest
from scripts.importers.compare import list_differences, try_mutations

from cavvy.task_files import ReadOptions, Translation, parse_file

WANT: dict[str, Any] = {
    "cloud": "aws",
    "region": "us-east-1",
    "zone": "",
    "instance": None,
    "accelerators": {"A100-80GB": 8},
    "cpus": "8+",
    "memory": "64",
    "spot": True,
    "disk": 512,
    "tier": "high",
    "price": 20.0,
    "image": {"": "docker:a/b:1"},
    "docker": None,
    "pod": None,
    "containers": None,
    "tpu": {},
    "labels": {"team": "x"},
    "priority": 5,
    "recovery": {"strategy": "FAILOVER", "max_restarts_on_errors": 3},
}
SKYPILOT = """\
name: Train_It
workdir: src
num_nodes: 2
envs: {A: b, C: }
secrets: {D: null}
volumes: {/v: claim}
file_mounts:
  /in: s3://b/in
  /out: {name: mine, store: gcs, mode: MOUNT}
  /cached: {name: other, mode: MOUNT_CACHED}
  /here: ../x
  conf/y: ~/y
resources:
  accelerators: A100-80GB:8
  cpus: 8+
  memory: 64
  disk_size: 512
  disk_tier: high
  max_hourly_cost: 20
  image_id: docker:a/b:1
  labels: {team: x}
  priority: 5
  job_recovery: {strategy: FAILOVER, max_restarts_on_errors: 3}
  ordered: [{infra: aws/us-east-1, use_spot: true}, {infra: gcp/us-west1, use_spot: true}]
setup: pip install .
run: python train.py
"""
SKYPILOT_FACTS: dict[str, Any] = {
    "name": "Train_It",
    "run": "python train.py",
    "setup": "pip install .",
    "env": {"A": "b"},
    "secrets": ["C", "D"],
    "nodes": 2,
    "workdir": "src",
    "files": {
        "/in": "s3://b/in",
        "/out": {"name": "mine", "store": "GCS", "mode": "MOUNT"},
        "/cached": {"name": "other", "mode": "MOUNT_CACHED"},
        "/here": "../x",
        "conf/y": "~/y",
    },
    "volumes": {"/v": "claim"},
    "ordered": True,
    "resources": [WANT, {**WANT, "cloud": "gcp", "region": "us-west1"}],
}
MACHINE = """\
num_nodes: 1
workdir: {url: https://example.org/a.git, ref: 0123456789abcdef}
resources: {infra: aws, instance_type: p5.48xlarge, image_id: {eu-west-1: ami-1, us-west-2: ami-2}}
config: {kubernetes: {pod_config: {spec: {hostIPC: true}}}}
run: x
"""
PLAIN: dict[str, Any] = {
    **WANT,
    **{"accelerators": {}, "cpus": None, "memory": None, "spot": False, "disk": 256, "region": ""},
    **{"tier": None, "price": None, "labels": {}, "priority": 0, "recovery": {}},
    "instance": "p5.48xlarge",
    "image": {"eu-west-1": "ami-1", "us-west-2": "ami-2"},
    "pod": {"spec": {"hostIPC": True}},
}
MACHINE_FACTS: dict[str, Any] = {
    **SKYPILOT_FACTS,
    **{"name": None, "run": "x", "setup": None, "env": {}, "secrets": [], "nodes": 1},
    **{"files": {}, "volumes": {}, "ordered": False, "resources": [PLAIN]},
    "workdir": {"url": "https://example.org/a.git", "ref": "0123456789abcdef"},
}
DSTACK = """\
type: task
name: train
nodes: 2
image: a/b:1
registry_auth: {username: u, password: p}
env: [A=b, C, 'E=${{ secrets.e }}']
commands: [one, two, three]
repos: ['src:/app']
files: [../x:/x]
volumes: ['data:/data']
priority: 5
tags: {team: x}
max_price: 3.5
max_duration: 2h
stop_duration: 1m
retry: {on_events: [interruption]}
schedule: {cron: '0 8 * * *'}
utilization_policy: {min_gpu_utilization: 10, time_window: 10m}
spot_policy: spot
backends: [aws, gcp]
regions: [eu]
instance_types: [p5.48xlarge, p4d.24xlarge]
resources: {cpu: 8.., memory: 64GB, disk: 200GB, gpu: A100:80GB:8}
"""
DSTACK_FACTS: dict[str, Any] = {
    "session": False,
    "name": "train",
    "image": "a/b:1",
    "login": True,
    "secrets": ["C"],
    "priority": 5,
    "tags": {"team": "x"},
    "volumes": [["data", "/data", False]],
    "files": [["../x", "/x"]],
    "repos": [["src", None, "/app"]],
    "price": 3.5,
    "instances": ["p5.48xlarge", "p4d.24xlarge"],
    "duration": 7200,
    "grace": 60,
    "retry": ["interruption"],
    "cron": ["0 8 * * *"],
    "idle": 600,
    "commands": ["one", "two", "three"],
    "init": [],
    "entrypoint": None,
    "env": {"A": "b", "E": "${{ secrets.e }}"},
    "nodes": 2,
    "cpus": [8, None],
    "memory": [64.0, 64.0],
    "disk": 200,
    "gpus": {"names": ["A100"], "count": [8, 8], "memory": [80.0, 80.0]},
    "spot": "spot",
    "backends": ["aws", "gcp"],
    "regions": ["eu"],
}
STORES = """\
name: x
resources:
  accelerators: tpu-v6e-8
  accelerator_args: {runtime_version: v2-alpha}
  any_of: [{infra: gcp/*/us-east1-b}, {infra: gcp/us-west1}]
config: {kubernetes: {enable_docker: {mode: BUILD, cache_volume: c}}}
file_mounts: {/a: r2://b, /c: {name: d, store: r2}, /l: {name: e, store: r2, source: ~/set}}
run: y
"""
TPU: dict[str, Any] = {
    **{**PLAIN, "accelerators": {"tpu-v6e-8": 1}, "instance": None, "image": {}, "pod": None},
    **{"cloud": "gcp", "region": "us-east1", "zone": "us-east1-b"},
    **{"tpu": {"runtime_version": "v2-alpha"}},
    **{"containers": {"mode": "BUILD", "cache_volume": "c"}},
}
STORES_FACTS: dict[str, Any] = {
    **{**MACHINE_FACTS, "name": "x", "run": "y", "workdir": None},
    "files": {
        "/a": "r2://b",
        "/c": {"name": "d", "store": "R2", "mode": "MOUNT"},
        "/l": {"name": "e", "store": "R2", "source": "~/set", "mode": "MOUNT"},
    },
    "resources": [TPU, {**TPU, "region": "us-west1", "zone": ""}],
}
CASES = {
    "stores": (STORES, STORES_FACTS, "skypilot"),
    "skypilot": (SKYPILOT, SKYPILOT_FACTS, "skypilot"),
    "machine": (MACHINE, MACHINE_FACTS, "skypilot"),
    "dstack": (DSTACK, DSTACK_FACTS, "dstack"),
}


def read(case: str) -> tuple[str, dict[str, Any], Translation]:
    text, facts, kind = CASES[case]
    return kind, {"tasks": [facts]}, parse_file(text, options=ReadOptions(dialect=kind))


@pytest.mark.parametrize("case", CASES)
def test_an_equal_reading_has_no_differences(case: str) -> None:
    assert list_differences(*read(case)) == []


@pytest.mark.parametrize("case", CASES)
def test_a_change_of_any_field_is_noticed(case: str) -> None:
    kind, their, found = read(case)
    seen = dict(try_mutations(kind, {"tasks": their["tasks"]}, found))
    assert len(seen) > 8
    assert [name for name, noticed in seen.items() if not noticed] == []


def test_the_cases_change_the_fields_that_were_once_missed() -> None:
    changed = {
        name
        for case in CASES
        for kind, their, found in [read(case)]
        for name, _ in try_mutations(kind, their, found)
    }
    assert changed >= {
        *("image", "tags", "priority", "name", "workdir", "inputs", "outputs", "volumes"),
        *("secrets", "retry", "resources.instance", "resources.max_rate", "order"),
        *("gpu.count_max", "gpu.memory_min_mib", "gpu.memory_max_mib", "limits.duration"),
    }
