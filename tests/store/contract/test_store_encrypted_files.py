"""Encrypted files: they come back whole, they tell nothing, and a lost key loses nothing silently."""

import os
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cavvy.store.base import HashMismatch, StoreUnusable
from cavvy.store.blobs import ProjectBlobs, sweep_folders
from cavvy.store.checkpoint_folders import CheckpointFolders
from cavvy.store.encrypted_files.data_keys import (
    SERVER_KEY,
    FileKeyPlaces,
    FileKeys,
    parse_project_places,
)
from cavvy.store.keys import KeyPlaceInvalid
from cavvy.store.logs import LogStore

LOG = ("p", "j1", 1, 0)
SECRET = b"a planted line of source\n" * 9
BLOCK = (1 << 16) - 28  # bytes in a block of a blob


def name_of(data: bytes) -> str:
    return sha256(data).hexdigest()


def make_keys(root: Path, common: str = SERVER_KEY, **more: object) -> FileKeys:
    places = FileKeyPlaces(common=common, **more)  # type: ignore[arg-type]  # few tests give more
    return FileKeys(root / "file-keys", root / "key", places)


def make_blobs(root: Path, common: str = SERVER_KEY) -> ProjectBlobs:
    return ProjectBlobs(root / "folders", make_keys(root, common))


def make_logs(root: Path, common: str = SERVER_KEY, **more: object) -> LogStore:
    return LogStore(root / "logs", keys=make_keys(root, common), **more)  # type: ignore[arg-type]


def write_key(path: Path, byte: bytes) -> str:
    path.write_bytes(byte * 32)
    path.chmod(0o600)
    return f"file:{path}"


def stored(root: Path) -> bytes:
    return b"".join(path.read_bytes() for path in root.rglob("*") if path.is_file())


def read_log(store: LogStore) -> bytes:
    data, offset = b"", 0
    while (piece := store.read(*LOG, offset)).data:
        data, offset = data + piece.data, piece.next
    return data


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_a_blob_comes_back_by_every_way_in(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    for number, put in enumerate((put_whole, put_parts, put_pack)):
        store = make_blobs(tmp_path / str(number)).of("p")
        assert store.missing([name_of(data)]) == [name_of(data)]
        put(store, data)
        again = make_blobs(tmp_path / str(number)).of("p")
        assert again.missing([name_of(data)]) == []
        assert again.path(name_of(data)) is None
        with again.open(name_of(data)) as file:
            assert file.read() == data
            file.seek(size // 2)
            assert file.read(100) == data[size // 2 :][:100]
        assert again.read(name_of(data), size) == data


def put_whole(store: object, data: bytes) -> None:
    store.put(name_of(data), [data[:7], data[7:]])  # type: ignore[attr-defined]


def put_parts(store: object, data: bytes) -> None:
    at = 0
    while (at := store.append(name_of(data), at, data[at : at + 50_000], len(data))) < len(data):  # type: ignore[attr-defined]
        pass


def put_pack(store: object, data: bytes) -> None:
    store.put_all({name_of(data): data})  # type: ignore[attr-defined]


def test_files_and_names_tell_nothing(tmp_path: Path) -> None:
    blobs = make_blobs(tmp_path)
    for project in ("p", "q"):
        blobs.of(project).put(name_of(SECRET), [SECRET])
    make_logs(tmp_path).append(*LOG, 0, SECRET)
    folders = CheckpointFolders(tmp_path / "storage", keys=make_keys(tmp_path))
    folders.blobs("p", "j1").put(name_of(SECRET), [SECRET])
    assert SECRET[:20] not in stored(tmp_path)
    names = [path.name for path in tmp_path.rglob("*.sealed") if ".log." not in path.name]
    assert len(names) == 3
    # the same file has other names in another project, and its hash is in none
    assert len({name for name in names if name_of(SECRET) not in name}) == 2
    assert "names" in {path.name for path in (tmp_path / "file-keys" / "p").iterdir()}


def test_a_file_cannot_take_the_place_of_another(tmp_path: Path) -> None:
    blobs = make_blobs(tmp_path)
    for data in (b"one", b"two"):
        blobs.of("p").put(name_of(data), [data])
    first, second = sorted((tmp_path / "folders").rglob("*.sealed"))
    shutil.copy(first, second)
    store = make_blobs(tmp_path).of("p")
    with pytest.raises(StoreUnusable, match="is damaged"):
        [store.read(name_of(data), 9) for data in (b"one", b"two")]


def test_blocks_of_a_file_cannot_change_places(tmp_path: Path) -> None:
    data = os.urandom(3 * BLOCK)
    store = make_blobs(tmp_path).of("p")
    put_whole(store, data)
    [path] = [each for each in (tmp_path / "folders").rglob("*") if each.stat().st_size > BLOCK]
    head, size = path.stat().st_size - 3 * (1 << 16), 1 << 16
    raw = path.read_bytes()
    first, second = raw[head : head + size], raw[head + size : head + 2 * size]
    path.write_bytes(raw[:head] + second + first + raw[head + 2 * size :])
    with pytest.raises(StoreUnusable), make_blobs(tmp_path).of("p").open(name_of(data)) as file:
        file.read()


def test_a_damaged_part_is_sent_again(tmp_path: Path) -> None:
    store, data = make_blobs(tmp_path).of("p"), os.urandom(2 * BLOCK)
    assert store.append(name_of(data), 0, data[:BLOCK], len(data)) == BLOCK
    (part,) = tmp_path.rglob("*.sealed.part")
    with part.open("r+b") as file:
        file.seek(100)
        file.write(b"x" * 9)
    with pytest.raises(HashMismatch, match="send it again"):
        store.append(name_of(data), BLOCK, data[BLOCK:], len(data))
    put_parts(store, data)
    assert store.read(name_of(data), len(data)) == data


def test_a_part_without_its_header_begins_again(tmp_path: Path) -> None:
    store, data = make_blobs(tmp_path).of("p"), os.urandom(99)
    store.append(name_of(data), 0, data[:50], 99)
    (part,) = tmp_path.rglob("*.sealed.part")
    os.truncate(part, 10)
    assert store.append(name_of(data), 50, data[50:], 99) == 0
    put_parts(store, data)
    assert store.read(name_of(data), 99) == data


def test_a_sweep_keeps_what_a_folder_needs(tmp_path: Path) -> None:
    store = make_blobs(tmp_path).of("p")
    manifest = b'{"files":[{"path":"a","sha256":"%s"}]}' % name_of(SECRET).encode()
    for data in (SECRET, manifest, b"forgotten"):
        store.put(name_of(data), [data])
    later = datetime.now(UTC) + timedelta(hours=1)
    assert sweep_folders(store, [name_of(manifest)], older_than=later) > 0
    assert store.missing(map(name_of, (SECRET, manifest, b"forgotten"))) == [name_of(b"forgotten")]


@pytest.mark.parametrize("lose", ["the data keys", "the key of data keys"])
def test_a_lost_key_is_said_and_loses_nothing(tmp_path: Path, lose: str) -> None:
    make_blobs(tmp_path).of("p").put(name_of(SECRET), [SECRET])
    make_logs(tmp_path).append(*LOG, 0, SECRET)
    lost = tmp_path / ("file-keys" if lose == "the data keys" else "key")
    kept = tmp_path / "kept"
    lost.rename(kept)
    before = stored(tmp_path / "logs")
    with pytest.raises(StoreUnusable, match=r"cannot read the key|is not among"):
        make_logs(tmp_path).read(*LOG)
    assert stored(tmp_path / "logs") == before
    shutil.rmtree(lost, ignore_errors=True)
    lost.unlink(missing_ok=True)
    kept.rename(lost)
    assert make_logs(tmp_path).read(*LOG).data == SECRET
    assert make_blobs(tmp_path).of("p").read(name_of(SECRET), 999) == SECRET


def test_another_data_key_in_its_place_is_told(tmp_path: Path) -> None:
    make_logs(tmp_path).append(*LOG, 0, SECRET)
    shutil.rmtree(tmp_path / "file-keys")
    make_logs(tmp_path).append("p", "j2", 1, 0, 0, b"x")
    with pytest.raises(StoreUnusable, match="is not the data key that encrypted the file"):
        make_logs(tmp_path).read(*LOG)


def test_begin_and_stop_to_encrypt(tmp_path: Path) -> None:
    make_blobs(tmp_path, "").of("p").put(name_of(b"old"), [b"old"])
    make_logs(tmp_path, "").append(*LOG, 0, b"old ")
    assert not (tmp_path / "file-keys").exists()
    blobs, logs = make_blobs(tmp_path), make_logs(tmp_path)
    assert blobs.of("p").read(name_of(b"old"), 9) == b"old"
    assert blobs.of("p").missing([name_of(b"old")]) == [name_of(b"old")]  # to be encrypted
    blobs.of("p").put(name_of(SECRET), [SECRET])
    assert logs.append(*LOG, 4, b"secret ") == 11
    ended = make_logs(tmp_path, "")
    assert ended.append(*LOG, 11, b"new") == 14
    assert read_log(ended) == b"old secret new"
    assert ended.tail(*LOG, 1).data == b"old secret new"
    assert b"secret" not in stored(tmp_path / "logs")
    assert make_blobs(tmp_path, "").of("p").read(name_of(SECRET), 999) == SECRET


def test_who_encrypts_is_known(tmp_path: Path) -> None:
    assert make_logs(tmp_path).encrypts("p")
    assert not make_logs(tmp_path, "").encrypts("p")
    assert not LogStore(tmp_path).encrypts("p")
    logs = make_logs(tmp_path)
    assert not logs.is_quick("p")
    logs.append(*LOG, 0, b"x")
    assert logs.is_quick("p")
    assert not CheckpointFolders(tmp_path, keys=make_keys(tmp_path)).lends("p")
    assert CheckpointFolders(tmp_path).lends("p")


def test_a_project_has_its_own_key(tmp_path: Path) -> None:
    own = write_key(tmp_path / "own", b"o")
    keys = make_keys(tmp_path, "", projects=parse_project_places(f"p={own}"))
    blobs = ProjectBlobs(tmp_path / "folders", keys)
    for project in ("p", "q"):
        blobs.of(project).put(name_of(SECRET), [SECRET])
    assert SECRET not in stored(tmp_path / "folders" / "p")
    assert SECRET in stored(tmp_path / "folders" / "q")
    assert not (tmp_path / "key").exists()
    with pytest.raises(StoreUnusable, match="is not among the server's keys"):
        make_blobs(tmp_path).of("p").read(name_of(SECRET), 999)
    with pytest.raises(KeyPlaceInvalid):
        parse_project_places("p")
    with pytest.raises(KeyPlaceInvalid):
        make_keys(tmp_path, "vault:x")


def test_a_rotation_needs_the_old_key_no_more(tmp_path: Path) -> None:
    old, new = (write_key(tmp_path / name, name[:1].encode()) for name in ("old", "new"))
    ProjectBlobs(tmp_path / "folders", make_keys(tmp_path, old)).of("p").put(
        name_of(SECRET), [SECRET]
    )
    keys = make_keys(tmp_path, new, former=[old])
    count, problems = keys.rotate()
    assert (count, problems) == (2, [])
    (tmp_path / "old").unlink()
    fresh = make_keys(tmp_path, new)
    assert {each.key_id for each in fresh.uses()} == {fresh.of("p")._sealer.keys.current().id}
    assert fresh.of("p").current().id != fresh.of("p").find(_first_id(tmp_path)).id
    assert ProjectBlobs(tmp_path / "folders", fresh).of("p").read(name_of(SECRET), 999) == SECRET


def _first_id(root: Path) -> bytes:
    (path,) = (root / "folders").rglob("*.sealed")
    return path.read_bytes()[8:24]


def test_a_rotation_without_the_old_key_changes_nothing(tmp_path: Path) -> None:
    old, new = (write_key(tmp_path / name, name[:1].encode()) for name in ("old", "new"))
    make_keys(tmp_path, old).of("p").current()
    count, problems = make_keys(tmp_path, new).rotate()
    assert count == 0
    assert [(project, name) for project, name, _ in problems] == [("p", "files: 1")]
    assert make_keys(tmp_path, old).of("p").current()


def test_a_log_goes_on_behind_a_damaged_end(tmp_path: Path) -> None:
    make_logs(tmp_path).append(*LOG, 0, b"lost")
    (path,) = tmp_path.rglob("*.sealed")
    with path.open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"xxx")
    again = make_logs(tmp_path)
    assert again.append(*LOG, 4, b"kept") == 8
    assert again.read(*LOG, 4).data == b"kept"
    with pytest.raises(StoreUnusable, match="is damaged"):
        again.read(*LOG)


def test_a_full_disk_tears_no_encrypted_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_logs(tmp_path)
    store.append(*LOG, 0, b"abc")
    write: Callable[..., int] = os.pwrite
    calls = []

    def full(fd: int, data: bytes, place: int) -> int:
        calls.append(place)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return write(fd, data, place)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(Exception, match="no space"):
        store.append(*LOG, 3, b"d" * 5000)
    monkeypatch.setattr(os, "pwrite", write)
    assert store.append(*LOG, 3, b"def") == 6
    assert read_log(make_logs(tmp_path)) == b"abcdef"


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9000), max_size=12),
    at=st.integers(0, 40_000),
    length=st.integers(1, 9000),
)
def test_any_part_of_a_log_can_be_read(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], at: int, length: int
) -> None:
    root, whole = tmp_path_factory.mktemp("logs"), b""
    store = make_logs(root, limit=100_000)
    for number, size in enumerate(sizes):
        data = bytes([97 + number]) * size
        assert store.append(*LOG, len(whole), data) == len(whole) + size
        whole += data
    again = make_logs(root, limit=100_000)
    assert read_log(again) == whole
    piece = again.read(*LOG, at, length).data
    assert piece == whole[at : at + len(piece)]
    assert piece or at >= len(whole)
