"""The gateway joins requests into batches, and no request notices that it was in one."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import pytest
from tests.contract.gateway_process import GatewayProcess, wait_for
from tests.contract.http_talk import Background, Reply, Talk, ask, write_request
from tests.contract.replica_stand_in import ReplicaStandIn, Seen

from cavvy.capabilities.serving.gateway.statistics import ServiceFacts
from cavvy.capabilities.serving.server.front import make_traffic

KEYS = ("one", "two")
SERVICE = {
    **{"name": "svc", "hosts": ["svc.example"], "concurrency": 1, "batch": {"max": 4}},
    "deferred_bytes": 100,
}
KEYED = {
    **{"name": "keyed", "hosts": ["keyed.example"], "concurrency": 1, "price_header": True},
    "batch": {"max": 8, "input": "inputs", "output": "outputs"},
    "keys": [
        *[{"id": each, "sha256": hashlib.sha256(each.encode()).hexdigest()} for each in KEYS],
        {"id": "day", "sha256": hashlib.sha256(b"day").hexdigest(), "micros_per_day": 1},
    ],
}
COUNTS = ("formed", "joined", "spoiled")
WIDE = {"name": "wide", "hosts": ["wide.example"], "concurrency": 1, "batch": {"max": 16}}


@dataclass
class Predictor(ReplicaStandIn):
    """Doubles numbers. An instance that is a text says what happens instead."""

    batches: list[list[object]] = field(default_factory=list)

    async def _do_predict(self, request: Seen, asked: dict[str, str], reader, writer) -> bool:
        table = json.loads(request.body)
        name = next(each for each in ("instances", "inputs") if each in table)
        rows = table[name]
        self.batches.append(rows)
        if "die" in rows:
            writer.transport.abort()
            return False
        status = next((code for code in (400, 500, 503) if str(code) in rows), 200)
        answers = [each if isinstance(each, str) else 2 * each for each in rows]
        if "short" in rows and len(rows) > 1:
            answers = answers[1:]
        output = {"instances": "predictions", "inputs": "outputs"}[name]
        said = {"model": "m", output: answers} if status == 200 else {"error": rows}
        body = json.dumps(said).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nETag: 1\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return True


@pytest.fixture(scope="module")
def gateway() -> Iterator[GatewayProcess]:
    gateway = GatewayProcess(services=[SERVICE, KEYED, WIDE])
    yield gateway
    gateway.remove()


@pytest.fixture(scope="module")
def running() -> Iterator[Predictor]:
    replica = Predictor("r1").start()
    yield replica
    replica.stop()


@pytest.fixture
def replica(gateway: GatewayProcess, running: Predictor) -> Iterator[Predictor]:
    running.reset()
    running.batches.clear()
    for name in ("svc", "keyed", "wide"):
        gateway.set_replicas(name, [running])
    yield running
    running.release.set()
    wait_for(lambda: running.in_flight == 0)


def predict(
    gateway: GatewayProcess, *rows: object, name: str = "instances", **fields: str
) -> Reply:
    more = {"content_type": "application/json", **fields}
    body = json.dumps({name: rows}).encode()
    return ask(gateway.port, "POST", "/predict", body, **more)


def hold(gateway: GatewayProcess, replica: Predictor, **fields: str) -> Background:
    """A request that keeps the replica busy until `release`."""
    # The replica counts a request until it has sent all of the answer, which arrives earlier.
    wait_for(lambda: replica.in_flight == 0)
    busy = Background(ask, gateway.port, "GET", "/hold", b"", **fields)
    wait_for(lambda: replica.in_flight == 1)
    return busy


def predict_at_once(
    gateway: GatewayProcess, replica: Predictor, *each: tuple[object, ...], **fields: str
) -> list[Reply]:
    """Send requests while the replica is busy with another one; the replies in order."""
    host = fields.get("host", "svc.example")
    busy = hold(gateway, replica, **fields)
    calls = []
    for number, rows in enumerate(each, 1):
        calls.append(Background(predict, gateway, *rows, **fields))
        wait_for(lambda: gateway.facts(host.partition(".")[0])["backlog"] == number)  # noqa: B023
    replica.release.set()
    assert busy.result().status == 200
    return [call.result() for call in calls]


def test_waiting_requests_are_sent_as_one(gateway: GatewayProcess, replica: Predictor) -> None:
    before = gateway.facts("svc")
    predict(gateway, 1)  # so that batches of two are permitted
    replies = predict_at_once(gateway, replica, (1,), (2,))
    assert replica.batches[1:] == [[1, 2]]
    assert [each.json for each in replies] == [
        {"model": "m", "predictions": [2]},
        {"model": "m", "predictions": [4]},
    ]
    ids = [each.headers["x-request-id"] for each in replies]
    assert len(set(ids)) == 2
    seen = replica.seen[-1]
    assert (seen.get("x-request-id"), seen.get("cavvy-batch-requests")) == (ids[0], ",".join(ids))
    assert all("etag" not in each.headers for each in replies)
    replica.release.clear()
    replies = predict_at_once(gateway, replica, (1, 2), (3,), (4, 5), (6,))
    assert replica.batches[2:] == [[1, 2, 3], [4, 5, 6]], "four instances at most"
    assert [each.json["predictions"] for each in replies] == [[2, 4], [6], [8, 10], [12]]
    facts = gateway.facts("svc")
    counts = {name: facts["batches"][name] - before["batches"][name] for name in COUNTS}
    assert counts == {"formed": 3, "joined": 6, "spoiled": 0}
    for _ in range(5):
        predict(gateway, 1)
    told = msgspec.convert(gateway.facts("svc"), ServiceFacts, strict=False)
    fit = make_traffic(told).batch  # what the autoscaler gets
    assert fit is not None
    assert 0 < fit.expect_s(1) <= fit.expect_s(fit.most)
    assert 1 <= fit.most <= 4
    assert facts["answered"] - before["answered"] == facts["arrivals"] - before["arrivals"] == 9
    assert (facts["in_flight"], facts["lost"], facts["refused"]) == (0, 0, 0)


def test_a_deferred_call_is_joined_with_others(gateway: GatewayProcess, replica: Predictor) -> None:
    predict(gateway, 1, 1, 1, 1)
    before = gateway.facts("svc")
    busy = hold(gateway, replica)
    large = "x" * 70  # with the words around it, the response has more than 100 bytes
    where = [
        predict(gateway, row, prefer="respond-async").headers["location"] for row in (1, large)
    ]
    wait_for(lambda: gateway.facts("svc")["backlog"] == 2)
    other = Background(predict, gateway, 2)
    wait_for(lambda: gateway.facts("svc")["backlog"] == 3)
    replica.release.set()
    assert (busy.result().status, other.result().json["predictions"]) == (200, [4])
    kept, refused = [
        wait_for(lambda: (r := ask(gateway.port, "GET", each)).status != 202 and r)  # noqa: B023
        for each in where
    ]
    assert replica.batches[1:] == [[1, large, 2]]
    assert (kept.status, kept.json["predictions"]) == (200, [2])
    assert (refused.status, refused.json["error"]["code"]) == (502, "body-too-large")
    facts = gateway.facts("svc")
    assert (facts["in_flight"], facts["replicas"][0]["in_flight"]) == (0, 0)
    assert facts["answered"] - before["answered"] == 3
    assert facts["aborted"] - before["aborted"] == 1


@pytest.mark.parametrize("bad", ["400", "500", "short"])
def test_a_failed_batch_is_sent_again_one_by_one(
    gateway: GatewayProcess, replica: Predictor, bad: str
) -> None:
    predict(gateway, 1, 1)
    replica.batches.clear()
    replies = predict_at_once(gateway, replica, (1,), (bad,), (2,))
    assert replica.batches == [[1, bad, 2], [1], [bad], [2]]
    status = int(bad) if bad.isdigit() else 200
    assert [each.status for each in replies] == [200, status, 200]
    assert [replies[0].json["predictions"], replies[2].json["predictions"]] == [[2], [4]]
    assert gateway.facts("svc")["in_flight"] == 0


@pytest.mark.parametrize(
    ("bad", "sizes"), [("400", [1, 1, 1, 1, 4, 4, 8, 8, 16]), ("500", [*[1] * 16, 16])]
)
def test_a_large_batch_that_is_refused_is_halved(
    gateway: GatewayProcess, replica: Predictor, bad: str, sizes: list[int]
) -> None:
    """A wrong request is found with fewer batches; an error of the replica concerns any request."""
    predict(gateway, *range(8), host="wide.example")  # so that batches of 16 are permitted
    replica.batches.clear()
    rows: list[tuple[object]] = [(each,) for each in range(16)]
    rows[4] = (bad,)
    replies = predict_at_once(gateway, replica, *rows, host="wide.example")
    assert sorted(map(len, replica.batches)) == sizes
    assert replies.pop(4).status == int(bad)
    assert [each.json["predictions"] for each in replies] == [
        [2 * each] for each in range(16) if each != 4
    ]
    facts = gateway.facts("wide")
    assert (facts["in_flight"], facts["backlog"]) == (0, 0)


def test_an_overloaded_replica_gets_a_batch_once(
    gateway: GatewayProcess, replica: Predictor
) -> None:
    replies = predict_at_once(gateway, replica, (1,), ("503",))
    assert [each.status for each in replies] == [503, 503]
    assert replica.batches == [[1, "503"]]


def test_only_requests_that_may_be_repeated_survive_their_replica(
    gateway: GatewayProcess, replica: Predictor
) -> None:
    busy = hold(gateway, replica)
    calls = [
        Background(predict, gateway, "die"),
        Background(predict, gateway, 1, idempotency_key="a"),
    ]
    wait_for(lambda: gateway.facts("svc")["backlog"] == 2)
    replica.release.set()
    assert [each.result().status for each in (busy, *calls)] == [200, 502, 200]
    assert sorted(map(len, replica.batches)) == [1, 2]
    assert calls[1].result().json["predictions"] == [2]


def test_requests_that_differ_are_not_joined(gateway: GatewayProcess, replica: Predictor) -> None:
    predict(gateway, 1, 1)
    replica.batches.clear()
    busy = hold(gateway, replica)
    json_type = {"content_type": "application/json"}
    calls = [
        Background(predict, gateway, 1, x_user="a"),
        Background(predict, gateway, 2, x_user="b"),
        Background(predict, gateway, 3, content_type="text/plain"),
        Background(predict, gateway, 4, authorization="Bearer other"),
        Background(ask, gateway.port, "POST", "/predict?v=2", b'{"instances":[5]}', **json_type),
        Background(
            ask, gateway.port, "POST", "/predict", b'{"instances":[6],"stream":true}', **json_type
        ),
        Background(ask, gateway.port, "POST", "/predict", b'{"instances":[7],"k":1}', **json_type),
    ]
    wait_for(lambda: gateway.facts("svc")["backlog"] == len(calls))
    replica.release.set()
    assert busy.result().status == 200
    assert sorted(each.result().json["predictions"][0] for each in calls) == [
        2 * number for number in range(1, 8)
    ]
    assert all(len(each) == 1 for each in replica.batches)


def test_a_client_that_leaves_takes_only_its_own_request(
    gateway: GatewayProcess, replica: Predictor
) -> None:
    predict(gateway, 1, 1)
    replica.batches.clear()
    busy = hold(gateway, replica)
    body = b'{"instances": [1]}'
    with Talk(gateway.port) as talk:
        talk.send(write_request("POST", "/predict", body, content_type="application/json"))
        wait_for(lambda: gateway.facts("svc")["backlog"] == 1)
        calls = [Background(predict, gateway, number) for number in (2, 3)]
        wait_for(lambda: gateway.facts("svc")["backlog"] == 3)
    wait_for(lambda: gateway.facts("svc")["backlog"] == 2)
    replica.release.set()
    assert busy.result().status == 200
    assert sorted(each.result().json["predictions"][0] for each in calls) == [4, 6]
    assert sorted(map(sorted, replica.batches)) == [[2, 3]]


def test_large_and_chunked_bodies_pass_alone(gateway: GatewayProcess, replica: Predictor) -> None:
    large = predict(gateway, "x" * 600_000)
    assert large.json["predictions"] == ["x" * 600_000]
    reply = predict(gateway, 1, 2, 3, 4, 5)
    assert reply.json["predictions"] == [2, 4, 6, 8, 10]


def test_members_pay_for_their_instances(gateway: GatewayProcess, replica: Predictor) -> None:
    gateway.set_replicas("keyed", [replica], rate_micros=3_600_000_000)
    host = {"host": "keyed.example", "name": "inputs"}
    predict(gateway, 1, 1, 1, authorization="Bearer one", **host)
    before = gateway.facts("keyed")["work"]["r1"]
    busy = hold(gateway, replica, host="keyed.example", authorization="Bearer one")
    calls = []
    for rows, key in (((1, 2, 3), "one"), ((4,), "two")):
        fields = {"authorization": f"Bearer {key}", **host}
        calls.append(Background(predict, gateway, *rows, **fields))
        wait_for(lambda: gateway.facts("keyed")["backlog"] == len(calls))
    replica.release.set()
    assert busy.result().status == 200
    first, second = (each.result() for each in calls)
    assert (first.json["outputs"], second.json["outputs"]) == ([2, 4, 6], [8])
    assert replica.batches[-1] == [1, 2, 3, 4]
    prices = [int(each.headers["cavvy-price-micros"]) for each in (first, second)]
    assert prices[0] == pytest.approx(3 * prices[1], abs=5)
    work = gateway.facts("keyed")["work"]["r1"]
    assert work["one"]["requests"] - before["one"]["requests"] == 2
    assert work["two"]["requests"] == 1


def test_joined_requests_count_in_the_dollars_of_their_keys(
    gateway: GatewayProcess, replica: Predictor
) -> None:
    gateway.set_replicas("keyed", [replica], rate_micros=10**12)
    host, day = {"host": "keyed.example", "name": "inputs"}, {"authorization": "Bearer day"}
    busy = hold(gateway, replica, host="keyed.example", authorization="Bearer one")
    calls = []
    for number in range(2):
        calls.append(Background(predict, gateway, number, **host, **day))
        wait_for(lambda: gateway.facts("keyed")["backlog"] == len(calls))
    replica.release.set()
    assert [each.result().status for each in (busy, *calls)] == [200] * 3
    assert replica.batches[-1] == [0, 1]
    assert predict(gateway, 3, **host, **day).status == 429
