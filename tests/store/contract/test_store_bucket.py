"""Blobs, logs and keys of servers that keep their files in a bucket, and share no folder."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moto.server import ThreadedMotoServer
from tests.contract.store_suite import store_url
from tests.memory_bucket import MemoryBucket

from cavvy.domain.checkpoints import CheckpointFile
from cavvy.store.base import RowNotFound, StoreUnusable
from cavvy.store.blobs import ProjectBlobs
from cavvy.store.bucket_folder import BucketFolder
from cavvy.store.bucket_logs import BucketLogs
from cavvy.store.checkpoint_folders import CheckpointFolders
from cavvy.store.drivers import make_driver
from cavvy.store.encrypted_files.data_keys import FileKeyPlaces, FileKeys, KeyRows
from cavvy.store.locks import DatabaseLocks
from cavvy.store.migrate import prepare
from cavvy.store.objects.base import ObjectBucket, ObjectInfo
from cavvy.store.objects.http import ask
from cavvy.store.objects.locations import open_place

NOW = datetime(2026, 1, 20, tzinfo=UTC)
KEY = ("p", "j1", 1, 0)
SECRET = b"planted in a source\n" * 3


class Server:
    """What one server uses: its own folder, and the bucket and database of all."""

    def __init__(self, root: Path, bucket: MemoryBucket, keys: FileKeys | None = None) -> None:
        folder = BucketFolder(bucket, "s3://data/x", "x/", root, lambda: bucket.now)
        self.root = root
        self.blobs = ProjectBlobs(root / "folders", keys, folder.below("folders"))
        self.logs = BucketLogs(folder.below("logs"), keys=keys)
        self.folders = CheckpointFolders(
            root / "storage", keys=keys, bucket=folder.below("storage")
        )


def name_of(data: bytes) -> str:
    return sha256(data).hexdigest()


def read_all(logs: BucketLogs, limit: int = 1 << 20) -> tuple[bytes, int]:
    data, offset, dropped = b"", 0, 0
    while (piece := logs.read(*KEY, offset, limit)).data:
        assert piece.next > offset
        data, offset, dropped = data + piece.data, piece.next, dropped + piece.dropped
    return data, dropped


@pytest.fixture
def bucket() -> MemoryBucket:
    return MemoryBucket(NOW)


@pytest.fixture
def pair(tmp_path: Path, bucket: MemoryBucket) -> tuple[Server, Server]:
    return Server(tmp_path / "a", bucket), Server(tmp_path / "b", bucket)


@pytest.fixture
def url(tmp_path: Path) -> str:
    made = store_url("postgres", tmp_path)
    prepare(make_driver(made, journal="auto"), lambda: "i")
    return made


@pytest.fixture
def sealed_pair(tmp_path: Path, bucket: MemoryBucket, url: str) -> Iterator[tuple[Server, Server]]:
    (tmp_path / "key").write_bytes(b"k" * 32)
    (tmp_path / "key").chmod(0o600)
    places = FileKeyPlaces(common=f"file:{tmp_path}/key")

    with ExitStack() as stack:

        def make(name: str) -> Server:
            keys = FileKeys(tmp_path / name, tmp_path / name / "key", places, KeyRows(url))
            stack.callback(keys.close)
            return Server(tmp_path / name, bucket, keys)

        yield make("a"), make("b")


def test_a_blob_of_one_server_is_read_by_another(pair: tuple[Server, Server]) -> None:
    one, other = pair
    name, empty = name_of(SECRET), name_of(b"")
    assert other.blobs.of("p").missing([name, empty]) == [name, empty]
    one.blobs.of("p").put_all({name: SECRET, empty: b""})
    assert other.blobs.of("p").missing([name, empty]) == []
    assert other.blobs.of("p").read(name, 999) == SECRET
    assert other.blobs.of("p").read(empty, 999) == b""
    assert other.blobs.of("q").missing([name]) == [name]
    with pytest.raises(RowNotFound):
        other.blobs.of("q").open(name)


def test_parts_make_a_blob_that_all_servers_have(pair: tuple[Server, Server]) -> None:
    one, other = pair
    name = name_of(b"0123456789")
    assert one.blobs.of("p").append(name, 0, b"0123", 10) == 4
    assert (
        other.blobs.of("p").append(name, 4, b"456789", 10) == 0
    )  # it has no parts: from the start
    assert one.blobs.of("p").append(name, 4, b"456789", 10) == 10
    assert other.blobs.of("p").append(name, 0, b"0123", 10) == 10
    assert other.blobs.of("p").read(name, 99) == b"0123456789"


def test_an_old_blob_is_sent_again_before_it_may_be_removed(
    pair: tuple[Server, Server], bucket: MemoryBucket
) -> None:
    one, other = pair
    name = name_of(SECRET)
    one.blobs.of("p").put(name, [SECRET])
    bucket.now += timedelta(days=4)
    assert other.blobs.of("p").missing([name]) == [name]
    other.blobs.of("p").put(name, [SECRET])
    assert one.blobs.of("p").missing([name]) == []
    old = bucket.now - timedelta(days=7)
    assert one.blobs.sweep([], older_than=old) == 0
    bucket.now += timedelta(days=8)
    assert one.blobs.sweep([name], older_than=bucket.now - timedelta(days=7)) == 0
    assert one.blobs.sweep([], older_than=bucket.now - timedelta(days=7)) == len(SECRET)
    assert bucket.objects == {}


def test_a_checkpoint_moves_between_servers_and_is_removed(
    pair: tuple[Server, Server], bucket: MemoryBucket
) -> None:
    one, other = pair
    one.folders.blobs("p", "j1").put(name_of(SECRET), [SECRET])
    file = CheckpointFile(path="state", sha256=name_of(SECRET), size=len(SECRET))
    manifest = one.folders.keep("p", "j1", [file])
    assert other.folders.read("p", "j1", manifest) == [file]
    other.folders.copy("p", "j1", [file], other.folders.blobs("p", "j2"))
    assert one.folders.blobs("p", "j2").read(file.sha256, 999) == SECRET
    assert not one.folders.lends("p")
    assert other.folders.remove("p", "j1").bytes > len(SECRET)
    assert [key for key in bucket.objects if "j1" in key] == []


def test_a_log_is_continued_at_another_server(pair: tuple[Server, Server]) -> None:
    one, other = pair
    assert one.logs.append(*KEY, 0, b"one\n", now_s=100.0) == 4
    assert other.logs.read(*KEY).data == b"one\n"
    assert other.logs.append(*KEY, 4, b"two\n", now_s=200.0) == 8
    assert one.logs.append(*KEY, 4, b"two\nthree\n", now_s=201.0) == 14  # the answer was lost
    assert other.logs.append(*KEY, 14, b"four\n", now_s=300.0) == 19
    assert one.logs.append(*KEY, 25, b"six\n") == 19  # something is missing
    for server in pair:
        assert read_all(server.logs) == (b"one\ntwo\nthree\nfour\n", 0)
        assert server.logs.size(*KEY) == 19
    times = one.logs.times(*KEY)
    assert [times.since(at) for at in (0, 100.1, 250, 301)] == [0, 4, 14, None]
    assert other.logs.times(*KEY).between(4, 99, 9)[-1] == (14, 300.0)
    assert one.logs.append(*KEY, 25, b"six\n", lost=6) == 29
    assert b"6 bytes" in read_all(other.logs)[0]
    other.logs.remove("p", "j1")
    assert (read_all(other.logs), one.logs.size(*KEY)) == ((b"", 0), 0)


def test_many_small_pieces_become_a_large_one(
    pair: tuple[Server, Server], bucket: MemoryBucket
) -> None:
    one, other = pair
    for i in range(200):
        server = pair[i % 2]
        assert server.logs.append(*KEY, i * 5, b"%04d\n" % i, now_s=float(i)) == i * 5 + 5
    assert len(bucket.objects) < 70
    whole = b"".join(b"%04d\n" % i for i in range(200))
    assert read_all(one.logs, 7) == read_all(other.logs) == (whole, 0)
    assert [one.logs.times(*KEY).since(at) for at in (0, 77, 199)] == [0, 77 * 5, 199 * 5]


def test_a_log_keeps_its_first_tenth_and_its_end(bucket: MemoryBucket, tmp_path: Path) -> None:
    folder = BucketFolder(bucket, "s3://data/x", "x/", tmp_path, lambda: NOW)
    logs = BucketLogs(folder, limit=1000)
    for i in range(100):
        logs.append(*KEY, i * 50, bytes([65 + i % 26]) * 50)
    data, dropped = read_all(logs)
    assert data.startswith(b"A" * 50 + b"B" * 50)
    assert data.endswith(b"V" * 50)
    assert dropped == 5000 - 1000


def test_a_busy_bucket_is_asked_again(pair: tuple[Server, Server], bucket: MemoryBucket) -> None:
    bucket.faults = 2
    assert pair[0].logs.append(*KEY, 0, b"one\n") == 4
    bucket.faults = 9
    with pytest.raises(StoreUnusable, match="s3://data/x does not answer: busy"):
        pair[0].logs.append(*KEY, 4, b"two\n")
    bucket.faults = 0
    assert pair[0].logs.append(*KEY, 4, b"two\n") == 8


def test_with_a_key_the_bucket_shows_nothing(
    sealed_pair: tuple[Server, Server], bucket: MemoryBucket
) -> None:
    one, other = sealed_pair
    name = name_of(SECRET)
    one.blobs.of("p").put(name, [SECRET])
    for i in range(70):  # so that pieces are combined
        sealed_pair[i % 2].logs.append(*KEY, i * len(SECRET), SECRET, now_s=float(i))
    assert other.blobs.of("p").read(name, 999) == SECRET
    assert read_all(one.logs) == read_all(other.logs) == (SECRET * 70, 0)
    assert other.blobs.of("p").missing([name]) == []
    stored = b"".join(key.encode() + data for key, (data, _) in bucket.objects.items())
    assert SECRET[:10] not in stored
    assert name.encode() not in stored
    assert all(each.endswith(".sealed") for each in bucket.objects)


def test_all_servers_share_the_first_value_and_rotate_it(
    sealed_pair: tuple[Server, Server], tmp_path: Path, url: str
) -> None:
    (tmp_path / "new").write_bytes(b"n" * 32)
    (tmp_path / "new").chmod(0o600)
    old, new = (f"file:{tmp_path}/{name}" for name in ("key", "new"))
    with closing(KeyRows(url)) as rows:

        def make(place: str, *former: str) -> FileKeys:
            places = FileKeyPlaces(common=place, former=former)
            return FileKeys(tmp_path, tmp_path / "no", places, rows)

        one, other = make(old), make(old)
        assert one.share("token", b"first") == other.share("token", b"second") == b"first"
        assert one.of("p").hide("x") == other.of("p").hide("x")
        first = one.of("p").current()
        assert other.of("p").current() == first
        assert make(new, old).rotate() == (3, [])
        after = make(new)
        assert after.share("token", b"third") == b"first"
        assert after.of("p").hide("x") == one.of("p").hide("x")
        assert after.of("p").current() != first
        assert sorted(name for name, _ in after.export()) == [
            "_servers/token",
            "p/1",
            "p/2",
            "p/names",
        ]


@pytest.fixture
def locks(tmp_path: Path) -> DatabaseLocks:
    return DatabaseLocks(store_url("postgres", tmp_path))


def test_a_lock_is_held_by_one_server(locks: DatabaseLocks) -> None:
    held = locks.try_hold("j1")
    assert held is not None
    assert locks.try_hold("j1") is None
    other = locks.try_hold("j2")
    assert other is not None
    held.close()
    again = locks.try_hold("j1")
    assert again is not None
    again.close()
    other.close()


appends = st.lists(
    st.tuples(st.integers(-8, 6), st.integers(0, 30), st.booleans(), st.booleans()), max_size=40
)


@settings(max_examples=60, deadline=None)
@given(appends)
def test_any_appends_through_two_servers(steps: list[tuple[int, int, bool, bool]]) -> None:
    """Byte i of the true log is i mod 251; whatever is sent to which server, what is kept is true
    and in its place.
    """
    bucket, end = MemoryBucket(NOW), 0
    folder = BucketFolder(bucket, "s3://data/x", "", Path(), lambda: NOW)
    servers = BucketLogs(folder), BucketLogs(folder)
    for shift, size, may_lose, which in steps:
        offset = max(0, end + shift)
        data = bytes(i % 251 for i in range(offset, offset + size))
        gap = offset > end
        answer = servers[which].append(
            *KEY, offset, data, lost=offset - end if gap and may_lose and size else 0
        )
        end = end if (gap and not may_lose) or not size else max(end, offset + size)
        assert answer == end or (answer < end and not gap)  # it may not have seen the newest end
        assert servers[not which].size(*KEY) == end
    offset = 0
    while (piece := servers[0].read(*KEY, offset, 7)).data:
        if not piece.dropped:
            assert piece.data == bytes(i % 251 for i in range(offset, piece.next))
        offset = piece.next
    assert offset == end


def test_a_large_blob_is_sent_in_parts(tmp_path: Path) -> None:
    storage = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    storage.start()
    try:
        endpoint = "http://{}:{}".format(*storage.get_host_and_port())
        ask("PUT", f"{endpoint}/data", b"")
        keys = {"AWS_ACCESS_KEY_ID": "A", "AWS_SECRET_ACCESS_KEY": "s"}
        keys["AWS_ENDPOINT_URL_S3"] = endpoint
        place = open_place("s3://data/x", keys, lambda: datetime.now(UTC)).place
        assert isinstance(place, ObjectBucket)
        source, copy = tmp_path / "source", tmp_path / "copies" / "large"
        source.write_bytes(bytes(range(256)) * 70_000)  # 17.1 MiB
        folder = BucketFolder(place, "s3://data/x", "x/", copy.parent, lambda: NOW)
        folder.send("large", source)
        assert folder.fetch(copy)
        assert copy.read_bytes() == source.read_bytes()
    finally:
        storage.stop()


def test_a_blob_that_is_sent_again_during_garbage_collection_is_kept(tmp_path: Path) -> None:
    class SentAgain(MemoryBucket):
        def list(
            self, prefix: str, after: str = "", limit: int = 1000
        ) -> tuple[Sequence[ObjectInfo], str]:
            found = super().list(prefix, after, limit)
            self.objects["x/ab/old"] = b"again", self.now
            return found

    bucket = SentAgain(NOW)
    bucket.put("x/ab/old", b"again")
    bucket.now += timedelta(days=9)
    folder = BucketFolder(bucket, "s3://data/x", "x/", tmp_path, lambda: bucket.now)
    assert folder.sweep(frozenset(), older_than=bucket.now - timedelta(days=7)) == 0
    assert bucket.get("x/ab/old") == b"again"
