"""What goes wrong on a real Slurm cluster: dead nodes, a slurmctld that is away or forgets, a
server that is killed.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.providers.batch.contract.test_provider_slurm import PROOF, SlurmPlace, slurm_environment
from tests.providers.batch.system.test_slurm_jobs import SMALL, check_gone
from tests.system.slurm import NODES, Cluster, cluster_at, why_not
from tests.system.trust import User, kill, user_at, wait_until

from cavvy.providers.base import GangState
from cavvy.providers.contract import ContractHarness

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    with cluster_at(tmp_path_factory.mktemp("slurm"), min_job_age=2) as made:
        yield made


@pytest.fixture
def user(cluster: Cluster, tmp_path: Path) -> Iterator[User]:
    with user_at(tmp_path / "user") as user:
        user.variables.update(SLURM_CONF=str(cluster.conf), PATH=cluster.environ["PATH"])
        user.settings(
            f'[providers.local]\nenabled = false\n[providers.slurm]\nfolder = "{user.root}/shared"\n'
        )
        yield user
    cluster.run(
        "scancel", "--user=root", check=False
    )  # only now is no server left to launch them again
    cluster.until(lambda: not cluster.jobs("PD,R,CG"))


def test_a_dead_node_is_a_node_failure_and_the_job_begins_again_elsewhere(
    user: User, cluster: Cluster
) -> None:
    run = f"echo begins; while [ ! -e {user.root}/go ]; do sleep 0.05; done"
    name = user.submit(f"{{name: hurt, {SMALL}, run: '{run}'}}")
    user.wait(name, "running")
    (job,) = cluster.jobs("R")
    node = cluster.job(job, "%N")
    assert node in NODES
    try:
        cluster.kill_node(node)
        told = user.wait(name, lambda job: job.attempt == 2 and job.phase == "running")
        assert told.attempts[0].outcome == "node"
        assert "killed" in told.attempts[0].reason  # as was found in what its agent had left
        (user.root / "go").touch()
        assert user.ended(name).phase == "done"
        assert user.log(name, "--attempt", "2") == "begins\n"
    finally:
        cluster.start(node)
    cluster.until(
        lambda: cluster.run("sinfo", "-h", "-N", "-p", "main", "-o", "%T").split() == ["idle"] * 4
    )
    check_gone(user, cluster)


def test_a_gang_that_slurm_has_forgotten_still_has_its_end(
    cluster: Cluster, tmp_path: Path
) -> None:
    """As after a weekend without a server: what the job wrote is all that is left."""
    with slurm_environment(cluster):
        asyncio.run(_forgotten(SlurmPlace(cluster, tmp_path)))


async def _forgotten(place: SlurmPlace) -> None:
    stage = ContractHarness(place, _never)
    one, two = await stage.spec("one"), await stage.spec("two", nodes=2)
    for gang in (one, two):
        await stage.ours.launch(gang)
    await place.settle()
    before = {gang.name: (await stage.one(gang.name)).nodes for gang in (one, two)}
    for gang in (one, two):
        for rank in range(gang.nodes):
            (place.gang_folder(gang.name) / str(rank) / "finish").touch()
    wait_until(lambda: not place.cluster.jobs())
    stage.restart()
    for gang in (one, two):
        seen = await stage.one(gang.name)
        assert (seen.state, seen.exit_code, seen.reason) == (
            GangState.ENDED,
            0,
            "the agents exited",
        )
        assert [node.started_at for node in seen.nodes] == [
            node.started_at for node in before[gang.name]
        ]
        assert [node.engine_id for node in seen.nodes] == [
            node.engine_id for node in before[gang.name]
        ]
        assert all(
            node.ended_at and node.started_at and node.ended_at >= node.started_at
            for node in seen.nodes
        )
        assert (await stage.one(gang.name)) == seen
    await stage.clear()


async def _never(*_: object) -> None:
    raise AssertionError


def test_an_agent_that_was_killed_and_forgotten_is_a_node_failure(
    user: User, cluster: Cluster
) -> None:
    name = user.submit(f"{{name: lost, retry: {{node: 0}}, {SMALL}, run: 'sleep 300'}}")
    user.wait(name, "running")
    user.kill_server()
    for config in user.root.glob("shared/*/gangs/*/0/agent.json"):
        kill(json.loads(config.read_text())["pid"])
    cluster.until(lambda: not cluster.jobs())
    ended = user.ended(name)
    assert (ended.phase, ended.attempts[0].outcome) == ("failed", "node")
    check_gone(user, cluster)


def say_without_server(user: User, name: str) -> tuple[str, Path]:
    """A job that writes its second line after the server was killed; also its node's folder."""
    run = f"echo before; while [ ! -e {user.root}/go ]; do sleep 0.05; done; echo after; sleep 300"
    name = user.submit(f"{{name: {name}, retry: {{node: 0}}, {SMALL}, run: '{run}'}}")
    wait_until(lambda: user.said(name) == "before\n")
    user.wait(name, "running")
    user.kill_server()
    (user.root / "go").touch()
    (home,) = user.root.glob("shared/*/gangs/*/0")
    wait_until(lambda: any(b"after" in path.read_bytes() for path in (home / "log").iterdir()))
    return name, home


def test_what_a_killed_agent_had_to_say_is_delivered(user: User, cluster: Cluster) -> None:
    name, home = say_without_server(user, "words")
    kill(json.loads((home / "agent.json").read_text())["pid"])
    cluster.until(lambda: not cluster.jobs())
    ended = user.ended(name)
    assert (ended.phase, ended.attempts[0].outcome) == ("failed", "node")
    assert user.log(name) == "before\nafter\n"
    check_gone(user, cluster)


def test_what_a_killed_agent_had_to_say_is_delivered_if_its_gang_is_removed(
    user: User, cluster: Cluster
) -> None:
    name, home = say_without_server(user, "cut")
    (home.parent / "removing").touch()  # what a removal notes before it cancels the job
    kill(json.loads((home / "agent.json").read_text())["pid"])
    cluster.until(lambda: not cluster.jobs())
    assert user.ended(name).phase == "failed"
    assert user.log(name) == "before\nafter\n"
    check_gone(user, cluster)


def test_work_goes_on_while_slurmctld_is_away(user: User, cluster: Cluster) -> None:
    run = f"echo begins; while [ ! -e {user.root}/go ]; do sleep 0.05; done; echo ends"
    name = user.submit(f"{{name: away, {SMALL}, run: '{run}'}}")
    user.wait(name, "running")
    cluster.kill("slurmctld")
    try:
        waiting = user.submit(f"{{name: later, {SMALL}, run: echo later}}")
        (user.root / "go").touch()
        wait_until(lambda: user.said(name) == "begins\nends\n")  # agents need no slurmctld
        assert user.job(waiting).phase in ("queued", "starting")
    finally:
        cluster.start("slurmctld")
    assert user.ended(name).phase == "done"
    assert (user.ended(waiting).phase, user.log(waiting)) == ("done", "later\n")
    check_gone(user, cluster)


def test_a_server_killed_at_launch_makes_no_second_job(user: User, cluster: Cluster) -> None:
    names = [
        user.submit(f"{{name: k{n}, {SMALL}, run: 'echo $CAVVY_ATTEMPT >> {user.root}/starts'}}")
        for n in range(6)
    ]
    user.kill_server()
    for name in names:
        job = user.ended(name)
        assert (job.phase, job.attempt) == ("done", 1)
    assert (user.root / "starts").read_text().split() == ["1"] * 6
    check_gone(user, cluster)


@pytest.mark.proves(PROOF, "notice")
def test_slurms_time_limit_is_a_notice_and_the_job_goes_on(user: User, cluster: Cluster) -> None:
    user.settings(user.config.read_text() + "warning_s = 60\n")
    run = "trap 'cat $CAVVY_NOTICE_FILE; exit 75' TERM; "
    run += f"while [ ! -e {user.root}/go ]; do sleep 0.05; done"
    name = user.submit(f'name: limited\n{SMALL}\nrun: "{run}"')
    user.wait(name, "running")
    (job,) = cluster.jobs("R")
    cluster.run("scontrol", "update", f"jobid={job}", "timelimit=1")
    user.wait(name, lambda job: job.attempt == 2)
    assert "nearly over" in user.log(name, "--attempt", "1")
    (user.root / "go").touch()
    ended = user.ended(name)
    assert (ended.phase, ended.attempts[0].outcome) == ("done", "preempted")
    check_gone(user, cluster)
