"""The launch ledger over a state that several servers share."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from cavvy.domain.gangs import ProviderDocument
from cavvy.domain.values import replace
from cavvy.providers.base import TryAgain
from cavvy.providers.ledger import ChangedElsewhere, LaunchLedger
from cavvy.providers.state import MemoryProviderState


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    name: str
    launched: bool = False
    removed: bool = False


class SlowState(MemoryProviderState):
    """A database that lets other tasks run during each call, and may be full."""

    full = False

    async def read(self, collection: str, name: str | None = None) -> Sequence[ProviderDocument]:
        found = await MemoryProviderState.read(self, collection, name)
        await asyncio.sleep(0)
        return found

    async def swap(self, document: ProviderDocument, *, delete: bool = False) -> bool:
        await asyncio.sleep(0)
        if self.full:
            raise TryAgain("the disk is full")
        done = await MemoryProviderState.swap(self, document, delete=delete)
        await asyncio.sleep(0)
        return done


def ledger(state: MemoryProviderState) -> LaunchLedger[Launch]:
    return LaunchLedger(state, Launch)


async def test_servers_see_each_others_records() -> None:
    state = SlowState()
    one, other = ledger(state), ledger(state)
    await one.put(Launch(name="a"))
    await other.refresh()
    assert other.get("a") == Launch(name="a")
    await other.put(Launch(name="a", launched=True))
    await one.refresh("a")
    assert one.get("a") == Launch(name="a", launched=True)
    await one.drop("a")
    await other.refresh("a")
    assert other.records == {}


async def test_of_two_servers_that_launch_one_gang_the_second_is_told() -> None:
    state = SlowState()
    one, other = ledger(state), ledger(state)
    results = await asyncio.gather(
        one.put(Launch(name="a")),
        other.put(Launch(name="a", removed=True)),
        return_exceptions=True,
    )
    assert [type(each) for each in results].count(ChangedElsewhere) == 1
    assert one.get("a") == other.get("a") is not None


async def test_a_write_on_top_of_another_servers_is_refused_and_read_again() -> None:
    state = SlowState()
    one, other = ledger(state), ledger(state)
    await one.put(Launch(name="a"))
    await other.refresh()
    await one.put(Launch(name="a", removed=True))
    with pytest.raises(ChangedElsewhere):
        await other.put(Launch(name="a", launched=True))
    assert other.get("a") == Launch(name="a", removed=True)
    await one.put(Launch(name="a", launched=True))
    with pytest.raises(ChangedElsewhere):
        await other.drop("a")


async def test_tasks_of_one_server_do_not_lose_each_others_changes() -> None:
    books = ledger(SlowState())
    await books.put(Launch(name="a"))

    async def change(**what: bool) -> None:
        await books.put(replace(books.records["a"], **what))

    await asyncio.gather(change(launched=True), books.refresh(), change(removed=True))
    await books.refresh()
    assert books.get("a") == Launch(name="a", launched=True, removed=True)


async def test_an_intent_that_cannot_be_stored_is_refused() -> None:
    state = SlowState()
    books = ledger(state)
    state.full = True
    with pytest.raises(TryAgain, match="full"):
        await books.put(Launch(name="a"))
    assert books.records == {}


async def test_a_removal_goes_on_with_a_full_database_and_is_stored_later() -> None:
    state = SlowState()
    books = ledger(state)
    for name in "ab":
        await books.put(Launch(name=name))
    state.full = True
    await books.put(Launch(name="a", removed=True))
    await books.drop("b")
    assert books.records == {"a": Launch(name="a", removed=True)}
    state.full = False
    await books.refresh()
    later = ledger(state)
    await later.refresh()
    assert later.records == books.records == {"a": Launch(name="a", removed=True)}
