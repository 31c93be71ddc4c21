"""The plan of a gang's encrypted tunnel, and what keeps work from starting without it."""

from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest

from cavvy.agent.config import AgentConfig, ConfigFields, read_record
from cavvy.agent.documents import TunnelConfig
from cavvy.agent.tunnel import TunnelOffer, name_interface, open_tunnel, tunnel_variables
from cavvy.control.agents.work import make_tunnel, read_key
from cavvy.domain.jobs import Node
from cavvy.domain.messages import HostFacts

KEY = "A" * 43 + "="


class SomeAttempt:
    """What `make_tunnel` reads of an attempt."""

    def __init__(self, name: str) -> None:
        self.id = name


def make_nodes(*addresses: str) -> list[Node]:
    return [
        Node(attempt_id="a", project="p", rank=rank, address=address, tunnel_key=KEY)
        for rank, address in enumerate(addresses)
    ]


def plan(*addresses: str, attempt: str = "a") -> Any:
    return make_tunnel(SomeAttempt(attempt), make_nodes(*addresses), 25000)  # type: ignore[arg-type]


def make_config(home: Path, rank: int = 0) -> AgentConfig:
    fields = {
        "protocol": 1,
        "gang": "g-1",
        "rank": rank,
        "address": "unix:/s",
        "token": "t",
        "home": str(home),
        "cache": str(home),
        "node_address": "10.0.0.1",
        "lease_s": 60,
    }
    return AgentConfig(ConfigFields(fields, "configuration"))


def make_tunnel_config(*keys: str) -> TunnelConfig:
    peers = [
        {"key": key, "endpoint": f"10.0.0.{i}:25001", "address": f"198.18.0.{i}", "missing": "wg"}
        for i, key in enumerate(keys, 1)
    ]
    return read_record(TunnelConfig, ConfigFields({"prefix": 30, "peers": peers}, "work.tunnel"))


@pytest.mark.parametrize("count", [2, 3, 6, 7, 100, 10_000])
def test_each_rank_has_an_address_of_the_reserved_network(count: int) -> None:
    for attempt in ("a", "b", "c"):
        found = plan(*(f"10.1.{i // 250}.{i % 250}" for i in range(count)), attempt=attempt)
        inside = [peer.address for peer in found.peers]
        whole = ip_network("198.18.0.0/15")
        own = ip_network(f"{inside[0]}/{found.prefix}", strict=False)
        assert own.subnet_of(whole)  # type: ignore[arg-type]
        assert len(set(inside)) == count
        hosts = {str(own.network_address), str(own.broadcast_address)}
        assert not hosts & set(inside)


def test_ports_differ_by_rank_and_endpoints_add_no_lines() -> None:
    found = plan("10.0.0.1", "10.0.0.1", "fd00::1", "host-3", "10.0.0.1\nPostUp = sh")
    assert [peer.endpoint for peer in found.peers] == [
        "10.0.0.1:25001",
        "10.0.0.1:25002",
        "[fd00::1]:25003",
        "host-3:25004",
        "invalid:25005",
    ]


def test_one_machine_needs_no_tunnel() -> None:
    assert plan("127.0.0.1", "127.0.0.1") is None
    assert plan("10.0.0.1") is None
    assert plan("127.0.0.1", "10.0.0.1") is not None
    assert plan("127.0.0.1", "") is not None


@pytest.mark.parametrize("key", ["", "A" * 44, KEY + "\nEndpoint = x", "\n" + KEY])
def test_a_key_that_is_none_does_not_count(key: str) -> None:
    assert read_key(HostFacts(tunnel_key=key)) == ""
    assert read_key(HostFacts(tunnel_key=KEY)) == KEY


def test_nothing_is_opened_while_a_rank_lacks_something(tmp_path: Path) -> None:
    said = open_tunnel(make_config(tmp_path), make_tunnel_config(KEY, ""))
    assert said == "`encrypt: true` needs WireGuard on each node; on rank 1, wg"
    assert list(tmp_path.iterdir()) == []


def test_a_node_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "the program ip is not installed" in TunnelOffer(str(tmp_path)).facts()["tunnel_missing"]


def test_libraries_are_kept_on_the_tunnel(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    found = tunnel_variables(config)
    assert found["NCCL_SOCKET_IFNAME"] == found["GLOO_SOCKET_IFNAME"] == name_interface(config)
    assert found["NCCL_IB_DISABLE"] == "1"
    assert len(name_interface(config)) <= 15
    assert name_interface(config) != name_interface(make_config(tmp_path, 1))
