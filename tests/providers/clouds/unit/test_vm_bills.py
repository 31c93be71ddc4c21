"""When the bill of a machine begins and ends on the layer for clouds of virtual machines."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from tests.providers.clouds.contract.test_provider_vm import BARE
from tests.providers.clouds.unit.test_vm_layer import OURS, make_gang

from cavvy.domain.offers import Offer
from cavvy.domain.values import replace
from cavvy.providers.base import GangState, NoCapacity, Refused, TryAgain
from cavvy.providers.contract import LaunchFault
from cavvy.providers.contract.memory_cloud import BOOT, MemoryPlace
from cavvy.providers.vm.cloud import BillStart, CloudFault, CloudMachine
from cavvy.providers.vm.machines import LIST_AGE

LATE = replace(BARE, bill_starts=BillStart.RUNNING)
STEP = timedelta(seconds=10)


@pytest.mark.parametrize("traits", [BARE, LATE])
async def test_a_bill_ends_with_the_accepted_deletion(traits: object, tmp_path: Path) -> None:
    """A poll minutes later finds the machine gone; the bill does not include these minutes."""
    spec = make_gang(MemoryPlace(BARE, tmp_path))
    place = MemoryPlace(traits, tmp_path)  # type: ignore[arg-type]  # traits of a cloud
    provider = place.provider(OURS)
    await provider.launch(spec)
    await place.settle()
    await provider.gangs()
    removed_at = place.cloud.time
    await provider.remove(spec.name)
    await place.settle()
    (seen,) = await provider.gangs(spec.name)
    assert seen.state is GangState.ENDED
    assert [(node.ended_at, node.unseen) for node in seen.nodes] == [(removed_at, False)]
    assert place.cloud.machines[0].ended == removed_at


async def test_a_deletion_by_someone_else_ends_the_bill_unseen(tmp_path: Path) -> None:
    place = MemoryPlace(BARE, tmp_path)
    provider, spec = place.provider(OURS), make_gang(place)
    await provider.launch(spec)
    await place.settle()
    await provider.gangs()
    await place.end(spec.name)
    await place.settle()
    (seen,) = await provider.gangs(spec.name)
    assert [node.unseen for node in seen.nodes] == [True]


@pytest.mark.parametrize("late", [False, True])
async def test_the_time_of_booting_is_billed_only_where_the_cloud_bills_it(
    late: bool, tmp_path: Path
) -> None:
    """The machine boots for 60 s and is first listed after 30 s. Its bill begins after the last
    poll that showed it booting.
    """
    place = MemoryPlace(LATE if late else BARE, tmp_path)
    provider, spec = place.provider(OURS), make_gang(place)
    made_at = place.cloud.time
    await provider.launch(spec)
    for _ in range(5):
        await place.wait(STEP)
        await provider.gangs()
    (seen,) = await provider.gangs(spec.name)
    assert seen.nodes[0].started_at == (None if late else made_at)
    last = place.cloud.time
    for _ in range(3):
        await place.wait(STEP)
        await provider.gangs()
    (seen,) = await provider.gangs(spec.name)
    assert seen.state is GangState.RUNNING
    assert seen.nodes[0].started_at == (last if late else made_at)
    await provider.remove(spec.name)


@pytest.mark.parametrize("what", ["list", "offers"])
async def test_a_list_that_the_api_does_not_know_is_no_sign_that_a_gang_is_gone(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a wrong address, the API answers 404 to everything."""

    async def fails() -> Sequence[CloudMachine | Offer]:
        raise CloudFault(404, "not-found")

    place = MemoryPlace(BARE, tmp_path)
    provider, spec = place.provider(OURS), make_gang(place)
    await provider.launch(spec)
    await place.wait(LIST_AGE)
    monkeypatch.setattr(place.cloud, what, fails)
    with pytest.raises(Refused, match="check the address"):
        await (provider.remove(spec.name) if what == "list" else provider.offers())
    monkeypatch.undo()
    await place.wait(LIST_AGE)
    await provider.remove(spec.name)
    assert place.billed() == 0


@pytest.mark.parametrize("late", [False, True])
async def test_a_start_that_the_cloud_does_not_report_is_a_range_that_contains_it(
    late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without times in replies, the bill began between the request and its reply, or between the
    last poll that showed the machine booting and the first that did not.
    """
    place = MemoryPlace(LATE if late else BARE, tmp_path)
    show = place.cloud._show
    monkeypatch.setattr(
        place.cloud, "_show", lambda each: (found := show(each)) and replace(found, created_at=None)
    )
    provider, spec = place.provider(OURS), make_gang(place)
    await provider.launch(spec)
    begins = place.cloud.time + (BOOT if late else timedelta(0))
    for _ in range(8):
        await place.wait(STEP)
        (seen,) = await provider.gangs(spec.name)
    (node,) = seen.nodes
    assert node.started_at is not None
    assert node.started_at <= begins <= (node.started_by or node.started_at)
    assert node.started_by == (node.started_at + STEP if late else None)
    await provider.remove(spec.name)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("traits", [BARE, LATE])
def test_machines_of_a_launch_that_failed_are_reported_with_their_times(
    traits: object, fails: bool, tmp_path: Path
) -> None:
    """Also if they could not be deleted at first."""

    async def scenario() -> None:
        place.fail(1, LaunchFault.FULL)
        place.fail_deletions(fails)
        made_at = place.cloud.time
        with pytest.raises(NoCapacity):
            await provider.launch(spec)
        assert await provider.gangs(spec.name) == []  # the control plane has not removed it yet
        await place.wait(STEP)
        with suppress(TryAgain):
            await provider.remove(spec.name)
        assert fails == bool(place.billed())
        await place.settle()
        seen = await provider.gangs(spec.name)
        place.fail_deletions(False)
        while seen[0].state is not GangState.ENDED:
            await place.wait(STEP)
            seen = await provider.gangs(spec.name)
        (node,) = seen[0].rolled_back
        (machine,) = place.cloud.machines
        assert (seen[0].nodes, node.rank, node.unseen) == ((), 0, False)
        assert node.ended_at == machine.ended
        if traits is LATE and not fails:  # it was deleted at once, before it ran
            assert (node.started_at, node.ended_at) == (None, made_at)
            return
        begins = made_at + (BOOT if traits is LATE else timedelta(0))
        assert node.started_at is not None
        assert node.started_at <= min(begins, node.ended_at) <= (node.started_by or node.started_at)

    place = MemoryPlace(traits, tmp_path)  # type: ignore[arg-type]  # traits of a cloud
    provider, spec = place.provider(OURS), replace(make_gang(place), nodes=2)
    asyncio.run(scenario())


async def test_a_duplicate_is_reported_with_its_times(tmp_path: Path) -> None:
    place = MemoryPlace(BARE, tmp_path)
    provider, spec = place.provider(OURS), make_gang(place)
    await provider.launch(spec)
    place.double()
    await place.settle()
    await provider.gangs()
    await place.settle()
    (seen,) = await provider.gangs(spec.name)
    (other,) = seen.rolled_back
    ended = {each.id: each.ended for each in place.cloud.machines}
    assert (other.ended_at, len(seen.nodes)) == (ended[other.engine_id], 1)
    await provider.remove(spec.name)


async def test_a_machine_that_was_seen_booting_at_its_end_is_not_billed(tmp_path: Path) -> None:
    place = MemoryPlace(LATE, tmp_path)
    provider, spec = place.provider(OURS), make_gang(place)
    await provider.launch(spec)
    await place.wait(BARE.list_lag + STEP)
    await provider.gangs()
    await provider.remove(spec.name)
    await place.settle()
    (seen,) = await provider.gangs(spec.name)
    assert seen.state is GangState.ENDED
    assert [node.started_at for node in seen.nodes] == [None]
