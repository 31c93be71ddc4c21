"""Leases in PostgreSQL. The server that holds the lease named `control` is the only one that
changes the database; other servers on the same database wait.

Two tables belong to the leases. They exist before the schema is created or migrated, so that only
the holder migrates:

* `cavvy_replicas` has a row for each server process, which the process renews. A process counts as
  dead if its row has expired or if its connection to the database has ended.
* `cavvy_leases` has the holder of each lease and a fencing number, which grows with each new
  holder. A transaction that writes first locks this row in share mode and compares the number. So a
  process that has lost its lease cannot write, and a new holder waits for transactions of the old
  one.

The tables are separate, because renewals would otherwise wait for the transactions that write.
"""

import asyncio
import time
from contextlib import closing, suppress

from cavvy.domain.values import Struct
from cavvy.store.base import LeaseLost, StoreError
from cavvy.store.drivers import DatabaseSession, Row, make_driver, translate
from cavvy.store.fence import LOST, Fence
from cavvy.store.migrate import refuse_newer
from cavvy.store.workers import StoreWorkers

CONTROL = "control"  # name of the lease that allows changing the database
TTL_S = 10.0  # a server that cannot renew its row for this long may be replaced
RENEW_S = 2.0
_ADVISORY_LOCK = 0x636176766C  # number of the lock for creating the tables: "cavvl" in ASCII
_TABLES = (
    "CREATE TABLE IF NOT EXISTS cavvy_replicas (id TEXT PRIMARY KEY, host TEXT NOT NULL, "
    "pid BIGINT NOT NULL, folder TEXT NOT NULL, address TEXT NOT NULL, backend BIGINT NOT NULL, "
    "backend_start BIGINT NOT NULL, until BIGINT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS cavvy_leases (name TEXT PRIMARY KEY, holder TEXT NOT NULL, "
    "fence BIGINT NOT NULL)",
)
_NOW = "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS BIGINT)"
_STARTED = "CAST(EXTRACT(EPOCH FROM a.backend_start) * 1000000 AS BIGINT)"
_MY_START = f"(SELECT {_STARTED} FROM pg_stat_activity a WHERE a.pid = pg_backend_pid())"
_UPSERT = (
    "INSERT INTO cavvy_replicas (id, host, pid, folder, address, backend, backend_start, until) "
    f"VALUES (?, ?, ?, ?, ?, pg_backend_pid(), {_MY_START}, {_NOW} + ?) ON CONFLICT (id) DO UPDATE "
    "SET backend = EXCLUDED.backend, backend_start = EXCLUDED.backend_start, "
    "until = EXCLUDED.until"
)
# The start of a connection of another database user is hidden (NULL).
_CONNECTED = (
    "EXISTS (SELECT 1 FROM pg_stat_activity a WHERE a.pid = r.backend AND "
    f"(a.backend_start IS NULL OR {_STARTED} = r.backend_start))"
)
_HOLDER = (
    "SELECT l.holder, l.fence, r.host, r.pid, r.folder, r.address, "
    f"COALESCE(r.until > {_NOW} AND {_CONNECTED}, FALSE) FROM cavvy_leases l "
    "LEFT JOIN cavvy_replicas r ON r.id = l.holder WHERE l.name = ?"
)
_LOCK = "SELECT 1 FROM cavvy_leases WHERE name = ? FOR UPDATE"


class Replica(Struct, frozen=True, kw_only=True):
    """A server process that works with the database."""

    id: str
    host: str
    pid: int
    folder: str  # its state folder
    address: str  # the address of its socket, as unix:/path


def find_holder(url: str, *, name: str = CONTROL) -> Replica | None:
    """The server that holds the lease, or None if it is free or its holder is dead. Blocks. Raises
    StoreUnusable if the database cannot be reached."""
    driver = make_driver(url, journal="auto")
    try:
        with closing(driver.connect()) as session:
            known = session.run("SELECT to_regclass('cavvy_leases')").fetchone()
            if known is None or known[0] is None:
                return None
            row = session.run(_HOLDER, (name,)).fetchone()
    except Exception as error:
        if (told := translate(error, driver)) is error:
            raise
        raise told from error
    return _holder(row) if row is not None and row[-1] else None


class DatabaseLease:
    """A server's lease on a PostgreSQL database. It has a connection of its own, so that renewals
    do not wait for the server's queries."""

    def __init__(self, url: str, me: Replica, *, name: str = CONTROL, ttl_s: float = TTL_S) -> None:
        self.url = url
        self._me = me
        self._name = name
        self._ttl_s = ttl_s
        self._workers = StoreWorkers(make_driver(url, journal="auto"), count=1, group=1)
        self._prepared = False
        self._renewed = 0.0  # monotonic time at which the last renewal was sent
        self.fence: Fence | None = None

    @property
    def valid(self) -> bool:
        """Whether no other server can have taken the lease because it expired. Writes are checked
        by the database; this is for actions outside the database."""
        return self.fence is not None and time.monotonic() < self._renewed + self._ttl_s

    async def take(self) -> Replica | None:
        """Take the lease if it is free or its holder is dead. Returns None if it was taken, or else
        its holder. Raises StoreUnusable, also if a newer program wrote the database."""
        if not self._prepared:
            await self._workers.do(_create_tables)
            self._prepared = True
        sent = time.monotonic()
        found = await self._workers.do(self._take)
        if isinstance(found, Fence):
            self._renewed, self.fence = sent, found
            return None
        return found

    async def renew(self) -> bool:
        """Renew the lease. Returns False if another server has it. Raises StoreUnusable."""
        sent = time.monotonic()
        try:
            await self._workers.do(self._renew)
        except LeaseLost:
            self.fence = None
            return False
        self._renewed = sent
        return True

    async def release(self) -> None:
        """Give the lease back, if this server holds it, and forget this server. Blocks no longer
        than the connection does."""
        try:
            with suppress(StoreError):
                await self._workers.do(self._release)
        finally:
            self.fence = None
            await asyncio.to_thread(self._workers.close)

    def _take(self, session: DatabaseSession) -> Fence | Replica:
        refuse_newer(session)
        self._announce(session)
        insert = "INSERT INTO cavvy_leases (name, holder, fence) VALUES (?, '', 0)"
        session.run(f"{insert} ON CONFLICT DO NOTHING", (self._name,))
        # The first look takes no lock, because a lock would delay the writes of the holder. The
        # lock is a statement of its own: after a wait, PostgreSQL would join the new row of the
        # lease with the replica of its former holder, and take a new holder for dead.
        for lock in ("", _LOCK):
            if lock:
                session.run(lock, (self._name,))
                session.run("SELECT pg_stat_clear_snapshot()")  # who is connected after the wait
            row = session.run(_HOLDER, (self._name,)).fetchone()
            assert row is not None
            holder, number, *_, alive = row
            if alive and holder != self._me.id:
                return _holder(row)
        self._announce(session)  # again, since the wait for the lock may have used up the time
        update = "UPDATE cavvy_leases SET holder = ?, fence = ? WHERE name = ?"
        session.run(update, (self._me.id, number + 1, self._name))
        session.run(f"DELETE FROM cavvy_replicas WHERE until < {_NOW} - 86400000000")
        return Fence(name=self._name, holder=self._me.id, number=number + 1)

    def _announce(self, session: DatabaseSession) -> None:
        me = self._me
        values = (me.id, me.host, me.pid, me.folder, me.address, int(self._ttl_s * 1_000_000))
        session.run(_UPSERT, values)

    def _renew(self, session: DatabaseSession) -> None:
        assert self.fence is not None
        row = session.run(
            "SELECT 1 FROM cavvy_leases WHERE name = ? AND holder = ? AND fence = ?",
            (self.fence.name, self.fence.holder, self.fence.number),
        ).fetchone()
        if row is None:
            raise LeaseLost(LOST)
        self._announce(session)

    def _release(self, session: DatabaseSession) -> None:
        if self.fence is not None:
            free = "UPDATE cavvy_leases SET holder = '' WHERE name = ? AND holder = ? AND fence = ?"
            session.run(free, (self.fence.name, self.fence.holder, self.fence.number))
        session.run("DELETE FROM cavvy_replicas WHERE id = ?", (self._me.id,))


def _create_tables(session: DatabaseSession) -> None:
    session.run(f"SELECT pg_advisory_xact_lock({_ADVISORY_LOCK})")
    for table in _TABLES:
        session.run(table)


def _holder(row: Row) -> Replica:
    holder, _, host, pid, folder, address, _ = row
    return Replica(id=holder, host=host, pid=pid, folder=folder, address=address)
