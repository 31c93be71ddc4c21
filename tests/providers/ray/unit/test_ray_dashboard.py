"""What the Ray provider makes of a dashboard that answers late, in part or not at all."""

import asyncio
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.records import make_gang_spec

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Scalar
from cavvy.domain.units import HourlyRate
from cavvy.providers.base import (
    AgentEndpoint,
    GangSpec,
    GangState,
    NodeEndpoint,
    ProviderContext,
    Refused,
    TryAgain,
)
from cavvy.providers.ray import MANIFEST, actor_supervisor
from cavvy.providers.ray.entry import GANG, INSTALLATION, NODES, job_name
from cavvy.providers.ray.provider import RayProvider
from cavvy.providers.registry import check_settings

NODE = {
    "node_id": "n1",
    "node_ip": "10.0.0.1",
    "state": "ALIVE",
    "resources_total": {"CPU": 2.0, "memory": 4.0 * 2**30},
}
OFFER = Offer(
    provider="ray", region="lab", instance_type="2cpu", vcpus=2, memory_mib=4096, rate=HourlyRate(0)
)
NODE_ENDPOINT = NodeEndpoint(
    address="https://192.0.2.1:7443",
    pin="0" * 64,
    key_pin="",
    agent=lambda: "1" * 64,
    pythons=dict,
    publish=lambda content: "3" * 64,
    claim_token=lambda gang, rank: f"{gang}/{rank}",
)
CUT = "cut"  # an answer that breaks off


class Dashboard:
    """Answers as `answers` says, by path: a status and what it says; a job of a gang by its
    name.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.token = ""  # that is asked for; "" for none
        self.denied = 0
        self.answers: dict[tuple[str, str], tuple[int, object]] = {
            ("GET", "/api/v0/nodes"): (
                200,
                {"result": True, "data": {"result": {"result": [NODE]}}},
            ),
            ("GET", "/api/v0/placement_groups"): (
                200,
                {"result": True, "data": {"result": {"result": []}}},
            ),
            ("GET", "/api/cluster_status"): (200, {}),
            ("GET", "/api/version"): (200, {"session_name": "s"}),
        }
        dashboard = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                which = self.command, self.path.partition("?")[0]
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                dashboard.asked.append(which)
                status, said = dashboard.answers.get(which, (404, ""))
                if (
                    dashboard.token
                    and self.headers.get("Authorization") != f"Bearer {dashboard.token}"
                ):
                    status, said = 401, "no"
                    dashboard.denied += 1
                self.send_response(status)
                if said == CUT:
                    self.send_header("Content-Length", "100")
                    self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self.wfile.write(b"5\r\nab" if said == CUT else json.dumps(said).encode())

            do_GET = do_POST = answer

            def log_message(self, *_: object) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def show(self, provider: RayProvider, gang: str, status: str, log: tuple[int, object]) -> None:
        """A job of the gang."""
        name = job_name(provider._mark, gang)
        metadata = {INSTALLATION: provider._mark, GANG: gang, NODES: "1"}
        self.answers["GET", f"/api/jobs/{name}"] = (
            200,
            {"submission_id": name, "status": status, "metadata": metadata},
        )
        self.answers["GET", f"/api/jobs/{name}/logs"] = log
        self.answers["POST", f"/api/jobs/{name}/stop"] = 200, {"stopped": True}


@pytest.fixture
def dashboards() -> Iterator[tuple[Dashboard, Dashboard]]:
    found = Dashboard(), Dashboard()
    yield found
    for each in found:
        each.server.shutdown()
        each.server.server_close()


def make(
    home: Path, more: dict[str, Scalar] | None = None, **urls: str
) -> tuple[RayProvider, list[datetime]]:
    clock = [datetime(2026, 5, 1, 12, tzinfo=UTC)]
    addresses = " ".join(f"{name}={url}" for name, url in urls.items())
    context = ProviderContext(
        installation="i",
        home=home,
        settings=check_settings(MANIFEST, {"addresses": addresses, **(more or {})}),
        node_endpoint=NODE_ENDPOINT,
        now=lambda: clock[0],
    )
    return RayProvider(MANIFEST, context), clock


def make_gang() -> GangSpec:
    agent_endpoint = AgentEndpoint(address="unix:/x", token="t")
    return make_gang_spec(OFFER, agent_endpoint=agent_endpoint, lease=timedelta(minutes=1))


@pytest.mark.parametrize("said", ["", CUT])
def test_a_cluster_that_does_not_answer_hides_no_other(
    dashboards: tuple[Dashboard, Dashboard], tmp_path: Path, said: str
) -> None:
    well, ill = dashboards
    ill.answers["GET", "/api/v0/nodes"] = 503, said
    both, _ = make(tmp_path, a=ill.url, lab=well.url)
    assert {each.region for each in asyncio.run(both.offers())} == {"lab"}
    assert [each.partition(":")[0] for each in both.silent()] == ["a"]
    facts = asyncio.run(both.whoami())
    assert any(what == "cluster" and "lab" in value for what, value in facts)
    assert any(what == "silent" and value.startswith("a: HTTP 503") for what, value in facts)
    alone, _ = make(tmp_path, a=ill.url)
    with pytest.raises(TryAgain, match="503"):
        asyncio.run(alone.offers())


UP = {"event": "up", "rank": 0, "node": "n1", "address": "10.0.0.1", "at": 1777636800.0}
ENDED = {
    "event": "ended",
    "rank": 0,
    "code": 0,
    "exit": {"exit_code": 7},
    "said": "",
    "at": 1777636830.0,
}


async def test_a_gang_has_not_ended_before_its_last_words_are_read(
    dashboards: tuple[Dashboard, Dashboard], tmp_path: Path
) -> None:
    """They alone say how it ended and from when to when each node is billed; a log that is lost
    ends the wait.
    """
    dashboard, _ = dashboards
    words = "".join(f"cavvy {json.dumps(each)}\n" for each in (UP, ENDED))

    async def look(log: tuple[int, object], provider: RayProvider) -> tuple[GangState, int | None]:
        dashboard.show(provider, "rm-1", "SUCCEEDED", log)
        (seen,) = await provider.gangs("rm-1")
        return seen.state, seen.exit_code

    provider, clock = make(tmp_path / "late", lab=dashboard.url)
    assert (await look((503, "busy"), provider))[0] is not GangState.ENDED
    clock[0] += timedelta(seconds=5)
    assert await look((200, {"logs": words}), provider) == (GangState.ENDED, 7)
    provider, clock = make(tmp_path / "never", lab=dashboard.url)
    assert (await look((503, "busy"), provider))[0] is not GangState.ENDED
    clock[0] += timedelta(minutes=2)
    assert await look((503, "busy"), provider) == (GangState.ENDED, None)


def test_a_look_that_began_before_the_end_was_seen_does_not_bring_the_gang_back(
    dashboards: tuple[Dashboard, Dashboard], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dashboard, _ = dashboards
    before = f"cavvy {json.dumps(UP)}\n"
    after = f"{before}cavvy {json.dumps(ENDED)}\n"

    async def scenario() -> None:
        provider, _ = make(tmp_path, lab=dashboard.url)
        (site,) = provider.sites().values()
        dashboard.show(provider, "rm-1", "RUNNING", (200, {"logs": before}))
        plain, asked = site.api.log, list[str]()

        async def slow(name: str) -> str | None:
            asked.append(name)
            if len(asked) > 1:
                return await plain(name)
            dashboard.show(provider, "rm-1", "SUCCEEDED", (200, {"logs": after}))
            assert [each.state for each in await provider.gangs("rm-1")] == [GangState.ENDED]
            return before

        monkeypatch.setattr(site.api, "log", slow)
        for _ in range(2):
            assert [(each.state, each.exit_code) for each in await provider.gangs("rm-1")] == [
                (GangState.ENDED, 7)
            ]

    asyncio.run(scenario())


async def test_a_gang_that_is_removed_while_its_job_is_looked_for_was_not_taken_back(
    dashboards: tuple[Dashboard, Dashboard], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dashboard, _ = dashboards
    provider, _ = make(tmp_path, lab=dashboard.url)
    dashboard.answers["POST", "/api/jobs/"] = 200, {}
    (site,) = provider.sites().values()

    async def version() -> dict[str, Any]:
        await provider.remove("rm-1")
        return {"session_name": "of a head that was started anew"}

    await provider.launch(make_gang())
    monkeypatch.setattr(site.api, "version", version)
    (seen,) = await provider.gangs("rm-1")
    assert (seen.state, seen.reason, seen.preempted) == (GangState.ENDED, "removed", False)


async def test_what_was_removed_before_it_was_there_is_stopped_when_it_comes(
    dashboards: tuple[Dashboard, Dashboard], tmp_path: Path
) -> None:
    dashboard, _ = dashboards
    provider, _ = make(tmp_path, lab=dashboard.url)
    dashboard.answers["POST", "/api/jobs/"] = 504, "no answer in time, and yet it is under way"
    with pytest.raises(TryAgain):
        await provider.launch(make_gang())
    await provider.remove("rm-1")
    assert await provider.gangs("rm-1") == []
    dashboard.show(provider, "rm-1", "RUNNING", (200, {"logs": ""}))
    await provider.gangs("rm-1")
    assert any(method == "POST" and path.endswith("rm-1/stop") for method, path in dashboard.asked)


def test_a_fetch_that_breaks_off_is_tried_again(
    dashboards: tuple[Dashboard, Dashboard], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dashboard, _ = dashboards
    digest = "12ae32cb1ec02d01eda3581b127c1fee3b0dc53572ed6baf239721a03d82e126"  # of "" in quotes
    monkeypatch.setattr(actor_supervisor, "AGAIN_S", 0.0)
    dashboard.answers = Turns([(200, ""), (200, CUT)])
    actor_supervisor.fetch(dashboard.url, digest, str(tmp_path / "agent"))
    assert (tmp_path / "agent").read_bytes() == b'""'
    assert len(dashboard.asked) == 2


class Turns(dict[tuple[str, str], tuple[int, object]]):
    """The last of the answers, then the one before it, whatever is asked."""

    def __init__(self, answers: list[tuple[int, object]]) -> None:
        super().__init__()
        self._answers = answers

    def get(self, which: object, default: object = None) -> Any:
        return self._answers.pop()


async def test_a_token_that_was_replaced_is_read_again(
    dashboards: tuple[Dashboard, Dashboard], tmp_path: Path
) -> None:
    dashboard, _ = dashboards
    token = tmp_path / "token"
    token.write_text("old\n")
    provider, _ = make(tmp_path, {"token_file": str(token)}, lab=dashboard.url)
    for good in ("old", "new"):
        dashboard.token = good
        if good == "new":
            with pytest.raises(Refused, match="token_file"):
                await provider.offers()
            token.write_text(good)
        assert await provider.offers()
    denied = dashboard.denied
    assert await provider.offers()
    assert dashboard.denied == denied > 0


LEAVES = """
import pathlib, signal, sys
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
pathlib.Path(sys.argv[-1]).with_name("up").touch()
signal.pause()
"""


@pytest.mark.parametrize("ending", ["told", "driver lost", "no agent"])
def test_nothing_of_a_gang_stays_on_its_node_when_its_agent_has_left(
    tmp_path: Path, ending: str
) -> None:
    (tmp_path / "cache").mkdir()
    digest = hashlib.sha256(LEAVES.encode()).hexdigest()
    if ending != "no agent":
        (tmp_path / f"{digest}.pyz").write_text(LEAVES)
    config = {"gang": "rm-1", "address": "https://192.0.2.1:1", "lease_s": 60.0}
    boot = {
        "folder": str(tmp_path),
        "rank": 0,
        "agent": digest,
        "python": sys.executable,
        "leave_s": 20.0,
    }
    source = (
        Path(actor_supervisor.__file__)
        .read_text()
        .replace("PATIENCE_S = 300.0", "PATIENCE_S = 0.0")
        .replace("=60)", "=0.2)")
    )
    words = [sys.executable, "-I", "-S", "-c", source]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({**boot, "config": config}).encode() + b"\n")
        process.stdin.flush()
        if ending != "no agent":
            assert "pid" in json.loads(process.stdout.readline())
            while not (tmp_path / "gangs/rm-1/0/up").exists():
                time.sleep(0.01)
            if ending == "told":
                process.stdin.write(b"stop\n")
                process.stdin.flush()
            else:
                process.stdin.close()
        told = json.loads(process.stdout.readline())
        assert told.get("code") == 0 or "cannot fetch" in told["failed"]
        assert [path.name for path in (tmp_path / "gangs").iterdir()] == []


def test_last_words_are_delivered_until_somebody_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = hashlib.sha256(b"").hexdigest()
    (tmp_path / f"{digest}.pyz").touch()
    codes, started, told = (
        [1, os.EX_TEMPFAIL, 1, 0],
        list[tuple[str, ...]](),
        list[dict[str, Any]](),
    )
    monkeypatch.setattr(
        actor_supervisor.ActorSupervisor, "start", lambda self, *options: started.append(options)
    )
    monkeypatch.setattr(
        actor_supervisor.ActorSupervisor, "follow", lambda self, agent, told: codes.pop(0)
    )
    monkeypatch.setattr(actor_supervisor.ActorSupervisor, "wait", lambda self, seconds: None)
    monkeypatch.setattr(actor_supervisor, "tell", lambda **what: told.append(what))
    config = {"gang": "rm-1", "address": "https://192.0.2.1:1", "lease_s": 60.0}
    actor_supervisor.ActorSupervisor(
        {"folder": str(tmp_path), "rank": 0, "agent": digest, "config": config}
    ).run()
    assert started == [(), *3 * [("--deliver",)]]
    assert [each["code"] for each in told] == [0]
