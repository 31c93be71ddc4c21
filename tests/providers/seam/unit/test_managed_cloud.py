"""How the jobs of a managed service count as machines."""

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest

from cavvy.providers.managed.provider import ManagedCloud
from cavvy.providers.managed.service import (
    HostList,
    JobState,
    ManagedService,
    ServiceJob,
    ServiceTraits,
)

OURS = "cv-0123456789-train-abcd-0-2"


class Listing:
    """A service that lists these jobs."""

    traits = ServiceTraits(hosts=HostList())

    def __init__(self, *names: str) -> None:
        self.names = names

    async def list(self) -> Sequence[ServiceJob]:
        return [ServiceJob(id=f"here/{n}", name=n, state=JobState.RUNNING) for n in self.names]


def list_names(*names: str) -> list[str]:
    cloud = ManagedCloud(cast(ManagedService, Listing(*names)))
    return [each.name for each in asyncio.run(cloud.list())]


def test_each_instance_of_a_job_is_a_machine() -> None:
    assert list_names(OURS) == [OURS, "cv-0123456789-train-abcd-1-2"]


@pytest.mark.parametrize(
    "name", ["cv-50", "cv-", "cv-0-1", "cv-x-0-3", "cv-resnet-50", "cv-a-b-c-0-99999999", "other"]
)
def test_jobs_with_names_of_others_are_skipped(name: str) -> None:
    assert len(list_names(name, OURS)) == 2
