"""Which hosts of a fleet separate the jobs of projects, asked over links in memory."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from cavvy.domain.values import replace
from cavvy.providers.base import NoCapacity, TryAgain
from cavvy.providers.hosts.fleet.host_link import HostSetup
from cavvy.providers.hosts.fleet.launch_ledger import FleetIntent
from cavvy.providers.hosts.isolation import MIXED, FleetIsolation, HostIsolation, ObstacleAnswer


class Link:
    """Implements `HostLink` as far as it is asked; `code` is what the host finds."""

    problem, let_in, leaving, silent_s, target = "", True, False, 0.0, ("h", 22)

    def __init__(self, name: str, code: str | None = "") -> None:
        self.name, self.code, self.up = name, code, True
        self.asked = 0

    async def connect(self) -> HostSetup:
        return HostSetup(root="/c/mark/h", cache="/c/cache", agent=("a",), supervisor=("s",))

    async def ask(self, do: str, kind: Any, **fields: object) -> Any:
        assert (do, kind, fields) == ("try_separation", ObstacleAnswer, {"command": ("a",)})
        self.asked += 1
        if self.code is None:
            raise TryAgain("cut")
        return ObstacleAnswer(obstacle=self.code)

    async def reaches(self, address: str, port: int) -> bool:
        return False


ALONE = FleetIntent(
    name="g",
    installation="i",
    hosts=("a",),
    addresses=("",),
    launched_at=datetime(2026, 1, 1, tzinfo=UTC),
    grace_s=1,
    project="p",
    separates=True,
)


def fleet(*links: Link, mode: HostIsolation = HostIsolation.NAMESPACES) -> FleetIsolation:
    return FleetIsolation(mode, {link.name: link for link in links})


def admit(isolation: FleetIsolation, project: str, intents: Sequence[FleetIntent] = ()) -> bool:
    return asyncio.run(isolation.admit(["a"], project, intents))


async def test_each_connected_host_is_asked_once_a_minute_and_anew_after_a_break() -> None:
    a, b = Link("a"), Link("b", "root")
    isolation = fleet(a, b)
    await isolation.refresh()
    await isolation.refresh()
    assert (a.asked, b.asked) == (1, 1)
    a.up = False
    await isolation.refresh()
    assert "not yet" in str(isolation.find_obstacle("a", ()))
    a.up = True
    await isolation.refresh()
    assert (a.asked, b.asked) == (2, 1)
    assert isolation.find_obstacle("a", ()) == ""
    assert "root" in str(isolation.find_obstacle("b", ()))
    assert isolation.find_obstacle("a", [replace(ALONE, separates=False)]) == MIXED


def test_silence_is_no_separation() -> None:
    isolation = fleet(Link("a", None))
    assert not admit(isolation, "p")
    assert "not yet" in str(isolation.find_obstacle("a", ()))


def test_the_mode_decides_whether_hosts_are_asked() -> None:
    link = Link("a")
    for mode, obstacle in ((HostIsolation.NONE, ""), (HostIsolation.ONE_PROJECT, None)):
        isolation = fleet(link, mode=mode)
        asyncio.run(isolation.refresh())
        assert not admit(isolation, "q", [ALONE])
        assert isolation.find_obstacle("a", [ALONE]) == obstacle
    assert not link.asked


def test_a_host_that_stops_separating_gets_no_job_of_another_project() -> None:
    link = Link("a")
    isolation = fleet(link)
    assert admit(isolation, "q", [ALONE])
    link.code = "namespaces"  # a setting of the kernel was changed
    with pytest.raises(NoCapacity, match="does not separate jobs: namespaces need a Linux kernel"):
        admit(isolation, "q", [ALONE])
    assert "namespaces need a Linux kernel" in str(isolation.find_obstacle("a", ()))
    assert not admit(isolation, "p", [ALONE])  # beside its own project's
    link.code = ""
    with pytest.raises(NoCapacity, match=MIXED):
        admit(isolation, "q", [replace(ALONE, separates=False)])
    assert admit(isolation, "q", [replace(ALONE, hosts=("b",), separates=False)])
