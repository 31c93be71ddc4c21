"""The layer for clouds of virtual machines keeps the contract, on clouds in memory: with tokens and
launches of many machines at once, and without either.
"""

from datetime import timedelta
from pathlib import Path

import pytest

from cavvy.domain.values import replace
from cavvy.providers.base import NoCapacity, TryAgain
from cavvy.providers.contract import (
    ContractHarness,
    LaunchFault,
)
from cavvy.providers.contract.memory_cloud import MemoryPlace
from cavvy.providers.contract.vm_contract import VmContract
from cavvy.providers.recording import FOLDER, TAG
from cavvy.providers.vm.cloud import BillEnd, CloudTraits, Reach

BARE = CloudTraits(name_limit=48, list_lag=timedelta(seconds=30))
TOKENS = CloudTraits(tags=True, tokens=True, list_lag=timedelta(seconds=30))
ATOMIC = CloudTraits(
    name_limit=255,
    tags=True,
    tokens=True,
    atomic_count=True,
    list_lag=timedelta(seconds=10),
    ended_listed=timedelta(hours=1),
    bill_ends=BillEnd.SHUTDOWN,
)
SLOW = CloudTraits(
    name_limit=64, list_lag=timedelta(seconds=45), launch_every=timedelta(seconds=12)
)
REACHED = replace(BARE, reach=Reach.SSH)


class TestBare(VmContract):
    traits = BARE


class TestTokens(VmContract):
    traits = TOKENS


class TestAtomic(VmContract):
    traits = ATOMIC


class TestSlow(VmContract):
    traits = SLOW


class TestReachedBySsh(VmContract):
    traits = REACHED


async def test_the_recording_of_a_launch_without_a_machine_ends_with_the_removal(
    tmp_path: Path,
) -> None:
    place = MemoryPlace(BARE, tmp_path)
    harness = ContractHarness(place, VmContract().lose_reply)
    spec = await harness.spec("recorded")
    gang = replace(spec, labels={TAG: "1"}, longest=timedelta(minutes=5))
    place.fail(0, LaunchFault.BUSY)
    with pytest.raises(TryAgain):
        await harness.ours.launch(gang)
    await harness.ours.remove(gang.name)
    assert (tmp_path / FOLDER / f"{gang.name}.json").exists()


async def test_machines_of_a_failed_launch_are_deleted_while_the_list_fails(tmp_path: Path) -> None:
    place = MemoryPlace(BARE, tmp_path)
    harness = ContractHarness(place, VmContract().lose_reply)
    gang = await harness.spec("half", nodes=2)
    place.fail(1, LaunchFault.FULL)
    place.fail_deletions(True)
    with pytest.raises(NoCapacity):
        await harness.ours.launch(gang)
    assert place.billed() == 1
    place.fail_deletions(False)
    place.cloud.fails_lists = True
    await place.settle()
    with pytest.raises(TryAgain):
        await harness.ours.gangs()
    assert place.billed() == 0
