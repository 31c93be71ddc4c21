"""Jobs and what hangs on them, in every store."""

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from math import inf, nan
from typing import Any

import pytest
from tests.contract.store_suite import (
    FULL_ORIGIN,
    NOW,
    after,
    begin,
    make_allocation,
    make_attempt,
    make_charge,
    make_event,
    make_host,
    make_job,
    make_node,
    make_offer,
    submit,
)

from cavvy.domain.accounts import Project
from cavvy.domain.elastic import NodeRange, SizeCause, SizeChange
from cavvy.domain.jobs import AttemptOutcome, AttemptPhase, JobPhase, NodePhase, Order, StopCause
from cavvy.domain.maintenance import Reservation, ReservedPart
from cavvy.domain.policies import ProjectPolicy
from cavvy.domain.shares import WITHOUT_GPU, HeldGang, HeldShare, ProjectUse, QueueRow, share_of
from cavvy.domain.tasks import (
    AcceleratorNeed,
    JobLimits,
    ResourceSpec,
    RetryPolicy,
    TaskSpec,
    Workload,
)
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace
from cavvy.store import ended_jobs
from cavvy.store.base import (
    PER_MACHINE,
    AtomicWrite,
    HashMismatch,
    LedgerFilter,
    NameConflict,
    RowNotFound,
    SealedSecret,
    StaleVersion,
)
from cavvy.store.drivers import DatabaseSession
from cavvy.store.ended_jobs import EndedJobs
from cavvy.store.held import HeldReader
from cavvy.store.job_search import JobOrder, JobSearch
from cavvy.store.queue import AGEING, _read_use
from cavvy.store.sql import Store

FULL_TASK = TaskSpec(
    name="train",
    run="python train.py",
    tags={"team": "é"},
    params={"lr": 0.1, "n": 3, "flag": True, "name": "x"},
    resources=ResourceSpec(
        accelerators=(AcceleratorNeed(name="H100", count_min=8),),
        regions=("eu",),
        max_rate=HourlyRate(20_000_000),
    ),
    limits=JobLimits(
        deadline=NOW + timedelta(days=1), budget=Money(5_000_000), unattended=timedelta(hours=2)
    ),
    retry=RetryPolicy(exit=2, exit_codes=(3, 4), delay=timedelta(seconds=1.5)),
    work=Workload(flops=1e21, rates={"H100": 12.5}),
)


async def test_a_job_is_read_as_it_was_written(store: Store) -> None:
    job = make_job(
        "j1",
        task=FULL_TASK,
        origin=FULL_ORIGIN,
        user="ann",
        not_before=after(5),
        stop_reason="asked",
        stop_cause=StopCause.USER,
        exit_code=3,
        ended_at=after(9),
        consented=True,
        ceiling=Money(7),
        retries={"exit": 1},
        avoid={"fake/x": after(60)},
        attempt=2,
    )
    stored = await store.submit(job, make_event(job))
    assert stored == replace(job, version=1)
    assert await store.job("j1") == stored
    assert await store.find_job("p", "train") == stored
    assert await store.find_job("p", "j1") == stored


async def test_replicas_take_no_names_of_jobs(store: Store) -> None:
    name_replica = pytest.importorskip("cavvy.capabilities.serving.replicas").name_replica
    for number in (1, 2):
        await submit(store, f"r{number}", name=name_replica("train", number))
    assert (await store.find_job("p", "train.2")).id == "r2"
    assert (await store.find_job("p", "train-2")).id == "r2"
    assert [(await submit(store, each)).name for each in ("j1", "j2")] == ["train", "train-2"]
    assert (await store.find_job("p", "train-2")).id == "j2"  # the name of a job comes first
    for name in ("train-3", "train-02", "train-", "-1", "rain-1"):
        with pytest.raises(RowNotFound):
            await store.find_job("p", name)


async def test_reads_name_the_project(store: Store) -> None:
    await submit(store, "j1", project="p")
    await submit(store, "j2", project="q")
    assert (await store.find_job("q", "train")).id == "j2"
    with pytest.raises(RowNotFound):
        await store.find_job("q", "j1")
    assert [job.id for job in (await store.list_jobs("q")).jobs] == ["j2"]
    assert [job.id for job in (await store.list_jobs(None)).jobs] == ["j2", "j1"]
    assert (await store.list_jobs("r")).jobs == []


async def test_missing_rows_are_not_found(store: Store) -> None:
    for read in (
        store.job("x"),
        store.find_job("p", "x"),
        store.attempt_of_gang("x"),
        store.node("x", 0),
    ):
        with pytest.raises(RowNotFound):
            await read
    assert await store.attempts("x") == []
    assert await store.nodes("x") == []
    assert await store.events("x") == []
    assert await store.charges("x") == []


async def test_names_are_numbered(store: Store) -> None:
    names = [(await submit(store, f"j{i}")).name for i in range(4)]
    assert names == ["train", "train-2", "train-3", "train-4"]
    assert (await submit(store, "j5", project="q")).name == "train"


async def test_a_number_that_was_taken_by_name_is_left_out(store: Store) -> None:
    names = ["train-3", "train", "train", "train", "train-3"]
    stored = [(await submit(store, f"j{i}", name=name)).name for i, name in enumerate(names)]
    assert stored == ["train-3", "train", "train-2", "train-4", "train-3-2"]


async def test_names_are_unique_when_many_submit_at_once(store: Store) -> None:
    jobs = await asyncio.gather(*(submit(store, f"j{i:02}") for i in range(40)))
    assert {job.name for job in jobs} == {"train", *(f"train-{i}" for i in range(2, 41))}


async def test_an_id_is_submitted_once(store: Store) -> None:
    await submit(store, "j1")
    with pytest.raises(StaleVersion):
        await submit(store, "j1", name="other")
    assert len(await store.events("j1")) == 1


async def test_commit_inserts_under_the_exact_name(store: Store) -> None:
    await store.commit(AtomicWrite(jobs=[make_job("j1")]))
    with pytest.raises(NameConflict):
        await store.commit(AtomicWrite(jobs=[make_job("j2")]))
    with pytest.raises(StaleVersion):
        await store.commit(AtomicWrite(jobs=[make_job("j1", name="other")]))
    await store.commit(AtomicWrite(jobs=[make_job("j3", project="q")]))


async def test_an_update_is_guarded_by_the_version(store: Store) -> None:
    job = await submit(store, "j1")
    await store.commit(
        AtomicWrite(jobs=[replace(job, phase=JobPhase.STARTING, reason="placed", attempt=1)])
    )
    with pytest.raises(StaleVersion):
        await store.commit(AtomicWrite(jobs=[replace(job, reason="late")]))
    assert await store.job("j1") == replace(
        job, phase=JobPhase.STARTING, reason="placed", attempt=1, version=2
    )


async def test_of_two_writers_one_is_stale(store: Store) -> None:
    job = await submit(store, "j1")
    writes = [
        store.commit(AtomicWrite(jobs=[replace(job, reason=f"writer {i}")])) for i in range(8)
    ]
    results = await asyncio.gather(*writes, return_exceptions=True)
    assert (
        sorted(type(result).__name__ for result in results) == ["NoneType"] + ["StaleVersion"] * 7
    )
    winner = results.index(None)
    assert await store.job("j1") == replace(job, reason=f"writer {winner}", version=2)


async def test_a_job_keeps_its_project_and_name(store: Store) -> None:
    job = await submit(store, "j1")
    for changed in (replace(job, project="q"), replace(job, name="other")):
        with pytest.raises(StaleVersion):
            await store.commit(AtomicWrite(jobs=[changed]))
    assert await store.job("j1") == job


async def test_task_and_origin_can_be_completed_later(store: Store) -> None:
    job = await submit(store, "j1", origin=FULL_ORIGIN)
    other = replace(
        job, reason="seen", origin=replace(FULL_ORIGIN, commit="c" * 40, snapshot="6" * 64)
    )
    await store.commit(AtomicWrite(jobs=[other]))
    await store.commit(AtomicWrite(jobs=[replace(other, reason="again", version=2)]))
    assert await store.job("j1") == replace(other, reason="again", version=3)
    assert set(await store.snapshots()) == {"6" * 64}
    await store.commit(
        AtomicWrite(jobs=[replace(await store.job("j1"), task=replace(job.task, priority=7))])
    )
    assert (await store.list_jobs("p")).jobs[0].priority == 7


async def test_nothing_is_written_when_one_guard_fails(store: Store) -> None:
    job = await submit(store, "j1")
    attempt = await begin(store, job)
    changes = AtomicWrite(
        jobs=[replace(job, reason="new"), make_job("j2", name="two")],
        attempts=[make_attempt(job, 2)],
        nodes=[make_node(attempt)],
        events=[make_event(job, "new")],
        charges=[make_charge(attempt, 5)],
    )
    for guard in (
        replace(changes, nodes=[make_node(attempt), make_node(attempt, 1, version=4)]),
        replace(changes, attempts=[replace(attempt, version=9)]),
        replace(changes, jobs=[*changes.jobs, replace(job, version=7)]),
    ):
        with pytest.raises(StaleVersion):
            await store.commit(guard)
        assert await store.job("j1") == job
        assert await store.attempts("j1") == [attempt]
        assert await store.nodes(attempt.id) == []
        assert len(await store.events("j1")) == 1
        assert await store.charges("j1") == []
        summary = (await store.list_jobs("p")).jobs[0]
        assert (summary.id, summary.spent) == ("j1", Money(0))
    await store.commit(changes)
    assert (await store.job("j1")).reason == "new"


async def test_parents_must_exist(store: Store) -> None:
    job, ghost = await submit(store, "j1"), make_job("ghost")
    for changes in (
        AtomicWrite(attempts=[make_attempt(ghost)]),
        AtomicWrite(nodes=[make_node(make_attempt(job))]),
        AtomicWrite(events=[make_event(ghost)]),
        AtomicWrite(charges=[make_charge(make_attempt(job), 5)]),
    ):
        with pytest.raises(RowNotFound):
            await store.commit(changes)
    attempt = make_attempt(job)
    await store.commit(
        AtomicWrite(
            attempts=[attempt], nodes=[make_node(attempt)], charges=[make_charge(attempt, 5)]
        )
    )


async def test_attempts_are_unique_and_found(store: Store) -> None:
    job, other = await submit(store, "j1"), await submit(store, "j2", project="q")
    first = await begin(store, job)
    for twin in (
        first,
        replace(make_attempt(job, 2), gang=first.gang),
        replace(make_attempt(job), id="x", gang="y"),
    ):
        with pytest.raises(StaleVersion):
            await store.commit(AtomicWrite(attempts=[replace(twin, version=0)]))
    ended = replace(
        first, phase=AttemptPhase.ENDED, outcome=AttemptOutcome.PREEMPTED, ended_at=after(3)
    )
    await store.commit(
        AtomicWrite(
            attempts=[ended, make_attempt(job, 2, offer=make_offer("next")), make_attempt(other)]
        )
    )
    assert await store.attempts("j1") == [
        replace(ended, version=2),
        replace(make_attempt(job, 2, offer=make_offer("next")), version=1),
    ]
    assert await store.attempt_of_gang(first.gang) == replace(ended, version=2)
    assert [a.id for a in await store.open_attempts()] == ["j1-2", "j2-1"]
    assert [a.id for a in await store.open_attempts("q")] == ["j2-1"]
    assert (await store.list_jobs("p")).jobs[0].place == make_offer("next").key


async def test_a_gang_is_handed_to_another_attempt_in_one_write(store: Store) -> None:
    first = await begin(store, await submit(store, "j1"), phase=AttemptPhase.KEPT)
    heir = make_attempt(await submit(store, "j2"), gang=first.gang)
    handed = replace(first, phase=AttemptPhase.ENDED, gang=f"{first.gang}@{first.id}")
    with pytest.raises(StaleVersion):  # the name is taken still
        await store.commit(AtomicWrite(attempts=[heir]))
    with pytest.raises(StaleVersion):  # somebody wrote it meanwhile: nothing of the write is left
        await store.commit(AtomicWrite(attempts=[replace(handed, version=7), heir]))
    assert await store.attempt_of_gang(first.gang) == first
    await store.commit(AtomicWrite(attempts=[handed, heir]))
    assert await store.attempt_of_gang(first.gang) == replace(heir, version=1)
    assert await store.attempt_of_gang(handed.gang) == replace(handed, version=2)
    assert [attempt.id for attempt in await store.open_attempts()] == [heir.id]


async def test_nodes_are_read_as_written(store: Store) -> None:
    attempt = await begin(store, await submit(store, "j1"))
    node = make_node(
        attempt,
        phase=NodePhase.RUNNING,
        claim="n",
        order=Order(seq=2, kind="stop", seconds=1.5, reason="asked"),
        last_seq=4,
        exit_outcome=AttemptOutcome.EXIT,
        telemetry={"cpu": 0.5},
        progress={"loss": 0.25, "step": "one"},
        heard_at=after(0.000001),
    )
    await store.commit(AtomicWrite(nodes=[make_node(attempt, 1), node]))
    assert await store.nodes(attempt.id) == [
        replace(node, version=1),
        replace(make_node(attempt, 1), version=1),
    ]
    await store.commit(AtomicWrite(nodes=[replace(node, last_seq=5, version=1)]))
    assert await store.node(attempt.id, 0) == replace(node, last_seq=5, version=2)
    for stale in (replace(node, version=1), replace(node, version=2, project="q")):
        with pytest.raises(StaleVersion):
            await store.commit(AtomicWrite(nodes=[stale]))


async def test_the_rows_of_a_job_are_read_in_one_step(store: Store) -> None:
    ended = await begin(store, await submit(store, "j1"), phase=AttemptPhase.ENDED)
    await store.commit(AtomicWrite(nodes=[make_node(ended)]))
    attempt = await begin(store, await store.job("j1"), number=2)
    await store.commit(AtomicWrite(nodes=[make_node(attempt, 1), make_node(attempt)]))
    job, nodes = await store.job("j1"), await store.nodes(attempt.id)
    found = await store.read_job("j1")
    assert (found.job, found.attempts) == (job, await store.attempts("j1"))
    assert found.nodes == {attempt.id: nodes}
    found = await store.read_gang(attempt.gang)
    assert (found.job, found.attempts) == (job, [attempt])
    assert found.nodes == {attempt.id: nodes}
    assert (await store.read_gang(attempt.gang, [1])).nodes == {attempt.id: nodes[1:]}
    assert (await store.read_gang(attempt.gang, [1, 2, 0])).nodes == {attempt.id: nodes}
    assert (await store.read_gang(attempt.gang, [2])).nodes == {attempt.id: []}
    for missing in (store.read_job("x"), store.read_gang("x")):
        with pytest.raises(RowNotFound):
            await missing


async def test_what_a_database_cannot_hold_is_made_plain(store: Store) -> None:
    job = await submit(store, "j1")
    attempt = await begin(store, job, reason="a\x00b\ud800")
    node = make_node(
        attempt,
        telemetry={"good": 1.0, "bad": float("nan")},
        progress={"loss": float("inf"), "x": 1.0},
        exit_reason="\x00",
    )
    await store.commit(
        AtomicWrite(
            jobs=[replace(job, reason="x\x00\udfff")],
            nodes=[node],
            events=[make_event(job, "bell\x07 nul\x00")],
        )
    )
    assert (await store.job("j1")).reason == "x\ufffd?"
    assert (await store.attempts("j1"))[0].reason == "a\ufffdb?"
    stored = await store.node(attempt.id, 0)
    assert (stored.telemetry, stored.progress, stored.exit_reason) == (
        {"good": 1.0},
        {"loss": "inf", "x": 1.0},
        "\ufffd",
    )
    assert (await store.events("j1"))[-1].text == "bell\x07 nul\ufffd"


async def test_a_task_that_could_not_be_read_back_is_refused(store: Store) -> None:
    for task in (
        TaskSpec(name="t", run="r", params={"lr": float("nan")}),
        TaskSpec(name="t", run="\ud800"),
    ):
        with pytest.raises(HashMismatch, match="finite"):
            await submit(store, "j1", task=task)
    assert (await store.list_jobs(None)).jobs == []


async def test_events_grow(store: Store) -> None:
    job, other = await submit(store, "j1"), await submit(store, "j2")
    await store.commit(
        AtomicWrite(events=[make_event(job, "one", rank=0, attempt=1), make_event(job, "two")])
    )
    await store.commit(
        AtomicWrite(events=[make_event(other, "else"), make_event(job, "three", at=after(2))])
    )
    events = await store.events("j1")
    assert [event.text for event in events] == ["submitted", "one", "two", "three"]
    assert [event.id for event in events] == sorted({event.id for event in events})
    assert events[1] == make_event(job, "one", rank=0, attempt=1, id=events[1].id)
    assert [event.text for event in await store.events("j1", after=events[1].id)] == [
        "two",
        "three",
    ]
    assert [event.text for event in await store.events("j1", after=events[0].id, limit=1)] == [
        "one"
    ]


async def test_charges_sum_up(store: Store) -> None:
    job = await submit(store, "j1")
    attempt = await begin(store, job)
    first, minimum = make_charge(attempt, 100), make_charge(attempt, 7, kind="minimum", since=60)
    await store.commit(AtomicWrite(charges=[first, minimum]))
    grown, later = make_charge(attempt, 250, until=150), make_charge(attempt, 1, since=3600)
    other = make_charge(attempt, 3, rank=1)
    await store.commit(AtomicWrite(charges=[other, grown, minimum, later]))
    assert await store.charges("j1") == [grown, minimum, later, other]
    assert (await store.list_jobs("p")).jobs[0].spent == Money(261)
    assert await store.spent("p") == Money(261)
    # the entries for the new part of the first charge, and for the two that began later
    assert await store.spent("p", since=after(60)) == Money(150 + 8)
    assert await store.spent("q") == Money(0)


async def test_spending_is_added_up_by_job_and_provider(store: Store) -> None:
    tagged = TaskSpec(name="tagged", run="true", tags={"team": "vision"})
    job = await submit(store, "j1", name="tagged", task=tagged)
    attempt = await begin(store, job)
    other = await begin(store, await submit(store, "j2", project="q", name="other"))
    paid = [make_charge(attempt, 600), make_charge(attempt, 7, since=60, until=120)]
    await store.commit(AtomicWrite(charges=[*paid, make_charge(other, 5, until=30)]))
    by = ("job", "tags", "provider")
    [row] = await store.sum_ledger(LedgerFilter(projects="p"), by)
    assert row.groups == {"job": "tagged", "tags": '{"team":"vision"}', "provider": "fake"}
    assert row.amount == Money(607)
    sums = await store.sum_ledger(LedgerFilter(), ("project",))
    assert [each.groups["project"] for each in sums] == ["p", "q"]
    [later] = await store.sum_ledger(LedgerFilter(projects="p", since=after(45)), ())
    assert later.amount == Money(150 + 7)  # a quarter of the first charge is after it
    assert await store.sum_ledger(LedgerFilter(projects="p", since=after(120)), ()) == []
    assert [each.tags for each in (await store.list_jobs("p")).jobs] == [{"team": "vision"}]


async def test_a_removed_job_leaves_its_bill_and_its_name(store: Store) -> None:
    job = await submit(store, "j1", name="train")
    attempt = await begin(store, job)
    await store.commit(AtomicWrite(charges=[make_charge(attempt, 100)]))
    job = await store.find_job("p", "train")
    with pytest.raises(StaleVersion):
        await store.remove_job(replace(job, version=job.version + 1))
    await store.remove_job(job)
    for name in ("train", "j1"):
        with pytest.raises(RowNotFound):
            await store.find_job("p", name)
    assert (await store.list_jobs("p")).jobs == []
    assert sum((await store.count_jobs("p")).values()) == 0
    assert await store.events("j1") == []
    assert await store.spent("p") == Money(100)
    again = await submit(store, "j2", name="train")
    assert again.name == "train"
    sums = await store.sum_ledger(LedgerFilter(projects="p"), ("job",))
    assert [(each.groups["job"], each.amount) for each in sums] == [("train", Money(100))]


async def test_a_write_replaces_all_charges_of_its_ranks(store: Store) -> None:
    job = await submit(store, "j1")
    attempt = await begin(store, job)
    old = [make_charge(attempt, 9, since=i, rank=rank) for i in range(3) for rank in range(2)]
    await store.commit(AtomicWrite(charges=old))
    revised = make_charge(attempt, 5, since=1, kind="kept")
    await store.commit(AtomicWrite(charges=[revised]))
    assert [each for each in await store.charges("j1") if each.rank == 0] == [revised]
    assert (await store.list_jobs("p")).jobs[0].spent == Money(5 + 27)


async def test_concurrent_charges_keep_the_sum(store: Store) -> None:
    attempt = await begin(store, await submit(store, "j1"))
    await asyncio.gather(
        *(store.commit(AtomicWrite(charges=[make_charge(attempt, i)])) for i in range(1, 20))
    )
    await asyncio.gather(
        *(
            store.commit(AtomicWrite(charges=[make_charge(attempt, 5, since=i)]))
            for i in range(1, 20)
        )
    )
    total = sum(charge.amount.micros for charge in await store.charges("j1"))
    assert (await store.list_jobs("p")).jobs[0].spent == Money(total) == await store.spent("p")


async def test_listing_by_cursor_sees_each_job_once(store: Store) -> None:
    for i in range(23):
        await submit(store, f"j{i:02}", project="p" if i % 3 else "q")
    for project in ("p", "q", None):
        wanted = [
            f"j{i:02}"
            for i in range(22, -1, -1)
            if project is None or (i % 3 != 0) == (project == "p")
        ]
        page = await store.list_jobs(project, cursor="k", limit=4)
        seen = [job.id for job in page.jobs]
        while page.cursor is not None:
            assert len(page.jobs) == 4
            await submit(
                store, f"k{len(seen):02}{project}", project="p"
            )  # newer ones do not shift the pages
            page = await store.list_jobs(project, cursor=page.cursor, limit=4)
            seen += [job.id for job in page.jobs]
        assert seen == wanted


async def test_listing_by_phase(store: Store) -> None:
    phases = [JobPhase.QUEUED, JobPhase.DONE, JobPhase.FAILED, JobPhase.DONE, JobPhase.RUNNING]
    for i, phase in enumerate(phases):
        await submit(store, f"j{i}", phase=phase, project="p" if i < 4 else "q")
    assert [j.id for j in (await store.list_jobs(None, {JobPhase.DONE})).jobs] == ["j3", "j1"]
    page = await store.list_jobs(None, {JobPhase.DONE, JobPhase.RUNNING, JobPhase.FAILED}, limit=2)
    assert [j.id for j in page.jobs] == ["j4", "j3"]
    page = await store.list_jobs(
        None, {JobPhase.DONE, JobPhase.RUNNING, JobPhase.FAILED}, page.cursor, 2
    )
    assert ([j.id for j in page.jobs], page.cursor) == (["j2", "j1"], None)
    assert [
        j.id for j in (await store.list_jobs("p", {JobPhase.RUNNING, JobPhase.QUEUED})).jobs
    ] == ["j0"]
    assert await store.count_jobs("p") == {JobPhase.QUEUED: 1, JobPhase.DONE: 2, JobPhase.FAILED: 1}
    assert (await store.count_jobs(None))[JobPhase.RUNNING] == 1


async def test_a_summary_says_what_the_job_says(store: Store) -> None:
    job = await submit(store, "j1", user="ann", priority=5)
    ended = replace(
        job, phase=JobPhase.FAILED, reason="exit 3", exit_code=3, ended_at=after(9), attempt=1
    )
    await store.commit(AtomicWrite(jobs=[ended]))
    summary = (await store.list_jobs("p")).jobs[0]
    for field in (
        "id",
        "project",
        "name",
        "user",
        "phase",
        "reason",
        "submitted_at",
        "since",
        "ended_at",
        "exit_code",
    ):
        assert getattr(summary, field) == getattr(ended, field)
    assert (summary.priority, summary.attempt, summary.place, summary.spent) == (
        5,
        1,
        None,
        Money(0),
    )


async def heads(store: Store, now: datetime, limit: int = 10) -> list[str]:
    return [row.id for row in await store.queue.heads(now, limit)]


async def test_the_queue_goes_by_priority_then_age(store: Store) -> None:
    await submit(store, "j1")
    await submit(store, "j2", priority=5)
    await submit(store, "j3", priority=9, not_before=after(60))
    await submit(store, "j4", priority=9, stop_reason="asked")
    await submit(store, "j5", priority=9, phase=JobPhase.RUNNING)
    await submit(store, "j6")
    assert await heads(store, NOW) == ["j2", "j1", "j6"]
    assert await heads(store, NOW, 1) == ["j2"]
    assert await heads(store, after(60), 1) == ["j3"]
    assert await store.next_waiting(NOW) == after(60)
    assert await store.next_waiting(after(60)) is None
    assert [row.id for row in await store.queue.rows(after(60))] == ["j3", "j2", "j1", "j6"]
    assert [row.id for row in await store.queue.rows(NOW)] == ["j2", "j1", "j6"]
    found = await store.waiting(NOW, ["j6", "j4", "j1", "j9"])
    assert found == [await store.job("j6"), await store.job("j1")]


async def test_each_hour_of_waiting_counts_as_a_point_of_priority(store: Store) -> None:
    await submit(store, "j1", submitted_at=NOW)
    await submit(store, "j2", submitted_at=NOW + AGEING * 2 - timedelta(seconds=1), priority=2)
    await submit(store, "j3", submitted_at=NOW + AGEING * 2 + timedelta(seconds=1), priority=2)
    assert await heads(store, after(60)) == ["j2", "j1", "j3"]


async def test_heads_of_the_queue_are_limited_for_each_user(store: Store) -> None:
    gpus = ResourceSpec(accelerators=(AcceleratorNeed(name="A100", count_min=4),))
    for number, (project, user) in enumerate([("p", "ann")] * 3 + [("p", "bob"), ("q", "ann")]):
        task = TaskSpec(name="train", run="true", nodes=2, resources=gpus)
        await submit(store, f"j{number}", project=project, user=user, task=task)
    found = await store.queue.heads(NOW, 1)
    assert found == [
        QueueRow("j0", "p", "ann", 8.0),
        QueueRow("j3", "p", "bob", 8.0),
        QueueRow("j4", "q", "ann", 8.0),
    ]


async def test_how_long_gangs_held_their_nodes(store: Store) -> None:
    first = await submit(store, "j1", user="ann", name="train-2")
    for number, ran in ((1, None), (2, after(5)), (3, after(9))):  # the first attempt never ran
        done = {} if number == 3 else {"phase": AttemptPhase.ENDED, "ended_at": after(60)}
        await begin(store, first, number, running_at=ran, **done)
    await begin(
        store,
        await submit(store, "j2"),
        phase=AttemptPhase.ENDED,
        running_at=after(1),
        ended_at=after(7),
    )
    last, before = await store.queue.ended_gangs(9)
    assert (last.held, last.boot) == (timedelta(seconds=7), timedelta(seconds=1))
    assert (before.project, before.user, before.name) == (first.project, "ann", "train-2")
    assert (before.held, before.provider) == (timedelta(seconds=60), "fake")
    assert await store.queue.ended_gangs(1) == [last]


async def test_what_another_server_has_written_is_held(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other server has read what was held before, and does not know what is written."""
    other, user = HeldReader(), {"user": "ann", "attempt": 1, "phase": JobPhase.RUNNING}
    await store.put_host(make_host(devices=8, cpus=8))

    async def check(shares: list[HeldShare], *gangs: str) -> None:
        assert (await store._read(other.read_held))[0] == shares
        found = await store._read(other.read_allocations)
        assert [each.gang for each in found] == list(gangs)
        assert (await store.queue.held())[0] == shares
        assert await store.allocations() == found
        assert await store._read(other.read_allocations) is found  # unless something changes

    await check([])
    job = await submit(store, "j1", **user)
    held = make_allocation("g1", "GPU-0")
    first = make_attempt(job, gang="g1")
    await store.commit(AtomicWrite(attempts=[first], allocations=[held]))
    await check([HeldShare("p", "ann", WITHOUT_GPU, 1)], "g1")
    second = make_attempt(await submit(store, "j2", **user), gang="g2")
    ended = replace(first, phase=AttemptPhase.ENDED, version=1)
    again = replace(job, phase=JobPhase.QUEUED)
    swapped = AtomicWrite(
        jobs=[again],
        attempts=[ended, second],
        release=["g1"],
        allocations=[replace(held, gang="g2")],
    )
    await store.commit(swapped)
    await check([HeldShare("p", "ann", WITHOUT_GPU, 1)], "g2")
    await store.commit(AtomicWrite(jobs=[replace(await store.job("j2"), phase=JobPhase.QUEUED)]))
    await check([HeldShare("p", "ann", WITHOUT_GPU, 0)], "g2")
    monkeypatch.setattr("cavvy.store.held._AT_ONCE", 4)  # more are read in another way
    many = [await submit(store, f"k{n}", **{**user, "user": f"u{n % 2}"}) for n in range(6)]
    await store.commit(AtomicWrite(attempts=[make_attempt(each, gang=each.id) for each in many]))
    await check(
        [
            HeldShare("p", "ann", WITHOUT_GPU, 0),
            *(HeldShare("p", f"u{n}", 3 * WITHOUT_GPU, 3) for n in range(2)),
        ],
        "g2",
    )


async def test_the_queue_has_another_mark_only_if_its_order_may_have_changed(store: Store) -> None:
    """What nodes report changes no mark, so that nobody computes the order again because of it."""
    job, marks = await submit(store, "j1", attempt=1, phase=JobPhase.RUNNING), list[object]()

    async def is_new(now: datetime = NOW) -> bool:
        marks.append(await store.queue.mark(now))
        assert await store.queue.mark(now) == marks[-1]
        return len(marks) > 1 and marks[-1] != marks[-2]

    attempt = await begin(store, job, phase=AttemptPhase.RUNNING)
    node = make_node(attempt)
    await store.commit(AtomicWrite(nodes=[node]))
    assert not await is_new()
    told = replace(node, telemetry={"cpu_percent": 50.0}, last_seq=1, version=1)
    charge, event = make_charge(attempt, 7), make_event(job, "a note")
    await store.commit(AtomicWrite(nodes=[told], charges=[charge], events=[event]))
    assert not await is_new()
    await store.put_secret(SealedSecret(project="p", name="S", sealed=b"x", updated_at=NOW))
    assert not await is_new()
    waiting = await submit(store, "j2")
    assert await is_new()
    await store.commit(AtomicWrite(jobs=[replace(waiting, task=replace(waiting.task, priority=3))]))
    assert await is_new()
    await submit(store, "j3", not_before=after(60))
    assert not await is_new()
    assert not await is_new(after(59))
    assert await is_new(after(60))  # without any write
    await store.commit(AtomicWrite(attempts=[replace(attempt, phase=AttemptPhase.ENDED)]))
    assert await is_new(after(60))
    await store.put_policy("p", ProjectPolicy(share=2))
    assert await is_new(after(60))
    await store.add_project(Project(name="q", parent=None), adopt=False)
    assert await is_new(after(60))
    await store.queue.put_used({"p": ProjectUse(gpu_hours=1.5, held=2, at=NOW)})
    assert await is_new(after(60))
    part = ReservedPart("fake/h")
    hour = {"begins_at": NOW, "ends_at": after(3600)}
    await store.maintenance.add_reservation(
        Reservation(name="r", project="p", parts=(part,), **hour)
    )
    assert await is_new(after(60))


async def test_ended_jobs_are_counted_in_parts(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part in which nothing has changed is not read again, and all counts stay right."""
    monkeypatch.setattr("cavvy.store.ended_jobs.PART", 4)
    spans: list[Sequence[object]] = []
    real = ended_jobs._count

    def count(session: DatabaseSession, after: str, last: str) -> ended_jobs.Counts:
        spans.append((after, last))
        return real(session, after, last)

    monkeypatch.setattr(ended_jobs, "_count", count)
    done, failed = ("p", JobPhase.DONE), ("p", JobPhase.FAILED)

    async def counted(*read: tuple[str, str]) -> dict[object, int]:
        spans.clear()
        found = await store.ended_jobs.count()
        assert spans == [*read]
        assert found == await EndedJobs(store._read).count()  # as after a start of the server
        return dict(found)

    async def end(job_id: str, phase: JobPhase) -> None:
        await store.commit(AtomicWrite(jobs=[replace(await store.job(job_id), phase=phase)]))

    assert await counted() == {}
    for number in range(10):
        phase = JobPhase.DONE if number % 2 else JobPhase.QUEUED
        await submit(store, f"j{number}", phase=phase, user="ann")
    await submit(store, "q", project="q", phase=JobPhase.STOPPED)
    rest, first, second = ("j7", "q"), ("", "j3"), ("j3", "j7")
    assert await counted(first, second, rest) == {done: 5, ("q", JobPhase.STOPPED): 1}
    assert await counted(rest) == {done: 5, ("q", JobPhase.STOPPED): 1}
    await end("j4", JobPhase.FAILED)
    assert await counted(second, rest) == {done: 5, failed: 1, ("q", JobPhase.STOPPED): 1}
    await end("j4", JobPhase.QUEUED)  # it is retried
    await store.remove_job(await store.job("j1"))
    await end("j8", JobPhase.DONE)
    assert await counted(first, second, rest) == {done: 5, ("q", JobPhase.STOPPED): 1}
    await store.remove_job(await store.job("q"))
    assert await counted(rest) == {done: 5}
    store.ended_jobs.start_over()
    assert await counted(first, second, rest) == {done: 5}


async def test_what_ends_while_the_parts_are_counted_is_counted_the_next_time(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cavvy.store.ended_jobs.PART", 4)
    for number in range(6):
        await submit(store, f"j{number}", phase=JobPhase.QUEUED, user="ann")
    read = store.ended_jobs._read

    async def end_after_read(work: Callable[[DatabaseSession], Any]) -> Any:
        found = await read(work)
        for name in ending:
            job = await store.job(name)
            await store.commit(AtomicWrite(jobs=[replace(job, phase=JobPhase.DONE)]))
        return found

    monkeypatch.setattr(store.ended_jobs, "_read", end_after_read)
    ending = ["j1"]  # the server has just started, and all parts are new to it
    assert await store.ended_jobs.count() == {}
    ending = []
    assert await store.ended_jobs.count() == {("p", JobPhase.DONE): 1}
    store.ended_jobs.start_over()
    ending = ["j2"]
    assert await store.ended_jobs.count() == {("p", JobPhase.DONE): 1}
    for number in range(6, 8):
        await submit(store, f"j{number}", phase=JobPhase.QUEUED, user="ann")
    ending = ["j6"]  # the newest jobs have become a part
    assert await store.ended_jobs.count() == {("p", JobPhase.DONE): 2}
    ending = []
    assert await store.ended_jobs.count() == {("p", JobPhase.DONE): 3}


async def test_what_projects_hold_and_have_used(store: Store) -> None:
    job = await submit(store, "j1", user="ann", phase=JobPhase.RUNNING)
    attempt = await begin(store, job)
    kept = await submit(store, "j2", user="ann", phase=JobPhase.DONE)
    await begin(store, kept, phase=AttemptPhase.KEPT)
    await begin(store, await submit(store, "j3", project="q"), phase=AttemptPhase.ENDED)
    assert (await store.queue.held())[0] == [HeldShare("p", "ann", WITHOUT_GPU, 1, WITHOUT_GPU)]
    held = [
        HeldGang("p", "ann", share_of(attempt.offer, attempt.nodes, WITHOUT_GPU), idle=idle)
        for idle in (False, True)
    ]
    assert await store.queue.held_gangs() == held
    assert await store.queue.count_waiting("ann") == {}
    await store.commit(AtomicWrite(attempts=[replace(attempt, phase=AttemptPhase.ENDED)]))
    assert (await store.queue.held())[0] == [HeldShare("p", "ann", 0, 0, WITHOUT_GPU)]
    gangs = [await begin(store, job, number) for number in (2, 3)]  # one of them is a standby gang
    assert (await store.queue.held())[0] == [HeldShare("p", "ann", 2 * WITHOUT_GPU, 1, WITHOUT_GPU)]
    gangs.append(
        await begin(store, await submit(store, "j4", user="ann", attempt=1))
    )  # it waits again
    assert (await store.queue.held())[0] == [HeldShare("p", "ann", 3 * WITHOUT_GPU, 1, WITHOUT_GPU)]
    assert await store.queue.count_waiting("ann") == {"p": 1}
    ended = [replace(each, phase=AttemptPhase.ENDED) for each in gangs]
    await store.commit(AtomicWrite(attempts=ended))
    use = ProjectUse(gpu_hours=1.5, held=2, at=NOW)
    await store.queue.put_used({"p": use, "q": use})
    await store.queue.put_used({"q": replace(use, held=0)})
    assert await store.queue.used() == {"p": use, "q": replace(use, held=0)}
    damaged = [replace(use, gpu_hours=each) for each in (inf, -inf, -1, 1e300)]
    damaged += [replace(use, held=each) for each in (inf, -1)]
    await store.queue.put_used({str(number): each for number, each in enumerate(damaged)})
    assert await store.queue.used() == {"p": use, "q": replace(use, held=0)}


def test_a_damaged_use_is_no_use() -> None:
    """SQLite stores no NaN, but text in a column of numbers."""
    for row in ((nan, 0, 0), (0, nan, 0), (0, 0, 1 << 62), (0, 0, -(1 << 62)), ("x", 0, 0)):
        assert _read_use(*row) is None  # type: ignore[arg-type]  # a damaged row
    assert _read_use(1, 0, 0) is not None


async def test_jobs_of_machines_take_no_slot_of_other_jobs(store: Store) -> None:
    task = TaskSpec(name="train", run="true")
    urgent, busy, idle = (
        replace(task, machine=machine, priority=priority)
        for machine, priority in (("busy", 9), ("busy", 0), ("idle", 0))
    )
    for number in range(PER_MACHINE + 2):
        await submit(store, f"a{number}", task=urgent)
    await submit(store, "b1", task=idle)
    await submit(store, "q1", project="q", task=busy)
    await submit(store, "f0")
    assert await heads(store, NOW) == ["f0"]
    found = [job.id for job in await store.waiting(NOW, ["f0"])]
    assert found == ["f0", *(f"a{number}" for number in range(PER_MACHINE)), "b1", "q1"]
    found = [job.id for job in await store.waiting(NOW, (), PER_MACHINE + 1)]
    assert found == [*(f"a{number}" for number in range(PER_MACHINE + 1)), "b1", "q1"]


async def test_unfinished_jobs_have_work_or_an_open_attempt(store: Store) -> None:
    await submit(store, "j1")
    await submit(store, "j2", phase=JobPhase.DONE)
    job = await submit(store, "j3", phase=JobPhase.STOPPED)
    attempt = await begin(store, job, phase=AttemptPhase.ENDING)
    assert await store.unfinished() == ["j1", "j3"]
    await store.commit(AtomicWrite(attempts=[replace(attempt, phase=AttemptPhase.ENDED)]))
    assert await store.unfinished() == ["j1"]


async def test_the_installation_has_one_id(store: Store) -> None:
    assert await store.installation() == await store.installation() != ""


async def test_secrets_are_kept_by_project(store: Store) -> None:
    token = SealedSecret(project="p", name="TOKEN", sealed=b"\x00\xff", updated_at=NOW)
    await store.put_secret(token)
    await store.put_secret(replace(token, project="q"))
    await store.put_secret(replace(token, name="A", updated_at=after(1)))
    await store.put_secret(replace(token, sealed=b"new"))
    assert await store.secrets("p") == [
        replace(token, name="A", updated_at=after(1)),
        replace(token, sealed=b"new"),
    ]
    await store.delete_secret("p", "TOKEN")
    with pytest.raises(RowNotFound):
        await store.delete_secret("p", "TOKEN")
    assert await store.secrets("q") == [replace(token, project="q")]


async def test_jobs_are_searched_sorted_and_counted(store: Store) -> None:
    h100 = make_offer()
    h100 = replace(h100, provider="aws", accelerator="H100", accelerator_count=8)
    gpu = ResourceSpec(accelerators=(AcceleratorNeed(name="H100"),))
    first = await submit(store, "j1", name="train_1", user="ada", task=TaskSpec(name="t", run="x"))
    await begin(store, first, offer=h100)
    first = await store.job("j1")
    await store.commit(AtomicWrite(jobs=[replace(first, attempt=1)]))
    asks = TaskSpec(name="t", run="x", resources=gpu, tags={"team": 'vi"s%', "kind": "é"})
    await submit(store, "j2", name="eval-2", user="bob", task=asks, submitted_at=after(3600))
    await submit(store, "j3", name="train-3", project="q", user="ada")

    async def found(**wanted: object) -> list[str]:
        page = await store.search_jobs(JobSearch(**wanted), NOW)  # type: ignore[arg-type]
        assert page.total >= len(page.jobs)
        return [job.id for job in page.jobs]

    assert await found() == ["j3", "j2", "j1"]
    assert await found(projects="p") == ["j2", "j1"]
    assert await found(projects=["q"]) == ["j3"]
    assert await found(projects=[]) == []
    assert await found(user="ada") == ["j3", "j1"]
    assert await found(text="TRAIN") == ["j3", "j1"]
    assert await found(text="train_1") == ["j1"]
    assert await found(text="train_3") == [], "_ is no wildcard"
    assert await found(text="%") == ["j2"], "of a tag"
    assert await found(text='team=vi"') == ["j2"]
    assert await found(text="J2") == ["j2"]
    assert await found(jobs=["train_1", "j2", "gone"]) == ["j2", "j1"]
    assert await found(jobs=["j3"], projects="p") == []
    assert await found(tag="team") == ["j2"]
    assert await found(tag='team=vi"s%') == ["j2"]
    assert await found(tag="team=vi") == []
    assert await found(tag="kind=é") == ["j2"]
    assert await found(provider="aws") == ["j1"]
    assert await found(provider="a") == []
    assert await found(provider="%") == []
    assert await found(accelerators=["H100"]) == ["j2", "j1"], "has one, and asks for one"
    assert await found(accelerators=["A100", "H10"]) == []
    assert await found(since=after(60)) == ["j2"]
    assert await found(until=after(60)) == ["j3", "j1"]
    assert await found(since=after(3600)) == ["j2"]
    assert await found(until=after(3600)) == ["j3", "j1"]
    assert await found(phases=[JobPhase.DONE]) == []
    assert await found(order=JobOrder.NAME, ascending=True) == ["j2", "j3", "j1"]
    assert await found(order=JobOrder.USER) == ["j2", "j3", "j1"]
    for order in JobOrder:
        assert sorted(await found(order=order)) == ["j1", "j2", "j3"]
    page = await store.search_jobs(JobSearch(offset=1, limit=1), NOW)
    assert ([job.id for job in page.jobs], page.total) == (["j2"], 3)


async def test_attempts_with_gpus_are_those_of_recent_jobs(store: Store) -> None:
    offer = replace(make_offer(), accelerator="H100", accelerator_count=8)
    ended: dict[str, Any] = {"phase": JobPhase.DONE, "ended_at": NOW}
    for name, job in {"now": {}, "new": ended, "old": ended | {"ended_at": after(-3600)}}.items():
        stored = await submit(store, name, name=name, **job)
        gpu = make_attempt(stored, id=f"a-{name}", offer=offer)
        cpu = make_attempt(stored, 2, id=f"b-{name}")
        await store.commit(AtomicWrite(attempts=[gpu, cpu]))

    async def found(project: str | None = None, limit: int = 9) -> list[str]:
        read = await store.attempts_with_gpus(project, NOW - timedelta(minutes=1), limit)
        return [each.id for each in read]

    assert await found() == ["a-now", "a-new"]
    assert await found("p", 1) == ["a-now"]
    assert await found("other") == []


async def test_the_unfinished_jobs_with_a_range_of_nodes_are_found(store: Store) -> None:
    elastic = TaskSpec(name="train", run="true", elastic=NodeRange(least=1, most=4))
    await submit(store, "j1", name="fixed", task=TaskSpec(name="fixed", run='echo "elastic"'))
    await submit(store, "j2", name="wide", task=elastic)
    await submit(store, "j3", name="over", task=elastic)
    over = replace(await store.job("j3"), phase=JobPhase.DONE, ended_at=after(9))
    change = SizeChange(nodes=4, before=1, cause=SizeCause.GROW, at=after(1), attempt=1, rate=2.5)
    wide = replace(await store.job("j2"), sizing=change, untaken=(3,))
    await store.commit(AtomicWrite(jobs=[over, wide]))
    [found] = await store.elastic_jobs()
    assert (found.id, found.sizing, found.untaken) == ("j2", change, (3,))
