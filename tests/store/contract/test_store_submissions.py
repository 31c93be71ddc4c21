"""Submissions that PostgreSQL stores together, in one transaction."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.contract.store_suite import make_event, make_job, store_url, submit

from cavvy.domain.values import replace
from cavvy.store.base import HashMismatch, StaleVersion
from cavvy.store.sql import Store


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    opened = Store(store_url("postgres", tmp_path))
    await opened.open()
    yield opened
    await opened.close()


async def test_jobs_submitted_together_get_names_and_events_of_their_own(store: Store) -> None:
    await submit(store, "j-taken", name="train-3")
    other = Store(store._url)
    await other.open()
    stored = await asyncio.gather(
        *(submit(each, f"j{n:02}-{k}") for n in range(20) for k, each in enumerate((store, other)))
    )
    await other.close()
    names = {job.name for job in stored}
    assert names == {"train", *(f"train-{n}" for n in range(2, 42) if n != 3)}
    for job in stored:
        assert await store.job(job.id) == job
        assert [event.text for event in await store.events(job.id)] == ["submitted"]


async def test_one_that_cannot_be_stored_does_not_stop_the_others(store: Store) -> None:
    await submit(store, "j-known")
    bad = replace(make_job("j-bad"), user="\0")
    jobs = [make_job("j1"), make_job("j-known"), bad, make_job("j2"), make_job("j2")]
    answers = await asyncio.gather(
        submit(store, "j0"),  # the others gather while this one is stored
        *(store.submit(job, make_event(job)) for job in jobs),
        return_exceptions=True,
    )
    kinds = [type(each) for each in answers]
    assert kinds[2:4] == [StaleVersion, HashMismatch]
    assert sorted(kind.__name__ for kind in (kinds[4], kinds[5])) == ["JobRecord", "StaleVersion"]
    assert set(await store.unfinished()) == {"j-known", "j0", "j1", "j2"}
