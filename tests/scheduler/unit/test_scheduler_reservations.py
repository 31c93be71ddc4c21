"""Which jobs reservations keep out, which GPUs they get, and which work leaves."""

from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta
from typing import cast

import pytest
from tests.records import make_attempt_record, make_job_record, make_offer

from cavvy.control.clock import ControlClock
from cavvy.control.decide.maintenance import compare_reserved
from cavvy.control.maintenance import MaintenanceService, NodeHolder
from cavvy.control.provider_pool import ProviderPool
from cavvy.control.reservations import ReservationService, reservation_key
from cavvy.domain.allocations import Allocation, Host
from cavvy.domain.jobs import AttemptPhase, JobPhase
from cavvy.domain.maintenance import Reservation, ReservedPart
from cavvy.domain.tasks import JobLimits, ResourceSpec, TaskSpec, TopologyNeed
from cavvy.domain.values import replace
from cavvy.scheduler.maintenance import (
    MARGIN,
    DrainStep,
    ReservedFor,
    ReservedHosts,
    choose_parts,
    find_overlap,
    subtract_held,
)
from cavvy.store.open import MemoryStore

NOW = datetime(2026, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
PARENTS = {"lab": None, "team": "lab", "other": None}
HOSTS = [
    Host(name=f"ssh/{name}", cpus=8, memory_mib=8000, devices=tuple("0123"), kinds=("gpu",) * 4)
    for name in "ab"
]
WHOLE = Reservation(
    name="r",
    project="lab",
    parts=(ReservedPart("ssh/a"),),
    begins_at=NOW + HOUR,
    ends_at=NOW + 2 * HOUR,
)
OFFER = make_offer("ssh/hosts/a/gpu", 0, accelerator="gpu", accelerator_count=2, shared=True)
TASK = TaskSpec(name="t", run="t", resources=ResourceSpec(cpus_min=2))


def is_kept_out(
    runs: timedelta | None,
    project: str = "other",
    user: str = "",
    at: datetime = NOW,
    owner: str = "",
) -> bool:
    book = ReservedHosts([replace(WHOLE, user=owner)], HOSTS, PARENTS)
    return bool(book.find_closed(ReservedFor(project=project, user=user, runs=runs), at))


def test_only_the_members_of_a_project_read_its_name() -> None:
    found = replace(WHOLE, user="ann")
    times = "from 2026-01-01 01:00 to 2026-01-01 02:00 UTC"
    assert found.describe() == f"reserved for project lab, user ann, {times}"
    assert found.describe("lab") == found.describe()
    for reader in ("team", "other", ""):
        assert found.describe(reader) == f"reserved for another project {times}"


def test_a_job_starts_there_only_if_it_surely_ends_before_the_begin() -> None:
    assert is_kept_out(None), "it may run for ever"
    assert is_kept_out(HOUR)
    assert not is_kept_out(HOUR - MARGIN)
    assert is_kept_out(MARGIN, at=NOW + HOUR), "the reservation has begun"
    assert not is_kept_out(None, at=NOW + 2 * HOUR), "it has ended"


def test_a_reservation_is_for_its_project_and_those_below_it_and_its_user() -> None:
    assert not is_kept_out(None, "lab")
    assert not is_kept_out(None, "team")
    assert is_kept_out(None, "lab", "bob", owner="ann")
    assert not is_kept_out(None, "team", "ann", owner="ann")


def list_open(count: int, *parts: ReservedPart, cpus: float = 2) -> bool:
    """Whether a task for this many GPUs of host a is open beside the reserved parts."""
    book = ReservedHosts([replace(WHOLE, parts=parts)], HOSTS, PARENTS)
    closed = book.find_closed(ReservedFor(project="other", user="", runs=None), NOW)
    task = replace(TASK, resources=ResourceSpec(cpus_min=cpus))
    offers = (replace(OFFER, accelerator_count=count),)
    return bool(book.list_open(task, "other", offers, book.occupy(closed)))


def test_jobs_use_the_gpus_that_are_not_reserved() -> None:
    two = ReservedPart("ssh/a", ("0", "1"))
    assert list_open(2, two)
    assert not list_open(3, two)
    assert not list_open(1, two, cpus=5), "the reserved half takes its CPUs along"
    assert not list_open(0, ReservedPart("ssh/a"))
    assert list_open(4, ReservedPart("ssh/b"))
    assert list_open(4, ReservedPart("ssh/gone"))
    assert list_open(4, ReservedPart("ssh/a", ("gone",)))


def test_a_task_that_needs_one_rack_closes_no_offer_for_others() -> None:
    """The offers are remembered for tasks that need the same."""
    racks = {"a": "1", "b": "1", "c": "2"}
    hosts = [
        replace(HOSTS[0], name=f"ssh/{name}", group="ssh/hosts", labels=(("rack", rack),))
        for name, rack in racks.items()
    ]
    book = ReservedHosts([WHOLE], hosts, PARENTS)
    closed = book.occupy(book.find_closed(ReservedFor(project="o", user="", runs=None), NOW))
    anywhere, offers = replace(TASK, nodes=2), (replace(OFFER, zone=None),)
    one_rack = replace(anywhere, topology=TopologyNeed(same="rack"))
    assert [book.list_open(task, "o", offers, closed) for task in (one_rack, anywhere)] == [
        (),
        offers,
    ]


def test_work_on_reserved_gpus_counts_once() -> None:
    book = ReservedHosts([replace(WHOLE, parts=(ReservedPart("ssh/a", ("0",)),))], HOSTS, PARENTS)
    (part,) = book.occupy([replace(WHOLE, parts=(ReservedPart("ssh/a", ("0",)),))])
    assert (part.cpus, part.memory_mib) == (2.0, 2000)
    held = Allocation(
        host="ssh/a", gang="g", rank=0, project="lab", cpus=1.5, memory_mib=3000, devices=("0",)
    )
    (left,) = subtract_held([part], [held])
    assert (left.cpus, left.memory_mib, left.devices) == (0.5, 0, ("0",))
    assert subtract_held([part], [replace(held, devices=("1",))]) == [part]


@pytest.mark.parametrize(
    ("change", "clashes"),
    [
        ({}, True),
        ({"parts": (ReservedPart("ssh/b"),)}, False),
        ({"parts": (ReservedPart("ssh/a", ("3",)),)}, True),
        ({"begins_at": NOW, "ends_at": NOW + HOUR}, False),
        ({"begins_at": NOW, "ends_at": NOW + 1.1 * HOUR}, True),
        ({"begins_at": NOW + 2 * HOUR, "ends_at": NOW + 3 * HOUR}, False),
    ],
)
def test_reservations_of_the_same_part_at_the_same_time_clash(
    change: dict[str, object], clashes: bool
) -> None:
    other = replace(WHOLE, **change)  # type: ignore[arg-type]
    assert find_overlap(WHOLE, other) == find_overlap(other, WHOLE) == ("ssh/a" * clashes)


def test_different_gpus_of_a_host_do_not_clash() -> None:
    one, other = (replace(WHOLE, parts=(ReservedPart("ssh/a", (each,)),)) for each in ("0", "1"))
    assert not find_overlap(one, other)


def test_gpus_that_are_free_at_the_begin_are_reserved_first() -> None:
    busy = {("ssh/a", "0"), ("ssh/a", "1")}
    assert choose_parts(HOSTS, 4, (), busy) == [ReservedPart("ssh/b", tuple("0123"))]
    assert choose_parts(HOSTS, 5, (), busy)[1] == ReservedPart("ssh/a", ("2",))
    assert sum(len(each.devices) for each in choose_parts(HOSTS, 8, (), busy)) == 8
    assert choose_parts(HOSTS, 9, (), busy) == []
    taken = [ReservedPart("ssh/b"), ReservedPart("ssh/a", ("3",))]
    assert choose_parts(HOSTS, 3, taken, busy) == [ReservedPart("ssh/a", ("2", "0", "1"))]
    assert choose_parts(HOSTS, 4, taken, busy) == []


def test_how_long_a_job_holds_its_nodes_at_most() -> None:
    """The machine of a job keeps its nodes after the job."""
    limits = JobLimits(duration=HOUR)
    task = replace(TASK, grace=timedelta(minutes=5), limits=limits)

    def runs(task: TaskSpec) -> timedelta | None:
        return compare_reserved(make_job_record(NOW, task=task)).runs

    assert runs(task) == HOUR + timedelta(minutes=5)
    assert runs(replace(task, machine="m")) is None
    assert runs(replace(task, limits=JobLimits())) is None


class Holders:
    """The maintenance of a host on which a job of another project holds two GPUs: each gang, named
    after its GPU, holds one."""

    def __init__(self) -> None:
        self.leaving: set[str] = set()

    async def list_on(self, hosts: Collection[str]) -> Sequence[NodeHolder]:
        job = make_job_record(NOW, phase=JobPhase.RUNNING, attempt=1, project="other")
        part = Allocation(host="ssh/a", gang="", rank=0, project="other", cpus=1, memory_mib=0)
        return [
            NodeHolder(
                allocation=replace(part, gang=device, devices=(device,)),
                attempt=make_attempt_record(NOW, OFFER, gang=device, phase=AttemptPhase.RUNNING),
                job=job,
            )
            for device in "01"
        ]

    async def leave(
        self, step: DrainStep, holders: Sequence[NodeHolder], why: str, now: datetime
    ) -> timedelta:
        self.leaving |= step.leave.keys()
        return HOUR


class FixedClock:
    """A clock that stands at `at`."""

    at = NOW

    def now(self) -> datetime:
        return self.at


async def test_work_on_other_gpus_stays_and_a_reservation_that_has_ended_goes() -> None:
    store, holders, clock = MemoryStore(), Holders(), FixedClock()
    service = ReservationService(
        store,
        cast("ProviderPool", None),
        cast("ControlClock", clock),
        cast("MaintenanceService", holders),
        lambda key: None,
    )
    one = replace(WHOLE, parts=(ReservedPart("ssh/a", ("0",)),))
    await store.maintenance.add_reservation(one)
    for at, leaving in ((NOW, set()), (one.begins_at, {"0"})):
        clock.at = at
        assert await service.reconcile(reservation_key("r")) is not None
        assert holders.leaving == leaving
    clock.at = one.ends_at
    assert await service.reconcile(reservation_key("r")) is None
    assert await store.maintenance.reservations() == []
