"""Exchanges facts about agents between the servers of one PostgreSQL database: the time of an
agent's last request, the time of its last request for work, and the time until which the budget
suffices. An agent may be connected to a server that does not reconcile the agent's job.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

from cavvy.domain.values import Struct
from cavvy.store.documents import to_micros, to_time
from cavvy.store.drivers import DatabaseSession, make_driver
from cavvy.store.workers import StoreWorkers

GANG = -1  # the rank of facts about a whole gang
_OVERLAP_US = 30_000_000  # a row may be committed this much later than its `written_at`
_KEPT = timedelta(days=1)
_NOW = "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS BIGINT)"
_COLUMNS = "attempt_id, rank, heard_at, asked_at, paid_until"
_WRITE = (
    f"INSERT INTO agent_contacts AS c ({_COLUMNS}, server, written_at) SELECT {_COLUMNS}, ?, {_NOW}"
    " FROM unnest(CAST(? AS TEXT[]), CAST(? AS BIGINT[]), CAST(? AS BIGINT[]), CAST(? AS BIGINT[]),"
    f" CAST(? AS BIGINT[])) AS n ({_COLUMNS}) ORDER BY 1, 2 ON CONFLICT (attempt_id, rank)"
    " DO UPDATE SET server = EXCLUDED.server, written_at = EXCLUDED.written_at,"
    " heard_at = GREATEST(c.heard_at, EXCLUDED.heard_at),"
    " asked_at = GREATEST(c.asked_at, EXCLUDED.asked_at),"
    " paid_until = COALESCE(EXCLUDED.paid_until, c.paid_until)"
)
_READ = (
    f"SELECT {_COLUMNS}, server, written_at FROM agent_contacts WHERE written_at > ?"
    " AND server <> ?"
)


class AgentContact(Struct, frozen=True, kw_only=True):
    """The known facts about the agent of one rank, or about a gang if `rank` is GANG."""

    attempt_id: str
    rank: int
    heard_at: datetime | None = None
    asked_at: datetime | None = None
    paid_until: datetime | None = None
    server: str = ""  # the server that the agent talks to


class AgentContacts:
    """Writes this server's facts and reads the facts of the other servers."""

    def __init__(self, url: str, server: str) -> None:
        self._server = server
        self._workers = StoreWorkers(make_driver(url, journal="auto"), count=1, group=1)
        self._after = 0  # `written_at` of the newest row that was read

    async def exchange(self, news: Sequence[AgentContact]) -> Sequence[AgentContact]:
        """Store this server's new facts and return the facts that the other servers have stored
        since the last call. Some facts can be returned twice. Raises StoreError.
        """
        return await self._workers.do(lambda session: self._exchange(session, news))

    async def forget(self, now: datetime) -> None:
        """Delete old rows."""
        old = (to_micros(now - _KEPT),)
        sql = "DELETE FROM agent_contacts WHERE written_at < ?"
        await self._workers.do(lambda session: session.run(sql, old).rowcount)

    def close(self) -> None:
        """End the connection. Blocks."""
        self._workers.close()

    def _exchange(
        self, session: DatabaseSession, news: Sequence[AgentContact]
    ) -> Sequence[AgentContact]:
        if news:
            session.run(
                _WRITE,
                (
                    self._server,
                    [each.attempt_id for each in news],
                    [each.rank for each in news],
                    *(
                        [_micros(getattr(each, name)) for each in news]
                        for name in ("heard_at", "asked_at", "paid_until")
                    ),
                ),
            )
        rows = session.run(_READ, (self._after - _OVERLAP_US, self._server)).fetchall()
        self._after = max([self._after, *(row[-1] for row in rows)])
        return [
            AgentContact(
                attempt_id=attempt,
                rank=rank,
                heard_at=_time(heard),
                asked_at=_time(asked),
                paid_until=_time(paid),
                server=server,
            )
            for attempt, rank, heard, asked, paid, server, _ in rows
        ]


def _micros(at: datetime | None) -> int | None:
    return None if at is None else to_micros(at)


def _time(micros: int | None) -> datetime | None:
    return None if micros is None else to_time(micros)
