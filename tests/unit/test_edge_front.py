"""The door of a device: which engine or cloud answers a request, and what is counted and kept."""

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cavvy.edge.front import CloudTarget, EdgeFront, EngineTarget

PATH = "/v1/models/m:predict"


class KnownEngine(EngineTarget):
    """An engine with the same answer to all requests. Status 0: it gives no answer."""

    def __init__(self, number: int, status: int) -> None:
        super().__init__(number, 0)
        self.status = status
        self.asked: list[dict[str, str]] = []

    def ask(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
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


def test_a_sample_that_cannot_be_kept_does_not_cost_the_answer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    with front_at(KnownEngine(1, 200)) as front:
        front.keep = fail
        assert call(front) == (200, "device", b'{"by": 1}')
    capsys.readouterr()
