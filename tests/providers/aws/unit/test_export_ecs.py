"""`cavvy export ecs` writes a script whose requests the service model of ECS accepts, and refuses
what ECS cannot run.
"""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.exports.aws_model import check_request
from tests.exports.calls import run_script
from tests.exports.tasks import FULL, export

from cavvy.providers.formats.services.ecs import round_size

MINIMAL = "run: echo hello $NODE_RANK\nresources: {cpu: 2}"
GPU = "run: x\nresources: {gpu: 'A10G:1', memory: '8GB'}"


def read_requests(text: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The two requests that the script sends, checked."""
    done = export("ecs", text, folder)
    assert done.exit_code == 0, done.output
    (define, definition), (start, run) = run_script(done.output, folder)
    assert define[:2] == ["ecs", "register-task-definition"]
    assert start[:2] == ["ecs", "run-task"]
    check_request("ecs", "RegisterTaskDefinition", definition)
    check_request("ecs", "RunTask", run)
    return definition, run


def test_a_task_without_a_gpu_runs_on_fargate(tmp_path: Path) -> None:
    definition, run = read_requests(MINIMAL, tmp_path)
    assert (definition["cpu"], definition["memory"]) == ("2048", "4096")
    assert definition["networkMode"] == "awsvpc"
    assert run["launchType"] == "FARGATE"
    assert run["networkConfiguration"]["awsvpcConfiguration"]["subnets"] == ["SUBNET"]
    done = subprocess.run(
        definition["containerDefinitions"][0]["command"], capture_output=True, text=True
    )
    assert done.stdout == "hello 0\n"


def test_a_task_with_a_gpu_runs_on_machines_of_the_cluster(tmp_path: Path) -> None:
    definition, run = read_requests(GPU, tmp_path)
    assert run == {
        "cluster": "CLUSTER",
        "taskDefinition": "task",
        "count": 1,
        "launchType": "EC2",
    }
    (container,) = definition["containerDefinitions"]
    assert container["resourceRequirements"] == [{"type": "GPU", "value": "1"}]
    assert container["memory"] == 8192
    (constraint,) = definition["placementConstraints"]
    assert constraint["expression"].startswith("attribute:ecs.instance-type in [g5.")
    assert "g5.xlarge" in constraint["expression"]
    assert "g4dn" not in constraint["expression"]


def test_a_gpu_on_fargate_is_refused(tmp_path: Path) -> None:
    text = GPU.replace("memory", "options: {ecs: {launch_type: FARGATE}}, memory")
    done = export("ecs", text, tmp_path)
    assert done.exit_code == 2
    assert "Fargate has no GPUs (https://docs.aws.amazon.com/" in done.output


def test_several_nodes_are_refused(tmp_path: Path) -> None:
    done = export("ecs", FULL, tmp_path)
    assert done.exit_code == 2
    assert "use `cavvy export aws-batch TASK.YAML`" in done.output


def test_spot_on_fargate_uses_its_capacity_provider(tmp_path: Path) -> None:
    text = MINIMAL.replace("cpu: 2", "cpu: 2, spot: only, disk: 50GB")
    definition, run = read_requests(text, tmp_path)
    assert run["capacityProviderStrategy"] == [{"capacityProvider": "FARGATE_SPOT", "weight": 1}]
    assert "launchType" not in run
    assert definition["ephemeralStorage"]["sizeInGiB"] in range(46, 51)


def test_machines_mount_their_folders_and_fargate_does_not(tmp_path: Path) -> None:
    text = f"{MINIMAL}\nvolumes: [/scratch:/data]\nsecrets: [TOKEN]\ntags: {{team: a}}"
    assert "does not mount /data" in export("ecs", text, tmp_path).output
    on_machines = text.replace("cpu: 2", "cpu: 2, options: {ecs: {launch_type: EC2}}")
    definition, _ = read_requests(on_machines, tmp_path)
    assert definition["volumes"] == [{"name": "folder-0", "host": {"sourcePath": "/scratch"}}]
    (container,) = definition["containerDefinitions"]
    assert container["mountPoints"][0]["containerPath"] == "/data"
    assert container["secrets"][0]["name"] == "TOKEN"
    assert definition["tags"] == [{"key": "team", "value": "a"}]


@pytest.mark.parametrize(
    ("cpus", "memory_mib", "size"),
    [
        (1, 2048, (1, 2048)),
        (1, 2049, (1, 3072)),
        (1, 9000, (2, 9216)),
        (3, 1024, (4, 8192)),
        (8, 17000, (8, 20480)),
        (16, 122880, (16, 122880)),
        (17, 1024, None),
        (1, 122881, None),
    ],
)
def test_sizes_of_fargate(cpus: int, memory_mib: int, size: tuple[int, int] | None) -> None:
    assert round_size(cpus, memory_mib) == size


def test_what_fargate_does_not_have_is_refused(tmp_path: Path) -> None:
    done = export("ecs", "run: x\nresources: {cpu: 32}", tmp_path)
    assert done.exit_code == 2
    assert "at most 16 vCPUs" in done.output
    wrong = MINIMAL.replace("cpu: 2", "cpu: 2, options: {ecs: {launch_type: LAMBDA}}")
    assert "expected EC2 or FARGATE" in export("ecs", wrong, tmp_path).output
