"""Rules for lists of gangs: complete, repeatable, and the same for every caller."""

import asyncio
from datetime import timedelta

from cavvy.providers.base import GangState
from cavvy.providers.contract.harness import ContractHarness, ScenarioSuite, in_scenario


class LookTests(ScenarioSuite):
    """Rules for the result of `gangs`."""

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
    async def test_nothing_is_listed_twice(self, harness: ContractHarness) -> None:
        harness.needs_memory()
        gang = await harness.running("once")
        await harness.remove(gang.name)
        assert [seen.name for seen in await harness.ours.gangs()] == [gang.name]

    @in_scenario
    async def test_two_looks_agree(self, harness: ContractHarness) -> None:
        gang = await harness.running("looks")
        first = await harness.one(gang.name)
        second = await harness.one(gang.name)
        assert (first.state, first.engine_id) == (second.state, second.engine_id)
        assert harness.nodes(first) == harness.nodes(second)

    @in_scenario
    async def test_looks_at_once(self, harness: ContractHarness) -> None:
        gang = await harness.running("crowded")
        async with asyncio.TaskGroup() as group:
            looks = [group.create_task(harness.ours.gangs(gang.name)) for _ in range(10)]
            offers = group.create_task(harness.ours.offers())
        assert offers.result()
        assert len({look.result()[0].nodes[0].engine_id for look in looks}) == 1

    @in_scenario
    async def test_what_runs_has_no_end(self, harness: ContractHarness) -> None:
        gang = await harness.running("running")
        seen = await harness.one(gang.name)
        assert not seen.preempted
        assert seen.exit_code is None
        assert all(node.ended_at is None for node in seen.nodes)

    @in_scenario
    async def test_the_next_server_sees_the_same(self, harness: ContractHarness) -> None:
        gang = await harness.running("same")
        before = await harness.one(gang.name)
        harness.restart()
        after = await harness.one(gang.name)
        assert (after.state, harness.nodes(after)) == (before.state, harness.nodes(before))

    @in_scenario
    async def test_a_clock_that_moves_changes_nothing(self, harness: ContractHarness) -> None:
        """Simulate a server that slept for ten minutes, or whose clock was changed."""

        gang = await harness.running("clock")
        before = await harness.one(gang.name)
        await harness.place.wait(timedelta(minutes=10))
        after = await harness.one(gang.name)
        assert after.state is GangState.RUNNING
        assert harness.nodes(after) == harness.nodes(before)
        harness.restart()
        assert harness.nodes(await harness.one(gang.name)) == harness.nodes(before)
