"""Logs in a bucket that does not answer: the rest of the server goes on."""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.api.api_state import open_api
from tests.memory_bucket import MemoryBucket
from tests.waits import PATIENCE_S

from cavvy.store.bucket_folder import BucketFolder
from cavvy.store.bucket_logs import BucketLogs
from cavvy.store.objects import threads
from cavvy.store.objects.base import ObjectInfo

JOB = "/v1/projects/default/jobs/t"


class SilentBucket(MemoryBucket):
    """A bucket that accepts requests and answers them only after `ends`."""

    def __init__(self, now: datetime) -> None:
        super().__init__(now)
        self.ends = threading.Event()
        self.asked: list[int] = []  # by which threads

    def list(
        self, prefix: str, after: str = "", limit: int = 1000
    ) -> tuple[Sequence[ObjectInfo], str]:
        self.asked.append(threading.get_ident())
        self.ends.wait(5)
        return super().list(prefix, after, limit)


async def test_a_silent_bucket_of_logs_delays_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "LIMIT_S", 0.1)
    bucket = SilentBucket(datetime(2026, 1, 1, tzinfo=UTC))
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    async with open_api("memory", tmp_path) as api:
        folder = BucketFolder(bucket, "s3://b", "", tmp_path, lambda: bucket.now)
        made = await api.submit("{name: t, run: 'true'}")
        gang = (await api.attempt(made["id"])).gang
        api.app_state.logs = BucketLogs(folder)
        try:
            appends = [
                api.http.post(
                    "/agent/v1/log",
                    params={"gang": gang, "rank": 0, "offset": 0},
                    content=b"line\n",
                    headers=api.agent(gang),
                )
                for _ in range(3)
            ]
            reads = [
                api.http.get(f"{JOB}/logs", params={"attempt": 1, **each})
                for each in ({}, {"tail_bytes": 9}, {"since": "2026-01-01T00:00Z"})
            ]
            waiting = [asyncio.ensure_future(each) for each in (*appends, *reads)]
            secret = api.http.put("/v1/projects/default/secrets/S", json={"value": "v" * 9})
            assert (await asyncio.wait_for(secret, PATIENCE_S)).status_code in (200, 201, 204)
            answers = await asyncio.gather(*waiting)
            assert {each.status_code for each in answers} == {503}
            assert {each.json()["code"] for each in answers} == {"database-unusable"}
            assert bucket.asked, "the bucket was asked"
            assert threading.get_ident() not in bucket.asked, "the event loop waited for it"
        finally:
            bucket.ends.set()
