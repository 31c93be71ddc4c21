"""Uploads to files that do not answer leave the threads of other requests alone."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self, cast

import pytest
from tests.api.api_state import Api, open_api, until

COUNT = 64


class SilentFiles:
    """Files in a bucket that does not answer until `answers` is set."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.asked = 0

    def of(self, project: str) -> Self:
        return self

    def writer(self, blob: str) -> Self:
        self.asked += 1
        return self

    def __enter__(self) -> Self:
        self.answers.wait()
        return self

    def write(self, part: bytes) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api("memory", tmp_path) as api:
        yield api


async def test_other_threads_are_free_while_uploads_wait(api: Api) -> None:
    files = SilentFiles()
    api.app_state.blobs = cast("Any", files)

    async def upload(number: int) -> int:
        url = f"/v1/projects/default/blobs/{number:064x}"
        return (await api.http.put(url, content=b"x")).status_code

    uploads = [asyncio.create_task(upload(number)) for number in range(COUNT)]

    async def have_arrived() -> bool:
        return files.asked == COUNT

    try:
        await until(have_arrived)
        async with asyncio.timeout(20):
            assert await asyncio.to_thread(lambda: "free") == "free"
    finally:
        files.answers.set()
        statuses = await asyncio.gather(*uploads)
    assert statuses == [204] * COUNT
