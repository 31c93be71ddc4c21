"""Services of the embedded data plane that change while their requests are on their way."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.contract.gateway_process import GatewayProcess, wait_for
from tests.contract.gateway_suite import of_models
from tests.contract.http_talk import Talk, ask, write_request
from tests.contract.replica_stand_in import ReplicaStandIn

STICKY = {
    **{"name": "sticky", "hosts": ["sticky.example"], "concurrency": 1},
    "routing": {"by": "cache"},
}


@pytest.fixture
def plane() -> Iterator[GatewayProcess]:
    plane = GatewayProcess(services=[STICKY])
    yield plane
    plane.remove()


@pytest.fixture
def replica() -> Iterator[ReplicaStandIn]:
    replica = ReplicaStandIn("one").start()
    yield replica
    replica.stop()


def test_a_request_that_waits_after_a_change_of_its_service_delays_nobody(
    plane: GatewayProcess, replica: ReplicaStandIn
) -> None:
    """Routing by cache needs the body before a replica can be chosen."""
    plane.set_replicas("sticky", [replica])
    host: Any = {"host": "sticky.example", "prefer": "wait=10"}
    request = write_request("POST", "/echo", b"x" * 100, **host)
    with Talk(plane.port) as busy, Talk(plane.port) as talk:
        busy.send(write_request("POST", "/hold", **host))
        wait_for(lambda: replica.in_flight == 1)
        talk.send(request[:-50])
        wait_for(lambda: plane.control(type="statistics"))
        plane.set_services({**STICKY, "queue_max": 5})
        talk.send(request[-50:])
        wait_for(lambda: plane.facts("sticky")["backlog"] == 1)
        replica.release.set()
        assert busy.read().status == talk.read().status == 200
    assert ask(plane.port, "POST", "/echo", b"x", **host).status == 200


def test_a_client_that_leaves_after_a_change_of_its_service_frees_its_replica(
    plane: GatewayProcess, replica: ReplicaStandIn
) -> None:
    plane.set_replicas("sticky", [replica])
    host: Any = {"host": "sticky.example", "prefer": "wait=10"}
    with Talk(plane.port) as talk:
        talk.send(write_request("POST", "/hold", **host))
        wait_for(lambda: replica.in_flight == 1)
        plane.set_services({**STICKY, "queue_max": 5})
    wait_for(lambda: plane.facts("sticky")["in_flight"] == 0)
    assert ask(plane.port, "POST", "/echo", b"x", **host).status == 200


def test_a_request_whose_body_arrives_after_the_end_of_its_service_is_answered(
    plane: GatewayProcess,
) -> None:
    host: Any = {"host": "sticky.example"}
    with Talk(plane.port) as talk:
        request = write_request("POST", "/echo", b"x" * 100, **host)
        talk.send(request[:-50])
        wait_for(lambda: plane.control(type="statistics"))
        plane.set_services()
        talk.send(request[-50:])
        assert talk.read().status == 404


@of_models
def test_a_replica_whose_engine_tells_of_other_requests_gets_no_prompts(
    plane: GatewayProcess, replica: ReplicaStandIn
) -> None:
    replica.metrics = "vllm:num_requests_running 40\nvllm:num_requests_waiting 2\n"
    broken = ReplicaStandIn("two", metrics="vllm:num_requests_running{ x\n" * 1000).start()
    shared = {"by": "cache", "shared": True}
    plane.set_services({**STICKY, "routing": shared})
    plane.set_replicas("sticky", [replica, broken])
    sent = iter(range(1000))

    def find_server() -> object:
        said = {"model": "m", "messages": [{"role": "user", "content": f"{next(sent)} " * 500}]}
        body = json.dumps(said).encode()
        answer = ask(plane.port, "POST", "/v1/chat/completions", body, host="sticky.example")
        return json.loads(answer.body)["replica"]

    try:
        wait_for(lambda: {find_server() for _ in range(8)} == {"two"})
        plane.set_services(STICKY)  # without other gateways, all requests are known
        plane.set_replicas("sticky", [broken])
        plane.set_replicas("sticky", [broken, replica])
        wait_for(lambda: {find_server() for _ in range(8)} == {"one", "two"})
    finally:
        broken.stop()
