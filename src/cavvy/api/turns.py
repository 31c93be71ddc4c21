"""Lets connections that have shown no token use the event loop in turn: one step of each address
after the other, and for at most half of the time. So neither many connections nor much data of one
keep the server from others.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

BATCH_S = 0.001  # work that is done before a rest
# What a step costs at least. A handshake takes 0.5 to 1 ms (P-256), after the step that starts it,
# so there is one in a batch.
STEP_S = 0.00005
HANDSHAKE_S = 0.001
# A rest takes as long as the work before it, within these limits. Shorter timers of uvloop end at
# once, and a longer rest would let connections wait for the work of others.
_REST_LEAST_S = 0.001
_REST_MOST_S = 0.005

Step = Callable[[], None]


class Turns:
    """The steps that wait for their turn, by address."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[tuple[Step, float]]] = {}
        self._busy = False  # whether a batch or the rest after it goes on
        self._since = 0.0
        self._late_s = 0.0  # how much later than planned the last rest ended

    def add(self, address: str, step: Step, cost_s: float = STEP_S) -> None:
        """Call `step` when it is this address's turn."""
        self._queues.setdefault(address, deque()).append((step, cost_s))
        if not self._busy:
            self._busy = True
            asyncio.get_running_loop().call_soon(self._work)

    def _work(self) -> None:
        self._since, cost_s = time.monotonic(), 0.0
        while self._queues and max(cost_s, time.monotonic() - self._since) < BATCH_S:
            address = next(iter(self._queues))
            queue = self._queues.pop(address)
            step, step_s = queue.popleft()
            if queue:
                self._queues[address] = queue  # behind all others
            cost_s += step_s
            step()
        # the tasks that the steps have started run before this call
        asyncio.get_running_loop().call_soon(self._rest, cost_s)

    def _rest(self, cost_s: float) -> None:
        now = time.monotonic()
        took_s = max(cost_s, now - self._since) + self._late_s
        rest_s = min(max(took_s, _REST_LEAST_S), _REST_MOST_S)
        asyncio.get_running_loop().call_later(rest_s, self._go_on, now + rest_s)

    def _go_on(self, due: float) -> None:
        # what the steps have started, such as the computing of handshakes, went on in the rest
        self._late_s = max(0.0, time.monotonic() - due)
        if self._queues:
            self._work()
        else:
            self._busy, self._late_s = False, 0.0
