"""Batch scripts that Cavvy submits to a real Slurm cluster are jobs of that cluster, with their own
options, variables and steps.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.slurm import Cluster, cluster_at, why_not
from tests.system.trust import User, user_at

pytestmark = pytest.mark.system
SHOWN = """\
#!/bin/bash
#SBATCH -J shown -N 2 --ntasks-per-node=2 --cpus-per-task=3 --mem=700 -t 10
#SBATCH --constraint=r2 --partition=main -o out-%x.txt --nice=7
#SBATCH --gres=gpu:2
echo "job $SLURM_JOB_ID $SLURM_JOB_NAME $SLURM_NTASKS $SLURM_NTASKS_PER_NODE $SLURM_CPUS_PER_TASK"
echo "nodes $SLURM_JOB_NODELIST $SLURM_JOB_NUM_NODES $SLURM_MEM_PER_NODE $SLURM_JOB_PARTITION"
echo "here $CUDA_VISIBLE_DEVICES $(basename "$SLURM_SUBMIT_DIR")"
srun bash -c 'echo "task $SLURM_PROCID $SLURM_LOCALID $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES"'
srun -N1 -n1 --gres=gpu:1 --exact bash -c 'echo "one $CUDA_VISIBLE_DEVICES" >&2'
scontrol show job "$SLURM_JOB_ID" | grep -o -E '(Features|Nice|NumTasks|CPUs/Task)=\\S*' | sort
cat input.txt
exit 9
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    with cluster_at(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture
def user(cluster: Cluster, tmp_path: Path) -> Iterator[User]:
    with user_at(tmp_path / "user") as user:
        user.variables.update(SLURM_CONF=str(cluster.conf), PATH=cluster.environ["PATH"])
        settings = f'folder = "{user.root}/shared"\nprice_usd_gpu_hr = 1\nprice_usd_node_hr = 0\n'
        user.settings(f"[providers.local]\nenabled = false\n[providers.slurm]\n{settings}")
        yield user
    cluster.run("scancel", "--user=root", check=False)


def submit(user: User, script: str, *options: str) -> None:
    (user.work / "job.sbatch").write_text(script)
    (user.work / "input.txt").write_text("sent with the folder\n")
    user.cli("run", "-d", "--yes", "--workdir", str(user.work), *options, "job.sbatch")


def say(user: User, name: str) -> list[str]:
    return sorted(line.removeprefix("[0] ") for line in user.log(name).splitlines())


def test_a_script_is_a_job_of_the_cluster_as_it_is(cluster: Cluster, user: User) -> None:
    submit(user, SHOWN)
    job = user.ended("shown")
    assert (job.phase, job.exit_code) == ("failed", 9), user.log("shown")
    (number,) = (line.split()[1] for line in say(user, "shown") if line.startswith("job "))
    assert number in cluster.jobs()
    assert job.id in cluster.job(number, "%j")  # Cavvy finds its job by its own name
    assert say(user, "shown") == sorted(
        [
            f"job {number} shown 4 2 3",
            "nodes gpu[2,4] 2 700 main",
            "here 0,1 work",
            *(f"task {n} {n % 2} gpu{2 if n < 2 else 4} 0,1" for n in range(4)),
            "one 0",
            *("CPUs/Task=3", "Features=r2", "Nice=7", "NumTasks=4"),
            "sent with the folder",
        ]
    )


def test_an_array_is_jobs_of_the_cluster(cluster: Cluster, user: User) -> None:
    script = """\
#!/bin/bash
#SBATCH -J many --array=3-7:2 -t 5 --mem=200 -o many-%a.txt
srun echo "index $SLURM_ARRAY_TASK_ID of $SLURM_ARRAY_TASK_COUNT"
exit $((SLURM_ARRAY_TASK_ID == 5))
"""
    submit(user, script)
    for index, code in ((3, 0), (5, 1), (7, 0)):
        job = user.ended(f"many.{index}")
        assert job.exit_code == code
        assert say(user, f"many.{index}") == [f"index {index} of 3"]
    ids = [user.job(f"many.{index}").id for index in (3, 5, 7)]
    names = " ".join(cluster.job(each, "%j") for each in cluster.jobs())
    assert all(each in names for each in ids)


def test_a_dependency_names_a_job_of_the_cluster(cluster: Cluster, user: User) -> None:
    wait = f"until [ -e {user.root}/go ]; do sleep 0.2; done; echo first > {user.root}/first"
    wrap = ("--parsable", "--mem=100", "--output=/dev/null", f"--wrap={wait}")
    first = cluster.run("sbatch", *wrap).strip()
    script = f"#!/bin/bash\n#SBATCH -J then -t 5 --mem=200 --dependency=afterok:{first}\n"
    submit(user, f"{script}cat {user.root}/first\n", "--provider", "slurm")
    cluster.until(lambda: any("afterok" in cluster.job(each, "%E") for each in cluster.jobs("PD")))
    (user.root / "go").touch()
    assert user.ended("then").exit_code == 0
    assert say(user, "then") == ["first"]


def test_a_signal_reaches_the_steps_before_the_end(user: User) -> None:
    script = """\
#!/bin/bash
#SBATCH -J warned -t 1 --mem=200 --signal=USR1@58
srun bash -c 'trap "echo told; exit 3" USR1; echo began; while :; do sleep 0.1; done'
"""
    submit(user, script)
    job = user.ended("warned")
    assert job.exit_code == 3
    assert {"began", "told"} <= {*say(user, "warned")}
