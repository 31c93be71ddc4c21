"""Batch scripts do the same on a real Slurm cluster and, read by Cavvy, on this machine."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.slurm import Cluster, cluster_at, why_not
from tests.system.trust import User, user_at

pytestmark = pytest.mark.system
NAMES = (
    "SLURM_JOB_NAME SLURM_NTASKS SLURM_NPROCS SLURM_JOB_NUM_NODES SLURM_NNODES "
    "SLURM_TASKS_PER_NODE SLURM_NTASKS_PER_NODE SLURM_MEM_PER_NODE SLURM_NODEID SLURM_PROCID "
    "SLURM_LOCALID SLURM_GTIDS SLURM_CPUS_ON_NODE SLURM_JOB_CPUS_PER_NODE"
)
IN_STEP = (
    "SLURM_NTASKS SLURM_STEP_ID SLURM_STEP_NUM_NODES SLURM_STEP_NUM_TASKS SLURM_STEP_TASKS_PER_NODE "
    "SLURM_NODEID SLURM_PROCID SLURM_LOCALID SLURM_GTIDS SLURM_NNODES SLURM_CPUS_ON_NODE"
)
# Each script, which writes what it has seen into its standard output. In "codes", the task that
# fails sleeps first: a real `srun -K` does not end tasks that have not begun yet.
SCRIPTS = {
    "variables": f"""\
#SBATCH -J vars -N 2 --ntasks-per-node=1 -t 10 --mem=500
for v in {NAMES}; do echo "$v=${{!v}}"; done
scontrol show hostnames | wc -l
""",
    "variables-of-tasks": f"""\
#SBATCH -N 2 -n 2 -t 10
srun bash -c 'for v in {IN_STEP}; do echo "$SLURM_PROCID $v=${{!v}}"; done'
srun -N1 -n1 -r1 bash -c 'echo rel $SLURM_NODEID $SLURM_STEP_NUM_NODES $SLURM_STEP_ID'
""",
    "codes": """\
#SBATCH -n 2 -t 10
srun bash -c 'exit $((SLURM_PROCID+4))' 2>/dev/null; echo rc $?
srun nosuchprogram 2>/dev/null; echo rc $?
srun -n1 /etc/passwd 2>/dev/null; echo rc $?
srun -n1 bash -c 'kill -9 $$' 2>/dev/null; echo rc $?
srun -n1 bash -c 'kill -TERM $$' 2>/dev/null; echo rc $?
srun -n 3 true 2>/dev/null; echo rc $?
srun -K bash -c 'sleep 1; test $SLURM_PROCID = 0 && exit 3; sleep 60; echo late' 2>/dev/null; echo rc $?
srun -l -n2 bash -c 'echo hi'
exit 7
""",
    "several-programs": """\
#SBATCH -n 2 -t 10
printf '0 echo zero %%t %%o\\n1 echo one %%t %%o\\n' > m.conf
srun --multi-prog m.conf
printf '* echo all %%t %%o\\n' > m2.conf
srun --multi-prog m2.conf
""",
    "steps-at-once": """\
#SBATCH -n 2 -t 10
mkdir here
for i in 0 1; do
  srun -n1 --exact bash -c "touch here/$i; until [ -e here/0 -a -e here/1 ]; do sleep .1; done
    echo step $i" &
done
wait
export A=1
srun -n1 --chdir=/tmp pwd
srun -n1 bash -c 'echo $A'
""",
    "files": """\
#SBATCH -J outs -n 2 -t 10 -e err-%x.txt
echo to out; echo to err >&2
srun -o task-%t.txt sh -c 'echo task $SLURM_PROCID'
cat task-0.txt task-1.txt
sleep 0.3; cat err-outs.txt
""",
    "fails": """\
#SBATCH -n 2 -t 10
set -e
srun bash -c 'test $SLURM_PROCID = 0' 2>/dev/null
echo not reached
""",
    "options": """\

# a comment
#SBATCH --ntasks 2 --time 5 # words
#SBATCH --job-name="two words"
echo hi
#SBATCH --ntasks=4
echo "$SLURM_NTASKS $SLURM_JOB_NAME"
""",
    "lists": """\
#SBATCH -t 5
scontrol show hostnames 'a[01-03,7],b'
scontrol show hostname 'z[1-2]'
""",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    with cluster_at(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    with user_at(tmp_path_factory.mktemp("user")) as user:
        yield user


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_does_the_same(name: str, cluster: Cluster, user: User, tmp_path: Path) -> None:
    script = f"#!/bin/bash\n{SCRIPTS[name]}"
    (tmp_path / "job.sbatch").write_text(script)
    done = subprocess.run(
        ["sbatch", "--wait", "-o", "out", "job.sbatch"],
        cwd=tmp_path,
        env=cluster.environ,
        capture_output=True,
        check=False,
    )
    folder = user.work / name
    folder.mkdir(exist_ok=True)  # another try of the test
    (folder / "job.sbatch").write_text(script)
    user.cli("run", "-d", "--workdir", str(folder), "--name", name, str(folder / "job.sbatch"))
    job = user.ended(name)
    attempt = job.attempts[-1]
    # the ranks of a gang stand before their lines
    said = [line.removeprefix("[0] ") for line in user.log(name).splitlines()]
    said = [line for line in said if line != "to err"] + ["to err"] * (name == "files")
    wanted = (tmp_path / "out").read_text().splitlines()
    # a real srun tells when the step before it has not been cleared away yet
    assert sorted(said) == sorted(line for line in wanted if not line.startswith("srun: "))
    assert attempt.exit_code == done.returncode
