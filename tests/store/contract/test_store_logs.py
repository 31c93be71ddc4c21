"""Logs: appended by offset, whole under repeats, gaps, limits, full disks and restarts."""

import errno
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cavvy.store.base import RowNotFound, StoreFull
from cavvy.store.logs import LogSegment, LogStore, SegmentFiles

KEY = ("p", "j1", 1, 0)


def read_all(store: LogStore, limit: int = 1 << 20) -> tuple[bytes, int]:
    """All bytes that are left, with the lines on gaps, and how many were dropped."""
    data, offset, dropped = b"", 0, 0
    while (piece := store.read(*KEY, offset, limit)).data:
        assert piece.next > offset
        data, offset, dropped = data + piece.data, piece.next, dropped + piece.dropped
    return data, dropped


@pytest.fixture
def store(tmp_path: Path) -> LogStore:
    return LogStore(tmp_path / "logs")


def test_bytes_come_back_as_they_went_in(store: LogStore, tmp_path: Path) -> None:
    assert store.append(*KEY, 0, b"one\n") == 4
    assert store.append(*KEY, 4, b"two\xff\x00\n") == 10
    assert store.size(*KEY) == 10
    assert store.read(*KEY, 2, 5).data == b"e\ntwo"
    assert store.read(*KEY, 10).data == b""
    assert store.read("p", "none", 1, 0).data == b""
    path = tmp_path / "logs" / "p" / "j1" / "1.0.log"
    assert path.read_bytes() == b"one\ntwo\xff\x00\n"
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_times_of_arrivals_are_kept(store: LogStore, tmp_path: Path) -> None:
    store.append(*KEY, 0, b"one\n", now_s=100.0)
    store.append(*KEY, 4, b"two\n", now_s=100.4)  # too soon for a time of its own
    store.append(*KEY, 4, b"two\n", now_s=150.0)  # it is there already
    store.append(*KEY, 8, b"three\n", now_s=200.0)
    again = LogStore(tmp_path / "logs").times(*KEY)
    assert [again.since(at) for at in (0, 100, 100.1, 200, 201)] == [0, 0, 8, 8, None]
    assert again.between(0, 99, 9) == [(0, 100.0), (8, 200.0)]
    assert again.between(4, 8, 9) == [(0, 100.0)]
    assert again.between(4, 9, 9) == [(0, 100.0), (8, 200.0)]
    assert again.between(4, 9, 1) == [(0, 100.0)]
    assert store.ranks("p", "j1") == [(1, 0)]
    assert store.times("p", "j1", 2, 0).since(0) is None
    store.remove("p", "j1")
    assert not (tmp_path / "logs" / "p" / "j1").exists()
    assert again.between(0, 99, 9) == []


def test_following_a_log_searches_its_times_and_does_not_read_all_of_them(
    store: LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = 512
    for i in range(lines):
        store.append(*KEY, i, b"\n", now_s=i + 1.0)
    read, pread = [], os.pread

    def counted(file: int, size: int, offset: int) -> bytes:
        data = pread(file, size, offset)
        read.append(len(data) // 16)
        return data

    def refuse(path: Path) -> bytes:
        raise AssertionError(f"{path} is read as a whole")

    monkeypatch.setattr(os, "pread", counted)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    times = store.times(*KEY)
    for i in range(lines):
        assert times.between(i, i + 1, 2)[0] == (i, i + 1.0)
    assert sum(read) <= lines * (2 + lines.bit_length())


def test_an_append_counts_once(store: LogStore) -> None:
    store.append(*KEY, 0, b"abc")
    assert store.append(*KEY, 0, b"abc") == 3
    assert store.append(*KEY, 0, b"ab") == 3
    assert store.append(*KEY, 1, b"bcde") == 5
    assert store.append(*KEY, 5, b"") == 5
    assert read_all(store) == (b"abcde", 0)


def test_a_gap_is_asked_for(store: LogStore) -> None:
    assert store.append(*KEY, 5, b"late") == 0
    store.append(*KEY, 0, b"abc")
    assert store.append(*KEY, 9, b"later", lost=5) == 3
    assert store.size(*KEY) == 3


def test_lost_bytes_are_told(store: LogStore) -> None:
    store.append(*KEY, 0, b"abc\n")
    assert store.append(*KEY, 104, b"def\n", lost=100) == 108
    data, dropped = read_all(store)
    assert (data.split(b"\n")[0], data.split(b"\n")[-2], dropped) == (b"abc", b"def", 100)
    assert b"100 bytes of the log were dropped" in data
    assert store.append(*KEY, 104, b"def\n", lost=100) == 108
    assert store.append("p", "j1", 2, 0, 50, b"x", lost=50) == 51
    assert b"50 bytes" in store.read("p", "j1", 2, 0).data


def test_logs_do_not_mix(store: LogStore) -> None:
    for key in (("p", "j1", 1, 1), ("p", "j1", 11, 0), ("p", "j2", 1, 0), ("q", "j1", 1, 0)):
        store.append(*key, 0, str(key).encode())
        assert store.read(*key).data == str(key).encode()
    assert store.size(*KEY) == 0
    assert store.ranks("p", "j1") == [(1, 1), (11, 0)]
    store.remove("p", "j1")
    assert store.ranks("p", "j1") == []
    assert store.size("p", "j1", 1, 1) == 0
    assert store.size("q", "j1", 1, 0) > 0
    store.remove("p", "j1")


@pytest.mark.parametrize("name", ["..", "../../etc", "a/b", "", ".hidden", "a\x00"])
def test_a_name_cannot_leave_the_folder(store: LogStore, name: str) -> None:
    for key in ((name, "j1", 1, 0), ("p", name, 1, 0)):
        with pytest.raises(RowNotFound):
            store.append(*key, 0, b"x")
        with pytest.raises(RowNotFound):
            store.read(*key)


def test_over_its_limit_it_keeps_its_head_and_its_newest(tmp_path: Path) -> None:
    store = LogStore(tmp_path, limit=1000)
    for i in range(1000):
        assert store.append(*KEY, i * 10, b"line %04d\n" % i) == i * 10 + 10
        assert sum(path.stat().st_size for path in (tmp_path / "p" / "j1").iterdir()) <= 1000
    data, dropped = read_all(store, limit=64)
    lines = data.decode().split("\n")
    assert lines[:10] == [f"line {i:04}" for i in range(10)]
    newest = [line for line in lines if line.startswith("line ")][10:]
    assert newest == [f"line {i:04}" for i in range(1000 - len(newest), 1000)]
    assert len(newest) >= 80
    assert dropped == 10_000 - 100 - 10 * len(newest)
    assert f"{dropped} bytes" in data.decode()
    assert store.size(*KEY) == 10_000
    again = LogStore(tmp_path, limit=1000)
    assert read_all(again) == (data, dropped)
    assert again.append(*KEY, 10_000, b"line 1000\n") == 10_010


def test_one_big_append_keeps_the_limit_too(tmp_path: Path) -> None:
    store = LogStore(tmp_path, limit=1000)
    assert store.append(*KEY, 0, bytes(range(250)) * 40) == 10_000
    data, dropped = read_all(store)
    assert data[:100] == bytes(range(100))
    assert data[-100:] == bytes(range(150, 250))
    assert dropped > 8500


def test_a_sender_that_loses_again_and_again_makes_few_files(tmp_path: Path) -> None:
    store = LogStore(tmp_path)
    for i in range(1, 500):
        store.append(*KEY, i * 10, b"x", lost=10)
    assert len(list((tmp_path / "p" / "j1").iterdir())) <= 65
    assert store.size(*KEY) == 4991


def test_tail(tmp_path: Path) -> None:
    store = LogStore(tmp_path)
    assert store.tail(*KEY, 5).data == b""
    store.append(*KEY, 0, b"".join(b"line %d\n" % i for i in range(50_000)))
    tail = store.tail(*KEY, 3)
    assert (tail.data, tail.next) == (b"line 49997\nline 49998\nline 49999\n", store.size(*KEY))
    assert store.tail(*KEY, 20_000).data.count(b"\n") == 20_000
    assert store.tail(*KEY, 20_000).data.startswith(b"line 30000\n")
    assert store.tail(*KEY, 10**9).data.startswith(b"line 0\n")
    assert store.tail(*KEY, 0).data == b""
    store.append(*KEY, store.size(*KEY), b"half")
    assert store.tail(*KEY, 2).data == b"line 49999\nhalf"


def test_tail_reads_the_end_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LogStore(tmp_path)
    store.append(*KEY, 0, b"x" * 99 + b"\n")
    for i in range(1, 20_000):
        store.append(*KEY, i * 100, b"x" * 99 + b"\n")
    read, sizes = SegmentFiles.read, []

    def counted(files: SegmentFiles, segment: LogSegment, at: int, length: int) -> bytes:
        sizes.append(length)
        return read(files, segment, at, length)

    monkeypatch.setattr(SegmentFiles, "read", counted)
    assert store.tail(*KEY, 10).data == (b"x" * 99 + b"\n") * 10
    assert sum(sizes) <= 131_072


def test_tail_goes_over_segments_and_gaps(tmp_path: Path) -> None:
    store = LogStore(tmp_path, limit=100)
    for i in range(30):
        store.append(*KEY, i * 10, b"line %04d\n" % i)
    whole = read_all(store)[0]
    assert store.tail(*KEY, 1000).data == whole
    for lines in range(1, 14):
        assert store.tail(*KEY, lines).data == b"".join(whole.splitlines(keepends=True)[-lines:])


def test_a_full_disk_tears_nothing(store: LogStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.append(*KEY, 0, b"abc")
    real = os.pwrite

    def half(file: int, data: bytes, offset: int) -> int:
        if offset == 3:
            return real(file, data[:2], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", half)
    with pytest.raises(StoreFull, match="free some disk space"):
        store.append(*KEY, 3, b"defg")
    monkeypatch.undo()
    assert read_all(store) == (b"abc", 0)
    assert read_all(LogStore(store._root)) == (b"abc", 0)
    assert store.append(*KEY, 3, b"defg") == 7
    assert read_all(store) == (b"abcdefg", 0)


def test_bytes_written_by_a_killed_server_are_kept(store: LogStore) -> None:
    store.append(*KEY, 0, b"abc")
    with open(store._root / "p" / "j1" / "1.0.log", "ab") as file:
        file.write(b"de")  # what a write had brought before the kill; its sender was not answered
    again = LogStore(store._root)
    assert again.append(*KEY, 3, b"defg") == 7
    assert read_all(again) == (b"abcdefg", 0)


def test_a_folder_that_somebody_deleted_is_made_again(store: LogStore) -> None:
    store.append(*KEY, 0, b"abc")
    path = store._root / "p" / "j1"
    (path / "1.0.log").unlink()
    path.rmdir()
    assert store.append(*KEY, 3, b"def") == 0
    assert store.append(*KEY, 3, b"def", lost=3) == 6
    assert b"3 bytes" in store.read(*KEY).data


appends = st.lists(
    st.tuples(st.integers(-8, 6), st.integers(0, 30), st.booleans(), st.booleans()), max_size=40
)


@settings(max_examples=150, deadline=None)
@given(appends, st.integers(10, 60))
def test_any_appends(steps: list[tuple[int, int, bool, bool]], limit: int) -> None:
    """Byte i of the true log is i mod 251; whatever is sent, what is kept is true and in its
    place.
    """
    with tempfile.TemporaryDirectory() as folder:
        store, end = LogStore(Path(folder), limit=limit), 0
        for shift, size, may_lose, restart in steps:
            offset = max(0, end + shift)
            data = bytes(i % 251 for i in range(offset, offset + size))
            gap = offset > end
            answer = store.append(*KEY, offset, data, lost=offset - end if gap and may_lose else 0)
            end = end if gap and not may_lose else max(end, offset + size)
            assert answer == end
            if restart:
                store = LogStore(Path(folder), limit=limit)
            assert store.size(*KEY) == end
        offset, kept = 0, 0
        while (piece := store.read(*KEY, offset, 7)).data:
            if not piece.dropped:
                assert piece.data == bytes(i % 251 for i in range(offset, piece.next))
                kept += len(piece.data)
            offset = piece.next
        assert offset == end
        assert (
            kept
            == sum(path.stat().st_size for path in Path(folder).rglob("*.log*"))
            <= max(limit, 20)
        )


def test_two_servers_that_share_the_folder_append_in_turn(tmp_path: Path) -> None:
    """An agent may send a part to one server, and repeat it and go on with another one."""
    one, other = (LogStore(tmp_path / "logs", limit=1000, shared=True) for _ in range(2))
    sent = bytes(65 + n % 26 for n in range(600))
    lock, at = Lock(), [0]

    def send(store: LogStore) -> None:
        while at[0] < len(sent):
            with lock:
                begin = max(0, at[0] - 7)
            expected = store.append(*KEY, begin, sent[begin : begin + 20])
            with lock:
                at[0] = max(at[0], expected)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(send, (one, other)))
    for store in (one, other):
        assert store.size(*KEY) == len(sent)
    assert read_all(other) == (sent, 0)
