"""A joined machine and two servers behind a load balancer: the machine is connected to the one that
does not lead, and moves to the other when that one is killed.
"""

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest
from tests.system.postgres import PostgresMissing
from tests.system.replica_site import ReplicaSite, replica_site
from tests.waits import wait_until

from cavvy.client import ApiClient
from cavvy.client.connection import ensure_server

pytestmark = pytest.mark.system
SETTINGS = """
[server]
tls_listen = '127.0.0.1:0'
advertise = 'https://127.0.0.1:{port}'
[providers.join]
"""
_QUEUE = (
    "SELECT r.folder FROM cavvy_leases l JOIN cavvy_replicas r ON r.id = l.holder "
    "WHERE l.name = 'queue'"
)
_LINKED = (
    "SELECT r.folder FROM provider_state s JOIN cavvy_replicas r "
    "ON r.id = CAST(s.body AS JSON) ->> 'server' WHERE s.collection = 'sessions'"
)


class Balancer:
    """Gives each new connection to the server at `target`, a port."""

    def __init__(self) -> None:
        self.target = 0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = int(self._listener.getsockname()[1])
        Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                caller, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self.target))
                except OSError:
                    caller.close()
                    continue
                for source, sink in ((caller, server), (server, caller)):
                    Thread(target=_copy, args=(source, sink), daemon=True).start()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for each in (source, sink):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
    source.close()


@pytest.fixture
def balancer() -> Iterator[Balancer]:
    made = Balancer()
    yield made
    made.close()


@pytest.fixture
def site(tmp_path: Path, balancer: Balancer) -> Iterator[ReplicaSite]:
    try:
        with replica_site(tmp_path, SETTINGS.format(port=balancer.port)) as made:
            yield made
    except PostgresMissing as missing:
        pytest.skip(f"no PostgreSQL: {missing}")


def port_of(site: ReplicaSite, name: str) -> int:
    """The port on which one server listens for nodes."""
    rows = site.ask(f"SELECT peer FROM cavvy_replicas WHERE folder = '{site.homes[name]}'")
    return int(str(rows[0][0]).rpartition(":")[2])


def submit(client: ApiClient, name: str, go: Path) -> None:
    run = f"while [ ! -e {go} ]; do sleep 0.1; done; echo $PWD"
    client.submit(f"{{name: {name}, run: '{run}', resources: {{providers: [join]}}}}", consent=True)


def state_of(client: ApiClient) -> list[str]:
    return [machine.state for machine in client.joined()]


def phase(client: ApiClient, name: str) -> str:
    return client.job("default", name).phase


def test_a_machine_of_the_other_server_gets_work_and_outlives_that_server(
    site: ReplicaSite, balancer: Balancer, tmp_path: Path
) -> None:
    for name in site.homes:
        ensure_server(home=str(site.homes[name]))
    wait_until(site.shared)
    leader = Path(str(site.ask(_QUEUE)[0][0])).name
    other = "b" if leader == "a" else "a"
    balancer.target = port_of(site, other)
    machine, first, second = tmp_path / "machine", tmp_path / "first", tmp_path / "second"
    with site.connect(leader) as leading, site.connect(other) as linked:
        line = linked.invite(name="box").shell.replace("sh -s -- ", "sh -s -- --background ")
        subprocess.run(
            ["sh", "-c", line], check=True, env={**os.environ, "CAVVY_FOLDER": str(machine)}
        )
        wait_until(lambda: state_of(leading) == state_of(linked) == ["up"])
        assert [Path(str(row[0])).name for row in site.ask(_LINKED)] == [other]

        submit(leading, "first", first)
        wait_until(
            lambda: phase(leading, "first") == "running", lambda: str(leading.jobs("default"))
        )
        first.touch()
        wait_until(lambda: phase(leading, "first") == "done")
        assert str(machine).encode() in b"".join(linked.logs("default", "first"))

        submit(leading, "second", second)
        wait_until(lambda: phase(leading, "second") == "running")
        balancer.target = port_of(site, leader)
        site.kill(other)
        wait_until(lambda: site.ask(_LINKED) == [(str(site.homes[leader]),)])
        wait_until(lambda: state_of(leading) == ["up"])
        second.touch()
        wait_until(lambda: phase(leading, "second") == "done")
        assert len(leading.job("default", "second").attempts) == 1
        leading.dismiss("box")
        wait_until(lambda: not leading.joined())
