"""Figures of ranks over time, in every store."""

from datetime import timedelta

from tests.contract.store_suite import NOW, begin, submit

from cavvy.domain.events import Charge
from cavvy.domain.figures import FIGURES_DAYS, FigureBlock, FigureColumns
from cavvy.domain.jobs import Attempt, AttemptPhase, JobPhase
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace
from cavvy.store.base import AtomicWrite, LedgerFilter
from cavvy.store.figures import MERGED
from cavvy.store.sql import Store

FIRST = int(NOW.timestamp()) // 60
DAYS = timedelta(days=1)


def minute(attempt: Attempt, number: int, rank: int = 0, **values: float) -> FigureBlock:
    columns = {
        name: FigureColumns(low=[each - 1], mean=[each], high=[each + 1])
        for name, each in values.items()
    }
    return FigureBlock(attempt_id=attempt.id, rank=rank, minutes=[FIRST + number], columns=columns)


async def start(store: Store) -> Attempt:
    return await begin(store, await submit(store, "j1"))


async def read(store: Store, attempt: Attempt, rank: int = 0, **asked: object) -> list[FigureBlock]:
    limits = {"since": NOW - DAYS, "until": NOW + 40 * DAYS, **asked}
    return [*await store.figures.list(attempt.id, rank, **limits)]  # type: ignore[arg-type]


async def test_minutes_are_joined_to_days_and_read_by_rank_and_name(store: Store) -> None:
    attempt = await start(store)
    count = 24 * 60 + MERGED
    for at in range(0, count, 50):
        part = [minute(attempt, n, loss=n, step=1) for n in range(at, min(at + 50, count))]
        await store.commit(AtomicWrite(figures=part))
    await store.commit(AtomicWrite(figures=[minute(attempt, 0, rank=2, loss=7)]))
    assert await store.figures.ranks([attempt.id]) == [(attempt.id, 0), (attempt.id, 2)]
    assert await store.figures.ranks([]) == []
    blocks = await read(store, attempt)
    assert [each for block in blocks for each in block.minutes] == [FIRST + n for n in range(count)]
    assert 2 <= len(blocks) <= 2 + MERGED, "a block for each day, and single minutes"
    means = [each for block in blocks for each in block.columns["loss"].mean]
    assert all(abs(mean - n) <= n / 1000 for n, mean in enumerate(means))
    assert {
        name for block in await read(store, attempt, names=["step"]) for name in block.columns
    } == {"step"}
    late = await read(store, attempt, since=NOW + timedelta(minutes=count))
    assert len(late) < len(blocks)
    assert await read(store, attempt, until=NOW - DAYS / 2) == []


async def test_a_minute_that_comes_twice_replaces_nothing(store: Store) -> None:
    attempt = await start(store)
    await store.commit(AtomicWrite(figures=[minute(attempt, n, loss=n) for n in range(2 * MERGED)]))
    before = await read(store, attempt)
    await store.commit(AtomicWrite(figures=[minute(attempt, 0, loss=99)]))
    assert await read(store, attempt) == before


async def test_old_figures_are_forgotten_in_parts(store: Store) -> None:
    attempt = await start(store)
    kept = FIGURES_DAYS * 24 * 60
    await store.commit(
        AtomicWrite(figures=[minute(attempt, n, loss=1) for n in (0, 1, 1440, 1442)])
    )
    now = NOW + timedelta(minutes=kept + 1440 + 5)
    assert await store.figures.forget(now, 1)
    assert await store.figures.forget(now, 10)
    assert not await store.figures.forget(now, 10)
    assert [each.minutes[0] - FIRST for each in await read(store, attempt)] == [1440, 1442]


async def test_figures_go_with_their_job(store: Store) -> None:
    attempt = await start(store)
    await store.commit(AtomicWrite(figures=[minute(attempt, 0, loss=1)]))
    await store.commit(AtomicWrite(attempts=[replace(attempt, phase=AttemptPhase.ENDED)]))
    job = replace(await store.job("j1"), phase=JobPhase.DONE, ended_at=NOW)
    await store.commit(AtomicWrite(jobs=[job]))
    await store.remove_job(await store.job("j1"))
    assert await store.figures.ranks([attempt.id]) == []


async def test_energy_is_added_once_and_bounded(store: Store) -> None:
    attempt = await start(store)
    charge = Charge(
        project=attempt.project,
        job_id=attempt.job_id,
        attempt_id=attempt.id,
        rank=0,
        since=NOW,
        until=NOW + DAYS,
        rate=HourlyRate(),
        amount=Money(),
    )
    await store.commit(AtomicWrite(charges=[charge]))
    told = (1500.4, 1e300, -5.0, 100.0)
    blocks = [minute(attempt, n, work_energy_j=each) for n, each in enumerate(told)]
    await store.commit(AtomicWrite(figures=[*blocks, minute(attempt, 4, loss=7)]))
    await store.commit(
        AtomicWrite(figures=[blocks[0], minute(attempt, 0, rank=2, work_energy_j=1)])
    )
    joules = 1500 + 3_000_000 + 100 + 1
    assert await store.meters.energy_of([attempt.id, "x"]) == {attempt.id: joules}
    assert await store.meters.energy_of([]) == {}
    which = LedgerFilter(projects=attempt.project)
    ((group, (use,)),) = (await store.meters.sum_energy(which, ("project", "kind"))).items()
    assert (group, use.joules) == ((attempt.project, "node"), joules)
    assert use.provider == attempt.offer.provider
    other = replace(which, projects="other")
    assert await store.meters.sum_energy(other, ("region",)) == {}
