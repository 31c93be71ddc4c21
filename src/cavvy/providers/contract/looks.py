"""Rules for lists of gangs: a list is complete, repeatable and identical for every caller."""

from datetime import timedelta

from cavvy.providers.base import GangState
from cavvy.providers.contract.harness import ContractHarness, ScenarioSuite, in_scenario


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
