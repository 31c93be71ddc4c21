"""What the server counts of attempts, for its metrics."""

import asyncio
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from math import inf
from typing import Any, cast

import pytest
from tests.records import FIXED, make_attempt_record, make_job_record

from cavvy.control.attempt_counts import FRESH, AttemptCounts, JobCounts
from cavvy.domain.jobs import Attempt, AttemptOutcome, AttemptPhase, JobPhase
from cavvy.domain.values import replace
from cavvy.store.base import AtomicWrite
from cavvy.store.sql import ProjectJobs

NOW = datetime(2027, 1, 1, tzinfo=UTC)
PLACED = NOW + timedelta(seconds=40)
ATTEMPT = make_attempt_record(PLACED, FIXED)
PROVIDER = ATTEMPT.offer.provider


def at(phase: AttemptPhase, seconds: int, **changes: object) -> Attempt:
    since = PLACED + timedelta(seconds=seconds)
    return replace(ATTEMPT, phase=phase, since=since, **changes)


def note(counts: AttemptCounts, *attempts: Attempt) -> None:
    for each in attempts:
        counts.note(AtomicWrite(jobs=[make_job_record(NOW)], attempts=[each]))


def test_a_life_counts_once_even_if_rows_are_written_again() -> None:
    counts = AttemptCounts(NOW)
    began = PLACED + timedelta(seconds=100)
    running = at(AttemptPhase.RUNNING, 100, running_at=began)
    ending = at(AttemptPhase.ENDING, 500, running_at=began)
    ended = at(AttemptPhase.ENDED, 520, running_at=began, outcome=AttemptOutcome.PREEMPTED)
    note(counts, ATTEMPT, ATTEMPT, at(AttemptPhase.BOOTING, 5), running, running, ending, ended)
    note(counts, ended)
    assert counts.ends == {("p", PROVIDER, "preempted"): 1}
    waits, starts = counts.waits["p"], counts.starts["p", PROVIDER]
    assert (waits.total_s, sum(waits.counts.values()), waits.counts[60]) == (40, 1, 1)
    assert (starts.total_s, sum(starts.counts.values()), starts.counts[120]) == (100, 1, 1)


def test_work_that_began_and_ended_between_two_looks_has_started() -> None:
    counts = AttemptCounts(NOW)
    ending = at(AttemptPhase.ENDING, 9, running_at=PLACED + timedelta(seconds=3))
    note(counts, ATTEMPT, at(AttemptPhase.BOOTING, 1), ending)
    assert counts.starts["p", PROVIDER].total_s == 3


def test_what_happened_before_the_server_started_does_not_count() -> None:
    counts = AttemptCounts(PLACED + timedelta(seconds=200))
    running = at(AttemptPhase.RUNNING, 100, running_at=PLACED)
    note(counts, running, at(AttemptPhase.ENDED, 300))
    assert (counts.waits, counts.starts) == ({}, {})
    assert counts.ends == {("p", PROVIDER, "none"): 1}


def test_a_wait_begins_when_the_job_may_start_and_is_of_the_first_attempt() -> None:
    counts = AttemptCounts(NOW)
    held = make_job_record(NOW, held_until=PLACED - timedelta(seconds=1))
    counts.note(AtomicWrite(jobs=[held], attempts=[ATTEMPT]))
    second = replace(ATTEMPT, id="j-2", number=2, created_at=NOW + timedelta(days=2))
    note(counts, replace(second, since=second.created_at))
    late = replace(ATTEMPT, id="k-1", created_at=NOW + timedelta(days=2))
    note(counts, late)
    waits = counts.waits["p"]
    assert (sum(waits.counts.values()), waits.counts[1], waits.counts[inf]) == (2, 1, 1)


def test_the_memory_is_bounded() -> None:
    counts = AttemptCounts(NOW)
    note(counts, *(replace(ATTEMPT, id=f"a-{number}") for number in range(20_100)))
    assert len(counts._phases) == 20_000


class CountedStore:
    """Says that so many jobs have ended and wait, and notes when all of them are counted."""

    def __init__(self, ended: int) -> None:
        self.ended, self.whole, self.ended_jobs = ended, 0, self

    def start_over(self) -> None:
        self.whole += 1

    async def count(self) -> dict[tuple[str, JobPhase], int]:
        return {("p", JobPhase.DONE): self.ended}

    async def count_by_project(self, phases: Collection[JobPhase]) -> list[ProjectJobs]:
        assert JobPhase.DONE not in phases
        return [ProjectJobs("p", JobPhase.QUEUED, 3, NOW)]


@pytest.mark.parametrize(
    ("ended", "alone", "whole"), [(10, True, 1), (1_000_000, True, 1), (10, False, 3)]
)
def test_many_ended_jobs_are_counted_rarely(ended: int, alone: bool, whole: int) -> None:
    store = CountedStore(ended)
    counts = JobCounts(cast(Any, store), lambda: alone)
    for number in range(3):
        found = asyncio.run(counts.count(NOW + number * timedelta(seconds=30)))
        assert found == [
            ProjectJobs("p", JobPhase.DONE, ended, None),
            ProjectJobs("p", JobPhase.QUEUED, 3, NOW),
        ]
    assert store.whole == whole
    asyncio.run(counts.count(NOW + timedelta(hours=2)))
    assert store.whole == whole + 1


def test_all_ended_jobs_are_counted_when_the_last_other_server_has_ended() -> None:
    store, alone = CountedStore(1_000_000), False
    counts = JobCounts(cast(Any, store), lambda: alone)
    asyncio.run(counts.count(NOW))
    alone = True
    for number in range(3):
        asyncio.run(counts.count(NOW + number * timedelta(seconds=30)))
    assert store.whole == 2


def test_with_other_servers_a_million_ended_jobs_are_counted_each_100_seconds() -> None:
    store = CountedStore(1_000_000)
    counts = JobCounts(cast(Any, store), lambda: False)
    for number in range(3):
        asyncio.run(counts.count(NOW + number * timedelta(seconds=30)))
    assert store.whole == 1
    asyncio.run(counts.count(NOW + 1_000_000 * FRESH))
    assert store.whole == 2
