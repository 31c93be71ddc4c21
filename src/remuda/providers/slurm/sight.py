"""What a job's row, and the records of the shared folder, say about its gang. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from remuda.providers.base import GangSeen, GangState
from remuda.providers.batch.ground import Began, Ended, Exit, Record, list_nodes
from remuda.providers.batch.hostlist import expand
from remuda.providers.slurm.commands import JobRow

_WAITS = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
_BEGINS = frozenset({"CONFIGURING"})
_WORKS = frozenset({"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT"})
# How jobs end, in words for users. "cancelled" is by somebody else: what we cancel is marked as removed.
_ENDS = {
    "COMPLETED": "its agents left",
    "FAILED": "its agents broke",
    "CANCELLED": "it was cancelled in Slurm, not by Remuda",
    "PREEMPTED": "Slurm gave its nodes to a job that goes first",
    "TIMEOUT": "it reached Slurm's time limit",
    "DEADLINE": "it reached Slurm's deadline",
    "NODE_FAIL": "a node failed",
    "BOOT_FAIL": "a node did not boot",
    "OUT_OF_MEMORY": "it used more memory than it asked for",
    "REVOKED": "Slurm gave it to another cluster",
}
_TAKEN = frozenset({"PREEMPTED", "TIMEOUT"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """A job that is over."""

    reason: str
    preempted: bool
    began: Began | None
    ended_at: datetime


def is_over(row: JobRow) -> bool:
    return row.state not in _WAITS | _BEGINS | _WORKS


def see(row: JobRow, record: Record | None) -> GangSeen:
    """A job that is not over."""
    began = began_of(row, record)
    state, reason, eta = GangState.RUNNING, "", None
    if row.state in _WAITS:
        began, state, eta = None, GangState.QUEUED, row.start
        reason = f"Slurm: {row.reason}" if row.reason else "waits in Slurm's queue"
    elif row.state in _BEGINS:
        state, reason = GangState.STARTING, "Slurm makes the nodes ready"
    elif row.state != "RUNNING":
        reason = f"Slurm: {row.state.lower()}"
    nodes = list_nodes(row.id, began)
    return GangSeen(name=row.name, state=state, engine_id=row.id, reason=reason, eta=eta, nodes=nodes)


def began_of(row: JobRow, record: Record | None) -> Began | None:
    """When and where a job began; a job that never got a node has none."""
    if record is not None and record.seen is not None:
        return record.seen
    hosts = tuple(expand(row.nodes))
    return Began(at=row.start, nodes=hosts) if row.start is not None and hosts and row.state not in _WAITS else None


def judge(row: JobRow, record: Record | None, exits: Sequence[Exit], now: datetime) -> Over:
    """How a job ended, as Slurm says; what Slurm forgot is told by what the job itself wrote."""
    removed = record is not None and record.removing
    reason = "removed" if removed else _ENDS.get(row.state, f"Slurm: {row.state.lower()}")
    if record is not None and record.refusal:
        reason = record.refusal
    began = began_of(row, record)
    ended_at = min(row.end, now) if row.end is not None else now
    return Over(reason=reason, preempted=row.state in _TAKEN and not removed, began=began, ended_at=ended_at)


def judge_forgotten(record: Record, exits: Sequence[Exit], times: tuple[datetime | None, datetime | None]) -> Over:
    """How a job ended that Slurm no longer knows, by its own record; `times` are of its begin and its end."""
    began_at, ended_at = times
    began = record.seen
    if began is None and began_at is not None:
        began = Began(at=began_at, nodes=tuple(expand(record.begun.partition(" ")[2])))
    worst = next((each for each in exits if each.exit_code or each.outcome not in ("", "succeeded")), None)
    if record.removing:
        reason = "removed"
    elif record.refusal:
        reason = record.refusal
    elif not record.end:
        reason = "Slurm no longer knows the job, and it wrote no end"
    else:
        reason = worst.reason if worst is not None and worst.reason else "its agents left"
    preempted = not record.removing and any(each.outcome == "preempted" for each in exits)
    assert ended_at is not None
    return Over(reason=reason, preempted=preempted, began=began, ended_at=ended_at)


def close(record: Record, job: str, over: Over, exits: Sequence[Exit], now: datetime) -> Ended:
    """What is remembered of a gang."""
    codes = [each.exit_code for each in exits if each.exit_code is not None]
    return Ended(
        name=record.name,
        job=job,
        reason=over.reason,
        preempted=over.preempted,
        exit_code=next((code for code in codes if code), codes[0] if codes else None),
        began=over.began,
        ended_at=over.ended_at,
        noted_at=now,
    )
