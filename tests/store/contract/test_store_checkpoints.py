"""Checkpoints of a job: numbered, the newest few kept, none of an attempt that is behind."""

import asyncio

import pytest
from tests.contract.store_suite import NOW, after, begin, make_attempt, submit

from cavvy.domain.checkpoints import SavedCheckpoint
from cavvy.domain.values import replace
from cavvy.store.base import AtomicWrite, RowNotFound, StaleVersion
from cavvy.store.sql import Store


def make_checkpoint(job_id: str = "j", manifest: str = "m1", **fields: object) -> SavedCheckpoint:
    saved = SavedCheckpoint(
        job_id=job_id,
        project="p",
        attempt=1,
        manifest=manifest,
        files=2,
        bytes=1 << 40,
        made_at=NOW,
        saved_at=after(1),
    )
    return replace(saved, **fields)  # type: ignore[arg-type]  # any field


async def save(store: Store, saved: SavedCheckpoint) -> SavedCheckpoint:
    return await store.save_checkpoint(saved, on_behalf=saved.attempt)


async def test_the_newest_two_are_kept(store: Store) -> None:
    await submit(store, "j")
    await submit(store, "k", name="other")
    assert list(await store.checkpoints("j")) == []
    first = await save(store, make_checkpoint())
    assert first == make_checkpoint(number=1)
    for number in (2, 3, 4):
        saved = await save(store, make_checkpoint(manifest=f"m{number}", saved_at=after(number)))
        assert saved.number == number
    assert [each.number for each in await store.checkpoints("j")] == [4, 3]
    assert (await store.checkpoints("j"))[0] == saved
    assert list(await store.checkpoints("k")) == []
    assert (await save(store, make_checkpoint("k"))).number == 1
    assert len(await store.checkpoints("j")) == 2


async def test_the_same_again_is_no_news(store: Store) -> None:
    await submit(store, "j")
    first = await save(store, make_checkpoint())
    assert await save(store, make_checkpoint(saved_at=after(9))) == first
    assert list(await store.checkpoints("j")) == [first]
    assert (await save(store, make_checkpoint(attempt=2))).number == 2
    assert (await save(store, make_checkpoint(attempt=2, manifest="m2"))).number == 3
    assert (await save(store, make_checkpoint(attempt=2))).number == 4


async def test_an_attempt_that_is_behind_saves_nothing(store: Store) -> None:
    job = await submit(store, "j")
    await begin(store, job)
    await save(store, make_checkpoint())
    later = replace(await store.job("j"), attempt=2)
    await store.commit(AtomicWrite(jobs=[later], attempts=[make_attempt(job, 2)]))
    with pytest.raises(StaleVersion):
        await save(store, make_checkpoint(manifest="m2"))
    assert [each.manifest for each in await store.checkpoints("j")] == ["m1"]
    taken = make_checkpoint(manifest="m2")
    await store.save_checkpoint(taken, on_behalf=2)  # for a later attempt, what an earlier one left
    assert (await store.checkpoints("j"))[0] == replace(taken, number=2)


async def test_another_projects_job_is_not_there(store: Store) -> None:
    await submit(store, "j")
    for saved in (make_checkpoint("nobody"), make_checkpoint(project="q")):
        with pytest.raises(RowNotFound):
            await save(store, saved)
    assert list(await store.checkpoints("j")) == []


async def test_many_at_once_get_their_own_numbers(store: Store) -> None:
    await submit(store, "j")
    saved = await asyncio.gather(
        *(save(store, make_checkpoint(manifest=f"m{n}")) for n in range(20))
    )
    assert sorted(each.number for each in saved) == list(range(1, 21))
    assert [each.number for each in await store.checkpoints("j")] == [20, 19]
