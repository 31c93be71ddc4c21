"""Removals and ends: what is given back stays given back, and its bill can be closed."""

import asyncio
from contextlib import suppress
from datetime import timedelta

import pytest

from cavvy.providers.base import Feature, GangState, SignalsChanges, TryAgain
from cavvy.providers.contract.stage import Play, Stage, Stories


class Ends(Stories):
    """What has ended is known, and never changes."""

    def test_removed_is_ended_and_stays_so(self, play: Play) -> None:
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

    def test_removal_during_boot(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("boot")
            await stage.ours.launch(gang)
            await stage.ours.remove(gang.name)
            await stage.place.settle()
            assert (await stage.one(gang.name)).state is GangState.ENDED

        play(story)

    def test_removal_of_what_never_was(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            name = stage.name("never-was")
            await stage.ours.remove(name)
            await stage.ours.remove(name)
            assert await stage.ours.gangs(name) == []

        play(story)

    def test_launch_after_removal_is_no_second_gang(self, play: Play) -> None:
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
    def test_an_end_is_remembered_and_never_changes(self, play: Play, by_itself: bool) -> None:
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
            assert all(
                n.started_at and n.ended_at and n.started_at <= n.ended_at for n in seen.nodes
            )
            await stage.place.wait(timedelta(minutes=30))
            assert (await stage.one(gang.name)).nodes == seen.nodes
            stage.restart()
            assert (await stage.one(gang.name)).nodes == seen.nodes

        play(story)

    def test_an_end_is_signalled(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            if not isinstance(stage.ours, SignalsChanges):
                pytest.skip("this provider signals nothing; the control plane polls it")
            gang = await stage.spec("signal")
            await stage.ours.launch(gang)
            await stage.place.settle()
            await stage.place.end(gang.name)
            async with asyncio.timeout(60):
                while (
                    await stage.ours.changed() != gang.name
                    or (await stage.one(gang.name)).state is not GangState.ENDED
                ):
                    pass

        play(story)

    def test_a_removal_is_signalled(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            if not isinstance(stage.ours, SignalsChanges):
                pytest.skip("this provider signals nothing; the control plane polls it")
            gang = await stage.spec("signal-removal")
            await stage.ours.launch(gang)
            await stage.place.settle()
            await stage.ours.remove(gang.name)
            async with asyncio.timeout(60):
                while (
                    await stage.ours.changed() != gang.name
                    or (await stage.one(gang.name)).state is not GangState.ENDED
                ):
                    pass

        play(story)

    def test_an_end_that_nobody_heard_of_is_seen(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("unheard")
            await stage.ours.launch(gang)
            await stage.place.settle()
            await stage.place.end(gang.name)
            stage.restart()
            await stage.place.settle()
            assert (await stage.one(gang.name)).state is GangState.ENDED

        play(story)

    def test_a_removal_while_the_launch_is_on_the_wire_leaves_nothing_running(
        self, play: Play
    ) -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("race")

            async def launch() -> None:
                with suppress(TryAgain):
                    await stage.ours.launch(gang)

            call = asyncio.create_task(launch())
            await stage.a_moment()
            await stage.ours.remove(gang.name)
            await call
            await stage.ours.remove(gang.name)  # as the control plane does until the gang is gone
            await stage.place.settle()
            assert all(seen.state is GangState.ENDED for seen in await stage.ours.gangs(gang.name))

        play(story)

    def test_removal_after_a_lost_reply_leaves_nothing_running(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("lost-removed")
            with suppress(TryAgain):
                await stage.lose_reply(gang)
            await stage.place.settle()
            await stage.ours.remove(gang.name)
            await stage.place.settle()
            assert all(seen.state is GangState.ENDED for seen in await stage.ours.gangs(gang.name))

        play(story)

    def test_removals_at_once(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("removals")
            await stage.ours.launch(gang)
            await stage.place.settle()
            async with asyncio.TaskGroup() as group:
                for _ in range(3):
                    group.create_task(stage.ours.remove(gang.name))
            await stage.place.settle()
            assert (await stage.one(gang.name)).state is GangState.ENDED

        play(story)

    def test_removal_by_the_next_server(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("heir")
            await stage.ours.launch(gang)
            await stage.place.settle()
            stage.restart()
            await stage.ours.remove(gang.name)
            await stage.place.settle()
            assert (await stage.one(gang.name)).state is GangState.ENDED

        play(story)

    def test_a_removal_whose_caller_went_away_can_be_asked_again(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("left-removal")
            await stage.ours.launch(gang)
            await stage.place.settle()
            call = asyncio.create_task(stage.ours.remove(gang.name))
            await stage.a_moment()
            call.cancel()
            with suppress(asyncio.CancelledError):
                await call
            await stage.ours.remove(gang.name)
            await stage.place.settle()
            assert (await stage.one(gang.name)).state is GangState.ENDED

        play(story)

    def test_removal_after_the_end_changes_nothing(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("late")
            await stage.ours.launch(gang)
            await stage.place.settle()
            await stage.place.end(gang.name)
            await stage.place.settle()
            seen = await stage.one(gang.name)
            await stage.ours.remove(gang.name)
            await stage.place.settle()
            after = await stage.one(gang.name)
            assert (after.state, after.nodes, after.preempted) == (
                seen.state,
                seen.nodes,
                seen.preempted,
            )

        play(story)

    def test_our_removal_is_no_preemption(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("ours")
            await stage.ours.launch(gang)
            await stage.place.settle()
            await stage.ours.remove(gang.name)
            await stage.place.settle()
            assert not (await stage.one(gang.name)).preempted

        play(story)

    def test_launch_after_an_end_is_no_second_gang(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("ended-again")
            await stage.ours.launch(gang)
            await stage.place.settle()
            await stage.place.end(gang.name)
            await stage.ours.launch(gang)
            await stage.place.settle()
            assert (await stage.one(gang.name)).state is GangState.ENDED

        play(story)

    def test_all_nodes_end_with_their_gang(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            stage.needs(Feature.GANG)
            gang = await stage.spec("ranks", nodes=2)
            await stage.ours.launch(gang)
            await stage.place.settle()
            await stage.ours.remove(gang.name)
            await stage.place.settle()
            seen = await stage.one(gang.name)
            assert [node.rank for node in seen.nodes] == [0, 1]
            assert all(node.ended_at is not None for node in seen.nodes)

        play(story)

    def test_what_was_given_back_can_be_had_again(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            for word in ("before", "after"):
                gang = await stage.spec(word)
                await stage.ours.launch(gang)
                await stage.place.settle()
                assert (await stage.one(gang.name)).state is GangState.RUNNING
                await stage.ours.remove(gang.name)
                await stage.place.settle()

        play(story)
