"""A Slurm cluster with accounting: limits are shown, a QOS holds jobs back, what slurmctld forgot is
looked up, and a pool of ours gives the cluster nodes.
"""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.test_provider_slurm import SlurmPlace, slurm_environment
from tests.system.ports import free_port
from tests.system.slurm import Cluster, cluster_at, why_no_accounting
from tests.system.trust import user_at, wait_until

from cavvy.domain.values import replace
from cavvy.providers.base import GangState, Refused
from cavvy.providers.batch.provider import BatchProvider
from cavvy.providers.contract import ContractHarness

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := why_no_accounting():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm")
    with cluster_at(folder, min_job_age=2, accounting=True) as made, slurm_environment(made):
        made.run("sacctmgr", "-i", "add", "qos", "few")
        made.run("sacctmgr", "-i", "modify", "qos", "few", "set", "GrpTRES=gres/gpu=4")
        made.run("sacctmgr", "-i", "modify", "user", "root", "set", "QOS=normal,few")
        yield made


async def _never(*_: object) -> None:
    raise AssertionError


def test_limits_are_shown_and_hold_jobs_back(cluster: Cluster, tmp_path: Path) -> None:
    async def scenario() -> None:
        place = SlurmPlace(cluster, tmp_path)
        place.settings["qos"] = "few"
        stage = ContractHarness(place, _never)
        assert isinstance(stage.ours, BatchProvider)
        facts = dict(await stage.ours.whoami())
        assert facts["limits"] == "known to the cluster's accounting"
        assert "gres/gpu=4" in facts["QOS few"]
        assert "few" in facts["account vision"]
        three = next(o for o in await stage.ours.offers() if o.accelerator_count == 3)
        for name in ("first", "second"):
            await stage.ours.launch(replace(await stage.spec(name), offer=three))
        cluster.until(lambda: "QOSGrp" in cluster.run("squeue", "-h", "-t", "PD", "-o", "%r"))
        waiting = await stage.one(stage.name("second"))
        assert waiting.state is GangState.QUEUED
        assert "QOSGrp" in waiting.reason
        await stage.clear()

    asyncio.run(scenario())


def test_an_account_that_is_not_ours_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    async def scenario() -> None:
        place = SlurmPlace(cluster, tmp_path)
        place.settings["account"] = "someone-elses"
        stage = ContractHarness(place, _never)
        assert isinstance(stage.ours, BatchProvider)
        with pytest.raises(Refused, match="is someone-elses, which is not an account of root"):
            await stage.ours.whoami()
        with pytest.raises(Refused, match="account"):
            await stage.ours.launch(await stage.spec("foreign"))
        assert await stage.ours.gangs() == []
        await stage.clear()

    asyncio.run(scenario())


def test_the_accounting_knows_what_slurmctld_forgot(cluster: Cluster, tmp_path: Path) -> None:
    async def scenario() -> None:
        stage = ContractHarness(SlurmPlace(cluster, tmp_path), _never)
        gang = await stage.spec("forgotten")
        await stage.ours.launch(gang)
        await stage.place.settle()
        before = await stage.one(gang.name)
        cluster.run("scancel", before.engine_id)  # not by us
        cluster.until(lambda: not cluster.jobs())
        stage.restart()
        seen = await stage.one(gang.name)
        assert (seen.state, seen.reason) == (
            GangState.ENDED,
            "the job was cancelled in Slurm, not by Cavvy",
        )
        assert [node.started_at for node in seen.nodes] == [
            node.started_at for node in before.nodes
        ]
        await stage.clear()

    asyncio.run(scenario())


_POOL = """
name: burst
max: 1
resources: {cpu: 1, memory: 512MiB}
join: exec slurmd -D -N $CLUSTER_NODE -b -f %s
"""


def test_slurm_starts_a_node_of_a_pool_for_a_job_and_gives_it_back(
    cluster: Cluster, tmp_path: Path
) -> None:
    """slurmctld calls the programs that `slurm-conf` has written, with nothing but its own
    environment. The node is a slurmd on this machine."""
    with user_at(tmp_path / "user") as user:
        user.variables.update(PATH=cluster.environ["PATH"])
        user.settings("[providers.local]\nhide_server = false\n")
        user.cli("pool", "apply", user.task(_POOL % cluster.conf, "pool.yaml"))
        lines = user.output("pool", "slurm-conf", "burst", "--programs", str(tmp_path / "programs"))
        place = f"NodeHostname={cluster.host} NodeAddr=127.0.0.1 Port={free_port()}"
        lines = re.sub("^NodeName=burst-1 ", rf"\g<0>{place} ", lines, flags=re.MULTILINE)
        lines = lines.replace("ReturnToService=2\n", "")  # the cluster has this line
        cluster.add(lines.replace("SuspendTime=600", "SuspendTime=3"))
        job = cluster.run("sbatch", "--parsable", "-p", "burst", "-o", "/dev/null", "--wrap=true")
        cluster.until(
            lambda: cluster.run("sacct", "-nXj", job.strip(), "-o", "state").strip() == "COMPLETED"
        )
        assert cluster.run("sacct", "-nXPj", job.strip(), "-o", "nodelist").strip() == "burst-1"
        assert not [each for each in user.json("ps") if each["name"] != "burst-1"]
        wait_until(lambda: user.job("burst-1").phase == "stopped", lambda: str(user.job("burst-1")))
        assert user.job("burst-1").reason == "the cluster released the node"
        user.cli("pool", "rm", "burst", "--yes")
