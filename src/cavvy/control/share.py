"""Divides the work among several servers that use one database. Each key of the worklist belongs to
a lease, and only the server that holds the lease reconciles the key. A hint says that a key should
be reconciled soon. If another server reconciles the key, the hint is sent to the other servers.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

from cavvy.control.agents.memory import AgentMemory
from cavvy.control.budgets import BUDGETS
from cavvy.control.clock import ControlClock
from cavvy.control.garbage_collector import SWEEP
from cavvy.control.reconcile import HOSTS, UPLOADS
from cavvy.control.webhooks import is_webhook_key, job_of_webhook
from cavvy.control.worklist import QUEUE, is_calls_key, service_of_calls
from cavvy.store.base import StoreError
from cavvy.store.channel import AgentContacts, ReplicaChannel, ServerSignal, SignalKind
from cavvy.store.leases import (
    FENCE,
    QUEUE_LEASE,
    RENEW_S,
    SWEEP_LEASE,
    LeaseTurn,
    Replica,
    ReplicaLeases,
    shard_of,
)

# A hint may be lost, so this server looks for changes of its jobs by itself.
RECHECK = timedelta(seconds=15)
QUEUE_RECHECK = timedelta(seconds=5)
_EXCHANGE = timedelta(seconds=2)
_FORGET_EVERY = 1800  # number of exchanges between two deletions of old rows
_log = logging.getLogger(__name__)


def lease_of(key: str) -> str:
    """Return the lease to which a key belongs."""
    if key == QUEUE:
        return QUEUE_LEASE
    if key in (SWEEP, UPLOADS, HOSTS, BUDGETS):
        return SWEEP_LEASE
    if is_calls_key(key):
        return shard_of(service_of_calls(key))
    return shard_of(job_of_webhook(key) if is_webhook_key(key) else key)


def bound_wait(again: timedelta | None) -> timedelta:
    """Return how long the queue waits for its next pass; the wait is limited, because a hint of
    another server may be lost."""
    return QUEUE_RECHECK if again is None else min(again, QUEUE_RECHECK)


class WorkShare:
    """The leases of this server, and its signals to the other servers."""

    def __init__(
        self, leases: ReplicaLeases, channel: ReplicaChannel, contacts: AgentContacts
    ) -> None:
        self._leases = leases
        self.url = leases.url  # the database's URL
        self._channel = channel
        self._contacts = contacts
        self._running: Counter[str] = Counter()  # passes that run, by lease
        self._soon = asyncio.Event()
        self.on_signal: Callable[[ServerSignal], None] = lambda signal: None
        self.on_turn: Callable[[], None] = lambda: None  # called after each change of the leases

    @property
    def valid(self) -> bool:
        """Whether this server may act on its leases; see `ReplicaLeases.valid`."""
        return self._leases.valid

    @property
    def me(self) -> Replica:
        """This server."""
        return self._leases.me

    @property
    def serves_machine(self) -> bool:
        """Whether the agents on this server's machine are connected to this server."""
        return self._leases.host_lease in self._leases.held

    @property
    def servers(self) -> Sequence[Replica]:
        """The live servers, and the running commands that prevent servers from starting."""
        return self._leases.alive

    @property
    def recent(self) -> Sequence[Replica]:
        """The live servers, and the servers that may come back; see `ReplicaLeases.recent`."""
        return self._leases.recent

    def find_server(self, server_id: str) -> Replica | None:
        """Return the server with this ID, if it is alive."""
        return next((each for each in self._leases.alive if each.id == server_id), None)

    def find_recent(self, server_id: str) -> Replica | None:
        """Return the server with this ID, if it is alive or may come back."""
        return next((each for each in self.recent if each.id == server_id), None)

    def holds(self, lease: str) -> bool:
        return lease in self._leases.held and lease not in self._leases.leaving

    def owns(self, key: str) -> bool:
        """Return whether this server reconciles the key."""
        return self.holds(lease_of(key))

    def send(self, kind: SignalKind, key: str = "") -> None:
        """Send a signal to the other servers, without any guarantee of delivery. The signal is sent
        even if this server knows of no other: a server that has just started would miss it.
        """
        self._channel.send(ServerSignal(kind, key))

    @contextmanager
    def working(self, key: str) -> Iterator[None]:
        """Keep the lease of `key` while the `with` block runs. If the server has lost the lease,
        the database refuses what the block writes.
        """
        lease = lease_of(key)
        self._running[lease] += 1
        token = FENCE.set(self._leases.held[lease])
        try:
            yield
        finally:
            FENCE.reset(token)
            self._running[lease] -= 1

    async def start(self) -> LeaseTurn:
        """Listen for signals of the other servers, and acquire the first leases. Raises
        StoreError."""
        self._channel.start(self._receive)
        self.send(SignalKind.TURN)
        return await self._leases.turn()

    async def close(self) -> None:
        """Release all leases immediately, so that the other servers can continue."""
        await self._leases.leave()
        self.send(SignalKind.TURN)
        await self._channel.close()
        await asyncio.to_thread(self._contacts.close)

    async def keep(self, changed: Callable[[LeaseTurn], Awaitable[None]]) -> None:
        """Renew, acquire and release leases until cancelled. While the database cannot be reached,
        no pass starts, because `valid` becomes false.
        """
        owed, failing = LeaseTurn(), False
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(RENEW_S):
                    await self._soon.wait()
            self._soon.clear()
            try:
                turn = await self._leases.turn([each for each, n in self._running.items() if n])
                owed = owed.then(turn)
                if owed.gained or owed.lost:
                    await changed(owed)
                    self.on_turn()
                    told = {"gained": len(owed.gained), "lost": len(owed.lost)}
                    _log.info("the leases have changed", extra=told)
                owed, failing = LeaseTurn(), False
            except StoreError as error:  # the next turn does the remaining work
                if not failing:
                    _log.warning("the leases could not be renewed: %s", error)
                failing = True

    async def exchange(self, memory: AgentMemory, clock: ControlClock) -> None:
        """Exchange facts about agents with the other servers until cancelled."""
        count = 0
        while True:
            await clock.sleep_until(clock.now() + _EXCHANGE)
            news = memory.take_news()
            try:
                memory.learn(await self._contacts.exchange(news))
                count += 1
                if self.holds(SWEEP_LEASE) and count % _FORGET_EVERY == 0:
                    await self._contacts.forget(clock.now())
            except StoreError as error:
                memory.give_back(news)
                _log.warning("facts about agents could not be exchanged between servers: %s", error)

    def _receive(self, signals: Sequence[ServerSignal]) -> None:
        for signal in signals:
            if signal.kind is SignalKind.TURN:
                self._soon.set()
            else:
                self.on_signal(signal)


def changed_ids(before: dict[str, int], now: dict[str, int]) -> Collection[str]:
    """Return the jobs that are new or whose version has changed."""
    return [job_id for job_id, version in now.items() if before.get(job_id) != version]
