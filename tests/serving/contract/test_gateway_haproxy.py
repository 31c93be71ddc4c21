"""The HAProxy data plane keeps the contract of both planes."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import sleep

import pytest
from tests.contract.gateway_model_suite import ModelSuite
from tests.contract.gateway_process import wait_for
from tests.contract.gateway_suite import (
    CANARY,
    KEYED,
    KEYED_MODEL,
    MODEL,
    OPEN,
    RATED,
    SERVICE,
    SMALL,
    GatewaySuite,
    replicas,
)
from tests.contract.haproxy_process import HaproxyPlaneProcess, need_haproxy
from tests.contract.http_talk import Background, Talk, ask, write_request
from tests.contract.replica_stand_in import ReplicaStandIn
from tests.system.ports import free_port

from cavvy.capabilities.serving.gateway.haproxy.configuration import read_ring


@pytest.fixture(scope="module")
def plane() -> Iterator[HaproxyPlaneProcess]:
    plane = HaproxyPlaneProcess(
        need_haproxy(), services=(SERVICE, SMALL, KEYED, RATED, MODEL, KEYED_MODEL, CANARY, OPEN)
    )
    yield plane
    plane.remove()


class TestHaproxy(GatewaySuite, ModelSuite):
    pass


__all__ = ["plane", "replicas"]  # fixtures


def find_haproxies(plane: HaproxyPlaneProcess) -> list[int]:
    config = str(plane.folder / "haproxy.cfg").encode()
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if config in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found


def count_listed(plane: HaproxyPlaneProcess) -> int:
    [ring] = plane.folder.glob("*.ring")
    found = read_ring(ring.read_bytes(), lambda service: 0)
    return sum(ended.requests for (service, _), ended in found.items() if service == "svc")


def count_work(plane: HaproxyPlaneProcess) -> int:
    work = plane.count("svc").work
    return sum(
        each.requests for of in work.values() for keys in of.values() for each in keys.values()
    )


def kill_haproxy(plane: HaproxyPlaneProcess) -> None:
    [pid] = find_haproxies(plane)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not find_haproxies(plane))


def revive(plane: HaproxyPlaneProcess) -> bool:
    plane.keep()  # the plane learns a moment later that its process has ended
    return bool(find_haproxies(plane))


def test_a_killed_process_is_started_again_with_its_services(
    plane: HaproxyPlaneProcess, replicas: list[ReplicaStandIn]
) -> None:
    plane.set_replicas("svc", replicas[:2])
    before = plane.count("svc")
    assert ask(plane.port, "GET", "/echo").status == 200
    # a request counts as answered once HAProxy has closed its session, just after the last byte
    wait_for(lambda: plane.count("svc").answered == before.answered + 1)
    counted = plane.count("svc")
    assert counted.arrivals == before.arrivals + 1
    kill_haproxy(plane)
    wait_for(lambda: revive(plane))
    # more than the killed process has counted, so that its end does not show in the counts
    more = counted.arrivals + 6
    assert {ask(plane.port, "GET", "/echo").json["replica"] for _ in range(more)} == {
        each.name for each in replicas[:2]
    }
    after = plane.count("svc")
    assert after.arrivals == counted.arrivals + more, "what the killed process counted is not lost"


def test_a_503_of_a_replica_is_not_taken_for_one_of_haproxy(
    plane: HaproxyPlaneProcess, replicas: list[ReplicaStandIn]
) -> None:
    plane.set_replicas("svc", replicas[:1])
    assert ask(plane.port, "POST", "/status?code=503").status == 503
    gone = [ReplicaStandIn(name=name, port=free_port()) for name in ("gone", "away")]
    plane.set_replicas("svc", gone)
    plane.stop_checks("svc")
    # Both refuse the connection, so HAProxy answers itself. With checks, HAProxy may find out about
    # both in the second before the next try, and pass the request on to the gateway.
    reply = ask(plane.port, "POST", "/echo", b"x")
    assert (reply.status, reply.json["error"]["code"]) == (502, "replica-lost")
    assert reply.headers["x-request-id"] == reply.json["error"]["request_id"]
    assert reply.json["error"]["message"] == "no replica accepted the request"
    assert (reply.json["error"]["type"], reply.json["error"]["param"]) == ("server_error", None)
    assert "x-cavvy-lost" not in reply.headers


def test_another_set_of_services_loses_no_request(
    plane: HaproxyPlaneProcess, replicas: list[ReplicaStandIn]
) -> None:
    for each in replicas:
        each.reset()
    plane.set_replicas("svc", replicas[:1])
    [former] = find_haproxies(plane)
    held = Background(ask, plane.port, "GET", "/hold")
    wait_for(lambda: replicas[0].in_flight == 1)
    plane.add_route({"name": "more", "hosts": ["more.example"]})
    assert len(find_haproxies(plane)) == 2
    assert ask(plane.port, "GET", "/echo").json["replica"] == replicas[0].name
    assert not plane.count("svc").whole, "the former process may have requests in flight"
    replicas[0].release.set()
    assert held.result().status == 200
    wait_for(lambda: former not in find_haproxies(plane))
    wait_for(lambda: plane.count("svc").whole)


def test_the_end_of_haproxy_waits_shortly_for_its_requests(
    plane: HaproxyPlaneProcess, replicas: list[ReplicaStandIn]
) -> None:
    for each in replicas:
        each.reset()
    plane.set_replicas("svc", replicas[:1])
    held = Background(ask, plane.port, "GET", "/hold")
    wait_for(lambda: replicas[0].in_flight == 1)
    ended = Background(plane.do, plane.plane.end(30))
    sleep(0.3)
    replicas[0].release.set()
    assert held.result().status == 200
    ended.result()
    assert not find_haproxies(plane)
    replicas[0].reset()
    plane.keep()
    cut = Background(ask, plane.port, "GET", "/hold")
    wait_for(lambda: replicas[0].in_flight == 1)
    plane.do(plane.plane.end(0.2))
    assert not find_haproxies(plane), "a request that lasts longer is cut"
    replicas[0].release.set()
    with suppress(Exception):
        cut.result()
    plane.keep()


def test_requests_that_haproxy_passes_on_are_counted_by_replica(
    plane: HaproxyPlaneProcess, replicas: list[ReplicaStandIn]
) -> None:
    """The counts outlive HAProxy, also those after the last reading of its statistics, and the
    server that reads them.
    """
    plane.set_replicas("svc", replicas[:2])
    before = count_work(plane)
    for _ in range(5):
        assert ask(plane.port, "GET", "/echo").status == 200
    assert count_work(plane) == before + 5
    (former,) = plane.count("svc").work

    with Talk(plane.port) as talk:  # its requests are not in the statistics that were read
        for method in ("GET", "POST") * 20:
            assert talk.ask(method, "/echo").status == 200
    # HAProxy lists a request just after it has sent the response
    wait_for(lambda: count_listed(plane) >= 45)
    kill_haproxy(plane)
    wait_for(lambda: revive(plane))
    assert count_work(plane) == before + 45
    for _ in range(3):
        assert ask(plane.port, "GET", "/echo").status == 200
    wait_for(lambda: count_listed(plane) == 3)
    kill_haproxy(plane)
    plane.forget_all()  # as a server that was killed, too
    wait_for(lambda: revive(plane))
    assert count_work(plane) == before + 48
    plane.do(plane.plane.end(0.1))
    plane.keep()
    assert ask(plane.port, "GET", "/echo").status == 200
    assert count_work(plane) == before + 49
    assert len([*plane.folder.glob("*.ring")]) == 1, "a file that was read is removed"
    work = plane.count("svc").work
    assert [*work] == [former]
    assert all(each[""].work_us > 0 for each in work[former].values() if each[""].requests)


def test_requests_of_a_haproxy_that_started_slowly_are_counted_once(
    tmp_path: Path, replicas: list[ReplicaStandIn]
) -> None:
    """HAProxy's uptime leaves out the time that it waited for the second file."""
    late, program = tmp_path / "late.cfg", tmp_path / "haproxy"
    os.mkfifo(late)
    program.write_text(
        f'#!/bin/sh\n[ "$1" = -v ] && exec {need_haproxy()} -v\n'
        f'(sleep 0.5; echo "# late" >{late}) & exec {need_haproxy()} "$@" -f {late}\n'
    )
    program.chmod(0o700)
    plane = HaproxyPlaneProcess(program, services=(SERVICE,))
    try:
        plane.set_replicas("svc", replicas[:1])
        for _ in range(5):
            assert ask(plane.port, "GET", "/echo").status == 200
        wait_for(lambda: count_listed(plane) == 5)
        counted = count_work(plane)
        kill_haproxy(plane)
        wait_for(lambda: revive(plane))
        assert (counted, count_work(plane)) == (5, 5)
    finally:
        plane.remove()


def test_a_body_after_100_continue_may_arrive_slowly(
    plane: HaproxyPlaneProcess, replicas: list[ReplicaStandIn]
) -> None:
    plane.set_replicas("svc", replicas[:1])
    with Talk(plane.port) as talk:
        talk.send(write_request("POST", "/echo", expect="100-continue", content_length="6"))
        assert talk.read_until_head()[0] == 100
        for piece in (b"sl", b"ow", b"ly"):
            sleep(0.6)
            talk.send(piece)
        assert talk.read().json["size"] == 6


def test_the_events_of_a_stream_are_not_held_back_to_be_sent_together(
    plane: HaproxyPlaneProcess, replicas: list[ReplicaStandIn]
) -> None:
    plane.set_replicas("svc", replicas[:1])
    count, arrivals = 12, 0
    with Talk(plane.port) as talk:
        talk.send(write_request("GET", f"/chunks?n={count}&pause_ms=60&plain=1"))
        received = b""
        while b"\r\n0\r\n" not in received:
            piece = talk.socket.recv(65536)
            assert piece
            received += piece
            arrivals += b"data: " in piece
    assert received.count(b"data: ") == count
    assert arrivals > count / 2, "a program waits up to 0.2 s for data to send in one packet"
