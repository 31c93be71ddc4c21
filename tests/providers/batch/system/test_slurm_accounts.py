"""A Slurm cluster with accounting: limits are shown, a QOS holds jobs back, what slurmctld forgot is
looked up, and a pool of ours gives nodes to this cluster and to one of Kubernetes.
"""

import asyncio
import grp
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import pytest
from tests.autoscaler_protocol import SERVICE, call, make
from tests.certificates import Authority
from tests.pages import ROOT, read_blocks
from tests.providers.batch.contract.test_provider_slurm import SlurmPlace, slurm_environment
from tests.system.ports import free_port
from tests.system.slurm import Cluster, cluster_at, why_no_accounting
from tests.system.trust import User, user_at, wait_until
from tests.waits import START_S

from cavvy.domain.values import replace
from cavvy.providers.base import GangState, Refused
from cavvy.providers.batch.provider import BatchProvider
from cavvy.providers.contract import ContractHarness

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if reason := why_no_accounting():
        pytest.skip(reason)
    with (
        # another run of pytest may close the folder that contains those of all tests
        TemporaryDirectory(prefix="cavvy-slurm-") as folder,
        cluster_at(Path(folder), min_job_age=2, accounting=True) as made,
        slurm_environment(made),
    ):
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


_AS_USER = """
name: {name}
resources: {{cpu: 1, memory: 512MiB, providers: [slurm]}}
run: '{run}'
"""


@pytest.fixture(scope="module")
def owner(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    """The owner of a server on this machine, whose jobs may reach the daemons of the cluster."""
    with user_at(tmp_path_factory.mktemp("user")) as user:
        user.variables.update(SLURM_CONF=str(cluster.conf), PATH=cluster.environ["PATH"])
        homes = cluster.folder / "homes"
        homes.mkdir()
        homes.chmod(0o755)
        for name in ("root", "games"):
            (homes / name).mkdir(mode=0o700)
            shutil.chown(homes / name, name, name)
        slurm = f'folder = "{homes}/%u/cavvy"\npartitions = "main"\nunix_users = "ann=games"\n'
        slurm += 'python = "/usr/bin/python3"\n'
        user.settings(f"[providers.local]\nhide_server = false\n[providers.slurm]\n{slurm}")
        yield user


def test_the_guide_simulates_the_jobs_that_the_cluster_has_run(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.run(
        "sbatch",
        "--wait",
        "-o",
        "/dev/null",
        "--gpus-per-node=2",
        "-p",
        "main",
        "--wrap",
        "sleep 2",
    )
    cluster.until(lambda: "gres/gpu=2" in cluster.run("sacct", "-aXnP", "-o", "AllocTRES"))
    [block] = [
        block.text
        for block in read_blocks(ROOT / "docs/guides/simulate.md")
        if block.text.startswith("sacct")
    ]
    bin_folder = Path(sys.executable).parent
    environ = {**cluster.environ, "PATH": f"{bin_folder}:{cluster.environ['PATH']}"}
    page = block.replace("--plot queue.svg", "-o json")
    done = subprocess.run(
        ["bash", "-ec", page], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "pools.csv").read_text().splitlines()[1].startswith("main,")
    found = json.loads(done.stdout)
    assert found["jobs"] >= 1, (tmp_path / "jobs.txt").read_text()
    assert found["left_out"] == 0


_POOL = """
name: burst
max: 1
resources: {cpu: 1, memory: 512MiB, providers: [local]}
join: exec slurmd -D -N $CLUSTER_NODE -b -f %s
"""


def test_slurm_starts_a_node_of_a_pool_for_a_job_and_gives_it_back(
    cluster: Cluster, owner: User, tmp_path: Path
) -> None:
    """slurmctld calls the programs that `slurm-conf` has written, with nothing but its own
    environment. The node is a slurmd on this machine."""
    owner.cli("pool", "apply", owner.task(_POOL % cluster.conf, "pool.yaml"))
    lines = owner.output("pool", "slurm-conf", "burst", "--programs", str(tmp_path / "programs"))
    place = f"NodeHostname={cluster.host} NodeAddr=127.0.0.1 Port={free_port()}"
    lines = re.sub("^NodeName=burst-1 ", rf"\g<0>{place} ", lines, flags=re.MULTILINE)
    lines = lines.replace("ReturnToService=2\n", "")  # the cluster has this line
    cluster.add(lines.replace("SuspendTime=600", "SuspendTime=3"))
    job = cluster.run("sbatch", "--parsable", "-p", "burst", "-o", "/dev/null", "--wrap=true")
    cluster.until(
        lambda: cluster.run("sacct", "-nXj", job.strip(), "-o", "state").strip() == "COMPLETED"
    )
    assert cluster.run("sacct", "-nXPj", job.strip(), "-o", "nodelist").strip() == "burst-1"
    assert not [each for each in owner.json("ps") if each["name"] != "burst-1"]
    wait_until(lambda: owner.job("burst-1").phase == "stopped", lambda: str(owner.job("burst-1")))
    assert owner.job("burst-1").reason == "the cluster released the node"
    owner.cli("pool", "rm", "burst", "--yes")


def test_a_cluster_autoscaler_orders_and_removes_nodes_of_a_pool(
    owner: User, tmp_path: Path
) -> None:
    """The autoscaler speaks the published protocol by TLS on both sides, as its `cloud-config`
    says. A node is a process on this machine."""
    pool = "{name: k8s, max: 2, resources: {cpu: 1, providers: [local]}, join: 'env; sleep 600'}"
    owner.cli("pool", "apply", owner.task(pool, "k8s.yaml"))
    authority, other = Authority(tmp_path), tmp_path / "other"
    other.mkdir()
    (cert, key), port = authority.issue(), free_port()
    files = ["--cert", str(cert), "--key", str(key), "--cacert", str(authority.ca)]
    address = f"127.0.0.1:{port}"
    owner.cli("pool", "serve-kubernetes", "k8s", "--listen", "0.0.0.0:0", code=2)
    serving = owner.start("pool", "serve-kubernetes", "k8s", "--listen", address, *files)
    assert serving.stdout is not None
    assert "serving k8s" in serving.stdout.readline()

    def connect(*pair: Path) -> grpc.Channel:
        read = [each.read_bytes() for each in pair]
        ids = dict(zip(("certificate_chain", "private_key"), read, strict=False))
        tls = grpc.ssl_channel_credentials(authority.ca.read_bytes(), **ids)
        return grpc.secure_channel(address, tls)

    def use(channel: grpc.Channel, method: str, **fields: Any) -> Any:
        def send(method: str, data: bytes) -> Any:
            return channel.unary_unary(f"/{SERVICE}/{method}")(data, timeout=START_S)

        return call(send, method, **fields)

    for stranger in ((), Authority(other).issue()):
        with connect(*stranger) as channel, pytest.raises(grpc.RpcError):
            use(channel, "Refresh")
    with connect(cert, key) as channel:
        use(channel, "NodeGroupIncreaseSize", id="k8s", delta=1)
        with pytest.raises(grpc.RpcError) as refused:
            use(channel, "NodeGroupIncreaseSize", id="k8s", delta=2)
        assert refused.value.code() is grpc.StatusCode.OUT_OF_RANGE
        [node] = use(channel, "NodeGroupNodes", id="k8s").instances
        name = node.id.rpartition("/")[2]
        owner.wait(name, "running")
        wait_until(lambda: f"CLUSTER_PROVIDER_ID={node.id}" in owner.said(name))
        assert "CLUSTER_NODE_LABELS=cavvy/pool=k8s\n" in owner.said(name)
        [running] = use(channel, "NodeGroupNodes", id="k8s").instances
        assert running.status.instanceState == 1
        gone = make("ExternalGrpcNode", providerID=node.id, name=name)
        use(channel, "NodeGroupDeleteNodes", id="k8s", nodes=[gone])
        assert use(channel, "NodeGroupTargetSize", id="k8s").targetSize == 0
    assert owner.ended(name).reason == "the cluster released the node"
    serving.terminate()
    assert serving.wait(START_S) == 143


def test_a_job_is_submitted_as_the_unix_user_of_its_user(cluster: Cluster, owner: User) -> None:
    cluster.run("sacctmgr", "-i", "add", "user", "games", "Account=vision")
    for stranger in ("eve", "root", "$(id)", "games", "ann=games"):
        owner.variables["LOGNAME"] = stranger
        refused = owner.submit(_AS_USER.format(name="refused", run="true"))
        owner.wait(refused, lambda job: f"user {stranger} has no Unix user" in str(job.attempts))  # noqa: B023
        owner.cli("stop", refused)
    owner.variables["LOGNAME"] = "ann"
    run = "id -un; id -G; touch made; pwd; env; echo begun; sleep 600"
    name = owner.submit(_AS_USER.format(name="mine", run=run))
    wait_until(lambda: "begun" in owner.said(name), lambda: str(owner.job(name)))
    user, groups, folder, *env = owner.said(name).splitlines()
    assert (user, groups) == ("games", str(grp.getgrnam("games").gr_gid))
    assert not {"HOME=/root", "USER=root", "LOGNAME=root", "LOGNAME=ann"} & {*env}
    made = Path(folder) / "made"
    assert (made.owner(), made.is_relative_to(cluster.folder / "homes/games")) == ("games", True)
    [job] = cluster.run("squeue", "-h", "-u", "games", "-o", "%i %u").splitlines()
    assert job.split()[1] == "games"
    owner.cli("stop", name)
    assert owner.ended(name).phase == "stopped"
    cluster.until(lambda: not cluster.jobs("PD,R,CG"))
    told = cluster.run("sacct", "-nXPj", job.split()[0], "-o", "user,account,state")
    assert told.startswith("games|vision|"), told
    wait_until(lambda: not list((cluster.folder / "homes/games/cavvy").glob("*/gangs/*")))
    assert not list((cluster.folder / "homes").rglob("gangs/*"))
