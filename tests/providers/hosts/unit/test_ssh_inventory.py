"""Inventories of SSH hosts: names, patterns, prices, and every mistake is told with its place."""

from pathlib import Path

import pytest

from cavvy.domain.tasks import Scalar
from cavvy.providers.base import Refused
from cavvy.providers.ssh.inventory import HostInventory, read_inventory

CONFIG = """
Host gpu-1 gpu-2
  User ann
Host *.example
Host = gate
Include more
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config").write_text(CONFIG)
    (tmp_path / "more").write_text("Host gpu-3 !gpu-9\n")
    return tmp_path


def read(folder: Path, text: str = "", **settings: Scalar) -> HostInventory:
    file = folder / "hosts.toml"
    file.write_text(text)
    return read_inventory(
        {"inventory": str(file), "ssh_config": str(folder / "config"), **settings}
    )


def test_names_and_patterns(folder: Path) -> None:
    assert list(read(folder, hosts="b, a  10.0.0.7").entries) == ["10.0.0.7", "a", "b"]
    assert list(read(folder, hosts="gpu-*").entries) == ["gpu-1", "gpu-2", "gpu-3"]
    assert list(read(folder, hosts="gate gpu-[13]").entries) == ["gate", "gpu-1", "gpu-3"]
    assert list(read(folder, hosts="nothing-*").entries) == []
    assert read(folder, hosts="gpu-* nothing-* b").idle == ["nothing-*"]


@pytest.mark.parametrize("none", ["", "/dev/null"])
def test_no_configuration_may_be_read(folder: Path, none: str) -> None:
    found = read(folder, hosts="gpu-1 gpu-*", ssh_config=none)
    assert (list(found.entries), found.idle) == (["gpu-1"], ["gpu-*"])


def test_a_user_and_port_may_be_named(folder: Path) -> None:
    entry = read(folder, hosts="ann@10.0.0.7:2222").entries["10.0.0.7"]
    assert (entry.user, entry.address, entry.port) == ("ann", "10.0.0.7", 2222)
    assert read(folder, hosts="bo@gpu-1").entries["gpu-1"].user == "bo"
    with pytest.raises(Refused, match="USER@NAME:PORT"):
        read(folder, hosts="gpu-1:ssh")


def test_labels_come_from_host_and_group(folder: Path) -> None:
    group = '[groups.lab]\nhosts = ["a", "b"]\nlabels = {block = "b1", rack = "r1"}\n'
    found = read(folder, group + '[hosts.b]\nlabels = {rack = "r2"}').entries
    assert found["a"].labels == {"block": "b1", "rack": "r1"}
    assert found["b"].labels == {"block": "b1", "rack": "r2"}
    for wrong, told in (
        ('labels = {rack = ""}', "'' cannot be the value of label rack"),
        ('labels = {"my rack" = "r1"}', "'my rack' cannot be a label"),
        ("labels = {rack = 1}", "Expected `str`, got `int`"),
    ):
        with pytest.raises(Refused, match=r"\[hosts.b\]") as refused:
            read(folder, f"[hosts.b]\n{wrong}")
        assert told in str(refused.value)


def test_prices_come_from_host_group_and_setting(folder: Path) -> None:
    text = (
        '[groups.lab]\nhosts = ["a", "b"]\nprice_usd_hr = 2\n[hosts.b]\nprice_usd_hr = '
        "3\n[hosts.c]\n"
    )
    entries = read(folder, text, price_usd_hr=1).entries
    assert [(each.group, each.rate.usd, each.in_group) for each in entries.values()] == [
        ("lab", 2, True),
        ("lab", 3, False),
        ("hosts", 1, True),
    ]


@pytest.mark.parametrize(
    ("text", "settings", "told"),
    [
        (
            "[hosts.a]\n[hosts.b]\nprise = 1",
            {},
            r"\[hosts.b\]: .*`prise`; valid keys are group, price_usd_hr, address",
        ),
        (
            "[groups.lab]\nhosts = 'a b'",
            {},
            r"\[groups.lab\]: Expected `array`, got `str` - at `\$.hosts`",
        ),
        ("hosts = ['a', 'b']", {}, r"\[hosts.NAME\]: Expected `object`, got `array`"),
        ("[host.a]\nport = 22", {}, "'host' is unknown; valid tables are"),
        ("[hosts.a]\nport = 'x'", {}, "port"),
        ("[hosts.a]\nport = 70000", {}, r"<= 65535 - at .*port"),
        ("[hosts.a]\nprice_usd_hr = -1", {}, r">= 0.* - at .*price_usd_hr"),
        ("[groups.a]\nprice_usd_hr = inf", {}, r"<= 1000000.* - at .*price_usd_hr"),
        ("[hosts.a]\ncpus = 0", {}, r"> 0.* - at .*cpus"),
        (
            "",
            {"ssh_config": "/nonexistent/config"},
            "ssh_config: the file /nonexistent/config does not exist",
        ),
        ("[hosts.a", {}, "not TOML"),
        ("[groups.a]\nhosts = ['x']\n[groups.b]\nhosts = ['x']", {}, "x is in the groups a and b"),
        ("[groups.a]\nhosts = ['x']\n[hosts.x]\ngroup = 'b'", {}, "listed in a"),
        ("[groups.a]\nhosts = ['a']", {}, "a host and a group"),
        ("", {"hosts": "a/b"}, "a/b"),
        ("", {"host_keys": "any"}, "accept-new"),
        ("", {"inventory": "/nonexistent/hosts.toml"}, "cannot be read"),
    ],
)
def test_mistakes_are_told(folder: Path, text: str, settings: dict[str, Scalar], told: str) -> None:
    with pytest.raises(Refused, match=told):
        read(folder, text, **settings)
