"""What is said of jobs whose size is not changed."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

from tests.records import make_attempt_record, make_job_record, make_offer

from cavvy.capabilities.elastic.keeper import KEY, SizeKeeper
from cavvy.domain.elastic import HoldCause, NodeRange
from cavvy.domain.jobs import Attempt, JobPhase, JobRecord
from cavvy.domain.tasks import TaskSpec

NOW = datetime(2026, 1, 1, tzinfo=UTC)
OFFER = make_offer("fake/r/cheap", 1_000_000, vcpus=8)


class Rows:
    """A store with a running job that has a standby."""

    def __init__(self) -> None:
        task = TaskSpec(name="t", run="x", nodes=2, elastic=NodeRange(least=2, most=4))
        self.job = make_job_record(NOW, task=task, phase=JobPhase.RUNNING, attempt=1)
        self.written: list[Any] = []

    async def elastic_jobs(self) -> Sequence[JobRecord]:
        return [self.job]

    async def attempts(self, job: str) -> Sequence[Attempt]:
        return [make_attempt_record(NOW, OFFER, number=number, nodes=2) for number in (1, 2)]

    async def commit(self, write: Any) -> None:
        self.written.append(write)


def test_a_standby_is_not_taken_for_the_attempt_that_runs() -> None:
    rows = Rows()
    clock = SimpleNamespace(now=lambda: NOW)
    parts: Any = SimpleNamespace(
        store=rows, clock=clock, trials=object(), hint=lambda key: None, budgets=None
    )
    asyncio.run(SizeKeeper(parts, changes=False).reconcile(KEY))
    [write] = rows.written
    [job] = write.jobs
    assert (job.hold.cause, job.hold.attempt) == (HoldCause.NO_CHECKPOINT, 1)
