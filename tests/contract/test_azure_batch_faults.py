"""Faults of Azure Batch: one about one job neither hides the other jobs nor leaves machines behind."""

import asyncio
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from tests.contract.rest_stand_in import RestRequest, RestServer
from tests.contract.test_provider_azure_batch import AzureBatchPlace

from cavvy.providers.base import GangState, Refused
from cavvy.providers.vm.cloud import CloudFault

MINUTE = timedelta(minutes=1)
WRONG = CloudFault(400, "InvalidPropertyValue", "The value is not valid.")
Fail = Callable[[RestRequest], tuple[CloudFault, bool] | None]


def fail_at(method: str, end: str, fault: CloudFault) -> Fail:
    """Fails requests whose path has this end, without an effect."""

    def fail(request: RestRequest) -> tuple[CloudFault, bool] | None:
        hit = request.method == method and request.path.endswith(end)
        return (fault, False) if hit else None

    return fail


@pytest.fixture
def batch(rest_server: RestServer, tmp_path: Path) -> Iterator[AzureBatchPlace]:
    place = AzureBatchPlace(rest_server, tmp_path)
    yield place
    place.close()


def test_a_list_with_a_failed_read_raises_the_errors_of_the_interface(
    batch: AzureBatchPlace,
) -> None:
    async def scenario() -> None:
        harness = batch.harness()
        gangs = [await harness.running(name) for name in ("one", "two")]
        await batch.wait(MINUTE)
        batch.api.fail = fail_at("GET", "/tasks", WRONG)
        with pytest.raises(Refused, match="InvalidPropertyValue"):
            await harness.ours.gangs()
        batch.api.fail = lambda _: None
        for each in gangs:
            await harness.remove(each.name)

    asyncio.run(scenario())


def test_a_job_whose_tasks_are_refused_is_ended_at_once(batch: AzureBatchPlace) -> None:
    async def scenario() -> None:
        harness = batch.harness()
        gang = await harness.spec("refused")
        batch.api.fail = fail_at("POST", "/addtaskcollection", WRONG)
        with pytest.raises(Refused, match="InvalidPropertyValue"):
            await harness.ours.launch(gang)
        assert batch.billed() == 0

    asyncio.run(scenario())


def test_a_job_whose_missing_tasks_are_refused_is_ended_and_hides_no_other(
    batch: AzureBatchPlace,
) -> None:
    """The server stopped between the request for the job and that for its tasks."""

    async def scenario() -> None:
        harness = batch.harness()
        other = await harness.running("other")
        halved = await harness.running("halved", nodes=3)
        batch.newest().tasks.clear()
        await batch.wait(MINUTE)
        batch.api.fail = fail_at("POST", "/addtaskcollection", WRONG)
        for _ in range(2):
            await batch.wait(MINUTE)
            seen = {each.name: each for each in await harness.ours.gangs()}
        assert seen[other.name].state is GangState.RUNNING
        assert seen[halved.name].state is GangState.ENDED
        assert "refused the tasks" in seen[halved.name].reason
        assert batch.billed() == 1
        await harness.remove(other.name)

    asyncio.run(scenario())


def test_an_ended_job_that_cannot_be_deleted_hides_no_other(batch: AzureBatchPlace) -> None:
    async def scenario() -> None:
        harness = batch.harness()
        await harness.running("old")
        await batch.end("old")
        await batch.wait(MINUTE)
        await harness.ours.gangs()
        await batch.wait(timedelta(hours=7))
        denied = CloudFault(403, "AuthorizationFailure", "The caller lacks a permission.")
        batch.api.fail = lambda request: (denied, False) if request.method == "DELETE" else None
        await harness.ours.gangs()
        assert batch.api.deleted == []

    asyncio.run(scenario())
