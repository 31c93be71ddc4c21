"""Tasks as manifests: what Cavvy's own pods have, names that Kubernetes accepts, no limit that the
task does not set.
"""

import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.waits import PATIENCE_S, wait_until

from cavvy.domain.services import ServiceSpec
from cavvy.domain.tasks import (
    AcceleratorNeed,
    JobLimits,
    ResourceSpec,
    TaskSpec,
    Volume,
    VolumeKind,
)
from cavvy.providers.base import Refused
from cavvy.providers.kubernetes.export import make_export
from cavvy.providers.kubernetes.options import read_options

# names of Services: RFC 1035, section 2.3.1; of pods and hosts: RFC 1123
SERVICE_NAME = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
HOST_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
GPUS = ResourceSpec(accelerators=(AcceleratorNeed(name="A100", count_min=8),))


def export(task: TaskSpec) -> list[Any]:
    return list(yaml.safe_load_all(make_export(task, None, task.nodes, read_options({}))))


@pytest.mark.parametrize("nodes", [1, 2, 11])  # the last has a number of two digits
@pytest.mark.parametrize("served", [False, True])
@pytest.mark.parametrize("name", ["t", "1", "7b-train", "9" * 63, "a" * 63, "a" + "-" * 60 + "b"])
def test_every_name_is_one_that_kubernetes_accepts(name: str, nodes: int, served: bool) -> None:
    task = TaskSpec(name=name, run="true", nodes=nodes, service=ServiceSpec() if served else None)
    if served and nodes > 1:
        with pytest.raises(Refused, match="set nodes: 1"):
            export(task)
        return
    found = export(task)
    for each in found:
        is_service = each["kind"] == "Service"
        assert (SERVICE_NAME if is_service else HOST_NAME).fullmatch(each["metadata"]["name"])
        if each["kind"] == "Pod" and nodes > 1:
            assert HOST_NAME.fullmatch(each["spec"]["hostname"])
            assert each["spec"]["subdomain"] == found[0]["metadata"]["name"]
    names = [(each["kind"], each["metadata"]["name"]) for each in found]
    assert len({*names}) == len(names)
    said = make_export(task, None, nodes, read_options({})).partition("apiVersion")[0]
    assert ("does not accept the name" in said) == all(name != each for _, each in names[:1])


@pytest.mark.parametrize("resources", [ResourceSpec(), GPUS, ResourceSpec(cpus_min=16)])
def test_no_limit_is_written_that_the_task_does_not_set(resources: ResourceSpec) -> None:
    (pod,) = export(TaskSpec(name="t", run="true", resources=resources))
    assert "activeDeadlineSeconds" not in pod["spec"]
    (container,) = pod["spec"]["containers"]
    assert {*container["resources"].get("limits", {})} <= {"nvidia.com/gpu"}
    limited = TaskSpec(name="t", run="true", limits=JobLimits(duration=timedelta(seconds=0.5)))
    assert export(limited)[0]["spec"]["activeDeadlineSeconds"] == 1


def test_a_pod_has_the_nodes_shared_memory_and_only_its_gpus() -> None:
    for task in (TaskSpec(name="t", run="x", nodes=2), TaskSpec(name="t", run="x", resources=GPUS)):
        for pod in [each for each in export(task) if each["kind"] == "Pod"]:
            (container,) = pod["spec"]["containers"]
            assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
            assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pod["spec"]["volumes"]
            hidden = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in container["env"]
            assert hidden == (not task.resources.accelerators)
    own = Volume(kind=VolumeKind.HOST, source="/dev/shm", path="/dev/shm")
    (pod,) = export(TaskSpec(name="t", run="x", volumes=(own,)))
    (mount,) = pod["spec"]["containers"][0]["volumeMounts"]
    assert mount["name"] == pod["spec"]["volumes"][0]["name"] == "volume-0"


def test_a_volume_with_a_size_is_created_and_others_are_named() -> None:
    sized = Volume(kind=VolumeKind.NAMED, source="new", path="/new", size_gib=10)
    there = Volume(kind=VolumeKind.NAMED, source="there", path="/there")
    task = TaskSpec(name="t", run="x", volumes=(sized, there))
    claim, pod = export(task)
    assert (claim["kind"], claim["metadata"]["name"]) == ("PersistentVolumeClaim", "new")
    assert pod["kind"] == "Pod"
    said = make_export(task, None, 1, read_options({})).partition("apiVersion")[0]
    assert "create the PersistentVolumeClaims there first" in said


def test_one_of_several_alternatives_is_requested_and_that_is_said() -> None:
    both = ResourceSpec(any_of=(GPUS, ResourceSpec(cpus_min=4)))
    text = make_export(TaskSpec(name="t", run="x", resources=both), None, 1, read_options({}))
    assert "resources.any_of" in text
    assert "nvidia.com/gpu: '8'" in text


def test_the_end_of_a_pod_reaches_the_work(tmp_path: Path) -> None:
    """The first process of a pod gets only the signals that it handles."""
    run = f"trap 'touch {tmp_path}/told; exit 5' TERM\ntouch {tmp_path}/up\n"
    run += "while :; do sleep 0.05; done"
    (pod,) = export(TaskSpec(name="t", run=run))
    command = [each.replace("$$(", "$(") for each in pod["spec"]["containers"][0]["command"]]
    assert end_pod(command, tmp_path / "up") == 5
    assert (tmp_path / "told").exists()


def end_pod(command: list[str], up: Path) -> int:
    """The exit code of a pod's first process that is asked to end when the file `up` exists."""
    lone = ["unshare", "--user", "--map-root-user", "--pid", "--mount-proc", "--fork"]
    if subprocess.run([*lone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine has no namespaces for processes")
    with subprocess.Popen([*lone, "--kill-child", *command]) as outer:
        wait_until(up.exists)
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        subprocess.run(["kill", "-TERM", *children], check=True)
        return outer.wait(PATIENCE_S)


def test_a_program_in_a_pod_saves_while_its_helpers_serve_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import multiprocessing, os, signal\n"
        "def feed(queue):\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "    while True: queue.put(1)\n"
        "heard, queue = [], multiprocessing.Queue(2)\n"
        "multiprocessing.Process(target=feed, args=(queue,), daemon=True).start()\n"
        "signal.signal(signal.SIGTERM, lambda *_: heard.append(1))\n"
        "open('up', 'w')\n"
        "while not heard: queue.get(timeout=30)\n"
        "for _ in range(1000): queue.get(timeout=30)\n"
        "open('saved', 'w')\n"
    )
    run = f"cd {tmp_path}; {sys.executable} train.py; touch next"
    (pod,) = export(TaskSpec(name="t", run=run))
    command = [each.replace("$$(", "$(") for each in pod["spec"]["containers"][0]["command"]]
    assert end_pod(command, tmp_path / "up") == 0
    assert (tmp_path / "saved").exists()
    assert not (tmp_path / "next").exists()
