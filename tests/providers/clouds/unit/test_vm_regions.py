"""A region of a cloud that does not list its machines: nothing is concluded about its gangs, and the
gangs of the other regions are reported, launched and removed as usual.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from tests.providers.clouds.contract.test_provider_vm import BARE, TOKENS
from tests.records import make_gang_spec

from cavvy.domain.offers import Offer
from cavvy.domain.values import replace
from cavvy.providers.base import (
    AgentEndpoint,
    GangSpec,
    GangState,
    PartlyUnknown,
    Refused,
    TryAgain,
)
from cavvy.providers.contract import LaunchFault
from cavvy.providers.contract.memory_cloud import MemoryCloud, MemoryPlace
from cavvy.providers.vm.cloud import (
    CloudFault,
    CloudMachine,
    CloudTraits,
    MachineRequest,
    SilentRegions,
)
from cavvy.providers.vm.machines import LIST_AGE
from cavvy.providers.vm.regions import list_regions

OURS = "an installation"
DOWN = CloudFault(503, "unavailable")


class RegionalCloud(MemoryCloud):
    """Two regions. Those in `silent` answer no request except `create` and `delete`."""

    def __init__(self, traits: CloudTraits) -> None:
        super().__init__(traits)
        self.silent: dict[str, CloudFault | Refused] = {}
        self.regions: dict[str, str] = {}  # by the name of the machine

    async def offers(self) -> Sequence[Offer]:
        offers = await super().offers()
        return [replace(each, region=region) for region in ("here", "there") for each in offers]

    async def create(self, request: MachineRequest) -> Sequence[str]:
        self.regions |= dict.fromkeys(request.names, request.offer.region)
        return await super().create(replace(request, offer=replace(request.offer, region="here")))

    async def list(self) -> Sequence[CloudMachine]:
        found = [each for each in await super().list() if not self._is_silent(each.name)]
        if self.silent:
            raise SilentRegions(found, self.silent)
        return found

    async def get(self, machine: str) -> CloudMachine | None:
        if any(each.id == machine and self._is_silent(each.name) for each in self.machines):
            raise DOWN
        return await super().get(machine)

    def _is_silent(self, name: str) -> bool:
        return self.regions[name] in self.silent or "" in self.silent


class RegionalPlace(MemoryPlace):
    make_cloud = RegionalCloud
    cloud: RegionalCloud

    def silence(self, fault: CloudFault | Refused = DOWN, region: str = "there") -> None:
        self.cloud.silent = {region: fault}

    async def heal(self) -> None:
        self.cloud.silent = {}
        await self.wait(LIST_AGE)

    async def spec(self, region: str, nodes: int = 1) -> GangSpec:
        offers = await self.cloud.offers()
        return make_gang_spec(
            next(each for each in offers if each.region == region),
            name=f"rm-1-{region}-1",
            installation=OURS,
            nodes=nodes,
            agent_endpoint=AgentEndpoint(address="https://192.0.2.1:7443", token="t"),
        )


@pytest.fixture
def place(tmp_path: Path) -> RegionalPlace:
    return RegionalPlace(BARE, tmp_path)


async def test_gangs_of_regions_that_answer_are_reported(place: RegionalPlace) -> None:
    provider = place.provider(OURS)
    here, there = await place.spec("here"), await place.spec("there")
    for each in (here, there):
        await provider.launch(each)
    await place.settle()
    place.silence()
    (seen,) = await provider.gangs(here.name)
    assert seen.state is GangState.RUNNING
    with pytest.raises(TryAgain, match="the list of machines in there: unavailable"):
        await provider.gangs(there.name)
    with pytest.raises(PartlyUnknown, match="there") as caught:
        await provider.gangs()
    assert [each.name for each in caught.value.seen] == [here.name]
    assert ("silent", "the list of machines in there: unavailable") in await provider.whoami()
    await place.heal()
    assert {each.name: each.state for each in await provider.gangs()} == {
        here.name: GangState.RUNNING,
        there.name: GangState.RUNNING,
    }
    assert place.billed() == 2


async def test_an_unknown_gang_may_be_in_a_region_that_does_not_answer(
    place: RegionalPlace,
) -> None:
    provider, there = place.provider(OURS), await place.spec("there")
    await provider.launch(there)
    await place.settle()
    place.lose_records()
    place.silence()
    provider = place.provider(OURS)
    for ask in (provider.gangs, provider.remove):
        with pytest.raises(TryAgain, match="there"):
            await ask(there.name)
    await place.heal()
    (seen,) = await provider.gangs(there.name)
    assert seen.state is GangState.RUNNING
    assert await provider.gangs("rm-1-other-1") == []


@pytest.mark.parametrize("traits", [BARE, TOKENS])
async def test_a_lost_request_is_not_repeated_while_its_region_is_silent(
    traits: CloudTraits, tmp_path: Path
) -> None:
    place = RegionalPlace(traits, tmp_path)
    provider, there = place.provider(OURS), await place.spec("there")
    place.fail(0, LaunchFault.LOST)
    with pytest.raises(TryAgain):
        await provider.launch(there)
    place.silence()
    for _ in range(20):
        await place.wait(timedelta(seconds=15))
        with pytest.raises(TryAgain, match="there"):
            await provider.launch(there)
        with pytest.raises(TryAgain, match="there"):
            await provider.gangs(there.name)
    assert len(place.cloud.requests) == 1
    await provider.launch(await place.spec("here"))
    await place.heal()
    for _ in range(20):
        with suppress(TryAgain):
            await provider.launch(there)
        await place.wait(timedelta(seconds=15))
    assert place.billed() == 2
    assert len(await provider.gangs()) == 2


async def test_a_gang_is_removed_although_another_region_is_silent(place: RegionalPlace) -> None:
    provider, here = place.provider(OURS), await place.spec("here")
    await provider.launch(here)
    await place.settle()
    place.silence()
    await provider.remove(here.name)
    assert place.billed() == 0
    await place.settle()
    (seen,) = await provider.gangs(here.name)
    assert (seen.state, seen.preempted) == (GangState.ENDED, False)
    await place.wait(timedelta(days=3))
    with suppress(PartlyUnknown):
        await provider.gangs()


async def test_the_machine_of_a_lost_request_is_deleted_when_its_region_answers(
    place: RegionalPlace,
) -> None:
    provider, there = place.provider(OURS), await place.spec("there", nodes=2)
    place.fail(1, LaunchFault.LOST)
    with pytest.raises(TryAgain):
        await provider.launch(there)
    assert place.billed() == 2
    place.silence()
    with pytest.raises(TryAgain, match="there"):
        await provider.remove(there.name)
    assert place.billed() == 1  # its id is unknown
    for _ in range(10):
        await place.wait(timedelta(minutes=5))
        with pytest.raises(TryAgain, match="there"):
            await provider.gangs(there.name)
    await place.heal()
    await provider.remove(there.name)
    assert place.billed() == 0
    await place.settle()
    (seen,) = await provider.gangs(there.name)
    assert seen.state is GangState.ENDED


async def test_an_ended_gang_stays_ended_while_its_region_is_silent(place: RegionalPlace) -> None:
    provider, there = place.provider(OURS), await place.spec("there")
    await provider.launch(there)
    await place.settle()
    await provider.remove(there.name)
    await place.settle()
    (before,) = await provider.gangs(there.name)
    place.silence()
    assert await provider.gangs(there.name) == [before]
    assert before.state is GangState.ENDED


async def test_a_region_that_refuses_the_list_is_told_as_refusing(place: RegionalPlace) -> None:
    provider, there = place.provider(OURS), await place.spec("there")
    await provider.launch(there)
    await place.settle()
    place.silence(CloudFault(403, "forbidden"))
    with pytest.raises(Refused, match="check the API key"):
        await provider.gangs(there.name)


async def test_a_silent_region_without_a_known_name_may_be_any(place: RegionalPlace) -> None:
    provider, here = place.provider(OURS), await place.spec("here")
    place.silence(region="")
    with pytest.raises(TryAgain, match="the list of machines in a region"):
        await provider.launch(here)
    assert place.cloud.requests == []


async def test_regions_are_listed_together() -> None:
    async def ask(region: str) -> Sequence[CloudMachine]:
        if region in ("b", "c"):
            raise CloudFault(503, f"{region} is down")
        await asyncio.sleep(0)
        return ()

    with pytest.raises(SilentRegions) as caught:
        await list_regions(["a", "b"], ask, lambda each: f"region {each}")
    assert list(caught.value.faults) == ["region b"]
    with pytest.raises(CloudFault, match="b is down") as raised:
        await list_regions(["b", "c"], ask)
    assert not isinstance(raised.value, SilentRegions)
    assert await list_regions(["a"], ask) == []
