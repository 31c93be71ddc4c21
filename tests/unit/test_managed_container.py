"""How a container of a managed service learns its rank: from variables, or from the file that the
service writes.
"""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from cavvy.providers.aws_batch.service import BatchService
from cavvy.providers.managed.remote.container import find_address, read_place
from cavvy.providers.managed.service import HostList
from cavvy.providers.sagemaker.service import SageMakerService


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


def test_a_host_without_an_address_has_none() -> None:
    assert find_address("") == ""
    assert find_address("localhost") == "127.0.0.1"
