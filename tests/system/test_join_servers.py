"""A joined machine and two servers: the machine is connected to the one that does not lead, and
moves to the other when that one is killed.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.postgres import PostgresMissing
from tests.system.replica_site import ReplicaSite, replica_site
from tests.waits import wait_until

from cavvy.client import ApiClient
from cavvy.client.embedded import ensure_server

pytestmark = pytest.mark.system
SETTINGS = "[server]\ntls_listen = '127.0.0.1:0'\n[providers.join]\n"
_QUEUE = (
    "SELECT r.folder FROM cavvy_leases l JOIN cavvy_replicas r ON r.id = l.holder "
    "WHERE l.name = 'queue'"
)
_LINKED = (
    "SELECT r.folder FROM provider_state s JOIN cavvy_replicas r "
    "ON r.id = CAST(s.body AS JSON) ->> 'server' WHERE s.collection = 'sessions'"
)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ReplicaSite]:
    try:
        with replica_site(tmp_path, SETTINGS) as made:
            yield made
    except PostgresMissing as missing:
        pytest.skip(f"no PostgreSQL: {missing}")


def submit(client: ApiClient, name: str, go: Path) -> None:
    run = f"while [ ! -e {go} ]; do sleep 0.1; done; echo $PWD"
    client.submit(f"{{name: {name}, run: '{run}', resources: {{providers: [join]}}}}", consent=True)


def state_of(client: ApiClient) -> list[str]:
    return [machine.state for machine in client.joined()]


def phase(client: ApiClient, name: str) -> str:
    return client.job("default", name).phase


def test_a_machine_of_the_other_server_gets_work_and_outlives_that_server(
    site: ReplicaSite, tmp_path: Path
) -> None:
    for name in site.homes:
        ensure_server(home=str(site.homes[name]))
    wait_until(site.shared)
    leader = Path(str(site.ask(_QUEUE)[0][0])).name
    other = "b" if leader == "a" else "a"
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
        site.kill(other)
        wait_until(lambda: site.ask(_LINKED) == [(str(site.homes[leader]),)])
        wait_until(lambda: state_of(leading) == ["up"])
        second.touch()
        wait_until(lambda: phase(leading, "second") == "done")
        assert len(leading.job("default", "second").attempts) == 1
        leading.dismiss("box")
        wait_until(lambda: not leading.joined())
