"""Rules for launches, lists and ends of gangs: a gang starts with all nodes or none, and never
twice, even if replies are lost or launches are concurrent. A list of gangs is complete, repeatable
and identical for every caller. A removed gang is never listed again, and the provider can report
the final cost of an ended gang.
"""

import asyncio
from contextlib import suppress
from datetime import timedelta

import pytest

from cavvy.domain.offers import Purchase
from cavvy.domain.values import replace
from cavvy.providers.abilities import SHARES_HOSTS, SIGNALS_CHANGES, ability
from cavvy.providers.base import (
    Feature,
    GangSeen,
    GangSpec,
    GangState,
    NoCapacity,
    Provider,
    Refused,
    TryAgain,
)
from cavvy.providers.contract.harness import FOREIGN, ContractHarness, ScenarioSuite, in_scenario

TOKEN = "tok-5f1d0f4c9b"  # an agent's token, which no report may contain


def check_running(seen: GangSeen, nodes: int) -> None:
    """Check that the report of a running gang contains all nodes, each with a start time in UTC and
    without an end time.
    """
    assert (seen.state, seen.preempted, seen.exit_code) == (GangState.RUNNING, False, None)
    assert [node.rank for node in seen.nodes] == list(range(nodes))
    for node in seen.nodes:
        assert node.engine_id
        assert node.started_at is not None
        assert node.started_at.utcoffset() == timedelta(0)
        assert node.ended_at is None


class LaunchTests(ScenarioSuite):
    """Tests that a requested gang exists exactly once."""

    @in_scenario
    async def test_a_launched_gang_is_found_and_runs(self, harness: ContractHarness) -> None:
        """Launch a gang with the longest allowed name. The gang's report contains all nodes, with
        times in UTC. The report is the same for repeated and for concurrent calls, and does not
        contain the agents' token.
        """
        gang = await harness.spec("x" * 63)
        gang = replace(gang, agent_endpoint=replace(gang.agent_endpoint, token=TOKEN))
        await harness.launch(gang)
        if harness.ours.manifest.visibility_delay == timedelta(0):
            assert (await harness.one(gang.name)).state in (
                GangState.QUEUED,
                GangState.STARTING,
                GangState.RUNNING,
            )
        await harness.place.settle()
        seen = await harness.one(gang.name)
        check_running(seen, gang.nodes)
        async with asyncio.TaskGroup() as group:
            looks = [group.create_task(harness.ours.gangs(gang.name)) for _ in range(10)]
            all_gangs = group.create_task(harness.ours.gangs())
            offers = group.create_task(harness.ours.offers())
        for (again,) in (look.result() for look in looks):
            assert (again.state, again.engine_id) == (seen.state, seen.engine_id)
            assert harness.nodes(again) == harness.nodes(seen)
        assert [each.name for each in all_gangs.result()] == [gang.name]
        assert offers.result()
        assert TOKEN not in f"{all_gangs.result()} {offers.result()}"

    @in_scenario
    async def test_what_was_never_launched_is_not_found(self, harness: ContractHarness) -> None:
        assert await harness.ours.gangs(harness.name("never")) == []

    @in_scenario
    async def test_all_nodes_or_none(self, harness: ContractHarness) -> None:
        harness.needs(Feature.GANG)
        gang = await harness.spec("whole", nodes=3)
        if await harness.launches(gang):
            await harness.place.settle()
            assert len((await harness.one(gang.name)).nodes) == 3

    @in_scenario
    async def test_a_refused_launch_leaves_nothing(self, harness: ContractHarness) -> None:
        gang = await harness.spec("nowhere")
        nowhere = replace(gang.offer, region="no-such-region", zone=None)
        assert not await harness.launches(replace(gang, offer=nowhere))

    @in_scenario
    async def test_launches_at_once_make_one_gang(self, harness: ContractHarness) -> None:
        gang = await harness.spec("at-once")
        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(harness.launch(gang))
        await harness.engine_ids(gang.name)

    @in_scenario
    async def test_launch_after_a_lost_reply_makes_one_gang(self, harness: ContractHarness) -> None:
        gang = await harness.spec("lost")
        with suppress(TryAgain):
            await harness.lose_reply(gang)
        await harness.launch_again(gang)

    @in_scenario
    async def test_launch_after_a_lost_reply_and_a_restart_makes_one_gang(
        self, harness: ContractHarness
    ) -> None:
        gang = await harness.spec("lost-again")
        with suppress(TryAgain):
            await harness.lose_reply(gang)
        harness.restart()
        with suppress(TryAgain):  # the launch may still be in progress
            await harness.ours.launch(gang)
        await harness.launch_again(gang)

    @in_scenario
    async def test_a_launch_whose_caller_went_away_makes_one_gang(
        self, harness: ContractHarness
    ) -> None:
        gang = await harness.spec("left")
        call = asyncio.create_task(harness.ours.launch(gang))
        await harness.a_moment(0.005)
        call.cancel()
        with suppress(asyncio.CancelledError, TryAgain):
            await call
        await harness.place.settle()
        with suppress(TryAgain):
            await harness.ours.launch(gang)
        await harness.place.wait(timedelta(minutes=10))  # long enough that no request is in transit
        await harness.launch(gang)
        await harness.launch_again(gang)

    @in_scenario
    async def test_two_servers_that_launch_the_same_make_one_gang(
        self, harness: ContractHarness
    ) -> None:
        """Two servers launch the same gang at the same time, as can happen while one server
        replaces the other.
        """

        gang = await harness.spec("servers")
        former = harness.ours
        harness.restart()

        async def launch(provider: Provider) -> None:
            with suppress(TryAgain):
                await provider.launch(gang)

        async with asyncio.TaskGroup() as group:
            group.create_task(launch(former))
            group.create_task(launch(harness.ours))
        await harness.launch(gang)  # the control plane launches again if both calls raised TryAgain
        await harness.engine_ids(gang.name)

    @in_scenario
    async def test_the_first_launch_of_a_name_holds(self, harness: ContractHarness) -> None:
        """Launch a running gang again, with the same spec and with a different spec, before and
        after a restart.
        """
        gang = await harness.spec("first")
        await harness.launch(gang)
        first = await harness.engine_ids(gang.name)
        await harness.launch_again(gang)
        await harness.launch_again(gang, replace(gang, nodes=2, allocations=()))
        await harness.launch_again(gang, replace(gang, lease=timedelta(hours=2)))
        await harness.launch_again(gang, replace(gang, labels={"project": "other"}))
        harness.restart()
        await harness.launch(gang)
        assert await harness.engine_ids(gang.name) == first

    @in_scenario
    async def test_an_unknown_type_never_runs(self, harness: ContractHarness) -> None:
        gang = await harness.spec("unknown")
        unknown = replace(
            gang.offer, instance_type="no-such-type", accelerator="H100", accelerator_count=999
        )
        if await harness.launches(replace(gang, offer=unknown, allocations=())):
            await harness.expect(
                GangState.QUEUED, gang
            )  # such as infrastructure that queues any request without a time limit

    @in_scenario
    async def test_a_refused_name_can_be_launched_elsewhere(self, harness: ContractHarness) -> None:
        gang = await harness.spec("second-try")
        nowhere = replace(gang.offer, region="no-such-region", zone=None)
        assert not await harness.launches(replace(gang, offer=nowhere))
        await harness.launch(gang)
        await harness.engine_ids(gang.name)

    @in_scenario
    async def test_several_launched_at_once_are_several(self, harness: ContractHarness) -> None:
        gangs = [await harness.spec(f"many-{number}") for number in range(4)]
        started = []

        async def launch(gang: GangSpec) -> None:
            with suppress(NoCapacity, Refused):
                await harness.launch(gang)
                started.append(gang.name)

        async with asyncio.TaskGroup() as group:
            for gang in gangs:
                group.create_task(launch(gang))
        assert started
        await harness.place.settle()
        assert sorted(seen.name for seen in await harness.ours.gangs()) == sorted(started)

    @pytest.mark.parametrize(
        ("words", "labels"),
        [
            (("a", "a-0"), {"project": "größe-模型", "user": "Zoë 🐎"}),
            (("y" * 50, "y" * 49 + "z"), {"project": "p" * 300, "note": ""}),
            (
                ("0", "00"),
                {
                    "project": "a b/c:d",
                    "Name": "mine",
                    "cavvy": "other",
                    "cavvy-gang": "other",
                    "app": "x",
                },
            ),
        ],
        ids=["longer", "last-letter", "digits"],
    )
    @in_scenario
    async def test_gangs_with_similar_names_and_any_labels_are_two(
        self, harness: ContractHarness, words: tuple[str, str], labels: dict[str, str]
    ) -> None:
        """Launch two gangs with these labels and end the first gang; the second gang must keep
        running.
        """
        first, second = [replace(await harness.spec(word), labels=labels) for word in words]
        await harness.launch(first)
        await harness.start(second)
        for gang in (first, second):
            await harness.expect(GangState.RUNNING, gang)
        listed = sorted(seen.name for seen in await harness.ours.gangs())
        assert listed == sorted([first.name, second.name])
        await harness.remove(first.name)
        await harness.expect(GangState.ENDED, first)
        await harness.expect(GangState.RUNNING, second)

    @pytest.mark.parametrize(
        ("lease", "longest", "grace"),
        [
            (timedelta(minutes=10), None, timedelta(0)),
            (timedelta(days=30), timedelta(days=20), timedelta(minutes=2)),
            (timedelta(hours=6), timedelta(minutes=10), timedelta(seconds=30)),
        ],
        ids=["short", "long", "bounded"],
    )
    @in_scenario
    async def test_any_length_is_taken(
        self,
        harness: ContractHarness,
        lease: timedelta,
        longest: timedelta | None,
        grace: timedelta,
    ) -> None:
        gang = replace(await harness.spec("lengths"), lease=lease, longest=longest, grace=grace)
        try:
            await harness.start(gang)
        except Refused:  # a provider may limit how long a node may run
            assert await harness.ours.gangs(gang.name) == []
        else:
            await harness.expect(GangState.RUNNING, gang)

    @in_scenario
    async def test_a_crowd_of_nodes_or_none(self, harness: ContractHarness) -> None:
        harness.needs(Feature.GANG)
        gang = await harness.spec("crowd", nodes=harness.crowd)
        if not await harness.launches(gang):
            return
        waiting = [
            seen for seen in await harness.ours.gangs(gang.name) if seen.state is GangState.QUEUED
        ]
        if waiting and ability(harness.ours, SHARES_HOSTS) is None:
            assert waiting[0].reason  # the provider has fewer nodes free now
            return
        await harness.place.settle()
        seen = await harness.one(gang.name)
        assert sorted(node.rank for node in seen.nodes) == list(range(harness.crowd))
        assert len({node.engine_id for node in seen.nodes}) == harness.crowd

    @in_scenario
    async def test_spot_can_be_launched_where_it_is_sold(self, harness: ContractHarness) -> None:
        harness.needs(Feature.SPOT)
        if not any(offer.purchase is Purchase.SPOT for offer in await harness.ours.offers()):
            pytest.skip("this configuration has no spot offers")
        gang = await harness.running("spot", purchase=Purchase.SPOT)
        await harness.expect(GangState.RUNNING, gang)

    @in_scenario
    async def test_another_installations_gangs_are_neither_seen_nor_touched(
        self, harness: ContractHarness
    ) -> None:
        foreign = harness.make(FOREIGN)
        gang = await harness.spec("theirs", installation=FOREIGN)
        await harness.launch(gang, foreign)
        await harness.place.settle()
        assert await harness.ours.gangs() == []
        assert await harness.ours.gangs(gang.name) == []
        await harness.remove(gang.name)
        (seen,) = await foreign.gangs(gang.name)
        assert seen.state is GangState.RUNNING


class LookTests(ScenarioSuite):
    """Tests of the lists that the provider's `gangs` method returns."""

    @in_scenario
    async def test_an_empty_place_has_no_gangs(self, harness: ContractHarness) -> None:
        assert await harness.ours.gangs() == []

    @in_scenario
    async def test_the_list_and_the_single_look_agree(self, harness: ContractHarness) -> None:
        harness.needs_memory()
        gangs = [await harness.spec(word) for word in ("list-one", "list-two")]
        for gang in gangs:
            await harness.start(gang)
        await harness.ours.remove(gangs[0].name)
        await harness.place.settle()
        listed = {seen.name: seen for seen in await harness.ours.gangs()}
        assert listed.keys() == {gang.name for gang in gangs}
        for name, seen in listed.items():
            single = await harness.one(name)
            assert (single.state, harness.nodes(single)) == (seen.state, harness.nodes(seen))

    @in_scenario
    async def test_neither_a_restart_nor_a_clock_that_moves_changes_a_gang(
        self, harness: ContractHarness
    ) -> None:
        """A gang's report does not change while the server sleeps for ten minutes, when the
        server's clock is changed, or when the server restarts.
        """
        gang = await harness.running("clock")
        before = await harness.one(gang.name)
        await harness.place.wait(timedelta(minutes=10))
        after = await harness.one(gang.name)
        assert after.state is GangState.RUNNING
        assert harness.nodes(after) == harness.nodes(before)
        harness.restart()
        after = await harness.one(gang.name)
        assert (after.state, harness.nodes(after)) == (before.state, harness.nodes(before))


class EndTests(ScenarioSuite):
    """Tests that the end of a gang is reported, and that the report never changes."""

    @in_scenario
    async def test_removed_is_ended_and_stays_so(self, harness: ContractHarness) -> None:
        """Remove a gang with several concurrent calls, remove the gang again, and launch the gang
        again. The gang is listed once, as ended and not preempted.
        """
        gang = await harness.running("removed")
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(harness.ours.remove(gang.name))
        await harness.place.settle()
        await harness.expect(GangState.ENDED, gang)
        await harness.remove(gang.name)
        seen = await harness.one(gang.name)
        assert (seen.state, seen.preempted) == (GangState.ENDED, False)
        await harness.start(gang)
        await harness.expect(GangState.ENDED, gang)
        assert [seen.name for seen in await harness.ours.gangs()] in harness.listings(gang)

    @in_scenario
    async def test_removal_during_boot(self, harness: ContractHarness) -> None:
        gang = await harness.spec("boot")
        await harness.launch(gang)
        await harness.remove(gang.name)
        await harness.expect(GangState.ENDED, gang)
        await harness.start(gang)  # a second launch must not start a second gang
        await harness.expect(GangState.ENDED, gang)

    @in_scenario
    async def test_removal_of_what_never_was(self, harness: ContractHarness) -> None:
        name = harness.name("never-was")
        await harness.ours.remove(name)
        await harness.ours.remove(name)
        assert await harness.ours.gangs(name) == []

    @pytest.mark.parametrize("by_itself", [True, False])
    @in_scenario
    async def test_an_end_is_remembered_and_never_changes(
        self, harness: ContractHarness, by_itself: bool
    ) -> None:
        """The report of an ended gang never changes. Time, a restart of Cavvy, the removal of the
        gang and another launch of the gang leave the report unchanged.
        """
        harness.needs_memory()
        gang = await harness.running("ended")
        before = await harness.one(gang.name)
        started = [node.started_at for node in harness.nodes(before)]
        if by_itself:
            await harness.place.end(gang.name)
            await harness.start(gang)  # the launch of a server that does not know of the end yet
        else:
            await harness.remove(gang.name)
        seen = await harness.one(gang.name)
        assert seen.state is GangState.ENDED
        assert [node.started_at for node in harness.nodes(seen)] == started
        assert all(n.started_at and n.ended_at and n.started_at <= n.ended_at for n in seen.nodes)
        await harness.place.wait(timedelta(minutes=30))
        assert harness.nodes(await harness.one(gang.name)) == harness.nodes(seen)
        for restarts in (False, True):
            if restarts:
                harness.restart()
                assert harness.nodes(await harness.one(gang.name)) == harness.nodes(seen)
            await harness.remove(gang.name)
            await harness.start(gang)
            after = await harness.one(gang.name)
            assert (after.state, after.preempted) == (seen.state, seen.preempted)
            assert harness.nodes(after) == harness.nodes(seen)

    @in_scenario
    async def test_an_end_is_signalled(self, harness: ContractHarness) -> None:
        harness.require(SIGNALS_CHANGES)
        gang = await harness.running("signal")
        await harness.place.end(gang.name)
        await harness.ended(gang.name)

    @in_scenario
    async def test_a_removal_is_signalled(self, harness: ContractHarness) -> None:
        harness.require(SIGNALS_CHANGES)
        gang = await harness.running("signal-removal")
        await harness.ours.remove(gang.name)
        await harness.ended(gang.name)

    @in_scenario
    async def test_an_end_without_a_server_is_seen_by_the_next(
        self, harness: ContractHarness
    ) -> None:
        gang = await harness.running("unheard")
        await harness.place.end(gang.name)
        harness.restart()
        await harness.place.settle()
        await harness.expect(GangState.ENDED, gang)
        await harness.start(gang)  # even if the infrastructure has forgotten the gang
        await harness.expect(GangState.ENDED, gang)

    @in_scenario
    async def test_a_removal_while_the_launch_is_on_the_wire_leaves_nothing_running(
        self, harness: ContractHarness
    ) -> None:
        gang = await harness.spec("race")

        async def launch() -> None:
            with suppress(TryAgain):
                await harness.ours.launch(gang)

        call = asyncio.create_task(launch())
        await harness.a_moment()
        await harness.ours.remove(gang.name)
        await call
        await harness.ours.remove(
            gang.name
        )  # remove the gang again, as the control plane does until the gang is gone
        await harness.place.settle()
        # a poll removes machines that were listed only after the removal
        await harness.ours.gangs()
        await harness.place.settle()
        assert all(seen.state is GangState.ENDED for seen in await harness.ours.gangs(gang.name))

    @in_scenario
    async def test_removal_after_a_lost_reply_leaves_nothing_running(
        self, harness: ContractHarness
    ) -> None:
        gang = await harness.spec("lost-removed")
        with suppress(TryAgain):
            await harness.lose_reply(gang)
        await harness.place.settle()
        await harness.remove(gang.name)
        assert all(seen.state is GangState.ENDED for seen in await harness.ours.gangs(gang.name))

    @in_scenario
    async def test_a_removal_whose_caller_went_away_can_be_asked_again(
        self, harness: ContractHarness
    ) -> None:
        """After the caller cancels a removal, a restarted server can remove the gang."""
        gang = await harness.running("left-removal")
        call = asyncio.create_task(harness.ours.remove(gang.name))
        await harness.a_moment()
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call
        harness.restart()
        await harness.remove(gang.name)
        await harness.expect(GangState.ENDED, gang)

    @in_scenario
    async def test_all_nodes_end_with_their_gang(self, harness: ContractHarness) -> None:
        harness.needs(Feature.GANG)
        harness.needs_memory()
        gang = await harness.running("ranks", nodes=2)
        await harness.remove(gang.name)
        seen = await harness.one(gang.name)
        assert [node.rank for node in seen.nodes] == [0, 1]
        assert all(node.ended_at is not None for node in seen.nodes)

    @in_scenario
    async def test_what_was_given_back_can_be_had_again(self, harness: ContractHarness) -> None:
        for word in ("before", "after"):
            gang = await harness.running(word)
            await harness.expect(GangState.RUNNING, gang)
            await harness.remove(gang.name)
