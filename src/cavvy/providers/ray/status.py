"""The launch ledger's records of gangs on Ray clusters, and a gang's state, read from its Ray job
and its driver's log. No I/O.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from cavvy.domain.offers import Offer
from cavvy.domain.values import Struct, replace
from cavvy.providers.base import GangSeen, GangState, NodeSeen
from cavvy.providers.ray.entry import GANG, INSTALLATION, NODES

Object = Mapping[str, Any]

_MARK = "cavvy "
_OVER = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})
KEPT = timedelta(days=2)  # how long a record is kept after the gang's end


class RayRank(Struct, frozen=True, kw_only=True):
    """One node, as reported by the gang's driver."""

    rank: int
    node: str
    started_at: datetime
    address: str = ""
    ended_at: datetime | None = None
    reason: str = ""
    preempted: bool = False
    exit_code: int | None = None


class RayGangRecord(Struct, frozen=True, kw_only=True):
    """One gang, as requested and last observed."""

    name: str
    cluster: str
    nodes: int
    intended_at: datetime
    offer: Offer | None = None  # None if the gang was found on the cluster but not in the ledger
    session: str = ""  # the session of the cluster's head node at the launch
    launched: bool = False  # True: Ray confirmed the launch
    removed: bool = False  # True: the gang is being removed; a job that appears later is stopped
    placed: bool = False  # True: the gang's placement group exists or has existed
    ranks: Sequence[RayRank] = ()
    ended_at: datetime | None = None
    reason: str = ""
    preempted: bool = False


class DriverOutput(Struct, frozen=True, kw_only=True):
    """The driver's messages so far."""

    ranks: Mapping[int, RayRank]
    placed: bool = False
    waits: str = ""
    refused: str = ""
    left: str = ""  # why the driver ended its agents although the gang was not being removed


def gang_of(job: Object, mark: str) -> str:
    """Return the name of the job's gang, or "" if the job belongs to no gang of this
    installation."""
    metadata = job.get("metadata") or {}
    return str(metadata.get(GANG, "")) if metadata.get(INSTALLATION) == mark else ""


def recall(job: Object, cluster: str, now: datetime) -> RayGangRecord:
    """Create a record for a gang that Ray lists but the ledger lacks, because the ledger or a reply
    was lost.
    """
    metadata = job.get("metadata") or {}
    return RayGangRecord(
        name=str(metadata[GANG]),
        cluster=cluster,
        nodes=int(metadata.get(NODES, 1)),
        intended_at=read_time(job.get("start_time")) or now,
        launched=True,
    )


def read_time(milliseconds: object) -> datetime | None:
    if not isinstance(milliseconds, int | float) or not milliseconds:
        return None
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def is_over(job: Object) -> bool:
    return job.get("status") in _OVER


def read_log(text: str) -> DriverOutput:
    """Parse the driver's events from its log; other lines are skipped."""
    ranks: dict[int, RayRank] = {}
    told = DriverOutput(ranks=ranks)
    for line in text.splitlines():
        event = _read_line(line)
        match event.get("event"):
            case "placed":
                told = replace(told, placed=True, waits="")
            case "waits":
                told = replace(told, waits=str(event.get("why", "")))
            case "refused":
                told = replace(told, refused=str(event.get("why", "")))
            case "leaves" if event.get("lost"):
                told = replace(told, left=str(event["why"]))
            case "up" | "ended" | "lost":
                _read_rank(ranks, event)
    return told


def _read_line(line: str) -> Object:
    if not line.startswith(_MARK):
        return {}
    try:
        event = json.loads(line.removeprefix(_MARK))
    except ValueError:
        return {}  # the last line, still incomplete
    return event if isinstance(event, dict) and "at" in event else {}


def _read_rank(ranks: dict[int, RayRank], event: Object) -> None:
    rank, at = int(event.get("rank", 0)), datetime.fromtimestamp(float(event["at"]), UTC)
    known = ranks.get(rank)
    if event["event"] == "up":
        node = f"{event.get('node', '')}"
        ranks[rank] = RayRank(
            rank=rank, node=node, started_at=at, address=str(event.get("address", ""))
        )
        return
    known = known or RayRank(rank=rank, node=str(event.get("node", "")), started_at=at)
    own = event.get("exit") or {}
    said = str(event.get("said") or "").strip()
    reason = str(event.get("reason") or own.get("reason") or "")
    if not own and not reason and event.get("code"):
        reason = f"the rank's agent failed, exit code {event['code']}: {said[-300:]}".rstrip(": ")
    code = own.get("exit_code")
    ranks[rank] = replace(
        known,
        ended_at=max(at, known.started_at),
        reason=reason,
        preempted=bool(event.get("preempted")),
        exit_code=code if isinstance(code, int) else None,
    )


def judge(record: RayGangRecord, job: Object, told: DriverOutput, now: datetime) -> RayGangRecord:
    """Return the record, updated from the job's state and the driver's log. The record of an ended
    gang is returned unchanged.
    """
    if record.ended_at is not None:
        return record
    known = {rank.rank: rank for rank in record.ranks}
    ranks = {
        **known,
        **{rank: seen for rank, seen in told.ranks.items() if not _has_ended(known.get(rank))},
    }
    record = replace(
        record,
        launched=True,
        placed=record.placed or told.placed,
        ranks=tuple(ranks[rank] for rank in sorted(ranks)),
    )
    if not is_over(job):
        return record
    ended_at = read_time(job.get("end_time")) or now
    return end(
        record, max([ended_at, *(r.started_at for r in record.ranks)]), *_why(record, job, told)
    )


def end(record: RayGangRecord, at: datetime, reason: str, preempted: bool) -> RayGangRecord:
    """Return the record of a gang that has ended. A node whose end was not reported gets the end
    time `at`.
    """
    ranks = tuple(
        rank if rank.ended_at else replace(rank, ended_at=max(at, rank.started_at))
        for rank in record.ranks
    )
    last = max((rank.ended_at for rank in ranks if rank.ended_at), default=at)
    return replace(
        record,
        ranks=ranks,
        ended_at=last,
        reason=reason,
        preempted=preempted and not record.removed,
    )


def _why(record: RayGangRecord, job: Object, told: DriverOutput) -> tuple[str, bool]:
    """Return the reason why the gang ended, and whether the gang was preempted."""
    worst = next((rank for rank in record.ranks if rank.preempted), None)
    worst = worst or next((rank for rank in record.ranks if rank.reason), None)
    if told.refused:
        return f"Ray could not place all nodes: {told.refused}", False
    if record.removed:
        return "removed", False
    if worst is not None and worst.preempted:
        return worst.reason, True
    if told.left:
        return told.left, False
    if worst is not None:
        return worst.reason, False
    if job.get("status") == "STOPPED":
        return "the Ray job was stopped in Ray, not by Cavvy", True
    if job.get("status") == "FAILED":
        lines = str(job.get("message") or "").strip().splitlines()
        return f"the Ray job failed: {lines[-1][:300] if lines else 'Ray gives no reason'}", False
    return "the agents exited", False


def _has_ended(rank: RayRank | None) -> bool:
    return rank is not None and rank.ended_at is not None


def explain_wait(job: Object, told: DriverOutput) -> str:
    """Return why the gang waits, or "": the driver's reason or, before the driver runs, Ray's
    message about the gang's job, for example that its runtime environment is being set up.
    """
    if told.waits or job.get("status") != "PENDING":
        return told.waits
    message = " ".join(str(job.get("message") or "").split())
    return f"Ray: {message}" if message else ""


def as_seen(record: RayGangRecord, waits: str = "") -> GangSeen:
    """Return the gang's state for the control plane, derived from the gang's record. `waits` is the
    reason why the gang waits.
    """
    codes = [rank.exit_code for rank in record.ranks if rank.exit_code is not None]
    if record.ended_at is not None:
        state, reason = GangState.ENDED, record.reason
    elif len(record.ranks) == record.nodes:
        state, reason = (
            GangState.RUNNING,
            next((rank.reason for rank in record.ranks if rank.reason), ""),
        )
    else:
        state = GangState.STARTING if record.placed else GangState.QUEUED
        starts = f"Ray has started {len(record.ranks)} of {record.nodes} agents"
        reason = starts if record.placed else waits or "Ray is starting the gang's job"
    return GangSeen(
        name=record.name,
        state=state,
        engine_id=f"{record.cluster}/{record.name}",
        reason=reason,
        preempted=record.preempted,
        exit_code=next((code for code in codes if code), codes[0] if codes else None),
        nodes=tuple(
            NodeSeen(
                rank=rank.rank,
                engine_id=f"{rank.node}/{record.name}/{rank.rank}",
                started_at=rank.started_at,
                ended_at=rank.ended_at,
                address=rank.address or None,
            )
            for rank in record.ranks
        ),
    )
