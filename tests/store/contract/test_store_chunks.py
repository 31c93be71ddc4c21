"""Blobs that are stored as chunks come back whole, share what they have in common, and lose nothing
when a server is killed or removes others at the same time."""

import os
import random
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

import pytest

from cavvy.server.backup import list_files
from cavvy.store.base import RowNotFound, StoreUnusable
from cavvy.store.blobs import BlobStore, ProjectBlobs, sweep_folders
from cavvy.store.chunks import CHUNK, divide
from cavvy.store.encrypted_files.data_keys import SERVER_KEY, FileKeyPlaces, FileKeys

OLD, LIMIT = 1000, datetime.fromtimestamp(2000, UTC)
PART = 30_000
CUTS = [PART * each for each in range(1, 4)]


class Killed(BaseException):
    """The server ends here."""


def name_of(data: bytes) -> str:
    return sha256(data).hexdigest()


def make(*seeds: int) -> bytes:
    return b"".join(random.Random(seed).randbytes(PART) for seed in seeds)


def publish(store: BlobStore, data: bytes) -> str:
    """Do what a client and the server do, and return the name."""
    name = name_of(data)
    store.put(name, [data])
    assert store.missing([name]) == []
    assert store.split(name, lambda _: CUTS)
    return name


def read(store: BlobStore, name: str) -> bytes:
    with store.open(name) as file:
        return file.read()


def weigh(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def lists(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if ".chunks" in path.name]


def age(root: Path) -> None:
    for path in root.rglob("*"):
        if path.is_file():
            os.utime(path, (OLD, OLD))


def make_store(root: Path, encrypted: bool = False) -> BlobStore:
    places = FileKeyPlaces(common=SERVER_KEY)
    keys = FileKeys(root / "file-keys", root / "key", places) if encrypted else None
    return ProjectBlobs(root / "folders", keys).of("p")


@contextmanager
def at_each_step(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None], root: Path
) -> Iterator[None]:
    """Call `act` with the number of the step before each change of a file below `root`, and before
    each look at one."""
    steps, busy = [0], [False]

    def wrap(call: Callable[..., object]) -> Callable[..., object]:
        def do(*args: object, **more: object) -> object:
            if busy[0] or not str(args[0]).startswith(str(root)):
                return call(*args, **more)
            busy[0] = True
            try:
                act(steps[0])
            finally:
                steps[0] += 1
                busy[0] = False
            return call(*args, **more)

        return do

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)  # many runs, of which no power is cut
        for name in ("rename", "replace", "link", "unlink", "stat", "utime", "open"):
            patch.setattr(os, name, wrap(getattr(os, name)))
        patch.setattr(Path, "open", wrap(Path.open))
        yield


@pytest.mark.parametrize("encrypted", [False, True])
def test_what_versions_share_is_stored_once_and_each_range_comes_back(
    tmp_path: Path, encrypted: bool
) -> None:
    store = make_store(tmp_path, encrypted)
    one, two = make(1, 2, 3, 4), make(1, 2, 9, 4)
    name = publish(store, one)
    before = weigh(tmp_path / "folders")
    other = publish(store, two)
    assert PART <= weigh(tmp_path / "folders") - before < 1.02 * PART
    assert (read(store, name), read(store, other)) == (one, two)
    assert store.path(name) is None
    assert (store.read(name, len(one)), store.read(name, len(one) - 1)) == (one, None)
    with store.open(other) as file:
        for place in (0, PART - 1, PART, 2 * PART - 5, len(two) - 3, len(two), len(two) + 9):
            file.seek(place)
            assert file.read(PART + 10) == two[place : place + PART + 10]
        assert file.seek(-PART - 1, os.SEEK_END) == len(two) - PART - 1
        assert file.read() == two[-PART - 1 :]
    written = {path: path.stat().st_ino for path in tmp_path.rglob("*")}
    assert publish(store, one) == name
    assert {path: path.stat().st_ino for path in tmp_path.rglob("*")} == written
    assert store.append(name, 0, b"x", len(one)) == len(one)


def test_files_that_earlier_servers_stored_whole_and_small_ones_are_read_as_they_are(
    tmp_path: Path,
) -> None:
    store, data = make_store(tmp_path), make(1, 2)
    store.put(name_of(data), [data])
    store.put(name_of(b"small"), [b"small"])
    assert not store.split(name_of(b"small"), lambda _: [])
    assert not store.split(name_of(b"unknown"), lambda _: CUTS)
    for each in (data, b"small"):
        assert read(store, name_of(each)) == each
        assert store.path(name_of(each)) is not None
    with pytest.raises(RowNotFound):
        store.path(name_of(b"unknown"))
    publish(make_store(tmp_path, encrypted=True), data)  # encryption is turned on
    assert read(make_store(tmp_path, encrypted=True), name_of(data)) == data


def test_a_chunk_that_is_a_file_of_its_own_is_not_taken_from_others(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    part, whole = make(1), make(1, 2)
    store.put(name_of(part), [part])
    publish(store, whole)
    assert store.split(name_of(part), lambda _: [PART // 2])
    assert read(store, name_of(whole)) == whole
    assert read(store, name_of(part)) == part


def test_chunks_begin_at_cuts_and_are_never_large() -> None:
    assert list(divide(2 * CHUNK + 5, [0, 7, 7, 10**12, -3])) == [
        (0, 7),
        (7, CHUNK + 7),
        (CHUNK + 7, 2 * CHUNK + 5),
    ]
    assert list(divide(0, [3])) == []


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("how", ["changed", "short", "lost"])
def test_a_damaged_chunk_is_named_and_can_be_stored_again(
    tmp_path: Path, encrypted: bool, how: str
) -> None:
    store, data = make_store(tmp_path, encrypted), make(1, 2, 3)
    name = publish(store, data)
    chunks = [path for path in tmp_path.rglob("*.chunk*") if path not in lists(tmp_path)]
    path = chunks[1]
    content = path.read_bytes()
    if how == "lost":
        path.unlink()
    else:
        path.write_bytes(content[:-9] if how == "short" else content[:-9] + b"wrong" + content[-4:])
    with pytest.raises(StoreUnusable, match=f"(?s)of 3 of the file {name} .*{path.name}"):
        read(store, name)
    path.unlink(missing_ok=True)  # as the message says
    assert store.missing([name]) == [name]
    publish(store, data)
    assert read(store, name) == data


@pytest.mark.parametrize("content", [b"", b"[{", b'[{"sha256": "../../../key", "size": 1}]'])
def test_a_damaged_list_names_itself_and_removes_nothing(tmp_path: Path, content: bytes) -> None:
    store, data = make_store(tmp_path), make(1, 2)
    name = publish(store, data)
    [path] = tmp_path.rglob("*.chunks")
    path.write_bytes(content)
    with pytest.raises(StoreUnusable, match=path.name):
        read(store, name)
    age(tmp_path)
    assert store.sweep([name], older_than=LIMIT) == 0
    assert store.missing([name]) == [name]
    assert publish(store, data) == name
    assert read(store, name) == data


def test_a_large_file_is_never_in_memory(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    data = random.Random(1).randbytes(3 * CHUNK)
    store.put(name_of(data), [data])
    assert store.split(name_of(data), lambda _: [])
    digest = sha256()
    tracemalloc.start()
    with store.open(name_of(data)) as file:
        while piece := file.read(1 << 16):
            digest.update(piece)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert digest.hexdigest() == name_of(data)
    assert peak < CHUNK


def test_a_damaged_file_stays_whole(tmp_path: Path) -> None:
    store, data = make_store(tmp_path), make(1, 2)
    store.put(name_of(data), [data])
    path = store.path(name_of(data))
    assert path is not None
    path.write_bytes(make(1, 3))
    assert not store.split(name_of(data), lambda _: CUTS)
    assert path.exists()
    assert not list(tmp_path.rglob("*.chunks"))


def test_a_server_that_is_killed_at_any_step_of_a_publication_has_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, step = make(1, 2, 3), 0
    name, done = name_of(data), False
    while not done:
        root = tmp_path / str(step)
        store = make_store(root)
        store.put(name, [data])

        def kill(number: int, last: int = step) -> None:
            if number == last:
                raise Killed

        with at_each_step(monkeypatch, kill, root), suppress(Killed):
            store.split(name, lambda _: CUTS)
            done = True
        again = make_store(root)
        assert again.missing([name]) == []
        assert read(again, name) == data
        publish(again, data)
        assert read(again, name) == data
        step += 1
    assert step > 10


@pytest.mark.parametrize("killed", [None, 0, 2])
def test_a_removal_keeps_what_a_publication_uses_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: int | None
) -> None:
    """At each step of the removal of a version, another server publishes one that shares chunks
    with it, or publishes the same; and the first server may be killed some steps later."""
    former, step, done = make(1, 2, 3), 0, False
    while not done:
        for data in (make(1, 7, 3), former):
            root = tmp_path / f"{step}-{data == former}"
            store, other = make_store(root), make_store(root)
            publish(store, former)
            kept = publish(store, make(4, 2, 5))
            age(root)
            name, done = name_of(data), True

            def meet(
                number: int, last: int = step, data: bytes = data, other: BlobStore = other
            ) -> None:
                nonlocal done
                if number == last:
                    done = False
                    publish(other, data)
                if killed is not None and number == last + killed:
                    raise Killed

            with at_each_step(monkeypatch, meet, root), suppress(Killed):
                store.sweep([kept], older_than=LIMIT)
            if done and killed is None:
                assert store.missing([name_of(former)]) == [name_of(former)]
            if killed is not None:
                store.sweep([kept, name], older_than=LIMIT)
            if not done:
                assert other.missing([name]) == []
                assert read(other, name) == data
            assert read(other, kept) == make(4, 2, 5)
        step += 1
    assert step > 10


def test_an_old_list_that_a_killed_server_left_aside_does_not_replace_a_newer_one(
    tmp_path: Path,
) -> None:
    store, data = make_store(tmp_path), make(1, 2, 3)
    name = publish(store, data)
    [path] = lists(tmp_path)
    aside = path.rename(path.with_name(f"{path.name}.aside"))
    aside.write_text(f'[{{"sha256": "{name_of(b"lost")}", "size": 4}}]')
    publish(store, data)
    store.sweep([name], older_than=LIMIT)
    assert read(store, name) == data
    assert not aside.exists()


def test_the_parts_of_a_manifest_that_a_killed_server_left_aside_are_kept(tmp_path: Path) -> None:
    store, part = make_store(tmp_path), b"part"
    manifest = f'{{"files": [{{"path": "a", "sha256": "{name_of(part)}"}}]}}'.encode()
    store.put_all({name_of(each): each for each in (part, manifest)})
    path = store.path(name_of(manifest))
    assert path is not None
    age(tmp_path)
    path.rename(path.with_name(f"{path.name}.aside"))
    sweep_folders(store, [name_of(manifest)], older_than=LIMIT)
    assert (read(store, name_of(manifest)), read(store, name_of(part))) == (manifest, part)


def test_only_chunks_that_no_other_version_uses_are_removed(tmp_path: Path) -> None:
    store = make_store(tmp_path, encrypted=True)
    one, two = publish(store, make(1, 2, 3)), publish(store, make(1, 2, 9))
    young = publish(store, make(8, 2, 6))
    age(tmp_path / "folders")
    assert store.missing([young]) == []
    for path in set((tmp_path / "folders").rglob("*.chunk*")) - {*lists(tmp_path)}:
        os.utime(path, (OLD, OLD))
    freed = store.sweep([two], older_than=LIMIT)
    assert PART < freed < 1.1 * PART
    assert (read(store, two), read(store, young)) == (make(1, 2, 9), make(8, 2, 6))
    assert store.missing([one]) == [one]
    age(tmp_path / "folders")
    store.sweep([], older_than=LIMIT)
    assert weigh(tmp_path / "folders") == 0


def test_a_copy_of_the_folder_has_a_file_that_is_divided_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, step, done = make(1, 2, 3), 0, False
    name = name_of(data)
    while not done:
        root, target = tmp_path / f"{step}", tmp_path / f"{step}-copy"
        store, done = make_store(root), True
        for each in (data, b"other", b"more"):
            store.put(name_of(each), [each])

        def divide_now(number: int, last: int = step, store: BlobStore = store) -> None:
            nonlocal done
            if number == last:
                done = False
                store.split(name, lambda _: CUTS)

        with at_each_step(monkeypatch, divide_now, root):
            for path in list_files(root):
                (target / path).parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileNotFoundError):
                    (target / path).write_bytes((root / path).read_bytes())
        assert read(make_store(target), name) == data
        step += 1
