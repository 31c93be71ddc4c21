"""Lets connections that have shown no token use the event loop in turn: one step for each address,
with a pause after each batch. Turns prevent an address with many connections or much data from
blocking the clients at other addresses. Many clients with different addresses are served quickly
despite the turns.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

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
