"""The ports that an agent holds until a service's program uses them."""

import socket
import struct
from collections.abc import Iterator

import pytest
from tests.control.unit.test_control_reports import ATTEMPT, JOB, NODE
from tests.system.agent_server import make_rig

from cavvy.agent.held_ports import HeldPorts
from cavvy.control.agents.work import make_assignment
from cavvy.domain.services import ServiceSpec
from cavvy.domain.values import replace


@pytest.fixture
def ports() -> Iterator[HeldPorts]:
    held = HeldPorts()
    yield held
    held.close()


def find_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def listen(family: socket.AddressFamily, host: str, port: int, *options: int) -> None:
    with socket.socket(family) as program:
        for option in options:
            program.setsockopt(socket.SOL_SOCKET, option, 1)
        program.bind((host, port))
        program.listen()


@pytest.mark.parametrize("option", [socket.SO_REUSEADDR, socket.SO_REUSEPORT])
@pytest.mark.parametrize(
    ("family", "host"),
    [
        (socket.AF_INET, "127.0.0.1"),
        (socket.AF_INET, "0.0.0.0"),
        (socket.AF_INET6, "::ffff:127.0.0.1"),  # as ZeroMQ binds an engine's port of events
    ],
)
def test_the_program_listens_on_a_held_port(
    ports: HeldPorts, family: socket.AddressFamily, host: str, option: int
) -> None:
    port = find_port()
    assert ports.hold({"CAVVY_EVENTS_PORT": port}) == ""
    listen(family, host, port, option)
    with pytest.raises(OSError, match="already in use"):
        listen(family, host, port)
    ports.release("CAVVY_EVENTS_PORT")
    listen(family, host, port)


def test_a_held_port_is_given_to_no_other_program(ports: HeldPorts) -> None:
    """Linux searches for a free port in a range. Here it has one port, which is held."""
    port = find_port()
    # 51: IP_LOCAL_PORT_RANGE
    with socket.socket() as other, socket.create_server(("127.0.0.1", 0)) as server:
        try:
            other.setsockopt(socket.IPPROTO_IP, 51, struct.pack("=I", port << 16 | port))
        except OSError:
            pytest.skip("this kernel is older than 6.3")
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        assert ports.hold({"PORT": port}) == ""
        with pytest.raises(OSError, match="already in use"):
            other.bind(("127.0.0.1", 0))
        with pytest.raises(OSError, match="Cannot assign"):
            other.connect(server.getsockname())


def test_a_port_that_is_used_is_named_with_its_purpose(ports: HeldPorts) -> None:
    free = find_port()
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        told = ports.hold({"PORT": free, "CAVVY_EVENTS_PORT": taken})
    assert told.startswith(f"port {taken} of this node, for key-value events ($CAVVY_EVENTS_PORT)")
    listen(socket.AF_INET, "127.0.0.1", free)  # nothing is held any more


def test_only_chosen_ports_of_services_are_held() -> None:
    env = {"PORT": "12000", "CAVVY_EVENTS_PORT": "12001", "OTHER_PORT": "12002"}

    def held(service: ServiceSpec | None) -> dict[str, int]:
        job = replace(JOB, task=replace(JOB.task, env=env, service=service))
        return make_assignment(job, ATTEMPT, [NODE], accelerators=0, secrets={}).ports

    assert held(ServiceSpec()) == {"PORT": 12000, "CAVVY_EVENTS_PORT": 12001}
    assert held(replace(ServiceSpec(), fixed_port=True)) == {"CAVVY_EVENTS_PORT": 12001}
    assert held(None) == {}


@pytest.mark.system
def test_work_whose_port_is_taken_ends_before_its_setup() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with make_rig(
            run="touch ran", setup="touch ../set", ports={"CAVVY_EVENTS_PORT": port}
        ) as rig:
            assert rig.finish() == 0
            assert rig.stub.kinds() == ["exited"]
            exited = rig.exited()
    assert exited["outcome"] == "exit"
    assert exited["reason"].startswith(f"port {port} of this node, for key-value events")


_PROGRAM = """
import os, socket
for name, options in {"PORT": [], "CAVVY_EVENTS_PORT": [socket.SO_REUSEADDR]}.items():
    with socket.socket() as server:
        for each in options:
            server.setsockopt(socket.SOL_SOCKET, each, 1)
        server.bind(("127.0.0.1", int(os.environ[name])))
        server.listen()
with socket.socket() as thief:
    try:
        thief.bind(("127.0.0.1", int(os.environ["CAVVY_EVENTS_PORT"])))
    except OSError:
        print("held")
"""


@pytest.mark.system
def test_a_program_binds_its_ports_with_and_without_options() -> None:
    ports = {"PORT": find_port(), "CAVVY_EVENTS_PORT": find_port()}
    env = {name: str(each) for name, each in ports.items()}
    with make_rig(
        run=f"python3 - <<'END'\n{_PROGRAM}\nEND", setup="true", ports=ports, env=env
    ) as rig:
        assert rig.finish() == 0
        assert (rig.exited()["outcome"], rig.output()) == ("succeeded", "held\n")
