"""Unusual replies of Amazon ECS."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.contract.aws_contract import PRICES
from tests.contract.aws_service import Answer, aws_front
from tests.contract.ecs_stand_in import EcsStandIn
from tests.providers.aws.contract.test_provider_ecs import TABLE, TRAITS, EcsPlace

from cavvy.providers.base import NoCapacity, Refused, TryAgain
from cavvy.providers.contract import ContractHarness
from cavvy.providers.contract.rest_stand_in import RestServer
from cavvy.providers.contract.vm_contract import VmContract
from cavvy.providers.ecs import MANIFEST, EcsService, read_task
from cavvy.providers.ecs.capacity import parse_capacity
from cavvy.providers.managed.service import JobState

START = datetime(2026, 11, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


@pytest.fixture
def cluster(rest_server: RestServer, tmp_path: Path) -> Iterator[EcsPlace]:
    with aws_front(rest_server, MANIFEST, TABLE) as front:
        place = EcsPlace(TRAITS, tmp_path, EcsStandIn, EcsService, MANIFEST, front, PRICES)
        yield place
        assert place.api.bugs == []
        assert place.cloud.billed() == []


async def test_a_cluster_with_too_many_waiting_tasks_has_no_capacity(cluster: EcsPlace) -> None:
    harness = ContractHarness(cluster, VmContract().lose_reply)
    gang = await harness.spec("waits")
    message = "Tasks provisioning capacity limit exceeded."
    cluster.api.refusal = Answer("ClientException", message)
    with pytest.raises(NoCapacity, match=message):
        await harness.ours.launch(gang)
    assert cluster.api.definitions == {}


async def test_a_request_that_was_made_with_other_settings_is_repeated_later(
    cluster: EcsPlace,
) -> None:
    """The next list shows the task of the earlier request, whose reply was lost."""
    harness = ContractHarness(cluster, VmContract().lose_reply)
    gang = await harness.spec("twice")
    cluster.api.refusal = Answer("ConflictException", "The token is already in use.")
    with pytest.raises(TryAgain):
        await harness.ours.launch(gang)
    cluster.api.refusal = None
    await harness.launch(gang)
    await harness.remove(gang.name)


def test_a_task_whose_image_is_cached_is_billed_from_its_start() -> None:
    told = {
        "taskArn": "arn:aws:ecs:us-east-1:123456789012:task/training/1",
        "taskDefinitionArn": "arn:aws:ecs:us-east-1:123456789012:task-definition/cv-x:1",
        "createdAt": START,
        "startedAt": START + MINUTE,
        "lastStatus": "RUNNING",
    }
    job = read_task(told)
    assert (job.state, job.started_at) == (JobState.RUNNING, START + MINUTE)
    job = read_task({**told, "lastStatus": "STOPPED", "stoppedAt": START + 3 * MINUTE})
    assert (job.started_at, job.ended_at) == (START + MINUTE, START + 3 * MINUTE)


def test_a_capacity_provider_with_two_types_is_refused() -> None:
    with pytest.raises(Refused, match="gpu is named twice"):
        parse_capacity({"capacity": "FARGATE, gpu=g5.xlarge, gpu=g4dn.xlarge/spot"})
