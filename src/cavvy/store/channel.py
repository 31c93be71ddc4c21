"""Signals between the servers of one PostgreSQL database, by LISTEN and NOTIFY.

A signal only prompts another server to check the database earlier. A signal may be lost, for
example while a server reconnects; therefore each server also checks the database periodically.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import partial
from threading import Event, Thread

from cavvy.domain.values import Struct
from cavvy.store.base import StoreError
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
