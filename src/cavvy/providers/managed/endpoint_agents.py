"""Acts as the agent of endpoints, which run no agent themselves. For each running endpoint, a task
in the server's process claims the rank, reports that the work runs, and receives the order to end
the work.

Each server computes the same nonce and the same message numbers for an endpoint. Therefore the
control plane applies each message once, even if the message is sent again after a restart or by
another server.
"""

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar

from cavvy.domain.gangs import GangSeen, GangState
from cavvy.domain.jobs import AttemptOutcome
from cavvy.domain.messages import (
    AgentCalls,
    AgentMessage,
    ClaimGranted,
    ClaimRefused,
    HostFacts,
    MessageKind,
)

_T = TypeVar("_T")
_LONG_POLL = timedelta(seconds=20)  # shorter than a lease
_PAUSE_S = 5.0  # seconds between requests while the control plane does not answer
_RANK = 0


class EndpointAgents:
    """The tasks of all endpoints, by gang. `note` starts a task for each running endpoint, and
    cancels the task when the endpoint ends.
    """

    def __init__(self, now: Callable[[], datetime]) -> None:
        self._now = now
        self._control_plane: AgentCalls | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def connect(self, control_plane: AgentCalls | None) -> None:
        """See `RunsAgentsHere.connect`. Cancels all tasks; the next call of `note` starts the tasks
        again.
        """
        self._control_plane = control_plane
        self.close()

    def note(self, seen: Sequence[GangSeen], name: str | None) -> None:
        """Start the tasks of running endpoints, and cancel the tasks of endpoints that no longer
        run. `seen` contains all endpoints, or only the endpoint named `name`.
        """
        running = {each.name for each in seen if each.state is GangState.RUNNING}
        known = self._tasks.keys() if name is None else self._tasks.keys() & {name}
        for gone in known - running:
            self._tasks.pop(gone).cancel()
        if self._control_plane is not None:
            for gang in running - self._tasks.keys():
                self._tasks[gang] = asyncio.create_task(self._live(gang, self._control_plane))

    def close(self) -> None:
        for each in self._tasks.values():
            each.cancel()
        self._tasks.clear()

    async def _live(self, gang: str, calls: AgentCalls) -> None:
        nonce = hashlib.sha256(gang.encode()).hexdigest()[:32]
        while True:
            claim = await _ask(lambda: calls.claim(gang, _RANK, nonce, "", HostFacts()))
            if isinstance(claim, ClaimRefused):
                return
            if isinstance(claim, ClaimGranted):
                break
            await _pause()
        await self._say(gang, nonce, calls, 1, MessageKind.RUNNING)
        after = 0
        while True:
            order = await _ask(partial(calls.wait_order, gang, _RANK, after, _LONG_POLL))
            if order is None:
                continue
            after = order.seq
            if order.kind == "stop":
                break
        outcome = AttemptOutcome.STOPPED
        await self._say(
            gang, nonce, calls, 2, MessageKind.EXITED, outcome=outcome, reason=order.reason
        )

    async def _say(
        self, gang: str, nonce: str, calls: AgentCalls, seq: int, kind: MessageKind, **more: Any
    ) -> None:
        message = AgentMessage(seq=seq, at=self._now(), kind=kind, **more)
        await _ask(lambda: calls.messages(gang, _RANK, nonce, [message]))


async def _ask(call: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Repeat a call until it succeeds, and return the answer."""
    while True:
        asked = asyncio.ensure_future(call())
        try:
            await asyncio.wait([asked])
        finally:
            asked.cancel()
        if not asked.cancelled() and asked.exception() is None:
            return asked.result()
        await _pause()


async def _pause() -> None:
    # only the task of one endpoint waits, as an agent on a node does
    await asyncio.sleep(_PAUSE_S)  # noqa: TID251
