"""What nodes get requests for: the files that their own task names, each for a quarter of an hour,
while it lasts.

And what counts of that which they have sent to a bucket themselves: what is as large, or has the
content, as was told.
"""

import asyncio
import hashlib
import os
import threading
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import ClassVar, cast
from urllib.parse import parse_qs, urlsplit

import pytest
from tests.contract.store_suite import NOW, begin, make_node, submit
from tests.waits import PATIENCE_S

from cavvy.control.agents.bucket_checkpoints import BucketCheckpointOpener, BucketCheckpoints
from cavvy.control.agents.checkpoints import Checkpoints, FilesMissing
from cavvy.control.agents.transfers import Transfers
from cavvy.control.clock import ControlClock
from cavvy.domain.checkpoints import CheckpointFile, RemovedCheckpoints, SavedCheckpoint
from cavvy.domain.jobs import Attempt, AttemptPhase, JobRecord
from cavvy.domain.tasks import CheckpointPolicy, TaskSpec, Transfer
from cavvy.domain.values import replace
from cavvy.store.base import AtomicWrite, HashMismatch, RowNotFound, StoreFull, StoreUnusable
from cavvy.store.checkpoint_folders import CheckpointFolders
from cavvy.store.objects import threads
from cavvy.store.objects.base import ObjectDenied, ObjectInfo, ObjectTryAgain, SignedRequest
from cavvy.store.objects.locations import OWN_FILES
from cavvy.store.objects.locations import ObjectLocation as Place
from cavvy.store.open import MemoryStore

KEYS = {
    "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "x",
    "AWS_ENDPOINT_URL_S3": "http://s3.test",
}
TASK = TaskSpec(
    name="t",
    run="x",
    inputs=(Transfer(source="s3://b/in/", target="data"),),
    outputs=(Transfer(source="out", target="s3://b/out/"),),
    checkpoint=CheckpointPolicy(path="c", storage="s3://b/kept"),
)


class Noon:
    def now(self) -> datetime:
        return NOW


async def no_secrets(project: str, names: Sequence[str]) -> dict[str, str]:
    return {}


async def make_transfers(own: str = "") -> tuple[Transfers, MemoryStore, Attempt]:
    store = MemoryStore(make_id=lambda: "test")
    attempt = await begin(store, await submit(store, "j", task=TASK))
    keys = {**KEYS, OWN_FILES: own}
    return Transfers(store, cast(ControlClock, Noon()), no_secrets, keys), store, attempt


def meant(signed: SignedRequest) -> tuple[str, str, list[str]]:
    """The deed, the object, and for how many seconds."""
    parts = urlsplit(signed.url)
    return signed.method, parts.path, parse_qs(parts.query)["X-Amz-Expires"]


async def test_a_request_is_for_one_file_of_the_task_and_a_quarter_of_an_hour() -> None:
    transfers, _, attempt = await make_transfers()
    assert meant((await transfers.input(attempt.gang, 0)).sign_get("a/b.bin")) == (
        "GET",
        "/b/in/a/b.bin",
        ["900"],
    )
    part = (await transfers.output(attempt.gang, 0)).sign_part("r.txt", "upload", 2)
    assert meant(part) == ("PUT", "/b/out/r.txt", ["900"])
    assert parse_qs(urlsplit(part.url).query)["uploadId"] == ["upload"]


async def test_no_request_is_for_the_servers_own_files() -> None:
    transfers, _, attempt = await make_transfers("s3://b/in")
    with pytest.raises(ObjectDenied, match="the server stores its own files"):
        await transfers.input(attempt.gang, 0)
    with pytest.raises(ObjectDenied, match="the server stores its own files"):
        await transfers.open_url("default", "s3://b/")
    await transfers.output(attempt.gang, 0)

    async def open_checkpoints(url: str) -> None:
        opener = BucketCheckpointOpener(
            no_secrets, {**KEYS, OWN_FILES: "s3://b/kept/own"}, Noon().now
        )
        await opener.open_folder("p", "j", url, "blobs/")

    await open_checkpoints("s3://b/other")
    with pytest.raises(ObjectDenied, match="the server stores its own files"):
        await open_checkpoints("s3://b/kept")


@pytest.mark.parametrize("path", ["../kept/secret", "a/../../secret", "/secret", "..", "a\0b"])
async def test_no_request_leaves_what_the_task_names(path: str) -> None:
    transfers, _, attempt = await make_transfers()
    with pytest.raises(ObjectDenied, match="is outside the URL that the task names"):
        (await transfers.input(attempt.gang, 0)).sign_get(path)
    with pytest.raises(ObjectDenied, match="is outside the URL that the task names"):
        (await transfers.output(attempt.gang, 0)).sign_part(path, "", 1)


async def test_nothing_is_signed_that_the_task_has_not_or_for_an_attempt_that_is_over() -> None:
    transfers, store, attempt = await make_transfers()
    for index in (-1, 1):
        with pytest.raises(RowNotFound, match="no input or output with the number"):
            await transfers.input(attempt.gang, index)
    await transfers.input(attempt.gang, 0)
    await store.commit(AtomicWrite(attempts=[replace(attempt, phase=AttemptPhase.ENDED)]))
    with pytest.raises(RowNotFound, match="attempt 1 has ended"):
        await transfers.input(attempt.gang, 0)


async def test_checkpoints_in_a_bucket_are_each_jobs_own() -> None:
    store, name = MemoryStore(make_id=lambda: "test"), "5" * 64
    for job_id in ("j", "k"):
        job = await submit(store, job_id, task=TASK)
        bucket_checkpoints = await BucketCheckpointOpener(no_secrets, KEYS, lambda: NOW).open(job)
        assert bucket_checkpoints is not None
        path = f"/b/kept/p/{job_id}/blobs/{name}"
        assert meant(bucket_checkpoints.file(name).sign_get()) == ("GET", path, ["900"])
        assert meant(bucket_checkpoints.file(name).sign_part("", "upload", 1)) == (
            "PUT",
            path,
            ["900"],
        )


class Drawer:
    """A bucket in memory."""

    bills_parts: ClassVar = True

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}

    def head(self, key: str) -> ObjectInfo | None:
        return ObjectInfo(key=key, size=len(self.held[key])) if key in self.held else None

    def list(
        self, prefix: str, after: str = "", limit: int = 1000
    ) -> tuple[Sequence[ObjectInfo], str]:
        return [
            ObjectInfo(key=key, size=len(data))
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

    def sign_get(self, key: str, expires_s: int) -> SignedRequest:
        return SignedRequest(method="GET", url=key)

    def sign_put(self, key: str, expires_s: int, upload: str = "", part: int = 0) -> SignedRequest:
        return SignedRequest(method="PUT", url=key)


@pytest.mark.parametrize("arrived", [b"", b"12", b"1234", None])
async def test_what_arrived_shorter_or_longer_does_not_count(
    arrived: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawer = Drawer()
    monkeypatch.setattr(
        "cavvy.control.agents.transfers.open_place", lambda *_: Place(place=drawer, key="out/")
    )
    transfers, _, attempt = await make_transfers()
    output = await transfers.output(attempt.gang, 0)
    file = BucketCheckpoints(drawer, "").file("f")
    for key in ("out/r", "f") if arrived is not None else ():
        drawer.held[key] = arrived or b""
    with pytest.raises(ObjectTryAgain, match="3 bytes were sent, but"):
        output.complete("r", "", [], 3)
    with pytest.raises(ObjectTryAgain, match="3 bytes were sent, but"):
        file.complete("", "upload", [], 3)
    drawer.held |= {"out/r": b"123", "f": b"123"}
    output.complete("r", "", [], 3)
    file.complete("", "upload", [], 3)


class OneVault(BucketCheckpointOpener):
    """Every job's, over one bucket."""

    def __init__(self, drawer: Drawer) -> None:
        self._drawer = drawer

    async def open(self, job: JobRecord) -> BucketCheckpoints:
        return BucketCheckpoints(self._drawer, f"{job.id}/")


async def begin_saving(drawer: Drawer) -> tuple[MemoryStore, Attempt, Checkpoints]:
    """A running job whose checkpoints go to the bucket."""
    store = MemoryStore(make_id=lambda: "test")
    attempt = await begin(store, await submit(store, "j", task=TASK))
    await store.commit(AtomicWrite(nodes=[make_node(attempt, claim="n")]))
    checkpoints = Checkpoints(
        store,
        cast(ControlClock, Noon()),
        None,
        storage=lambda job: "",
        shares_files=lambda name: False,
        bucket_opener=OneVault(drawer),
    )
    return store, attempt, checkpoints


async def test_a_checkpoint_in_a_bucket_counts_when_all_of_it_is_there_as_it_was_told() -> None:
    drawer = Drawer()
    _, attempt, transfers = await begin_saving(drawer)
    name = hashlib.sha256(b"state").hexdigest()
    files = [CheckpointFile(path="a", sha256=name, size=5)]
    for half in (None, b"sta", b"state and more"):
        drawer.held = {} if half is None else {f"j/{name}": half}
        assert await transfers.commit(attempt.gang, 0, "n", files, NOW) == FilesMissing(
            blobs=[name]
        )
    assert await transfers.latest(attempt.gang) is None
    drawer.held = {f"j/{name}": b"state"}
    saved = await transfers.commit(attempt.gang, 0, "n", files, NOW)
    assert isinstance(saved, SavedCheckpoint)
    assert sorted(drawer.held) == sorted([f"j/{name}", f"j/{saved.manifest}"])
    drawer.held[f"j/{saved.manifest}"] = drawer.held[f"j/{saved.manifest}"].replace(b'"a"', b'"b"')
    with pytest.raises(HashMismatch, match="has changed in the bucket"):
        await transfers.latest(attempt.gang)


async def test_a_checkpoint_is_safe_where_the_bucket_lets_nothing_be_removed_and_its_user_is_told_once() -> (
    None
):
    class Hoard(Drawer):
        def delete(self, key: str) -> None:
            raise ObjectDenied("the bucket b: status 403 (AccessDenied)")

    drawer = Hoard()
    store, attempt, transfers = await begin_saving(drawer)
    for content in (b"one", b"two", b"three", b"four"):
        name = hashlib.sha256(content).hexdigest()
        drawer.held[f"j/{name}"] = content
        files = [CheckpointFile(path="a", sha256=name, size=len(content))]
        assert isinstance(await transfers.commit(attempt.gang, 0, "n", files, NOW), SavedCheckpoint)
    assert [each.number for each in await store.checkpoints("j")] == [4, 3]
    told = [each.text for each in await store.events("j") if "stay in the bucket" in each.text]
    assert len(told) == 1
    assert told[0].endswith("status 403 (AccessDenied)")


async def save(drawer: Drawer, *contents: bytes) -> tuple[Checkpoints, JobRecord]:
    """A job with one checkpoint in the bucket."""
    store, attempt, checkpoints = await begin_saving(drawer)
    names = [hashlib.sha256(content).hexdigest() for content in contents]
    drawer.held |= {f"j/{name}": data for name, data in zip(names, contents, strict=True)}
    files = [
        CheckpointFile(path=name, sha256=name, size=len(data))
        for name, data in zip(names, contents, strict=True)
    ]
    saved = await checkpoints.commit(attempt.gang, 0, "n", files, NOW)
    assert isinstance(saved, SavedCheckpoint)
    return checkpoints, await store.job("j")


async def test_removing_a_job_takes_as_long_as_its_bucket_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Slow(Drawer):
        """Deletes nothing until two objects are being deleted at the same time."""

        def delete(self, key: str) -> None:
            together.wait(PATIENCE_S)
            super().delete(key)

    together = threading.Barrier(2)
    drawer = Slow()
    checkpoints, job = await save(drawer, b"state")
    held = sum(map(len, drawer.held.values()))
    monkeypatch.setattr(threads, "LIMIT_S", 0)
    # the removal because of its age leaves users' buckets alone
    assert await checkpoints.remove(job, from_bucket=False) == RemovedCheckpoints()
    assert await checkpoints.remove(job) == RemovedCheckpoints(bytes=held)
    assert drawer.held == {}


async def test_removing_a_job_counts_what_it_deleted_before_the_bucket_failed() -> None:
    class Failing(Drawer):
        """Deletes two objects."""

        def delete(self, key: str) -> None:
            with one_by_one:
                if len(self.held) <= left:
                    raise ObjectTryAgain("status 503")
                super().delete(key)

    one_by_one, left = threading.Lock(), 0
    drawer = Failing()
    checkpoints, job = await save(drawer, b"one", b"three", b"four")
    held, left = sum(map(len, drawer.held.values())), len(drawer.held) - 2
    removed = await checkpoints.remove(job)
    assert removed.bytes == held - sum(map(len, drawer.held.values())) > 0
    assert removed.kept == "s3://b/kept: status 503"
    left = 0
    assert (await checkpoints.remove(job)).kept == ""


async def test_removing_a_job_deletes_its_files_before_its_rows_if_the_disk_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawer = Drawer()
    checkpoints, job = await save(drawer, b"state")
    forget = checkpoints._store.forget_checkpoints

    async def forget_if_empty(job_id: str) -> None:
        if drawer.held:
            raise StoreFull("no space")
        await forget(job_id)

    monkeypatch.setattr(checkpoints._store, "forget_checkpoints", forget_if_empty)
    assert (await checkpoints.remove(job)).bytes > 0
    assert drawer.held == {}
    assert await checkpoints._store.checkpoints(job.id) == []


async def test_a_job_whose_bucket_cannot_be_opened_can_be_removed(tmp_path: Path) -> None:
    async def unreadable(project: str, names: Sequence[str]) -> dict[str, str]:
        raise StoreUnusable("the secret AWS_SECRET_ACCESS_KEY cannot be decrypted")

    store = MemoryStore(make_id=lambda: "test")
    job = await submit(store, "j", task=TASK)
    folders = CheckpointFolders(tmp_path)
    checkpoints = Checkpoints(
        store,
        cast(ControlClock, Noon()),
        folders,
        storage=lambda job: str(tmp_path / job.project / job.id),
        shares_files=lambda name: False,
        bucket_opener=BucketCheckpointOpener(unreadable, KEYS, lambda: NOW),
    )
    folders.keep("p", "j", [])
    held = sum(each.stat().st_size for each in tmp_path.rglob("*") if each.is_file())
    removed = await checkpoints.remove(job)
    kept = "s3://b/kept: the secret AWS_SECRET_ACCESS_KEY cannot be decrypted"
    assert removed == RemovedCheckpoints(bytes=held, kept=kept)


def test_a_folder_is_removed_while_its_files_vanish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = CheckpointFolders(tmp_path)
    folder = tmp_path / "p" / "j" / "checkpoint"
    folder.mkdir(parents=True)
    for name in ("a", "b"):
        (folder / name).write_bytes(b"12345")
    lstat = os.lstat

    def look(path: str | Path, *, dir_fd: int | None = None) -> os.stat_result:
        if str(path).endswith("/a"):
            (folder / "a").unlink(missing_ok=True)
        return lstat(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "lstat", look)
    assert folders.remove("p", "j") == RemovedCheckpoints(bytes=5)
    assert not (tmp_path / "p" / "j").exists()


async def test_removing_a_job_deletes_its_own_checkpoints_in_the_bucket_or_says_why_not() -> None:
    class Refusing(Drawer):
        def delete(self, key: str) -> None:
            raise ObjectDenied("status 403 (AccessDenied)")

    for drawer in (Drawer(), Refusing()):
        drawer.held = {"k/other": b"state"}
        checkpoints, job = await save(drawer, b"state")
        held = sum(len(data) for key, data in drawer.held.items() if key.startswith("j/"))
        found = await checkpoints.remove(job)
        assert await checkpoints.latest("rm-j-1") is None
        if isinstance(drawer, Refusing):
            kept = "s3://b/kept: status 403 (AccessDenied)"
            assert found == RemovedCheckpoints(bytes=0, kept=kept)
        else:
            assert found == RemovedCheckpoints(bytes=held)
            assert list(drawer.held) == ["k/other"]
            assert await checkpoints.remove(job) == RemovedCheckpoints()


async def test_a_storage_that_never_answers_holds_up_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "LIMIT_S", 0.1)
    never = threading.Event()
    try:
        asked = [asyncio.create_task(threads.in_thread(never.wait)) for _ in range(60)]
        await asyncio.sleep(0.02)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: 1), PATIENCE_S) == 1
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(each) for each in found} == {ObjectTryAgain}
        assert "the storage did not answer" in str(found[0])
        assert f"was not sent within 0.1 s: {threads.COUNT} requests are waiting" in str(found[-1])
    finally:
        never.set()
