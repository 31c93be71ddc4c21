"""Values of steps in each kind of store."""

from collections.abc import Sequence
from datetime import timedelta

import pytest
from tests.contract.store_suite import NOW, make_attempt, submit

from cavvy.capabilities.curves import rows as curve_rows
from cavvy.capabilities.curves.kept import KeptBriefs
from cavvy.capabilities.curves.reduce import make_curves
from cavvy.capabilities.curves.rows import (
    read_keys,
    read_params,
    read_pieces,
    read_pieces_of_jobs,
    read_ranks,
)
from cavvy.capabilities.curves.wire import Curve
from cavvy.domain.figures import StepSeries, StepValues
from cavvy.domain.jobs import AttemptPhase
from cavvy.domain.retention import RemovedJob
from cavvy.store.base import AtomicWrite
from cavvy.store.drivers import DatabaseSession
from cavvy.store.sql import Store


async def write(store: Store, *numbers: int, attempt: str = "a1", rank: int = 0) -> None:
    for number in numbers:
        series = [StepSeries(["loss"], [[number, 0, 1 / number]])]
        at = NOW + timedelta(seconds=number)
        told = StepValues(attempt_id=attempt, rank=rank, at=at, number=number, series=series)
        await store.commit(AtomicWrite(steps=[told]))


async def read(store: Store, attempt: str = "a1", rank: int = 0) -> Sequence[Curve]:
    pieces = await store.database[0](read_pieces(attempt, rank, KeptBriefs()))
    return make_curves(pieces, 1, rank, (), 100_000)


async def count(store: Store) -> int:
    sql = "SELECT COUNT(*) FROM curves"
    return int((await store.database[0](lambda session: session.run(sql).fetchall()))[0][0])


async def test_values_come_back_in_their_order(store: Store) -> None:
    await write(store, 1, 2, 3)
    await write(store, 2, rank=1)
    [curve] = await read(store)
    assert (curve.steps, curve.values) == ([1, 2, 3], [1, 1 / 2, 1 / 3])
    assert curve.times_ms == [
        int((NOW + timedelta(seconds=n)).timestamp() * 1000) for n in (1, 2, 3)
    ]
    assert await store.database[0](read_ranks(["a1", "a2"])) == [("a1", 0), ("a1", 1)]
    assert await store.database[0](read_ranks([])) == []


async def test_pieces_are_joined_and_nothing_is_lost(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curve_rows, "JOINED", 4)
    monkeypatch.setattr(curve_rows, "FULL", 100)
    await write(store, *range(1, 300))
    [curve] = await read(store)
    assert curve.steps == [*range(1, 300)]
    assert await count(store) <= 24
    sql = "SELECT rows_count FROM curves WHERE brief IS NOT NULL"
    full = await store.database[0](lambda session: session.run(sql).fetchall())
    assert [row[0] for row in full] == [4 * 8 * 8], "a piece of 100 rows or more is full"


async def test_brief_versions_that_are_kept_are_not_read_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curve_rows, "JOINED", 4)
    monkeypatch.setattr(curve_rows, "FULL", 100)
    await write(store, *range(1, 600))
    kept, ask = KeptBriefs(), store.database[0]
    first = await ask(read_pieces("a1", 0, kept, briefly=True))
    count = sum(each.brief is not None for each in first)
    assert count >= 2

    def spoil(session: DatabaseSession) -> None:
        session.run("UPDATE curves SET brief = ? WHERE brief IS NOT NULL", [b"spoilt"])

    await store.database[1](spoil)
    again = await ask(read_pieces("a1", 0, kept, briefly=True))
    assert make_curves(again, 1, 0, (), 500) == make_curves(first, 1, 0, (), 500)
    assert [each.brief for each in again] == [each.brief for each in first]
    assert await ask(read_keys(["a1"], 1, kept)) == {"loss"}


async def test_the_names_are_read_from_pieces_of_all_kinds(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await store.database[0](read_keys([], 8, KeptBriefs())) == set()
    await write(store, 1)
    await write(store, 2, rank=9)
    assert await store.database[0](read_keys(["a1"], 8, KeptBriefs())) == {"loss"}
    monkeypatch.setattr(curve_rows, "FULL", 1)
    await write(store, 1, attempt="full")
    assert await store.database[0](read_keys(["full"], 8, KeptBriefs())) == {"loss"}


async def test_a_message_that_is_sent_again_counts_once(store: Store) -> None:
    await write(store, 1, 1)
    [curve] = await read(store)
    assert curve.count == 1


async def test_a_rank_has_no_more_than_its_space(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curve_rows, "JOINED", 4)
    monkeypatch.setattr(curve_rows, "MOST_BYTES", 600)
    await write(store, *range(1, 400))
    [curve] = await read(store)
    assert curve.steps == [*range(1, curve.count + 1)]
    assert curve.count < 399


async def test_a_rank_has_no_more_than_its_settings(store: Store) -> None:
    """An agent that is not ours may send new names forever."""
    sent = [f"n{number:03}" for number in range(curve_rows.MOST_PARAMS + 1)]
    for number, names in enumerate((sent[:200], sent[200:], sent[:1])):
        params = {name: str(number) for name in names}
        told = StepValues(attempt_id="a1", rank=0, at=NOW, number=number, series=[], params=params)
        await store.commit(AtomicWrite(steps=[told]))
    job = await submit(store, "j1")
    await store.commit(AtomicWrite(attempts=[make_attempt(job, id="a1")]))
    found = (await store.database[0](read_params(["j1"])))["j1"]
    assert sorted(found) == sent[:256]
    assert found["n000"] == "2", "a known setting may change"


async def test_the_pieces_of_several_jobs_are_read_at_once(store: Store) -> None:
    for number in (1, 2):
        job = await submit(store, f"j{number}")
        attempts = [make_attempt(job, each, id=f"a{number}{each}") for each in (1, 2)]
        await store.commit(AtomicWrite(attempts=attempts))
    for attempt in ("a12", "a11", "a21"):
        await write(store, 1, attempt=attempt)
    await write(store, 1, attempt="a22", rank=1)
    found = await store.database[0](read_pieces_of_jobs(["j1", "j2", "gone"]))
    assert {job_id: len(own) for job_id, own in found.items()} == {"j1": 2, "j2": 1}
    assert await store.database[0](read_pieces_of_jobs([])) == {}


async def test_curves_are_removed_with_their_job(store: Store) -> None:
    job = await submit(store, "j1")
    await store.commit(AtomicWrite(attempts=[make_attempt(job, id="a1", phase=AttemptPhase.ENDED)]))
    await write(store, 1)
    await write(store, 1, attempt="other")
    [known] = await store.find_jobs([job.id])
    await store.remove_job(known)
    assert await read(store) == []
    assert len(await read(store, "other")) == 1
    await write(store, 2)  # of a node that still reports
    ended = RemovedJob(
        job_id=job.id,
        project=job.project,
        name="",
        ended_at=NOW,
        removed_at=NOW,
        rule="days",
        days=1,
    )
    assert await store.retention.purge(ended)
    assert await read(store) == []
