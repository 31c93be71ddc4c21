"""Results in buckets are removed, also if one of them cannot be removed or the job is gone."""

from datetime import timedelta
from typing import cast

import pytest
from tests.contract.store_suite import NOW, begin, make_node, submit

from cavvy.control.agents.bucket_checkpoints import BucketCheckpointOpener
from cavvy.control.agents.deposit_records import DepositedResults
from cavvy.control.agents.uploads import RECORDS_OWNER
from cavvy.domain.jobs import Attempt, AttemptPhase
from cavvy.store.base import AtomicWrite
from cavvy.store.objects.base import (
    ObjectBucket,
    ObjectDenied,
    ObjectError,
    ObjectInfo,
    ObjectTryAgain,
)
from cavvy.store.open import MemoryStore

URL = "s3://data/results"


class FakeBucket:
    """A bucket that raises `fault` for keys that contain one of the names in `faults`."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.faults: dict[str, ObjectError] = {}

    def list(self, prefix: str, after: str = "") -> tuple[list[ObjectInfo], str]:
        if "list" in self.faults:
            raise self.faults["list"]
        return [ObjectInfo(key=key, size=1) for key in self.objects if key.startswith(prefix)], ""

    def delete(self, key: str) -> None:
        for name, fault in self.faults.items():
            if name in key:
                raise fault
        self.objects.pop(key, None)


class Rig(BucketCheckpointOpener):
    """The records of a server whose projects all use one bucket."""

    def __init__(self) -> None:
        self.bucket, self.store = FakeBucket(), MemoryStore(make_id=lambda: "test")
        super().__init__(self._no_secrets, {}, lambda: NOW)
        self.results = DepositedResults(self.store, self, NOW)

    async def _no_secrets(self, project: str, names: object) -> dict[str, str]:
        return {}

    async def open_folder(
        self, project: str, job_id: str, url: str, folder: str
    ) -> tuple[ObjectBucket, str]:
        assert url == URL
        return cast(ObjectBucket, self.bucket), f"{project}/{job_id}/{folder}"

    async def end(self, job_id: str, project: str, *, before_s: float = 0) -> Attempt:
        """An ended attempt with one object in the bucket. An attempt from before the server made
        records has none.
        """
        submitted = NOW - timedelta(seconds=before_s)
        job = await submit(self.store, job_id, project=project, name=job_id, submitted_at=submitted)
        attempt = await begin(self.store, job, phase=AttemptPhase.ENDED)
        self.bucket.objects[f"{project}/{job_id}/results/1/0/0"] = b"x"
        if not before_s:
            await self.results.record(attempt, URL)
        return attempt

    async def records(self) -> int:
        return len(await self.store.provider_documents(RECORDS_OWNER, "results"))


@pytest.mark.parametrize("fault", [ObjectDenied("403"), ObjectTryAgain("503")])
async def test_an_object_that_stays_stops_no_other_project(fault: ObjectError) -> None:
    rig = Rig()
    await rig.end("ja", "a")
    await rig.end("jb", "b")
    rig.bucket.faults["ja"] = fault
    await rig.results.sweep()
    assert list(rig.bucket.objects) == ["a/ja/results/1/0/0"]
    assert await rig.records() == 1


async def test_a_missing_right_for_one_object_stops_no_other_attempt() -> None:
    rig = Rig()
    await rig.end("ja", "a")
    await rig.end("jb", "a")
    rig.bucket.faults["ja"] = ObjectDenied("403")
    await rig.results.sweep()
    assert list(rig.bucket.objects) == ["a/ja/results/1/0/0"]


@pytest.mark.parametrize("kept", [False, True])
async def test_results_that_stayed_when_their_job_was_removed_are_removed_later(kept: bool) -> None:
    rig = Rig()
    attempt = await rig.end("ja", "a")
    if kept:  # the results of this rank were not applied
        await rig.store.commit(AtomicWrite(nodes=[make_node(attempt)]))
        await rig.results.remove_attempt(await rig.store.job("ja"), attempt)
    rig.bucket.faults["ja"] = ObjectTryAgain("503")
    job = await rig.store.job("ja")
    assert await rig.results.remove_job(job) == f"{URL}: 503"
    await rig.store.remove_job(job)
    await rig.results.sweep()
    assert (len(rig.bucket.objects), await rig.records()) == (1, 1)
    rig.bucket.faults.clear()
    await rig.results.sweep()
    assert (len(rig.bucket.objects), await rig.records()) == (0, 0)


async def test_results_from_before_the_server_made_records_are_removed() -> None:
    rig = Rig()
    ended = await rig.end("ja", "a", before_s=60)
    await rig.end("jb", "a", before_s=60)
    await rig.results.remove_attempt(await rig.store.job("ja"), ended, URL)
    assert list(rig.bucket.objects) == ["a/jb/results/1/0/0"]
    later = DepositedResults(rig.store, rig, NOW + timedelta(days=1))  # the next server
    assert await later.remove_job(await rig.store.job("jb"), URL) == ""
    assert not rig.bucket.objects


async def test_a_job_without_records_needs_no_bucket_if_the_server_made_records() -> None:
    rig = Rig()
    await rig.results.sweep()
    job = await submit(rig.store, "ja")
    later = DepositedResults(rig.store, rig, NOW + timedelta(days=1))  # the next server
    rig.bucket.faults["list"] = ObjectTryAgain("503")
    assert await later.remove_job(job, URL) == ""
