"""Ended jobs whose rows are deleted, and the sums that stay, in every store."""

import pytest
from tests.contract.store_suite import (
    after,
    begin,
    make_charge,
    make_event,
    make_job,
    make_node,
    submit,
)

from cavvy.domain.audit import AuditEntry, check_chain
from cavvy.domain.jobs import FAR, AttemptPhase, JobPhase, JobRecord
from cavvy.domain.ledger import LedgerSubject
from cavvy.domain.retention import EndedJob, RemovedJob
from cavvy.domain.tasks import IndexRange, JobDependency, StartCondition, TaskSpec
from cavvy.domain.values import replace
from cavvy.domain.volumes import VolumeBill
from cavvy.store.arrays import NewJob
from cavvy.store.base import (
    AtomicWrite,
    DependencyMissing,
    LedgerFilter,
    RowNotFound,
    StaleVersion,
)
from cavvy.store.sql import Store

BY = ("project", "job", "user", "kind")


async def end(store: Store, job_id: str, at: float, **fields: object) -> JobRecord:
    """Make a job with a bill that ended at this time."""
    tags = {"team": job_id[-1]}
    task = TaskSpec(name="train", run="true", tags=tags)
    job = await submit(store, job_id, name=f"train-{job_id}", task=task, **fields)
    attempt = await begin(store, job)
    await store.commit(AtomicWrite(nodes=[make_node(attempt)], charges=[make_charge(attempt, 333)]))
    ended = replace(attempt, phase=AttemptPhase.ENDED, version=1)
    job = replace(await store.job(job_id), phase=JobPhase.DONE, ended_at=after(at))
    await store.commit(AtomicWrite(jobs=[job], attempts=[ended]))
    return await store.job(job_id)


def removal(job: JobRecord) -> RemovedJob:
    assert job.ended_at is not None
    return RemovedJob(
        job_id=job.id,
        project=job.project,
        name=job.name,
        ended_at=job.ended_at,
        removed_at=after(9000),
        rule="retention.jobs_days",
        days=90,
    )


async def purge(store: Store, job: JobRecord) -> bool:
    await store.remove_job(job)
    return await store.retention.purge(removal(job))


async def test_ended_jobs_are_listed_by_their_end_in_pages(store: Store) -> None:
    for job_id, at in (("j1", 30), ("j2", 10), ("j3", 10), ("j4", 99)):
        await end(store, job_id, at)
    await submit(store, "j5", name="waits")
    await store.remove_job(await store.job("j3"))
    listed = store.retention.list_ended
    page = await listed("p", after(50), None, 2)
    assert page == [
        EndedJob(id="j2", ended_at=after(10), removed=False),
        EndedJob(id="j3", ended_at=after(10), removed=True),
    ]
    assert [each.id for each in await listed("p", after(50), page[-1], 2)] == ["j1"]
    assert await listed("other", after(50), None, 2) == []


async def test_a_purged_job_leaves_its_sums_and_the_reason(store: Store) -> None:
    jobs = [await end(store, f"j{n}", n) for n in (1, 2, 3)]
    asked = [
        (LedgerFilter(), BY),
        (LedgerFilter(projects="p"), ()),
        (LedgerFilter(projects="p", since=after(7), until=after(60)), ("tags", "month")),
        (LedgerFilter(tag=("team", "1")), ("job",)),
    ]
    before = [await store.sum_ledger(*each) for each in asked]
    lines = await store.ledger_lines(LedgerFilter())
    assert before[0]
    assert lines
    for job in jobs[:2]:
        assert await purge(store, job)
    assert [await store.sum_ledger(*each) for each in asked] == before
    assert await store.ledger_lines(LedgerFilter()) == lines
    assert (await store.spent("p")).micros == 999
    assert await store.attempts("j1") == []
    assert await store.charges("j1") == []
    with pytest.raises(RowNotFound):
        await store.find_job("p", "train-j1")
    for name in ("train-j1", "j1"):
        assert await store.retention.find_removed("p", name) == removal(jobs[0])
    assert await store.retention.find_removed("other", "train-j1") is None
    assert await store.retention.purge(removal(jobs[0]))  # as after a crash
    again = await submit(store, "j9", name="train-j1")
    assert again.name == "train-j1"
    assert (await store.job("j3")).name == "train-j3"


async def test_jobs_that_users_removed_leave_no_reason(store: Store) -> None:
    job = await end(store, "j1", 1)
    await store.remove_job(job)
    assert await store.retention.purge(replace(removal(job), name=""))
    assert await store.retention.find_removed("p", "j1") is None
    assert (await store.spent("p")).micros == 333


async def test_a_job_on_a_gang_in_use_keeps_its_bill(store: Store) -> None:
    job = await end(store, "j1", 1)
    [first] = await store.attempts("j1")
    other = await submit(store, "j2", name="next")
    later = await begin(store, other, gang=f"{first.bought_as}@2")
    assert not await purge(store, job)
    assert (await store.gang_spent(first.bought_as)).micros == 333
    await store.commit(AtomicWrite(attempts=[replace(later, phase=AttemptPhase.ENDED, version=1)]))
    assert await store.retention.purge(removal(job))


async def test_a_job_stays_while_another_waits_for_it(store: Store) -> None:
    job = await end(store, "j1", 1)
    waits = (JobDependency("train-j1"), JobDependency("j1", StartCondition.ANY))
    with pytest.raises(DependencyMissing, match="project p has no job train-j9"):
        await submit(store, "j3", name="c", after=(JobDependency("train-j9"),))
    with pytest.raises(DependencyMissing):
        await submit(store, "j3", name="c", project="q", after=waits[:1])
    later = await submit(store, "j2", name="b", not_before=FAR, after=waits)
    assert later == await store.job("j2")
    assert [(each.job, each.id) for each in later.after] == [("train-j1", "j1")] * 2
    assert await store.dependencies.phases(later.after) == {"j1": JobPhase.DONE}
    assert await store.queue.rows(after(9)) == []
    assert not await purge(store, job)
    with pytest.raises(DependencyMissing):
        await submit(store, "j3", name="c", after=(JobDependency("j1"),))
    for waiting in (store.dependencies.waiting, store.dependencies.concerned):
        assert await waiting(job) == ["j2"]
    await store.commit(AtomicWrite(jobs=[replace(later, after=(), not_before=None)]))
    assert await store.dependencies.waiting(job) == []
    assert [each.id for each in await store.queue.rows(after(9))] == ["j2"]
    assert await store.retention.purge(removal(job))
    assert await store.dependencies.phases(later.after) == {}


async def test_several_jobs_are_stored_together_or_not_at_all(store: Store) -> None:
    taken = await submit(store, "j0", name="a")
    a, b = make_job("j1", name="a"), make_job("j2", name="b", after=(JobDependency("a", id="j1"),))
    members = {"m0": 0, "m1": 1}
    task = TaskSpec(name="c", run="true", array=(IndexRange(0, 1),))
    c = make_job("j3", name="c", task=task, array_id="j3", after=(JobDependency("b", id="j2"),))
    last = make_job("j4", name="d", after=(JobDependency("c", id="j3"),))
    jobs = [NewJob(job=each, event=make_event(each)) for each in (a, b, c, last)]
    jobs[2] = replace(jobs[2], members=members)
    await store.submit_all(jobs)
    assert (await store.job("j1")).name == "a-2"
    assert (await store.job("j2")).after == (JobDependency("a-2", id="j1"),)
    assert (await store.job("m1")).after == (JobDependency("b", id="j2"),)
    assert (await store.job("j4")).after == (JobDependency("c", id="j3"),)
    assert set(await store.dependencies.phases((await store.job("j4")).after)) == {"j3"}
    e, wrong = make_job("j5", name="e"), make_job("j6", name="f", after=(JobDependency("g"),))
    with pytest.raises(DependencyMissing):
        await store.submit_all([NewJob(job=each, event=make_event(each)) for each in (e, wrong)])
    with pytest.raises(StaleVersion):
        await store.submit_all([NewJob(job=each, event=make_event(each)) for each in (e, a)])
    found = await store.list_jobs("p")
    assert {each.id for each in found.jobs} == {taken.id, "j1", "j2", "j4", *members}


async def test_a_job_whose_volume_has_a_bill_keeps_its_charges(store: Store) -> None:
    job = await end(store, "j1", 1)
    [attempt] = await store.attempts("j1")
    subject = LedgerSubject(
        id="volume:v",
        project="p",
        user="",
        provider="aws",
        account="aws",
        region="r",
        zone="",
        instance_type="",
        purchase="on-demand",
        tags={},
        volume="v",
    )
    bill = VolumeBill(subject=subject, since=after(0), seen_at=after(0), gangs=(attempt.gang,))
    bill = await store.meters.put_volume(bill, [])
    assert not await purge(store, job)
    assert await store.charges("j1")
    await store.meters.put_volume(replace(bill, gangs=()), [])
    assert await store.retention.purge(removal(job))


async def test_removed_jobs_are_forgotten_later(store: Store) -> None:
    for number in (1, 2):
        assert await purge(store, await end(store, f"j{number}", number))
    await store.retention.forget_removed(after(9000), 9)
    assert await store.retention.find_removed("p", "j1")
    await store.retention.forget_removed(after(9001), 1)
    found = [await store.retention.find_removed("p", f"j{number}") for number in (1, 2)]
    assert sum(each is not None for each in found) == 1


async def test_a_job_that_was_not_removed_is_not_purged(store: Store) -> None:
    job = await end(store, "j1", 1)
    with pytest.raises(ValueError, match="must be removed"):
        await store.retention.purge(removal(job))
    assert await store.job("j1") == job


async def test_shrinking_changes_no_rows(store: Store) -> None:
    job = make_job("j1")
    await store.commit(AtomicWrite(jobs=[job]))
    await store.retention.shrink(1)
    assert 0 < await store.retention.size_mib() < 100
    assert (await store.job("j1")).id == "j1"


async def test_old_audit_records_are_removed_and_the_chain_stays_intact(store: Store) -> None:
    def make_entry(at: float) -> AuditEntry:
        return AuditEntry(at=after(at), signed_in=True, action="PUT /v1/x", account="ada")

    async def numbers() -> list[int]:
        return [each.number for each in await store.audit_records()]

    for number in range(1, 9):
        await store.record(make_entry(number))
    change = store._change
    with pytest.raises(Exception, match="append-only"):
        await change("DELETE FROM audit_log WHERE number = 1")
    assert await store.retention.oldest_audit() == after(1)
    cut = store.retention.cut_audit
    assert not await cut(after(1), after(99), 365, 3)
    assert await cut(after(6), after(99), 365, 3)
    assert await numbers() == [4, 5, 6, 7, 8, 9]
    assert await cut(after(6), after(99), 365, 3)
    assert await numbers() == [6, 7, 8, 9, 10]
    assert not await cut(after(6), after(99), 365, 3)
    list(check_chain(await store.audit_records()))
    for sql in (
        "DELETE FROM audit_log WHERE number = 6",
        "UPDATE audit_log SET account = 'x'",
        "DELETE FROM audit_cuts",
        "UPDATE audit_cuts SET number = 9",
    ):
        with pytest.raises(Exception, match=r"append-only|only added"):
            await change(sql)
    await store.record(make_entry(100))
    assert (await numbers())[-1] == 11
    list(check_chain(await store.audit_records()))
    # the newest record stays at any age, so that the next one can follow it
    while await cut(after(1000), after(2000), 365, 100):
        if len(await numbers()) == 1:
            break
    list(check_chain(await store.audit_records()))


async def test_nothing_is_cut_from_an_empty_log(store: Store) -> None:
    assert await store.retention.oldest_audit() is None
    assert not await store.retention.cut_audit(after(9), after(9), 365, 3)
    assert await store.audit_records() == []
