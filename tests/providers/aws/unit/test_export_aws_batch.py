"""`cavvy export aws-batch` writes a script whose requests the service model of AWS Batch accepts,
and a program that runs the task in the container as Cavvy does.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.exports.aws_model import check_request
from tests.exports.calls import run_script
from tests.exports.tasks import FULL, export

MINIMAL = "run: echo hello\nresources: {cpu: 2}"
GPU = "run: x\nresources: {gpu: 'A10G:1'}"


def read_requests(text: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The two requests that the script sends, checked."""
    done = export("aws-batch", text, folder)
    assert done.exit_code == 0, done.output
    (define, definition), (submit, submission) = run_script(done.output, folder)
    assert define[:2] == ["batch", "register-job-definition"]
    assert submit[:2] == ["batch", "submit-job"]
    check_request("batch", "RegisterJobDefinition", definition)
    check_request("batch", "SubmitJob", submission)
    return definition, submission


def find_sizes(container: dict[str, Any]) -> dict[str, str]:
    return {each["type"]: each["value"] for each in container["resourceRequirements"]}


def test_a_task_with_one_node_is_a_container_job(tmp_path: Path) -> None:
    definition, submission = read_requests(MINIMAL, tmp_path)
    assert definition["type"] == "container"
    container = definition["containerProperties"]
    assert find_sizes(container) == {"VCPU": "2", "MEMORY": "4096"}
    assert submission["jobDefinition"] == definition["jobDefinitionName"]
    done = subprocess.run(container["command"], capture_output=True, text=True)
    assert done.stdout == "hello\n"


def test_the_container_leaves_memory_for_the_system(tmp_path: Path) -> None:
    definition, _ = read_requests(GPU, tmp_path)
    sizes = find_sizes(definition["containerProperties"])
    assert sizes == {"VCPU": "4", "MEMORY": "14745", "GPU": "1"}  # a g5.xlarge has 16,384 MiB


def test_a_gang_is_a_multi_node_parallel_job(tmp_path: Path) -> None:
    definition, _ = read_requests(FULL, tmp_path)
    nodes = definition["nodeProperties"]
    assert (nodes["numNodes"], nodes["mainNode"]) == (2, 0)
    (group,) = nodes["nodeRangeProperties"]
    assert group["targetNodes"] == "0:"
    container = group["container"]
    assert find_sizes(container)["GPU"] == "8"
    assert [each["name"] for each in container["secrets"]] == ["HF_TOKEN"]
    values = {each["name"]: each["value"] for each in container["environment"]}
    for rank, main in ((0, {}), (1, {"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.7"})):
        given = {**os.environ, **values, **main, "AWS_BATCH_JOB_NODE_INDEX": str(rank)}
        done = subprocess.run(
            container["command"], env=given, capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert lines[0] == f"rank {rank} of 2"
        assert lines[1].endswith(":29500")
        assert lines[1] == "at 10.0.0.7:29500" or rank == 0
        assert lines[3:] == [
            "lr 0.1 0.1",
            "8 GPUs",
            'a\\b "c" $d',
            "hello 'you'",
            "set up",
        ]


def test_limits_and_retries_are_those_of_the_task(tmp_path: Path) -> None:
    text = f"{MINIMAL}\nlimits: {{duration: 2h}}\nretry: {{preemption: 4, node: 2, exit: 0}}"
    definition, _ = read_requests(text, tmp_path)
    assert definition["timeout"] == {"attemptDurationSeconds": 7200}
    assert definition["retryStrategy"]["attempts"] == 5
    assert definition["retryStrategy"]["evaluateOnExit"] == [
        {"onStatusReason": "Host EC2*", "action": "RETRY"},
        {"onReason": "*", "action": "EXIT"},
    ]
    never = f"{MINIMAL}\nretry: {{preemption: 0, node: 0, exit: 0}}"
    assert read_requests(never, tmp_path)[0]["retryStrategy"] == {"attempts": 1}


def test_folders_of_the_machine_are_mounted(tmp_path: Path) -> None:
    text = f"{MINIMAL}\nvolumes: [/scratch:/data:ro, shared:/shared]"
    definition, _ = read_requests(text, tmp_path)
    container = definition["containerProperties"]
    assert container["volumes"] == [{"name": "folder-0", "host": {"sourcePath": "/scratch"}}]
    assert container["mountPoints"] == [
        {"sourceVolume": "folder-0", "containerPath": "/data", "readOnly": True}
    ]
    assert "does not mount /shared" in export("aws-batch", text, tmp_path).output


def test_accelerators_that_are_no_gpus_are_refused(tmp_path: Path) -> None:
    done = export("aws-batch", "run: x\nresources: {gpu: 'Trainium:16'}", tmp_path)
    assert done.exit_code == 2
    assert "can reserve only NVIDIA's GPUs" in done.output


def test_any_gpu_is_a_gpu_that_containers_can_reserve(tmp_path: Path) -> None:
    lines = export("aws-batch", "run: x\nresources: {gpu: 1}", tmp_path).output.splitlines()
    assert any("have T4, such as g4dn.xlarge" in line for line in lines)


@pytest.mark.parametrize("word", ["QUEUE", "HF_TOKEN", "p4d.24xlarge", "limits.budget", "inputs"])
def test_comments_state_what_the_user_must_do(word: str, tmp_path: Path) -> None:
    lines = export("aws-batch", FULL, tmp_path).output.splitlines()
    assert any(word in line for line in lines if line.startswith("#"))
