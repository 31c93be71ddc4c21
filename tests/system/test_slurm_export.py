"""What `cavvy export slurm` writes is taken by sbatch, and runs the work on every node as Cavvy
would.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.test_provider_slurm import SlurmPlace, slurm_environment
from tests.system.slurm import Cluster, cluster_at, why_not

from cavvy.domain.tasks import AcceleratorNeed, ResourceSpec, TaskSpec

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    with cluster_at(tmp_path_factory.mktemp("slurm")) as made, slurm_environment(made):
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
