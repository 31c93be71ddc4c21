"""Jobs on managed services, by the real command, server and agent: containers are processes that
run the command of the service's request. What differs between services is checked by the contract
suite, and by sessions on them in `test_service_sessions.py`.
"""

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.contract.aws_batch_stand_in import BatchStandIn
from tests.contract.aws_service import KEY, SECRET, AwsStandIn
from tests.contract.azure_batch_stand_in import REGION, AzureBatchStandIn, BatchJob
from tests.contract.azure_public import identity_variables
from tests.contract.azureml_description import GROUP, SUBSCRIPTION, WORKSPACE
from tests.contract.azureml_stand_in import AzureMlStandIn
from tests.contract.ecs_stand_in import CLUSTER, EcsStandIn
from tests.contract.sagemaker_stand_in import ROLE, SageMakerStandIn, interrupted
from tests.contract.vertex_stand_in import VertexStandIn
from tests.providers.aws.contract.test_provider_sagemaker import PROOF, TRAITS
from tests.system.containers import ContainerCloud
from tests.system.digits import ARGUMENTS, train_undisturbed, write_digits
from tests.system.ports import free_port
from tests.system.trust import User, user_at, wait_until

from cavvy.providers.contract import memory_cloud
from cavvy.providers.contract.memory_cloud import MemoryCloud, Rented
from cavvy.providers.contract.rest_stand_in import RestServer

pytestmark = pytest.mark.system
LONG_S = 150.0  # of a wait for a training, on a machine that is busy with others
IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/train:1"


class SageMakerContainers(SageMakerStandIn):
    """Training jobs whose containers run."""

    cloud: ContainerCloud

    def start(self, region: str, job: str, nodes: int) -> list[Rented]:
        made = super().start(region, job, nodes)
        body, hosts = self.bodies[region, job], [f"algo-{rank + 1}" for rank in range(nodes)]
        for host, machine in zip(hosts, made, strict=True):
            self.cloud.run(
                machine.id,
                body["AlgorithmSpecification"]["ContainerEntrypoint"],
                {
                    **body["Environment"],
                    "SM_HOSTS": json.dumps(hosts),
                    "SM_CURRENT_HOST": host,
                },
            )
        return made

    def interrupt(self) -> None:
        """Take back the instances of the newest job: SIGTERM, then the job waits for others."""
        (_, job), machine = list(self.bodies)[-1], self.cloud.billed()[-1]
        self.cloud.stop(machine.id)
        self.changes[job] = interrupted(self.cloud.time)


class BatchContainers(BatchStandIn):
    """Jobs of AWS Batch whose containers run."""

    cloud: ContainerCloud

    def start(self, region: str, job: str, nodes: int) -> list[Rented]:
        made = super().start(region, job, nodes)[-nodes:]
        definition = self.bodies[region, job]["definition"]
        container = definition.get("containerProperties")
        if container is None:
            container = definition["nodeProperties"]["nodeRangeProperties"][0]["container"]
        environment = {each["name"]: each["value"] for each in container["environment"]}
        for index, machine in enumerate(made):
            place = {"AWS_BATCH_JOB_NODE_INDEX": str(index)} if nodes > 1 else {}
            self.cloud.run(machine.id, container["command"], {**environment, **place})
        # if the main node exits, all of the child nodes are stopped
        self.cloud.end_together(made[0].id, [each.id for each in made[1:]])
        return made


class EcsContainers(EcsStandIn):
    """Tasks of ECS whose containers run."""

    cloud: ContainerCloud

    def start_task(self, region: str, name: str, run: dict[str, Any]) -> Rented:
        made = super().start_task(region, name, run)
        (container,) = run["definition"]["containerDefinitions"]
        environment = {each["name"]: each["value"] for each in container["environment"]}
        self.cloud.run(made.id, container["command"], environment)
        return made


class VertexContainers(VertexStandIn):
    """Custom jobs whose containers run."""

    cloud: ContainerCloud

    def start_job(self, region: str, body: dict[str, Any], nodes: int) -> list[Rented]:
        made = super().start_job(region, body, nodes)
        pools = body["jobSpec"]["workerPoolSpecs"]
        places = [
            (f"workerpool{number}", index)
            for number, pool in enumerate(pools)
            for index in range(pool["replicaCount"])
        ]
        cluster: dict[str, list[str]] = {}
        for pool, index in places:
            cluster.setdefault(pool, []).append(f"cmle-training-{pool}-ab-{index}:2222")
        container = pools[0]["containerSpec"]
        values = {each["name"]: _expand(each["value"]) for each in container["env"]}
        for machine, (pool, index) in zip(made, places, strict=True):
            told = {"cluster": cluster, "task": {"type": pool, "index": index}}
            spec = {"CLUSTER_SPEC": json.dumps({**told, "environment": "cloud"})}
            self.cloud.run(machine.id, container["command"], {**values, **spec})
        return made


class AzureMlContainers(AzureMlStandIn):
    """Command jobs whose containers run."""

    cloud: ContainerCloud

    def start_job(self, name: str, body: dict[str, Any], nodes: int) -> list[Rented]:
        made = super().start_job(name, body, nodes)
        job = body["properties"]
        for machine in made:
            # the service's own process runs the command in a shell
            command = ["/bin/bash", "-c", job["command"]]
            self.cloud.run(machine.id, command, job["environmentVariables"])
        return made


class AzureBatchContainers(AzureBatchStandIn):
    """Jobs of Azure Batch whose tasks run. The machines stay in the pool after their tasks."""

    cloud: ContainerCloud

    def start_task(self, job: BatchJob, task: dict[str, Any]) -> None:
        settings = [*job.body["commonEnvironmentSettings"], *task["environmentSettings"]]
        self.cloud.run(
            job.machines[int(task["id"])],
            # the service runs the command line without a shell
            shlex.split(task["commandLine"]),
            {each["name"]: each["value"] for each in settings},
        )

    def exit_code(self, machine: Rented) -> int | None:
        return self.cloud.exit_code(machine.id)


def _expand(value: str) -> str:
    """The value that a container gets: `$$` is `$`, and no variable is referenced."""
    assert not re.search(r"(?<!\$)(\$\$)*\$\(", value)
    return value.replace("$$", "$")


@contextmanager
def vertex_user(cloud: ContainerCloud, root: Path) -> Iterator[tuple[User, VertexContainers]]:
    """A user of Vertex AI; nothing of theirs is left."""
    server = RestServer()
    api = VertexContainers(cloud, server)
    (root / "key.json").write_text(api.make_key_file())
    table = f"key_file = '{root / 'key.json'}'\nimage = 'train:1'\n"
    try:
        with managed_user(api.cloud, "vertex", f"endpoint = '{api.url}'\n{table}", root) as user:
            yield user, api
        assert api.bugs == []
    finally:
        server.close()


@contextmanager
def azureml_user(cloud: ContainerCloud, root: Path) -> Iterator[tuple[User, AzureMlContainers]]:
    """A user of Azure Machine Learning, on a machine with a managed identity; nothing of theirs is
    left.
    """
    server = RestServer()
    api = AzureMlContainers(cloud, server)
    places = {
        "endpoint": api.url,
        "history_endpoint": api.url,
        "prices_endpoint": api.url,
        "subscription": SUBSCRIPTION,
        "resource_group": GROUP,
        "workspace": WORKSPACE,
        "image": "train:1",
    }
    table = "".join(f"{name} = '{value}'\n" for name, value in places.items())
    with managed_user(api.cloud, "azureml", table, root) as user:
        user.variables = identity_variables(api.url)
        yield user, api
    assert api.bugs == []
    server.close()


@contextmanager
def azure_batch_user(
    pool: ContainerCloud, root: Path
) -> Iterator[tuple[User, AzureBatchContainers]]:
    """A user of Azure Batch, on a machine with a managed identity; nothing of theirs is left."""
    server = RestServer()
    api = AzureBatchContainers(pool, server)
    table = (
        f"endpoint = '{api.url}'\nprices_endpoint = '{api.url}'\nimage = 'train:1'\n"
        f"account = 'train.{REGION}'\nspot = true\n"
    )
    with managed_user(api.cloud, "azure-batch", table, root) as user:
        user.variables = identity_variables(api.url)
        yield user, api
    assert api.bugs == []
    server.close()


@contextmanager
def service_user(api: AwsStandIn, provider: str, table: str, root: Path) -> Iterator[User]:
    """A user of a service; nothing of theirs is left."""
    server = RestServer()
    table = f"regions = 'us-east-1'\nendpoint = '{server.add(api)}'\n{table}"  # type: ignore[arg-type]  # has `reply`
    with managed_user(api.cloud, provider, table, root) as user:
        user.variables = {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        yield user
    assert api.bugs == []
    server.close()


@contextmanager
def managed_user(cloud: MemoryCloud, provider: str, table: str, root: Path) -> Iterator[User]:
    """A user of a managed service, and of nothing else."""
    with user_at(root) as user:
        user.settings(
            f"[server]\ntls_listen = '127.0.0.1:{free_port()}'\n[providers.local]\n"
            f"enabled = false\n[providers.{provider}]\n{table}"
        )
        yield user
        user.cli("down", "--all", "--yes")
        wait_until(
            lambda: not cloud.billed() or user.cli("gc", code=None) is None,
            lambda: str(cloud.billed()),
            pause_s=0.5,
        )


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ContainerCloud]:
    monkeypatch.setattr(memory_cloud, "BOOT", timedelta(0))
    cloud = ContainerCloud(TRAITS, tmp_path / "containers")
    yield cloud
    cloud.close()


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ContainerCloud]:
    monkeypatch.setattr(memory_cloud, "BOOT", timedelta(0))
    cloud = ContainerCloud(TRAITS, tmp_path / "containers", pooled=True)
    yield cloud
    cloud.close()


@pytest.fixture
def sagemaker(cloud: ContainerCloud) -> SageMakerContainers:
    return SageMakerContainers(cloud)


@pytest.fixture
def sagemaker_user(sagemaker: SageMakerContainers, tmp_path: Path) -> Iterator[User]:
    table = f"role = '{ROLE}'\nbucket = 's3://bucket/cavvy'\nimage = '{IMAGE}'\n"
    with service_user(sagemaker, "sagemaker", table, tmp_path / "user") as user:
        yield user


@pytest.mark.proves(PROOF, "notice")
@pytest.mark.proves(PROOF, "spot")
def test_a_spot_training_on_sagemaker_survives_an_interruption(
    sagemaker: SageMakerContainers, sagemaker_user: User
) -> None:
    be_interrupted(sagemaker_user, sagemaker.cloud, sagemaker.interrupt)
    assert len(sagemaker.bodies) == 2
    assert all(body["EnableManagedSpotTraining"] for body in sagemaker.bodies.values())


def test_a_gang_on_ecs_is_a_task_for_each_rank(cloud: ContainerCloud, tmp_path: Path) -> None:
    ecs = EcsContainers(cloud)
    table = (
        f"cluster = '{CLUSTER}'\ncapacity = 'FARGATE'\nimage = '{IMAGE}'\n"
        "subnets = 'subnet-0123456789abcdef0'\n"
    )
    with service_user(ecs, "ecs", table, tmp_path / "user") as user:
        run_pair(user, cloud, "cpu: 2")
        assert len(ecs.runs) == 2


def run_pair(user: User, cloud: ContainerCloud, resources: str) -> None:
    """A job of two nodes, the second of which ends three seconds after the first, is done."""
    name = user.submit(
        f"name: pair\nnodes: 2\nresources: {{{resources}}}\n"
        'run: sleep $((3 * CAVVY_RANK)); echo "rank $CAVVY_RANK of $NNODES"\n',
        "--yes",
    )
    job = user.ended(name)
    assert job.phase == "done", cloud.logs()
    for rank in (0, 1):
        assert f"rank {rank} of 2" in user.log(name, "--rank", str(rank))


def test_a_gang_on_azure_batch_is_a_task_for_each_rank(
    pool: ContainerCloud, tmp_path: Path
) -> None:
    """The first rank's work ends sooner than the others'. The job loses its machines, although
    Azure Batch keeps it active after its last task.
    """
    with azure_batch_user(pool, tmp_path) as (user, batch):
        run_pair(user, pool, "gpu: T4")
        (made,) = batch.jobs.values()
        assert list(made.tasks) == ["0", "1"]
        wait_until(lambda: not pool.billed(), pool.logs)
        assert "terminate job" in batch.calls


def be_interrupted(user: User, cloud: ContainerCloud, interrupt: Callable[[], None]) -> None:
    """A training on spot instances loses them once, and has the same weights at its end."""
    write_digits(user.work)
    task = user.task(
        "name: digits\nresources: {gpu: T4, spot: only}\nworkdir: .\n"
        f"checkpoint: {{path: checkpoints, every: 2s}}\nenv: {{HOLDS: '1'}}\n"
        f"run: exec {sys.executable} slow.py {' '.join(ARGUMENTS)}\n"
    )
    user.cli("run", "-d", "--yes", task)
    user.wait("digits", "running")
    wait_until(lambda: "epoch   1/" in user.said("digits"), cloud.logs)
    interrupt()
    try:
        user.wait("digits", "done", LONG_S)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{cloud.logs()}") from error
    job = user.ended("digits")
    assert [each.outcome for each in job.attempts] == ["preempted", "succeeded"]
    log = user.log("digits")
    assert log.count("resumed at") == 1
    assert log.split("weights ")[1].split()[0] == train_undisturbed()


def test_the_first_rank_of_a_gang_on_aws_batch_may_end_before_the_others(
    cloud: ContainerCloud, tmp_path: Path
) -> None:
    """AWS Batch stops all nodes once the container of the main node has ended."""
    batch = BatchContainers(cloud)
    table = f"queues = 'gpu'\nimage = '{IMAGE}'\n"
    with service_user(batch, "aws-batch", table, tmp_path / "user") as user:
        name = user.submit(
            "name: pair\nnodes: 2\nresources: {gpu: T4}\n"
            'run: |\n  [ "$CAVVY_RANK" = 0 ] || sleep 6\n  echo "rank $CAVVY_RANK ends"\n',
            "--yes",
        )
        job = user.ended(name)
        assert [each.outcome for each in job.attempts] == ["succeeded"], cloud.logs()
        for rank in (0, 1):
            assert f"rank {rank} ends" in user.log(name, "--rank", str(rank))
        assert len(batch.bodies) == 1
