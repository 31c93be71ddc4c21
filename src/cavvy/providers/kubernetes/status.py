"""Derives the state of a gang from its record and its pods. No I/O."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import msgspec

from cavvy.domain.values import Struct, field, replace
from cavvy.providers.base import GangSeen, GangState, NodeSeen
from cavvy.providers.hosts.records import AgentExit
from cavvy.providers.kubernetes.pods import CONTAINER, RANK, pod_name

Object = Mapping[str, Any]

# a pod that is missing for longer than this after a launch counts as deleted
_LAUNCH = timedelta(seconds=60)
# pods may fail to pull images or to start for this long, because the cause may be temporary
_PULLS = timedelta(minutes=2)
# the maximum time to wait until a pool has added nodes
_SCALES = timedelta(minutes=20)
# how long a pod may stay unscheduled, because another pod may have taken the node's resources
_UNPLACED = timedelta(seconds=30)
_UNLIKELY = frozenset(
    {"ImagePullBackOff", "ErrImagePull", "CreateContainerError", "RunContainerError"}
)
_NEVER = frozenset({"InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError"})
_TAKEN = frozenset({"Evicted", "Preempting", "Preempted", "Shutdown", "NodeShutdown", "Terminated"})
_TAKERS = {
    "DisruptionTarget": "Kubernetes",
    "TerminationTarget": "Kueue",
}  # pod conditions that announce a preemption, and the component that sets them
_WORDS = {
    "PreemptionByScheduler": "preempted by a pod of higher priority",
    "PreemptionByKubeScheduler": "preempted by a pod of higher priority",
    "DeletionByTaintManager": "evicted from a tainted node",
    "EvictionByEvictionAPI": "evicted",
    "DeletionByPodGC": "the pod's node no longer exists",
    "TerminationByKubelet": "terminated by the kubelet of its node",
}


class PodRank(Struct, frozen=True, kw_only=True):
    """The state of one pod. Once the pod has started, its state is stored in the gang's record."""

    rank: int
    uid: str
    node: str = ""
    address: str = ""
    started_at: datetime | None = None
    ended_at: datetime | None = None
    # True: no end was reported, and `ended_at` is the latest time at which the pod can have ended
    unseen: bool = False
    preempted: bool = False
    reason: str = ""  # the reason why the pod waits or has ended
    exit: AgentExit | None = None
    pod: str = ""  # the pod's name; set only if the pod was replaced


class RankTurn(Struct, frozen=True, kw_only=True):
    """How often the pod of a rank was replaced."""

    number: int = 0
    round: int = 0  # the round (`GangSpec.round`) that did it last


class PodGangEnd(Struct, frozen=True, kw_only=True):
    """The final report of an ended gang."""

    reason: str
    preempted: bool
    exit_code: int | None
    at: datetime
    ranks: tuple[PodRank, ...]


class PodGangRecord(Struct, frozen=True, kw_only=True):
    """A gang, as stored in its config map."""

    name: str
    uid: str
    nodes: int
    asked_at: datetime
    seen: tuple[PodRank, ...] = ()
    turns: Mapping[int, RankTurn] = field(default_factory=dict)  # by rank; {} if none was replaced
    replaced: tuple[PodRank, ...] = ()  # pods that were lost and replaced
    pool: str = ""  # the node pool whose autoscaler adds nodes for the gang
    removing_at: datetime | None = None
    refusal: str = ""  # the reason why Cavvy removed the gang before its start; "" if it did not
    version: str = ""  # the resource version of the config map
    ended: PodGangEnd | None = None

    def waits_at(self, now: datetime) -> bool:
        """Return whether Cavvy still waits at the time `now` for the gang's pool to add nodes."""
        return bool(self.pool) and now - self.asked_at < _SCALES

    @property
    def pods(self) -> list[str]:
        """The names of the gang's pods, by rank."""
        return [pod_name(self.name, rank, self.turn(rank).number) for rank in range(self.nodes)]

    @property
    def all_pods(self) -> list[str]:
        """The names of the gang's pods, with those that were replaced."""
        return [*self.pods, *(each.pod for each in self.replaced)]

    def turn(self, rank: int) -> RankTurn:
        return self.turns.get(rank, RankTurn())


class PodGangStatus(Struct, frozen=True, kw_only=True):
    """The state of a gang as derived from its pods, and the actions that the state requires."""

    seen: GangSeen
    # ranks to store in the record, because one of them started or ended
    note: tuple[PodRank, ...] | None = None
    replaced: tuple[PodRank, ...] | None = None  # to store, because one of them has ended
    end: PodGangEnd | None = None  # set if the gang has ended; its pods may then be deleted
    stuck: tuple[str, ...] = ()  # pods on nodes that no longer answer


def read_record(raw: Object) -> PodGangRecord | None:
    """Read a record from its config map, or return None if the config map is not a gang's
    record.
    """
    data = raw.get("data") or {}
    with suppress(KeyError, ValueError, msgspec.MsgspecError):
        return PodGangRecord(
            name=raw["metadata"]["name"],
            uid=raw["metadata"]["uid"],
            nodes=int(data["nodes"]),
            # the field is never missing
            asked_at=read_time(data["asked_at"]) or datetime.now(UTC),  # noqa: TID251
            seen=msgspec.json.decode(data.get("seen", "[]"), type=tuple[PodRank, ...]),
            turns=msgspec.json.decode(data.get("turns", "{}"), type=dict[int, RankTurn]),
            replaced=msgspec.json.decode(data.get("replaced", "[]"), type=tuple[PodRank, ...]),
            pool=data.get("pool", ""),
            removing_at=read_time(data.get("removing_at")),
            refusal=data.get("refusal", ""),
            version=raw["metadata"].get("resourceVersion", ""),
            ended=msgspec.json.decode(data["ended"], type=PodGangEnd) if "ended" in data else None,
        )
    return None


def write(part: Sequence[PodRank] | Mapping[int, RankTurn] | PodGangEnd) -> str:
    """Encode a part of a gang's record for the config map that stores the record."""
    return msgspec.json.encode(part).decode()


def read_time(text: object) -> datetime | None:
    """Parse a time in Kubernetes' notation; return None if the time is missing."""
    if not isinstance(text, str) or not text:
        return None
    found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def read_pod(pod: Object, lost: Mapping[str, str], now: datetime) -> PodRank:
    """Derive the state of one pod. `lost` contains a reason for each node that does not answer."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    state = _state(status)
    terminated, running = state.get("terminated") or {}, state.get("running") or {}
    node = pod["spec"].get("nodeName") or ""
    rank = PodRank(
        rank=int(metadata["labels"].get(RANK, 0)),
        uid=metadata["uid"],
        node=node,
        address=status.get("podIP") or "",
        started_at=read_time(running.get("startedAt") or terminated.get("startedAt")),
    )
    deleting = read_time(metadata.get("deletionTimestamp"))
    # `deletionTimestamp` includes the grace period, so it may be in the future.
    latest = min(deleting or now, now)
    taken = _why_taken(status, deleting is not None)
    if is_over(pod) or terminated:
        end = read_time(terminated.get("finishedAt"))
        ended = replace(rank, ended_at=end or latest, unseen=end is None)
        return _read_end(ended, status, terminated, taken)
    if deleting is not None and not node:
        # Kueue keeps such a pod for a while, although the pod will never get a node.
        return replace(rank, ended_at=latest, preempted=True, reason=taken)
    if node in lost:
        return replace(
            rank, ended_at=now, unseen=True, reason=f"the pod's node {node} is lost: {lost[node]}"
        )
    return replace(rank, reason=taken or _why_waiting(status, state, node))


def _state(status: Object) -> Object:
    """Return the state of the container that runs the agent."""
    containers = status.get("containerStatuses") or ()
    return next((each.get("state") or {} for each in containers if each["name"] == CONTAINER), {})


def _read_end(rank: PodRank, status: Object, terminated: Object, taken: str) -> PodRank:
    own = _read_exit(terminated.get("message"))
    succeeded = own is not None and own.outcome == "succeeded"
    reason = taken or _why_ended(status, terminated, own)
    return replace(rank, preempted=bool(taken) and not succeeded, reason=reason, exit=own)


def is_over(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


class FoundPods(NamedTuple):
    """The existing pods of a gang, and the last known state of its deleted pods, by name."""

    pods: Mapping[str, Object]
    gone: Mapping[str, Object]


def look(
    record: PodGangRecord, found: FoundPods, lost: Mapping[str, str], now: datetime
) -> PodGangStatus:
    """Derive the state of a gang that is not recorded as ended. `lost` are the lost nodes, with the
    reasons.
    """
    names = record.pods
    replaced = tuple(_read_replaced(each, found, lost, now) for each in record.replaced)
    changed = replaced != record.replaced
    record = replace(record, replaced=replaced)
    ranks = read_ranks(record, found, lost, now)
    stuck = tuple(
        names[each.rank]
        for each in ranks
        if each.ended_at and each.node in lost and names[each.rank] in found.pods
    )
    if len(ranks) == record.nodes and all(each.ended_at for each in (*ranks, *replaced)):
        return replace(_over(record, ranks, stuck), replaced=replaced if changed else None)
    note = tuple(each for each in ranks if each.started_at)
    return PodGangStatus(
        seen=_current(record, ranks),
        note=note if _ends(note) != _ends(record.seen) else None,
        replaced=replaced if changed else None,
        stuck=stuck,
    )


def take_out(record: PodGangRecord, ranks: Sequence[PodRank], number: int) -> PodGangRecord:
    """Return the record, in which the pods of these ranks are listed as replaced, and new ones,
    which do not exist yet, have taken their places. `number` is that of the round; pods that this
    round has already replaced stay.
    """
    turns, replaced, names = dict(record.turns), list(record.replaced), record.pods
    for each in ranks:
        turn = record.turn(each.rank)
        if turn.round == number:
            continue
        turns[each.rank] = RankTurn(number=turn.number + 1, round=number)
        replaced.append(replace(each, pod=names[each.rank]))
    seen = tuple(
        each for each in record.seen if turns.get(each.rank) == record.turns.get(each.rank)
    )
    return replace(record, turns=turns, replaced=tuple(replaced), seen=seen)


def _read_replaced(
    rank: PodRank, found: FoundPods, lost: Mapping[str, str], now: datetime
) -> PodRank:
    """Return the state of a pod that was replaced. It ends when it is deleted."""
    if rank.ended_at is not None:
        return rank
    pod = found.pods.get(rank.pod) or found.gone.get(rank.pod)
    if pod is None:
        return replace(rank, ended_at=now, unseen=True)
    seen = read_pod(pod, lost, now)
    if rank.pod not in found.pods and seen.ended_at is None:
        seen = replace(seen, ended_at=now, unseen=True)
    return replace(seen, started_at=rank.started_at or seen.started_at, pod=rank.pod)


def read_ranks(
    record: PodGangRecord, found: FoundPods, lost: Mapping[str, str], now: datetime
) -> list[PodRank]:
    """Return the gang's ranks, except ranks whose pods might not exist yet. A pod that replaces a
    lost one is requested until there is room for it.
    """
    known = {rank.rank: rank for rank in record.seen}
    young = not record.seen and record.removing_at is None and now - record.asked_at < _LAUNCH
    ranks = []
    for number, name in enumerate(record.pods):
        before = known.get(number)
        awaited = record.turn(number).number and before is None and record.removing_at is None
        if name not in found.pods and (young or awaited):
            continue
        pod = found.pods.get(name) or found.gone.get(name)
        rank = before or PodRank(rank=number, uid=f"{record.uid}/{number}")
        if pod is not None:
            rank = read_pod(pod, lost, now)
        if before is not None and before.started_at is not None:
            rank = replace(rank, started_at=before.started_at)
        ranks.append(rank if name in found.pods else _vanished(rank, record, now))
    return ranks


def _ends(ranks: Sequence[PodRank]) -> set[tuple[int, datetime | None]]:
    return {(each.rank, each.ended_at) for each in ranks}


def list_suspects(pods: Sequence[Object]) -> frozenset[str]:
    """Return the nodes whose pods are being deleted, or are running but not ready."""
    found = set()
    for pod in pods:
        status = pod.get("status") or {}
        silent = status.get("phase") == "Running" and _ready(status).get("status") == "False"
        if pod["spec"].get("nodeName") and (silent or pod["metadata"].get("deletionTimestamp")):
            found.add(pod["spec"]["nodeName"])
    return frozenset(found)


def _ready(status: Object) -> Object:
    """Return the Ready condition of a pod or node."""
    conditions = status.get("conditions") or ()
    return next((each for each in conditions if each.get("type") == "Ready"), {})


def why_lost(node: Object | None, after: timedelta, now: datetime) -> str:
    """Return the reason why a node counts as lost, or "" if the node does not count as lost."""
    if node is None:
        return "the node is no longer in the cluster"
    ready = _ready(node.get("status") or {})
    since = read_time(ready.get("lastTransitionTime"))
    if ready.get("status") == "True" or since is None or now - since < after:
        return ""
    return _join({"reason": "NotReady", **ready})


def as_seen(record: PodGangRecord, ended: PodGangEnd) -> GangSeen:
    """Describe an ended gang for the control plane."""
    return GangSeen(
        name=record.name,
        state=GangState.ENDED,
        engine_id=record.uid,
        reason=ended.reason,
        preempted=ended.preempted,
        exit_code=ended.exit_code,
        nodes=_nodes([rank for rank in ended.ranks if rank.started_at]),
        replaced=_nodes([rank for rank in record.replaced if rank.started_at]),
    )


def why_hopeless(pods: Sequence[Object], now: datetime, *, waits: bool) -> str:
    """Return the reason why a gang will never start, or "" if the gang can still start. If `waits`
    is True, pods are allowed to stay unscheduled indefinitely.
    """
    for pod in pods:
        if read_pod(pod, {}, now).started_at:
            continue  # the pod runs, so a sidecar that restarts does not make the gang fail
        status = pod.get("status") or {}
        for condition in () if waits else status.get("conditions") or ():
            since = read_time(condition.get("lastTransitionTime")) or now
            if condition.get("reason") == "Unschedulable" and now - since >= _UNPLACED:
                return f"Kubernetes could not place the whole gang: {condition.get('message')}"
        long = now - (read_time(status.get("startTime")) or now) >= _PULLS
        # The admission webhooks of a cluster may add sidecars as init containers.
        for kind in ("initContainerStatuses", "containerStatuses"):
            for container in status.get(kind) or ():
                waiting = (container.get("state") or {}).get("waiting") or {}
                reason = waiting.get("reason", "")
                if reason in _NEVER or (reason in _UNLIKELY and long):
                    return f"{reason}: {waiting.get('message') or container.get('image')}"
    return ""


def _over(record: PodGangRecord, ranks: Sequence[PodRank], stuck: tuple[str, ...]) -> PodGangStatus:
    removed = record.removing_at is not None
    worst = next((r for r in ranks if r.preempted), None) or next(
        (r for r in ranks if _went_wrong(r)), ranks[0]
    )
    codes = [r.exit.exit_code for r in ranks if r.exit is not None and r.exit.exit_code is not None]
    ended = PodGangEnd(
        reason=record.refusal or ("removed" if removed else worst.reason) or "the agents exited",
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
    reason = next((each.reason for each in ranks if each.reason), "")
    if waiting is not None or len(ranks) < record.nodes:
        state, reason = GangState.QUEUED, waiting or "the pods are being created"
    elif all(each.started_at or each.ended_at for each in ranks):
        state = GangState.RUNNING
    else:
        state = GangState.STARTING
    return GangSeen(
        name=record.name,
        state=state,
        engine_id=record.uid,
        reason=reason,
        preempted=any(each.preempted for each in ranks),
        nodes=_nodes([each for each in ranks if each.node]),
        replaced=_nodes([each for each in record.replaced if each.started_at]),
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
            unseen=each.unseen,
            address=each.address or None,
        )
        for each in ranks
    ]


def _vanished(rank: PodRank, record: PodGangRecord, now: datetime) -> PodRank:
    """Return the state of a pod that no longer exists, derived from its last known state."""
    if rank.ended_at is not None:
        return rank
    if record.removing_at is not None:
        return replace(rank, ended_at=now, unseen=True, reason="removed")
    reason = (
        rank.reason
        if rank.started_at and rank.reason
        else "the pod was deleted in Kubernetes, but not by Cavvy"
    )
    return replace(rank, ended_at=now, unseen=True, preempted=True, reason=reason)


def _why_taken(status: Object, deleting: bool) -> str:
    """Return the reason why the cluster is reclaiming a pod, or "" if the pod is not being
    reclaimed."""
    for condition in status.get("conditions") or ():
        who = _TAKERS.get(condition.get("type", ""))
        if who is not None and condition.get("status") == "True":
            reason = condition.get("reason", "")
            return f"{who}: {condition.get('message') or _WORDS.get(reason, reason)}"
    if status.get("reason") in _TAKEN:
        return _join("Kubernetes", status)
    return "Kubernetes reclaimed its pod" if deleting else ""


def _join(*found: str | Object) -> str:
    """Join strings, and the reasons and messages of objects, into one sentence."""
    parts: list[str | None] = []
    for each in found:
        parts += [each] if isinstance(each, str) else [each.get("reason"), each.get("message")]
    return ": ".join(part for part in parts if part)


def _why_ended(status: Object, terminated: Object, own: AgentExit | None) -> str:
    if own is not None:
        return own.reason
    if status.get("reason"):  # such as DeadlineExceeded, UnexpectedAdmissionError, OutOfcpu
        return _join("Kubernetes", status)
    reason, code = terminated.get("reason", ""), terminated.get("exitCode")
    if reason == "OOMKilled":
        return "out of memory: the pod exceeded its limit and was killed"
    if reason in ("", "Completed"):
        return ""
    message = terminated.get("message") or ""
    return _join("the agent failed", f"{reason}, exit code {code}", message)


def _why_waiting(status: Object, state: Object, node: str) -> str:
    waiting = state.get("waiting") or {}
    if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
        return _join(waiting)
    if node:
        return ""
    for condition in status.get("conditions") or ():
        if (condition.get("type"), condition.get("status")) == ("PodScheduled", "False"):
            return _join({"reason": "Pending", **condition})
    return "Kubernetes has not placed the pod yet"


def _read_exit(message: object) -> AgentExit | None:
    """Return the agent's exit record, from the pod's termination message, or None if the message
    contains no record.
    """
    if not isinstance(message, str):
        return None
    with suppress(ValueError, msgspec.MsgspecError):
        return msgspec.convert(json.loads(message), AgentExit)
    return None
