"""What the servers of one PostgreSQL database tell each other."""

import asyncio
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from tests.contract.store_suite import after, store_url
from tests.waits import PATIENCE_S

from cavvy.store.channel import (
    GANG,
    AgentContact,
    AgentContacts,
    ReplicaChannel,
    ServerSignal,
    SignalKind,
    pack_signals,
)
from cavvy.store.drivers import make_driver
from cavvy.store.sql import Store


@pytest.fixture
def url(tmp_path: Path) -> str:
    return store_url("postgres", tmp_path)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.01)


def wake(key: str) -> ServerSignal:
    return ServerSignal(SignalKind.WAKE, key)


async def test_the_others_receive_a_signal_also_after_their_connections_ended(url: str) -> None:
    a, b = ReplicaChannel(url, "a"), ReplicaChannel(url, "b")
    got: list[ServerSignal] = []
    echo: list[ServerSignal] = []
    a.start(echo.extend)
    b.start(got.extend)

    async def say(key: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while wake(key) not in got:
                a.send(wake(key))
                await asyncio.sleep(0.05)

    await say("one")
    with closing(make_driver(url, journal="auto").connect()) as session:
        session.run(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
            "AND datname = current_database()"
        )
    await say("two")
    for number in range(2000):
        a.send(wake(f"key-{number:020}"))
    await until(lambda: wake(f"key-{1999:020}") in got)
    assert len(set(got)) == 2002
    assert not echo
    await a.close()
    await b.close()


def test_signals_are_packed_into_texts_that_postgresql_accepts() -> None:
    texts = pack_signals("me", [*[wake("é" * 1000)] * 10, wake("x" * 9000), wake("last")])
    assert all(len(text.encode()) < 8000 and text.startswith("me\n") for text in texts)
    assert sum(text.count("\n") for text in texts) == 11
    assert pack_signals("me", []) == []


async def test_each_server_learns_what_the_others_know_of_agents(url: str) -> None:
    store = Store(url)
    await store.open()
    a, b = AgentContacts(url, "a"), AgentContacts(url, "b")
    try:
        rank = AgentContact(attempt_id="j1-1", rank=0, heard_at=after(5))
        gang = AgentContact(attempt_id="j1-1", rank=GANG, paid_until=after(60))
        assert await a.exchange([rank, gang]) == []
        found = {each.rank: each for each in await b.exchange([])}
        assert (found[0].heard_at, found[0].server) == (after(5), "a")
        assert found[GANG].paid_until == after(60)
        older = AgentContact(attempt_id="j1-1", rank=0, heard_at=after(3), asked_at=after(4))
        await b.exchange([older])
        (told,) = [each for each in await a.exchange([]) if each.rank == 0]
        assert (told.heard_at, told.asked_at, told.server) == (after(5), after(4), "b")
        await a.forget(after(10**9))
        assert await AgentContacts(url, "c").exchange([]) == []
    finally:
        a.close()
        b.close()
        await store.close()
