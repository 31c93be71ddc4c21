"""Jobs of a real server on a real Slurm cluster: to their end, as gangs, many, waiting, stopped,
preempted.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.system.test_tour import CLUSTER, follow_page
from tests.pages import ROOT, read_blocks
from tests.system.named_machines import play_machine
from tests.system.server_state import home_with_jobs
from tests.system.slurm import Cluster, cluster_at, why_not
from tests.system.trust import User, counting, user_at, wait_until
from tests.waits import PATIENCE_S

from cavvy.client import connect

pytestmark = pytest.mark.system

SMALL = "resources: {cpu: 1, memory: 512MiB}"


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
        settings = (
            f'folder = "{user.root}/shared"\nprice_usd_gpu_hr = 3600\nprice_usd_node_hr = 0\n'
            'topology = "rack=r1|r2"\n'
        )
        user.settings(f"[providers.local]\nenabled = false\n[providers.slurm]\n{settings}")
        yield user
    cluster.run(
        "scancel", "--user=root", check=False
    )  # only now is no server left to launch them again
    cluster.until(lambda: not cluster.jobs("PD,R,CG"))


def check_gone(user: User, cluster: Cluster) -> None:
    """Nothing is left in Slurm, in the shared folder or among the processes."""
    cluster.until(lambda: not cluster.jobs("PD,R,CG"))
    wait_until(lambda: not user.gang_folders(), lambda: f"left: {user.gang_folders()}")
    wait_until(lambda: not user.left(), lambda: f"left: {user.left()}")
    assert user.json("nodes") == []


def fill(cluster: Cluster) -> str:
    """Submit a job that occupies every node, and return its id."""
    whole = ("--partition=main", "--exclusive", "--nodes=4", "--output=/dev/null")
    job = cluster.run("sbatch", "--parsable", *whole, "--wrap=sleep 600").strip()
    cluster.until(lambda: cluster.job(job) == "RUNNING")
    return job


def test_the_tutorial_was_executed_as_written(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the login node, so the page's setting `host` is left out."""
    blocks = [each.text for each in read_blocks(ROOT / CLUSTER) if each.language == "toml"]
    (settings,) = (text for text in blocks if "slurm" in text)
    settings = re.sub("^host.*\n", "", settings, flags=re.MULTILINE)
    (tmp_path / "settings.toml").write_text(f'{settings}folder = "{tmp_path}/shared"\n')
    smi = tmp_path / "bin/nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}:{cluster.environ['PATH']}")
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    with home_with_jobs(tmp_path / "home"):
        follow_page(CLUSTER, tmp_path / "tour")
        with connect() as client:
            client.down()
        # the server lives: it cancels also what it has launched and not seen yet
        cluster.until(lambda: not cluster.jobs("PD,R,CG"))


def test_a_job_runs_to_its_end_with_its_log_and_its_bill(user: User, cluster: Cluster) -> None:
    (user.work / "main.py").write_text("import sys\nprint('hello', *sys.argv[1:])\nsys.exit(7)\n")
    text = (
        "name: hello\nworkdir: .\nresources: {gpu: H100:2}\nrun: python3 main.py "
        "$CUDA_VISIBLE_DEVICES"
    )
    before = set(cluster.jobs())
    command = user.start("run", "--yes", user.task(text))
    out, err = command.communicate(timeout=PATIENCE_S)
    assert (command.returncode, out) == (7, "hello 0,1\n"), err
    job = user.ended("hello")
    assert (job.phase, job.exit_code, job.attempt) == ("failed", 7, 1)
    assert "slurm/meadow/main/8xh100-64cpu-500gb:2/on-demand" in user.cli("status", "hello")
    (charge,) = user.json("cost", job.id)["charges"]
    assert charge["rate_micros_per_hour"] == 7200 * 10**6
    assert job.spent_micros == charge["amount_micros"]
    check_gone(user, cluster)
    assert [cluster.job(each) for each in cluster.jobs() if each not in before] == ["COMPLETED"]


def test_a_part_of_a_gpu_is_shards_and_costs_its_part(user: User, cluster: Cluster) -> None:
    said = "$CUDA_VISIBLE_DEVICES $CAVVY_GPU_SHARE"
    # Slurm counts whole seconds: what begins and ends in the same one costs nothing
    text = f"name: half\nresources: {{gpu: 'A100:0.5'}}\nrun: echo {said}; sleep 1.5"
    out, err = user.start("run", "--yes", user.task(text)).communicate(timeout=PATIENCE_S)
    assert out == "0 0.5\n", err
    (charge,) = user.json("cost", user.ended("half").id)["charges"]
    assert charge["rate_micros_per_hour"] == 1800 * 10**6
    check_gone(user, cluster)


def test_jobs_share_a_machine(user: User, cluster: Cluster) -> None:
    play_machine(user, "resources: {gpu: H100:2}", lambda: len(cluster.jobs()))
    check_gone(user, cluster)


def test_ranks_of_a_gang_have_a_node_each_and_meet(user: User, cluster: Cluster) -> None:
    from tests.agent.system.test_trust_gangs import check_ranks_meet

    check_ranks_meet(user, SMALL)
    check_gone(user, cluster)


def test_a_gang_gets_nodes_of_one_rack(user: User, cluster: Cluster) -> None:
    """The first two free nodes are in different racks."""
    text = f"name: near\nnodes: 2\ntopology: {{same: rack}}\n{SMALL}\nrun: sleep 300"
    refused = user.cli("run", "-d", user.task(text.replace("rack", "rak")), code=None)
    assert "the setting `topology` of [providers.slurm] has rack" in refused
    name = user.submit(text)
    cluster.until(lambda: cluster.jobs("R"))
    held = cluster.run("squeue", "--noheader", "--states=R", "--format=%N").strip()
    assert held in ("gpu[1,3]", "gpu[2,4]")
    user.cli("stop", name)
    check_gone(user, cluster)


def test_each_project_has_its_own_setups(user: User, cluster: Cluster) -> None:
    task = f"name: same\n{SMALL}\nsetup: date +%N > $CAVVY_SETUP_DIR/made\n"
    path = user.task(task + "run: cat $CAVVY_SETUP_DIR/made")
    user.cli("project", "create", "pb")
    said = [user.output("run", "-p", project, path) for project in ("default", "pb", "default")]
    made = [re.findall(r"^\d+$", each, re.MULTILINE) for each in said]
    assert all(len(each) == 1 for each in made), said
    assert made[0] == made[2] != made[1]
    assert len(list((user.root / "shared/cache").glob("p-*/setups"))) == 2
    check_gone(user, cluster)


def test_ten_short_jobs(user: User, cluster: Cluster) -> None:
    names = [user.submit(f"{{name: j{n}, {SMALL}, run: echo {n}}}") for n in range(10)]
    for number, name in enumerate(names):
        assert user.ended(name).phase == "done"
        assert user.log(name) == f"{number}\n"
    assert len(cluster.jobs()) >= 10
    check_gone(user, cluster)


def test_a_drill_takes_the_node_and_the_job_resumes(user: User, cluster: Cluster) -> None:
    user.submit(_counting("drilled", user, SMALL))
    wait_until(lambda: "step 2" in user.said("drilled"))
    user.cli("drill", "preempt", "drilled", "--notice", "20s")
    user.wait("drilled", lambda job: job.attempt == 2 and "begins at 2" in user.said("drilled"))
    (user.root / "go").touch()
    job = user.ended("drilled")
    assert (job.phase, job.attempt, job.attempts[0].outcome) == ("done", 2, "preempted")
    assert "told to go" in user.log("drilled", "--attempt", "1")
    check_gone(user, cluster)


def test_preemption_by_slurm_is_a_preemption_and_the_job_resumes(
    user: User, cluster: Cluster
) -> None:
    user.submit(_counting("taken", user, "nodes: 2\nresources: {gpu: H100:8, spot: only}"), "--yes")
    wait_until(lambda: "step 2" in user.said("taken"))
    user.wait("taken", "running")
    wanted = (
        "--partition=main",
        "--nodes=2",
        "--gres=gpu:h100:8",
        "--cpus-per-task=64",
        "--output=/dev/null",
    )
    other = cluster.run("sbatch", "--parsable", *wanted, "--wrap=sleep 4").strip()
    job = user.wait("taken", lambda job: job.attempt >= 2)
    assert (job.attempts[0].outcome, "Slurm" in job.attempts[0].reason) == ("preempted", True), (
        job.attempts[0]
    )
    cluster.until(lambda: cluster.job(other) in ("RUNNING", "COMPLETED", "COMPLETING"))
    # The agents of an attempt may still send its last lines when the next one begins.
    wait_until(
        lambda: "told to go" in user.log("taken", "--attempt", "1"),
        lambda: f"{user.log('taken', '--attempt', '1')}\n{user.scenario('taken')}",
    )
    (user.root / "go").touch()
    job = user.ended("taken")
    *others, last = [attempt.outcome for attempt in job.attempts]
    assert (job.phase, last) == ("done", "succeeded")
    assert all(each == "preempted" for each in others), job.attempts
    assert "begins at 2" in user.log("taken")
    assert [kind for kind, _ in user.scenario("taken")].count("notice") >= 1
    assert cluster.job(cluster.jobs("PR")[0], "%j").startswith(
        "rm-"
    )  # and was not put into the queue again by Slurm
    check_gone(user, cluster)


def test_a_long_queue_is_shown_with_its_reason(user: User, cluster: Cluster) -> None:
    whole = (
        "--partition=main",
        "--exclusive",
        "--nodes=4",
        "--time=30",
        "--output=/dev/null",
        "--wrap=sleep 600",
    )
    other = cluster.run("sbatch", "--parsable", *whole).strip()
    cluster.until(lambda: cluster.job(other) == "RUNNING")
    name = user.submit("{name: long, resources: {gpu: A100:8}, run: echo at last}", "--yes")
    job = user.wait(name, lambda job: "Resources" in job.reason or "Priority" in job.reason)
    assert re.match(r"waits at slurm: Slurm: (Resources|Priority)", job.reason)
    assert "waits at slurm" in user.cli("status", name)
    assert job.attempt == 1
    assert job.spent_micros == 0
    cluster.run("scancel", other)
    assert user.ended(name).phase == "done"
    check_gone(user, cluster)


@pytest.mark.parametrize("when", ["queued", "starting", "running"])
def test_a_job_is_cancelled_in_every_phase(user: User, cluster: Cluster, when: str) -> None:
    other = fill(cluster) if when == "queued" else ""
    name = user.submit(f"{{name: no, {SMALL}, run: 'echo here; sleep 300'}}")
    if when == "queued":
        cluster.until(lambda: cluster.jobs("PD"))
    elif when == "running":
        user.wait(name, "running")
    user.cli("stop", name)
    job = user.ended(name)
    assert job.phase == "stopped"
    if when == "queued":
        cluster.run("scancel", other)
    check_gone(user, cluster)


@pytest.mark.parametrize("when", ["queued", "running"])
def test_a_job_that_an_administrator_cancels_is_stopped(
    user: User, cluster: Cluster, when: str
) -> None:
    other = fill(cluster) if when == "queued" else ""
    run = "trap 'exit 0' TERM; sleep 300 & wait"
    name = user.submit(f'{{name: no, {SMALL}, run: "{run}"}}')
    if when == "queued":
        cluster.until(lambda: cluster.jobs("PD"))
    else:
        user.wait(name, "running")
    (job_id,) = set(cluster.jobs("PD,R")) - {other}
    before = set(cluster.jobs())
    cluster.run("scancel", job_id)
    job = user.ended(name)
    assert (job.phase, job.attempt, job.attempts[0].outcome) == ("stopped", 1, "stopped")
    assert job.reason == "the job was cancelled in Slurm, not by Cavvy"
    if when == "queued":
        cluster.run("scancel", other)
    check_gone(user, cluster)
    # Slurm forgets jobs that ended long ago
    assert set(cluster.jobs()) <= before, "the job was submitted again"


def _counting(name: str, user: User, resources: str) -> str:
    return (
        f"name: {name}\n{resources}\ncheckpoint: state\nrun: "
        f"|{counting(f'[ ! -e {user.root}/go ]')}"
    )
