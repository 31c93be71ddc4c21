"""Several clusters of one provider, of which one does not answer."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from cavvy.providers.base import GangSeen, GangState, PartlyUnknown, Refused, TryAgain
from cavvy.providers.batch import fan_out
from cavvy.providers.batch.fan_out import FanOut, look_at_all, remove_from_all, whoami_all

SEEN = GangSeen(name="rm-1", state=GangState.RUNNING)


async def answer(*gangs: GangSeen) -> Sequence[GangSeen]:
    return gangs


async def fail() -> Sequence[GangSeen]:
    raise TryAgain("silent")


def test_a_silent_cluster_hides_no_gang_that_another_shows_and_is_told_where_it_may_hide_one() -> (
    None
):
    assert asyncio.run(look_at_all([fail(), answer(SEEN)], "rm-1")) == [SEEN]
    for others, name in (((SEEN,), None), ((), "rm-1")):
        with pytest.raises(TryAgain, match="silent") as caught:
            asyncio.run(look_at_all([answer(*others), fail()], name))
        seen = caught.value.seen if isinstance(caught.value, PartlyUnknown) else ()
        assert tuple(seen) == others


async def test_who_finds_the_gang_waits_for_no_silent_cluster() -> None:
    async def hang() -> Sequence[GangSeen]:
        await asyncio.Event().wait()
        return ()

    async with asyncio.timeout(30):
        assert await look_at_all([hang(), answer(SEEN)], "rm-1") == [SEEN]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await look_at_all([hang(), answer(SEEN)], None)


def test_what_is_removed_from_one_cluster_is_removed_whoever_else_is_silent() -> None:
    ended = []

    async def had(it: bool) -> bool:
        await asyncio.sleep(0)
        ended.append(it)
        return it

    async def silent() -> bool:
        raise TryAgain("silent")

    asyncio.run(remove_all([silent(), had(True)]))
    with pytest.raises(TryAgain, match="silent"):
        asyncio.run(remove_all([silent(), had(False)]))
    assert ended == [True, False]  # it is asked of all


async def remove_all(asked: Sequence[Coroutine[Any, Any, bool]]) -> None:
    await remove_from_all(asked)


Ask = Callable[[], Coroutine[Any, Any, str]]


def told(answer: str) -> Ask:
    async def ask() -> str:
        return answer

    return ask


def refused(why: str) -> Ask:
    async def ask() -> str:
        raise Refused(why)

    return ask


async def test_those_that_answer_are_heard_and_the_silent_are_named_until_they_answer() -> None:
    parts = FanOut[str]()
    assert await parts.ask({"a": told("x"), "b": refused("no right")}) == {"a": "x"}
    assert list(parts.silent) == ["b: no right"]
    with pytest.raises(Refused, match=r"^no right$"):
        await parts.ask({"b": refused("no right")})
    with pytest.raises(Refused, match="a: no key; b: no right"):
        await FanOut[str]().ask({"a": refused("no key"), "b": refused("no right")})
    assert await parts.ask({"a": told("x"), "b": told("y")}) == {"a": "x", "b": "y"}
    assert list(parts.silent) == []
    assert await parts.ask({}) == {}


async def test_who_says_nothing_is_waited_for_once_and_asked_beside_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor is what it said while nobody listened taken for new."""
    monkeypatch.setattr(fan_out, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(fan_out, "_BRIEF_S", 0.0)
    asked: list[asyncio.Future[str]] = []

    async def slow() -> str:
        asked.append(asyncio.get_running_loop().create_future())
        return await asked[-1]

    parts = FanOut[str]()
    for _ in range(2):
        assert await parts.ask({"a": told("x"), "b": slow}) == {"a": "x"}
        assert len(asked) == 1  # it is not asked again before it has answered
        assert "b: no answer within" in parts.silent[0]
    asked[0].set_result("old")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    asking = asyncio.create_task(parts.ask({"a": told("x"), "b": slow}))
    while len(asked) < 2:
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    asked[1].set_result("new")
    assert await asking == {"a": "x", "b": "new"}
    assert list(parts.silent) == []
    await parts.close()


async def test_who_failed_after_nobody_listened_any_more_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fan_out, "_PATIENCE_S", 0.01)

    may_fail = asyncio.Event()

    async def fail() -> str:
        await may_fail.wait()
        raise KeyError("items")

    parts = FanOut[str]()
    assert await parts.ask({"a": told("x"), "b": fail}) == {"a": "x"}
    may_fail.set()
    for _ in range(10):  # the task ends, and who waits for it is told
        await asyncio.sleep(0)
    assert await parts.ask({"a": told("x"), "b": told("y")}) == {"a": "x", "b": "y"}


async def test_who_was_asked_to_introduce_itself_is_not_asked_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fan_out, "_PATIENCE_S", 0.01)
    ended: list[str] = []

    async def facts() -> Sequence[tuple[str, str]]:
        return [("nodes", "4")]

    async def hang() -> Sequence[tuple[str, str]]:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("b")
        return []

    assert len(await whoami_all({"a": facts, "b": hang})) == 2
    assert ended == ["b"]


def test_who_is_silent_is_shown_beside_what_the_others_say_of_themselves() -> None:
    async def facts() -> Sequence[tuple[str, str]]:
        return [("nodes", "4")]

    async def none() -> Sequence[tuple[str, str]]:
        raise TryAgain("b: cannot be reached")

    async def scenario() -> Sequence[tuple[str, str]]:
        return await whoami_all({"a": facts, "b": none})

    assert list(asyncio.run(scenario())) == [("nodes", "4"), ("silent", "b: cannot be reached")]


async def test_two_who_ask_at_once_hear_the_same() -> None:
    calls: list[str] = []

    async def slow() -> str:
        calls.append("")
        await asyncio.sleep(0.01)
        return "x"

    parts = FanOut[str]()
    first, second = await asyncio.gather(parts.ask({"a": slow}), parts.ask({"a": slow}))
    assert first == second == {"a": "x"}
    assert len(calls) == 1
    assert await parts.ask({"a": slow}) == {"a": "x"}
    assert len(calls) == 2
