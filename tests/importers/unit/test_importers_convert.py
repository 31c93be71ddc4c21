"""`cavvy convert` writes files of other tools as task files that mean the same."""

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from cavvy.cli.main import cli
from cavvy.spec.writing import list_differences
from cavvy.task_files import ReadOptions, parse_file, parse_tasks

FILES = yaml.safe_load((Path(__file__).parents[2] / "unit" / "peer_files.yaml").read_text())
# a folder beside the file is submitted, which a Cavvy file cannot say
UNWRITTEN = {"skypilot-slurm", "skypilot-mount-local", "dstack-files"}
JOB = """\
apiVersion: batch/v1
kind: Job
metadata: {name: pi}
spec:
  backoffLimit: 4
  completions: 3
  completionMode: Indexed
  template:
    spec:
      restartPolicy: Never
      containers:
      - name: pi
        image: perl:5
        command: ["perl", "-wle", "print '${{ x }}'"]
        resources: {limits: {nvidia.com/gpu: 1, memory: 1Gi}}
"""
SCRIPT = """\
#!/bin/bash
#SBATCH -J hello -N 2 --ntasks-per-node=2 -t 90
#SBATCH --gpus-per-node=a100:2 --array=0-7:2%2 --partition=main
srun hostname
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAVVY_HOME", str(tmp_path / "state"))
    return tmp_path


def convert(*words: str) -> Result:
    return CliRunner().invoke(cli, ["convert", *words])


def check_same(text: str, written: str) -> None:
    serves = any(task.service for task in parse_file(text).tasks)
    theirs = parse_tasks(text, options=ReadOptions(serves=serves))
    ours = parse_tasks(written, options=ReadOptions(dialect="cavvy", serves=serves))
    for one, other in zip(theirs, ours, strict=True):
        assert list_differences(one.task, other.task) == []


@pytest.mark.parametrize("name", FILES)
def test_a_written_file_means_the_same(name: str, folder: Path) -> None:
    text = FILES[name]["file"]
    found = parse_file(text, file="task.yaml")
    if found.refused:
        return
    (folder / "task.yaml").write_text(text)
    done = convert("task.yaml")
    if found.local or done.exit_code:
        assert "cannot " in done.stderr + str(done.exception)
        assert name in UNWRITTEN or found.local
        return
    check_same(text, done.stdout)
    (folder / "again.yaml").write_text(done.stdout)
    assert convert("again.yaml").stdout == done.stdout


@pytest.mark.parametrize(("name", "text"), [("job.yaml", JOB), ("job.sbatch", SCRIPT)])
def test_jobs_of_clusters_are_written(name: str, text: str, folder: Path) -> None:
    (folder / name).write_text(text)
    done = convert(name, "--to", "task.yaml")
    assert (done.exit_code, done.stdout) == (0, ""), done.stderr
    written = (folder / "task.yaml").read_text()
    assert written.startswith("# from the ")
    assert convert("task.yaml").stdout == written
    if name == "job.yaml":
        check_same(text, written)
        return
    assert "# --partition: " in written
    keys = yaml.safe_load(written)
    assert (keys["nodes"], keys["array"], keys["parallel"]) == (2, "0-7:2", 2)
    assert keys["resources"]["gpu"].startswith("A100")
    assert keys["resources"]["gpu"].endswith(":2")
    assert (keys["workdir"], keys["limits"]) == (".", {"duration": "90m"})


def test_options_and_scripts_are_written_too(folder: Path) -> None:
    (folder / "train.py").write_text("import torch.distributed\n")
    done = convert("train.py", "--gpu", "H100:8", "--", "--lr", "0.1")
    keys = yaml.safe_load(done.stdout)
    assert keys["resources"] == {"gpu": "H100:8"}
    assert keys["run"].startswith("exec torchrun ")
    assert keys["run"].endswith(" train.py --lr 0.1")
    (folder / "own.yaml").write_text("run: x # mine\n")
    assert convert("own.yaml").stdout == "run: x # mine\n"
    assert yaml.safe_load(convert("own.yaml", "--nodes", "2").stdout)["nodes"] == 2


def test_the_folder_is_named_from_the_written_file(folder: Path) -> None:
    (folder / "job.sbatch").write_text("#!/bin/sh\n#SBATCH -n 1\nhostname\n")
    (folder / "to").mkdir()
    assert convert("job.sbatch", "--to", "to/task.yaml").exit_code == 0
    assert yaml.safe_load((folder / "to" / "task.yaml").read_text())["workdir"] == ".."


def test_a_file_that_was_edited_is_not_replaced_unasked(folder: Path) -> None:
    (folder / "job.sbatch").write_text("#!/bin/sh\n#SBATCH -n 1\nhostname\n")
    for _ in range(2):  # the same text needs no answer
        assert convert("job.sbatch", "--to", "task.yaml").exit_code == 0
    made = (folder / "task.yaml").read_text()
    (folder / "task.yaml").write_text("run: mine\n")
    done = convert("job.sbatch", "--to", "task.yaml")
    assert (done.exit_code, (folder / "task.yaml").read_text()) == (2, "run: mine\n")
    assert convert("job.sbatch", "--to", "task.yaml", "--yes").exit_code == 0
    assert (folder / "task.yaml").read_text() == made


def test_what_a_cavvy_file_cannot_say_is_an_error(folder: Path) -> None:
    (folder / "set").mkdir()
    (folder / "sky.yaml").write_text("file_mounts: {/data: ./set}\nrun: ls /data\n")
    done = convert("sky.yaml")
    assert done.exit_code == 2
    assert "a Cavvy file cannot name ./set" in (done.stderr + str(done.exception))
    (folder / "own.yaml").write_text("params: {lr: 0.1}\nrun: x\n")
    done = convert("own.yaml", "--nodes", "2")
    assert done.exit_code == 2
    assert "cannot say this part of the task: params" in (done.stderr + str(done.exception))


def test_what_only_the_command_line_can_say_is_not_left_out(folder: Path) -> None:
    text = "envs: {B: }\nrun: ls /out\nfile_mounts:\n  /out: {name: $B, mode: MOUNT}\n"
    (folder / "t.yaml").write_text(text)
    result = convert("t.yaml")
    assert result.exit_code == 2
    assert "line 4: `file_mounts./out`" in result.output
    assert "--env NAME=VALUE" in result.output
    assert "s3://b/" in convert("t.yaml", "--env", "B=b").output


def test_what_a_file_of_a_service_cannot_say_is_served_as_it_is(folder: Path) -> None:
    role = {"count": 1, "commands": ["serve"], "image": "i"}
    service = {"type": "service", "name": "s", "port": 80, "replicas": [role, role]}
    (folder / "s.yaml").write_text(yaml.safe_dump(service))
    assert "`cavvy serve s.yaml` runs the file as it is" in convert("s.yaml").output
