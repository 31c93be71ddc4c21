"""Runs gangs as batch jobs: records them before submission, finds them by name, derives their state
from the job's row and the records in the shared folder, and records how they ended.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta

from cavvy.domain.host_lists import expand
from cavvy.domain.values import Struct
from cavvy.providers.base import (
    GangSeen,
    GangSpec,
    GangState,
    ProviderContext,
    ProviderError,
    Refused,
    TryAgain,
)
from cavvy.providers.batch.commands import BatchJobRow, BatchPhase, SubmissionUnsure
from cavvy.providers.batch.login_session import relay_mail
from cavvy.providers.batch.system import BatchSystem
from cavvy.providers.batch.workspace import (
    BatchGangEnd,
    BatchGangRecord,
    GangStart,
    SharedWorkspace,
    as_seen,
    list_nodes,
)
from cavvy.providers.hosts.records import AgentExit
from cavvy.providers.project_caches import ProjectCaches

# time limit of a delivery, in which an agent waits 15 s for a lock and then tries for 20 s
_DELIVERY_S = 45.0
_DELIVERIES = 3  # maximum attempts to deliver an agent's reports
_SUBMISSION = timedelta(
    seconds=60
)  # after this time, a submission without an answer has certainly arrived or failed


class ReclaimRules(Struct, frozen=True, kw_only=True):
    """The rules by which a batch system reclaims nodes. `seconds` is the time between SIGTERM and
    the job's end; `warning_s` is the time between the warning and the job's time limit.
    """

    source: str
    seconds: float
    warning_s: float


Submit = Callable[
    [SharedWorkspace, str], Awaitable[str]
]  # submits the job of a gang; gets the agent's folder, and returns the job's id


class BatchGangs:
    """Manages one installation's gangs in one batch system."""

    def __init__(self, system: BatchSystem, context: ProviderContext) -> None:
        self._login_session = system.commands.login_session
        self._system = system
        self._context = context
        self._caches = ProjectCaches(context.state)
        self._workspace: SharedWorkspace | None = None
        self._ended: dict[str, BatchGangEnd] | None = None
        self._launching: dict[str, asyncio.Lock] = {}
        self._looking = asyncio.Lock()
        self._looks = 0
        self._last: tuple[int, dict[str, GangSeen]] = (0, {})
        self._couriers: dict[str, asyncio.Task[None]] = {}
        # removed gangs whose work had ended, so that their jobs end by themselves
        self._leaving: set[str] = set()

    async def launch(self, gang: GangSpec, taking: ReclaimRules, submit: Submit) -> None:
        """See `Provider.launch`. First records the gang, and then calls `submit` at most once."""
        async with self._launching.setdefault(gang.name, asyncio.Lock()):
            try:
                await self._launch(gang, taking, submit)
            finally:
                self._launching.pop(gang.name, None)

    async def knows_end(self, name: str) -> bool:
        """Return whether the gang's end is already recorded."""
        return name in await self._remembered(await self._grounded())

    async def gangs(self, name: str | None) -> Sequence[GangSeen]:
        """See `Provider.gangs`. A call during a poll waits until the next poll has finished, and
        returns the result of the next poll.
        """
        asked = self._looks
        async with self._looking:
            if self._last[0] <= asked:  # the last poll began before this call
                self._looks += 1
                self._last = (self._looks, await self._look())
            found = self._last[1]
        # another server may have recorded the gang's end
        if name is not None and name not in found:
            self._ended = None
            ended = (await self._remembered(await self._grounded())).get(name)
            return [as_seen(ended)] if ended is not None else []
        return [seen for seen in found.values() if name in (None, seen.name)]

    async def remove(self, name: str) -> None:
        """See `Provider.remove`. If all ranks have finished their work, the first call does not
        cancel the job, so that the job ends by itself and the batch system records how it ended.
        """
        workspace = await self._grounded()
        if name in await self._remembered(workspace):
            return
        if (record := await workspace.record(name)) is not None:
            nodes = _count(record)
            if name not in self._leaving and len(await workspace.exits(name, nodes)) == nodes:
                self._leaving.add(name)
                return
            try:
                await workspace.note_removal(name)
            finally:  # cancel the job even if the shared folder is full; the caller tries again
                await self._cancel(workspace, name)
            return
        await self._cancel(workspace, name)

    async def _cancel(self, workspace: SharedWorkspace, name: str) -> None:
        rows = [row for row in await self._jobs(workspace) if row.name == name]
        await self._system.commands.cancel(
            [row.id for row in rows if row.phase is not BatchPhase.OVER]
        )

    async def relay(self) -> None:
        """See `RelaysAgents.relay`."""
        workspace = await self._grounded()
        await relay_mail(self._login_session, workspace.mail, self._context.server_address)

    async def close(self) -> None:
        """Cancel running deliveries of reports. A report whose delivery was cancelled is delivered
        later, by another server or by this server after a restart.
        """
        for courier in self._couriers.values():
            courier.cancel()
        if self._couriers:
            await asyncio.wait(self._couriers.values())

    async def _launch(self, gang: GangSpec, taking: ReclaimRules, submit: Submit) -> None:
        workspace = await self._grounded()
        if self._context.agent_archive is None:
            raise Refused("no agent can be started: the server has no agent command")
        agent = await workspace.place_agent(self._context.agent_archive())
        now = self._context.now()
        cache = await self._caches.name(gang)
        fresh = await workspace.note_intent(
            gang, now, cache, taking.seconds, taking.warning_s, taking.source
        )
        if not fresh and await self._was_submitted(workspace, gang.name, now):
            return
        try:
            job = await submit(workspace, agent)
        except SubmissionUnsure:
            raise
        except ProviderError:
            await workspace.forget(gang.name, gang.nodes)
            raise
        await workspace.note_job(gang.name, job)

    async def _was_submitted(self, workspace: SharedWorkspace, name: str, now: datetime) -> bool:
        """Return True if a recorded gang has a job or no longer needs a job. Raises TryAgain if it
        is not yet certain whether the gang has a job.
        """
        record = await workspace.record(name)
        if (
            record is None or record.job or record.removing
        ):  # no record: the gang has ended in the meantime
            return True
        found = [row for row in await self._jobs(workspace) if row.name == name]
        if found:
            await workspace.note_job(name, found[0].id)
            return True
        if record.intent is not None and now - record.intent.asked_at < _SUBMISSION:
            raise TryAgain(f"{name}: an earlier submission may still be in progress")
        return False

    async def _look(self) -> dict[str, GangSeen]:
        workspace = await self._grounded()
        ended = await self._remembered(workspace)
        records = (
            await workspace.records()
        )  # read before the jobs, so that each recorded gang is either in the queue or has ended
        rows: dict[str, BatchJobRow] = {}
        for row in await self._jobs(workspace):
            if row.name not in rows or rows[row.name].phase is BatchPhase.OVER:
                rows[row.name] = row
        found = {name: as_seen(each) for name, each in ended.items()}
        for name in {*rows, *records} - set(ended):
            seen = await self._see(workspace, rows.get(name), records.get(name))
            if seen is not None:
                found[name] = seen
        return found

    async def _see(
        self, workspace: SharedWorkspace, row: BatchJobRow | None, record: BatchGangRecord | None
    ) -> GangSeen | None:
        if row is None:
            assert record is not None
            if not record.job and not record.removing:
                # the gang may have been recorded but never submitted; its next launch will check
                # this
                return None
            if record.job and not await self._has_delivered(workspace, record):
                return _delivering(record, record.job, record.seen)
            return as_seen(await self._close_forgotten(workspace, record))
        if row.phase is BatchPhase.OVER:
            if record is None:
                return None  # the gang's folder was lost, so its end cannot be recorded
            if not await self._has_delivered(workspace, record):
                return _delivering(record, row.id, began_of(row, record))
            return as_seen(await self._close(workspace, row, record))
        seen = see(row, record)
        began = began_of(row, record)
        if record is not None and record.seen is None and began is not None:
            await workspace.note_seen(row.name, began)
        return seen

    async def _has_delivered(self, workspace: SharedWorkspace, record: BatchGangRecord) -> bool:
        """Return whether all reports of the gang's agents have been delivered. Reports stay
        undelivered if the agent is killed, if the agent exits while the server is down, or if Cavvy
        cancels the job before the agent has sent all reports. The first call starts the delivery of
        undelivered reports on the login node.
        """
        if record.refusal:
            return True
        if record.name not in self._couriers:
            mark = "undelivered" if record.end.startswith("0 ") else "started"
            begun = await workspace.ranks_with(mark, record.name, _count(record))
            if not begun or self._context.agent_archive is None:
                return True
            agent = await workspace.place_agent(self._context.agent_archive())
            self._couriers[record.name] = asyncio.create_task(
                self._deliver(workspace, record, agent, begun)
            )
        return self._couriers[record.name].done()

    async def _deliver(
        self, workspace: SharedWorkspace, record: BatchGangRecord, agent: str, begun: Sequence[int]
    ) -> None:
        """Deliver the ranks' reports to the control plane. Reports are lost if three attempts to
        deliver the reports fail.
        """
        python = str(self._context.settings.get("python", "python3"))
        command = [python, "-I", "-S", f"{agent}/agent/__main__.py", "--deliver"]

        async def deliver(home: str) -> None:
            for _ in range(_DELIVERIES):
                with suppress(ProviderError):
                    argv = [*command, f"{home}/config.json"]
                    done = await self._login_session.run(argv, timeout_s=_DELIVERY_S)
                    if done.code == 0:
                        return

        await asyncio.gather(*(deliver(f"{workspace.gang(record.name)}/{rank}") for rank in begun))

    async def _close(
        self, workspace: SharedWorkspace, row: BatchJobRow, record: BatchGangRecord
    ) -> BatchGangEnd:
        now, nodes = self._context.now(), _count(record)
        exits = await workspace.exits(row.name, nodes)
        words = await workspace.last_words(row.name) if row.broke else ""
        over = judge(row, record, words, now)
        return await self._remember(workspace, close(record, row.id, over, exits, now), nodes)

    async def _close_forgotten(
        self, workspace: SharedWorkspace, record: BatchGangRecord
    ) -> BatchGangEnd:
        """Record the end of a gang whose job the batch system no longer lists. Read from the
        accounting data how the gang ended; if the accounting data does not contain the job, read
        the file that the job wrote.
        """
        accounted = await self._system.accounted(record.job) if record.job else None
        if accounted is not None and accounted.phase is BatchPhase.OVER:
            return await self._close(workspace, accounted, record)
        now, nodes = self._context.now(), _count(record)
        exits = await workspace.exits(record.name, nodes)
        ended_at = min(_epoch(record.end, 1) or now, now)
        over = judge_forgotten(record, exits, _epoch(record.begun, 0), ended_at)
        return await self._remember(workspace, close(record, record.job, over, exits, now), nodes)

    async def _remember(
        self, workspace: SharedWorkspace, ended: BatchGangEnd, nodes: int
    ) -> BatchGangEnd:
        await workspace.close(ended, nodes)
        (await self._remembered(workspace))[ended.name] = ended
        self._couriers.pop(ended.name, None)
        self._leaving.discard(ended.name)
        return ended

    async def _remembered(self, workspace: SharedWorkspace) -> dict[str, BatchGangEnd]:
        if self._ended is None:
            self._ended = await workspace.remembered(self._context.now())
        return self._ended

    async def _jobs(self, workspace: SharedWorkspace) -> Sequence[BatchJobRow]:
        return await self._system.jobs((await self._login_session.hello()).uid, mark_of(workspace))

    async def _grounded(self) -> SharedWorkspace:
        if self._workspace is None:
            self._workspace = SharedWorkspace(
                self._login_session,
                self._context.installation,
                (await self._login_session.hello()).folder,
            )
        return self._workspace


def mark_of(workspace: SharedWorkspace) -> str:
    """Return the text that marks batch jobs as jobs of this installation."""
    return f"cavvy:{workspace.mark}"


def _delivering(record: BatchGangRecord, job: str, began: GangStart | None) -> GangSeen:
    """Describe a gang whose job has ended but whose last reports are being delivered. The gang
    counts as running until the reports are delivered.
    """
    reason = "the gang's last messages are being delivered"
    nodes = list_nodes(job, began)
    return GangSeen(
        name=record.name, state=GangState.RUNNING, engine_id=job, reason=reason, nodes=nodes
    )


def _count(record: BatchGangRecord) -> int:
    return record.intent.nodes if record.intent is not None else 1


def _epoch(text: str, at: int) -> datetime | None:
    """Parse the word at position `at` as seconds since the epoch. Return None if the word is
    missing or not a number.
    """
    words = text.split()
    return (
        datetime.fromtimestamp(int(words[at]), UTC)
        if len(words) > at and words[at].isdigit()
        else None
    )


_STATES = {
    BatchPhase.WAITS: GangState.QUEUED,
    BatchPhase.BEGINS: GangState.STARTING,
    BatchPhase.WORKS: GangState.RUNNING,
}


class JobEnd(Struct, frozen=True, kw_only=True):
    """How a job ended."""

    reason: str
    preempted: bool
    cancelled: bool = False
    began: GangStart | None
    ended_at: datetime


def see(row: BatchJobRow, record: BatchGangRecord | None) -> GangSeen:
    """Describe a gang whose job has not ended, for the control plane."""
    return GangSeen(
        name=row.name,
        state=_STATES[row.phase],
        engine_id=row.id,
        reason=row.reason,
        eta=row.start if row.phase is BatchPhase.WAITS else None,
        nodes=list_nodes(row.id, None if row.phase is BatchPhase.WAITS else began_of(row, record)),
    )


def began_of(row: BatchJobRow, record: BatchGangRecord | None) -> GangStart | None:
    """Return when and where a job began, or None if no nodes have been assigned to the job."""
    if record is not None and record.seen is not None:
        return record.seen
    if row.start is None or not row.hosts or row.phase is BatchPhase.WAITS:
        return None
    return GangStart(at=row.start, nodes=row.hosts)


def judge(row: BatchJobRow, record: BatchGangRecord, words: str, now: datetime) -> JobEnd:
    """Return how a job ended, from the batch system's report. `words` is the last line of the job's
    log."""
    reason = row.reason
    if record.refusal:
        reason = record.refusal
    elif record.removing:
        reason = "removed"
    elif row.broke and words:
        reason = f"{reason}: {words}"
    ended_at = min(row.end, now) if row.end is not None else now
    return JobEnd(
        reason=reason,
        preempted=row.taken and not record.removing,
        cancelled=row.cancelled and not record.removing and not record.refusal,
        began=began_of(row, record),
        ended_at=ended_at,
    )


def judge_forgotten(
    record: BatchGangRecord,
    exits: Sequence[AgentExit],
    began_at: datetime | None,
    ended_at: datetime,
) -> JobEnd:
    """Use the files that the job wrote to determine how the job ended, because the batch system no
    longer lists the job.
    """
    began = record.seen
    if began is None and began_at is not None:
        began = GangStart(at=began_at, nodes=tuple(expand(record.begun.partition(" ")[2])))
    worst = next(
        (each for each in exits if each.exit_code or each.outcome not in ("", "succeeded")), None
    )
    if record.refusal:
        reason = record.refusal
    elif record.removing:
        reason = "removed"
    elif not record.end:
        reason = "the batch system no longer lists the job, and the job did not record its end"
    elif worst is None and not record.end.startswith("0 "):
        reason = f"the gang's agents failed: they ended with exit code {record.end.split()[0]}"
    else:
        reason = worst.reason if worst is not None and worst.reason else "the agents exited"
    preempted = not record.removing and any(each.outcome == "preempted" for each in exits)
    return JobEnd(reason=reason, preempted=preempted, began=began, ended_at=ended_at)


def close(
    record: BatchGangRecord, job: str, over: JobEnd, exits: Sequence[AgentExit], now: datetime
) -> BatchGangEnd:
    """Return the record to store for an ended gang."""
    codes = [each.exit_code for each in exits if each.exit_code is not None]
    return BatchGangEnd(
        name=record.name,
        job=job,
        reason=over.reason,
        preempted=over.preempted,
        cancelled=over.cancelled,
        exit_code=next((code for code in codes if code), codes[0] if codes else None),
        began=over.began,
        ended_at=over.ended_at,
        noted_at=now,
    )
