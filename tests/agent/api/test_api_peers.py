"""Requests that another server has passed on: what its token permits, and what it does not."""

import socket
import time
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.requests import Request

from cavvy.agent.control_client import LOST
from cavvy.api import peers as peers_module
from cavvy.api.errors import ApiProblem
from cavvy.api.peers import PeerServers, is_passed_on
from cavvy.api.tokens import GangTokens
from cavvy.control.share import WorkShare
from cavvy.store.channel import ServerSignal, SignalKind
from cavvy.store.leases import Replica

NOW = datetime(2026, 11, 24, tzinfo=UTC)
PATH = "/v1/projects/default/jobs/train/exec/0123-b/input"


def scope_of(
    token: str, *, path: str = PATH, method: str = "POST", query: str = "offset=0"
) -> dict[str, Any]:
    return {
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "method": method,
        "headers": [(b"cavvy-peer", token.encode())],
    }


@pytest.fixture
def peers() -> PeerServers:
    return PeerServers(None, GangTokens(bytes(32)), "")


def make_token(peers: PeerServers, left_s: float = 30) -> str:
    return peers._make_token("POST", f"{PATH}?offset=0", NOW + timedelta(seconds=left_s))


def accepts(peers: PeerServers, scope: dict[str, Any]) -> bool:
    return peers.accepts(scope, scope["headers"][0][1], NOW)


def test_a_token_is_for_one_request_and_a_short_time(peers: PeerServers) -> None:
    token = make_token(peers)
    assert accepts(peers, scope_of(token))
    assert not accepts(peers, scope_of(token, query="offset=1"))
    assert not accepts(peers, scope_of(token, method="GET"))
    assert not accepts(peers, scope_of(token, path=PATH.replace("train", "other")))
    for left_s, apart_s in ((0, 30), (-270, 300), (330, 300)):
        with pytest.raises(ApiProblem, match=f"differs by {apart_s} s") as caught:
            accepts(peers, scope_of(make_token(peers, left_s=left_s)))
        assert (caught.value.code, "NTP" in caught.value.hint) == ("forbidden", True)
    for wrong in ("", ".", "x.y", token + "x", f"9{token}", token.partition(".")[2]):
        assert not accepts(peers, scope_of(wrong))


def test_a_token_of_another_installation_is_refused(peers: PeerServers) -> None:
    other = PeerServers(None, GangTokens(b"x" * 32), "")
    assert not accepts(peers, scope_of(make_token(other)))


def test_a_request_of_a_server_is_signed_with_its_body(peers: PeerServers) -> None:
    path = "/nodes/v1/join/ask"
    text = f"{path}?offset=0 {sha256(b'body').hexdigest()}"
    token = peers._make_token("POST", text, NOW + timedelta(seconds=30))
    scope = scope_of(token, path=path)
    assert peers.sent(scope, token.encode(), b"body", NOW)
    assert not peers.sent(scope, token.encode(), b"other", NOW)
    assert not peers.sent(scope_of(token, path=path + "s"), token.encode(), b"body", NOW)
    with pytest.raises(ApiProblem, match="differs by 31 s"):
        peers.sent(scope, token.encode(), b"body", NOW + timedelta(seconds=31))
    forwarded = make_token(peers).encode()  # that of a user's request
    assert not peers.sent(scope_of(forwarded.decode()), forwarded, b"", NOW)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/projects/default/jobs",
        "/v1/projects/default/jobs/train/exec",
        "/v1/projects/default/secrets",
        "/v1/projects/default/jobs/train/exec/1/input/../..",
    ],
)
def test_only_requests_about_running_commands_are_passed_on(peers: PeerServers, path: str) -> None:
    token = peers._make_token("POST", f"{path}?offset=0", NOW + timedelta(seconds=30))
    assert not is_passed_on(scope_of(token, path=path))
    assert not accepts(peers, scope_of(token, path=path))


def test_announcements_count_for_live_servers_alone() -> None:
    alive = Replica(id="b", host="h", pid=1, folder="/b", address="unix:/b")
    share = SimpleNamespace(
        me=Replica(id="a", host="h", pid=2, folder="/a", address="unix:/a"),
        find_recent=lambda server: alive if server == "b" else None,
        on_signal=lambda signal: None,
    )
    peers = PeerServers(cast(WorkShare, share), GangTokens(bytes(32)), "")
    woken: list[str] = []
    peers.on_news = woken.append
    for key in ("gang 0 1-b", "gang 1 2-gone", "gang 2 3-a", "gang x 4-b", "gang"):
        share.on_signal(ServerSignal(SignalKind.EXEC, key))
    assert woken == ["gang"]
    assert peers.expects("gang", 0)
    assert not peers.expects("gang", 1)
    assert peers.make_id().endswith("-a")
    assert peers.find_keeper(peers.make_id()) is None, "this server keeps it"
    assert peers.find_keeper("1-b") == alive


async def test_a_dead_peer_does_not_cost_an_agent_its_claim() -> None:
    dead = Replica(id="b", host="h", pid=1, folder="/b", address="unix:/nowhere/server.sock")
    share = SimpleNamespace(
        me=Replica(id="a", host="h", pid=2, folder="/a", address="unix:/a"),
        on_signal=lambda signal: None,
    )
    peers = PeerServers(cast(WorkShare, share), GangTokens(bytes(32)), "")
    scope = scope_of("", path="/agent/v1/execs/1-b") | {"type": "http", "gang_token": "gang"}
    with pytest.raises(ApiProblem, match="does not answer") as caught:
        await peers.pass_on(Request(scope), dead, b"output")
    assert caught.value.status not in LOST


async def test_a_peer_that_does_not_answer_delays_orders_only_shortly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example a paused process: the kernel accepts the connection, and nothing answers."""
    monkeypatch.setattr(peers_module, "_FETCH_S", 0.2)
    silent = socket.socket(socket.AF_UNIX)
    silent.bind(str(tmp_path / "sock"))
    silent.listen()
    paused = Replica(id="b", host="h", pid=1, folder="/b", address=f"unix:{tmp_path}/sock")
    share = SimpleNamespace(
        me=Replica(id="a", host="h", pid=2, folder="/a", address="unix:/a"),
        find_recent=lambda server: paused,
        on_signal=lambda signal: None,
    )
    peers = PeerServers(cast(WorkShare, share), GangTokens(bytes(32)), "")
    for number in range(20):
        share.on_signal(ServerSignal(SignalKind.EXEC, f"gang 0 {number}-b"))
    scope = scope_of("", path="/agent/v1/orders") | {"type": "http", "gang_token": "gang"}
    with silent:
        began = time.monotonic()
        assert await peers.fetch(Request(scope), "gang", 0) == []
        assert time.monotonic() - began < 20 * 0.2
    assert not peers.expects("gang", 0)
