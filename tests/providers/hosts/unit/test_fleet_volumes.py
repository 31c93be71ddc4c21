"""Which host has a named volume: what is recorded before a launch, and what hosts report."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from cavvy.domain.values import replace
from cavvy.domain.volumes import find_time
from cavvy.providers.base import NoCapacity, Refused, TryAgain
from cavvy.providers.hosts.fleet.host_link import HostLink
from cavvy.providers.hosts.fleet.launch_ledger import FleetIntent, FleetLedger
from cavvy.providers.hosts.fleet.volumes import FleetVolumes
from cavvy.providers.state import MemoryProviderState, ProviderState

INTENT = FleetIntent(
    name="g",
    installation="i",
    hosts=("a",),
    addresses=("",),
    launched_at=datetime(2026, 1, 1, tzinfo=UTC),
    grace_s=1,
    project="p",
    volumes=("models",),
)


class Link:
    """Implements `HostLink` as far as it is asked."""

    problem, let_in, leaving, silent_s, target = "cut", True, False, 0.0, ("h", 22)

    def __init__(self, name: str) -> None:
        self.name, self.up = name, True
        self.asked: list[Mapping[str, object]] = []

    async def connect(self) -> Any:
        raise AssertionError

    async def ask(self, do: str, kind: Any, **fields: object) -> Any:
        self.asked.append({"do": do, **fields})
        return kind()

    async def reaches(self, address: str, port: int) -> bool:
        return False


class Hosts:
    """The hosts a and b, with one server of several that share their state."""

    def __init__(self, state: ProviderState | None = None) -> None:
        self.state = state or MemoryProviderState()
        self.ledger = FleetLedger(self.state, lambda: INTENT.launched_at)
        self.links: dict[str, Link] = {name: Link(name) for name in "ab"}
        links: Mapping[str, HostLink] = self.links
        self.volumes = FleetVolumes("ssh", self.ledger, links, {})

    async def launch(self, intent: FleetIntent = INTENT) -> None:
        await self.ledger.put(intent)
        await self.volumes.claim(intent)

    async def report(self, host: str, **volumes: Sequence[str]) -> None:
        await self.volumes.note(host, volumes, self.volumes.list_on(host))

    async def where(self) -> list[tuple[str, str, str | None]]:
        found = await self.volumes.list_locations()
        return [(each.project, each.names[0], each.zone) for each in found]


async def test_a_volume_is_where_it_was_first_used_and_projects_have_their_own() -> None:
    hosts = Hosts()
    await hosts.launch()
    assert await hosts.where() == [("p", "models", "a")]
    elsewhere = replace(INTENT, name="h", hosts=("b",))
    with pytest.raises(NoCapacity, match="the volume models is on a"):
        await hosts.launch(elsewhere)
    with pytest.raises(NoCapacity, match="the volume models is on a"):
        await Hosts(hosts.state).launch(replace(elsewhere, name="j"))  # another server
    await hosts.launch(replace(elsewhere, name="i", project="q"))
    assert await hosts.where() == [("p", "models", "a"), ("q", "models", "b")]


async def test_what_hosts_report_is_recorded_and_what_they_lack_is_forgotten() -> None:
    hosts = Hosts()
    await hosts.report("a", p=["models"], q=["models", "more"])
    assert len(await hosts.where()) == 3
    await hosts.report("b", p=["models"])  # a copy that somebody made counts for nothing
    assert ("p", "models", "a") in await hosts.where()
    await hosts.volumes.note("a", None, hosts.volumes.list_on("a"))  # its disk does not answer
    assert len(await hosts.where()) == 3
    await hosts.report("a", q=["more"])
    assert await hosts.where() == [("q", "more", "a")]


async def test_a_hostile_host_fills_no_database_and_names_nothing_else() -> None:
    """The work on it may have made folders there."""
    hosts = Hosts()
    await hosts.report("a", **{"p": ["../x", "a/b", "\x1b[2J", "", "x" * 300], "p/q": ["models"]})
    assert await hosts.where() == []
    await hosts.report("a", p=[f"v{number}" for number in range(5000)])
    assert len(await hosts.where()) == 1000
    await hosts.report("a", p=[f"w{number}" for number in range(5000)])
    await hosts.report("a", p=[f"w{number}" for number in range(5000)])
    assert len(await hosts.where()) == 1000
    assert find_time(1e300) is find_time(-1e300) is None
    assert find_time(0.5) == datetime(1970, 1, 1, tzinfo=UTC)


async def test_a_volume_that_a_launch_is_about_to_make_is_not_forgotten() -> None:
    hosts = Hosts()
    await hosts.launch()
    await hosts.report("a")
    assert await hosts.where() == [("p", "models", "a")]
    other = Hosts(hosts.state)  # which asked the host before it learnt of the volume
    await other.volumes.list_locations()
    await other.report("a")
    assert await hosts.where() == [("p", "models", "a")]
    before = list[str]()
    await hosts.ledger.put(replace(INTENT, given_up="full"))
    await hosts.volumes.note("a", {}, before)  # the host answered before the volume was recorded
    assert await hosts.where() == [("p", "models", "a")]
    await hosts.report("a")
    assert await hosts.where() == []


async def test_the_volume_of_a_host_that_is_gone_is_told_and_can_be_forgotten() -> None:
    hosts = Hosts()
    await hosts.report("a", p=["models"])
    gone = hosts.links.pop("a")
    (found,) = await hosts.volumes.list_locations()
    assert found.problem == (
        "a, which is no longer in the inventory: list it again, or forget the volume with "
        "`cavvy state rm volume models -p p`"
    )
    with pytest.raises(NoCapacity):
        await hosts.launch(replace(INTENT, hosts=("b",)))
    await hosts.ledger.put(replace(INTENT, hosts=("b",), given_up="x"))
    assert await hosts.volumes.remove("p", "models")
    assert gone.asked == []
    assert await hosts.where() == []
    await hosts.report("b", p=["models"])  # its files were moved there
    assert await hosts.where() == [("p", "models", "b")]


async def test_a_volume_is_removed_on_its_host_unless_it_is_used_or_out_of_reach() -> None:
    hosts = Hosts()
    await hosts.launch()
    with pytest.raises(Refused, match="a job on a uses the volume models"):
        await hosts.volumes.remove("p", "models")
    await hosts.ledger.drop("g")
    hosts.links["a"].up = False
    with pytest.raises(TryAgain, match="models is on a, which cannot be reached now: cut"):
        await hosts.volumes.remove("p", "models")
    hosts.links["a"].up = True
    assert await hosts.volumes.remove("p", "models")
    assert hosts.links["a"].asked == [{"do": "remove_volume", "project": "p", "name": "models"}]
    assert not await hosts.volumes.remove("p", "models")
