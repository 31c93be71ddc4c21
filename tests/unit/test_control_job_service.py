"""Users' requests on one job that arrive at the same time."""

import asyncio

import pytest
from tests.contract.store_suite import submit

from cavvy.control.clock import WallClock
from cavvy.control.deferred import Deferred
from cavvy.control.job_service import JobIds, JobService, TooLate
from cavvy.domain.checkpoints import RemovedCheckpoints
from cavvy.domain.jobs import Job, JobPhase
from cavvy.store.base import RowNotFound
from cavvy.store.memory import MemoryStore


def test_a_job_that_is_being_removed_cannot_be_retried() -> None:
    async def scenario() -> None:
        store, clock, crashes = MemoryStore(), WallClock(), [True, False]

        async def remove_checkpoints(job: Job) -> RemovedCheckpoints:
            with pytest.raises(TooLate, match="is being removed"):
                await jobs.retry("p", "train")
            if crashes.pop(0):
                raise TimeoutError
            return RemovedCheckpoints(bytes=5)

        jobs = JobService(
            Deferred(store),
            clock,
            JobIds(clock),
            hint=lambda key: None,
            arrived=lambda: None,
            notify=lambda job_id, what: None,
            remove_checkpoints=remove_checkpoints,
        )
        await submit(store, "j", phase=JobPhase.FAILED)
        with pytest.raises(TimeoutError):
            await jobs.remove("p", "train")
        with pytest.raises(TooLate, match="is being removed"):
            await jobs.retry("p", "train")
        assert (await jobs.remove("p", "train"))[1] == RemovedCheckpoints(bytes=5)
        with pytest.raises(RowNotFound):
            await store.find_job("p", "train")

    asyncio.run(scenario())
