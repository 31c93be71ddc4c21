"""Details of the layer for clouds of virtual machines that the contract suite does not show."""

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.providers.clouds.contract.test_provider_vm import ATOMIC, BARE, SLOW, TOKENS
from tests.records import make_gang_spec

from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import replace
from cavvy.providers.base import (
    AgentEndpoint,
    GangSpec,
    GangState,
    NoCapacity,
    ProviderContext,
    QuotaTooSmall,
    Refused,
    TryAgain,
)
from cavvy.providers.contract import LaunchFault
from cavvy.providers.contract.memory_cloud import (
    MANIFEST,
    MemoryCloud,
    MemoryPlace,
    Rented,
    make_node_endpoint,
)
from cavvy.providers.contract.rest_stand_in import finish
from cavvy.providers.hosts import boot
from cavvy.providers.vm.cloud import (
    CloudFault,
    CloudMachine,
    CloudTraits,
    MachineState,
    Reach,
    read_fault,
)
from cavvy.providers.vm.machines import LIST_AGE
from cavvy.providers.vm.provider import VmProvider
from cavvy.providers.vm.records import MachineNames, make_record

OURS = "an installation"


def make_gang(place: MemoryPlace, nodes: int = 1) -> GangSpec:
    offers = finish(place.cloud.offers())
    return make_gang_spec(
        offers[0],
        name="rm-1-job-1",
        installation=OURS,
        nodes=nodes,
        agent_endpoint=AgentEndpoint(address="https://192.0.2.1:7443", token="t"),
    )


def test_each_node_gets_its_own_rank_and_token(tmp_path: Path) -> None:
    place = MemoryPlace(BARE, tmp_path)
    asyncio.run(place.provider(OURS).launch(make_gang(place, nodes=2)))
    for rank, request in enumerate(place.cloud.requests):
        (text,) = request.user_data
        told = json.loads(text.split("END_OF_BOOT'\n")[1].split("\n")[0])
        assert (told["metadata"]["rank"], told["metadata"]["address"]) == (rank, "")
        assert told["tokens"] == [f"claim-rm-1-job-1-{rank}"]


def test_a_node_without_metadata_service_uses_its_address_on_the_way_to_the_server() -> None:
    metadata = {"rank": 3, "address": "", "headers": {}, "token": None}
    assert boot.learn(metadata, "https://127.0.0.1:7443") == (3, "127.0.0.1")


async def test_a_machine_that_is_off_but_billed_is_deleted(tmp_path: Path) -> None:
    spec = make_gang(MemoryPlace(BARE, tmp_path))
    place = MemoryPlace(BARE, tmp_path)
    provider, gang = place.provider(OURS), replace(spec, nodes=2)
    await provider.launch(gang)
    await place.settle()
    await provider.gangs()
    place.cloud.change(place.cloud.billed()[1].id, off=True)
    await place.wait(LIST_AGE)
    await provider.gangs()
    assert place.billed() == 1
    await place.settle()
    (seen,) = await provider.gangs(gang.name)
    assert seen.state is GangState.RUNNING
    assert [node.ended_at is None for node in seen.nodes] == [True, False]
    await provider.remove(gang.name)
    assert place.billed() == 0


@pytest.mark.parametrize("traits", [BARE, TOKENS, ATOMIC, SLOW])
async def test_a_lost_reply_buys_nothing_twice(traits: CloudTraits, tmp_path: Path) -> None:
    spec = make_gang(MemoryPlace(traits, tmp_path), nodes=3)
    place = MemoryPlace(traits, tmp_path)
    provider = place.provider(OURS)
    place.fail(1, LaunchFault.LOST)
    for _ in range(20):
        with suppress(TryAgain):
            await provider.launch(spec)
        await place.wait(timedelta(seconds=15))
    assert len(place.cloud.machines) == 3
    await place.settle()
    (seen,) = await provider.gangs(spec.name)
    assert [node.rank for node in seen.nodes] == [0, 1, 2]


async def test_a_gang_with_a_hashed_name_and_no_record_is_one_gang_again(tmp_path: Path) -> None:
    spec = replace(make_gang(MemoryPlace(BARE, tmp_path)), name="rm-" + "y" * 60)
    place = MemoryPlace(BARE, tmp_path)
    await place.provider(OURS).launch(spec)
    await place.settle()
    place.lose_records()
    provider = place.provider(OURS)
    (hashed,) = await provider.gangs()
    assert hashed.name != spec.name
    (seen,) = await provider.gangs(spec.name)
    assert (seen.name, seen.state) == (spec.name, GangState.RUNNING)
    assert [each.name for each in await provider.gangs()] == [spec.name]
    assert place.billed() == 1
    await provider.remove(spec.name)
    assert place.billed() == 0


class RequestedCloud(MemoryCloud):
    """Lists a new machine as requested until it has booted, so that no node has it yet."""

    def _show(self, rented: Rented) -> CloudMachine | None:
        shown = super()._show(rented)
        requested = shown is not None and shown.state is MachineState.STARTING
        return replace(shown, state=MachineState.REQUESTED) if shown and requested else shown


async def lose_one(place: MemoryPlace, provider: VmProvider | None = None) -> GangSpec:
    gang = make_gang(place, nodes=2)
    await (provider or place.provider(OURS)).launch(gang)
    await place.settle()
    await place.lose(1)
    await place.settle()
    return replace(gang, round=2)


async def test_a_requested_machine_of_a_repair_is_not_deleted(tmp_path: Path) -> None:
    """The answer to the request was lost, and the cloud may still refuse the machine."""
    place = MemoryPlace(BARE, tmp_path)
    place.cloud = RequestedCloud(BARE)
    gang = await lose_one(place)
    place.fail(0, LaunchFault.LOST)
    with suppress(TryAgain):
        await place.provider(OURS).replace(gang, [1])
    place.cloud.boot_time = timedelta(hours=1)
    await place.settle()
    await place.provider(OURS).gangs()
    assert place.billed() == 2
    place.cloud.boot_time = timedelta(0)
    await place.provider(OURS).replace(gang, [1])
    assert (place.billed(), len(place.cloud.machines)) == (2, 3)


@pytest.mark.parametrize("fault", [LaunchFault.LOST, LaunchFault.FULL])
async def test_a_refused_machine_is_requested_as_a_new_one(
    tmp_path: Path, fault: LaunchFault
) -> None:
    """Clouds repeat their answer to a request with the same token, also if they refused it."""
    place = MemoryPlace(TOKENS, tmp_path)
    gang = await lose_one(place)
    begun = len(place.cloud.requests)
    place.fail(0, fault)
    with suppress(TryAgain, NoCapacity):
        await place.provider(OURS).replace(gang, [1])
    await place.provider(OURS).replace(gang, [1])
    tokens = [each.token for each in place.cloud.requests[begun:]]
    assert (len(tokens), len(set(tokens))) == (2, 1 if fault is LaunchFault.LOST else 2)
    assert tokens[0] not in [each.token for each in place.cloud.requests[:begun]]


async def test_an_agent_by_ssh_gets_the_token_again_for_a_repair(tmp_path: Path) -> None:
    """The token is forgotten when all agents have started, so a repair must store it again."""
    place = MemoryPlace(replace(BARE, reach=Reach.SSH), tmp_path)
    provider, state = place.provider(OURS), place.states[OURS]
    gang = await lose_one(place, provider)
    [document] = await state.read("reach", gang.name)
    used = replace(document, body=document.body.replace('"t"', '""'), version=2)
    assert await state.swap(used)
    await provider.replace(gang, [1])
    [document] = await state.read("reach", gang.name)
    assert '"token":"t"' in document.body
    await provider.close()


@pytest.mark.parametrize("nodes", [11, 101])
@pytest.mark.parametrize("length", range(34, 42))
def test_all_machines_of_a_gang_have_names_of_one_kind(nodes: int, length: int) -> None:
    """The names of the last ranks are the longest; none may be hashed alone."""
    names = MachineNames(OURS, 63)
    record = make_record("g" * length, nodes, datetime(2026, 1, 1, tzinfo=UTC))
    nodes_made = [*record.nodes, *(replace(node, number=49) for node in record.nodes)]
    made = [names.make(record, node) for node in nodes_made]
    assert len({each.split("-")[2] for each in made}) == 1
    assert max(len(each) for each in made) <= 63


def test_gangs_that_take_too_many_requests_are_refused_beforehand(tmp_path: Path) -> None:
    provider = MemoryPlace(SLOW, tmp_path).provider(OURS)
    task = TaskSpec(name="t", run="true", nodes=30)
    assert provider.check(task) == []
    (objection,) = provider.check(replace(task, nodes=31))
    assert (objection.field, "at most 30 nodes" in objection.reason) == ("nodes", True)


def test_without_a_node_endpoint_nothing_is_launched(tmp_path: Path) -> None:
    place = MemoryPlace(BARE, tmp_path)
    provider = VmProvider(MANIFEST, ProviderContext(installation=OURS, home=tmp_path), place.cloud)
    with pytest.raises(Refused, match=r"server\.tls_listen"):
        asyncio.run(provider.launch(make_gang(place)))
    assert [each.field for each in provider.check(TaskSpec(name="t", run="true"))] == ["providers"]
    assert place.cloud.requests == []


def test_user_data_that_is_too_long_is_refused(tmp_path: Path) -> None:
    place = MemoryPlace(replace(BARE, user_data_limit=1000), tmp_path)
    with pytest.raises(Refused, match="at most 1000"):
        asyncio.run(place.provider(OURS).launch(make_gang(place)))
    assert place.billed() == 0


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [(0, "no reply", TryAgain), (429, "busy", TryAgain), (400, "quota", QuotaTooSmall)],
)
def test_faults_become_errors_by_what_the_caller_does_next(
    status: int, code: str, error: type[Exception]
) -> None:
    cloud = MemoryCloud(CloudTraits(quota_codes=frozenset({"quota"})))
    assert isinstance(read_fault(cloud, CloudFault(status, code), "a launch", making=True), error)


@pytest.mark.parametrize(
    "read", [lambda told: told["data"], lambda told: told.data, lambda told: told[0]]
)
def test_a_reply_of_another_form_is_no_bug_of_the_provider(
    read: Callable[[object], object], tmp_path: Path
) -> None:
    class Odd(MemoryCloud):
        async def list(self) -> object:  # type: ignore[override]
            return read({})

    context = ProviderContext(installation=OURS, home=tmp_path, node_endpoint=make_node_endpoint())
    with pytest.raises(TryAgain, match="unreadable reply"):
        asyncio.run(VmProvider(MANIFEST, context, Odd(BARE)).gangs())


@pytest.mark.parametrize("change", ["launch", "remove"])
async def test_a_look_at_all_gangs_does_not_undo_what_happens_to_another_gang_meanwhile(
    change: str, tmp_path: Path
) -> None:
    spec = make_gang(MemoryPlace(SLOW, tmp_path))
    place = MemoryPlace(SLOW, tmp_path)
    provider, other = place.provider(OURS), replace(spec, name="rm-2-job-1", nodes=2)
    await provider.launch(spec)
    await place.wait(timedelta(seconds=13))
    with suppress(TryAgain):  # the cloud takes one request in 12 s
        await provider.launch(other)
    await place.wait(timedelta(seconds=13))
    entered, gate, get = asyncio.Event(), asyncio.Event(), place.cloud.get

    async def wait(machine: str) -> CloudMachine | None:
        entered.set()
        await gate.wait()
        return await get(machine)

    place.cloud.get = wait  # type: ignore[method-assign]
    look = asyncio.create_task(provider.gangs())
    await entered.wait()
    place.cloud.get = get  # type: ignore[method-assign]
    if change == "launch":
        await provider.launch(other)
    else:
        await provider.remove(other.name)
    gate.set()
    await look
    record = provider._ledger.get(other.name)
    assert record is not None
    assert (record.launched, record.removed) == (change == "launch", change == "remove")
    await place.wait(timedelta(seconds=13))
    if change == "launch":
        await provider.launch(other)
    assert place.billed() == (3 if change == "launch" else 1)


async def test_the_record_of_a_refused_and_removed_launch_is_dropped_in_the_end(
    tmp_path: Path,
) -> None:
    spec = make_gang(MemoryPlace(BARE, tmp_path), nodes=2)
    place = MemoryPlace(BARE, tmp_path)
    provider = place.provider(OURS)
    place.fail(1, LaunchFault.FULL)
    with pytest.raises(NoCapacity):
        await provider.launch(spec)
    await provider.remove(spec.name)
    await place.settle()
    await provider.gangs()
    await provider.launch(spec)  # late: the gang is removed
    assert place.billed() == 0
    await place.wait(timedelta(days=3))
    await provider.gangs()
    assert await place.states[OURS].read("gangs", None) == []


class CountingCloud(MemoryCloud):
    """Counts the lists, and pauses in each."""

    lists = 0

    async def list(self) -> Sequence[CloudMachine]:
        self.lists += 1
        for _ in range(10):
            await asyncio.sleep(0)
        return await super().list()


async def test_looks_at_many_gangs_share_one_list_until_a_machine_is_made_or_deleted(
    tmp_path: Path,
) -> None:
    spec = make_gang(MemoryPlace(BARE, tmp_path))
    place = MemoryPlace(BARE, tmp_path)
    place.cloud = cloud = CountingCloud(BARE)
    provider = place.provider(OURS)
    gangs = [replace(spec, name=f"rm-{number}-job-1") for number in range(21)]
    for gang in gangs:
        await provider.launch(gang)
    await place.settle()
    cloud.lists = 0
    await asyncio.gather(*(provider.gangs(gang.name) for gang in gangs))
    for gang in gangs:
        await provider.gangs(gang.name)
    assert cloud.lists == 1
    await place.wait(LIST_AGE)
    await provider.gangs(gangs[0].name)
    assert cloud.lists == 2
    await provider.remove(gangs[0].name)
    (seen,) = await provider.gangs(gangs[0].name)
    assert (cloud.lists, seen.state) == (3, GangState.ENDED)
    for gang in gangs:
        await provider.remove(gang.name)


async def test_a_list_that_fails_or_whose_caller_leaves_is_not_kept(tmp_path: Path) -> None:
    async def fail() -> Sequence[CloudMachine]:
        raise CloudFault(503, "unavailable")

    place = MemoryPlace(BARE, tmp_path)
    place.cloud = cloud = CountingCloud(BARE)
    provider = place.provider(OURS)
    first, second = (asyncio.create_task(provider.gangs()) for _ in range(2))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first.cancel()
    assert await second == []  # it waits for the same list
    await place.settle()
    cloud.list = fail  # type: ignore[method-assign]
    with pytest.raises(TryAgain):
        await provider.gangs()
    del cloud.list
    assert (await provider.gangs(), cloud.lists) == ([], 2)


async def test_an_older_list_does_not_show_that_a_lost_request_made_no_machine(
    tmp_path: Path,
) -> None:
    spec = make_gang(MemoryPlace(BARE, tmp_path))
    place = MemoryPlace(BARE, tmp_path)
    provider = place.provider(OURS)
    place.fail(0, LaunchFault.LOST)
    with pytest.raises(TryAgain):
        await provider.launch(spec)
    await place.wait(BARE.list_lag - timedelta(seconds=1))
    assert await provider.gangs() == []  # this list is shared with the launch
    await place.wait(timedelta(seconds=1))
    for _ in range(2):
        with suppress(TryAgain):
            await provider.launch(spec)
        await place.wait(LIST_AGE)
    assert place.billed() == 1
    assert len(await provider.gangs()) == 1


async def test_a_gang_that_cannot_start_in_time_beside_another_is_refused_before_it_costs_anything(
    tmp_path: Path,
) -> None:
    spec = make_gang(MemoryPlace(SLOW, tmp_path), nodes=20)
    place = MemoryPlace(SLOW, tmp_path)
    provider = place.provider(OURS)
    with pytest.raises(TryAgain):
        await provider.launch(spec)
    with pytest.raises(NoCapacity, match="39 nodes"):
        await provider.launch(replace(spec, name="rm-2-job-1"))
    assert place.billed() == 1
    await provider.remove(spec.name)
    with pytest.raises(TryAgain):  # no launch is before it any more
        await provider.launch(replace(spec, name="rm-2-job-1"))
    await provider.remove("rm-2-job-1")


async def test_a_machine_that_was_listed_and_then_deleted_has_ended_however_young_it_is(
    tmp_path: Path,
) -> None:
    """Such as a notebook that its user stops in the first minute."""

    class PromptCloud(MemoryCloud):
        def _show(self, rented: Rented) -> CloudMachine | None:
            shown = super()._show(replace(rented, at=rented.at - BARE.list_lag))
            return None if rented.ended else shown

    place = MemoryPlace(BARE, tmp_path)
    place.cloud = PromptCloud(BARE)
    provider, spec = place.provider(OURS), make_gang(place)
    await provider.launch(spec)
    await place.wait(LIST_AGE)
    (seen,) = await provider.gangs(spec.name)
    assert seen.state in (GangState.STARTING, GangState.RUNNING)
    await provider.remove(spec.name)
    await place.wait(LIST_AGE)
    (seen,) = await provider.gangs(spec.name)
    assert seen.state is GangState.ENDED


async def test_a_launch_that_has_bought_nodes_is_finished_before_another_buys_any(
    tmp_path: Path,
) -> None:
    spec = make_gang(MemoryPlace(SLOW, tmp_path), nodes=3)
    place = MemoryPlace(SLOW, tmp_path)
    provider, other = place.provider(OURS), replace(spec, name="rm-2-job-1")
    with pytest.raises(TryAgain):
        await provider.launch(spec)
    for _ in range(6):
        await place.wait(timedelta(seconds=15))
        for gang in (other, spec):
            with suppress(TryAgain):
                await provider.launch(gang)
    gangs = [request.gang.name for request in place.cloud.requests]
    assert gangs == [spec.name] * 3 + [other.name] * 3


async def test_machines_that_are_no_longer_listed_are_forgotten(tmp_path: Path) -> None:
    spec = make_gang(MemoryPlace(ATOMIC, tmp_path))
    place = MemoryPlace(ATOMIC, tmp_path)
    provider = place.provider(OURS)
    await provider.launch(spec)
    await place.settle()
    await provider.gangs()
    assert len(provider._status._sighted) == 1
    await provider.remove(spec.name)
    await place.settle()
    await provider.gangs()  # the cloud lists the machine as ended
    await place.wait(timedelta(hours=2))
    await provider.gangs()
    assert provider._status._sighted == {}
