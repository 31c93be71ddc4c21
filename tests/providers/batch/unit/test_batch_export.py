"""Tasks as job scripts: nothing of the task is lost or run twice, whatever signs it holds."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.waits import wait_until

from cavvy.domain.tasks import (
    AcceleratorNeed,
    CheckpointPolicy,
    NotifyTarget,
    ResourceSpec,
    TaskSpec,
    Transfer,
    Workdir,
)
from cavvy.providers.batch.export import here_document, list_exports, list_notes, make_work
from cavvy.providers.batch.system import JobOptions
from cavvy.providers.kubernetes import export as kubernetes
from cavvy.providers.kubernetes.options import read_options
from cavvy.providers.pbs import script as pbs
from cavvy.providers.slurm import script as slurm


@settings(deadline=None)
@given(st.text(st.characters(exclude_characters="\x00\r", codec="utf-8"), max_size=200))
def test_a_here_document_gives_the_text_back(text: str) -> None:
    whole = text + "\nCAVVY_WORK\n"
    done = subprocess.run(
        ["bash", "-c", f"cat {here_document(whole)}"], capture_output=True, check=True
    )
    assert done.stdout.decode() == whole


@settings(deadline=None)
@given(st.text(st.characters(exclude_characters="\x00", codec="utf-8"), max_size=100))
def test_variables_keep_their_values(value: str) -> None:
    (line, *_) = list_exports(TaskSpec(name="t", run="true", env={"GIVEN": value}), 1)
    done = subprocess.run(
        ["bash", "-c", f'{line}\nprintf %s "$GIVEN"'], capture_output=True, check=True
    )
    assert done.stdout.decode() == value


def test_a_setup_that_fails_ends_the_work(tmp_path: Path) -> None:
    work = make_work(TaskSpec(name="t", setup="false", run="echo ran"))
    done = subprocess.run(["bash", "-c", work], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    work = make_work(TaskSpec(name="t", setup="true", run="false\necho ran"))
    assert subprocess.run(["bash", "-c", work], capture_output=True, text=True).stdout == "ran\n"


def test_what_stays_with_the_user_is_said() -> None:
    notes = " ".join(
        list_notes(
            TaskSpec(
                name="t",
                run="true",
                secrets=("TOKEN",),
                image="box:1",
                workdir=Workdir(path="src"),
                inputs=(Transfer(source="s3://b/data", target="data"),),
                checkpoint=CheckpointPolicy(path="ckpt"),
            )
        )
    )
    for word in ("TOKEN", "box:1", "src", "s3://b/data", "ckpt"):
        assert word in notes


@pytest.mark.parametrize(
    ("nodes", "start"), [(1, 'bash "$folder/work.sh"'), (3, 'pbsdsh -- bash -l "$folder/rank.sh"')]
)
def test_a_script_of_pbs_asks_for_what_the_task_asks(nodes: int, start: str) -> None:
    job_options = JobOptions(account="vision")
    need = ResourceSpec(
        accelerators=(AcceleratorNeed(name="A100", count_min=2),), cpus_min=4, memory_min_mib=2048
    )
    text = pbs.make_export(
        TaskSpec(name="t", run="true", resources=need), None, nodes, job_options, "gpu_type"
    )
    assert f"#PBS -l select={nodes}:ncpus=4:mem=2048mb:ngpus=2\n" in text
    assert "#PBS -A vision\n" in text
    assert f"\n{start}" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_memory_for_each_cpu_is_asked_for_as_a_sum() -> None:
    task = TaskSpec(
        name="t",
        run="true",
        resources=ResourceSpec(cpus_min=8, memory_per_cpu_mib=4096, memory_min_mib=1024),
    )
    job_options = JobOptions()
    assert ":ncpus=8:mem=32768mb\n" in pbs.make_export(task, None, 1, job_options, "")
    assert "#SBATCH --mem=32768M\n" in slurm.make_export(task, None, 1, job_options, "")
    assert "memory: 32768Mi\n" in kubernetes.make_export(task, None, 1, read_options({}))


def test_what_only_cavvy_does_is_said() -> None:
    need = ResourceSpec(any_of=(ResourceSpec(cpus_min=3), ResourceSpec(cpus_min=5)))
    task = TaskSpec(name="t", run="$CAVVY_MPI mpirun x; echo $CAVVY_HOSTS", resources=need)
    text = slurm.make_export(task, None, 1, JobOptions(), "")
    assert "# The commands use CAVVY_MPI, which only Cavvy sets.\n" in text
    assert "one of the task's 2 alternatives" in text
    assert "#SBATCH --cpus-per-task=3\n" in text


@pytest.mark.parametrize("notify", NotifyTarget)
def test_that_only_cavvy_chooses_which_processes_are_notified_is_said(notify: NotifyTarget) -> None:
    task = TaskSpec(name="t", run="x", notify=notify)
    text = slurm.make_export(task, None, 1, JobOptions(), "")
    assert ("# Only Cavvy applies notify." in text) is (notify is not NotifyTarget.HANDLERS)


# The pause lets the shell begin to wait, which it does after it has started the program.
SAVES = "trap 'sleep 0.3; : > saved; exit 7' TERM; sleep 1; : > up; while :; do sleep 0.02; done"


@pytest.mark.parametrize(
    ("run", "code"),
    [
        ("bash ./saves", 7),
        ("bash ./saves; : > next", 7),
        ("bash ./saves & wait $!", 7),
        ("bash ./saves & saves=$!; sleep 600 & wait $saves; : > next", 7),
        ("bash ./saves & wait -n", 7),
        ("bash ./saves & while ! wait $!; do : > next; done", 7),
    ],
)
def test_a_script_that_all_are_told_to_end_waits_for_its_program(
    run: str, code: int, tmp_path: Path
) -> None:
    """PBS sends SIGTERM to each process of a job, and ends the job with its shell."""
    (tmp_path / "saves").write_text(SAVES)
    (tmp_path / "nodes").write_text("localhost\n")
    text = pbs.make_export(TaskSpec(name="t", run=run), None, 1, JobOptions(), "")
    variables = {"PBS_O_WORKDIR": tmp_path, "PBS_JOBID": "1.x", "PBS_NODEFILE": tmp_path / "nodes"}
    job = subprocess.Popen(
        ["bash", "-c", text],
        env={**os.environ, **{name: str(value) for name, value in variables.items()}},
        start_new_session=True,
    )
    try:
        wait_until(lambda: (tmp_path / "up").exists())
        os.killpg(job.pid, signal.SIGTERM)
        assert job.wait(60) == code
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    assert (tmp_path / "saved").exists()
    assert not (tmp_path / "next").exists()
