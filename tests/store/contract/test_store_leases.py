"""The leases on PostgreSQL: each has one holder, only the holder's passes write, and the leases
follow the servers that come and go.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path

import pytest
from tests.contract.store_suite import begin, store_url, submit
from tests.waits import PATIENCE_S

from cavvy.store import leases, migrate
from cavvy.store.base import LeaseLost, StoreUnusable
from cavvy.store.drivers import DatabaseSession, make_driver
from cavvy.store.leases import (
    FENCE,
    SHARDS,
    SINGLETONS,
    Fence,
    Replica,
    ReplicaLeases,
    find_preferred,
    list_replicas,
    shard_of,
)
from cavvy.store.sql import Store


@pytest.fixture
def url(tmp_path: Path) -> str:
    return store_url("postgres", tmp_path)


@asynccontextmanager
async def joined(
    url: str, name: str, *, host: str = "h", ttl_s: float = 60.0, folder: str = ""
) -> AsyncIterator[ReplicaLeases]:
    folder = folder or f"/home/{name}"
    me = Replica(id=name, host=host, pid=1, folder=folder, address=f"unix:/{name}")
    leases = ReplicaLeases(url, me, ttl_s=ttl_s)
    try:
        await leases.join()
        yield leases
    finally:
        await leases.leave()


@asynccontextmanager
async def store_of(url: str) -> AsyncIterator[Store]:
    store = Store(url)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


@contextmanager
def under(fence: Fence) -> Iterator[None]:
    token = FENCE.set(fence)
    try:
        yield
    finally:
        FENCE.reset(token)


def session_of(url: str) -> "closing[DatabaseSession]":
    return closing(make_driver(url, journal="auto").connect())


def run(url: str, sql: str) -> None:
    with session_of(url) as session:
        session.run(sql)


def disconnect(url: str, name: str) -> None:
    """End the connection of a replica, as PostgreSQL does when its process is killed, and wait
    until it has ended (at most 60,000 ms)."""
    run(
        url,
        "SELECT pg_terminate_backend(CAST(backend AS INTEGER), 60000) FROM cavvy_replicas "
        f"WHERE id = '{name}'",
    )


def expire(url: str, name: str) -> None:
    run(url, f"UPDATE cavvy_replicas SET until = 0 WHERE id = '{name}'")


def names_of(leases: ReplicaLeases) -> set[str]:
    return {name for name in leases.held if not name.startswith("host:")}


async def settle(*servers: ReplicaLeases) -> None:
    """Let the servers share the leases among them."""
    for _ in range(3):
        for each in servers:
            await each.turn()


async def test_one_server_takes_everything_in_one_turn(url: str) -> None:
    async with joined(url, "a") as a:
        turn = await a.turn()
        assert len(turn.gained) == SHARDS + len(SINGLETONS) + 1
        assert a.host_lease in a.held
        assert a.valid
        assert [each.id for each in list_replicas(url)] == ["a"]
    assert list_replicas(url) == []


async def test_servers_share_the_leases_and_each_has_one_holder(url: str) -> None:
    async with joined(url, "a") as a, joined(url, "b") as b, joined(url, "c") as c:
        await settle(a, b, c)
        held = [names_of(each) for each in (a, b, c)]
        assert sum(map(len, held)) == len(set.union(*held)) == SHARDS + len(SINGLETONS)
        assert min(map(len, held)) > SHARDS / 6
        for each, names in zip((a, b, c), held, strict=True):
            assert {find_preferred(name, "abc") for name in names} == {each.me.id}


async def test_a_server_that_may_come_back_is_recent(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with joined(url, "a") as a, joined(url, "b") as b:
        await settle(a, b)
        disconnect(url, "b")  # as when the database restarts
        await a.turn()
        assert [each.id for each in a.alive] == ["a"]
        assert {each.id for each in a.recent} == {"a", "b"}
        with suppress(StoreUnusable):  # it notices the end of its connection, and connects again
            await b.turn()
        await b.turn()
        await a.turn()
        assert [each.id for each in a.alive] == [each.id for each in a.recent] == ["a", "b"]
        expire(url, "b")
        await a.turn()
        assert {each.id for each in a.recent} == {"a", "b"}
        monkeypatch.setattr(leases, "ABSENCE_S", 0.0)
        await a.turn()
        assert [each.id for each in a.recent] == ["a"]


async def test_a_server_does_not_come_back_if_another_one_has_its_folder(url: str) -> None:
    async with joined(url, "a") as a, joined(url, "b") as b:
        await settle(a, b)
        expire(url, "b")
        async with joined(url, "c", folder="/home/b") as c:
            await a.turn()
            await c.turn()
            assert {each.id for each in a.recent} == {each.id for each in c.recent} == {"a", "c"}
        await a.turn()
        assert [each.id for each in a.recent] == ["a"], "the server has released its leases"


async def test_each_machine_has_one_holder_of_its_own_lease(url: str) -> None:
    async with joined(url, "a") as a, joined(url, "b") as b, joined(url, "c", host="i") as c:
        await settle(a, b, c)
        assert (a.host_lease in a.held) ^ (b.host_lease in b.held)
        assert c.host_lease in c.held


async def test_a_lease_is_not_given_back_while_a_pass_runs_under_it(url: str) -> None:
    async with joined(url, "a") as a:
        await a.turn()
        async with joined(url, "b") as b:
            await b.turn()
            assert not b.held  # a holds everything and lives
            await a.turn()
            kept = sorted(a.leaving)[0]
            assert set(a.leaving) < a.held.keys()
            turn = await a.turn(unfinished=[kept])
            assert kept in a.held
            assert set(turn.lost) == {name for name in [*a.held, *turn.lost] if name not in a.held}
            await b.turn()
            assert kept not in b.held
            assert len(b.held) == len(turn.lost)
            await settle(a, b)
            assert kept in b.held


async def test_what_a_server_gives_back_at_its_end_is_free_at_once(url: str) -> None:
    async with joined(url, "b") as b:
        async with joined(url, "a") as a:
            await settle(a, b)
            theirs = names_of(a)
            number = {name: fence.number for name, fence in a.held.items()}
        await b.turn()
        assert theirs <= names_of(b)
        assert all(b.held[name].number > number[name] for name in theirs)


async def test_a_killed_server_is_replaced_long_before_its_place_expires(url: str) -> None:
    async with joined(url, "a", ttl_s=3600.0) as a, joined(url, "b") as b:
        await settle(a, b)
        disconnect(url, "a")
        async with asyncio.timeout(PATIENCE_S):
            while len(names_of(b)) < SHARDS + len(SINGLETONS):
                await b.turn()
                await asyncio.sleep(0.01)
        turn = await a.turn()  # a paused server wakes up: it has lost everything
        assert len(turn.lost) > SHARDS / 6
        assert not names_of(a)


async def test_a_server_that_hangs_is_replaced_when_its_place_expires(url: str) -> None:
    async with joined(url, "a") as a, joined(url, "b") as b:
        await settle(a, b)
        expire(url, "a")
        await b.turn()
        assert len(names_of(b)) == SHARDS + len(SINGLETONS)


async def test_a_server_that_reconnects_keeps_its_leases(url: str) -> None:
    async with joined(url, "a") as a:
        await a.turn()
        held = dict(a.held)
        disconnect(url, "a")
        await a.turn()
        assert a.held == held


async def test_a_server_that_cannot_renew_does_not_act(url: str) -> None:
    async with joined(url, "a", ttl_s=0.05) as a:
        await a.turn()
        run(url, "ALTER TABLE cavvy_replicas RENAME TO gone")
        with pytest.raises(Exception, match="cavvy_replicas"):
            await a.turn()
        async with asyncio.timeout(PATIENCE_S):
            while a.valid:
                await asyncio.sleep(0.01)
        run(url, "ALTER TABLE gone RENAME TO cavvy_replicas")


async def test_a_pass_that_lost_its_lease_writes_nothing(url: str) -> None:
    async with joined(url, "a") as a, joined(url, "b") as b, store_of(url) as store:
        await settle(a, b)
        job = await submit(store, next(f"j{n}" for n in range(99) if shard_of(f"j{n}") in a.held))
        old = a.held[shard_of(job.id)]
        expire(url, "a")
        await b.turn()
        with under(old), pytest.raises(LeaseLost):
            await begin(store, job)
        assert await store.job(job.id) == job
        with under(b.held[shard_of(job.id)]):
            await begin(store, job)


async def test_a_takeover_waits_for_the_transaction_of_the_old_holder(url: str) -> None:
    """Otherwise that transaction could be committed after the new holder has read."""
    async with joined(url, "a") as a, joined(url, "b") as b:
        await settle(a, b)
        fence = next(iter(a.held.values()))
        with session_of(url) as writer:
            writer.begin()
            checked = "SELECT 1 FROM cavvy_leases WHERE name = ? FOR SHARE"
            writer.run(checked, (fence.name,))
            expire(url, "a")
            await b.turn()
            assert fence.name not in b.held
            assert len(b.held) == SHARDS + len(SINGLETONS)  # with the machine's, less this one
            writer.commit()
        await b.turn()
        assert fence.name in b.held


async def test_servers_that_take_at_the_same_time_never_hold_the_same_lease(url: str) -> None:
    async with joined(url, "a") as a, joined(url, "b") as b, joined(url, "c") as c:
        for _ in range(5):
            await asyncio.gather(a.turn(), b.turn(), c.turn())
        held = [name for each in (a, b, c) for name in each.held]
        assert len(held) == len(set(held)) == SHARDS + len(SINGLETONS) + 1


async def test_a_much_newer_database_is_refused_and_the_next_one_is_not(url: str) -> None:
    async with store_of(url):
        pass
    following = f"{int(migrate.HEAD) + 1:04}"
    for number, refused in ((following, False), ("0999", True)):
        run(url, f"UPDATE {migrate.VERSION_TABLE} SET version_num = '{number}'")
        leases = ReplicaLeases(
            url, Replica(id=number, host="h", pid=1, folder="/f", address="unix:/a")
        )
        try:
            if refused:
                with pytest.raises(StoreUnusable, match="revision 0999"):
                    await leases.join()
                with pytest.raises(StoreUnusable, match="revision 0999"):
                    await Store(url).open()
            else:
                await leases.join()
                async with store_of(url) as store:
                    await submit(store, "j1")
        finally:
            await leases.leave()


@pytest.mark.parametrize("revision", [None, "0001"])
async def test_a_server_that_is_too_old_to_share_is_named(url: str, revision: str | None) -> None:
    old = Replica(id="a", host="h", pid=7, folder="/f", address="unix:/a", revision=revision)
    first = ReplicaLeases(url, old)
    try:
        await first.join()
        with pytest.raises(StoreUnusable, match="process 7 on h"):
            async with joined(url, "b"):
                pass
    finally:
        await first.leave()
