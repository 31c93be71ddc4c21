"""No request that a replica has received is missing in the counts, even if gateways are killed."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from tests.contract.gateway_process import GatewayProcess, wait_for
from tests.contract.gateway_suite import KEY, KEYED
from tests.contract.http_talk import ask
from tests.contract.replica_stand_in import ReplicaStandIn
from tests.waits import START_S

from cavvy.capabilities.serving.gateway.kept_counts import read_work

OTHER = {"name": "other", "hosts": ["other.example"]}


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[GatewayProcess]:
    services = [KEYED, OTHER]
    made = GatewayProcess(counts=str(tmp_path / "counts"), services=services)
    yield made
    made.remove()


@pytest.fixture
def replicas() -> Iterator[list[ReplicaStandIn]]:
    found = [ReplicaStandIn(name).start() for name in ("r1", "r2")]
    yield found
    for each in found:
        each.stop()


def count(gateway: GatewayProcess, service: str = "keyed") -> dict[str, dict[str, int]]:
    work = gateway.facts(service)["work"]
    return {
        replica: {key: each["requests"] for key, each in counts.items()}
        for replica, counts in work.items()
    }


def restart(gateway: GatewayProcess) -> None:
    gateway.process.kill()
    gateway.process.wait(START_S)
    gateway.start()


def send(gateway: GatewayProcess, host: str = "keyed.example") -> int:
    reply = ask(gateway.port, "GET", "/echo", host=host, authorization=f"Bearer {KEY}")
    return reply.status


def test_a_killed_gateway_loses_no_count(
    gateway: GatewayProcess, replicas: list[ReplicaStandIn]
) -> None:
    gateway.set_replicas("keyed", replicas[:1])
    assert [send(gateway) for _ in range(3)] == [200] * 3
    first = gateway.facts("keyed")
    restart(gateway)
    found = gateway.facts("keyed")
    assert (found["epoch"], found["arrivals"]) == (first["epoch"], 0)
    assert found["process"] != first["process"]
    assert found["work"] == first["work"]
    assert found["work"]["r1"]["fast"]["work_us"] > 0
    gateway.set_replicas("keyed", replicas)
    assert [send(gateway) for _ in range(4)] == [200] * 4
    restart(gateway)  # before anybody has asked it for its counts
    assert sum(each["fast"] for each in count(gateway).values()) == 7
    assert sum(len(each.seen) for each in replicas) == 7
    gateway.set_services(OTHER)
    assert read_work(Path(gateway.config["counts"])) == {}


def test_a_request_for_which_no_replica_listened_does_not_count(
    gateway: GatewayProcess, replicas: list[ReplicaStandIn]
) -> None:
    gone = ReplicaStandIn("gone").start()
    gone.stop()
    gateway.set_replicas("other", [gone, replicas[0]])
    assert [send(gateway, "other.example") for _ in range(4)] == [200] * 4
    assert gateway.facts("other")["started"] > 4
    found = count(gateway, "other")
    assert (found["r1"], found.get("gone", {})) == ({"": 4}, {})


def test_a_gateway_that_is_killed_under_load_has_counted_what_replicas_have_seen(
    gateway: GatewayProcess, replicas: list[ReplicaStandIn]
) -> None:
    one = replicas[0]

    def load() -> None:
        with suppress(OSError, EOFError, ValueError, AssertionError):  # the gateway is gone
            while True:
                send(gateway, "other.example")

    for _ in range(3):
        gateway.set_replicas("other", [one])
        wanted = len(one.seen) + 100
        with ThreadPoolExecutor(8) as pool:
            for _ in range(8):
                pool.submit(load)
            wait_for(lambda wanted=wanted: len(one.seen) > wanted)
            gateway.process.kill()
        gateway.process.wait(START_S)
        wait_for(lambda: not one.in_flight)
        gateway.start()
        got = count(gateway, "other")["r1"][""]
        # the last ones may not have arrived, because their connections were closed
        assert got - 24 <= len(one.seen) <= got
