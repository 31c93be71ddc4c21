"""What `cavvy export slurm` writes is taken by sbatch, and runs the work on every node as Cavvy
would.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.providers.batch.contract.test_provider_slurm import SlurmPlace, entered_cluster_at
from tests.system.slurm import Cluster

from cavvy.domain.tasks import AcceleratorNeed, ResourceSpec, TaskSpec

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with entered_cluster_at(tmp_path_factory.mktemp("slurm")) as made:
        yield made


TASK = TaskSpec(
    name="exported",
    nodes=2,
    params={"lr": 0.1, "fast": True},
    env={"QUOTED": "it's $HOME"},
    setup="ready=yes",
    run='echo "$NODE_RANK of $NNODES $CAVVY_PARAM_LR $CAVVY_PARAM_FAST $QUOTED $ready '
    '$NPROC_PER_NODE $MASTER_ADDR" > "$OUT/$NODE_RANK"\n',
    resources=ResourceSpec(
        accelerators=(AcceleratorNeed(count_min=2),), cpus_min=1, memory_min_mib=100
    ),
)


def submit(
    cluster: Cluster, script: str, folder: Path, *options: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sbatch", *options],
        input=script,
        capture_output=True,
        text=True,
        cwd=folder,
        env=cluster.environ,
        timeout=60,
    )


def test_the_script_is_taken_and_runs(cluster: Cluster, tmp_path: Path) -> None:
    provider = SlurmPlace(cluster, tmp_path).provider("export")
    script = provider.export(TASK, None, 2)
    script = script.replace("export QUOTED", f"export OUT={tmp_path}\nexport QUOTED")
    tried = submit(cluster, script, tmp_path, "--test-only")
    assert tried.returncode == 0, tried.stderr
    done = submit(cluster, script, tmp_path, "--wait")
    assert done.returncode == 0, [path.read_text() for path in tmp_path.glob("*.log")]
    lines = [(tmp_path / str(rank)).read_text().split() for rank in range(2)]
    assert [line[:8] for line in lines] == [
        [str(rank), "of", "2", "0.1", "true", "it's", "$HOME", "yes"] for rank in range(2)
    ]
    assert lines[0][8:] == lines[1][8:]
    assert lines[0][8] == "2"


def test_the_exit_code_is_the_works(cluster: Cluster, tmp_path: Path) -> None:
    provider = SlurmPlace(cluster, tmp_path).provider("export")
    script = provider.export(TaskSpec(name="fails", run="exit 7"), None, 1)
    assert submit(cluster, script, tmp_path, "--wait").returncode == 7


def test_what_sbatch_would_refuse_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    provider = SlurmPlace(cluster, tmp_path).provider("export")
    script = provider.export(TaskSpec(name="huge", run="true", nodes=1000), None, 1000)
    assert submit(cluster, script, tmp_path, "--test-only").returncode != 0


def run(cluster: Cluster, folder: Path, task: TaskSpec, *options: str, **environ: str) -> str:
    """What the task wrote. Fails if the job did."""
    folder.mkdir(exist_ok=True)
    script = SlurmPlace(cluster, folder).provider("export").export(task, None, task.nodes)
    done = subprocess.run(
        ["sbatch", "--wait", *options],
        input=script,
        capture_output=True,
        text=True,
        cwd=folder,
        env=cluster.environ | environ,
        timeout=120,
    )
    said = "".join(path.read_text() for path in sorted(folder.glob(f"{task.name}-*.log")))
    assert done.returncode == 0, (done.stderr, said)
    return said


@pytest.mark.parametrize("options", [(), ("--exclusive",), ("--cpus-per-task=3",)])
def test_the_work_has_all_cpus_of_the_job(
    cluster: Cluster, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Since Slurm 22.05, srun does not take over the number of CPUs that sbatch requested."""
    need = ResourceSpec() if options else ResourceSpec(cpus_min=2, memory_min_mib=100)
    wanted = {(): "2", ("--exclusive",): "64"}.get(options, "3")
    task = TaskSpec(
        name="cpus", run='echo "$SLURM_CPUS_PER_TASK of $SLURM_CPUS_ON_NODE"', resources=need
    )
    memory = ("--mem=100M",) if options else ()
    said = run(cluster, tmp_path, task, *options, *memory)
    assert said.split()[0] == wanted, said


def test_jobs_on_one_node_use_different_ports(cluster: Cluster, tmp_path: Path) -> None:
    """The second job starts while the first listens, also if its own port is taken."""
    run_text = (
        f"{sys.executable} -c 'import os, pathlib, socket, time\n"
        's = socket.create_server(("", int(os.environ["MASTER_PORT"])))\n'
        f'p = pathlib.Path("{tmp_path}")\n'
        '(p / ("up" + os.environ["MASTER_PORT"])).touch()\n'
        f'while len(list(p.glob("up*"))) < 2: time.sleep(0.05)\''
    )
    need = ResourceSpec(cpus_min=1, memory_min_mib=100)
    task = TaskSpec(name="port", run=run_text, resources=need)
    script = SlurmPlace(cluster, tmp_path).provider("export").export(task, None, 1)
    first = submit(cluster, script, tmp_path, "-w", "gpu1", "--parsable").stdout.strip()
    assert submit(cluster, script, tmp_path, "-w", "gpu1", "--wait").returncode == 0
    cluster.until(lambda: cluster.job(first) == "COMPLETED")


def test_a_secret_reaches_the_work_and_a_missing_one_ends_the_job(
    cluster: Cluster, tmp_path: Path
) -> None:
    need = ResourceSpec(cpus_min=1, memory_min_mib=100)
    task = TaskSpec(name="keys", run="echo $TOKEN", secrets=("TOKEN",), resources=need)
    script = SlurmPlace(cluster, tmp_path).provider("export").export(task, None, 1)
    assert submit(cluster, script, tmp_path, "--wait").returncode != 0
    (log,) = tmp_path.glob("keys-*.log")
    assert "set it in the environment of sbatch" in log.read_text()
    assert run(cluster, tmp_path / "given", task, TOKEN="hidden") == "hidden\n"
    # a site whose jobs do not pass the environment on
    plain = TaskSpec(name="keys", run="echo $NNODES", resources=need)
    assert run(cluster, tmp_path / "none", plain, "--export=NONE") == "1\n"


def test_one_failed_rank_ends_the_job(cluster: Cluster, tmp_path: Path) -> None:
    """srun exits with the highest code of all ranks, which is that of a rank that it ended."""
    need = ResourceSpec(cpus_min=1, memory_min_mib=100)
    work = "[ $NODE_RANK != 1 ] || exit 7\nsleep 600"
    task = TaskSpec(name="fails", run=work, nodes=2, resources=need)
    script = SlurmPlace(cluster, tmp_path).provider("export").export(task, None, 2)
    assert submit(cluster, script, tmp_path, "--wait").returncode != 0
    (log,) = tmp_path.glob("fails-*.log")
    assert "Exited with exit code 7" in log.read_text()
