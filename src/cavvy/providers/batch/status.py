"""Derives the state of a gang from its job's row and the records in the shared folder. No I/O."""

from collections.abc import Sequence
from datetime import datetime

from cavvy.domain.host_lists import expand
from cavvy.domain.values import Struct
from cavvy.providers.base import GangSeen, GangState
from cavvy.providers.batch.commands import BatchJobRow, BatchPhase
from cavvy.providers.batch.workspace import BatchGangEnd, BatchGangRecord, GangStart, list_nodes
from cavvy.providers.hosts.records import AgentExit

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
