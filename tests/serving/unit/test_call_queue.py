"""A bucket that does not answer delays neither the cron lines nor the calls of its service."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from cavvy.capabilities.serving.call_rows import calls_of
from cavvy.capabilities.serving.control.call_queue import CallQueue
from cavvy.capabilities.serving.control.front import ServingParts
from cavvy.capabilities.serving.control.reconciler import service_key
from cavvy.capabilities.serving.queued_calls import CallAnswer, CallState, QueuedCall
from cavvy.capabilities.serving.service_rows import services_of
from cavvy.capabilities.serving.stored_services import StoredService
from cavvy.control.clock import WallClock
from cavvy.control.worklist import calls_key
from cavvy.domain.services import CronTrigger, EventTrigger, ServiceSpec
from cavvy.domain.tasks import TaskSpec
from cavvy.store.open import MemoryStore

NOW = datetime(2026, 1, 5, 12, 2, tzinfo=UTC)
KEY = calls_key(service_key("p", "s"))
SPEC = ServiceSpec(
    events=(EventTrigger(bucket="s3://silent/"),), crons=(CronTrigger(cron="*/5 * * * *"),)
)


class SilentBuckets:
    """Buckets that never answer."""

    def __init__(self) -> None:
        self.asked = 0

    async def open_url(self, project: str, url: str) -> None:
        self.asked += 1
        await asyncio.Event().wait()


class AnsweringFront:
    """A gateway that answers each call at once."""

    def locate(self, service: StoredService) -> str:
        return "http://127.0.0.1:1/p/s"

    async def call(self, *parts: object) -> CallAnswer:
        return CallAnswer(status=200)


async def test_a_silent_bucket_delays_no_calls() -> None:
    async def run() -> None:
        store, ended, buckets = MemoryStore(), asyncio.Event(), SilentBuckets()
        parts: Any = {"jobs": None, "pool": None, "budgets": None}
        queue = CallQueue(
            ServingParts(
                store=store,
                clock=WallClock(),
                front=cast("Any", AnsweringFront()),
                hint=lambda key: ended.set(),
                **parts,
            ),
            cast("Any", buckets),
        )
        task = TaskSpec(name="s", run="x", service=SPEC)
        await services_of(store).put(
            StoredService(project="p", name="s", id="i", created_at=NOW, task=task)
        )
        call = QueuedCall(project="p", service="s", id="a", submitted_at=NOW, due_at=NOW)
        await calls_of(store).add([(call, b"")])
        after = await queue.reconcile(KEY)
        assert after is not None
        assert after <= timedelta(minutes=5), "the next time of the cron line"
        await ended.wait()
        assert (await calls_of(store).get("p", "s", "a")).state is CallState.DONE
        await queue.reconcile(KEY)
        assert buckets.asked == 1, "one listing of a bucket at a time"
        assert queue.list_sent(KEY) == frozenset()
        running = asyncio.create_task(queue.run())
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    async with asyncio.timeout(20):
        await run()
