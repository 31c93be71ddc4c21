"""What nodes get requests for: the files that their own task names, each for a quarter of an hour,
while it lasts.

And what counts of that which they have sent to a bucket themselves: what is as large, or has the
content, as was told.
"""

import asyncio
import hashlib
import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import cast
from urllib.parse import parse_qs, urlsplit

import pytest
from tests.contract.store_suite import NOW, begin, make_node, submit

from cavvy.control.agents.checkpoints import CheckpointDesk, Missing
from cavvy.control.agents.data import DataDesk
from cavvy.control.agents.vault import Vault, Vaults
from cavvy.control.clock import Clock
from cavvy.domain.checkpoints import CheckpointFile, SavedCheckpoint
from cavvy.domain.jobs import Attempt, AttemptPhase, Job
from cavvy.domain.tasks import Checkpoint, Task, Transfer
from cavvy.store.base import Changes, Mismatch, NotFound
from cavvy.store.memory import MemoryStore
from cavvy.store.objects import threads
from cavvy.store.objects.base import Found, ObjectDenied, ObjectTrouble, Signed
from cavvy.store.objects.places import Found as Place

KEYS = {
    "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "x",
    "AWS_ENDPOINT_URL_S3": "http://s3.test",
}
TASK = Task(
    name="t",
    run="x",
    inputs=(Transfer(source="s3://b/in/", target="data"),),
    outputs=(Transfer(source="out", target="s3://b/out/"),),
    checkpoint=Checkpoint(path="c", storage="s3://b/kept"),
)


class Noon:
    def now(self) -> datetime:
        return NOW


async def no_secrets(project: str, names: Sequence[str]) -> dict[str, str]:
    return {}


async def make_desk() -> tuple[DataDesk, MemoryStore, Attempt]:
    store = MemoryStore(make_id=lambda: "test")
    attempt = await begin(store, await submit(store, "j", task=TASK))
    return DataDesk(store, cast(Clock, Noon()), no_secrets, KEYS), store, attempt


def meant(signed: Signed) -> tuple[str, str, list[str]]:
    """The deed, the object, and for how many seconds."""
    parts = urlsplit(signed.url)
    return signed.method, parts.path, parse_qs(parts.query)["X-Amz-Expires"]


def test_a_request_is_for_one_file_of_the_task_and_a_quarter_of_an_hour() -> None:
    async def story() -> None:
        desk, _, attempt = await make_desk()
        assert meant(await desk.sign(attempt.gang, 0, "a/b.bin")) == (
            "GET",
            "/b/in/a/b.bin",
            ["900"],
        )
        part = await desk.sign_part(attempt.gang, 0, "r.txt", "upload", 2)
        assert meant(part) == ("PUT", "/b/out/r.txt", ["900"])
        assert parse_qs(urlsplit(part.url).query)["uploadId"] == ["upload"]

    asyncio.run(story())


@pytest.mark.parametrize("path", ["../kept/secret", "a/../../secret", "/secret", "..", "a\0b"])
def test_no_request_leaves_what_the_task_names(path: str) -> None:
    async def story() -> None:
        desk, _, attempt = await make_desk()
        with pytest.raises(ObjectDenied, match="leaves what the task names"):
            await desk.sign(attempt.gang, 0, path)
        with pytest.raises(ObjectDenied, match="leaves what the task names"):
            await desk.sign_part(attempt.gang, 0, path, "", 1)

    asyncio.run(story())


def test_nothing_is_signed_that_the_task_has_not_or_for_an_attempt_that_is_over() -> None:
    async def story() -> None:
        desk, store, attempt = await make_desk()
        for index in (-1, 1):
            with pytest.raises(NotFound, match="no such transfer"):
                await desk.sign(attempt.gang, index, "a")
        await desk.sign(attempt.gang, 0, "a")
        await store.commit(Changes(attempts=[replace(attempt, phase=AttemptPhase.ENDED)]))
        with pytest.raises(NotFound, match="attempt 1 is over"):
            await desk.sign(attempt.gang, 0, "a")

    asyncio.run(story())


def test_checkpoints_in_a_bucket_are_each_jobs_own() -> None:
    async def story() -> None:
        store, name = MemoryStore(make_id=lambda: "test"), "5" * 64
        for job_id in ("j", "k"):
            job = await submit(store, job_id, task=TASK)
            vault = await Vaults(no_secrets, KEYS, lambda: NOW).open(job)
            assert vault is not None
            path = f"/b/kept/p/{job_id}/blobs/{name}"
            assert meant(vault.sign_get(name)) == ("GET", path, ["900"])
            assert meant(vault.sign_part(name, "upload", 1)) == ("PUT", path, ["900"])

    asyncio.run(story())


class Drawer:
    """A bucket in memory."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}

    def head(self, key: str) -> Found | None:
        return Found(key=key, size=len(self.held[key])) if key in self.held else None

    def list(self, prefix: str, after: str = "", limit: int = 1000) -> tuple[Sequence[Found], str]:
        return [
            Found(key=key, size=len(data))
            for key, data in self.held.items()
            if key.startswith(prefix)
        ], ""

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        return self.held[key]

    def put(self, key: str, data: bytes) -> None:
        self.held[key] = data

    def delete(self, key: str) -> None:
        self.held.pop(key, None)

    def begin(self, key: str) -> str:
        return "upload"

    def complete(self, key: str, upload: str, tags: Sequence[str]) -> None:
        return

    def abort(self, key: str, upload: str) -> None:
        return

    def sign_get(self, key: str, expires_s: int) -> Signed:
        return Signed(method="GET", url=key)

    def sign_put(self, key: str, expires_s: int, upload: str = "", part: int = 0) -> Signed:
        return Signed(method="PUT", url=key)


@pytest.mark.parametrize("arrived", [b"", b"12", b"1234", None])
def test_what_arrived_shorter_or_longer_does_not_count(
    arrived: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawer = Drawer()
    monkeypatch.setattr(
        "cavvy.control.agents.data.open_place", lambda *_: Place(place=drawer, key="out/")
    )

    async def story() -> None:
        desk, _, attempt = await make_desk()
        vault = Vault(drawer, "")
        for key in ("out/r", "f") if arrived is not None else ():
            drawer.held[key] = arrived or b""
        with pytest.raises(ObjectTrouble, match="3 bytes were sent and"):
            await desk.complete(attempt.gang, 0, "r", "", [], 3)
        with pytest.raises(ObjectTrouble, match="3 bytes were sent and"):
            vault.complete("f", "upload", [], 3)
        drawer.held |= {"out/r": b"123", "f": b"123"}
        await desk.complete(attempt.gang, 0, "r", "", [], 3)
        vault.complete("f", "upload", [], 3)

    asyncio.run(story())


class OneVault(Vaults):
    """Every job's, over one bucket."""

    def __init__(self, drawer: Drawer) -> None:
        self._drawer = drawer

    async def open(self, job: Job) -> Vault:
        return Vault(self._drawer, f"{job.id}/")


def test_a_checkpoint_in_a_bucket_counts_when_all_of_it_is_there_as_it_was_told() -> None:
    async def story() -> None:
        drawer, store = Drawer(), MemoryStore(make_id=lambda: "test")
        attempt = await begin(store, await submit(store, "j", task=TASK))
        await store.commit(Changes(nodes=[make_node(attempt, claim="n")]))
        desk = CheckpointDesk(
            store,
            cast(Clock, Noon()),
            None,
            storage=lambda job: "",
            shares_files=lambda name: False,
            vaults=OneVault(drawer),
        )
        name = hashlib.sha256(b"state").hexdigest()
        files = [CheckpointFile(path="a", sha256=name, size=5)]
        for half in (None, b"sta", b"state and more"):
            drawer.held = {} if half is None else {f"j/{name}": half}
            assert await desk.commit(attempt.gang, 0, "n", files, NOW) == Missing(blobs=[name])
        assert await desk.latest(attempt.gang) is None
        drawer.held = {f"j/{name}": b"state"}
        saved = await desk.commit(attempt.gang, 0, "n", files, NOW)
        assert isinstance(saved, SavedCheckpoint)
        assert sorted(drawer.held) == sorted([f"j/{name}", f"j/{saved.manifest}"])
        drawer.held[f"j/{saved.manifest}"] = drawer.held[f"j/{saved.manifest}"].replace(
            b'"a"', b'"b"'
        )
        with pytest.raises(Mismatch, match="was changed in the bucket"):
            await desk.latest(attempt.gang)

    asyncio.run(story())


def test_a_checkpoint_is_safe_where_the_bucket_lets_nothing_be_removed_and_its_user_is_told_once() -> (
    None
):
    class Hoard(Drawer):
        def delete(self, key: str) -> None:
            raise ObjectDenied("the bucket b: status 403 (AccessDenied)")

    async def story() -> None:
        drawer, store = Hoard(), MemoryStore(make_id=lambda: "test")
        attempt = await begin(store, await submit(store, "j", task=TASK))
        await store.commit(Changes(nodes=[make_node(attempt, claim="n")]))
        desk = CheckpointDesk(
            store,
            cast(Clock, Noon()),
            None,
            storage=lambda job: "",
            shares_files=lambda name: False,
            vaults=OneVault(drawer),
        )
        for content in (b"one", b"two", b"three", b"four"):
            name = hashlib.sha256(content).hexdigest()
            drawer.held[f"j/{name}"] = content
            files = [CheckpointFile(path="a", sha256=name, size=len(content))]
            assert isinstance(await desk.commit(attempt.gang, 0, "n", files, NOW), SavedCheckpoint)
        assert [each.number for each in await store.checkpoints("j")] == [4, 3]
        told = [each.text for each in await store.events("j") if "stays in the bucket" in each.text]
        assert len(told) == 1
        assert told[0].endswith("status 403 (AccessDenied)")

    asyncio.run(story())


def test_a_storage_that_never_answers_holds_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "LIMIT_S", 0.1)

    async def story() -> None:
        never = threading.Event()
        try:
            asked = [asyncio.create_task(threads.in_thread(never.wait)) for _ in range(60)]
            await asyncio.sleep(0.02)
            assert await asyncio.wait_for(asyncio.to_thread(lambda: 1), 5) == 1
            found = await asyncio.gather(*asked, return_exceptions=True)
            assert {type(each) for each in found} == {ObjectTrouble}
            assert "the storage does not answer" in str(found[0])
            assert f"was not asked for 0.1 s: {threads.COUNT} requests wait" in str(found[-1])
        finally:
            never.set()

    asyncio.run(story())
