"""Several servers on one PostgreSQL: both serve and both reconcile, and a crash of each of them, or
of the database, loses no job and runs none twice.
"""

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import cast

import pytest
from tests.system.replica_site import ReplicaSite
from tests.waits import patience, wait_until

from cavvy.client import ApiClient
from cavvy.client.connection import ensure_server
from cavvy.client.paths import job_path
from cavvy.client.tunnel import NodeTunnel, open_by_api
from cavvy.client.wire import ExecAsk, ExecStarted

pytestmark = pytest.mark.system
JOBS = 24


def test_no_crash_loses_a_job_or_runs_it_twice(site: ReplicaSite) -> None:
    for name in site.homes:
        ensure_server(home=str(site.homes[name]))
    wait_until(site.shared)
    (site.root / "ran").mkdir()
    servers = cycle(site.homes)

    def submit(number: int) -> str:
        run = f"sleep 0.5; echo ran >> {site.root}/ran/job-{number}"
        with site.connect(next(servers)) as client:
            return client.submit(f"{{name: job-{number}, run: '{run}'}}", consent=True).name

    def crash_all() -> None:
        for name in site.homes:
            site.kill(name)
            with site.connect(name) as client:
                client.health()
            wait_until(site.shared)
        (victim,) = site.ask(
            "SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND "
            "datname = current_database() LIMIT 1"
        )
        os.kill(int(str(victim[0])), signal.SIGKILL)  # PostgreSQL ends all and recovers

    with ThreadPoolExecutor(4) as threads:
        crashing = threads.submit(crash_all)
        names = list(threads.map(submit, range(JOBS)))
        crashing.result()
    assert len(set(names)) == JOBS
    with site.connect("b") as client:
        wait_until(lambda: _ended(client) == JOBS, lambda: str(client.jobs("default", limit=99)))
        assert {each.phase for each in client.jobs("default", limit=99).jobs} == {"done"}
        assert {each.verdict for each in client.audit("default").bills} == {"agrees"}
    ran = {path.name: path.read_text() for path in (site.root / "ran").iterdir()}
    assert ran == {f"job-{number}": "ran\n" for number in range(JOBS)}
    assert site.ask("SELECT COUNT(*) FROM attempts") == [(JOBS,)]
    recount = "SELECT COALESCE(SUM(amount), 0) FROM charges c WHERE c.job_id = j.id"
    assert site.ask(f"SELECT j.id FROM jobs j WHERE j.spent <> ({recount})") == []
    assert site.ask("SELECT COUNT(*) FROM jobs WHERE spent > 0") == [(JOBS,)]


def _ended(client: ApiClient) -> int:
    return sum(each.ended_at is not None for each in client.jobs("default", limit=99).jobs)


def test_commands_reach_a_job_through_every_server(site: ReplicaSite) -> None:
    with (site.files / "settings.toml").open("a") as settings:
        settings.write("[server]\ntls_listen = '127.0.0.1:0'\n")
    for name in site.homes:
        ensure_server(home=str(site.homes[name]))
    wait_until(site.shared)
    with site.connect("a") as a, site.connect("b") as b:
        job = a.submit("{name: long, run: exec sleep 600}", consent=True).name
        wait_until(lambda: b.job("default", job).phase == "running")
        for asked, other in ((a, b), (b, a)):
            assert run(asked, asked, job) == (b"hello\n", 7)
            assert run(asked, other, job) == (b"hello\n", 7)
            assert echo(asked, other, job) == b"TYPED"
        # From now on, `a` seems to be on another machine: `b` serves the agents of this one, and
        # reaches `a` by TLS.
        site.run("UPDATE cavvy_replicas SET host = 'elsewhere' WHERE folder LIKE '%/a'")

        def serves_agents() -> bool:
            # no server of another machine ever held this lease, so `a` does not give it back, and
            # may take it once more in a turn that has begun before
            site.run(_FORGET_MOVED)
            return bool(site.ask(_AGENTS_SERVER) == [(str(site.homes["b"]),)])

        wait_until(serves_agents)
        assert run(a, b, job) == (b"hello\n", 7)
        assert echo(a, b, job) == b"TYPED"
        a.stop("default", job)  # of either server; the owner of the job acts at once
        wait_until(lambda: b.job("default", job).ended_at is not None)


def test_a_command_goes_on_while_its_server_seems_to_have_ended(site: ReplicaSite) -> None:
    for name in site.homes:
        ensure_server(home=str(site.homes[name]))
    wait_until(site.shared)
    [(agents,)] = site.ask(_AGENTS_SERVER)
    keeper = next(name for name, home in site.homes.items() if str(home) != agents)
    counts = "for i in $(seq 50); do echo $i; sleep 0.1; done; exit 7"
    with site.connect(keeper) as client, ThreadPoolExecutor(1) as threads:
        job = client.submit("{name: long, run: exec sleep 600}", consent=True).name
        wait_until(lambda: client.job("default", job).phase == "running")
        running = threads.submit(run, client, client, job, counts)

        def ended() -> bool:
            # as after a restart of the database: the server registers again within a second
            site.run(f"UPDATE cavvy_replicas SET until = 0 WHERE folder LIKE '%/{keeper}'")
            return running.done()

        try:
            wait_until(ended)
        finally:
            client.stop("default", job)  # ends a command that would wait for ever
        output, code = running.result()
        assert output.split() == [b"%d" % number for number in range(1, 51)]
        assert code == 7


_FORGET_MOVED = """
UPDATE cavvy_leases SET holder = '' WHERE name LIKE 'host:%'
AND holder IN (SELECT id FROM cavvy_replicas WHERE host = 'elsewhere')
"""
_AGENTS_SERVER = """
SELECT r.folder FROM cavvy_leases l JOIN cavvy_replicas r ON r.id = l.holder
WHERE l.name LIKE 'host:%'
"""


class BalancedClient:
    """What a load balancer makes of a session: `asked` opens it, and `other` gets all the rest."""

    def __init__(self, asked: ApiClient, other: ApiClient) -> None:
        self.open_tunnel, self.sibling = asked.open_tunnel, other.sibling


def run(
    asked: ApiClient, other: ApiClient, job: str, line: str = "echo hello; exit 7"
) -> tuple[bytes, int | None]:
    """The output and exit code of a command that one server starts and another one tells."""
    ask = ExecAsk(command=["sh", "-c", line])
    made = asked.ask(f"{job_path('default', job)}/exec", ExecStarted, ask, retry=False)
    output, code = b"", None
    while code is None:
        piece = other.read_exec("default", job, made.id, offset=len(output))
        output, code = output + piece.data, piece.exit_code
    return output, code


def echo(asked: ApiClient, other: ApiClient, job: str) -> bytes:
    """What a program of a session makes of its input."""

    async def talk() -> bytes:
        client = cast(ApiClient, BalancedClient(asked, other))
        async with patience(), NodeTunnel(open_by_api(client, "default", job, 0)) as tunnel:
            channel = await tunnel.run(argv=["tr", "a-z", "A-Z"])
            await channel.write(b"typed")
            channel.end()
            told = b""
            while (piece := await channel.read()) is not None:
                told += piece[1]
            return told

    return asyncio.run(talk())
