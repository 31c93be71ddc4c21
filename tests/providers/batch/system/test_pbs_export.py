"""What `cavvy export pbs` writes is taken by the stand-in for PBS and runs to its end: ranks and hosts
agree, a failure ends the job with the work's code, and jobs on one node use different ports.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.contract import pbs_stand_in
from tests.waits import wait_until

from cavvy.domain.tasks import AcceleratorNeed, ResourceSpec, TaskSpec
from cavvy.providers.batch.system import JobOptions
from cavvy.providers.pbs.script import make_export

pytestmark = pytest.mark.system


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A cluster whose nodes are not in the order of their names."""
    place = tmp_path / "pbs"
    pbs_stand_in.install(place)
    with pbs_stand_in.cluster(place) as state:
        state["nodes"] = dict(reversed(state["nodes"].items()))
    yield place
    for number in jobs_of(place):
        pbs_stand_in.end_all(number, 0)


def jobs_of(place: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((place / "state.json").read_text())["jobs"]
    return found


def submit(place: Path, task: TaskSpec, **options: Any) -> str:
    script = make_export(task, None, task.nodes, JobOptions(**options), "")
    done = subprocess.run(
        [str(place / "bin" / "qsub")],
        input=script,
        capture_output=True,
        text=True,
        cwd=place.parent,
        # Ranks start with a login shell: what the profile of who runs the tests does and says is not
        # of the test.
        env={**os.environ, "PATH": f"{place}/bin:{os.environ['PATH']}", "HOME": str(place)}
        | {"PBS_CONF_FILE": str(place / "pbs.conf")},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def end(place: Path, number: str) -> tuple[int, str]:
    """The job's exit code and what it wrote."""
    wait_until(lambda: jobs_of(place)[number]["state"] == "F", lambda: str(jobs_of(place)[number]))
    job = jobs_of(place)[number]
    said = (place.parent / job["output"]).read_text()
    assert not (place.parent / f".{number}").exists(), "the job left its folder"
    return int(job["exit"]), said


def test_ranks_hosts_and_variables_agree(place: Path) -> None:
    need = ResourceSpec(accelerators=(AcceleratorNeed(count_min=2),), cpus_min=2)
    task = TaskSpec(
        name="7b-of-a-long-name",
        nodes=3,
        resources=need,
        params={"lr": 0.1},
        env={"QUOTED": "it's $HOME", "NODE": "x"},
        setup="ready=yes",
        secrets=("TOKEN",),
        run='echo "$NODE_RANK of $NNODES $MASTER_ADDR $CAVVY_HOSTS $CAVVY_PARAM_LR $QUOTED $ready '
        '$NPROC_PER_NODE $TOKEN $MASTER_PORT"',
    )
    (place.parent / f"{task.name}.secrets").write_text("export TOKEN=hidden\n")
    code, said = end(place, submit(place, task))
    assert code == 0, said
    lines = [line.rpartition(" ") for line in sorted(said.splitlines())]
    whole = "of 3 n4 n4,n3,n2 0.1 it's $HOME yes 2 hidden"
    assert [line[0] for line in lines] == [f"{rank} {whole}" for rank in range(3)]
    assert len({line[2] for line in lines}) == 1
    assert 10_000 <= int(lines[0][2]) < 32_768


def test_the_end_of_a_cluster_is_not_that_of_another(place: Path, tmp_path: Path) -> None:
    """Tests run beside each other, each with a cluster of its own."""
    other = tmp_path / "beside" / "pbs"
    pbs_stand_in.install(other)
    waits = TaskSpec(name="t", run=f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done")
    number = submit(place, TaskSpec(name="t", run=f"touch {tmp_path}/up; exec sleep 600"))
    beside = submit(other, waits)
    wait_until(lambda: "session" in jobs_of(other)[beside])
    wait_until((tmp_path / "up").exists)  # a script that has hardly begun leaves its folder
    pbs_stand_in.end_all(number)
    assert end(place, number)[0] != 0
    (tmp_path / "go").touch()
    assert end(other, beside)[0] == 0


def test_a_missing_secret_ends_the_job(place: Path) -> None:
    task = TaskSpec(name="t", run="echo ran", secrets=("TOKEN",))
    code, said = end(place, submit(place, task))
    assert code != 0
    assert "ran" not in said
    assert "t.secrets" in said


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_one_failed_rank_ends_the_job_with_its_code(place: Path, nodes: int) -> None:
    run = f"[ $NODE_RANK != {nodes - 1} ] || exit 7\nsleep 600"
    assert end(place, submit(place, TaskSpec(name="t", run=run, nodes=nodes)))[0] == 7
    assert end(place, submit(place, TaskSpec(name="t", run="exit 0", nodes=nodes)))[0] == 0


def test_two_jobs_on_a_node_use_different_ports(place: Path) -> None:
    go = place.parent / "go"
    run = (
        f"{sys.executable} -c 'import os, pathlib, socket, time\n"
        's = socket.create_server(("", int(os.environ["MASTER_PORT"])))\n'
        f'p = pathlib.Path("{place.parent}")\n'
        '(p / ("up" + os.environ["MASTER_PORT"])).touch()\n'
        f'while not (p / "go").exists(): time.sleep(0.05)\''
    )
    numbers = [submit(place, TaskSpec(name="t", run=run)) for _ in range(2)]
    wait_until(lambda: len(list(place.parent.glob("up*"))) == 2)
    go.touch()
    assert [end(place, number)[0] for number in numbers] == [0, 0]


def test_a_deleted_job_waits_for_its_work(place: Path) -> None:
    """The shell that runs the work is signalled too, and must not end before the work."""
    up, saved = place.parent / "up", place.parent / "saved"
    program = (
        "import pathlib, signal, sys, time\n"
        "def save(*_):\n"
        f'    time.sleep(0.3); pathlib.Path("{saved}").touch(); sys.exit(5)\n'
        "signal.signal(signal.SIGTERM, save)\n"
        f'pathlib.Path("{up}").touch()\n'
        "while True: time.sleep(0.05)"
    )
    run = f"cd .\n{sys.executable} -c '{program}'\necho went on"
    number = submit(place, TaskSpec(name="t", run=run))
    wait_until(up.exists)
    pbs_stand_in.qdel(place, [number])
    code, said = end(place, number)
    assert (code, saved.exists()) == (5, True), said
    assert "went on" not in said


def test_options_of_the_settings_are_written(place: Path) -> None:
    task = TaskSpec(name="t", run="true")
    number = submit(place, task, options=("-l", "walltime=0:00:50"))
    assert jobs_of(place)[number]["walltime"] == "0:00:50"
