"""Writes the messages of many agents together, which the server has taken; see `gathered.py`."""

import asyncio
import contextvars
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

from cavvy.control.agents.gathered import GatheredReports, KnownRank
from cavvy.control.agents.reports import ReportOutcome, apply_messages, note_clock
from cavvy.control.clock import ControlClock
from cavvy.domain.jobs import AttemptPhase
from cavvy.domain.messages import AgentMessage, ClaimLost, MessagesStored
from cavvy.domain.values import Struct, replace
from cavvy.store.base import AtomicWrite, HashMismatch, RankReading, StaleVersion, StoreError
from cavvy.store.sql import Store

_TOGETHER = 200  # ranks whose messages are written in one transaction
_AGAIN = timedelta(seconds=2)  # pause after a write has failed
_log = logging.getLogger(__name__)


class WriteAlone(Protocol):
    """Applies the messages of one rank and writes them at once."""

    async def __call__(
        self, gang: str, rank: int, nonce: str, messages: Sequence[AgentMessage]
    ) -> MessagesStored | ClaimLost: ...


class _Applied(Struct, frozen=True):
    """The messages of a rank, applied to its row."""

    known: KnownRank
    row: RankReading
    report: ReportOutcome

    @property
    def changed(self) -> bool:
        return self.report.node.last_seq > self.row.node.last_seq


class GatheredWrites:
    """Writes what waits in `gathered`. `wake` answers the waiting requests of a gang's agents."""

    def __init__(
        self,
        store: Store,
        clock: ControlClock,
        gathered: GatheredReports,
        write_alone: WriteAlone,
        wake: Callable[[str], None],
    ) -> None:
        self._store, self._clock, self._gathered = store, clock, gathered
        self._write_alone, self._wake = write_alone, wake
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Write soon, and until no messages wait."""
        if self._task is None or self._task.done():
            # in a context of its own, since the write belongs to the audit record of no request
            self._task = asyncio.get_running_loop().create_task(
                self._run(), context=contextvars.Context()
            )

    async def close(self) -> None:
        """Write what waits, and end."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.write()

    async def _run(self) -> None:
        pause = self._gathered.pause
        while self._gathered.list_due():
            await self._clock.sleep_until(self._clock.now() + pause)
            pause = self._gathered.pause if await self.write() else _AGAIN
            self._gathered.forget_old(self._clock.now())

    async def write(self) -> bool:
        """Write the messages that were taken until now. What cannot be written now, for example
        because the database does not answer, stays in memory; then return False.
        """
        due, written = self._gathered.list_due(), True
        for start in range(0, len(due), _TOGETHER):
            part = due[start : start + _TOGETHER]
            try:
                await self._write_together(part)
            except (StaleVersion, HashMismatch):
                for known in part:
                    await self._write_one(known)
            except StoreError as error:
                _log.warning("the reports of %s ranks are written later: %s", len(part), error)
                written = False
        return written

    async def _write_one(self, known: KnownRank) -> None:
        """Write the messages of one rank, because another writer has changed one of the rows, or
        because one of the messages cannot be stored. If that fails, the agent sends them again."""
        try:
            answer = await self._write_alone(
                known.attempt.gang, known.node.rank, known.node.claim or "", ()
            )
        except StoreError as error:
            _log.warning("an agent sends its report again: %s", error)
        else:
            if isinstance(answer, ClaimLost):
                self._gathered.forget(known)

    async def _write_together(self, part: Sequence[KnownRank]) -> None:
        """Write the messages of these ranks in one transaction. Raises StoreError."""
        moment = self._gathered.moment
        rows = await self._store.read_ranks({known.key for known in part})
        applied = [each for known in part if (each := self._apply(known, rows.get(known.key)))]
        reports = [each.report for each in applied if each.changed]
        changes = AtomicWrite(
            nodes=[each.node for each in reports],
            events=[event for each in reports for event in each.events],
            figures=[block for each in reports for block in each.figures],
            steps=[values for each in reports for values in each.steps],
        )
        self._gathered.writing = changes
        try:
            await self._store.commit(changes)
        finally:
            self._gathered.writing = None
        for each in applied:
            self._settle(each, moment)

    def _apply(self, known: KnownRank, row: RankReading | None) -> _Applied | None:
        """Apply the messages of a rank to its row. Return None if it has no row or another agent,
        or if the messages do not follow what is stored, and drop the messages."""
        if (
            row is None
            or row.node.claim != known.node.claim
            or (known.waiting and known.waiting[0].seq > row.node.last_seq + 1)
        ):
            self._gathered.forget(known)
            return None
        at, waiting = known.heard_at, [*known.waiting]
        node = note_clock(row.node, known.sent_at, at)
        return _Applied(known, row, apply_messages(known.job, known.attempt, node, waiting, at))

    def _settle(self, applied: _Applied, moment: int) -> None:
        """Note what is stored now."""
        known, row, node = applied.known, applied.row, applied.row.node
        if applied.changed:
            node = replace(applied.report.node, version=node.version + 1)
        order = known.node.order
        self._gathered.stored(known, node)
        if row.phase is AttemptPhase.ENDED:  # the messages were taken before
            self._gathered.forget(known)
            return
        self._gathered.refresh(known, row, moment, self._clock.now())
        if node.order != order:  # the signal of the server that gave the order was lost
            self._wake(known.attempt.gang)
