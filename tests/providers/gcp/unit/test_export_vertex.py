"""`cavvy export vertex` writes a specification that Google's discovery document allows, and a
program that runs the task in the container as Cavvy does.
"""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests.exports.google_schema import check_value
from tests.exports.tasks import FULL, export

from cavvy.domain.tasks import ResourceSpec
from cavvy.providers.formats.program import escape_references
from cavvy.providers.formats.services.vertex import (
    find_accelerator,
    is_custom_job_type,
)
from cavvy.store.snapshot import CatalogSnapshot

MINIMAL = "run: echo hello $NODE_RANK\nresources: {cpu: 2}"
GANG = FULL.replace("s3://", "gs://")


def read_job(text: str, folder: Path) -> dict[str, Any]:
    done = export("vertex", text, folder)
    assert done.exit_code == 0, done.output
    job: dict[str, Any] = yaml.safe_load(done.output)
    check_value("CustomJobSpec", job)
    return job


def expand(text: str, values: dict[str, str]) -> str:
    """Text as a container gets it: references to variables are replaced."""
    return re.sub(
        r"\$(\$|\((\w+)\))",
        lambda found: "$" if found[1] == "$" else values.get(found[2], found[0]),
        text,
    )


def run_container(
    pool: dict[str, Any], root: Path, given: dict[str, str]
) -> "subprocess.CompletedProcess[str]":
    """Run the container's command, with folders in `root` instead of /gcs and /tmp/work."""
    container = pool["containerSpec"]
    environment = {**os.environ, **given}
    for each in container["env"]:
        value = expand(each["value"], environment)
        for folder in ("/gcs", "/tmp/work"):
            value = value.replace(folder, f"{root}{folder}")
        environment[each["name"]] = value
    command = [expand(part, environment) for part in container["command"]]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_a_task_with_one_node_has_one_worker_pool(tmp_path: Path) -> None:
    job = read_job(MINIMAL, tmp_path)
    (pool,) = job["workerPoolSpecs"]
    assert pool["machineSpec"] == {"machineType": "e2-highmem-2"}
    assert job["scheduling"] == {"strategy": "STANDARD"}
    done = run_container(pool, tmp_path, {})
    assert (done.returncode, done.stdout) == (0, "hello 0\n")


def test_a_gang_has_a_pool_for_the_first_node(tmp_path: Path) -> None:
    job = read_job(GANG.replace("nodes: 2", "nodes: 3"), tmp_path)
    first, others = job["workerPoolSpecs"]
    assert (first["replicaCount"], others["replicaCount"]) == (1, 2)
    assert first["machineSpec"] == {
        "machineType": "a2-highgpu-8g",
        "acceleratorType": "NVIDIA_TESLA_A100",
        "acceleratorCount": 8,
    }
    assert job["scheduling"] == {
        "strategy": "SPOT",
        "timeout": "7200s",
        "restartJobOnWorkerRestart": True,
    }


@pytest.mark.parametrize(("pool", "index", "rank"), [(0, 0, 0), (1, 0, 1), (1, 1, 2)])
def test_every_node_runs_the_task_with_its_rank(
    pool: int, index: int, rank: int, tmp_path: Path
) -> None:
    job = read_job(GANG.replace("nodes: 2", "nodes: 3"), tmp_path)
    for folder in ("BUCKET/train-1/workdir/model", "data/imagenet"):
        (tmp_path / "gcs" / folder).mkdir(parents=True)
    (tmp_path / "gcs/BUCKET/train-1/workdir/model/weights").write_text("w")
    cluster = {
        "workerpool0": ["job-workerpool0-1d969d3ba6-0:2222"],
        "workerpool1": ["job-workerpool1-1d969d3ba6-0:2222", "job-workerpool1-1d969d3ba6-1:2222"],
    }
    spec = {
        "cluster": cluster,
        "environment": "cloud",
        "task": {"type": f"workerpool{pool}", "index": index},
        "job": '{"python_module":"","package_uris":[],"job_args":[]}',
    }
    done = run_container(job["workerPoolSpecs"][pool], tmp_path, {"CLUSTER_SPEC": json.dumps(spec)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"rank {rank} of 3",
        "at job-workerpool0-1d969d3ba6-0:29500",
        "job-workerpool0-1d969d3ba6-0,job-workerpool1-1d969d3ba6-0,job-workerpool1-1d969d3ba6-1",
        "lr 0.1 0.1",
        "8 GPUs",
        'a\\b "c" $d',
        "hello 'you'",
        "set up",
    ]
    assert (tmp_path / "gcs/models/run/weights").read_text() == "w"
    work = tmp_path / "tmp/work"
    assert (work / "checkpoints").resolve() == tmp_path / "gcs/BUCKET/train-1/checkpoints"
    assert (work / "data").resolve() == tmp_path / "gcs/data/imagenet"


def test_a_job_without_a_limit_states_the_services_own(tmp_path: Path) -> None:
    assert "stops the job after 7 days" in export("vertex", MINIMAL, tmp_path).output


@pytest.mark.parametrize(
    ("target", "file"),
    [("gs://box/runs/metrics.json", "runs/metrics.json"), ("gs://box/runs/", "runs/result.json")],
)
def test_an_output_of_one_file_is_a_file(target: str, file: str, tmp_path: Path) -> None:
    text = f"run: echo 7 > result.json; exit CODE\nresources: {{cpu: 2}}\noutputs: [{{source: result.json, target: '{target}'}}]"
    for code in (3, 0):  # the outputs of failed work are not copied
        (pool,) = read_job(text.replace("CODE", str(code)), tmp_path)["workerPoolSpecs"]
        done = run_container(pool, tmp_path, {})
        assert done.returncode == code, done.stderr
        assert (tmp_path / "gcs/box" / file).exists() == (code == 0)


@given(st.text(alphabet="$()AB x"))
def test_the_container_gets_each_variable_unchanged(text: str) -> None:
    assert expand(escape_references(text), {"A": "wrong", "AB": "wrong"}) == text


def test_every_gpu_of_a_supported_machine_has_a_type() -> None:
    with CatalogSnapshot.open() as snapshot:
        offers = snapshot.match(ResourceSpec(providers=("gcp",)), misses=0).offers
    machines = {
        each.instance_type: (each.accelerator, each.accelerator_memory_mib)
        for each in offers
        if is_custom_job_type(each.instance_type) and each.accelerator
    }
    assert {"a3-megagpu-8g", "g2-standard-4", "n1-standard-4-t4x1"} <= set(machines)
    for machine, (name, memory) in machines.items():
        kind = find_accelerator(machine, name or "", memory)
        check_value("MachineSpec", {"machineType": machine, "acceleratorType": kind})
    assert find_accelerator("a2-ultragpu-1g", *machines["a2-ultragpu-1g"]) == "NVIDIA_A100_80GB"


def test_gpus_are_added_to_machines_of_the_family_n1(tmp_path: Path) -> None:
    (pool,) = read_job("run: x\nresources: {gpu: 'T4:1'}", tmp_path)["workerPoolSpecs"]
    assert pool["machineSpec"] == {
        "machineType": "n1-standard-4",
        "acceleratorType": "NVIDIA_TESLA_T4",
        "acceleratorCount": 1,
    }


def test_what_custom_jobs_do_not_have_is_refused(tmp_path: Path) -> None:
    done = export("vertex", "run: x\nresources: {gpu: 'MI300X:8'}", tmp_path)
    assert done.exit_code == 2
    assert "no instance type of Vertex AI custom training fits" in done.output


@pytest.mark.parametrize("word", ["HF_TOKEN", "BUCKET", "--labels=team=vision", "limits.budget"])
def test_comments_state_what_the_user_must_do(word: str, tmp_path: Path) -> None:
    lines = export("vertex", GANG, tmp_path).output.splitlines()
    assert any(word in line for line in lines if line.startswith("#"))
    assert not any("# inputs" in line for line in lines)
    assert any("# inputs" in line for line in export("vertex", FULL, tmp_path).output.splitlines())
