"""Rules for faults in the middle of a launch: nodes of an incomplete gang must not be billed for a
long time.

These tests need infrastructure that can fail (`FaultyPlace`). The tests are for providers that
start a gang with several requests.
"""

from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta

import pytest

from cavvy.providers.base import (
    Feature,
    GangSpec,
    GangState,
    NoCapacity,
    ProviderError,
    Refused,
    TryAgain,
)
from cavvy.providers.contract.harness import (
    LAUNCH_PAUSE,
    LAUNCH_TRIES,
    ContractHarness,
    LaunchFault,
    ScenarioSuite,
    in_scenario,
)

_NODES = 3
_POLL = timedelta(minutes=1)
_SELDOM = timedelta(minutes=5)
_LATE = 9  # number of seldom polls: together they take longer than an incomplete launch may exist


# What the control plane must do after a fault: only after NoCapacity does it try another offer at
# once, and it shows only Refused to the user as an error that a person must mend.
_ERRORS: Mapping[LaunchFault, type[ProviderError]] = {
    LaunchFault.FULL: NoCapacity,
    LaunchFault.REFUSED: Refused,
}


async def _launch_until_it_fails(
    harness: ContractHarness, gang: GangSpec, fault: LaunchFault
) -> None:
    """Repeat the launch, as the control plane does, until the fault has happened. Check the error
    of the launch that failed.
    """
    error, right = await _find_error(harness, gang), _ERRORS.get(fault, TryAgain)
    assert isinstance(error, right), (
        f"a request that fails with {fault.value!r} must raise {right.__name__}, not "
        f"{type(error).__name__}: {error}"
    )


async def _find_error(harness: ContractHarness, gang: GangSpec) -> ProviderError:
    for _ in range(LAUNCH_TRIES):
        try:
            await harness.ours.launch(gang)
        except (TryAgain, NoCapacity, Refused) as error:
            if harness.faulty().failed():
                return error
            await harness.place.wait(LAUNCH_PAUSE)
        else:
            pytest.fail("the launch succeeded, although one of its requests should have failed")
    pytest.fail("every launch failed before it sent the request that the test makes fail")


async def _poll(harness: ContractHarness, times: int = 3, every: timedelta = _POLL) -> None:
    """Let the control plane poll the provider for all gangs."""
    for _ in range(times):
        with suppress(TryAgain, Refused):
            await harness.ours.gangs()
        await harness.place.wait(every)


async def _check_removed(harness: ContractHarness, name: str) -> None:
    """Remove the gang, and check that no node is billed afterwards."""
    await harness.remove(name)
    await _poll(harness)
    assert harness.faulty().billed() == 0
    assert all(seen.state is GangState.ENDED for seen in await harness.ours.gangs(name))


class FaultTests(ScenarioSuite):
    """Tests that a launch with one failing node is completed or rolled back."""

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        if "failing_node" in metafunc.fixturenames:
            metafunc.parametrize("failing_node", cls.failing_nodes)

    @pytest.mark.parametrize("fault", list(LaunchFault))
    @in_scenario
    async def test_a_launch_that_fails_at_a_node_is_completed_or_rolled_back(
        self, harness: ContractHarness, fault: LaunchFault, failing_node: int
    ) -> None:
        """The control plane repeats the launch, possibly after a restart."""
        harness.needs(Feature.GANG)
        place, gang = harness.faulty(), await harness.spec("part", nodes=_NODES)
        place.fail(failing_node, fault)
        await _launch_until_it_fails(harness, gang, fault)
        harness.restart()
        if fault in (LaunchFault.FULL, LaunchFault.REFUSED):
            await _poll(harness)
            assert place.billed() == 0
            assert await harness.ours.gangs(gang.name) == []
        await harness.launch(gang)  # repeats the same launch, or starts a new one after a rollback
        await harness.engine_ids(gang.name)
        await _poll(harness)
        seen = await harness.one(gang.name)
        assert seen.state is GangState.RUNNING
        assert [node.rank for node in seen.nodes] == list(range(_NODES))
        assert place.billed() == _NODES
        await _check_removed(harness, gang.name)

    @pytest.mark.parametrize("fault", list(LaunchFault))
    @in_scenario
    async def test_a_launch_that_failed_can_be_removed(
        self, harness: ContractHarness, fault: LaunchFault
    ) -> None:
        """The control plane removes the gang immediately after the failed launch, before the cloud
        lists all nodes.
        """
        harness.needs(Feature.GANG)
        place, gang = harness.faulty(), await harness.spec("part-removed", nodes=_NODES)
        place.fail(1, fault)
        await _launch_until_it_fails(harness, gang, fault)
        await _check_removed(harness, gang.name)

    @pytest.mark.parametrize("fault", list(LaunchFault))
    @in_scenario
    async def test_a_launch_that_is_not_repeated_is_rolled_back(
        self, harness: ContractHarness, fault: LaunchFault
    ) -> None:
        """The control plane loses its record of the gang, so it neither repeats the launch nor
        removes the gang. In the end, either no node of the gang is billed, or all nodes run and the
        provider reports the gang.
        """
        harness.needs(Feature.GANG)
        place, gang = harness.faulty(), await harness.spec("part-forgotten", nodes=_NODES)
        place.fail(1, fault)
        await _launch_until_it_fails(harness, gang, fault)
        harness.restart()
        await _poll(harness, _LATE, _SELDOM)
        seen = await harness.ours.gangs(gang.name)
        assert place.billed() == (_NODES if seen else 0)
        assert all(each.state is GangState.RUNNING for each in seen)

    @in_scenario
    async def test_a_roll_back_that_fails_is_repeated(self, harness: ContractHarness) -> None:
        harness.needs(Feature.GANG)
        place, gang = harness.faulty(), await harness.spec("part-stuck", nodes=_NODES)
        place.fail(_NODES - 1, LaunchFault.FULL)
        place.fail_deletions(True)
        await _launch_until_it_fails(harness, gang, LaunchFault.FULL)
        harness.restart()
        await _poll(harness)
        assert await harness.ours.gangs() == []
        # the node that failed may exist too, in a cloud that creates a node before it starts it
        assert place.billed() <= _NODES
        place.fail_deletions(False)
        await _poll(harness)
        assert place.billed() == 0

    @in_scenario
    async def test_a_removal_that_fails_is_repeated(self, harness: ContractHarness) -> None:
        harness.needs(Feature.GANG)
        place, gang = harness.faulty(), await harness.running("stuck", nodes=2)
        place.fail_deletions(True)
        with pytest.raises(ProviderError):
            await harness.ours.remove(gang.name)
        assert (await harness.one(gang.name)).state is GangState.RUNNING
        place.fail_deletions(False)
        harness.restart()
        await _poll(harness)
        assert place.billed() == 0
        await harness.expect(GangState.ENDED, gang)

    @in_scenario
    async def test_a_gang_whose_record_is_lost_is_found(self, harness: ContractHarness) -> None:
        harness.needs(Feature.GANG)
        place, gang = harness.faulty(), await harness.running("unrecorded", nodes=2)
        ids = await harness.engine_ids(gang.name)
        place.lose_records()
        harness.restart()
        assert await harness.engine_ids(gang.name) == ids
        await harness.launch(gang)
        await _poll(harness)
        assert place.billed() == 2
        await _check_removed(harness, gang.name)

    @in_scenario
    async def test_a_gang_whose_record_is_lost_can_be_removed(
        self, harness: ContractHarness
    ) -> None:
        place, gang = harness.faulty(), await harness.running("y" * 63)
        place.lose_records()
        harness.restart()
        await _check_removed(harness, gang.name)

    @in_scenario
    async def test_an_incomplete_launch_whose_record_is_lost_is_completed(
        self, harness: ContractHarness
    ) -> None:
        harness.needs(Feature.GANG)
        place, gang = harness.faulty(), await harness.spec("part-unrecorded", nodes=_NODES)
        place.fail(1, LaunchFault.BROKEN)
        await _launch_until_it_fails(harness, gang, LaunchFault.BROKEN)
        place.lose_records()
        harness.restart()
        await _poll(harness)
        await harness.launch(gang)
        await _poll(harness)
        assert len((await harness.one(gang.name)).nodes) == _NODES
        assert place.billed() == _NODES
        await _check_removed(harness, gang.name)

    @in_scenario
    async def test_a_second_node_of_the_same_name_is_deleted(
        self, harness: ContractHarness
    ) -> None:
        place, gang = harness.faulty(), await harness.running("twice")
        ids = await harness.engine_ids(gang.name)
        place.double()
        assert place.billed() == 2
        await harness.place.settle()
        await _poll(harness)
        assert place.billed() == 1
        assert await harness.engine_ids(gang.name) == ids

    @in_scenario
    async def test_a_list_without_a_node_does_not_end_the_node(
        self, harness: ContractHarness
    ) -> None:
        place, gang = harness.faulty(), await harness.running("hidden")
        before = await harness.one(gang.name)
        place.hide(True)
        await _poll(harness, 5)
        await harness.launch(gang)
        harness.restart()
        assert (await harness.one(gang.name)).state is GangState.RUNNING
        place.hide(False)
        after = await harness.one(gang.name)
        assert harness.nodes(after) == harness.nodes(before)
        assert place.billed() == 1
