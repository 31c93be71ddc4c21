"""Batch scripts of PBS: what their lines of #PBS become, and the PBS that they find."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from cavvy.domain.tasks import IndexRange, TaskSpec
from cavvy.spec import SpecError
from cavvy.task_files import ReadOptions, parse_file, parse_task

HEAD = "#!/bin/bash\n"


def read(*lines: str, commands: str = "hostname\n") -> TaskSpec:
    text = HEAD + "".join(f"#PBS {line}\n" for line in lines) + commands
    (task,) = parse_file(text, file="job.pbs").tasks
    return task


@pytest.mark.parametrize(
    ("lines", "nodes", "cpus", "mib"),
    [
        (["-l select=2:ncpus=8:mem=16gb"], 2, 8, 16384),
        (["-l select=1:ncpus=8+1:ncpus=8"], 2, 8, None),
        (["-l select=ncpus=4:mem=500mb,walltime=60"], 1, 4, 500),
        (["-l nodes=3:ppn=12", "-l mem=63gb"], 3, 12, 21504),  # of the whole job
        (["-l pmem=2gb,nodes=2:ppn=4"], 2, 4, 8192),  # of each process
        (["-lncpus=4,mem=1048576kb"], 1, 4, 1024),
        (["-N x"], 1, None, None),
        (["-l nodes=4"], 4, None, None),
    ],
)
def test_nodes_and_sizes(lines: list[str], nodes: int, cpus: int | None, mib: int | None) -> None:
    task = read(*lines)
    found = task.resources
    assert (task.nodes, found.cpus_min, found.memory_min_mib) == (nodes, cpus, mib)
    assert not found.accelerators


@pytest.mark.parametrize(
    ("line", "name", "count"),
    [
        ("-l select=1:ncpus=8:ngpus=2:gpu_type=v100", "V100", 2),
        ("-l select=2:ngpus=4", None, 4),
        ("-l nodes=1:ppn=4:gpus=1", None, 1),
    ],
)
def test_gpus(line: str, name: str | None, count: int) -> None:
    (need,) = read(line).resources.accelerators
    assert (need.name, need.count_min) == (name, count)


def test_the_rest_of_a_script() -> None:
    task = read(
        *("-N My_Run", "-l walltime=1:30:00", "-J 0-8:2%3", "-r n", "-v A=1,B=two", "-S /bin/dash")
    )
    assert (task.name, task.limits.duration) == ("my-run", timedelta(hours=1, minutes=30))
    assert (task.array, task.parallel) == ((IndexRange(0, 8, 2),), 3)
    assert (task.retry.preemption, task.retry.node) == (0, 0)
    assert task.env == {"A": "1", "B": "two"}
    assert task.run.startswith("#!/bin/dash\n#PBS -N My_Run\n")
    assert read("-t 7").array == (IndexRange(7, 7),)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("-l select=two:ncpus=0", "a number of at least 1"),
        ("-l nodes=0", "a number of at least 1"),
        ("-l select=99999:ncpus=1", "from 1 to 10,000"),
        ("-l walltime=1h", "hours, minutes and seconds"),
        ("-l walltime", "has no value"),
        ("-l mem=64GiB", "a size such as"),
        ("-J 5-1", "ends before it begins"),
        ("-J 0-99999", "100,000 jobs are too many"),
        ("-J 0-9%x", "indices such as"),
        ("-r maybe", "y or n"),
        ("-v 1BAD=2", "environment variable"),
        ("-Z x", "qsub has no option -Z"),
        ("train.py", "is no option of qsub"),
        ("-N", "has no value"),
        ("-N 'open", "cannot be read"),
    ],
)
def test_mistakes_name_the_line(line: str, said: str) -> None:
    with pytest.raises(SpecError) as error:
        read("-r y", line)
    assert said in str(error.value)
    assert "job.pbs:3:" in str(error.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("-W depend=afterok:123", "add --after NAME"),
        ("-l select=1:ncpus=8+2:ncpus=4", "its nodes differ"),
        ("-l nodes=1:ppn=2+3:ppn=4", "its nodes differ"),
        ("-a 2200", "starts a job later"),
        ("-I", "cavvy dev"),
        ("-d /scratch", "--workdir FOLDER"),
    ],
)
def test_what_cannot_be_kept_is_refused(line: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        parse_task(f"{HEAD}#PBS {line}\nhostname\n", file="a.pbs")


def test_what_names_the_cluster_is_left_out() -> None:
    found = parse_file(f"{HEAD}#PBS -q gpu -A lab -V\n#PBS -l place=scatter\nx\n#PBS -a 1\n")
    assert [(each.line, each.key, each.refused) for each in found.kept] == [
        (2, "-A", False),
        (2, "-V", False),
        (2, "-q", False),
        (3, "-l place", False),
    ]


def test_both_systems_in_a_script() -> None:
    text = f"{HEAD}#PBS -l select=2\n#SBATCH -N 3\nhostname\n"
    assert parse_task(text).nodes == 3
    assert parse_task(text, options=ReadOptions(dialect="pbs")).nodes == 2
    assert parse_task("#PBS -l select=2\nhostname\n").nodes == 2


def run_script(folder: Path, lines: str, commands: str, **variables: str) -> tuple[int, str]:
    """Run a script on this machine as a node does."""
    ready = parse_task(f"{HEAD}{lines}\n{commands}", file="job.pbs")
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PBS_")},
        **{"CAVVY_JOB_ID": "j", "CAVVY_ATTEMPT": "1", "NODE_RANK": "0", "NNODES": "1"},
        **{"CAVVY_HOSTS": "127.0.0.1", "CAVVY_MPI": f"{sys.executable} x", **variables},
    }
    done = subprocess.run(
        ["bash", "-e", "-c", ready.run],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        ("#PBS -l select=2:ncpus=8:mpiprocs=2:ompthreads=4", "4 4 16"),
        ("#PBS -l ncpus=2,ompthreads=3", "3 3 2"),
        ("#PBS -l select=1:ncpus=8", "8 8 8"),
        ("#PBS -l select=1:ncpus=8:ompthreads=4 -v OMP_NUM_THREADS=1", "4 1 8"),
    ],
)
def test_threads_of_openmp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, shown: str
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    task = parse_task(f"{HEAD}{lines}\ntrue\n")
    nodes = {"NNODES": str(task.nodes), "CAVVY_SLURM_LEADS": "1", **task.env}
    commands = "echo $NCPUS $OMP_NUM_THREADS $PBS_NCPUS"
    assert run_script(tmp_path, lines, commands, **nodes) == (0, f"{shown}\n")


def test_variables_files_and_programs(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    commands = """\
cd "$PBS_O_WORKDIR"; pwd
echo $PBS_JOBNAME $PBS_ENVIRONMENT $PBS_NP $NCPUS $(sort "$PBS_NODEFILE" | uniq -c)
echo ${PBS_JOBID%%.*} $PBS_ARRAY_INDEX | tr 0-9 n
env | grep -c ^SLURM || :
pbsdsh -- sh -c 'echo task $PBS_TASKNUM on $PBS_NODENUM'
pbsdsh -u true; echo rc $?
pbsdsh -n 1 sh -c 'exit 5'; echo rc $?
module load cuda
exit 7
"""
    lines = (
        "#PBS -N run -l select=1:ncpus=4:mpiprocs=2 -j oe\n#PBS -J 3-4 -o logs/^array_index^.txt"
    )
    code, said = run_script(tmp_path, lines, commands, CAVVY_ARRAY_INDEX="3", CAVVY_ARRAY_JOB="a")
    assert code == 7
    first, *rest = said.splitlines()
    assert Path(first) == tmp_path
    assert rest[:3] == ["run PBS_BATCH 2 4 2 127.0.0.1", "nnnnnnnn[n] n", "0"]
    assert sorted(rest[3:5]) == ["task 2 on 0", "task 3 on 0"]
    assert rest[5:7] == ["rc 0", "rc 5"]
    assert "nothing was loaded" in rest[7]
    assert (tmp_path / "logs" / "3.txt").read_text() == said


def test_output_that_cannot_be_written_is_in_the_log(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    commands = "seq 100000 | tail -n 1\n"
    code, said = run_script(tmp_path, "#PBS -j oe -o file/out.txt", commands)
    assert code == 0
    assert said.splitlines() == [
        "file/out.txt: File exists: the output is in the log only",
        "100000",
    ]


def test_the_walltime_ends_a_script(tmp_path: Path) -> None:
    code, said = run_script(tmp_path, "#PBS -l walltime=1", "sleep 60; echo late\n")
    assert (code, "walltime" in said, "late" in said) == (143, True, False)


def test_a_script_may_begin_with_a_comment() -> None:
    """qsub needs no line #!."""
    text = "# 1 node\n#PBS -l select=1:ncpus=12:mem=32gb\n#PBS -l wd\ntrue\n"
    found = parse_file(text, file="job")
    assert found.kind == "PBS"
    (task,) = found.tasks
    assert (task.resources.cpus_min, task.resources.memory_min_mib) == (12, 32768)
    assert found.kept == ()


def test_space_on_a_disk_and_what_only_a_cray_has() -> None:
    assert read("-l ncpus=4,jobfs=1500GB").resources.disk_gib == 1500
    with pytest.raises(SpecError, match="counts the processes of `aprun`") as error:
        parse_task(f"{HEAD}#PBS -l mppwidth=512\naprun ./a\n", file="a.pbs")
    assert "a.pbs:2:" in str(error.value)


def test_a_script_may_begin_with_an_empty_line() -> None:
    found = parse_file("\n#!/bin/bash   \n#PBS -l select=1:ncpus=2\nx\n", file="a.sh")
    assert (found.kind, found.tasks[0].resources.cpus_min) == ("PBS", 2)


def test_names_that_a_node_lacks_are_said() -> None:
    text = f"{HEAD}#PBS -l ncpus=4\npython a.py $PBS_NCPUS $PBS_SITE\n"
    found = parse_file(text, file="a.pbs")
    assert [(each.line, each.key) for each in found.kept] == [(3, "$PBS_SITE")]


def test_memory_without_a_unit_is_in_bytes_and_said() -> None:
    found = parse_file(f"{HEAD}#PBS -l mem=32\nhostname\n", file="job.pbs")
    assert any("32 are bytes" in each.reason for each in found.kept)
    found = parse_file(f"{HEAD}#PBS -l mem=32gb\nhostname\n", file="job.pbs")
    assert not any("bytes" in each.reason for each in found.kept)


@pytest.mark.parametrize(
    "lines",
    [
        ["-l select=1:ncpus=8:ngpus=1 -l gpu_type=v100"],
        ["-l select=1:ncpus=8:ngpus=1", "-l gpu_model=v100"],
        ["-l nodes=1:ppn=8:gpus=1:v100"],
        ["-l nodes=1:ppn=8:v100 -W x=GRES:gpu@1"],
    ],
)
def test_the_gpu_is_named_also_outside_of_a_chunk(lines: list[str]) -> None:
    (need,) = read(*lines).resources.accelerators
    assert (need.name, need.count_min) == ("V100", 1)
