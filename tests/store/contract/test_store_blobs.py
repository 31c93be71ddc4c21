"""Blobs are there whole, under their true hash, or not at all."""

import errno
import json
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

import pytest

from cavvy.store.base import HashMismatch, RowNotFound, StoreFull
from cavvy.store.blobs import BlobStore, sweep_folders


def name_of(data: bytes) -> str:
    return sha256(data).hexdigest()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def test_a_blob_comes_back(store: BlobStore, tmp_path: Path) -> None:
    name = name_of(b"abc")
    assert store.missing([name, name]) == [name]
    store.put(name, [b"a", b"", b"bc"])
    store.put(name, [b"abc"])
    assert store.missing([name, name_of(b"x")]) == [name_of(b"x")]
    with store.open(name) as file:
        assert file.read() == b"abc"
    assert store.path(name).read_bytes() == b"abc"
    assert store.path(name).stat().st_mode & 0o777 == 0o600
    assert files(tmp_path) == [name]


def test_the_empty_blob(store: BlobStore) -> None:
    store.put(name_of(b""), [])
    assert store.missing([name_of(b"")]) == []


def test_other_bytes_are_refused(store: BlobStore, tmp_path: Path) -> None:
    with pytest.raises(HashMismatch, match="send them again"):
        store.put(name_of(b"abc"), [b"abd"])
    assert files(tmp_path) == []


@pytest.mark.parametrize("name", ["", "../../x", "ab", "A" * 64, "g" * 64, "a" * 64 + "\n"])
def test_a_name_is_a_hash(store: BlobStore, name: str) -> None:
    for ask in (
        lambda: store.put(name, [b""]),
        lambda: store.missing([name]),
        lambda: store.open(name),
    ):
        with pytest.raises(HashMismatch):
            ask()


def test_what_is_not_there_is_not_found(store: BlobStore) -> None:
    for ask in (store.open, store.path):
        with pytest.raises(RowNotFound):
            ask("0" * 64)


def test_an_upload_that_breaks_off_leaves_nothing(store: BlobStore, tmp_path: Path) -> None:
    def broken() -> Iterator[bytes]:
        yield b"ab"
        assert store.missing([name_of(b"abc")]) == [name_of(b"abc")]
        raise ConnectionError

    with pytest.raises(ConnectionError):
        store.put(name_of(b"abc"), broken())
    assert files(tmp_path) == []


def test_two_uploads_of_one_blob_do_not_meet(store: BlobStore, tmp_path: Path) -> None:
    with store.writer(name_of(b"abc")) as first, store.writer(name_of(b"abc")) as second:
        first.write(b"ab")
        second.write(b"abc")
        first.write(b"c")
    assert files(tmp_path) == [name_of(b"abc")]


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_stores_nothing(
    store: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreFull):
        store.put(name_of(b"abc"), [b"abc"])
    assert files(tmp_path) == []
    monkeypatch.undo()
    store.put(name_of(b"abc"), [b"abc"])


def test_a_sweep_keeps_what_is_wanted_or_young(store: BlobStore, tmp_path: Path) -> None:
    blobs = [b"wanted", b"old", b"young"]
    for data in blobs:
        store.put(name_of(data), [data])
    now = time.time()
    for data in blobs[:2]:
        os.utime(store.path(name_of(data)), (now - 7200, now - 7200))
    (store.path(name_of(b"old")).parent / "x.part").write_bytes(b"12345")
    os.utime(store.path(name_of(b"old")).parent / "x.part", (now - 7200, now - 7200))
    limit = datetime.fromtimestamp(now, UTC) - timedelta(hours=1)
    assert store.sweep({name_of(b"wanted")}, older_than=limit) == len(b"old") + 5
    assert files(tmp_path) == sorted([name_of(b"wanted"), name_of(b"young")])


def test_parts_of_working_folders_that_no_job_has_are_forgotten_and_the_others_kept(
    store: BlobStore,
) -> None:
    kept, lost = (
        json.dumps(
            {"files": [{"path": "a", "sha256": name_of(x)}, {"path": "l", "link": "a"}]}
        ).encode()
        for x in (b"kept", b"lost")
    )
    for data in (kept, b"kept", lost, b"lost", b"young"):
        store.put(name_of(data), [data])
        if data != b"young":
            os.utime(store.path(name_of(data)), (1000, 1000))
    limit = datetime.fromtimestamp(2000, UTC)
    store.put(name_of(b"no manifest"), [b"no manifest"])
    assert sweep_folders(store, {name_of(kept), name_of(b"no manifest")}, older_than=limit) == 0
    named = {name_of(kept), "0" * 64, "bogus", ""}
    assert sweep_folders(store, named, older_than=limit) == len(lost) + len(b"lost")
    assert store.missing([name_of(x) for x in (kept, b"kept", b"young")]) == []
    assert store.missing([name_of(lost), name_of(b"lost")]) == [name_of(lost), name_of(b"lost")]


def test_a_blob_put_again_is_young_again(store: BlobStore) -> None:
    """A submission that relies on a blob from before keeps it from a sweep that runs at the same
    time.
    """
    name = name_of(b"abc")
    store.put(name, [b"abc"])
    os.utime(store.path(name), (1000, 1000))
    assert store.missing([name]) == []
    assert store.sweep(set(), older_than=datetime.fromtimestamp(2000, UTC)) == 0


def test_parts_make_a_blob_and_outlive_the_process(tmp_path: Path) -> None:
    data = b"0123456789"
    name = sha256(data).hexdigest()
    assert BlobStore(tmp_path).append(name, 0, data[:4], 10) == 4
    again = BlobStore(tmp_path)
    assert again.append(name, 6, data[6:], 10) == 4  # a gap: go on from 4
    assert again.missing([name]) == [name]
    assert again.append(name, 2, data[2:9], 10) == 9  # overlapping is fine
    assert again.append(name, 9, data[9:], 10) == 10
    with again.open(name) as file:
        assert file.read() == data
    assert again.append(name, 0, b"xxxx", 10) == 10  # it is here
    assert [path.name for path in tmp_path.glob("??/*")] == [name]


def test_parts_of_another_blob_leave_nothing(tmp_path: Path) -> None:
    store, name = BlobStore(tmp_path), sha256(b"right").hexdigest()
    with pytest.raises(HashMismatch, match="send them again"):
        store.append(name, 0, b"wrong", 5)
    assert list(tmp_path.glob("??/*")) == []
    assert store.append(name, 0, b"right", 5) == 5


def test_many_small_blobs_are_put_together(store: BlobStore, tmp_path: Path) -> None:
    blobs = {name_of(data): data for data in (b"", b"a", b"b" * 1000)}
    store.put(name_of(b"a"), [b"a"])
    os.utime(store.path(name_of(b"a")), (1000, 1000))
    store.put_all(blobs)
    store.put_all(blobs)
    store.put_all({})
    assert {name: store.path(name).read_bytes() for name in blobs} == blobs
    assert {store.path(name).stat().st_mode & 0o777 for name in blobs} == {0o600}
    assert files(tmp_path) == sorted(blobs)
    assert (
        store.sweep(set(), older_than=datetime.fromtimestamp(2000, UTC)) == 0
    )  # those from before are young again


def test_one_wrong_blob_keeps_all_of_them_out(store: BlobStore, tmp_path: Path) -> None:
    for wrong in ({name_of(b"x"): b"y"}, {"../../x": b"y"}):
        with pytest.raises(HashMismatch, match="send them again"):
            store.put_all({name_of(b"a"): b"a", **wrong})
    assert files(tmp_path) == []


def test_many_blobs_are_on_the_disk_before_any_has_its_name(
    store: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = {name_of(data): data for data in (b"a", b"b", b"c")}
    sync, synced = os.fsync, list[str]()

    def watch(file: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        if path.is_file():
            assert store.missing(blobs) == list(blobs)
            synced.append(path.name[:64])
        else:
            assert store.missing(blobs) == []
            synced.append(path.name)
        sync(file)

    monkeypatch.setattr(os, "fsync", watch)
    store.put_all(blobs)
    assert sorted(synced) == sorted([*blobs, *{name[:2] for name in blobs}])


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_stores_none_of_many(store: BlobStore, tmp_path: Path) -> None:
    with pytest.raises(StoreFull):
        store.put_all({name_of(data): data for data in (b"a", b"b")})
    assert files(tmp_path) == []


def test_small_blobs_are_read(store: BlobStore) -> None:
    store.put(name_of(b"abc"), [b"abc"])
    assert store.read(name_of(b"abc"), 3) == b"abc"
    assert store.read(name_of(b"abc"), 2) is None
    assert store.read(name_of(b"x"), 3) is None
    with pytest.raises(HashMismatch):
        store.read("../x", 3)
