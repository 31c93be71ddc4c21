"""Rules for the removal and the end of a gang: a removed gang is never listed again, and the
provider can report the final cost of an ended gang.
"""

import asyncio
from contextlib import suppress
from datetime import timedelta

import pytest

from cavvy.providers.abilities import SIGNALS_CHANGES
from cavvy.providers.base import Feature, GangState, TryAgain
from cavvy.providers.contract.harness import ContractHarness, ScenarioSuite, in_scenario


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
