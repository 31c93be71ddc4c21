"""What a gang's record and its pods say about it. Pure."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from cavvy.providers.base import GangSeen, GangState, NodeSeen
from cavvy.providers.hosts.records import AgentExit
from cavvy.providers.kubernetes.pods import CONTAINER, RANK, pod_name

Object = Mapping[str, Any]

_LAUNCH = timedelta(seconds=60)  # pods that are missing for longer were deleted
_PULLS = timedelta(minutes=2)  # a registry, or what starts containers, may be away for a moment
_UNPLACED = timedelta(seconds=30)  # what was free when it was asked for was taken meanwhile
_UNLIKELY = frozenset(
    {"ImagePullBackOff", "ErrImagePull", "CreateContainerError", "RunContainerError"}
)
_NEVER = frozenset({"InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError"})
_TAKEN = frozenset({"Evicted", "Preempting", "Preempted", "Shutdown", "NodeShutdown", "Terminated"})
_TAKERS = {
    "DisruptionTarget": "Kubernetes",
    "TerminationTarget": "Kueue",
}  # conditions of pods that are taken back
_WORDS = {
    "PreemptionByScheduler": "preempted by a pod that goes first",
    "PreemptionByKubeScheduler": "preempted by a pod that goes first",
    "DeletionByTaintManager": "evicted from a tainted node",
    "EvictionByEvictionAPI": "evicted",
    "DeletionByPodGC": "its node is gone",
    "TerminationByKubelet": "ended by its node",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PodRank:
    """One pod as it was seen; kept in the gang's record once it has begun."""

    rank: int
    uid: str
    node: str = ""
    address: str = ""
    started_at: datetime | None = None
    ended_at: datetime | None = None
    preempted: bool = False
    reason: str = ""  # why it waits or ended
    exit: AgentExit | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PodGangEnd:
    """How a gang ended; it never changes."""

    reason: str
    preempted: bool
    exit_code: int | None
    at: datetime
    ranks: tuple[PodRank, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PodGangRecord:
    """A gang as its config map remembers it."""

    name: str
    uid: str
    nodes: int
    asked_at: datetime
    seen: tuple[PodRank, ...] = ()
    removing_at: datetime | None = None
    refusal: str = ""  # why it was given back before it began
    version: str = ""  # of the config map
    ended: PodGangEnd | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PodGangStatus:
    """What a look at a gang found: what to tell, and what is to be noted or done because of it."""

    seen: GangSeen
    note: tuple[PodRank, ...] | None = None  # began, or more of them did
    end: PodGangEnd | None = None  # it is over, and its pods may go
    stuck: tuple[str, ...] = field(default=())  # pods whose node will never answer


def read_record(raw: Object) -> PodGangRecord | None:
    """A record from its config map; None where that is not one of ours."""
    data = raw.get("data") or {}
    with suppress(KeyError, ValueError, msgspec.MsgspecError):
        return PodGangRecord(
            name=raw["metadata"]["name"],
            uid=raw["metadata"]["uid"],
            nodes=int(data["nodes"]),
            asked_at=read_time(data["asked_at"]) or datetime.now(UTC),  # noqa: TID251 - it is never missing
            seen=msgspec.json.decode(data.get("seen", "[]"), type=tuple[PodRank, ...]),
            removing_at=read_time(data.get("removing_at")),
            refusal=data.get("refusal", ""),
            version=raw["metadata"].get("resourceVersion", ""),
            ended=msgspec.json.decode(data["ended"], type=PodGangEnd) if "ended" in data else None,
        )
    return None


def write_ranks(ranks: Sequence[PodRank]) -> str:
    return msgspec.json.encode(ranks).decode()


def write_ended(ended: PodGangEnd) -> str:
    return msgspec.json.encode(ended).decode()


def read_time(text: object) -> datetime | None:
    """A time as Kubernetes writes it."""
    if not isinstance(text, str) or not text:
        return None
    found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def read_pod(pod: Object, lost: Mapping[str, str], now: datetime) -> PodRank:
    """What one pod says. `lost` are nodes that do not answer, with the reason."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    container: Object = next(
        (each for each in status.get("containerStatuses") or () if each["name"] == CONTAINER), {}
    )
    state: Object = container.get("state") or {}
    terminated, running = state.get("terminated") or {}, state.get("running") or {}
    node = pod["spec"].get("nodeName") or ""
    deleting = read_time(metadata.get("deletionTimestamp"))
    taken = _taken(pod, deleting is not None)
    rank = PodRank(
        rank=int(metadata["labels"].get(RANK, 0)),
        uid=metadata["uid"],
        node=node,
        address=status.get("podIP") or "",
        started_at=read_time(running.get("startedAt") or terminated.get("startedAt")),
    )
    if terminated or status.get("phase") in ("Succeeded", "Failed"):
        own = _read_exit(terminated.get("message"))
        return replace(
            rank,
            ended_at=read_time(terminated.get("finishedAt")) or deleting or now,
            preempted=bool(taken) and not (own is not None and own.outcome == "succeeded"),
            reason=taken or _why_ended(status, terminated, own),
            exit=own,
        )
    if (
        deleting is not None and not node
    ):  # Kueue keeps such pods for a while; they never get a node
        return replace(rank, ended_at=deleting, preempted=True, reason=taken)
    if node in lost:
        return replace(rank, ended_at=now, reason=f"its node {node} is lost: {lost[node]}")
    return replace(rank, reason=taken or _why_waiting(status, state, node))


def look(
    record: PodGangRecord,
    pods: Mapping[str, Object],
    gone: Mapping[str, Object],
    lost: Mapping[str, str],
    now: datetime,
) -> PodGangStatus:
    """Judge a gang that is not known to have ended, by its pods, and by those that are gone as
    they were last seen.
    """
    names = [pod_name(record.name, rank) for rank in range(record.nodes)]
    known = {rank.rank: rank for rank in record.seen}
    young = not record.seen and record.removing_at is None and now - record.asked_at < _LAUNCH
    ranks = []
    for number, name in enumerate(names):
        if name in pods:
            rank = read_pod(pods[name], lost, now)
            before = known.get(number)
            if before is not None and before.started_at is not None:
                rank = replace(rank, started_at=before.started_at)
            ranks.append(rank)
        elif not young:
            last = read_pod(gone[name], lost, now) if name in gone else known.get(number)
            ranks.append(_vanished(last, known.get(number), number, record, now))
    stuck = tuple(
        names[each.rank]
        for each in ranks
        if each.ended_at and each.node in lost and names[each.rank] in pods
    )
    if ranks and len(ranks) == record.nodes and all(each.ended_at for each in ranks):
        return _over(record, ranks, stuck)
    note = tuple(each for each in ranks if each.started_at)
    changed = {(each.rank, each.ended_at) for each in note} != {
        (each.rank, each.ended_at) for each in record.seen
    }
    return PodGangStatus(seen=_current(record, ranks), note=note if changed else None, stuck=stuck)


def suspects(pods: Sequence[Object]) -> frozenset[str]:
    """The nodes of pods that run and are not heard of, or that are to go."""
    found = set()
    for pod in pods:
        status = pod.get("status") or {}
        ready: Object = next(
            (each for each in status.get("conditions") or () if each.get("type") == "Ready"), {}
        )
        silent = status.get("phase") == "Running" and ready.get("status") == "False"
        if pod["spec"].get("nodeName") and (silent or pod["metadata"].get("deletionTimestamp")):
            found.add(pod["spec"]["nodeName"])
    return frozenset(found)


def why_lost(node: Object | None, after: timedelta, now: datetime) -> str:
    """Why a node counts as lost; "" where it does not."""
    if node is None:
        return "it is no longer in the cluster"
    conditions = (node.get("status") or {}).get("conditions") or ()
    ready: Object = next((each for each in conditions if each.get("type") == "Ready"), {})
    since = read_time(ready.get("lastTransitionTime"))
    if ready.get("status") == "True" or since is None or now - since < after:
        return ""
    return f"{ready.get('reason', 'NotReady')}: {ready.get('message', '')}".rstrip(": ")


def as_seen(record: PodGangRecord, ended: PodGangEnd) -> GangSeen:
    """What an ended gang looks like to the control plane."""
    return GangSeen(
        name=record.name,
        state=GangState.ENDED,
        engine_id=record.uid,
        reason=ended.reason,
        preempted=ended.preempted,
        exit_code=ended.exit_code,
        nodes=_nodes([rank for rank in ended.ranks if rank.started_at]),
    )


def why_hopeless(pods: Sequence[Object], now: datetime, *, waits: bool) -> str:
    """Why a gang will never start; "" while it may. `waits`: pods may be without a node for as
    long as it takes.
    """
    for pod in pods:
        if read_pod(pod, {}, now).started_at:
            continue  # what runs is not given up because a sidecar is started anew
        for condition in (pod.get("status") or {}).get("conditions") or ():
            since = read_time(condition.get("lastTransitionTime"))
            if (
                condition.get("reason") == "Unschedulable"
                and not waits
                and since
                and now - since >= _UNPLACED
            ):
                return f"Kubernetes could not place all of it: {condition.get('message')}"
        for container in _containers(pod.get("status") or {}):
            waiting = (container.get("state") or {}).get("waiting") or {}
            reason, since = (
                waiting.get("reason", ""),
                read_time((pod.get("status") or {}).get("startTime")),
            )
            long = since is not None and now - since >= _PULLS
            if reason in _NEVER or (reason in _UNLIKELY and long):
                return f"{reason}: {waiting.get('message') or container.get('image')}"
    return ""


def _containers(status: Object) -> Sequence[Object]:
    """Those that go first too, such as the sidecars that a cluster's own rules add."""
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def _over(record: PodGangRecord, ranks: Sequence[PodRank], stuck: tuple[str, ...]) -> PodGangStatus:
    removed = record.removing_at is not None
    worst = next((r for r in ranks if r.preempted), None) or next(
        (r for r in ranks if _went_wrong(r)), ranks[0]
    )
    codes = [r.exit.exit_code for r in ranks if r.exit is not None and r.exit.exit_code is not None]
    ended = PodGangEnd(
        reason=record.refusal or ("removed" if removed else worst.reason) or "its agents left",
        preempted=not removed and any(rank.preempted for rank in ranks),
        exit_code=next((code for code in codes if code), codes[0] if codes else None),
        at=max(rank.ended_at for rank in ranks if rank.ended_at),
        ranks=tuple(ranks),
    )
    return PodGangStatus(seen=as_seen(record, ended), end=ended, stuck=stuck)


def _went_wrong(rank: PodRank) -> bool:
    return bool(rank.reason) and (rank.exit is None or rank.exit.outcome != "succeeded")


def _current(record: PodGangRecord, ranks: Sequence[PodRank]) -> GangSeen:
    waiting = next((each.reason for each in ranks if not each.node), None)
    if waiting is not None or len(ranks) < record.nodes:
        state, reason = GangState.QUEUED, waiting or "its pods are being made"
    elif all(each.started_at or each.ended_at for each in ranks):
        state, reason = GangState.RUNNING, next((each.reason for each in ranks if each.reason), "")
    else:
        state, reason = GangState.STARTING, next((each.reason for each in ranks if each.reason), "")
    return GangSeen(
        name=record.name,
        state=state,
        engine_id=record.uid,
        reason=reason,
        nodes=_nodes([each for each in ranks if each.node]),
    )


def _nodes(ranks: Sequence[PodRank]) -> Sequence[NodeSeen]:
    return [
        NodeSeen(
            rank=each.rank,
            engine_id=f"{each.node}/{each.uid}",
            started_at=each.started_at,
            ended_at=None
            if each.ended_at is None
            else max(each.ended_at, each.started_at or each.ended_at),
            address=each.address or None,
        )
        for each in ranks
    ]


def _vanished(
    last: PodRank | None, before: PodRank | None, number: int, record: PodGangRecord, now: datetime
) -> PodRank:
    """A pod that is no longer there."""
    rank = last or PodRank(rank=number, uid=f"{record.uid}/{number}")
    if before is not None and before.started_at is not None:
        rank = replace(rank, started_at=before.started_at)
    if rank.ended_at is not None:
        return rank
    if record.removing_at is not None:
        return replace(rank, ended_at=now, reason="removed")
    reason = (
        rank.reason
        if rank.started_at and rank.reason
        else "its pod was deleted in Kubernetes, not by Cavvy"
    )
    return replace(rank, ended_at=now, preempted=True, reason=reason)


def _taken(pod: Object, deleting: bool) -> str:
    """Why the cluster takes a pod back; "" where it does not."""
    status = pod.get("status") or {}
    for condition in status.get("conditions") or ():
        who = _TAKERS.get(condition.get("type", ""))
        if who is not None and condition.get("status") == "True":
            reason = condition.get("reason", "")
            return f"{who}: {condition.get('message') or _WORDS.get(reason, reason)}"
    if status.get("reason") in _TAKEN:
        return f"Kubernetes: {status['reason']}: {status.get('message', '')}".rstrip(": ")
    return "Kubernetes took its pod back" if deleting else ""


def _why_ended(status: Object, terminated: Object, own: AgentExit | None) -> str:
    if own is not None:
        return own.reason
    said = status.get("message") or ""
    if status.get("reason"):  # such as DeadlineExceeded, UnexpectedAdmissionError, OutOfcpu
        return f"Kubernetes: {status['reason']}: {said}".rstrip(": ")
    reason, code = terminated.get("reason", ""), terminated.get("exitCode")
    if reason == "OOMKilled":
        return "out of memory: it used more than the pod may, and was killed"
    if reason in ("", "Completed"):
        return ""
    return f"its agent broke: {reason}, exit code {code}: {terminated.get('message') or ''}".rstrip(
        ": "
    )


def _why_waiting(status: Object, state: Object, node: str) -> str:
    waiting = state.get("waiting") or {}
    if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
        return f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
    for condition in status.get("conditions") or ():
        if (
            not node
            and condition.get("type") == "PodScheduled"
            and condition.get("status") == "False"
        ):
            return f"{condition.get('reason', 'Pending')}: {condition.get('message', '')}".rstrip(
                ": "
            )
    return "" if node else "Kubernetes has not placed it yet"


def _read_exit(message: object) -> AgentExit | None:
    """What the agent noted of its work's end, which is the pod's termination message."""
    if not isinstance(message, str):
        return None
    with suppress(ValueError, msgspec.MsgspecError):
        return msgspec.convert(json.loads(message), AgentExit)
    return None
