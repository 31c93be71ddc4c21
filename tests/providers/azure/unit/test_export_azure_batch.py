"""`cavvy export azure-batch` writes a script whose requests have the fields of Azure's models, and
a program that runs the task in the container as Cavvy does.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.exports.tasks import FULL, export

MINIMAL = "run: echo hello $NODE_RANK\nresources: {cpu: 2}"
SINGLE = FULL.replace("nodes: 2", "nodes: 1")
# The fields that exports use, with their types, as in Azure's models.
NAMED = {"name": str, "value": str}
FIELDS: dict[str, dict[str, Any]] = {
    "pool": {
        "id": str,
        "vmSize": str,
        "virtualMachineConfiguration": {
            "imageReference": {"publisher": str, "offer": str, "sku": str, "version": str},
            "nodeAgentSKUId": str,
            "containerConfiguration": {"type": {"dockerCompatible"}, "containerImageNames": list},
        },
        "enableAutoScale": bool,
        "autoScaleFormula": str,
        "autoScaleEvaluationInterval": str,
        "taskSlotsPerNode": int,
    },
    "job": {"id": str, "priority": int, "poolInfo": {"poolId": str}, "metadata": [NAMED]},
    "task": {
        "id": str,
        "commandLine": str,
        "containerSettings": {"imageName": str, "containerRunOptions": str},
        "userIdentity": {
            "autoUser": {"scope": {"pool", "task"}, "elevationLevel": {"admin", "nonadmin"}}
        },
        "environmentSettings": [NAMED],
        "constraints": {"maxTaskRetryCount": int, "maxWallClockTime": str},
    },
}
# Stands in for the Azure CLI: keeps each call with the content of its file; there is no pool yet.
AZ = f"""#!{sys.executable}
import json, os, sys
words = sys.argv[1:]
given = json.load(open(words[words.index("--json-file") + 1])) if "--json-file" in words else None
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps([words, given]) + "\\n")
sys.exit("show" in words and not os.environ.get("POOL"))
"""


def check_fields(wanted: Any, value: Any, path: str) -> None:
    match wanted:
        case dict():
            for key, part in value.items():
                assert key in wanted, f"{path}.{key}"
                check_fields(wanted[key], part, f"{path}.{key}")
        case [item]:
            for part in value:
                check_fields(item, part, path)
        case set():
            assert value in wanted, path
        case _:
            assert isinstance(value, wanted), path


def run_script(text: str, folder: Path, pool: str = "") -> list[tuple[list[str], Any]]:
    """The calls of the script, with the content of their files."""
    done = export("azure-batch", text, folder)
    assert done.exit_code == 0, done.output
    program = folder / "bin/az"
    program.parent.mkdir(exist_ok=True)
    program.write_text(AZ)
    program.chmod(0o755)
    calls = folder / "calls"
    calls.write_text("")
    paths = {"PATH": f"{program.parent}:{os.environ['PATH']}", "CALLS": str(calls), "POOL": pool}
    ran = subprocess.run(
        ["bash"], input=done.output, env={**os.environ, **paths}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    return [(words, given) for words, given in map(json.loads, calls.read_text().splitlines())]


def read_requests(text: str, folder: Path) -> dict[str, Any]:
    requests = {words[1]: given for words, given in run_script(text, folder) if given is not None}
    for name, given in requests.items():
        check_fields(FIELDS[name], given, name)
    return requests


def run_task(task: dict[str, Any], folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run the task's command line as its container would, in a folder of its own."""
    values = {each["name"]: each["value"] for each in task["environmentSettings"]}
    return subprocess.run(
        task["commandLine"],
        shell=True,
        env={**os.environ, **values},
        cwd=folder,
        capture_output=True,
        text=True,
    )


def test_the_script_makes_the_pool_the_job_and_the_task(tmp_path: Path) -> None:
    calls = run_script(MINIMAL, tmp_path)
    assert [" ".join(words[1:3]) for words, _ in calls] == [
        "pool show",
        "pool create",
        "job create",
        "task create",
        "job set",
    ]
    assert calls[-1][0][-2:] == ["--on-all-tasks-complete", "terminateJob"]
    again = run_script(MINIMAL, tmp_path, pool="exists")
    assert "pool create" not in [" ".join(words[1:3]) for words, _ in again]


def test_a_task_runs_in_a_pool_that_shrinks_to_nothing(tmp_path: Path) -> None:
    requests = read_requests(MINIMAL, tmp_path)
    assert "$TargetDedicatedNodes = min(1, tasks);" in requests["pool"]["autoScaleFormula"]
    assert requests["job"]["poolInfo"]["poolId"] == requests["pool"]["id"]
    assert requests["task"]["containerSettings"]["containerRunOptions"] == "--ipc=host"
    assert requests["task"]["constraints"] == {"maxTaskRetryCount": 0}
    # the program is root in its container
    assert requests["task"]["userIdentity"]["autoUser"] == {
        "scope": "pool",
        "elevationLevel": "admin",
    }
    done = run_task(requests["task"], tmp_path)
    assert (done.returncode, done.stdout) == (0, "hello 0\n")


def test_a_program_arrives_unchanged(tmp_path: Path) -> None:
    requests = read_requests(SINGLE + "retry: {exit: 2}\n", tmp_path)
    task = requests["task"]
    assert requests["pool"]["vmSize"].startswith("Standard_ND96")
    assert "$TargetLowPriorityNodes" in requests["pool"]["autoScaleFormula"]
    assert task["constraints"] == {"maxTaskRetryCount": 2, "maxWallClockTime": "PT7200S"}
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"} in task["environmentSettings"]
    done = run_task(task, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "rank 0 of 1",
        "at 127.0.0.1:29500",
        "127.0.0.1",
        "lr 0.1 0.1",
        "8 GPUs",
        'a\\b "c" $d',
        "hello 'you'",
        "set up",
    ]


def test_a_variable_of_several_lines_is_set_by_the_program(tmp_path: Path) -> None:
    text = 'run: printf %s "$TEXT"; exit 4\nenv: {TEXT: "a\\nb"}\nresources: {cpu: 2}'
    task = read_requests(text, tmp_path)["task"]
    assert "TEXT" not in [each["name"] for each in task["environmentSettings"]]
    done = run_task(task, tmp_path)
    assert (done.returncode, done.stdout) == (4, "a\nb")


def test_several_nodes_are_refused(tmp_path: Path) -> None:
    done = export("azure-batch", FULL, tmp_path)
    assert done.exit_code == 2
    assert "on its first node only" in done.output


def test_comments_state_what_the_user_must_do(tmp_path: Path) -> None:
    lines = export("azure-batch", SINGLE, tmp_path).output.splitlines()
    comments = [line for line in lines if line.startswith("#")]
    for word in ("HF_TOKEN", "az batch account login", "pool delete", "inputs", "limits.budget"):
        assert any(word in line for line in comments), word
