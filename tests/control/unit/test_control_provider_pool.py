"""What places told a moment ago, less what was given away since: no room is counted twice."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import cast

import pytest

from cavvy.control.clock import ControlClock
from cavvy.control.provider_pool import CALL_TIMEOUT, FREED_AGE, OFFERS_AGE, ProviderPool
from cavvy.domain.allocations import VolumeLocation
from cavvy.domain.jobs import JobRecord
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Objection, ResourceSpec, TaskSpec, Volume, VolumeKind
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.planner.candidates import find_candidates, match
from cavvy.planner.placements import PlanningContext
from cavvy.providers.abilities import HAS_PARTS, HOLDS_VOLUMES
from cavvy.providers.base import (
    AgentEndpoint,
    GangSpec,
    Manifest,
    NoCapacity,
    NotFound,
    Provider,
    Refused,
    TryAgain,
)
from cavvy.scheduler.offer_lines import count_left

FARM = Manifest(name="farm", title="Farm", docs="", visibility_delay=timedelta(0))
LARGE = Offer(
    provider="farm", region="r", instance_type="t8", rate=HourlyRate(0), capacity=2, pool="nodes"
)
SMALL = replace(LARGE, instance_type="t4", capacity=4)
LEASE = timedelta(minutes=1)


class Farm:
    """A place that answers a launch when it is told to."""

    manifest = FARM

    def __init__(self) -> None:
        self.answer = asyncio.Event()
        self.tells = asyncio.Event()
        self.tells.set()
        self.refuses = False

    async def offers(self) -> Sequence[Offer]:
        await self.tells.wait()
        return [LARGE, SMALL]

    async def launch(self, gang: GangSpec) -> None:
        await self.answer.wait()
        if self.refuses:
            raise NoCapacity("gone")

    async def remove(self, name: str) -> None:
        raise NotFound("there is no such path")


class Watch:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.at = datetime(2030, 1, 1, tzinfo=UTC)

    def now(self) -> datetime:
        return self.at


def make_places() -> tuple[ProviderPool, Farm, Watch]:
    farm, watch = Farm(), Watch()
    return ProviderPool({"farm": cast(Provider, farm)}, cast(ControlClock, watch)), farm, watch


def test_a_missing_object_does_not_count_as_a_removal() -> None:
    pool, _, _ = make_places()
    with pytest.raises(TryAgain, match="farm reports a missing object: there is no such path"):
        asyncio.run(pool.remove("farm", "gang"))


async def left(pool: ProviderPool, offer: Offer, age: timedelta = timedelta(0)) -> int | None:
    return count_left(offer, (await pool.market(age)).used)


def make_spec() -> GangSpec:
    agent_endpoint = AgentEndpoint(address="unix:/x", token="t")
    return GangSpec(
        name="g", installation="i", offer=LARGE, nodes=1, agent_endpoint=agent_endpoint, lease=LEASE
    )


async def test_what_is_placed_is_used_until_its_place_has_answered() -> None:
    pool, farm, _ = make_places()
    assert await left(pool, SMALL) == 4
    pool.place("g", LARGE, 1)
    assert await left(pool, SMALL, LEASE) == 2  # of what was told before
    assert await left(pool, SMALL) == 2  # and of what is told now: nothing was launched yet
    launch = asyncio.create_task(pool.launch(make_spec()))
    await asyncio.sleep(0)
    assert await left(pool, LARGE) == 1
    farm.answer.set()
    await launch
    assert await left(pool, LARGE) == 2  # what it tells from now on counts the gang


async def test_what_was_refused_or_never_launched_is_free_again() -> None:
    pool, farm, watch = make_places()
    farm.refuses = True
    farm.answer.set()
    pool.place("g", LARGE, 1)
    try:
        await pool.launch(make_spec())
    except NoCapacity:
        pass
    else:
        raise AssertionError("it was to be refused")
    assert await left(pool, LARGE) == 2
    pool.place("h", LARGE, 2)
    assert await left(pool, SMALL) == 0
    watch.at += CALL_TIMEOUT
    assert await left(pool, SMALL) == 4
    pool.place("i", LARGE, 2)
    pool.free("i", LARGE)  # its job was stopped before the launch
    assert await left(pool, SMALL) == 4


async def test_what_is_gone_is_looked_for_soon() -> None:
    pool, _, watch = make_places()
    first = await pool.market()
    watch.at += FREED_AGE
    assert await pool.market() is first
    assert pool.next_news(OFFERS_AGE) == OFFERS_AGE
    assert not pool.free("g", replace(LARGE, capacity=None))
    assert not pool.free("g", replace(LARGE, shared=True))
    assert await pool.market() is first
    assert not pool.is_outdated
    assert pool.free("g", LARGE)
    assert pool.is_outdated
    assert pool.next_news(OFFERS_AGE) == timedelta(0)
    second = await pool.market()
    assert second is not first
    assert pool.free("h", SMALL)
    assert pool.next_news(OFFERS_AGE) == FREED_AGE
    assert await pool.market() is second  # not more often than that
    watch.at += FREED_AGE
    assert await pool.market() is not second
    assert not pool.is_outdated
    pool.free("i", LARGE)
    pool.expire()  # a pass of the queue still uses the offers, in which the nodes are not free
    assert pool.is_outdated


async def test_what_is_placed_while_places_are_asked_is_used() -> None:
    pool, farm, _ = make_places()
    farm.tells.clear()
    asked = asyncio.create_task(left(pool, LARGE))
    await asyncio.sleep(0)
    pool.place("g", LARGE, 1)
    farm.tells.set()
    assert await asked == 1


class BlindFarm(Farm):
    """A place that may not say which volumes there are, such as a cloud whose account has an
    older policy.
    """

    manifest = replace(FARM, abilities=(HOLDS_VOLUMES,))

    async def volumes(self) -> Sequence[VolumeLocation]:
        raise Refused("not allowed")


async def test_a_place_that_cannot_tell_of_volumes_runs_what_names_none() -> None:
    pool = ProviderPool({"farm": cast(Provider, BlindFarm())}, cast(ControlClock, Watch()))
    market = (await pool.market()).market
    assert list(market.offers) == [LARGE, SMALL]
    assert [str(each) for each in market.problems] == ["farm: not allowed"]
    volume = Volume(kind=VolumeKind.NAMED, source="data", path="/d", size_gib=8)
    plain = TaskSpec(name="t", run="x")
    kept, scratch = (
        replace(plain, volumes=(replace(volume, keep=keep),)) for keep in (True, False)
    )
    told = [market.explain_misplaced(task, LARGE) for task in (plain, kept, scratch)]
    assert told == [None, Objection("volumes", "the location of data is currently unknown"), None]


class SilentFarm(BlindFarm):
    """A place with volumes that does not answer at all."""

    async def offers(self) -> Sequence[Offer]:
        raise TryAgain("cannot be reached")


class MakingFarm(Farm):
    """A place that makes what volumes a task names, such as this machine."""

    manifest = replace(FARM, makes_volumes=True)


async def test_a_job_does_not_get_a_new_volume_while_the_place_that_may_have_it_is_silent() -> None:
    places = {
        "farm": cast(Provider, SilentFarm()),
        "here": cast(Provider, MakingFarm()),
        "other": cast(Provider, Farm()),
    }
    market = (await ProviderPool(places, cast(ControlClock, Watch())).market()).market
    assert (market.blind, market.makers, market.unlisted) == ({"farm"}, {"here"}, {"other"})
    volume = Volume(kind=VolumeKind.NAMED, source="data", path="/d")
    task, here = TaskSpec(name="t", run="x", volumes=(volume,)), replace(LARGE, provider="here")
    market, now = replace(market, offers=[here]), Watch().at
    job = JobRecord(id="j", project="p", name="n", task=task, submitted_at=now, since=now)
    found = find_candidates(
        job, market, match(job, market), no_objections, situation=PlanningContext(), now=now
    )
    assert (found.offers, found.unusable) == ((), True)
    assert "the location of data is currently unknown" in found.reason


class HalfFarm(Farm):
    """A place of two regions, of which one does not answer."""

    manifest = replace(FARM, abilities=(HAS_PARTS,))

    def silent(self) -> Sequence[str]:
        return ["east: cannot be reached"]


def no_objections(task: TaskSpec, provider: str) -> Sequence[Objection]:
    return ()


async def test_what_fits_only_where_nobody_answers_is_waited_for() -> None:
    """What the other region has is offered; what neither offers is not given up."""
    pool, watch = (
        ProviderPool({"farm": cast(Provider, HalfFarm())}, cast(ControlClock, Watch())),
        Watch(),
    )
    market = (await pool.market()).market
    assert list(market.offers) == [LARGE, SMALL]
    assert list(market.problems) == [("farm", "east: cannot be reached")]
    task = TaskSpec(name="t", run="x", resources=ResourceSpec(instance="t16"))
    job = JobRecord(id="j", project="p", name="n", task=task, submitted_at=watch.at, since=watch.at)
    for each, hopeless in ((market, False), (replace(market, problems=()), True)):
        found = find_candidates(
            job, each, match(job, each), no_objections, situation=PlanningContext(), now=watch.at
        )
        assert found.hopeless is hopeless
        assert ("east: cannot be reached" in found.reason) is not hopeless


async def test_what_is_launched_while_places_are_asked_is_used() -> None:
    """What they tell may be from before the launch."""
    pool, farm, _ = make_places()
    pool.place("g", LARGE, 1)
    farm.answer.set()
    farm.tells.clear()
    asked = asyncio.create_task(left(pool, LARGE))
    await asyncio.sleep(0)
    await pool.launch(make_spec())
    farm.tells.set()
    assert await asked == 1
    assert await left(pool, LARGE) == 2


async def test_a_server_that_may_have_lost_its_jobs_launches_nothing() -> None:
    pool, farm, _ = make_places()
    farm.answer.set()
    farm.refuses = True
    pool.may_launch = lambda: False
    with pytest.raises(TryAgain, match="another server"):
        await pool.launch(make_spec())  # the farm was not asked, so it did not refuse
    pool.may_launch = lambda: True
    with pytest.raises(NoCapacity):
        await pool.launch(make_spec())
