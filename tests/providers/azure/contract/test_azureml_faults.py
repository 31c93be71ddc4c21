"""Faults of Azure's public list of prices, as the provider for Azure Machine Learning meets them."""

from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
from tests.providers.azure.contract.test_provider_azureml import AzureMlPlace

from cavvy.providers.contract.rest_stand_in import RestRequest, RestServer
from cavvy.providers.vm.cloud import CloudFault


@pytest.fixture
def workspace(rest_server: RestServer, tmp_path: Path) -> Iterator[AzureMlPlace]:
    with closing(AzureMlPlace(rest_server, tmp_path)) as place:
        yield place


async def test_a_list_of_prices_that_fails_is_not_read_for_each_cluster(
    workspace: AzureMlPlace,
) -> None:
    """A read may take seconds, and offers have a time limit."""
    asked: list[str] = []

    def fail(request: RestRequest) -> tuple[CloudFault, bool] | None:
        if request.path == "/api/retail/prices":
            asked.append(request.query["$filter"])
            return CloudFault(503, "ServiceUnavailable", "later"), False
        return None

    provider = workspace.provider("ours")
    workspace.api.fail = fail
    for _ in range(2):
        assert {each.zone for each in await provider.offers()} == {"cpu", "gpu", "tiny"}
    assert len(asked) == 1
    workspace.api.fail = lambda _: None
    await workspace.wait(timedelta(minutes=6))
    assert "gpu-low" in {each.zone for each in await provider.offers()}
