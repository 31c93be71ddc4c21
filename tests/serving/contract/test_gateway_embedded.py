"""The embedded data plane keeps the contract of both planes, and what it alone promises."""

import hashlib
import os
import socket
import ssl
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import Authority
from tests.contract.gateway_model_suite import ModelSuite
from tests.contract.gateway_process import GatewayProcess, wait_for
from tests.contract.gateway_suite import (
    CANARY,
    KEY,
    KEYED,
    KEYED_MODEL,
    MODEL,
    OPEN,
    RATED,
    SERVICE,
    SMALL,
    GatewaySuite,
    of_models,
    replicas,
)
from tests.contract.http_talk import Background, Talk, ask, write_request
from tests.contract.replica_stand_in import ReplicaStandIn

from cavvy.capabilities.serving.gateway.client_keys import SERVICE_KEY
from cavvy.task_files import parse_file

STICKY = {"name": "sticky", "hosts": ["sticky.example"], "routing": {"by": "header"}}
BY_CACHE = {"name": "by-cache", "hosts": ["cache.example"], "routing": {"by": "cache"}}
BELOW = {"name": "below", "prefix": "/models/below"}
QUIET = {"name": "quiet", "hosts": ["quiet.example"], "silence_s": 0.5}
TIMED = {
    **{"name": "timed", "hosts": ["timed.example"], "slow_s": 0.3},
    **{"concurrency": 1, "queue_max": 1, "wait_s": 0.4},
}
ESTIMATED = {"name": "estimated", "hosts": ["estimated.example"], "cold_start_s": 40}
PRICED = {**KEYED, "name": "priced", "hosts": ["priced.example"], "price_header": True}
BRIEF = {"name": "brief", "hosts": ["brief.example"], "concurrency": 1, "deferred_bytes": 100}
NEW_KEYS = {"name": "new-keys", "hosts": ["new-keys.example"], "keyed": True}
SERVICES = (
    SERVICE,
    KEYED,
    RATED,
    MODEL,
    KEYED_MODEL,
    NEW_KEYS,
    SMALL,
    STICKY,
    BY_CACHE,
    BELOW,
    ESTIMATED,
    QUIET,
    TIMED,
    CANARY,
    PRICED,
    BRIEF,
    OPEN,
)


class Embedded(GatewayProcess):
    def count_waiting(self, service: str) -> int:
        return self.facts(service)["backlog"]


@pytest.fixture(scope="module")
def plane() -> Iterator[Embedded]:
    plane = Embedded(services=SERVICES, limits={"head_s": 1, "idle_s": 300})
    yield plane
    plane.remove()


class TestEmbedded(GatewaySuite, ModelSuite):
    pass


__all__ = ["plane", "replicas"]  # fixtures


def test_responses_have_a_price_and_work_is_counted_by_key(
    plane: Embedded, replicas: list[ReplicaStandIn]
) -> None:
    replicas[0].reset()
    hour = 3_600_000_000  # micro-dollars: a microsecond costs one
    plane.set_replicas("priced", replicas[:1], rate_micros=hour)
    call = Background(ask, plane.port, "GET", "/hold", host="priced.example", x_api_key=KEY)
    wait_for(lambda: replicas[0].in_flight)
    # another price changes nothing for the request in flight but its price
    plane.set_replicas("priced", replicas[:1], rate_micros=2 * hour)
    wait_for(lambda: plane.facts("priced")["work"]["r1"]["fast"]["work_us"] >= 1000)
    replicas[0].release.set()
    reply = call.result()
    work = plane.facts("priced")["work"]["r1"]["fast"]
    price = int(reply.headers["cavvy-price-micros"])
    assert 2000 <= price <= 2 * work["work_us"] + 1
    assert work["requests"] == 1
    assert "cavvy-price-micros" not in ask(plane.port, "GET", "/echo").headers
    plane.set_replicas("priced", [])
    assert plane.facts("priced")["work"]["r1"]["fast"] == work, "it is told after the replica's end"


@pytest.mark.parametrize("path", ["/large?n=101", "/chunks?n=20", "/large?n=200000"])
def test_a_result_that_is_too_large_frees_its_slot_once(
    plane: Embedded, replicas: list[ReplicaStandIn], path: str
) -> None:
    replicas[0].reset()
    plane.set_replicas("brief", replicas[:1])
    about = {"host": "brief.example"}
    where = ask(plane.port, "GET", path, prefer="respond-async", **about).headers["location"]
    reply = wait_for(lambda: (r := ask(plane.port, "GET", where, **about)).status != 202 and r)
    assert (reply.status, reply.json["error"]["code"]) == (502, "body-too-large")
    facts = plane.facts("brief")
    assert [facts["in_flight"], facts["replicas"][0]["in_flight"]] == [0, 0]


def test_a_service_whose_budget_is_spent_says_so(
    plane: Embedded, replicas: list[ReplicaStandIn]
) -> None:
    replicas[0].reset()
    plane.set_replicas("svc", [])
    waits = Background(ask, plane.port, "GET", "/echo")
    wait_for(lambda: plane.count_waiting("svc") == 1)
    plane.set_services({**SERVICE, "closed": "the budget is spent"}, *SERVICES[1:])
    for reply in (waits.result(), ask(plane.port, "GET", "/echo")):
        error = reply.json["error"]
        assert (reply.status, error["code"]) == (402, "budget-spent")
        assert (error["message"], error["type"]) == ("the budget is spent", "insufficient_quota")
        assert "retry-after" not in reply.headers
    plane.set_services(*SERVICES)
    plane.set_replicas("svc", replicas[:1])
    assert ask(plane.port, "GET", "/echo").status == 200


def test_only_the_owner_may_open_the_control_socket(plane: Embedded) -> None:
    path = Path(plane.config["control"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "error" in plane.control(type="replicas", service="none", replicas=[])
    assert "error" in plane.control(type="nonsense")


def test_those_that_wait_are_answered_in_order(
    plane: Embedded, replicas: list[ReplicaStandIn]
) -> None:
    replicas[0].reset()
    plane.set_replicas("svc", [])
    calls = []
    for number in range(8):
        calls.append(Background(ask, plane.port, "GET", f"/echo?{number}"))
        wait_for(lambda number=number: plane.count_waiting("svc") == number + 1)
    plane.set_replicas("svc", replicas[:1], concurrency=1)
    assert {call.result().status for call in calls} == {200}
    assert [seen.path for seen in replicas[0].seen] == [f"/echo?{n}" for n in range(8)]


def test_a_replica_with_an_engine_gets_requests_side_by_side(
    plane: Embedded, replicas: list[ReplicaStandIn]
) -> None:
    (task,) = parse_file("service: {engine: vllm, model: m}").tasks
    assert task.service is not None
    replicas[0].reset()
    plane.set_replicas("svc", replicas[:1], concurrency=task.service.concurrency)
    calls = [Background(ask, plane.port, "GET", "/hold") for _ in range(12)]
    wait_for(lambda: replicas[0].in_flight == 12)
    assert plane.count_waiting("svc") == 0
    replicas[0].release.set()
    assert {call.result().status for call in calls} == {200}


def test_requests_are_counted_by_the_places_where_they_must_stay(
    plane: Embedded, replicas: list[ReplicaStandIn]
) -> None:
    service = {**SERVICE, "places": ["us", "eu"], "full_places": ["eu"]}
    plane.set_services(service, *SERVICES[1:])
    plane.set_replicas("svc", replicas[:1], places={"r1": ("us",)})
    waiting = Background(ask, plane.port, "GET", "/echo", cavvy_residency="eu")
    wait_for(lambda: plane.facts("svc")["places"].get("eu", {}).get("waiting") == 1)
    late = ask(plane.port, "GET", "/echo", cavvy_residency="eu", prefer="wait=0")
    assert late.json["error"]["message"].endswith(
        "the service has its maximum number of replicas, but none in the requested places"
    )
    assert ask(plane.port, "GET", "/echo").status == 200
    facts = plane.facts("svc")["places"]
    assert facts["eu"]["asked_at"] <= facts[""]["asked_at"]
    assert facts[""]["waiting"] == 0
    plane.set_replicas("svc", replicas[:1], places={"r1": ("us", "eu")})
    assert waiting.result().status == 200
    plane.set_services(*SERVICES)
    plane.set_replicas("svc", replicas[:1])


def test_a_service_whose_replicas_fail_says_so_soon(
    plane: Embedded, replicas: list[ReplicaStandIn]
) -> None:
    plane.set_replicas("svc", [])
    early = Background(ask, plane.port, "GET", "/echo")
    wait_for(lambda: plane.count_waiting("svc") == 1)
    failing = {**SERVICE, "failing": "its replicas end: exit code 1", "failing_s": 0.2}
    plane.set_services(failing, *SERVICES[1:])
    late = ask(plane.port, "GET", "/echo")
    for answer in (early.result(), late):
        assert (answer.status, answer.json["error"]["code"]) == (504, "no-replica-in-time")
        assert answer.json["error"]["message"].endswith(": its replicas end: exit code 1")
    plane.set_replicas("svc", replicas[:1])  # one is ready after all
    assert ask(plane.port, "GET", "/echo").status == 200
    plane.set_services(*SERVICES)
    plane.set_replicas("svc", replicas[:1])


def test_a_repeated_request_waits_for_a_replica_that_has_not_failed_it(
    plane: Embedded, replicas: list[ReplicaStandIn]
) -> None:
    two = replicas[:2]
    for each in two:
        each.reset()
    plane.set_replicas("svc", two, concurrency=2)
    holds = []
    for number in range(3):
        holds.append(Background(ask, plane.port, "GET", "/hold"))
        wait_for(lambda number=number: sum(each.in_flight for each in two) == number + 1)
    half, full = sorted(two, key=lambda each: each.in_flight)
    dying = Background(ask, plane.port, "GET", "/die")
    wait_for(lambda: plane.count_waiting("svc") == 1)
    assert ask(plane.port, "GET", "/echo").json["replica"] == half.name, "it holds up no others"
    half.release.set()  # its slot is free, but it has failed the request
    wait_for(lambda: half.in_flight == 0)
    assert ask(plane.port, "GET", "/echo").json["replica"] == half.name
    assert (plane.count_waiting("svc"), full.in_flight) == (1, 2)
    full.release.set()
    assert dying.result().status == 502
    assert [sum(seen.path == "/die" for seen in each.seen) for each in two] == [1, 1]
    assert [hold.result().status for hold in holds] == [200] * 3


def test_an_answer_in_which_nothing_moves_is_ended(
    plane: Embedded, replicas: list[ReplicaStandIn]
) -> None:
    replicas[0].reset()
    plane.set_replicas("quiet", replicas[:1])
    with Talk(plane.port) as talk:
        talk.send(write_request("GET", "/chunks?n=2&paced=1", host="quiet.example"))
        with pytest.raises((EOFError, ConnectionError)):
            talk.read()
    wait_for(lambda: plane.facts("quiet")["in_flight"] == 0)
    assert ask(plane.port, "GET", "/chunks?n=3&pause_ms=400", host="quiet.example").status == 200


def test_a_full_queue_refuses_with_the_rest_of_the_cold_start(plane: Embedded) -> None:
    plane.set_replicas("small", [])
    calls = [
        Background(ask, plane.port, "GET", "/echo", host="small.example", prefer="wait=2")
        for _ in range(2)
    ]
    wait_for(lambda: plane.count_waiting("small") == 2)
    reply = ask(plane.port, "GET", "/echo", host="small.example")
    assert (reply.status, reply.json["error"]["code"]) == (429, "queue-full")
    assert "retry-after" not in reply.headers  # nothing is known of its cold start
    assert {call.result().status for call in calls} == {504}
    reply = ask(plane.port, "GET", "/echo", host="estimated.example", prefer="wait=0")
    assert reply.status == 504
    assert 30 < int(reply.headers["retry-after"]) <= 40


def test_a_slow_head_is_ended(plane: Embedded) -> None:
    with Talk(plane.port) as talk:
        talk.send(b"GET /echo HTTP/1.1\r\nHost: svc.example\r\n")
        assert talk.rest().startswith(b"HTTP/1.1 408")


def test_a_session_stays_with_its_replica(plane: Embedded, replicas: list[ReplicaStandIn]) -> None:
    plane.set_replicas("sticky", replicas)
    found: dict[str, set[str]] = {}
    for number in range(60):
        session = f"s{number % 20}"
        reply = ask(plane.port, "GET", "/echo", host="sticky.example", x_session_id=session)
        found.setdefault(session, set()).add(reply.json["replica"])
    assert {len(names) for names in found.values()} == {1}
    assert len(set.union(*found.values())) == 3


@of_models
def test_turns_of_a_conversation_go_to_the_replica_that_holds_the_turns_before(
    plane: Embedded, replicas: list[ReplicaStandIn]
) -> None:
    plane.set_replicas("by-cache", replicas)
    found: dict[int, set[str]] = {}
    for number in range(40):
        with Talk(plane.port) as talk:  # the body comes after the head
            said = b"conversation %d " % (number % 10) * (20 + number)
            body = b'{"messages": [{"role": "user", "content": "%b"}]}' % said
            data = write_request("POST", "/echo", body, host="cache.example")
            talk.send(data[: -len(body)])
            talk.send(body[:4])
            talk.send(body[4:])
            found.setdefault(number % 10, set()).add(talk.read().json["replica"])
    assert {len(names) for names in found.values()} == {1}
    assert len(set.union(*found.values())) == 3


@pytest.mark.parametrize("body", [b"x", b"{", b"[" * 5000, b'{"messages": {"a": 1}}', b"{}"])
def test_a_body_without_a_prompt_is_passed_on(
    plane: Embedded, replicas: list[ReplicaStandIn], body: bytes
) -> None:
    plane.set_replicas("by-cache", replicas)
    reply = ask(plane.port, "POST", "/echo", body, host="cache.example")
    assert (reply.status, reply.json["size"]) == (200, len(body))


def test_a_path_prefix_chooses_the_service(plane: Embedded, replicas: list[ReplicaStandIn]) -> None:
    plane.set_replicas("below", replicas[:1])
    for path, seen in (("/models/below/v1?x=1", "/v1?x=1"), ("/models/below", "/")):
        assert ask(plane.port, "GET", path, host="any.example").json["path"] == seen
    assert ask(plane.port, "GET", "/models/belowx", host="any.example").status == 404


def test_statistics_add_up(plane: Embedded, replicas: list[ReplicaStandIn]) -> None:
    replicas[0].reset()
    plane.set_replicas("svc", replicas[:1])
    before = plane.facts("svc")
    calls = [Background(ask, plane.port, "GET", "/hold") for _ in range(6)]
    wait_for(lambda: plane.facts("svc")["backlog"] == 2)
    during = plane.facts("svc")
    assert during["in_flight"] == 4
    assert during["arrivals"] - before["arrivals"] == 6
    replicas[0].release.set()
    assert {call.result().status for call in calls} == {200}
    after = wait_for(lambda: (f := plane.facts("svc"))["in_flight"] == 0 and f)
    assert after["answered"] - before["answered"] == 6
    busy = after["concurrency_s"] - before["concurrency_s"]
    served = after["service_s"] - before["service_s"]
    assert busy == pytest.approx(served, rel=0.05, abs=0.02)
    assert sum(after["latency_us"].values()) == after["answered"]
    assert after["p50_s"] <= after["p99_s"]


def test_slow_and_unserved_requests_are_counted(
    plane: Embedded, replicas: list[ReplicaStandIn]
) -> None:
    replicas[0].reset()
    plane.set_replicas("timed", replicas[:1])
    served = Background(ask, plane.port, "GET", "/hold", host="timed.example")
    wait_for(lambda: replicas[0].in_flight)
    waits = Background(ask, plane.port, "GET", "/echo", host="timed.example")
    wait_for(lambda: plane.count_waiting("timed") == 1)
    assert ask(plane.port, "GET", "/echo", host="timed.example").status == 429
    assert waits.result().status == 504
    replicas[0].release.set()  # later than `slow_s`, because the other one has waited for longer
    assert served.result().status == 200
    facts = wait_for(lambda: (f := plane.facts("timed"))["in_flight"] == 0 and f)
    assert (facts["answered"], facts["slow"], facts["unserved"], facts["refused"]) == (1, 1, 2, 2)
    assert plane.facts("svc")["slow"] == 0, "it has no limit"


def test_results_survive_a_restart(replicas: list[ReplicaStandIn]) -> None:
    replicas[0].reset()
    plane = Embedded(services=[SERVICE])
    try:
        plane.set_replicas("svc", replicas[:1])
        done = ask(plane.port, "POST", "/echo", b"done", prefer="respond-async")
        wait_for(lambda: ask(plane.port, "GET", done.headers["location"]).status == 200)
        sent = ask(plane.port, "POST", "/hold", b"sent", prefer="respond-async")
        again = ask(plane.port, "PUT", "/hold", b"again", prefer="respond-async")
        wait_for(lambda: replicas[0].in_flight == 2)
        plane.set_replicas("svc", [])
        waiting = ask(plane.port, "POST", "/echo", b"waits", prefer="respond-async")
        plane.process.kill()
        plane.process.wait()
        wait_for(lambda: replicas[0].in_flight == 0)
        replicas[0].release.set()
        plane.start()
        plane.set_replicas("svc", replicas[:1])
        for call, status, size in ((done, 200, 4), (again, 200, 5), (waiting, 200, 5)):
            where = call.headers["location"]
            reply = wait_for(lambda w=where: (r := ask(plane.port, "GET", w)).status != 202 and r)
            assert (reply.status, reply.json["size"]) == (status, size)
        reply = ask(plane.port, "GET", sent.headers["location"])
        assert (reply.status, reply.json["error"]["code"]) == (502, "interrupted")
    finally:
        plane.remove()


def test_requests_in_flight_finish_when_the_gateway_stops(replicas: list[ReplicaStandIn]) -> None:
    replicas[0].reset()
    plane = Embedded(services=[SERVICE])
    try:
        plane.set_replicas("svc", replicas[:1])
        call = Background(ask, plane.port, "GET", "/hold")
        wait_for(lambda: replicas[0].in_flight == 1)
        plane.process.terminate()
        wait_for(lambda: not os.path.exists(plane.config["control"]) or call.done() or True)
        replicas[0].release.set()
        assert call.result().status == 200
        assert plane.process.wait(60) == 0
    finally:
        plane.remove()


def test_requests_that_wait_when_the_gateway_stops_learn_the_reason() -> None:
    plane = Embedded(services=[SERVICE])
    try:
        calls: Any = [Background(ask, plane.port, "POST", "/echo", b"x" * n) for n in (1, 3 << 20)]
        later = ask(plane.port, "POST", "/echo", b"later", prefer="respond-async")
        wait_for(lambda: plane.count_waiting("svc") == 3)
        plane.control(type="stop", drain_s=0.1)
        for call in calls:
            reply = call.result()
            assert (reply.status, reply.json["error"]["code"]) == (503, "gateway-stopping")
        assert plane.process.wait(60) == 0
        plane.start()
        assert ask(plane.port, "GET", later.headers["location"]).status == 202, "it waits again"
    finally:
        plane.remove()


def test_a_service_that_changes_keeps_its_requests(replicas: list[ReplicaStandIn]) -> None:
    replicas[0].reset()
    plane = Embedded(services=[SERVICE])
    try:
        call: Any = Background(ask, plane.port, "GET", "/echo")
        wait_for(lambda: plane.count_waiting("svc") == 1)
        plane.set_services({**SERVICE, "concurrency": 1})
        assert plane.count_waiting("svc") == 1
        plane.set_replicas("svc", replicas[:1])
        assert call.result().status == 200
        plane.set_services()
        assert ask(plane.port, "GET", "/echo").status == 404
    finally:
        plane.remove()


def test_tls_comes_from_files(replicas: list[ReplicaStandIn], tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue()
    replicas[0].reset()
    plane = Embedded(services=[SERVICE], tls={"certificate": str(certificate), "key": str(key)})
    try:
        plane.set_replicas("svc", replicas[:1])
        with Talk(plane.port, ssl.create_default_context(cafile=authority.ca)) as talk:
            body = b"x" * 300_000
            assert talk.ask("POST", "/echo", body).json["size"] == len(body)
            assert replicas[0].seen[-1].get("x-forwarded-proto") == "https"
            talk.send(write_request("GET", "/hold"))
            wait_for(lambda: replicas[0].in_flight == 1)
        wait_for(lambda: replicas[0].in_flight == 0)
    finally:
        plane.remove()


def test_a_host_name_has_its_own_certificate(
    replicas: list[ReplicaStandIn], tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue()
    folder = tmp_path / "hosts"
    folder.mkdir()
    for name, host in (("svc.example", "svc.example"), ("_.wide.example", "*.wide.example")):
        files = authority.issue("host", host=host)
        (folder / f"{name}.pem").write_bytes(b"".join(each.read_bytes() for each in files))
    (folder / "broken.example.pem").write_text("no certificate")
    tls = {"certificate": str(certificate), "key": str(key), "folder": str(folder)}
    plane = Embedded(services=[SERVICE], tls=tls)
    try:
        context = ssl.create_default_context(cafile=authority.ca)
        context.set_alpn_protocols(["h2", "http/1.1"])

        def greet(name: str) -> str | None:
            with (
                socket.create_connection(("127.0.0.1", plane.port)) as plain,
                context.wrap_socket(plain, server_hostname=name) as secure,
            ):
                return secure.selected_alpn_protocol()

        for name in ("svc.example", "a.wide.example", "localhost"):
            assert greet(name) == "http/1.1", "HTTP/2 is HAProxy's"
        for name in ("broken.example", "b.a.wide.example"):
            with pytest.raises(ssl.SSLCertVerificationError):
                greet(name)
    finally:
        plane.remove()


def test_http_2_is_refused_with_the_reason(plane: Embedded) -> None:
    with Talk(plane.port) as talk:
        talk.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        reply = talk.read("PRI")
    assert (reply.status, "HAProxy" in reply.json["error"]["message"]) == (505, True)


def test_keys_come_end_and_are_counted_while_the_gateway_runs(
    plane: Embedded, replicas: list[ReplicaStandIn]
) -> None:
    plane.set_replicas("new-keys", replicas[:1])
    others = [each for each in SERVICES if each is not NEW_KEYS]

    def make_key(name: str, **more: Any) -> dict[str, Any]:
        return {"id": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), **more}

    def call(key: str) -> int:
        return ask(plane.port, "GET", "/echo", host="new-keys.example", x_api_key=key).status

    assert call("first") == 401, "without any key, nobody may call"
    limits = {"per_s": 0.001, "burst": 1}
    keys = [make_key("first", **limits), make_key("old", expires_at=time.time() - 1)]
    plane.set_services(*others, {**NEW_KEYS, "keys": keys})
    assert [call("first"), call("first"), call("old")] == [200, 429, 401]
    keys = [make_key("first", **limits), make_key("second")]
    plane.set_services(*others, {**NEW_KEYS, "keys": keys})
    assert [call("first"), call("second")] == [429, 200], "what was counted stays counted"
    facts = plane.facts("new-keys")
    assert set(facts["keys_used"]) == {"first", "second"}
    assert (facts["arrivals"], facts["refused"]) == (2, 4), "who may not call starts no replica"
    plane.set_services(*SERVICES)
    assert [call("first"), call("second")] == [401, 401]


def test_errors_of_a_canary_are_counted_and_no_request_waits_for_it(
    plane: Embedded, replicas: list[ReplicaStandIn]
) -> None:
    others = [each for each in SERVICES if each is not CANARY]
    plane.set_services(*others, {**CANARY, "canary": {"revision": 3, "percent": 50}})
    replicas[0].reset()
    replicas[1].reset()
    plane.set_replicas("canary", replicas[:2], canaries={"r2"})

    def call(path: str) -> int:
        return ask(plane.port, "GET", path, host="canary.example").status

    assert {call("/status?code=503") for _ in range(100)} == {503}
    facts = plane.facts("canary")["canary"]
    assert [facts["revision"], facts["old"]["errors"], facts["new"]["errors"]] == [3, 50, 50]
    plane.set_replicas("canary", replicas[1:2], canaries={"r2"})
    assert call("/echo") == 200, "without other replicas, the canary answers all"
    plane.set_replicas("canary", replicas[:1])
    assert plane.facts("canary")["canary"] == facts, "which says nothing about the others"
    assert [call("/echo") for _ in range(20)] == [200] * 20, "and the others without a canary"
    plane.set_services(*SERVICES)
    assert plane.facts("canary")["canary"]["new"]["requests"] == 0, "another revision"


@of_models
def test_a_body_is_read_only_if_some_service_knows_the_key(
    plane: Embedded, replicas: list[ReplicaStandIn]
) -> None:
    try:
        plane.set_services(KEYED_MODEL)
        plane.set_replicas("keyed-model", replicas[:1])
        head = {"host": "any.example", "content_length": "100000", "expect": "100-continue"}
        with Talk(plane.port) as talk:
            talk.send(write_request("POST", "/v1/completions", **head, x_api_key="wrong"))
            refused = talk.read()
            assert (refused.status, refused.interim) == (401, [])
        with Talk(plane.port) as talk:
            body = b'{"model": "org/private"}'
            head["content_length"] = str(len(body))
            talk.send(write_request("POST", "/v1/completions", **head, x_api_key=KEY))
            wait_for(lambda: talk.socket.recv(25))
            talk.send(body)
            assert talk.read().status == 200
    finally:
        plane.set_services(*SERVICES)


@of_models
def test_another_service_gets_neither_the_requests_nor_the_keys_of_a_model(
    plane: Embedded, replicas: list[ReplicaStandIn]
) -> None:
    made = f"{SERVICE_KEY}of-private"
    digest = hashlib.sha256(made.encode()).hexdigest()
    private = {**KEYED_MODEL, "keys": [{"id": "own", "sha256": digest}]}
    same = {"name": "same", "prefix": "/p/same", "models": ["org/private"]}
    above = {"name": "above", "prefix": "/v1/completions"}  # of a project named v1
    try:
        plane.set_services(private, same, above)
        for name, replica in zip(("keyed-model", "same", "above"), replicas, strict=True):
            replica.reset()
            plane.set_replicas(name, [replica])

        def call(**fields: str) -> int:
            body = b'{"model": "org/private"}'
            reply = ask(plane.port, "POST", "/v1/completions", body, host="any.example", **fields)
            return reply.status

        assert call(authorization=f"Bearer {made}") == 200
        assert [len(each.seen) for each in replicas] == [1, 0, 0]
        plane.set_services(same, above)  # the client does not know that its service has ended
        assert call(authorization=f"Bearer {made}") == call(x_api_key=made) == 401
        assert call(authorization="Bearer of-the-program") == 200
        got = [(each.get("authorization"), each.get("x-api-key")) for each in replicas[1].seen]
        assert got == [("Bearer of-the-program", None)]
        assert len(replicas[2].seen) == 0
        assert ask(plane.port, "GET", "/v1/completions/x", host="any.example").status == 200
    finally:
        plane.set_services(*SERVICES)


def make_key(name: str, **terms: Any) -> tuple[str, dict[str, Any]]:
    """Return a key, and the key as a route of the gateway has it."""
    made = f"{SERVICE_KEY}{name}"
    return made, {"id": name, "sha256": hashlib.sha256(made.encode()).hexdigest(), **terms}


@pytest.fixture
def projects(plane: Embedded, replicas: list[ReplicaStandIn]) -> Iterator[dict[str, Any]]:
    """Two projects that serve the model m1: `vault` with a key, `research` without keys. `vault`
    also serves m2 without keys, and `default` serves m3."""
    pytest.importorskip("cavvy.capabilities.language_models")
    key, known = make_key("good")
    services = {
        "good": {"project": "vault", "models": ["m1"], "keyed": True, "keys": [known]},
        "open": {"project": "vault", "models": ["m2"]},
        "evil": {"project": "research", "models": ["m1", "m2"]},
        "usual": {"models": ["m3"]},
    }
    for name, each in services.items():
        each.update(name=name, prefix=f"/{each.get('project', 'default')}/{name}")
    plane.set_services(*services.values())
    for name in services:
        plane.set_replicas(name, replicas[:1])
    replicas[0].reset()
    yield {"key": key, **services}
    plane.set_services(*SERVICES)


def call_model(
    plane: Embedded, model: str, root: str = "", path: str = "/v1/completions", **fields: str
) -> Any:
    body = b'{"model": "%b"}' % model.encode()
    return ask(plane.port, "POST", root + path, body, host="any.example", **fields)


def answered_by(plane: Embedded, replica: ReplicaStandIn, model: str, **ask: str) -> Any:
    """Return the prefix of the service that answered a request for a model, or the status."""
    seen = len(replica.seen)
    reply = call_model(plane, model, **ask)
    assert len(replica.seen) - seen == (reply.status == 200)
    return replica.seen[-1].get("x-forwarded-prefix") if reply.status == 200 else reply.status


def list_models(plane: Embedded, root: str = "", **fields: str) -> Any:
    reply = ask(plane.port, "GET", f"{root}/v1/models", host="any.example", **fields)
    return [each["id"] for each in reply.json["data"]] if reply.status == 200 else reply.status


def test_models_are_named_by_project(
    plane: Embedded, replicas: list[ReplicaStandIn], projects: dict[str, Any]
) -> None:
    def find(model: str, **ask: str) -> Any:
        return answered_by(plane, replicas[0], model, **ask)

    key = {"authorization": f"Bearer {projects['key']}"}
    assert find("m3") == "/default/usual", "a project of one's own needs no name"
    assert find("m1", **key) == "/vault/good"
    assert find("m2", **key) == "/vault/open", "the key selects the project"
    assert find("m3", **key) == 404
    assert find("m2", root="/vault") == "/vault/open"
    assert find("m1", root="/research") == "/research/evil"
    assert replicas[0].seen[-1].path == "/v1/completions", "the replica does not get the project"
    assert find("m1", root="/research", **key) == 401
    # without a key, all names of other projects are alike
    names = ("m1", "m2", "m9")
    refused = [call_model(plane, model).json["error"] for model in names]
    texts = {each["message"].replace(name, "") for name, each in zip(names, refused, strict=True)}
    assert len(texts) == 1
    assert "use its base URL /PROJECT/v1" in texts.pop()
    assert {each["code"] for each in refused} == {"key-unknown"}
    alike = [call_model(plane, "m1", root=f"/{name}").status for name in ("vault", "none")]
    assert alike == [401, 401]
    assert list_models(plane) == ["m3"]
    assert list_models(plane, **key) == ["m1", "m2"] == list_models(plane, "/vault", **key)
    assert list_models(plane, "/vault") == ["m2"]
    assert list_models(plane, "/none") == []
    described = ask(plane.port, "GET", "/vault/v1/models/m1", host="any.example")
    assert described.status == 404


def test_a_key_that_no_service_knows_reaches_no_service(
    plane: Embedded, replicas: list[ReplicaStandIn], projects: dict[str, Any]
) -> None:
    good, open_, evil, usual = (projects[name] for name in ("good", "open", "evil", "usual"))
    key = projects["key"]
    other, expired = make_key("expired", expires_at=1.0)
    without = {**good, "keys": []}
    after = {
        "revoked": (without, open_, evil, usual),
        "expired": ({**good, "keys": [expired]}, open_, evil, usual),
        "of a service that has ended": (open_, evil, usual),
        "of a service that needs no keys now": ({**without, "keyed": False}, evil, usual),
        "the only service": ({**evil, "project": "default"},),
    }
    for why, services in after.items():
        plane.set_services(*services)
        for secret in (key, other):
            for fields in (
                {"authorization": f"Bearer {secret}"},
                {"authorization": f"Token {secret}"},
                {"x_api_key": secret},
                {"x_goog_api_key": secret},
                {"path": f"/v1/completions?key={secret}"},
            ):
                for root in ("", "/vault", "/research"):
                    replies = [call_model(plane, f"m{n}", root, **fields) for n in (1, 2, 3)]
                    assert {each.status for each in replies} == {401}, (why, fields)
                    assert {each.json["error"]["type"] for each in replies} == {
                        "authentication_error"
                    }
            assert list_models(plane, authorization=f"Bearer {secret}") == 401
    assert len(replicas[0].seen) == 0


def test_an_open_service_does_not_replace_a_service_with_keys(
    plane: Embedded, replicas: list[ReplicaStandIn], projects: dict[str, Any]
) -> None:
    """Both services are in one project; the key belongs to a third service of the project."""
    key, known = make_key("third")
    third = {"name": "third", "project": "vault", "prefix": "/vault/third", "keys": [known]}
    same = {**projects["open"], "models": ["m1", "m2"]}
    plane.set_services(projects["good"], same, third)
    fields = {"x_api_key": key}
    assert answered_by(plane, replicas[0], "m1", **fields) == 404
    assert answered_by(plane, replicas[0], "m2", **fields) == "/vault/open"
    assert list_models(plane, **fields) == ["m2"]
    twin = {**same, "name": "twin", "prefix": "/vault/twin"}  # of a moment in which both came
    plane.set_services(same, twin)
    refused = call_model(plane, "m1", "/vault")
    assert (refused.status, refused.json["error"]["code"]) == (404, "model_not_found")
    assert "use a service's URL" in refused.json["error"]["message"]


def test_a_key_that_is_revoked_while_the_body_arrives_is_refused(
    plane: Embedded, replicas: list[ReplicaStandIn], projects: dict[str, Any]
) -> None:
    body = b'{"model": "m1"}'
    head = {"host": "any.example", "content_length": str(len(body)), "expect": "100-continue"}
    with Talk(plane.port) as talk:
        talk.send(write_request("POST", "/v1/completions", **head, x_api_key=projects["key"]))
        wait_for(lambda: talk.socket.recv(25))
        plane.set_services({**projects["good"], "keys": []}, projects["evil"])
        talk.send(body)
        assert talk.read().status == 401
    assert len(replicas[0].seen) == 0


def test_another_project_does_not_decide_which_pages_may_call_models(
    plane: Embedded, projects: dict[str, Any]
) -> None:
    def ask_preflight(root: str) -> int:
        asked = {
            "host": "any.example",
            "origin": "https://page.example",
            "access_control_request_method": "POST",
        }
        return ask(plane.port, "OPTIONS", f"{root}/v1/completions", **asked).status

    plane.set_services(projects["good"], projects["evil"])
    assert [ask_preflight(root) for root in ("", "/vault", "/research")] == [204, 204, 404]
    plane.set_services(projects["good"], projects["usual"])
    assert [ask_preflight(root) for root in ("", "/vault")] == [404, 204]


@of_models
def test_pages_call_models_that_all_need_keys(replicas: list[ReplicaStandIn]) -> None:
    plane = GatewayProcess(services=[KEYED_MODEL])
    try:
        plane.set_replicas("keyed-model", replicas[:1])
        origin = {"host": "any.example", "origin": "https://page.example"}
        asked = {**origin, "access_control_request_method": "POST"}
        body = b'{"model": "org/private"}'
        with Talk(plane.port) as talk:
            for path in ("/v1/chat/completions", "/v1/models", "/v1/models/org%2Fprivate"):
                assert talk.ask("OPTIONS", path, **asked).status == 204
            replies = [talk.ask("GET", "/v1/models", **origin)]
            for key in (KEY, "wrong"):
                fields = {**origin, "authorization": f"Bearer {key}"}
                replies.append(talk.ask("POST", "/v1/completions", body, **fields))
        assert [reply.status for reply in replies] == [200, 200, 401]
        assert {reply.headers["access-control-allow-origin"] for reply in replies} == {"*"}
    finally:
        plane.remove()
