"""A lease on PostgreSQL has one holder, and only the holder writes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
from tests.contract.store_suite import begin, store_url, submit
from tests.waits import PATIENCE_S

from cavvy.store import migrate
from cavvy.store.base import LeaseLost, StoreUnusable
from cavvy.store.drivers import make_driver
from cavvy.store.leases import DatabaseLease, Replica
from cavvy.store.sql import SqlStore

pytestmark = pytest.mark.anyio


@pytest.fixture
def url(tmp_path: Path) -> str:
    return store_url("postgres", tmp_path)


@asynccontextmanager
async def lease_of(url: str, name: str, ttl_s: float = 60.0) -> AsyncIterator[DatabaseLease]:
    me = Replica(id=name, host="h", pid=1, folder=f"/home/{name}", address=f"unix:/{name}")
    lease = DatabaseLease(url, me, ttl_s=ttl_s)
    try:
        yield lease
    finally:
        await lease.release()


@asynccontextmanager
async def store_of(url: str, lease: DatabaseLease) -> AsyncIterator[SqlStore]:
    store = SqlStore(url, fence=lease.fence)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def run(url: str, sql: str) -> None:
    with closing(make_driver(url, journal="auto").connect()) as session:
        session.run(sql)


def disconnect(url: str, name: str) -> None:
    """End the connection of a replica, as PostgreSQL does when its process is killed."""
    run(
        url,
        "SELECT pg_terminate_backend(CAST(backend AS INTEGER)) FROM cavvy_replicas "
        f"WHERE id = '{name}'",
    )


def expire(url: str, name: str) -> None:
    run(url, f"UPDATE cavvy_replicas SET until = 0 WHERE id = '{name}'")


async def take_over(lease: DatabaseLease) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await lease.take() is not None:
            await asyncio.sleep(0.01)


async def test_one_of_many_gets_the_lease_and_the_others_learn_who(url: str) -> None:
    async with (
        lease_of(url, "a") as a,
        lease_of(url, "b") as b,
        lease_of(url, "c") as c,
    ):
        leases = {"a": a, "b": b, "c": c}
        told = await asyncio.gather(*(lease.take() for lease in leases.values()))
        (holder,) = [name for name, lease in leases.items() if lease.fence is not None]
        assert {each.id for each in told if each is not None} == {holder}
        assert sum(each is None for each in told) == 1
        assert [name for name, lease in leases.items() if lease.valid] == [holder]


async def test_a_released_lease_is_free_at_once(url: str) -> None:
    async with lease_of(url, "a") as a, lease_of(url, "b") as b:
        assert await a.take() is None
        assert await b.take() is not None
        await a.release()
        assert await b.take() is None
        assert b.fence is not None
        assert b.fence.number == 2


async def test_a_killed_holder_is_replaced_long_before_its_lease_expires(url: str) -> None:
    async with lease_of(url, "a", 3600.0) as a, lease_of(url, "b") as b:
        assert await a.take() is None
        assert await b.take() is not None
        disconnect(url, "a")
        await take_over(b)
        assert not await a.renew()
        assert not a.valid


async def test_a_holder_that_hangs_is_replaced_when_its_lease_expires(url: str) -> None:
    async with lease_of(url, "a") as a, lease_of(url, "b") as b:
        assert await a.take() is None
        expire(url, "a")
        assert await b.take() is None
        assert not await a.renew()


async def test_a_holder_that_reconnects_keeps_its_lease(url: str) -> None:
    async with lease_of(url, "a") as a, lease_of(url, "b") as b:
        assert await a.take() is None
        disconnect(url, "a")
        assert await a.renew()
        assert await b.take() is not None


async def test_who_lost_the_lease_writes_nothing(url: str) -> None:
    async with lease_of(url, "a") as a, lease_of(url, "b") as b:
        assert await a.take() is None
        async with store_of(url, a) as old:
            job = await submit(old, "j1")
            expire(url, "a")
            assert await b.take() is None
            with pytest.raises(LeaseLost):
                await begin(old, job)
            with pytest.raises(LeaseLost):
                await submit(old, "j2")
            assert await old.job("j1") == job  # it may still read
            async with store_of(url, b) as new:
                await begin(new, job)
                assert await new.unfinished() == ["j1"]


async def test_a_takeover_waits_for_the_transaction_of_the_old_holder(url: str) -> None:
    """Otherwise that transaction could be committed after the new holder has read."""
    async with lease_of(url, "a") as a, lease_of(url, "b") as b:
        assert await a.take() is None
        assert a.fence is not None
        with closing(make_driver(url, journal="auto").connect()) as writer:
            writer.begin()
            values = (a.fence.name, a.fence.holder, a.fence.number)
            checked = "SELECT 1 FROM cavvy_leases WHERE name = ? AND holder = ? AND fence = ?"
            assert writer.run(f"{checked} FOR SHARE", values).fetchone()
            expire(url, "a")
            taking = asyncio.create_task(b.take())
            done, _ = await asyncio.wait([taking], timeout=0.5)
            assert not done
            writer.commit()
            assert await taking is None


async def test_the_lease_of_a_newer_programs_database_is_refused(url: str) -> None:
    async with lease_of(url, "a") as a:
        assert await a.take() is None
        async with store_of(url, a) as store:
            await submit(store, "j1")
        await a.release()
    run(url, f"UPDATE {migrate.VERSION_TABLE} SET version_num = '0999'")
    async with lease_of(url, "b") as b:
        with pytest.raises(StoreUnusable, match="revision 0999"):
            await b.take()
        assert b.fence is None


async def test_of_two_that_wait_for_the_same_lease_the_second_finds_the_first_alive(
    url: str,
) -> None:
    """Both see that the holder is dead, and wait for its last transaction."""
    async with (
        lease_of(url, "a") as a,
        lease_of(url, "b") as b,
        lease_of(url, "c") as c,
    ):
        assert await a.take() is None
        assert a.fence is not None
        with closing(make_driver(url, journal="auto").connect()) as writer:
            writer.begin()
            writer.run("SELECT 1 FROM cavvy_leases FOR SHARE")
            expire(url, "a")
            taking = [asyncio.create_task(each.take()) for each in (b, c)]
            done, _ = await asyncio.wait(taking, timeout=0.5)
            assert not done
            writer.commit()
            told = await asyncio.gather(*taking)
        assert sum(each is None for each in told) == 1
        (holder,) = [each for each in (b, c) if each.fence is not None]
        assert await holder.renew()


async def test_a_lease_that_was_waited_for_is_as_long_as_any_other(url: str) -> None:
    clock = "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS BIGINT)"
    async with lease_of(url, "a") as a, lease_of(url, "b") as b:
        assert await a.take() is None
        with closing(make_driver(url, journal="auto").connect()) as writer:
            writer.begin()
            writer.run("SELECT 1 FROM cavvy_leases FOR SHARE")
            expire(url, "a")
            taking = asyncio.create_task(b.take())
            done, _ = await asyncio.wait([taking], timeout=0.5)
            assert not done
            taken_after = writer.run(f"SELECT {clock}").fetchone()
            writer.commit()
            assert await taking is None
            until = writer.run("SELECT until FROM cavvy_replicas WHERE id = 'b'").fetchone()
        assert taken_after is not None
        assert until is not None
        assert until[0] >= taken_after[0] + 60_000_000


async def test_who_lost_the_lease_does_not_change_the_schema(url: str) -> None:
    """A newer program that hung before its migration must not change the schema of the program that
    has taken over.
    """
    async with lease_of(url, "a") as a, lease_of(url, "b") as b:
        assert await a.take() is None
        expire(url, "a")
        assert await b.take() is None
        store = SqlStore(url, fence=a.fence)
        with pytest.raises(LeaseLost):
            await store.open()
        async with store_of(url, b) as new:
            assert await new.unfinished() == []
            run(url, f"UPDATE {migrate.VERSION_TABLE} SET version_num = '0001'")
            with pytest.raises(LeaseLost):
                await store.open()
