"""The door of a device: which engine or cloud answers a request, and what is counted and kept."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from cavvy.capabilities.edge.on_device.front import (
    BUCKETS,
    LEAST_S,
    CloudTarget,
    EdgeFront,
    EngineTarget,
    bucket_of,
)

PATH = "/v1/models/m:predict"


class KnownEngine(EngineTarget):
    """An engine with the same answer to all requests. Status 0: it gives no answer."""

    def __init__(self, number: int, status: int) -> None:
        super().__init__(number, 0)
        self.status = status
        self.asked: list[dict[str, str]] = []

    def ask(
        self, method: str, path: str, body: bytes, headers: dict[str, str], wait_s: float
    ) -> tuple[int, str, bytes]:
        self.asked.append(headers)
        if not self.status:
            raise ConnectionRefusedError
        return self.status, "application/json", json.dumps({"by": self.number}).encode()


@contextmanager
def front_at(*engines: EngineTarget) -> Iterator[EdgeFront]:
    made = EdgeFront(("127.0.0.1", 0))
    if engines:
        made.routes["m"] = list(engines)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield made
    finally:
        made.shutdown()
        thread.join()
        made.server_close()


def call(front: EdgeFront, method: str = "POST", path: str = PATH) -> tuple[int, str, bytes]:
    """Return the status, who answered, and the body."""
    line = http.client.HTTPConnection("127.0.0.1", front.server_port, timeout=30)
    try:
        body = b"{}" if method == "POST" else None
        line.request(method, path, body, {"Authorization": "Bearer a"})
        reply = line.getresponse()
        return reply.status, reply.headers["Cavvy-Answered-By"], reply.read()
    finally:
        line.close()


@pytest.mark.parametrize(
    ("engines", "cloud", "status", "by", "asked"),
    [
        ([200, 200], None, 200, "device", [1, 0]),
        ([400, 200], None, 200, "device", [1, 1]),
        ([500, 400], None, 400, "device", [1, 1]),
        ([0], None, 502, "device", [1]),
        ([200], 200, 200, "device", [1, 0]),
        ([400], 200, 400, "device", [1, 0]),
        ([500, 404], 200, 404, "device", [1, 1, 0]),
        ([503], 200, 200, "cloud", [1, 1]),
        ([0, 0], 200, 200, "cloud", [1, 1, 1]),
        ([500], 429, 429, "cloud", [1, 1]),
        ([429], 200, 200, "cloud", [1, 1]),
        ([429, 200], 200, 200, "device", [1, 1, 0]),
        ([], 200, 200, "cloud", [1]),
        ([], None, 404, "device", []),
    ],
)
def test_a_request_goes_on_until_something_answers_it(
    engines: list[int], cloud: int | None, status: int, by: str, asked: list[int]
) -> None:
    known = [KnownEngine(number, each) for number, each in enumerate(engines, 1)]
    far = KnownEngine(9, cloud or 0)
    with front_at(*known) as front, front_at(far) as other:
        if cloud is not None:
            front.cloud = CloudTarget(f"http://127.0.0.1:{other.server_port}", "s3cret")
            known.append(far)
        assert call(front)[:2] == (status, by)
    assert [len(each.asked) for each in known] == asked
    keys = [headers["Authorization"] for headers in far.asked]
    assert keys == ["Bearer s3cret"] * len(far.asked), "the cloud gets its own key"


def test_only_predictions_are_counted_and_kept() -> None:
    tried, served = KnownEngine(2, 400), KnownEngine(1, 200)
    kept: list[tuple[str, int, bytes, bytes]] = []
    with front_at(tried, served) as front:
        front.keep = lambda *sample: kept.append(sample)
        call(front)
        call(front, "GET", "/v1/models/m")
        assert call(front, "GET", "/v2/health/ready")[0] == 200
    names = ("requests", "errors", "timed")
    assert [tried.sums[name] for name in names] == [1, 1, 0]
    assert [served.sums[name] for name in names] == [1, 0, 1]
    assert kept == [("m", 1, b"{}", b'{"by": 1}')]
    assert (tried.busy, served.busy) == (0, 0)


@pytest.mark.parametrize("status", [401, 402, 403, 404, 429, 500])
def test_a_service_that_refuses_the_device_is_left_for_the_engine(status: int) -> None:
    engine, far = KnownEngine(1, 200), KnownEngine(9, status)
    with front_at(engine) as front, front_at(far) as other:
        front.clouds["m"] = cloud = CloudTarget(f"http://127.0.0.1:{other.server_port}", "k")
        engine.takes = lambda: False  # type: ignore[method-assign]
        for _ in range(3):
            assert call(front)[:2] == (200, "device")
        assert cloud.takes() is False, "it rests"
        assert len(far.asked) == 3
        front.routes.clear()
        assert call(front)[0] == status
        assert front.counts["m"].tell()["lost"] == 1


@pytest.mark.parametrize(
    "request_line",
    [
        b"POST /v1/models/m:predict\xff HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v1/models/m:\x01predict HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v1/models/m:predict HTTP/1.1\r\nA: b\r\n c\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v1/models/m:predict HTTP/1.1\r\nContent-Length: 90\r\n\r\n{",
    ],
)
def test_a_wrong_request_says_nothing_about_an_engine(request_line: bytes) -> None:
    engine = EngineTarget(1, 9)
    with (
        front_at(engine) as front,
        socket.create_connection(("127.0.0.1", front.server_port), 30) as line,
    ):
        line.sendall(request_line)
        line.shutdown(socket.SHUT_WR)
        assert line.recv(1000).startswith(b"HTTP/1.1 400 ")
        assert (engine.sums["requests"], engine.busy, engine.takes()) == (0, 0, True)
        assert front.counts == {}


def test_a_key_that_cannot_be_sent_is_not_told_to_callers() -> None:
    with front_at() as front, front_at(KnownEngine(9, 200)) as other:
        front.clouds["m"] = CloudTarget(f"http://127.0.0.1:{other.server_port}", "s3c\nret")
        status, _, body = call(front)
        assert (status, b"s3c" in body) == (502, False)


def test_a_sample_that_cannot_be_kept_does_not_cost_the_answer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    with front_at(KnownEngine(1, 200)) as front:
        front.keep = fail
        assert call(front) == (200, "device", b'{"by": 1}')
    capsys.readouterr()


class PacedEngine(KnownEngine):
    """An engine that computes one request after the other, each in `seconds`, unless it hangs."""

    def __init__(self, number: int, seconds: float) -> None:
        super().__init__(number, 200)
        self.seconds, self.hangs = seconds, False
        self._one = threading.Lock()

    def ask(
        self, method: str, path: str, body: bytes, headers: dict[str, str], wait_s: float
    ) -> tuple[int, str, bytes]:
        if self.hangs:
            time.sleep(wait_s)
            raise TimeoutError
        with self._one:
            time.sleep(self.seconds)
        return super().ask(method, path, body, headers, wait_s)


def test_an_engine_that_hangs_is_left_alone_and_gets_requests_again_when_it_answers() -> None:
    engine, far = PacedEngine(1, 0.001), KnownEngine(9, 200)
    with front_at(engine) as front, front_at(far) as other:
        front.clouds["m"] = CloudTarget(f"http://127.0.0.1:{other.server_port}", "")
        assert call(front)[1] == "device"
        engine.hangs = True
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: call(front)[:2], range(40)))
        assert set(answers) == {(200, "cloud")}
        engine.hangs = False
        deadline = time.monotonic() + 60
        while call(front)[1] != "device":
            assert time.monotonic() < deadline
        told = front.counts["m"].tell()
        assert sum(told["cloud"].values()) >= 40
        assert told["lost"] == 0


def test_only_late_answers_over_some_time_make_an_engine_stuck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    engine = EngineTarget(1, 0)

    def fail() -> bool:
        engine.end(engine.begin(), status=0, late=True, counts=True)
        return engine.is_stuck

    assert not fail()
    now[0] += 3600
    assert not engine.is_stuck, "no request came meanwhile"
    assert not fail()
    engine.end(engine.begin(), status=200, late=False, counts=True)
    found = []
    for _ in range(4):
        found.append(fail())
        now[0] += 16
    assert found == [False, False, True, True]
    engine.sleep()
    fail()
    engine.wake(9)
    assert (engine.is_stuck, engine.takes()) == (False, True), "it slept while requests waited"


def test_what_an_overloaded_engine_cannot_answer_soon_goes_to_the_cloud() -> None:
    engine, far = PacedEngine(1, 0.1), KnownEngine(9, 200)
    with front_at(engine) as front, front_at(far) as other:
        front.clouds["m"] = CloudTarget(f"http://127.0.0.1:{other.server_port}", "")
        for _ in range(20):
            assert call(front)[1] == "device", "an engine that is used steadily is not overloaded"
        with ThreadPoolExecutor(60) as pool:
            answers = [each[:2] for each in pool.map(lambda _: call(front), range(120))]
        assert {each[0] for each in answers} == {200}
        assert {each[1] for each in answers} == {"device", "cloud"}
        assert call(front)[1] == "device"


def test_without_a_cloud_that_answers_the_device_tries_on() -> None:
    engine = KnownEngine(1, 0)
    with front_at(engine) as front:
        front.clouds["m"] = CloudTarget("http://127.0.0.1:9", "")
        assert [call(front)[0] for _ in range(6)] == [502] * 6
        engine.status = 200
        assert call(front)[:2] == (200, "device"), "also while it should rest"
        assert front.counts["m"].tell()["lost"] == 6


def test_callers_that_name_many_models_do_not_fill_the_memory() -> None:
    with front_at() as front, front_at() as other:
        front.cloud = CloudTarget(f"http://127.0.0.1:{other.server_port}", "")
        for number in range(80):
            assert call(front, path=f"/v1/models/m{number}:predict")[0] == 404
        assert len(front.counts) == 64


def test_times_are_counted_in_buckets_that_grow_by_a_fifth() -> None:
    for seconds in (0.0, 1e-5, 1e-4, 0.003, 0.25, 1.0, 59.0, 170.0):
        bound = LEAST_S * 2 ** (bucket_of(seconds) / 4)
        assert seconds <= bound * 1.0001
        assert bound <= max(LEAST_S, seconds * 1.2)
    assert bucket_of(1e9) == BUCKETS - 1
