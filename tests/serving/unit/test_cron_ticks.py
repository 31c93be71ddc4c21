"""Two servers add the calls of a cron line to the queue of a service: each time once."""

from datetime import UTC, datetime, timedelta

from cavvy.capabilities.serving.call_rows import calls_of
from cavvy.capabilities.serving.control.call_queue import CronTicks
from cavvy.capabilities.serving.queued_calls import IDS_KEPT, CallState, QueuedCall
from cavvy.capabilities.serving.stored_services import StoredService
from cavvy.control.clock import VirtualClock, run_virtual
from cavvy.domain.services import CronTrigger, ServiceSpec
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import replace
from cavvy.store.open import MemoryStore

START = datetime(2026, 1, 5, 12, 2, tzinfo=UTC)
SPEC = ServiceSpec(port=80, crons=(CronTrigger(cron="*/5 * * * *", body="{}"),))
SERVICE = StoredService(
    project="p",
    name="s",
    id="i",
    created_at=START,
    task=TaskSpec(name="s", run="x", service=SPEC),
)


async def times(store: MemoryStore) -> list[str]:
    return [f"{each.submitted_at:%H:%M}" for each in await waiting(store)]


async def waiting(store: MemoryStore) -> list[QueuedCall]:
    return list(await calls_of(store).list("p", "s"))


def test_each_time_is_called_once_by_two_servers_of_which_one_is_replaced() -> None:
    async def serve() -> None:
        store, clock = MemoryStore(), VirtualClock(START)
        servers = [CronTicks(store, clock), CronTicks(store, clock)]
        for minute in range(60):
            await clock.sleep_until(START + timedelta(minutes=minute))
            for each in servers:
                assert await each.add_due(SERVICE) <= timedelta(minutes=5)
            if minute % 7 == 0:  # it was killed, and knows nothing any more
                servers[minute % 2] = CronTicks(store, clock)
        assert await times(store) == [
            *(f"12:{minute:02}" for minute in range(5, 60, 5)),
            "13:00",
        ]
        for call in await waiting(store):
            await calls_of(store).put(
                replace(call, state=CallState.DONE, ended_at=clock.now(), expires_at=clock.now())
            )
        await calls_of(store).expire(clock.now())
        await CronTicks(store, clock).add_due(SERVICE)
        assert await times(store) == [], "its call is forgotten, and not made again"

    run_virtual(serve())


def test_of_the_times_that_passed_meanwhile_the_last_one_is_called() -> None:
    async def serve() -> None:
        store, clock = MemoryStore(), VirtualClock(START)
        assert await CronTicks(store, clock).add_due(SERVICE) == timedelta(minutes=3)
        await clock.sleep_until(START + timedelta(hours=9))
        await CronTicks(store, clock).add_due(SERVICE)
        assert await times(store) == ["21:00"]
        later = replace(SERVICE, created_at=clock.now(), id="j")  # ended, and served again
        await clock.sleep_until(START + timedelta(hours=9, minutes=1))
        await CronTicks(store, clock).add_due(later)
        assert await times(store) == ["21:00"]
        never = replace(SPEC, crons=(CronTrigger(cron="0 3 30 2 *"),))
        service = replace(SERVICE, task=replace(SERVICE.task, service=never))
        assert await CronTicks(store, clock).add_due(service) == timedelta(days=1)

    run_virtual(serve())


def test_a_time_whose_id_has_expired_causes_no_other_call() -> None:
    async def serve() -> None:
        store, clock = MemoryStore(), VirtualClock(START)
        yearly = replace(SPEC, crons=(CronTrigger(cron="0 3 1 2 *"),))
        service = replace(SERVICE, task=replace(SERVICE.task, service=yearly))
        await CronTicks(store, clock).add_due(service)
        await clock.sleep_until(START + timedelta(days=28))  # on the 2nd of February
        await CronTicks(store, clock).add_due(service)
        assert await times(store) == ["03:00"]
        await calls_of(store).purge("p", "s", CallState.WAITING, clock.now())
        await clock.sleep_until(clock.now() + IDS_KEPT + timedelta(days=1))
        await calls_of(store).expire(clock.now())
        assert await calls_of(store).count("p", "s") == {CallState.FORGOTTEN: 1}
        await CronTicks(store, clock).add_due(service)  # a new server
        assert await times(store) == []

    run_virtual(serve())
