"""What the servers of one PostgreSQL database tell each other: signals by LISTEN and NOTIFY, facts
about agents, and the counts of their gateways.

A signal only prompts another server to check the database earlier. A signal may be lost, for
example while a server reconnects; therefore each server also checks the database periodically.

An agent may be connected to a server that does not reconcile the agent's job, so the servers
exchange the time of its last request, of its last request for work, and until when the budget
suffices. Each server has its own gateway, and the server that reconciles a service needs the
traffic of all gateways.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from enum import StrEnum
from functools import partial
from threading import Event, Thread

from cavvy.domain.values import Struct
from cavvy.store.base import StoreError
from cavvy.store.documents import to_micros, to_time
from cavvy.store.drivers import DatabaseSession, make_driver
from cavvy.store.workers import StoreWorkers

_CHANNEL = "cavvy"
_BYTES = 7900  # maximum bytes of a notification; PostgreSQL allows 7999
_WAITING = 20_000  # maximum number of signals that wait to be sent; later ones are dropped
_LISTEN_S = 1.0  # interval at which the listening thread notices that it must end
_GATHER_S = 0.02  # pause after a notification, in which further signals gather for the next one
_PAUSE_S = 1.0  # pause before it connects again
_log = logging.getLogger(__name__)


class SignalKind(StrEnum):
    """The subject of a signal. A signal has a key. In the comment of each subject, the words in
    parentheses say what the key is.
    """

    HINT = "hint"  # reconcile (a key of the worklist)
    LOOK = "look"  # poll (a gang) before its next decision
    GANG = "gang"  # answer the waiting order requests of (a gang)
    WAKE = "wake"  # answer the requests that wait for (a job, a log, ...)
    MARKET = "market"  # offers have changed
    ACCOUNTS = "accounts"  # a project's credential was set or removed
    EXEC = "exec"  # the sender keeps a command for (a gang, a rank and the command's ID)
    TURN = "turn"  # leases have become free


_KINDS = frozenset(SignalKind)


class ServerSignal(Struct, frozen=True):
    """One signal to all other servers. `key` contains no line breaks."""

    kind: SignalKind
    key: str = ""


class ReplicaChannel:
    """One server's endpoint of the channel: sends signals to all other servers and receives their
    signals. `sender` is this server's ID.
    """

    def __init__(self, url: str, sender: str) -> None:
        self._driver = make_driver(url, journal="auto")
        self._sender = sender
        # in no transaction: each notification is a single statement
        self._workers = StoreWorkers(self._driver, count=1)
        self._waiting: dict[ServerSignal, None] = {}  # the waiting signals in order, each only once
        self._sending: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._ended = Event()
        self._thread: Thread | None = None

    def start(self, receive: Callable[[Sequence[ServerSignal]], None]) -> None:
        """From now on, call `receive` in this event loop with each signal of another server."""
        loop = asyncio.get_running_loop()
        self._thread = Thread(
            target=self._listen, args=(loop, receive), name="store-listen", daemon=True
        )
        self._thread.start()

    def send(self, signal: ServerSignal) -> None:
        """Add a signal to the waiting signals, which are soon sent together. A signal that is added
        twice is sent only once."""
        if len(self._waiting) < _WAITING:
            self._waiting[signal] = None
        if self._sending is None or self._sending.done():
            self._sending = asyncio.get_running_loop().create_task(self._send())

    async def close(self) -> None:
        """Send the waiting signals, and stop listening."""
        self._closing.set()
        self._ended.set()
        if self._sending is not None:
            await asyncio.wait([self._sending])
        await asyncio.to_thread(self._workers.close)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    async def _send(self) -> None:
        while self._waiting:  # later signals go into the next notification
            signals, self._waiting = list(self._waiting), {}
            texts = pack_signals(self._sender, signals)
            try:
                await self._workers.do(partial(_notify, texts))
            except StoreError as error:
                _log.warning("signals to other servers were not sent: %s", error)
            with suppress(TimeoutError):
                async with asyncio.timeout(_GATHER_S):
                    await self._closing.wait()

    def _listen(
        self, loop: asyncio.AbstractEventLoop, receive: Callable[[Sequence[ServerSignal]], None]
    ) -> None:
        while not self._ended.is_set():
            try:
                self._follow(loop, receive)
            except Exception as error:  # noqa: BLE001 - the thread must connect again
                if not self._ended.is_set():
                    _log.warning("signals of other servers are not received: %s", error)
                    self._ended.wait(_PAUSE_S)

    def _follow(
        self, loop: asyncio.AbstractEventLoop, receive: Callable[[Sequence[ServerSignal]], None]
    ) -> None:
        connection = self._driver.connect_raw(readonly=True)
        try:
            connection.execute(f"LISTEN {_CHANNEL}")
            while not self._ended.is_set():
                for each in connection.notifies(timeout=_LISTEN_S):
                    sender, *lines = each.payload.split("\n")
                    if sender != self._sender:
                        with suppress(RuntimeError):  # the loop is closed
                            loop.call_soon_threadsafe(receive, _unpack(lines))
        finally:
            connection.close()


def pack_signals(sender: str, signals: Sequence[ServerSignal]) -> Sequence[str]:
    """Join signals, one on each line, into texts that fit into a notification. Each text begins
    with the sender. Signals that are too long are omitted.
    """
    texts, text = [], sender
    for signal in signals:
        line = f"{signal.kind} {signal.key}"
        size = len(line.encode())
        if len(sender) + 1 + size > _BYTES:
            continue
        if len(text.encode()) + 1 + size > _BYTES:
            texts.append(text)
            text = sender
        text = f"{text}\n{line}"
    return [*texts, text] if text != sender else texts


def _unpack(lines: Sequence[str]) -> Sequence[ServerSignal]:
    """Return the signals. Signals of an unknown kind, which a newer server has sent,
    are omitted."""
    pairs = [line.split(" ", 1) for line in lines]
    return [ServerSignal(SignalKind(kind), key) for kind, key in pairs if kind in _KINDS]


def _notify(texts: Sequence[str], session: DatabaseSession) -> None:
    for text in texts:
        session.run(f"SELECT pg_notify('{_CHANNEL}', ?)", (text,))


GANG = -1  # the rank of facts about a whole gang
_OVERLAP_US = 30_000_000  # a row may be committed this much later than its `written_at`
_CONTACTS_KEPT = timedelta(days=1)
_NOW = "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS BIGINT)"
_COLUMNS = "attempt_id, rank, heard_at, asked_at, paid_until"
_WRITE_CONTACTS = (
    f"INSERT INTO agent_contacts AS c ({_COLUMNS}, server, written_at) SELECT {_COLUMNS}, ?, {_NOW}"
    " FROM unnest(CAST(? AS TEXT[]), CAST(? AS BIGINT[]), CAST(? AS BIGINT[]), CAST(? AS BIGINT[]),"
    f" CAST(? AS BIGINT[])) AS n ({_COLUMNS}) ORDER BY 1, 2 ON CONFLICT (attempt_id, rank)"
    " DO UPDATE SET server = EXCLUDED.server, written_at = EXCLUDED.written_at,"
    " heard_at = GREATEST(c.heard_at, EXCLUDED.heard_at),"
    " asked_at = GREATEST(c.asked_at, EXCLUDED.asked_at),"
    " paid_until = COALESCE(EXCLUDED.paid_until, c.paid_until)"
)
_READ_CONTACTS = (
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
        old = (to_micros(now - _CONTACTS_KEPT),)
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
                _WRITE_CONTACTS,
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
        rows = session.run(_READ_CONTACTS, (self._after - _OVERLAP_US, self._server)).fetchall()
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


_REPORTS_KEPT_US = 86_400_000_000  # how long rows of vanished servers are kept
_WRITE_REPORTS = (
    "INSERT INTO gateway_reports (service, server, document, written_at) SELECT service, ?, "
    f"document, {_NOW} FROM unnest(CAST(? AS TEXT[]), CAST(? AS TEXT[])) AS n (service, document) "
    "ORDER BY 1 ON CONFLICT (service, server) DO UPDATE SET document = EXCLUDED.document, "
    "written_at = EXCLUDED.written_at"
)
_READ_REPORTS = "SELECT server, document FROM gateway_reports WHERE service = ?"


class GatewayReport(Struct, frozen=True, kw_only=True):
    """One gateway's report on a service. `service` is the service's ID, and `document` is the
    encoded report, which this module does not decode.
    """

    service: str
    document: str
    server: str = ""


class GatewayReports:
    """Writes this server's reports and reads the reports of all servers, on its own connection."""

    def __init__(self, url: str, server: str) -> None:
        self._server = server
        self._workers = StoreWorkers(make_driver(url, journal="auto"), count=1, group=1)
        self._tidied = False

    async def put(self, reports: Sequence[GatewayReport]) -> None:
        """Replace this server's reports on these services. Raises StoreError."""
        await self._workers.do(lambda session: self._put(session, reports))

    async def list(self, service: str) -> Sequence[GatewayReport]:
        """Return the newest report of each server, including this server and servers that no longer
        exist. Raises StoreError.
        """
        rows = await self._workers.do(
            lambda session: session.run(_READ_REPORTS, (service,)).fetchall()
        )
        return [
            GatewayReport(service=service, server=server, document=document)
            for server, document in rows
        ]

    async def delete(self, service: str) -> None:
        """Delete all reports on a service that no longer exists, whichever servers wrote the
        reports. Raises StoreError.
        """
        sql = "DELETE FROM gateway_reports WHERE service = ?"
        await self._workers.do(lambda session: session.run(sql, (service,)).rowcount)

    def close(self) -> None:
        """End the connection. Blocks."""
        self._workers.close()

    def _put(self, session: DatabaseSession, reports: Sequence[GatewayReport]) -> None:
        if not self._tidied:
            session.run(
                f"DELETE FROM gateway_reports WHERE written_at < {_NOW} - {_REPORTS_KEPT_US}"
            )
            self._tidied = True
        names, documents = [each.service for each in reports], [each.document for each in reports]
        session.run(_WRITE_REPORTS, (self._server, names, documents))
