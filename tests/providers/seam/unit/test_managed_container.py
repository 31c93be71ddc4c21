"""How a container of a managed service learns its rank: from variables, or from the file that the
service writes.
"""

import json
import signal
import socket
from pathlib import Path

import pytest
from tests.providers.aws.unit.test_ecs_notices import gang, publish_to

from cavvy.domain.offers import Purchase
from cavvy.domain.values import asdict, replace
from cavvy.providers.aws_batch import BatchService
from cavvy.providers.azureml.jobs import AzureMlService
from cavvy.providers.ecs import EcsService
from cavvy.providers.managed import container
from cavvy.providers.managed.container import find_address, read_place, stay
from cavvy.providers.managed.provider import make_container_script
from cavvy.providers.managed.service import HostList, ManagedService
from cavvy.providers.sagemaker.jobs import SageMakerService
from cavvy.providers.vertex.jobs import VertexService


def test_sagemakers_file_gives_the_rank(tmp_path: Path) -> None:
    """The hosts are listed in the order of their names: algo-1, algo-10, algo-2."""
    file = tmp_path / "resourceconfig.json"
    hosts = sorted(f"algo-{number}" for number in range(1, 13))
    source = asdict(HostList(hosts="SM_HOSTS", current="SM_CURRENT_HOST", file=str(file)))
    for rank, host in enumerate(f"algo-{number}" for number in range(1, 13)):
        file.write_text(json.dumps({"current_host": host, "hosts": hosts}))
        assert read_place(source) == (rank, host)


def test_sagemakers_variables_give_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM_HOSTS", '["algo-1", "algo-2"]')
    monkeypatch.setenv("SM_CURRENT_HOST", "algo-2")
    assert read_place(asdict(SageMakerService.traits.hosts)) == (1, "algo-2")


def test_the_index_of_a_multi_node_job_is_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    source = asdict(BatchService.traits.hosts)
    monkeypatch.delenv("AWS_BATCH_JOB_NODE_INDEX", raising=False)
    assert read_place(source) == (0, "")
    monkeypatch.setenv("AWS_BATCH_JOB_NODE_INDEX", "3")
    assert read_place(source) == (3, "")


@pytest.mark.parametrize(
    ("pool", "index", "rank"), [("workerpool0", 0, 0), ("workerpool1", 0, 1), ("workerpool1", 1, 2)]
)
def test_the_pools_of_a_custom_job_give_the_rank(
    monkeypatch: pytest.MonkeyPatch, pool: str, index: int, rank: int
) -> None:
    source = asdict(VertexService.traits.hosts)
    monkeypatch.delenv("CLUSTER_SPEC", raising=False)
    assert read_place(source) == (0, "")
    cluster = {
        "workerpool0": ["cmle-training-workerpool0-ab-0:2222"],
        "workerpool1": [f"cmle-training-workerpool1-ab-{number}:2222" for number in (0, 1)],
    }
    told = {"cluster": cluster, "environment": "cloud", "task": {"type": pool, "index": index}}
    monkeypatch.setenv("CLUSTER_SPEC", json.dumps(told))
    assert read_place(source) == (rank, f"cmle-training-{pool}-ab-{index}")


@pytest.mark.parametrize(
    ("service", "stays"),
    [
        (BatchService, True),
        (VertexService, True),
        (AzureMlService, True),
        (EcsService, False),
        (SageMakerService, False),
    ],
)
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_first_container_stays_where_its_end_ends_all_others(
    service: type[ManagedService], stays: bool, nodes: int
) -> None:
    published: list[bytes] = []
    asked = replace(gang("gpu", Purchase.ON_DEMAND), nodes=nodes)
    make_container_script(asked, publish_to(published), service.traits, "the service")
    expected = json.dumps({"first_stays": stays and nodes > 1})[1:-1]
    assert expected in published[-1].decode()


def test_the_first_container_ends_if_the_server_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    stay(f"https://127.0.0.1:{port}", 0.2)


def test_the_first_container_does_not_stay_once_it_was_asked_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(container, "ENDED_BY", [])
    container.pass_on(signal.SIGTERM, None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        stay(f"https://127.0.0.1:{server.getsockname()[1]}", 3600)


def test_a_host_without_an_address_has_none() -> None:
    assert find_address("") == ""
    assert find_address("localhost") == "127.0.0.1"
