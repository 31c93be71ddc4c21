"""Rules for providers that replace single nodes of a gang (`ReplacesNodes`): the other nodes go on,
each lost node is bought again exactly once, and nothing that was replaced stays billed.

These tests need infrastructure in which single nodes can be lost (`LosesNodes`).
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Protocol, runtime_checkable

import pytest

from cavvy.domain.values import replace
from cavvy.providers.abilities import REPLACES_NODES, ReplacesNodes
from cavvy.providers.base import (
    GangSeen,
    GangSpec,
    GangState,
    NoCapacity,
    NodeSeen,
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
_LOST = 1  # the rank that is lost
_POLL = timedelta(minutes=1)
_ERRORS = {LaunchFault.FULL: NoCapacity, LaunchFault.REFUSED: Refused}


@runtime_checkable
class LosesNodes(Protocol):
    """Infrastructure whose nodes can be lost one by one."""

    async def lose(self, rank: int) -> None:
        """End the node of this rank of the only gang, as a machine does that fails."""

    def billed(self) -> int:
        """Return the number of nodes that are billed now, whether they are listed or not."""


class RepairTests(ScenarioSuite):
    """Tests that a lost node is replaced once, and alone."""

    @in_scenario
    async def test_a_lost_node_is_replaced_alone(self, harness: ContractHarness) -> None:
        gang, before = await _lose_one(harness)
        for _ in range(2):  # a request whose answer was lost is repeated
            await _replace(harness, replace(gang, round=2, renews=True))
            harness.restart()
        seen = await _check_repaired(harness, gang, before)
        assert _list_ids(seen.replaced) == [before.nodes[_LOST].engine_id]
        assert all(node.ended_at for node in seen.replaced)
        await _check_removed(harness, gang)

    @in_scenario
    async def test_losses_are_repaired_one_after_the_other(self, harness: ContractHarness) -> None:
        """Also a node that has replaced another one, and several nodes in one round."""
        gang, before = await _lose_one(harness)
        await _replace(harness, replace(gang, round=2, renews=True))
        second = await _check_repaired(harness, gang, before)
        for node in second.nodes[1:]:
            await _place(harness).lose(node.rank)
        await harness.place.settle()
        await harness.one(gang.name)
        await _replace(harness, replace(gang, round=5, renews=True), [1, 2])
        third = await _check_repaired(harness, gang, second, [1, 2])
        lost = [before.nodes[1], *second.nodes[1:]]
        assert _list_ids(third.replaced) == sorted(node.engine_id for node in lost)
        await _check_removed(harness, gang)

    @in_scenario
    async def test_what_is_left_of_a_node_ends_when_it_is_replaced(
        self, harness: ContractHarness
    ) -> None:
        """The agent of the node reported a broken GPU, so the node still runs."""
        harness.require(REPLACES_NODES)
        gang = await harness.running("left", nodes=_NODES)
        before = await harness.one(gang.name)
        await _replace(harness, replace(gang, round=2, renews=True))
        seen = await _check_repaired(harness, gang, before)
        assert _list_ids(seen.replaced) == [before.nodes[_LOST].engine_id]
        await _check_removed(harness, gang)

    @in_scenario
    async def test_two_servers_that_replace_the_same_node_buy_one(
        self, harness: ContractHarness
    ) -> None:
        gang, before = await _lose_one(harness)
        gang, former = replace(gang, round=2, renews=True), harness.require(REPLACES_NODES)
        harness.restart()
        mine = harness.require(REPLACES_NODES)
        calls = [each.replace(gang, [_LOST]) for each in (former, mine)]
        for each in await asyncio.gather(*calls, return_exceptions=True):
            # the former server may no longer reach the node's machine
            assert each is None or isinstance(each, (TryAgain, NoCapacity))
        await _replace(harness, gang)
        await _check_repaired(harness, gang, before)
        await _check_removed(harness, gang)


class RepairFaultTests(ScenarioSuite):
    """Tests that faults buy no node twice, for infrastructure that can fail (`FaultyPlace`)."""

    @pytest.mark.parametrize("fault", list(LaunchFault))
    @in_scenario
    async def test_a_fault_buys_no_node_twice_and_ends_no_other_node(
        self, harness: ContractHarness, fault: LaunchFault
    ) -> None:
        """The server is restarted after the fault, and polls before it repeats the request."""
        gang, before = await _lose_one(harness)
        gang = replace(gang, round=2, renews=True)
        harness.faulty().fail(0, fault)
        error = await _find_error(harness, gang)
        assert isinstance(error, _ERRORS.get(fault, TryAgain)), error
        harness.restart()
        for _ in range(3):
            with suppress(TryAgain):
                await harness.ours.gangs()
            await harness.place.wait(_POLL)
        assert _NODES - 1 <= _place(harness).billed() <= _NODES
        await _replace(harness, gang)
        await _check_repaired(harness, gang, before)
        await _check_removed(harness, gang)

    @pytest.mark.parametrize("fault", [LaunchFault.LOST, LaunchFault.FULL])
    @in_scenario
    async def test_a_repair_that_is_given_up_leaves_nothing(
        self, harness: ContractHarness, fault: LaunchFault
    ) -> None:
        gang, _ = await _lose_one(harness)
        harness.faulty().fail(0, fault)
        await _find_error(harness, replace(gang, round=2, renews=True))
        await _check_removed(harness, gang)
        await _replace(harness, replace(gang, round=2, renews=True))  # nothing is left to repair
        assert _place(harness).billed() == 0

    @in_scenario
    async def test_without_records_no_node_is_bought_twice(self, harness: ContractHarness) -> None:
        """The records are lost together with the answer to the request."""
        gang, before = await _lose_one(harness)
        gang = replace(gang, round=2, renews=True)
        harness.faulty().fail(0, LaunchFault.LOST)
        await _find_error(harness, gang)
        await harness.place.settle()
        made = await harness.one(gang.name)
        harness.faulty().lose_records()
        harness.restart()
        await _replace(harness, gang)
        seen = await _check_repaired(harness, gang, before)
        assert _list_ids(seen.nodes) == _list_ids(made.nodes)
        await _check_removed(harness, gang)


def _place(harness: ContractHarness) -> LosesNodes:
    assert isinstance(harness.place, LosesNodes), "`RepairTests` need a place that `LosesNodes`"
    return harness.place


async def _lose_one(harness: ContractHarness) -> tuple[GangSpec, GangSeen]:
    """Launch a gang, and take one of its nodes away. Return what the provider told before."""
    harness.require(REPLACES_NODES)
    gang = await harness.running("repaired", nodes=_NODES)
    before = await harness.one(gang.name)
    await _place(harness).lose(_LOST)
    await harness.place.settle()
    (lost,) = [node for node in (await harness.one(gang.name)).nodes if node.ended_at]
    assert lost.rank == _LOST
    return gang, before


async def _replace(
    harness: ContractHarness, gang: GangSpec, ranks: Sequence[int] = (_LOST,)
) -> None:
    """Replace nodes as the control plane does: repeat the call while it raises TryAgain."""
    provider: ReplacesNodes = harness.require(REPLACES_NODES)
    for _ in range(LAUNCH_TRIES):
        try:
            return await provider.replace(gang, ranks)
        except TryAgain:
            await harness.place.wait(LAUNCH_PAUSE)
    await provider.replace(gang, ranks)


async def _find_error(harness: ContractHarness, gang: GangSpec) -> ProviderError:
    """Repeat the request until the fault has happened, and return its error."""
    provider = harness.require(REPLACES_NODES)
    for _ in range(LAUNCH_TRIES):
        try:
            await provider.replace(gang, [_LOST])
        except (TryAgain, NoCapacity, Refused) as error:
            if harness.faulty().failed():
                return error
            await harness.place.wait(LAUNCH_PAUSE)
        else:
            pytest.fail("the request succeeded, although it should have failed")
    pytest.fail("every call failed before it sent the request that the test makes fail")


async def _check_repaired(
    harness: ContractHarness, gang: GangSpec, before: GangSeen, ranks: Sequence[int] = (_LOST,)
) -> GangSeen:
    """Check that the gang has a new node for each of the ranks, and its former nodes otherwise."""
    await harness.place.settle()
    seen = await harness.one(gang.name)
    assert seen.state is GangState.RUNNING
    assert [node.rank for node in seen.nodes] == list(range(_NODES))
    for old, new in zip(before.nodes, seen.nodes, strict=True):
        assert (old.engine_id == new.engine_id) == (new.rank not in ranks)
        assert new.started_at is not None
        assert new.ended_at is None
    assert _place(harness).billed() == _NODES
    return seen


async def _check_removed(harness: ContractHarness, gang: GangSpec) -> None:
    await harness.remove(gang.name)
    for _ in range(3):
        with suppress(TryAgain, Refused):
            await harness.ours.gangs()
        await harness.place.wait(_POLL)
    assert _place(harness).billed() == 0
    assert (await harness.one(gang.name)).state is GangState.ENDED


def _list_ids(nodes: Sequence[NodeSeen]) -> list[str]:
    return sorted(node.engine_id for node in nodes)
