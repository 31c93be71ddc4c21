"""Faults of Azure Batch: one about one job neither hides the other jobs nor leaves machines behind."""

from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
from tests.providers.azure.contract.test_provider_azure_batch import AzureBatchPlace

from cavvy.providers.base import GangState, Refused
from cavvy.providers.contract.rest_stand_in import RestRequest, RestServer
from cavvy.providers.vm.cloud import CloudFault

MINUTE = timedelta(minutes=1)
WRONG = CloudFault(400, "InvalidPropertyValue", "The value is not valid.")
GONE = CloudFault(404, "JobNotFound", "The specified job does not exist.")
Fail = Callable[[RestRequest], tuple[CloudFault, bool] | None]


def fail_at(method: str, end: str, fault: CloudFault) -> Fail:
    """Fails requests whose path has this end, without an effect."""

    def fail(request: RestRequest) -> tuple[CloudFault, bool] | None:
        hit = request.method == method and request.path.endswith(end)
        return (fault, False) if hit else None

    return fail


@pytest.fixture
def batch(rest_server: RestServer, tmp_path: Path) -> Iterator[AzureBatchPlace]:
    with closing(AzureBatchPlace(rest_server, tmp_path)) as place:
        yield place


async def test_a_list_with_a_failed_read_raises_the_errors_of_the_interface(
    batch: AzureBatchPlace,
) -> None:
    harness = batch.harness()
    gangs = [await harness.running(name) for name in ("one", "two")]
    await batch.wait(MINUTE)
    batch.api.fail = fail_at("GET", "/tasks", WRONG)
    with pytest.raises(Refused, match="InvalidPropertyValue"):
        await harness.ours.gangs()
    batch.api.fail = lambda _: None
    for each in gangs:
        await harness.remove(each.name)


async def test_a_job_that_is_deleted_between_the_list_and_its_tasks_hides_no_other(
    batch: AzureBatchPlace,
) -> None:
    harness = batch.harness()
    deleted = await harness.running("deleted")
    name = str(batch.newest().body["id"])
    other = await harness.running("other")
    await batch.wait(MINUTE)

    def delete(request: RestRequest) -> tuple[CloudFault, bool] | None:
        if request.path != f"/jobs/{name}/tasks":
            return None
        if job := batch.api.jobs.pop(name, None):
            for each in job.machines:
                batch.cloud.change(each, ended=batch.cloud.time)
        return GONE, False

    batch.api.fail = delete
    seen = {each.name: each.state for each in await harness.ours.gangs()}
    assert seen[other.name] is GangState.RUNNING
    batch.api.fail = lambda _: None
    await batch.wait(MINUTE)
    seen = {each.name: each.state for each in await harness.ours.gangs()}
    assert seen.get(deleted.name) is not GangState.RUNNING
    assert seen[other.name] is GangState.RUNNING
    await harness.remove(other.name)


async def test_a_job_whose_tasks_are_not_found_is_shown_and_ended(batch: AzureBatchPlace) -> None:
    """Its machines are billed as long as the job exists."""
    harness = batch.harness()
    gang = await harness.running("lost")
    other = await harness.running("other")
    await batch.wait(timedelta(minutes=10))
    (name, *_) = batch.api.jobs
    batch.api.fail = fail_at("GET", f"{name}/tasks", GONE)
    for _ in range(2):
        seen = {each.name: each.state for each in await harness.ours.gangs()}
        assert seen == {gang.name: GangState.RUNNING, other.name: GangState.RUNNING}
        await batch.wait(MINUTE)
    service_sees = {each.name: each.state for each in await harness.ours.gangs(gang.name)}
    assert service_sees == {gang.name: GangState.RUNNING}
    await harness.ours.remove(gang.name)
    await batch.wait(MINUTE)
    await harness.ours.gangs()
    assert batch.billed() == 1
    await harness.remove(other.name)


async def test_a_job_whose_tasks_are_refused_is_ended_at_once(batch: AzureBatchPlace) -> None:
    harness = batch.harness()
    gang = await harness.spec("refused")
    batch.api.fail = fail_at("POST", "/addtaskcollection", WRONG)
    with pytest.raises(Refused, match="InvalidPropertyValue"):
        await harness.ours.launch(gang)
    assert batch.billed() == 0


async def test_a_job_whose_missing_tasks_are_refused_is_ended_and_hides_no_other(
    batch: AzureBatchPlace,
) -> None:
    """The server stopped between the request for the job and that for its tasks."""
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


async def test_an_ended_job_that_cannot_be_deleted_hides_no_other(batch: AzureBatchPlace) -> None:
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
