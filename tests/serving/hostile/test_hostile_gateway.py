"""Hostile clients of the gateway: damaged requests, slow ones, large ones and very many."""

from collections.abc import Iterator

import pytest
from tests.contract.gateway_process import GatewayProcess, wait_for
from tests.contract.http_talk import Talk, ask, write_request
from tests.contract.replica_stand_in import ReplicaStandIn
from tests.hostile.gateway_fuzz import DamagedEngine, fuzz_bodies, read_memory_kib, run_fuzz

SERVICE = {"name": "svc", "hosts": ["svc.example"], "concurrency": 64}
LIMITS = {"head_s": 1, "body_idle_s": 1, "connections": 200, "hold_bytes": 65536}


@pytest.fixture(scope="module")
def replica() -> Iterator[ReplicaStandIn]:
    replica = ReplicaStandIn().start()
    yield replica
    replica.stop()


@pytest.fixture(scope="module")
def gateway(replica: ReplicaStandIn) -> Iterator[GatewayProcess]:
    gateway = GatewayProcess(services=[SERVICE], limits=LIMITS)
    gateway.set_replicas("svc", [replica])
    yield gateway
    gateway.remove()


def test_damaged_requests_neither_stop_nor_mix_anything(
    gateway: GatewayProcess, replica: ReplicaStandIn
) -> None:
    report = run_fuzz(gateway.port, gateway.process.pid, seed=1, count=400)
    assert report.answered > 20
    assert report.refused > 100
    assert report.grown_kib < 32 << 10
    assert replica.broken == []
    assert {seen.path.partition("?")[0] for seen in replica.seen if "other" in seen.path} == {
        "/echo"
    }
    assert gateway.process.poll() is None
    wait_for(lambda: gateway.facts("svc")["in_flight"] == 0)


def test_damaged_bodies_and_streams_get_an_answer_and_take_no_memory() -> None:
    engine = DamagedEngine().start()
    model = {"name": "llm", "prefix": "/default/llm", "models": ["m"], "concurrency": 64}
    gateway = GatewayProcess(services=[{**model, "routing": {"by": "cache"}}])
    try:
        gateway.set_replicas("llm", [engine])
        report = fuzz_bodies(gateway.port, gateway.process.pid, seed=1, count=600)
        assert report.answered > 100
        assert report.refused > 200
        assert report.grown_kib < 16 << 10
        assert gateway.process.poll() is None
        wait_for(lambda: gateway.facts("llm")["in_flight"] == 0)
    finally:
        gateway.remove()
        engine.stop()


def test_slow_clients_are_ended(gateway: GatewayProcess) -> None:
    heads = [Talk(gateway.port) for _ in range(50)]
    for talk in heads:
        talk.send(b"GET /echo HTTP/1.1\r\nHost: ")
    body = Talk(gateway.port)
    body.send(write_request("POST", "/echo", content_length="100") + b"x")
    assert ask(gateway.port, "GET", "/echo").status == 200
    for talk in (*heads, body):
        with talk:
            assert talk.rest().startswith(b"HTTP/1.1 408")
    wait_for(lambda: gateway.facts("svc")["in_flight"] == 0)


def test_bodies_that_wait_do_not_fill_the_memory(
    gateway: GatewayProcess, replica: ReplicaStandIn
) -> None:
    gateway.set_replicas("svc", [])
    before = read_memory_kib(gateway.process.pid)
    talks = [Talk(gateway.port) for _ in range(8)]
    for talk in talks:
        talk.send(write_request("POST", "/echo", content_length=str(64 << 20)))
        talk.socket.settimeout(0.1)
        with pytest.raises(TimeoutError):
            talk.send(b"x" * (64 << 20))
    assert read_memory_kib(gateway.process.pid) - before < 48 << 10
    for talk in talks:
        talk.socket.close()
    gateway.set_replicas("svc", [replica])
    wait_for(lambda: gateway.facts("svc")["backlog"] == 0)
    wait_for(lambda: gateway.facts("svc")["in_flight"] == 0)


def test_more_connections_than_allowed_are_told(gateway: GatewayProcess) -> None:
    wait_for(lambda: gateway.control(type="statistics")["connections"] == 0)
    talks = [Talk(gateway.port) for _ in range(200)]
    try:
        wait_for(lambda: gateway.control(type="statistics")["connections"] == 200)
        with Talk(gateway.port) as more:
            assert more.read().status == 503
        assert talks[0].ask("GET", "/echo").status == 200
    finally:
        for talk in talks:
            talk.socket.close()
