"""When the bill of a machine begins and ends on the layer for clouds of virtual machines."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from tests.contract.test_provider_vm import BARE
from tests.contract.vm_cloud import MemoryPlace
from tests.unit.test_vm_layer import OURS, make_gang

from cavvy.domain.offers import Offer
from cavvy.providers.base import GangState, Refused
from cavvy.providers.vm.cloud import BillStart, CloudFault, CloudMachine
from cavvy.providers.vm.machines import LIST_AGE

LATE = replace(BARE, bill_starts=BillStart.RUNNING)
STEP = timedelta(seconds=10)


@pytest.mark.parametrize("traits", [BARE, LATE])
def test_a_bill_ends_with_the_accepted_deletion(traits: object, tmp_path: Path) -> None:
    """A poll minutes later finds the machine gone; the bill does not include these minutes."""

    async def scenario() -> None:
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

    spec = make_gang(MemoryPlace(BARE, tmp_path))
    asyncio.run(scenario())


def test_a_deletion_by_someone_else_ends_the_bill_unseen(tmp_path: Path) -> None:
    async def scenario() -> None:
        await provider.launch(spec)
        await place.settle()
        await provider.gangs()
        await place.end(spec.name)
        await place.settle()
        (seen,) = await provider.gangs(spec.name)
        assert [node.unseen for node in seen.nodes] == [True]

    place = MemoryPlace(BARE, tmp_path)
    provider, spec = place.provider(OURS), make_gang(place)
    asyncio.run(scenario())


@pytest.mark.parametrize("late", [False, True])
def test_the_time_of_booting_is_billed_only_where_the_cloud_bills_it(
    late: bool, tmp_path: Path
) -> None:
    """The machine boots for 60 s and is first listed after 30 s. Its bill begins after the last
    poll that showed it booting.
    """

    async def scenario() -> None:
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

    place = MemoryPlace(LATE if late else BARE, tmp_path)
    provider, spec = place.provider(OURS), make_gang(place)
    asyncio.run(scenario())


@pytest.mark.parametrize("what", ["list", "offers"])
def test_a_list_that_the_api_does_not_know_is_no_sign_that_a_gang_is_gone(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a wrong address, the API answers 404 to everything."""

    async def fails() -> Sequence[CloudMachine | Offer]:
        raise CloudFault(404, "not-found")

    async def scenario() -> None:
        await provider.launch(spec)
        await place.wait(LIST_AGE)
        monkeypatch.setattr(place.cloud, what, fails)
        with pytest.raises(Refused, match="check the address"):
            await (provider.remove(spec.name) if what == "list" else provider.offers())
        monkeypatch.undo()
        await place.wait(LIST_AGE)
        await provider.remove(spec.name)
        assert place.billed() == 0

    place = MemoryPlace(BARE, tmp_path)
    provider, spec = place.provider(OURS), make_gang(place)
    asyncio.run(scenario())
