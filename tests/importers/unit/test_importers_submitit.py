"""The executor of submitit, over a stand-in of submitit: the task that it makes, and what runs on
the node. By hand, submitit 1.5.4 itself ran functions, arrays, errors, several tasks, a requeue
after its time, and a cancelled job.
"""

import importlib
import os
import shlex
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cavvy.domain.tasks import TaskSpec
from cavvy.sdk.task import Task
from cavvy.task_files import parse_task

MODULE = "cavvy.capabilities.importers.submitit_executor"
NOW = f"{sys.version_info[0]}.{sys.version_info[1]}"


class _Base:
    """What the executor needs of each class of submitit."""

    def __init__(self, folder: object = None, *_: object) -> None:
        self.folder = Path(str(folder))
        self.parameters: dict[str, Any] = {}
        self.max_num_timeout, self.max_pickle_size_gb = 3, 1.0

    def __class_getitem__(cls, _: object) -> type:
        return cls

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        self.parameters.update(kwargs)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    core = types.ModuleType("submitit.core.core")
    for name in ("InfoWatcher", "Job", "PicklingExecutor"):
        setattr(core, name, type(name, (_Base,), {}))
    environment = types.ModuleType("submitit.core.job_environment")
    environment.JobEnvironment = type("JobEnvironment", (), {})  # type: ignore[attr-defined]
    utils = types.ModuleType("submitit.core.utils")
    utils.DelayedSubmission = object  # type: ignore[attr-defined]
    package = types.ModuleType("submitit.core")
    package.core, package.utils = core, utils  # type: ignore[attr-defined]
    for name, module in (
        ("submitit", types.ModuleType("submitit")),
        *(("submitit.core", package), ("submitit.core.core", core)),
        *(("submitit.core.job_environment", environment), ("submitit.core.utils", utils)),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    found = importlib.import_module(MODULE)
    monkeypatch.setattr(found, "version", lambda _: "1.2")
    yield found
    sys.modules.pop(MODULE, None)


def make(plugin: Any, folder: Path, **parameters: object) -> Task:
    executor = plugin.CavvyExecutor(folder)
    executor._internal_update_parameters(**parameters)
    task: Task = executor._make_task("sent")
    return task


def test_parameters_become_keys_of_a_task(plugin: Any, tmp_path: Path) -> None:
    task = make(
        plugin,
        tmp_path,
        tasks_per_node=2,
        cpus_per_task=4,
        mem_gb=16,
        gpus_per_node=8,
        gpu="H100",
        image="a:1",
        packages=("torch",),
        env={"A": "b"},
    )
    read: TaskSpec = parse_task(task.text)
    (need,) = read.resources.accelerators
    assert (need.name, need.count_min, read.resources.cpus_min) == ("H100", 8, 8)
    assert (read.image, read.env, read.retry.exit, read.retry.exit_codes) == (
        "a:1",
        {"A": "b"},
        3,
        (144,),
    )
    assert read.checkpoint is not None
    assert "submitit==1.2 cloudpickle==1.2 torch" in (read.setup or "")
    with pytest.raises(ValueError, match="nodes=1"):
        make(plugin, tmp_path, nodes=2)


def start(task: Task, folder: Path, program: str, **variables: str) -> subprocess.Popen[str]:
    """Start the command of a task as a node does; `program` stands for submitit's own."""
    python = folder / "python3"
    version = variables.pop("has", NOW)
    python.write_text(f'#!/bin/bash\n[ "$1" = -c ] && {{ echo {version}; exit; }}\n{program}\n')
    python.chmod(0o755)
    (folder / "sent").mkdir(exist_ok=True)
    (folder / "sent" / "0.pkl").write_text("pickle")
    (folder / "kept").mkdir(exist_ok=True)
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "CAVVY_JOB_ID": "j1"}
    env |= {"CAVVY_CHECKPOINT_DIR": str(folder / "kept"), **variables}
    words = shlex.split(parse_task(task.text).run)
    return subprocess.Popen(
        words[1:], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_each_task_runs_with_what_submitit_reads(plugin: Any, tmp_path: Path) -> None:
    task = make(plugin, tmp_path, tasks_per_node=2)
    show = (
        'echo "$SUBMITIT_LOCAL_GLOBALID of $SUBMITIT_LOCAL_NTASKS $SUBMITIT_LOCAL_JOB_ID ${@: -1}"'
    )
    run = start(task, tmp_path, f'{show}\nexit "$SUBMITIT_LOCAL_GLOBALID"')
    said, _ = run.communicate()
    assert sorted(said.splitlines()) == [f"{rank} of 2 j1 {tmp_path}/kept" for rank in (0, 1)]
    assert run.returncode == 1
    assert (tmp_path / "kept" / "j1_submitted.pkl").read_text() == "pickle"
    run = start(task, tmp_path, show, has="2.7")
    said, _ = run.communicate()
    assert (run.returncode, "pickled by Python" in said) == (1, True)


def test_a_notice_lets_submitit_save(plugin: Any, tmp_path: Path) -> None:
    task = make(plugin, tmp_path)
    program = "trap 'echo saved; exit 144' USR2\necho ready\nwhile :; do sleep 0.02; done"
    run = start(task, tmp_path, program)
    assert run.stdout is not None
    assert run.stdout.readline() == "ready\n"
    run.send_signal(signal.SIGTERM)
    assert run.stdout.readline() == "saved\n"
    assert run.wait() == 144
    run.stdout.close()


def test_the_pickle_of_a_save_is_not_replaced(plugin: Any, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "j1_submitted.pkl").write_text("saved")
    run = start(make(plugin, tmp_path), tmp_path, "exit 0")
    run.communicate()
    assert (run.returncode, (tmp_path / "kept" / "j1_submitted.pkl").read_text()) == (0, "saved")
