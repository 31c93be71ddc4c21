"""Users' requests on one job that arrive at the same time."""

from collections.abc import Awaitable, Callable

import pytest
from tests.contract.store_suite import submit
from tests.records import make_job_record

from cavvy.control.agents.checkpoints import find_sources
from cavvy.control.clock import WallClock
from cavvy.control.deferred import Deferred
from cavvy.control.job_service import JobIds, JobService, TooLate, skip_newer
from cavvy.domain.checkpoints import RemovedCheckpoints, SavedCheckpoint
from cavvy.domain.jobs import JobPhase, JobRecord
from cavvy.store.base import AtomicWrite, RowNotFound, StoreError, StoreFull, StoreUnusable
from cavvy.store.open import MemoryStore


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


class BusyStore(MemoryStore):
    """Stores no change while an error is set."""

    error: StoreError | None = None

    async def commit(self, write: AtomicWrite) -> None:
        if self.error is not None:
            raise self.error
        await super().commit(write)


class Paper:
    """What would be left of the stops if the server died now."""

    def __init__(self) -> None:
        self.stops: dict[str, str] = {}

    def read(self) -> dict[str, str]:
        return self.stops

    def write(self, stops: dict[str, str]) -> None:
        self.stops = stops


async def keep_checkpoints(job: JobRecord) -> RemovedCheckpoints:
    return RemovedCheckpoints()


def make_jobs(
    store: Deferred, remove: Callable[[JobRecord], Awaitable[RemovedCheckpoints]]
) -> JobService:
    clock = WallClock()
    return JobService(
        store,
        clock,
        JobIds(clock),
        hint=lambda key: None,
        arrived=lambda: None,
        notify=lambda job_id, what: None,
        remove_files=remove,
    )


async def test_a_stop_on_a_full_disk_outlives_a_database_that_another_process_locks() -> None:
    store, paper = BusyStore(), Paper()
    deferred = Deferred(store, paper)
    jobs = make_jobs(deferred, keep_checkpoints)
    await submit(store, "j", phase=JobPhase.RUNNING)
    store.error = StoreFull("no space")
    await jobs.stop("p", "train")
    assert list(paper.stops) == ["j"]
    store.error = StoreUnusable("another process has locked the database")
    await deferred.write_pending()
    assert (await deferred.job("j")).phase is JobPhase.STOPPING
    assert list(paper.stops) == ["j"]
    store.error = None
    await deferred.write_pending()
    assert (await store.job("j")).phase is JobPhase.STOPPING
    assert paper.stops == {}


async def test_removing_a_job_frees_a_full_disk() -> None:
    store = FullStore()

    async def remove_checkpoints(job: JobRecord) -> RemovedCheckpoints:
        store.full = False
        with pytest.raises(TooLate, match="is being removed"):
            await jobs.retry("p", "train")
        return RemovedCheckpoints(bytes=5)

    jobs = make_jobs(Deferred(store), remove_checkpoints)
    await submit(store, "j", phase=JobPhase.FAILED)
    assert (await jobs.remove("p", "train"))[1] == RemovedCheckpoints(bytes=5)
    with pytest.raises(RowNotFound):
        await store.find_job("p", "train")


async def test_a_job_that_is_being_removed_cannot_be_retried() -> None:
    store, crashes = MemoryStore(), [True, False]

    async def remove_checkpoints(job: JobRecord) -> RemovedCheckpoints:
        with pytest.raises(TooLate, match="is being removed"):
            await jobs.retry("p", "train")
        if crashes.pop(0):
            raise TimeoutError
        return RemovedCheckpoints(bytes=5)

    jobs = make_jobs(Deferred(store), remove_checkpoints)
    await submit(store, "j", phase=JobPhase.FAILED)
    with pytest.raises(TimeoutError):
        await jobs.remove("p", "train")
    with pytest.raises(TooLate, match="is being removed"):
        await jobs.retry("p", "train")
    assert (await jobs.remove("p", "train"))[1] == RemovedCheckpoints(bytes=5)
    with pytest.raises(RowNotFound):
        await store.find_job("p", "train")


def test_a_retry_names_the_stored_checkpoint_from_which_it_continues() -> None:
    job = make_job_record(WallClock().now(), skipped_checkpoints=(2,))
    saved = [
        SavedCheckpoint(
            job_id=job.id,
            project=job.project,
            number=number,
            attempt=number,
            manifest="",
            files=1,
            bytes=1,
            made_at=job.since,
            saved_at=job.since,
        )
        for number in (3, 2)
    ]
    assert [each.number for each in find_sources(saved, job)] == [3]
    chosen = skip_newer(job, saved, 2)
    assert [each.number for each in find_sources(saved, chosen)] == [2]
    assert find_sources(saved, chosen, 2) == [], "only checkpoints of earlier attempts"
    with pytest.raises(TooLate, match="has no stored checkpoint 1") as caught:
        skip_newer(job, saved, 1)
    assert caught.value.hint == "stored checkpoints: 2, 3"
