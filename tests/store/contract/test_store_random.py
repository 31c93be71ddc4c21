"""Memory and SQLite do the same with any writes, one after the other or many at once in one
group commit.
"""

import asyncio
import tempfile
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract import store_suite

from cavvy.domain.jobs import AttemptPhase, JobPhase, RunOrigin
from cavvy.domain.shares import HeldShare
from cavvy.domain.values import replace
from cavvy.store.base import AtomicWrite, RowNotFound, StoreError
from cavvy.store.held import HeldReader
from cavvy.store.sql import Store

JOBS, NUMBERS, RANKS = 3, 2, 2
small = st.integers(0, 2)
drift = st.sampled_from([0, 0, 0, 0, 0, 0, 1, -1])  # of a version from the right one


@dataclass(frozen=True)
class Write:
    """One row of a `AtomicWrite`, by small numbers; what they mean hangs on what the store holds
    already.
    """

    kind: str
    job: int
    number: int
    rank: int
    drift: int
    phase: int
    amount: int


writes = st.builds(
    Write,
    kind=st.sampled_from(
        ["job", "attempt", "node", "event", "charge", "charge", "hold", "release"]
    ),
    job=st.integers(0, JOBS - 1),
    number=st.integers(1, NUMBERS),
    rank=st.integers(0, RANKS - 1),
    drift=drift,
    phase=st.integers(0, 6),
    amount=st.integers(0, 5),
)
submissions = st.tuples(st.integers(0, JOBS - 1), st.sampled_from(["train", "train-2", "other"]))
steps = st.lists(
    st.one_of(submissions, st.lists(writes, min_size=1, max_size=4)), min_size=1, max_size=5
)


async def plan(
    memory: Store, step: "tuple[int, str] | list[Write]", salt: int
) -> AtomicWrite | tuple[int, str]:
    """The step as rows, with versions near those that are stored now."""
    if isinstance(step, tuple):
        return step
    rows: dict[str, list[object]] = {}
    for write in step:
        name, row = await make_row(memory, write, salt)
        rows.setdefault(name, []).append(row)
    return AtomicWrite(**rows)  # type: ignore[arg-type]


async def make_row(memory: Store, write: Write, salt: int) -> tuple[str, object]:
    job = store_suite.make_job(f"j{write.job}", name="other", attempt=1)
    version = 0
    try:
        job = await memory.job(job.id)
        version = job.version
    except RowNotFound:
        pass
    attempt = store_suite.make_attempt(job, write.number, gang=f"g{write.job}{write.number}")
    match write.kind:
        case "job":
            phase = list(JobPhase)[write.phase]
            not_before = store_suite.after(write.amount) if write.amount > 2 else None
            version = max(0, version + write.drift)
            origin = RunOrigin(snapshot=str(salt)) if write.amount == 0 else job.origin
            changed = replace(
                job, phase=phase, reason=str(salt), not_before=not_before, origin=origin
            )
            return "jobs", replace(changed, version=version)
        case "attempt":
            stored = [a for a in await memory.attempts(job.id) if a.number == write.number]
            version = max(0, (stored[0].version if stored else 0) + write.drift)
            return "attempts", replace(
                attempt, phase=list(AttemptPhase)[write.phase % 5], version=version
            )
        case "node":
            found = [n for n in await memory.nodes(attempt.id) if n.rank == write.rank]
            version = max(0, (found[0].version if found else 0) + write.drift)
            return "nodes", store_suite.make_node(
                attempt, write.rank, last_seq=salt, version=version
            )
        case "event":
            return "events", store_suite.make_event(job, str(salt))
        case "charge":
            return "charges", store_suite.make_charge(
                attempt, write.amount, rank=write.rank, since=write.phase % 2
            )
        case "hold":
            devices = [f"GPU-{i}" for i in range(3) if write.phase & (1 << i)]
            return "allocations", store_suite.make_allocation(
                attempt.gang, *devices, rank=write.rank, cpus=write.amount / 2
            )
    return "release", attempt.gang


def do(store: Store, planned: AtomicWrite | tuple[int, str], salt: int) -> Awaitable[object]:
    if isinstance(planned, AtomicWrite):
        return store.commit(planned)
    job = store_suite.make_job(f"j{planned[0]}", name=planned[1], user=str(salt), attempt=1)
    return store.submit(job, store_suite.make_event(job))


async def told(result: Awaitable[object]) -> object:
    """What it returns, or the kind of its error."""
    try:
        return await result
    except StoreError as error:
        return type(error)


async def everything(store: Store) -> object:
    """All that can be read."""
    page = await store.list_jobs(None)
    jobs = [await store.job(summary.id) for summary in page.jobs]
    attempts = [attempt for job in jobs for attempt in await store.attempts(job.id)]
    by_job = [[await store.events(job.id), await store.charges(job.id)] for job in jobs]
    phases = {JobPhase.QUEUED, JobPhase.FAILED, JobPhase.RUNNING}
    return [
        page,
        jobs,
        attempts,
        by_job,
        [await store.nodes(attempt.id) for attempt in attempts],
        await store.queue.rows(store_suite.after(60)),
        await store.queue.heads(store_suite.after(4), 2),
        await store.queue.held(),
        await store.list_jobs("p", phases, limit=2),
        await store.count_jobs("p"),
        await store.waiting(store_suite.NOW, [job.id for job in jobs]),
        await store.next_waiting(store_suite.NOW),
        await store.unfinished(),
        await store.open_attempts("p"),
        await store.spent("p"),
        await store.spent("p", store_suite.after(1)),
        await store.allocations(),
        set(await store.snapshots()),
    ]


HELD = """
    SELECT a.project, j.user_name, SUM(CASE a.phase WHEN 'kept' THEN 0 ELSE j.size END),
    COUNT(DISTINCT CASE WHEN a.phase <> 'kept' AND j.phase <> 'queued' THEN j.id END),
    SUM(CASE a.phase WHEN 'kept' THEN j.size ELSE 0 END)
    FROM attempts a JOIN jobs j ON j.id = a.job_id WHERE a.phase <> 'ended'
    GROUP BY a.project, j.user_name ORDER BY a.project, j.user_name
"""


async def check_held(store: Store, another: HeldReader) -> None:
    """What is held is the same as if all of it were read again, for the server that writes and for
    another one."""
    held = (await store.queue.held())[0]
    assert held == await store._read(lambda s: [HeldShare(*row) for row in s.run(HELD).fetchall()])
    assert (await store._read(another.read_held))[0] == held
    assert await store.allocations() == await store._read(HeldReader().read_allocations)


async def begin_all(store: Store) -> None:
    """A host, and two jobs of three with an attempt each: most random writes then find what they
    need.
    """
    await store.put_host(store_suite.make_host(devices=2, cpus=3))
    for i in range(JOBS - 1):
        job = store_suite.make_job(f"j{i}", attempt=1)
        await store.submit(job, store_suite.make_event(job))
        await store.commit(AtomicWrite(attempts=[store_suite.make_attempt(job, gang=f"g{i}1")]))


async def compare(groups: Sequence[list["tuple[int, str] | list[Write]"]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        memory, sql = (
            store_suite.make_store("memory", Path(folder)),
            store_suite.make_store("sqlite-wal", Path(folder)),
        )
        await sql.open()
        try:
            for store in (memory, sql):
                await begin_all(store)
            another = HeldReader()
            for salt, group in enumerate(groups):
                planned = [await plan(memory, step, salt) for step in group]
                wanted = [await told(do(memory, each, salt)) for each in planned]
                assert (
                    await asyncio.gather(*(told(do(sql, each, salt)) for each in planned)) == wanted
                )
                assert await everything(sql) == await everything(memory)
                await check_held(sql, another)
        finally:
            await sql.close()


@settings(max_examples=80, deadline=None)
@given(st.lists(steps, min_size=1, max_size=8))
def test_memory_and_sqlite_agree(groups: list[list["tuple[int, str] | list[Write]"]]) -> None:
    asyncio.run(compare(groups))
