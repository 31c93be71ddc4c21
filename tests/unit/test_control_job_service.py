"""Users' requests on one job that arrive at the same time."""

import asyncio

import pytest
from tests.contract.store_suite import submit

from cavvy.control.clock import WallClock
from cavvy.control.deferred import Deferred
from cavvy.control.job_service import JobIds, JobService, TooLate
from cavvy.domain.checkpoints import RemovedCheckpoints
from cavvy.domain.jobs import JobPhase, JobRecord
from cavvy.store.base import AtomicWrite, RowNotFound, StoreFull
from cavvy.store.memory import MemoryStore


class FullStore(MemoryStore):
    """Stores no change until files are deleted."""

    full = True

    async def commit(self, write: AtomicWrite) -> None:
        if self.full:
            raise StoreFull("no space")
        await super().commit(write)

    async def remove_job(self, job: JobRecord) -> None:
        if self.full:
            raise StoreFull("no space")
        await super().remove_job(job)


def test_removing_a_job_frees_a_full_disk() -> None:
    async def scenario() -> None:
        store, clock = FullStore(), WallClock()

        async def remove_checkpoints(job: JobRecord) -> RemovedCheckpoints:
            store.full = False
            with pytest.raises(TooLate, match="is being removed"):
                await jobs.retry("p", "train")
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
        assert (await jobs.remove("p", "train"))[1] == RemovedCheckpoints(bytes=5)
        with pytest.raises(RowNotFound):
            await store.find_job("p", "train")

    asyncio.run(scenario())


def test_a_job_that_is_being_removed_cannot_be_retried() -> None:
    async def scenario() -> None:
        store, clock, crashes = MemoryStore(), WallClock(), [True, False]

        async def remove_checkpoints(job: JobRecord) -> RemovedCheckpoints:
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
