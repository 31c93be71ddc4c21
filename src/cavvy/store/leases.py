"""The servers that work with one PostgreSQL database (replicas), and the leases that they hold.

Each lease covers a part of the reconciling work: a shard of the jobs, or a task that only one
server may run. Two tables store the servers and the leases. The lease tables are created before the
schema is created or migrated:

* `cavvy_replicas` contains a row for each server process, and each process renews its own row. A
  process counts as dead if its row has expired or if its connection to the database has ended.
* `cavvy_leases` contains the holder of each lease and a fencing number, which grows with each new
  holder. Each transaction of a pass first locks the lease's row in share mode and compares the
  fencing number. Therefore a process that has lost a lease cannot write under this lease, and a new
  holder takes the lease only after the transactions of the old holder have ended.

The leases have their own tables, because renewals would otherwise wait for the transactions that
write.
"""

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing, suppress
from contextvars import ContextVar
from functools import lru_cache
from hashlib import sha256

from cavvy.domain.values import Struct
from cavvy.store.base import LeaseLost, StoreError, StoreUnusable
from cavvy.store.drivers import DatabaseSession, make_driver, translating
from cavvy.store.migrate import HEAD, is_next, refuse_newer
from cavvy.store.workers import StoreWorkers

_CHECK = "SELECT 1 FROM cavvy_leases WHERE name = ? AND holder = ? AND fence = ? FOR SHARE"


class Fence(Struct, frozen=True, kw_only=True):
    """The permission to write: a transaction is refused if the lease no longer has this holder and
    fencing number."""

    name: str
    holder: str
    number: int


# The fence of the running pass. None for requests, whose writes are protected by the rows'
# versions.
FENCE: ContextVar[Fence | None] = ContextVar("FENCE", default=None)


def begin_fenced(session: DatabaseSession, fence: Fence) -> None:
    """Begin a transaction whose first statement checks the fence. The transaction raises LeaseLost
    if the fence is outdated. The fence's row stays locked until the transaction ends, so a new
    holder of the lease waits for this transaction.
    """
    session.begin()
    session.run_later(_CHECK, _list_values(fence), _make_loss(fence))


def check_fence(session: DatabaseSession, fence: Fence) -> None:
    """Check the fence in the open transaction, and lock the fence's row. Raises LeaseLost."""
    if session.run(_CHECK, _list_values(fence)).fetchone() is None:
        raise _make_loss(fence)


def _list_values(fence: Fence) -> tuple[str, str, int]:
    return fence.name, fence.holder, fence.number


def _make_loss(fence: Fence) -> LeaseLost:
    return LeaseLost(
        f"another server has taken over the lease {fence.name}, so nothing was written"
    )


SHARDS = 64  # parts into which jobs are divided; never changes, since two versions must agree
_RECENT = 4096  # jobs whose lease is remembered


class LeaseChanges(Struct, frozen=True, kw_only=True):
    """The leases that a server should acquire, and the leases that the server should release."""

    take: Sequence[str]
    give: Sequence[str]


@lru_cache(_RECENT)
def shard_of(job_id: str) -> str:
    """Return the lease of a job."""
    number = int.from_bytes(sha256(job_id.encode()).digest()[:4], "big") % SHARDS
    return f"shard:{number:02}"


def list_shards() -> Sequence[str]:
    return [f"shard:{number:02}" for number in range(SHARDS)]


def share_leases(
    names: Collection[str],
    holders: Mapping[str, str],
    alive: Collection[str],
    me: str,
) -> LeaseChanges:
    """Decide which leases the server `me` acquires and releases. The server acquires a lease of
    `names` if `find_preferred` chooses the server and no living server holds the lease. The server
    releases the lease if another server should hold it.
    """
    take, give = [], []
    for name in sorted(names):
        holder = holders.get(name, "")
        holder = holder if holder in alive else ""
        mine = find_preferred(name, alive) == me
        if holder == me and not mine:
            give.append(name)
        elif holder == "" and mine:
            take.append(name)
    return LeaseChanges(take=take, give=give)


def find_preferred(name: str, alive: Collection[str]) -> str:
    """Return the server that should hold a lease (the highest random weight), or "" if no server is
    alive."""
    return max(alive, key=lambda each: (_weigh(name, each), each), default="")


def _weigh(name: str, server: str) -> bytes:
    return sha256(f"{name}\0{server}".encode()).digest()


QUEUE_LEASE = "queue"  # placing waiting jobs, and the pool of warm gangs
# Garbage collection, market records and shared hosts. Older servers, of which only one may be
# active, use this name for their lease, so they wait while any server of this version is alive.
SWEEP_LEASE = "control"
RELAY_LEASE = "relays"  # connecting agents that cannot reach a server
SINGLETONS = (QUEUE_LEASE, SWEEP_LEASE, RELAY_LEASE)
TTL_S = 10.0  # a server that cannot renew its row for this long may be replaced
RENEW_S = 1.0
# Seconds for which other servers expect that a server whose registration has ended comes back: the
# database may have ended the server's connection, or the server's process may have been paused.
ABSENCE_S = 60.0
_ADVISORY_LOCK = 0x636176766C  # number of the lock for creating the tables: "cavvl" in ASCII
_TABLES = (
    "CREATE TABLE IF NOT EXISTS cavvy_replicas (id TEXT PRIMARY KEY, host TEXT NOT NULL, "
    "pid BIGINT NOT NULL, folder TEXT NOT NULL, address TEXT NOT NULL, backend BIGINT NOT NULL, "
    "backend_start BIGINT NOT NULL, until BIGINT NOT NULL)",
    "ALTER TABLE cavvy_replicas ADD COLUMN IF NOT EXISTS revision TEXT",
    "ALTER TABLE cavvy_replicas ADD COLUMN IF NOT EXISTS peer TEXT",
    "CREATE TABLE IF NOT EXISTS cavvy_leases (name TEXT PRIMARY KEY, holder TEXT NOT NULL, "
    "fence BIGINT NOT NULL)",
)
_NOW = "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS BIGINT)"
_STARTED = "CAST(EXTRACT(EPOCH FROM a.backend_start) * 1000000 AS BIGINT)"
_MY_START = f"(SELECT {_STARTED} FROM pg_stat_activity a WHERE a.pid = pg_backend_pid())"
_ANNOUNCE = (
    "INSERT INTO cavvy_replicas (id, host, pid, folder, address, revision, peer, backend, "
    f"backend_start, until) VALUES (?, ?, ?, ?, ?, ?, ?, pg_backend_pid(), {_MY_START}, {_NOW} + ?)"
    " ON CONFLICT (id) DO UPDATE SET peer = EXCLUDED.peer, backend = EXCLUDED.backend, "
    "backend_start = EXCLUDED.backend_start, until = EXCLUDED.until"
)
# The start of a connection of another database user is hidden (NULL).
_ALIVE = (
    "SELECT r.id, r.host, r.pid, r.folder, r.address, r.revision, r.peer FROM cavvy_replicas r "
    f"WHERE r.until > {_NOW} AND EXISTS (SELECT 1 FROM pg_stat_activity a WHERE a.pid = r.backend "
    f"AND (a.backend_start IS NULL OR {_STARTED} = r.backend_start)) ORDER BY r.id"
)
_LEASES = "SELECT name, holder, fence FROM cavvy_leases"
_CREATE = (
    "INSERT INTO cavvy_leases (name, holder, fence) SELECT name, '', 0 FROM unnest(CAST(? AS "
    "TEXT[])) AS n (name) ON CONFLICT DO NOTHING"
)
# A row that a transaction of the former holder has locked is skipped; the next turn takes it.
_TAKE = (
    "WITH free AS (SELECT name FROM cavvy_leases WHERE name = ANY(?) AND NOT holder = ANY(?) "
    "ORDER BY name FOR UPDATE SKIP LOCKED) UPDATE cavvy_leases l SET holder = ?, "
    "fence = l.fence + 1 FROM free WHERE l.name = free.name"
)
_GIVE = "UPDATE cavvy_leases SET holder = '' WHERE holder = ? AND name = ANY(?)"


class Replica(Struct, frozen=True, kw_only=True):
    """A process that is registered in the database. The process is a server that uses the database,
    or a command that prevents servers from starting while the command runs.
    """

    id: str
    host: str
    pid: int
    folder: str  # its state folder
    address: str  # the address of its socket, as unix:/path; empty: it is a command
    # The address at which servers on other machines reach this one, as https://host:port; empty:
    # they cannot reach it; None: an old program, which does not report it
    peer: str | None = ""
    # newest revision of the schema that the server knows; None: an old program
    revision: str | None = HEAD


class LeaseTurn(Struct, frozen=True, kw_only=True):
    """The changes of one turn: the leases that this server acquired, and the leases that this
    server lost or released.
    """

    gained: Sequence[str] = ()
    lost: Sequence[str] = ()

    def then(self, later: "LeaseTurn") -> "LeaseTurn":
        """Return one `LeaseTurn` that contains the changes of this turn and the changes of the turn
        `later`. A lease is in both `gained` and `lost` if it was lost and acquired again.
        """
        return LeaseTurn(gained=[*self.gained, *later.gained], lost=[*self.lost, *later.lost])


class _Registrations(Struct, frozen=True, kw_only=True):
    """The servers that are alive, and the IDs of all servers that have not released leases."""

    alive: Sequence[Replica]
    ids: Collection[str]

    def find_absent(
        self, former: Sequence[Replica], absent: Mapping[str, tuple[Replica, float]], now: float
    ) -> Mapping[str, tuple[Replica, float]]:
        """Return the servers that were alive in the last ABSENCE_S seconds and may come back. A
        server does not come back after it has released its leases, or once another server uses its
        state folder.
        """
        known = {**{each.id: (each, now) for each in former}, **absent}
        used = {(each.host, each.folder) for each in self.alive}
        return {
            name: (each, since)
            for name, (each, since) in known.items()
            if name in self.ids and (each.host, each.folder) not in used and now < since + ABSENCE_S
        }


class ReplicaLeases:
    """One server's registration among the replicas, and its leases. The server uses a separate
    connection for its leases, so that renewals do not wait for its queries.
    """

    def __init__(self, url: str, me: Replica, *, ttl_s: float = TTL_S) -> None:
        self.url = url
        self.me = me
        self.held: Mapping[str, Fence] = {}
        # leases under which no pass may start, because this server is about to give them back
        self.leaving: Collection[str] = ()
        self.alive: Sequence[Replica] = ()  # the servers at the last turn
        # by ID: servers that are no longer alive, and the monotonic time at which this was noticed
        self._absent: Mapping[str, tuple[Replica, float]] = {}
        self._names = [*list_shards(), *SINGLETONS]
        self._ttl_s = ttl_s
        self._workers = StoreWorkers(make_driver(url, journal="auto"), count=1, group=1)
        self._renewed: float | None = None  # monotonic time at which the last renewal was sent

    @property
    def valid(self) -> bool:
        """Whether this server's leases are certainly valid: no other server can have acquired them.
        Check `valid` before actions outside the database; the database itself checks the fence of
        each write.
        """
        return self._renewed is not None and time.monotonic() < self._renewed + self._ttl_s

    @property
    def host_lease(self) -> str:
        """The lease that one server on each machine holds."""
        return f"host:{self.me.host}"

    @property
    def recent(self) -> Sequence[Replica]:
        """The servers that are alive, or were alive in the last ABSENCE_S seconds and may come
        back.
        """
        return [*self.alive, *(each for each, _ in self._absent.values())]

    async def join(self) -> Sequence[Replica]:
        """Register this server; return the other servers that are alive.
        Raises StoreUnusable if the database is too new for this program, or if this program is too
        new for one of the servers.
        """
        await self._workers.do(_create_tables)
        sent = time.monotonic()
        others = await self._workers.do(self._join)
        self._renewed = sent
        return others

    async def turn(self, unfinished: Collection[str] = ()) -> LeaseTurn:
        """Renew this server's registration, and acquire leases. A lease that another server should
        hold is first added to `leaving`. The next call of `turn` releases the leases in `leaving`,
        except the leases in `unfinished`. `unfinished` contains the leases that are still needed,
        because the reconciler has begun a pass with their keys and has not finished it. Raises
        StoreUnusable.
        """
        sent, before = time.monotonic(), self.held
        ready = [name for name in self.leaving if name not in unfinished]
        held, give, found = await self._workers.do(lambda session: self._turn(session, ready))
        self._absent = found.find_absent(self.alive, self._absent, sent)
        self.alive = found.alive
        self._renewed, self.held = sent, held
        self.leaving = frozenset(give) & held.keys()
        return LeaseTurn(
            gained=[name for name, fence in held.items() if before.get(name) != fence],
            lost=[name for name, fence in before.items() if held.get(name) != fence],
        )

    async def leave(self) -> None:
        """Release all leases and delete this server's registration. The call blocks no longer than
        the connection's time limit.
        """
        self.held, self._renewed = {}, None
        try:
            with suppress(StoreError):
                await self._workers.do(self._leave)
        finally:
            await asyncio.to_thread(self._workers.close)

    def _join(self, session: DatabaseSession) -> Sequence[Replica]:
        refuse_newer(session)
        others = [each for each in _list_alive(session) if each.id != self.me.id]
        for each in others:
            if not each.address:
                raise StoreUnusable(
                    "a command, such as `cavvy server adopt` or `cavvy server restore`, works with "
                    f"the database (process {each.pid} on {each.host}); wait until the command "
                    "has ended"
                )
            if each.revision is None:
                raise StoreUnusable(
                    f"process {each.pid} on {each.host} works with the database and cannot share "
                    "it; stop that server and update it first"
                )
            if not is_next(HEAD, each.revision):
                raise StoreUnusable(
                    f"process {each.pid} on {each.host} knows the database only up to revision "
                    f"{each.revision}, and this program needs {HEAD}; update the servers through "
                    "each version between the two"
                )
        self._announce(session)
        session.run(f"DELETE FROM cavvy_replicas WHERE until < {_NOW} - 86400000000")
        session.run(_CREATE, ([*self._names, self.host_lease],))
        return others

    def _turn(
        self, session: DatabaseSession, ready: Sequence[str]
    ) -> tuple[Mapping[str, Fence], Sequence[str], "_Registrations"]:
        """Return this server's current leases, the leases to release, and the registrations of all
        servers.
        """
        self._announce(session)
        alive = _list_alive(session)
        ids = [name for (name,) in session.run("SELECT id FROM cavvy_replicas").fetchall()]
        stored = {name: holder for name, holder, _ in session.run(_LEASES).fetchall()}
        take, give = self._share(stored, alive)
        if given := [name for name in ready if name in give]:
            session.run(_GIVE, (self.me.id, given))
        if take:
            session.run(_TAKE, (take, [each.id for each in alive], self.me.id))
        rows = session.run(f"{_LEASES} WHERE holder = ?", (self.me.id,)).fetchall()
        held = {
            name: Fence(name=name, holder=holder, number=number) for name, holder, number in rows
        }
        return held, give, _Registrations(alive=alive, ids=ids)

    def _share(
        self, stored: Mapping[str, str], alive: Sequence[Replica]
    ) -> tuple[Sequence[str], Sequence[str]]:
        """Return the leases to acquire and the leases to release."""
        ids = [each.id for each in alive]
        here = [each.id for each in alive if each.host == self.me.host]
        shared = share_leases(self._names, stored, ids, self.me.id)
        own = share_leases([self.host_lease], stored, here, self.me.id)
        return [*shared.take, *own.take], [*shared.give, *own.give]

    def _announce(self, session: DatabaseSession) -> None:
        me, ttl = self.me, int(self._ttl_s * 1_000_000)
        values = (me.id, me.host, me.pid, me.folder, me.address, me.revision, me.peer, ttl)
        session.run(_ANNOUNCE, values)

    def _leave(self, session: DatabaseSession) -> None:
        session.run("UPDATE cavvy_leases SET holder = '' WHERE holder = ?", (self.me.id,))
        session.run("DELETE FROM cavvy_replicas WHERE id = ?", (self.me.id,))


def list_replicas(url: str) -> Sequence[Replica]:
    """Return the servers that work with the database now. Blocks. Raises StoreUnusable if the
    database cannot be reached.
    """
    driver = make_driver(url, journal="auto")
    with translating(driver), closing(driver.connect()) as session:
        known = session.run("SELECT to_regclass('cavvy_replicas')").fetchone()
        if known is None or known[0] is None:
            return []
        return _list_alive(session)


def _list_alive(session: DatabaseSession) -> Sequence[Replica]:
    return [
        Replica(
            id=id_,
            host=host,
            pid=pid,
            folder=folder,
            address=address,
            revision=revision,
            peer=peer,
        )
        for id_, host, pid, folder, address, revision, peer in session.run(_ALIVE).fetchall()
    ]


def _create_tables(session: DatabaseSession) -> None:
    session.run(f"SELECT pg_advisory_xact_lock({_ADVISORY_LOCK})")
    for table in _TABLES:
        session.run(table)
