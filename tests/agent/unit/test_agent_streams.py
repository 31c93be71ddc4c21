"""Scrubbing, spooling and progress: what happens to the bytes that a task writes."""

import errno
import tempfile
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cavvy.agent.data.stream import PipeStreams
from cavvy.agent.log import HELD, LogSpool, Redactor
from cavvy.agent.outbox import time_text
from cavvy.agent.work.monitor import ProgressScanner, parse_progress


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in pairwise(edges)]


@given(
    st.lists(st.text("abc", min_size=4, max_size=8), min_size=1, max_size=3),
    st.text("abc\n", max_size=60),
    st.lists(st.integers(0, 100), max_size=8),
)
@settings(max_examples=300, deadline=None)
def test_no_secret_is_shown_however_the_stream_is_cut(
    secrets: list[str], text: str, cuts: list[int]
) -> None:
    redactor = Redactor(secrets)
    shown = (
        b"".join(redactor.feed(piece) for piece in pieces(text.encode(), cuts)) + redactor.flush()
    )
    for secret in secrets:
        assert secret.encode() not in shown
    if not any(secret in text for secret in secrets):
        assert shown == text.encode()


@given(st.text("xyz", min_size=5, max_size=9), st.lists(st.integers(0, 100), max_size=6))
def test_what_is_no_secret_stays_byte_for_byte(secret: str, cuts: list[int]) -> None:
    data = f"before {secret} between\n{secret}{secret} after {secret[:-1]}".encode()
    redactor = Redactor([secret])
    shown = b"".join(redactor.feed(piece) for piece in pieces(data, cuts)) + redactor.flush()
    assert shown == data.replace(secret.encode(), b"***")


def test_a_line_is_not_held_back_for_a_secret_that_it_does_not_begin() -> None:
    assert Redactor(["hunter22"]).feed(b"loss 0.5\n") == b"loss 0.5\n"
    assert Redactor(["hunter22"]).feed(b"loss hunt") == b"loss "


def test_of_two_secrets_the_longer_is_hidden_whole() -> None:
    redactor = Redactor(["abcd", "abcdef"])
    assert redactor.feed(b"x abcd") + redactor.feed(b"ef y") + redactor.flush() == b"x *** y"


def test_lines_of_a_secret_are_secret_and_short_values_are_not() -> None:
    key = "-----BEGIN KEY-----\nMIIEvQIBADANBg\n-----END KEY-----\n"
    redactor = Redactor([key, "abc"])
    assert redactor.text("MIIEvQIBADANBg and abc") == "*** and abc"


class Server:
    """Takes a log's bytes as the control plane does; can only be right, never patient."""

    def __init__(self) -> None:
        self.size = 0
        self.kept = bytearray()
        self.lost = 0

    def take(self, log: LogSpool) -> None:
        offset, lost, data = log.chunk()
        if offset > self.size:
            assert offset - lost <= self.size
            self.lost += offset - self.size
            self.size = offset
        self.kept += data[self.size - offset :]
        self.size = max(self.size, offset + len(data))
        log.acknowledge(self.size)


def drain(log: LogSpool, server: Server) -> None:
    for _ in range(10_000):
        if not log.pending:
            return
        server.take(log)
    raise AssertionError("the log is never delivered")


@given(st.lists(st.one_of(st.integers(1, 50_000), st.just(0)), max_size=40))
@settings(max_examples=60, deadline=None)
def test_log_is_delivered_whole_or_says_what_is_lost(steps: list[int]) -> None:
    """A number is a write of that many bytes; 0 is the server taking one piece."""
    with tempfile.TemporaryDirectory() as folder:
        log, server, written = LogSpool(f"{folder}/log", 0.5), Server(), bytearray()
        for number, step in enumerate(steps):
            if step:
                data = bytes([number]) * step
                log.write(data)
                written += data
            elif log.pending:
                server.take(log)
        drain(log, server)
        log.close()
        assert server.size == len(written) == log.size
        assert len(server.kept) + server.lost == len(written)
        assert written.startswith(bytes(server.kept[: 512 * 1024 // 10]))
        if not server.lost:
            assert server.kept == written


def test_log_keeps_its_beginning_and_its_end_within_the_cap(tmp_path: Path) -> None:
    log, server = LogSpool(str(tmp_path / "log"), 2), Server()
    for number in range(1000):
        log.write(b"%015d\n" % number * 1024)
        assert sum(path.stat().st_size for path in (tmp_path / "log").iterdir()) <= 2 << 20
    drain(log, server)
    assert server.kept.startswith(b"%015d\n" % 0)
    assert server.kept.endswith(b"%015d\n" % 999)
    assert server.lost > 10 << 20


def test_log_left_by_an_agent_is_delivered_by_the_next(tmp_path: Path) -> None:
    first, server = LogSpool(str(tmp_path / "log"), 8), Server()
    first.write(b"a" * 700_000)
    server.take(first)
    first.write(b"b" * 10)
    first.close()
    second = LogSpool(str(tmp_path / "log"), 8)
    assert second.size == 700_010
    drain(second, server)
    assert server.kept == b"a" * 700_000 + b"b" * 10


def test_server_that_goes_back_gets_what_is_still_there(tmp_path: Path) -> None:
    log = LogSpool(str(tmp_path / "log"), 8)
    log.write(b"0123456789")
    log.acknowledge(10)
    log.acknowledge(4)  # it lost its newest bytes in a crash
    assert log.chunk() == (4, 0, b"456789")


@given(
    st.lists(
        st.tuples(st.sampled_from(["write", "full", "free", "take"]), st.integers(1, 9000)),
        max_size=40,
    )
)
@settings(max_examples=100, deadline=None)
def test_a_disk_that_fills_and_frees_costs_no_byte(steps: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place, server, written = Path(folder, "log"), Server(), bytearray()
        log = LogSpool(str(place), 8)
        for number, (step, size) in enumerate(steps):
            if step == "write":
                data = bytes([number]) * size
                log.write(data)
                written += data
            elif step == "take" and log.pending:
                server.take(log)
            elif step == "full":
                _make_full(log)
            elif step == "free":
                vars(log).pop("_begin", None)
        drain(log, server)
        log.close()
        assert (server.kept, server.lost) == (written, 0)


def _make_full(log: LogSpool) -> None:
    """No file is taken any more, and none grows."""

    def begin() -> None:
        raise OSError(errno.ENOSPC, "full")

    log._end()
    log._begin = begin  # type: ignore[method-assign]


def test_a_disk_that_stays_full_costs_bytes_and_not_the_task(tmp_path: Path) -> None:
    log, server = LogSpool(str(tmp_path / "log"), 8), Server()
    _make_full(log)
    for number in range(20):
        log.write(bytes([number]) * (HELD // 10))
    drain(log, server)
    assert len(server.kept) == HELD
    assert server.lost == log.size - HELD
    assert server.kept.startswith(b"\0")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (b'{"loss": 0.5, "note": "x", "n": 3}', {"loss": 0.5, "note": "x", "n": 3}),
        (b'{"bad": [1], "ok": 1, "flag": true, "nan": NaN}', {"ok": 1, "flag": 1}),
        (b'{"huge": 1%s, "long": "%s", "ok": 1}' % (b"0" * 30, b"x" * 2000), {"ok": 1}),
        (b"[1]", {}),
        (b"not json", {}),
        (b"\xff\xfe", {}),
        (b"[" * 60_000, {}),
        (b"1" * 60_000, {}),
    ],
)
def test_progress_values(text: bytes, values: dict[str, object]) -> None:
    assert parse_progress(text) == values


@pytest.mark.parametrize("seconds", [-1e300, -1.0, 0.0, 253402300799.9, 1e15, 1e300, float("inf")])
def test_any_time_of_a_file_has_a_text_that_others_can_read(seconds: float) -> None:
    assert 1970 <= datetime.fromisoformat(time_text(seconds)).year <= 9999


@given(st.lists(st.integers(0, 200), max_size=10))
def test_progress_is_found_however_the_stream_is_cut(cuts: list[int]) -> None:
    data = b'start\nCAVVY_PROGRESS {"step": 1}\nnoise\nCAVVY_PROGRESS {"step": 2}\nend\n'
    progress, last = ProgressScanner("/nonexistent"), None
    for piece in pieces(data, cuts):
        last = progress.feed(piece) or last
    assert last == {"step": 2}


def test_a_stream_that_is_ended_with_its_work_fails_nothing() -> None:
    streams: Any = PipeStreams.__new__(PipeStreams)
    stopped: list[str] = []
    streams._say = streams._stop = lambda *_, **__: stopped.append("stopped")
    streams._process = SimpleNamespace(kill=lambda: None)
    streams.failure, streams._over = "", False
    streams.end()
    streams._ended(137)  # its end comes after that of the work, by SIGKILL
    assert (streams.failure, stopped) == ("", [])
