"""Looks at what runs: complete, repeatable, and the same for whoever looks."""

import asyncio
from datetime import timedelta

from cavvy.providers.base import GangState
from cavvy.providers.contract.stage import Play, Stage, Stories


class Looks(Stories):
    """What `gangs` says."""

    def test_an_empty_place_has_no_gangs(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            assert await stage.ours.gangs() == []

        play(story)

    def test_the_list_and_the_single_look_agree(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            gangs = [await stage.spec(word) for word in ("list-one", "list-two")]
            for gang in gangs:
                await stage.ours.launch(gang)
            await stage.place.settle()
            await stage.ours.remove(gangs[0].name)
            await stage.place.settle()
            listed = {seen.name: seen for seen in await stage.ours.gangs()}
            assert listed.keys() == {gang.name for gang in gangs}
            for name, seen in listed.items():
                single = await stage.one(name)
                assert (single.state, single.nodes) == (seen.state, seen.nodes)

        play(story)

    def test_nothing_is_listed_twice(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("once")
            await stage.ours.launch(gang)
            await stage.place.settle()
            await stage.ours.remove(gang.name)
            await stage.place.settle()
            assert [seen.name for seen in await stage.ours.gangs()] == [gang.name]

        play(story)

    def test_two_looks_agree(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("looks")
            await stage.ours.launch(gang)
            await stage.place.settle()
            first = await stage.one(gang.name)
            second = await stage.one(gang.name)
            assert (first.state, first.nodes, first.engine_id) == (
                second.state,
                second.nodes,
                second.engine_id,
            )

        play(story)

    def test_looks_at_once(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("crowded")
            await stage.ours.launch(gang)
            await stage.place.settle()
            async with asyncio.TaskGroup() as group:
                looks = [group.create_task(stage.ours.gangs(gang.name)) for _ in range(10)]
                offers = group.create_task(stage.ours.offers())
            assert offers.result()
            assert len({look.result()[0].nodes[0].engine_id for look in looks}) == 1

        play(story)

    def test_what_runs_has_no_end(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("running")
            await stage.ours.launch(gang)
            await stage.place.settle()
            seen = await stage.one(gang.name)
            assert not seen.preempted
            assert seen.exit_code is None
            assert all(node.ended_at is None for node in seen.nodes)

        play(story)

    def test_the_next_server_sees_the_same(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("same")
            await stage.ours.launch(gang)
            await stage.place.settle()
            before = await stage.one(gang.name)
            stage.restart()
            after = await stage.one(gang.name)
            assert (after.state, after.nodes) == (before.state, before.nodes)

        play(story)

    def test_a_clock_that_moves_changes_nothing(self, play: Play) -> None:
        """A server that slept for ten minutes, or whose clock was set."""

        async def story(stage: Stage) -> None:
            gang = await stage.spec("clock")
            await stage.ours.launch(gang)
            await stage.place.settle()
            before = await stage.one(gang.name)
            await stage.place.wait(timedelta(minutes=10))
            after = await stage.one(gang.name)
            assert after.state is GangState.RUNNING
            assert after.nodes == before.nodes
            stage.restart()
            assert (await stage.one(gang.name)).nodes == before.nodes

        play(story)
