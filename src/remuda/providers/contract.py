"""The contract suite of the provider seam: subclass `ProviderContract`, give it a `Place`, and pytest does the rest.

It ships with Remuda, so that providers of third parties can run it; see docs/guides/write-a-provider.md. Nothing but
tests imports this module, since it needs pytest.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol

import pytest

from remuda.domain.offers import Offer
from remuda.domain.places import Hold
from remuda.domain.tasks import NetworkNeed, Resources, SpotPolicy, Task
from remuda.providers.base import (
    Carrier,
    Closes,
    Feature,
    GangSeen,
    GangSpec,
    GangState,
    Introduces,
    NoCapacity,
    Provider,
    ProviderError,
    Refused,
    SharesHosts,
    SignalsChanges,
    TryAgain,
)
from remuda.providers.objections import list_objections

OURS, FOREIGN = "contract-installation-ours", "contract-installation-foreign"


class Place(Protocol):
    """One place under test, for one story. The suite talks to it through providers and these hooks."""

    def provider(self, installation: str) -> Provider:
        """A provider over the same place, as a server of that installation would make after a start."""

    async def settle(self) -> None:
        """Let pass what time it takes until boots and removals that were asked for are over."""

    async def end(self, gang: str) -> None:
        """Let the gang's work end by itself and its nodes go, as after a job that is done."""

    async def wait(self, length: timedelta) -> None:
        """Let time pass; on a real clock for as long as a test may take."""


class ProviderContract:
    """What every provider must keep. Override `place`; `run_story` and `lose_reply` where the defaults do not fit."""

    @pytest.fixture
    def place(self) -> Place:
        pytest.fail("a provider's contract test overrides the fixture `place`, which says how its place is made")

    def run_story(self, story: Coroutine[Any, Any, None]) -> None:
        """Run one test's coroutine; a place on virtual time brings its own loop."""
        asyncio.run(story)

    async def lose_reply(self, place: Place, provider: Provider, gang: GangSpec) -> None:
        """Launch so that it happens and its caller never hears of it. The default forgets the answer."""
        await provider.launch(gang)

    @pytest.fixture
    def play(self, place: Place) -> "Play":
        return self.make_play(place)

    def make_play(self, place: Place) -> "Play":
        """Runs a story on a stage; the gangs that it leaves are removed."""

        async def run(story: Callable[["Stage"], Awaitable[None]]) -> None:
            stage = Stage(place, self.lose_reply)
            try:
                await story(stage)
            finally:
                await stage.clear()

        return lambda story: self.run_story(run(story))

    def test_manifest(self, play: "Play") -> None:
        async def story(stage: Stage) -> None:
            manifest = stage.ours.manifest
            assert re.fullmatch(r"[a-z][a-z0-9-]*", manifest.name)
            assert manifest.title
            assert manifest.docs
            assert all(isinstance(feature, Feature) and reason for feature, reason in manifest.lacks.items())
            names = [setting.name for setting in manifest.settings]
            assert len(names) == len(set(names))
            assert all(setting.consequence for setting in manifest.settings)

        play(story)

    def test_offers_have_unique_keys_and_prices(self, play: "Play") -> None:
        async def story(stage: Stage) -> None:
            offers = await stage.ours.offers()
            assert offers
            keys = [offer.key for offer in offers]
            assert len(keys) == len(set(keys))
            for offer in offers:
                assert offer.provider == stage.ours.manifest.name
                assert offer.rate.micros_per_hour >= 0
                assert offer.minimum_charge >= timedelta(0)
                assert offer.capacity is None or offer.capacity >= 0
                assert (offer.accelerator is None) == (offer.accelerator_count == 0)

        play(story)

    def test_shared_offers_have_hosts(self, play: "Play") -> None:
        async def story(stage: Stage) -> None:
            offers = [offer for offer in await stage.ours.offers() if offer.shared]
            if not isinstance(stage.ours, SharesHosts):
                assert not offers
                return
            hosts = await stage.ours.hosts()
            names = [host.name for host in hosts]
            assert len(names) == len(set(names))
            assert all(name.startswith(f"{stage.ours.manifest.name}/") for name in names)
            assert all(len(host.devices) == len(set(host.devices)) for host in hosts)
            most = max((len(host.devices) for host in hosts), default=0)
            assert all(offer.accelerator_count <= most for offer in offers)

        play(story)

    def test_launched_is_found(self, play: "Play") -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("found")
            await stage.ours.launch(gang)
            if stage.ours.manifest.settle == timedelta(0):
                assert (await stage.one(gang.name)).state in (GangState.QUEUED, GangState.STARTING, GangState.RUNNING)
            await stage.place.settle()
            seen = await stage.one(gang.name)
            assert seen.state is GangState.RUNNING
            assert [node.rank for node in seen.nodes] == list(range(gang.nodes))
            assert all(node.started_at is not None and node.ended_at is None for node in seen.nodes)
            assert gang.name in [each.name for each in await stage.ours.gangs()]

        play(story)

    def test_what_was_never_launched_is_not_found(self, play: "Play") -> None:
        async def story(stage: Stage) -> None:
            assert await stage.ours.gangs(stage.name("never")) == []

        play(story)

    def test_all_nodes_or_none(self, play: "Play") -> None:
        async def story(stage: Stage) -> None:
            if Feature.GANG in stage.ours.manifest.lacks:
                pytest.skip(f"no gangs here: {stage.ours.manifest.lacks[Feature.GANG]}")
            gang = await stage.spec("whole", nodes=3)
            try:
                await stage.ours.launch(gang)
            except (NoCapacity, Refused):
                assert await stage.ours.gangs(gang.name) == []
                return
            await stage.place.settle()
            assert len((await stage.one(gang.name)).nodes) == 3

        play(story)

    def test_a_refused_launch_leaves_nothing(self, play: "Play") -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("nowhere")
            nowhere = replace(gang.offer, region="no-such-region", zone=None)
            with pytest.raises((NoCapacity, Refused)):
                await stage.ours.launch(replace(gang, offer=nowhere))
            await stage.place.settle()
            assert await stage.ours.gangs(gang.name) == []

        play(story)

    def test_the_same_name_again_is_no_second_gang(self, play: "Play") -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("twice")
            await stage.ours.launch(gang)
            first = await stage.engine_ids(gang.name)
            await stage.ours.launch(gang)
            assert await stage.engine_ids(gang.name) == first

        play(story)

    def test_launches_at_once_make_one_gang(self, play: "Play") -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("at-once")
            async with asyncio.TaskGroup() as group:
                for _ in range(4):
                    group.create_task(stage.ours.launch(gang))
            await stage.engine_ids(gang.name)

        play(story)

    def test_launch_after_a_lost_reply_makes_one_gang(self, play: "Play") -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("lost")
            with suppress(TryAgain):
                await stage.lose_reply(gang)
            first = await stage.engine_ids(gang.name)
            await stage.ours.launch(gang)
            assert await stage.engine_ids(gang.name) == first

        play(story)

    def test_launch_after_a_restart_makes_one_gang(self, play: "Play") -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("restart")
            await stage.ours.launch(gang)
            first = await stage.engine_ids(gang.name)
            stage.restart()
            await stage.ours.launch(gang)
            assert await stage.engine_ids(gang.name) == first

        play(story)

    def test_another_installations_gangs_are_neither_seen_nor_touched(self, play: "Play") -> None:
        async def story(stage: Stage) -> None:
            foreign = stage.make(FOREIGN)
            gang = await stage.spec("theirs", installation=FOREIGN)
            await foreign.launch(gang)
            await stage.place.settle()
            assert await stage.ours.gangs() == []
            assert await stage.ours.gangs(gang.name) == []
            await stage.ours.remove(gang.name)
            await stage.place.settle()
            (seen,) = await foreign.gangs(gang.name)
            assert seen.state is GangState.RUNNING

        play(story)

    def test_removed_is_ended_and_stays_so(self, play: "Play") -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("removed")
            await stage.ours.launch(gang)
            await stage.place.settle()
            for _ in range(2):
                await stage.ours.remove(gang.name)
                await stage.place.settle()
                seen = await stage.one(gang.name)
                assert seen.state is GangState.ENDED

        play(story)

    def test_removal_during_boot(self, play: "Play") -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("boot")
            await stage.ours.launch(gang)
            await stage.ours.remove(gang.name)
            await stage.place.settle()
            assert (await stage.one(gang.name)).state is GangState.ENDED

        play(story)

    def test_removal_of_what_never_was(self, play: "Play") -> None:
        async def story(stage: Stage) -> None:
            name = stage.name("never-was")
            await stage.ours.remove(name)
            await stage.ours.remove(name)
            assert await stage.ours.gangs(name) == []

        play(story)

    def test_launch_after_removal_is_no_second_gang(self, play: "Play") -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("again")
            await stage.ours.launch(gang)
            await stage.ours.remove(gang.name)
            await stage.place.settle()
            await stage.ours.launch(gang)
            await stage.place.settle()
            assert (await stage.one(gang.name)).state is GangState.ENDED

        play(story)

    @pytest.mark.parametrize("by_itself", [True, False])
    def test_an_end_is_remembered_and_never_changes(self, play: "Play", by_itself: bool) -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("ended")
            await stage.ours.launch(gang)
            await stage.place.settle()
            started = [node.started_at for node in (await stage.one(gang.name)).nodes]
            await (stage.place.end(gang.name) if by_itself else stage.ours.remove(gang.name))
            await stage.place.settle()
            seen = await stage.one(gang.name)
            assert seen.state is GangState.ENDED
            assert [node.started_at for node in seen.nodes] == started
            assert all(n.started_at and n.ended_at and n.started_at <= n.ended_at for n in seen.nodes)
            await stage.place.wait(timedelta(minutes=30))
            assert (await stage.one(gang.name)).nodes == seen.nodes
            stage.restart()
            assert (await stage.one(gang.name)).nodes == seen.nodes

        play(story)

    def test_the_longest_name(self, play: "Play") -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("x" * 63)
            await stage.ours.launch(gang)
            await stage.place.settle()
            assert (await stage.one(gang.name)).name == gang.name

        play(story)

    def test_two_gangs_are_two(self, play: "Play") -> None:
        async def story(stage: Stage) -> None:
            first, second = await stage.spec("one"), await stage.spec("two")
            await stage.ours.launch(first)
            await stage.ours.launch(second)
            await stage.place.settle()
            await stage.ours.remove(first.name)
            await stage.place.settle()
            assert (await stage.one(first.name)).state is GangState.ENDED
            assert (await stage.one(second.name)).state is GangState.RUNNING

        play(story)

    def test_an_end_is_signalled(self, play: "Play") -> None:
        async def story(stage: Stage) -> None:
            if not isinstance(stage.ours, SignalsChanges):
                pytest.skip("this provider signals nothing; the control plane polls it")
            gang = await stage.spec("signal")
            await stage.ours.launch(gang)
            await stage.place.settle()
            await stage.place.end(gang.name)
            async with asyncio.timeout(60):
                while await stage.ours.changed() != gang.name or (await stage.one(gang.name)).state is not ENDED:
                    pass

        play(story)

    def test_lacks_are_refused_with_a_reason(self, play: "Play") -> None:
        async def story(stage: Stage) -> None:
            lacks = stage.ours.manifest.lacks
            asked = {
                Feature.SPOT: Task(name="t", run="true", resources=Resources(spot=SpotPolicy.ONLY)),
                Feature.IMAGE: Task(name="t", run="true", image="box:1"),
                Feature.DISK: Task(name="t", run="true", resources=Resources(disk_type="gp3")),
                Feature.NETWORK: Task(name="t", run="true", resources=Resources(network=NetworkNeed(min_mbps=1))),
                Feature.GANG: Task(name="t", run="true", nodes=2),
            }
            assert list_objections(Task(name="t", run="true"), stage.ours) == []
            for feature in asked.keys() & lacks.keys():
                assert any(lacks[feature] in reason for reason in list_objections(asked[feature], stage.ours)), feature

        play(story)

    def test_introduction(self, play: "Play") -> None:
        async def story(stage: Stage) -> None:
            if not isinstance(stage.ours, Introduces):
                pytest.skip("this provider does not introduce itself")
            facts = await stage.ours.introduce()
            assert facts
            assert all(what and value for what, value in facts)

        play(story)


ENDED = GangState.ENDED
Play = Callable[[Callable[["Stage"], Awaitable[None]]], None]


class Stage:
    """One story's place and provider, and the gangs that it made."""

    def __init__(self, place: Place, lose_reply: Callable[[Place, Provider, GangSpec], Awaitable[None]]) -> None:
        self.place = place
        self._lose_reply = lose_reply
        self._made: list[tuple[str, Provider]] = []
        self._names: list[tuple[str, str]] = []
        self.ours = self.make(OURS)

    def make(self, installation: str) -> Provider:
        provider = self.place.provider(installation)
        self._made.append((installation, provider))
        return provider

    def restart(self) -> None:
        """Go on with a new provider that remembers nothing but what the place does."""
        self.ours = self.make(OURS)

    def name(self, word: str) -> str:
        """A gang's name as the control plane makes them: at most 63 of [a-z0-9-]."""
        return f"rm-0123abcd-{word}"[:63]

    async def offer(self) -> Offer:
        """The cheapest offer that can be had now, of the fewest accelerators."""
        offers = [offer for offer in await self.ours.offers() if offer.capacity != 0]
        return min(offers, key=lambda offer: (offer.accelerator_count, offer.rate, offer.key))

    async def spec(self, word: str, *, nodes: int = 1, installation: str = OURS) -> GangSpec:
        """A gang on the cheapest offer; holds are made where the offer is on a shared host."""
        offer, name = await self.offer(), self.name(word)
        self._names.append((installation, name))
        return GangSpec(
            name=name,
            installation=installation,
            offer=offer,
            nodes=nodes,
            carrier=Carrier(address="unix:/nonexistent/remuda-contract.sock", token="contract"),
            lease=timedelta(hours=1),
            holds=await self._holds(offer, name, nodes),
            labels={"project": "contract"},
            grace=timedelta(seconds=1),
        )

    async def _holds(self, offer: Offer, gang: str, nodes: int) -> Sequence[Hold]:
        if not offer.shared or not isinstance(self.ours, SharesHosts):
            return ()
        host = (await self.ours.hosts())[0]
        need = offer.accelerator_count
        return [
            Hold(
                host=host.name,
                gang=gang,
                rank=rank,
                project="contract",
                cpus=0.1,
                memory_mib=64,
                devices=host.devices[rank * need : (rank + 1) * need],
            )
            for rank in range(nodes)
        ]

    async def one(self, name: str) -> GangSeen:
        """The one gang of that name; more than one is a second gang."""
        (seen,) = await self.ours.gangs(name)
        assert seen.name == name
        return seen

    async def engine_ids(self, name: str) -> Sequence[str]:
        """What identifies the gang's nodes, once they are up; all different."""
        await self.place.settle()
        seen = await self.one(name)
        ids = [seen.engine_id, *(node.engine_id for node in seen.nodes)]
        nodes = [node.engine_id for node in seen.nodes]
        assert len(nodes) == len(set(nodes))
        return ids

    async def lose_reply(self, gang: GangSpec) -> None:
        await self._lose_reply(self.place, self.ours, gang)

    async def clear(self) -> None:
        """Remove every gang of the story, by its own installation."""
        providers = dict(self._made)
        for installation, name in self._names:
            provider = providers.get(installation)
            if provider is None:
                continue
            try:
                await provider.remove(name)
            except ProviderError as error:
                pytest.fail(f"{name} could not be removed after the story: {error}")
        await self.place.settle()
        for _, provider in self._made:
            if isinstance(provider, Closes):
                await provider.close()
