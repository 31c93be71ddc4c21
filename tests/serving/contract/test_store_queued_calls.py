"""Queued calls, in every store."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from cavvy.capabilities.serving.call_rows import calls_of
from cavvy.capabilities.serving.queued_calls import IDS_KEPT, CallState, QueuedCall
from cavvy.domain.values import replace
from cavvy.store.base import RowNotFound, StaleVersion
from cavvy.store.sql import Store

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def make_call(call_id: str, source: str = "", after_s: int = 0) -> QueuedCall:
    due_at = NOW + timedelta(seconds=after_s)
    return QueuedCall(
        project="p", service="s", id=call_id, source=source, submitted_at=NOW, due_at=due_at
    )


def end(call: QueuedCall, state: CallState = CallState.DONE) -> QueuedCall:
    return replace(call, state=state, ended_at=NOW, expires_at=NOW + timedelta(days=1))


async def test_an_id_is_one_call_and_its_result_is_written_once(store: Store) -> None:
    calls = calls_of(store)
    call = make_call("a")
    assert await calls.add([(call, b"\x00one"), (make_call("b", after_s=-5), b"")]) == ["a", "b"]
    assert await calls.add([(call, b"two"), (make_call("c"), b"")]) == ["c"]
    stored = await calls.get("p", "s", "a")
    assert await calls.bodies(stored) == (b"\x00one", b"")
    assert [each.id for each in await calls.due("p", "s", 2)] == ["b", "a"]
    assert [each.id for each in await calls.due("p", "s", 2, {"b"})] == ["a", "c"]

    tries = [calls.put(end(stored), text) for text in (b"first", b"second", b"third")]
    written = await asyncio.gather(*tries, return_exceptions=True)
    assert sum(isinstance(each, StaleVersion) for each in written) == 2
    assert (await calls.bodies(stored))[1] in (b"first", b"second", b"third")
    assert [each.id for each in await calls.due("p", "s", 9)] == ["b", "c"]
    assert [each.id for each in await calls.list("p", "s", CallState.DONE)] == ["a"]
    assert [each.id for each in await calls.list("p", "s", after="a", limit=1)] == ["b"]
    assert await calls.count("p", "s") == {CallState.DONE: 1, CallState.WAITING: 2}
    assert await calls.count("p", "other") == {}
    assert [await calls.has_waiting("p", "s", number) for number in (1, 2, 3)] == [
        True,
        True,
        False,
    ]
    assert not await calls.has_waiting("p", "other", 1)


async def test_a_call_of_an_event_is_forgotten_and_not_added_again(store: Store) -> None:
    calls = calls_of(store)
    pairs = [(make_call("own"), b"x"), (make_call("event", source="bucket"), b"x")]
    await calls.add(pairs)
    for each in await calls.list("p", "s"):
        await calls.put(end(each), b"result")
    await calls.expire(NOW)
    assert len(await calls.list("p", "s")) == 2, "they are kept for a day"
    await calls.expire(NOW + timedelta(days=1))
    assert await calls.list("p", "s") == []
    assert await calls.count("p", "s") == {CallState.FORGOTTEN: 1}
    assert (await calls.get("p", "s", "event")).state is CallState.FORGOTTEN
    assert await calls.add(pairs) == ["own"]
    with pytest.raises(StaleVersion):
        await calls.put(end(replace(make_call("event"), version=2)), b"late")
    assert await calls.purge("p", "s", CallState.WAITING, NOW) == 1
    with pytest.raises(RowNotFound):
        await calls.get("p", "s", "own")


async def test_ids_of_deliveries_and_ticks_expire_and_those_of_objects_do_not(store: Store) -> None:
    calls, day = calls_of(store), timedelta(days=1)
    sources = {"tick": "cron", "sent": "webhook", "put": "bucket", "old": "webhook"}
    pairs = [(make_call(name, source=source), b"x") for name, source in sources.items()]
    anchor = replace(make_call("anchor", source="cron"), state=CallState.FORGOTTEN)
    once = replace(make_call("once", source="webhook"), state=CallState.FORGOTTEN)
    await calls.add([(anchor, b""), *pairs], replace(once, expires_at=NOW + IDS_KEPT))
    await calls.purge("p", "s", CallState.WAITING, NOW)
    await calls.add([(make_call("late", source="webhook"), b"x")])
    await calls.put(end(await calls.get("p", "s", "late")), b"result")
    await calls.expire(NOW + IDS_KEPT - timedelta(seconds=1))
    assert await calls.count("p", "s") == {CallState.FORGOTTEN: 7}, "a sender may repeat them"
    assert await calls.add(pairs) == []
    await calls.expire(NOW + IDS_KEPT)
    assert sorted(await calls.add([*pairs, (anchor, b""), (once, b"")])) == [
        "old",
        "once",
        "sent",
        "tick",
    ]
    assert await calls.add([(make_call("late", source="webhook"), b"")]) == []
    await calls.expire(NOW + 2 * IDS_KEPT + day)
    assert await calls.add([(make_call("late", source="webhook"), b"")]) == ["late"]
