"""`cavvy export azureml` writes a command job with the fields of Azure's own schema, and a program
that runs the task on each node as Cavvy does.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.exports.tasks import FULL, export

MINIMAL = "run: echo hello $NODE_RANK\nresources: {cpu: 2}"
GANG = FULL.replace("s3://", "az://")
# The fields of a command job that exports use, with their types, as in CommandJobSchema.
FIELDS: dict[str, Any] = {
    "$schema": str,
    "type": {"command"},
    "display_name": str,
    "experiment_name": str,
    "code": str,
    "command": str,
    "environment": {"image": str},
    "environment_variables": dict,
    "compute": str,
    "resources": {"instance_count": int, "shm_size": str},
    "distribution": {"type": {"pytorch"}, "process_count_per_instance": int},
    "inputs": dict,
    "outputs": dict,
    "limits": {"timeout": int},
    "tags": dict,
}
MOUNT = {
    "type": {"uri_folder", "uri_file"},
    "path": str,
    "mode": {"ro_mount", "rw_mount", "download"},
}


def check_fields(fields: dict[str, Any], value: dict[str, Any]) -> None:
    for key, part in value.items():
        wanted = fields[key]
        if isinstance(wanted, dict):
            check_fields(wanted, part)
        elif isinstance(wanted, set):
            assert part in wanted, key
        else:
            assert isinstance(part, wanted), key


def read_job(text: str, folder: Path) -> dict[str, Any]:
    done = export("azureml", text, folder)
    assert done.exit_code == 0, done.output
    job: dict[str, Any] = yaml.safe_load(done.output)
    check_fields(FIELDS, job)
    for each in (*job.get("inputs", {}).values(), *job.get("outputs", {}).values()):
        check_fields(MOUNT, each)
    return job


def run_node(job: dict[str, Any], folder: Path, given: dict[str, str]) -> list[str]:
    """Run the command in a copy of the working folder, with the folders that the job mounts."""
    command = job["command"]
    for kind in ("inputs", "outputs"):
        for name in job.get(kind, {}):
            mounted = folder / kind / name
            mounted.mkdir(parents=True, exist_ok=True)
            command = command.replace(f"${{{{{kind}.{name}}}}}", str(mounted))
    work = folder / "work"
    (work / "model").mkdir(parents=True)
    (work / "model/weights").write_text("w")
    environment = {**os.environ, **job["environment_variables"], **given}
    done = subprocess.run(
        ["sh", "-c", command], env=environment, cwd=work, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("text", [MINIMAL, GANG, FULL])
def test_azures_own_schema_accepts_the_job(text: str, tmp_path: Path) -> None:
    reason = "azure-ai-ml is not installed; pip install azure-ai-ml enables this test"
    schema = pytest.importorskip("azure.ai.ml", reason=reason)
    file = tmp_path / "job.yaml"
    file.write_text(export("azureml", text, tmp_path).output)
    assert schema.load_job(file).type == "command"


def test_a_task_is_a_command_job(tmp_path: Path) -> None:
    job = read_job(MINIMAL, tmp_path)
    assert (job["type"], job["compute"]) == ("command", "azureml:CLUSTER")
    assert job["resources"]["instance_count"] == 1
    assert "distribution" not in job
    assert run_node(job, tmp_path, {}) == ["hello 0"]


def test_shared_memory_has_the_size_of_the_machines_memory(tmp_path: Path) -> None:
    named = "run: echo hello\nresources: {instance: Standard_NC4as_T4_v3}"
    assert read_job(named, tmp_path)["resources"]["shm_size"] == f"{28 * 1024}m"
    unknown = "run: echo hello\nresources: {instance: Standard_NC1_unknown}"
    assert "shm_size" not in read_job(unknown, tmp_path)["resources"]


def test_a_gang_runs_one_process_on_each_node(tmp_path: Path) -> None:
    job = read_job(GANG, tmp_path)
    assert job["distribution"] == {"type": "pytorch", "process_count_per_instance": 1}
    assert job["limits"] == {"timeout": 7200}
    assert job["tags"] == {"team": "vision"}
    assert job["inputs"]["input_0"] == {
        "type": "uri_folder",
        "path": "wasbs://data@ACCOUNT.blob.core.windows.net/imagenet/",
        "mode": "ro_mount",
    }
    for rank in range(2):
        given = {"MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "6105", "NODE_RANK": str(rank)}
        folder = tmp_path / str(rank)
        assert run_node(job, folder, given) == [
            f"rank {rank} of 2",
            "at 10.0.0.4:6105",
            "",
            "lr 0.1 0.1",
            "8 GPUs",
            'a\\b "c" $d',
            "hello 'you'",
            "set up",
        ]
        assert (folder / "outputs/output_0/weights").read_text() == "w"
        assert (folder / "work/data").resolve() == folder / "inputs/input_0"
        assert (folder / "work/checkpoints").resolve() == folder / "outputs/checkpoints"


def test_an_input_of_one_object_is_a_file(tmp_path: Path) -> None:
    text = f"{MINIMAL}\ninputs: [{{source: 'az://box/points.csv', target: points.csv}}]"
    assert read_job(text, tmp_path)["inputs"]["input_0"]["type"] == "uri_file"


@pytest.mark.parametrize(
    ("target", "folder", "file"),
    [
        ("az://box/runs/metrics.json", "runs/", "metrics.json"),
        ("az://box/metrics.json", "", "metrics.json"),
        ("az://box/runs/", "runs/", "result.json"),
        ("s3://box/runs/metrics.json", "", "result.json"),
    ],
)
def test_an_output_of_one_file_is_a_file(
    target: str, folder: str, file: str, tmp_path: Path
) -> None:
    text = MINIMAL.replace("echo hello", "echo 7 > result.json; echo hello")
    job = read_job(
        f"{text}\noutputs: [{{source: result.json, target: '{target}'}}]",
        tmp_path,
    )
    if target.startswith("az:"):
        path = f"wasbs://box@ACCOUNT.blob.core.windows.net/{folder}"
        assert job["outputs"]["output_0"]["path"] == path
    run_node(job, tmp_path, {})
    assert (tmp_path / "outputs/output_0" / file).read_text() == "7\n"


def test_comments_state_what_the_user_must_do(tmp_path: Path) -> None:
    lines = export("azureml", FULL, tmp_path).output.splitlines()
    comments = [line for line in lines if line.startswith("#")]
    words = ["HF_TOKEN", "--size Standard_ND96", "--tier low_priority", "--max-instances 2"]
    for word in [*words, "s3://data"]:
        assert any(word in line for line in comments), word


def test_texts_that_azure_would_replace_are_refused(tmp_path: Path) -> None:
    done = export("azureml", "run: echo '$${{ x }}'\nresources: {cpu: 1}", tmp_path)
    assert done.exit_code == 2
    assert "replaces ${{...}}" in done.output
