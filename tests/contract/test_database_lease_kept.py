"""A server that cannot renew its lease on PostgreSQL learns it, whatever the reason is: without a
lease it starts no pass, and must not go on as if it worked.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import pytest
from tests.contract.store_suite import store_url
from tests.waits import PATIENCE_S, wait_until

from cavvy.api import database
from cavvy.api.database import hold_database
from cavvy.api.state_dir import StateDir
from cavvy.store.base import StoreUnusable
from cavvy.store.drivers import make_driver, translate
from cavvy.store.leases import DatabaseLease

pytestmark = pytest.mark.anyio


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(database, "RENEW_S", 0.05)
    return store_url("postgres", tmp_path)


def run(url: str, sql: str) -> None:
    with closing(make_driver(url, journal="auto").connect()) as session:
        session.run(sql)


async def hold(
    url: str, folder: Path, act: Callable[[DatabaseLease, asyncio.Event], Awaitable[None]]
) -> bool:
    """Hold the lease, act, and return whether the server was told that it lost the lease."""
    lost = asyncio.Event()
    home = StateDir(str(folder))
    async with hold_database(url, home, "unix:/x", lost.set) as lease:
        await act(lease, lost)
    return lost.is_set()


async def test_a_lease_that_another_server_took_is_reported(url: str, tmp_path: Path) -> None:
    async def act(lease: DatabaseLease, lost: asyncio.Event) -> None:
        run(url, "UPDATE cavvy_leases SET holder = 'other', fence = fence + 1")
        async with asyncio.timeout(PATIENCE_S):
            await lost.wait()
        assert not lease.valid

    assert await hold(url, tmp_path, act)


async def test_a_renewal_that_fails_for_another_reason_is_reported(
    url: str, tmp_path: Path
) -> None:
    """A restore of the database replaces its tables."""

    async def act(lease: DatabaseLease, lost: asyncio.Event) -> None:
        run(url, "ALTER TABLE cavvy_replicas RENAME TO gone")
        async with asyncio.timeout(PATIENCE_S):
            await lost.wait()
        run(url, "ALTER TABLE gone RENAME TO cavvy_replicas")

    assert await hold(url, tmp_path, act)


async def test_a_connection_that_ends_is_made_again(url: str, tmp_path: Path) -> None:
    async def act(lease: DatabaseLease, lost: asyncio.Event) -> None:
        end = "SELECT pg_terminate_backend(CAST(backend AS INTEGER)) FROM cavvy_replicas"
        run(url, end)
        await asyncio.sleep(0.5)
        assert lease.valid

    assert not await hold(url, tmp_path, act)


def test_a_transaction_that_postgres_ended_is_one_of_an_unreachable_database(url: str) -> None:
    """As after a machine that was suspended in a transaction: the renewals go on."""
    driver = make_driver(url, journal="auto")
    with closing(driver.connect()) as session:
        session.begin()
        session.run("SET idle_in_transaction_session_timeout = '100ms'")
        wait_until(lambda: _is_gone(url))
        with pytest.raises(Exception) as caught:
            session.run("SELECT 1")
        assert isinstance(translate(caught.value, driver), StoreUnusable)


def _is_gone(url: str) -> bool:
    with closing(make_driver(url, journal="auto").connect()) as session:
        sql = (
            "SELECT COUNT(*) FROM pg_stat_activity WHERE backend_type = 'client backend'"
            " AND datname = current_database() AND pid <> pg_backend_pid()"
        )
        row = session.run(sql).fetchone()
        return row is not None and row[0] == 0
