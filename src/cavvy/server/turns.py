"""Limits what connections that have shown no token take from others.

`Turns` lets them use the event loop in turn: one step for each address, with a pause after each
batch. Turns prevent an address with many connections or much data from blocking the clients at
other addresses. Many clients with different addresses are served quickly despite the turns.
`Waiting` counts the connections that wait for their handshake, their first request or their next
request. Both the total number of waiting connections and the number for each address are limited.

`Handshakes` accepts the connections of a TLS listener. The listener of uvloop reports a connection
only after its handshake, so this class counts connections before their handshakes, and lets
handshakes take turns.
"""

import asyncio
import contextlib
import ipaddress
import logging
import resource
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

BATCH_S = 0.001  # maximum work for one address before a pause
BATCH_MOST_S = 0.008  # maximum work for all addresses before a pause
# The minimum time that is counted for a step. A handshake takes 0.5 to 1 ms (P-256), after the step
# that starts it, so each address has one in a batch.
STEP_S = 0.00005
HANDSHAKE_S = 0.001
# A pause takes as long as the work before it, within these limits. Shorter timers of uvloop end at
# once, and with a longer pause, connections would wait too long on a busy server.
_REST_LEAST_S = 0.001
_REST_MOST_S = 0.005

Step = Callable[[], None]
WAITING = 512  # maximum number of connections without a request, per listener
WAITING_EACH = 64  # maximum number of connections without a request, per address
# A connection keeps its place for this many seconds, even if other connections need a place.
# Therefore, many nodes that connect at the same time are served one after the other. If the oldest
# connections were cut at once, none of these nodes would be served.
SERVED_S = 5.0

HANDSHAKE_MOST_S = 10.0  # maximum seconds for a handshake
# maximum number of accepted connections that wait for their handshake, per listener; at most a
# quarter of the file descriptors that the process may have
QUEUED = 2048
_ACCEPTED = 16  # maximum number of connections accepted per call
_REST_S = 1.0  # seconds for which the listener pauses when the process has no free file descriptors
_LOOK_S = 0.02  # seconds until an address without a free place is checked again
_log = logging.getLogger(__name__)


class Turns:
    """The steps that wait for their turn, grouped by address."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[tuple[Step, float]]] = {}
        self._busy = False  # whether a batch or the pause after it is in progress

    def add(self, address: str, step: Step, cost_s: float = STEP_S) -> None:
        """Call `step` when it is this address's turn."""
        self._queues.setdefault(address, deque()).append((step, cost_s))
        if not self._busy:
            self._busy = True
            asyncio.get_running_loop().call_soon(self._work)

    def _work(self) -> None:
        spent_s, total_s = dict[str, float](), 0.0
        while self._queues and total_s < BATCH_MOST_S:
            address = next(iter(self._queues))
            if spent_s.get(address, 0.0) >= BATCH_S:
                break  # all other addresses have had their turn since
            queue = self._queues.pop(address)
            step, cost_s = queue.popleft()
            if queue:
                self._queues[address] = queue  # behind all others
            before = time.monotonic()
            step()
            cost_s = max(cost_s, time.monotonic() - before)
            spent_s[address] = spent_s.get(address, 0.0) + cost_s
            total_s += cost_s
        # the tasks that the steps have started run before this call
        asyncio.get_running_loop().call_soon(self._rest, total_s, time.monotonic())

    def _rest(self, spent_s: float, since: float) -> None:
        took_s = spent_s + time.monotonic() - since
        rest_s = min(max(took_s, _REST_LEAST_S), _REST_MOST_S)
        asyncio.get_running_loop().call_later(rest_s, self._go_on)

    def _go_on(self) -> None:
        if self._queues:
            self._work()
        else:
            self._busy = False


class Waiting:
    """The connections that have not sent a request yet, oldest first."""

    def __init__(self) -> None:
        self._all: dict[object, tuple[str, Callable[[], None], float]] = {}
        self._each: dict[str, dict[object, None]] = {}

    def add(self, connection: object, address: str, cut: Callable[[], None]) -> None:
        """Count a connection. If the connection is already counted, its waiting time starts again,
        and the new `cut` replaces the earlier `cut`.
        """
        self.remove(connection)
        self._all[connection] = (address, cut, time.monotonic())
        self._each.setdefault(address, {})[connection] = None

    def remove(self, connection: object) -> None:
        found = self._all.pop(connection, None)
        if found is not None:
            own = self._each[found[0]]
            del own[connection]
            if not own:
                del self._each[found[0]]

    def make_room(self, address: str, *, patient: bool = True) -> bool:
        """Return whether one more connection of this address may wait. If too many connections
        wait, the oldest connection is closed, because a client normally sends its request
        immediately. If the new connection is `patient`, the oldest connection is closed only after
        its time limit.
        """
        own = self._each.get(address, {})
        if address and len(own) >= WAITING_EACH:
            crowd: dict[object, Any] = own
        elif len(self._all) >= WAITING:
            crowd = self._all
        else:
            return True
        oldest = next(iter(crowd))
        _, cut, since = self._all[oldest]
        if patient and time.monotonic() - since < SERVED_S:
            return False
        self.remove(oldest)
        cut()
        return True


def find_origin(peer: object) -> str:
    """Return the address for which a connection is counted: the peer's address or, for IPv6, the
    peer's /64 network. One machine can have all addresses of a /64 network. Returns "" for a Unix
    socket.
    """
    if not isinstance(peer, tuple) or not peer:
        return ""
    host = str(peer[0])
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return f"{ipaddress.IPv6Address(int(address) >> 64 << 64)}/64"


class HandshakeQueue:
    """Accepted connections that wait for their handshake, grouped by address. If too many
    connections wait, the queue closes the newest connection of the address with the most waiting
    connections. Therefore one address cannot fill the queue.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._queues: dict[str, deque[socket.socket]] = {}
        self._count = 0

    def __contains__(self, address: str) -> bool:
        return address in self._queues

    def add(self, address: str, connection: socket.socket) -> None:
        self._queues.setdefault(address, deque()).append(connection)
        self._count += 1
        if self._count > self._most:
            longest = max(self._queues, key=lambda each: len(self._queues[each]))
            self._pop(longest, newest=True).close()

    def take(self, address: str) -> socket.socket:
        """Return the oldest connection of this address."""
        return self._pop(address)

    def close(self) -> None:
        for address in list(self._queues):
            while address in self:
                self._pop(address).close()

    def _pop(self, address: str, *, newest: bool = False) -> socket.socket:
        queue = self._queues[address]
        connection = queue.pop() if newest else queue.popleft()
        self._count -= 1
        if not queue:
            del self._queues[address]
        return connection


class Handshakes:
    """Accepts connections and starts their handshakes. `make` creates a connection's protocol,
    which takes the connection's place in `waiting` after the handshake.
    """

    def __init__(
        self,
        listener: socket.socket,
        waiting: Waiting,
        turns: Turns,
        context: ssl.SSLContext,
        make: Callable[[object], asyncio.Protocol],
    ) -> None:
        self._listener, self._waiting, self._turns = listener, waiting, turns
        self._context, self._make = context, make
        self._loop = asyncio.get_running_loop()
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._queue = HandshakeQueue(min(QUEUED, files // 4))
        self._taking: set[str] = set()  # addresses that wait for their turn to start a handshake
        self._tasks: dict[asyncio.Task[None], socket.socket] = {}
        self._open = True
        self._begin()

    def close(self) -> None:
        self._open = False
        self._loop.remove_reader(self._listener.fileno())
        self._queue.close()
        for connection in self._tasks.values():
            _shut(connection)

    def _begin(self) -> None:
        if self._open:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED):
            try:
                connection, peer = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no free file descriptors
                _log.warning("cannot accept connections: %s", error)
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(_REST_S, self._begin)
                return
            connection.setblocking(False)
            address = find_origin(peer)
            self._queue.add(address, connection)
            if address not in self._taking:
                self._taking.add(address)
                self._wait_for_turn(address)

    def _wait_for_turn(self, address: str) -> None:
        self._turns.add(address, partial(self._start_next, address), HANDSHAKE_S)

    def _start_next(self, address: str) -> None:
        if address not in self._queue:
            self._taking.discard(address)
        elif self._waiting.make_room(address):
            connection = self._queue.take(address)
            self._waiting.add(connection, address, partial(_shut, connection))
            task = self._loop.create_task(self._shake(connection))
            self._tasks[task] = connection
            task.add_done_callback(self._tasks.pop)
            self._wait_for_turn(address)
        else:
            self._loop.call_later(_LOOK_S, self._wait_for_turn, address)

    async def _shake(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                partial(self._make, connection),
                connection,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_MOST_S,
            )
        except OSError:  # this includes SSLError; an unfinished handshake gets no answer
            self._waiting.remove(connection)
            connection.close()
        except BaseException:
            self._waiting.remove(connection)
            raise


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
