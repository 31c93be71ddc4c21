"""Reads the state of a gang from its job, and from the job's tasks, pool and nodes."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from cavvy.domain.values import Struct, replace
from cavvy.providers.managed.service import JobState, ServiceJob

# the states of a job that has ended: it has no pool any more
ENDED = frozenset({"completed", "deleting"})
# https://learn.microsoft.com/rest/api/batchservice/batch-status-and-error-codes
POOL_QUOTA = "AutoPoolCreationFailedWithQuotaReached"
_BROKEN = frozenset({"unusable", "starttaskfailed"})
_BOOTS = frozenset({"creating", "starting", "waitingforstarttask", "rebooting", "reimaging"})
_UNBILLED = frozenset({"preempted", "deallocated"})
_WAITS = frozenset({"active", "preparing"})

Json = Mapping[str, Any]


class JobParts(Struct, frozen=True, kw_only=True):
    """A job that has not ended, with its tasks, pool and nodes."""

    job: Json
    nodes_wanted: int
    tasks: Sequence[Json] = ()
    nodes: Sequence[Json] = ()
    pool: Json | None = None  # only if nodes are missing


def read_live(parts: JobParts) -> ServiceJob:
    """Return the state of a job that has not ended."""
    started = find_start(parts.nodes)
    if parts.job["state"] == "terminating":
        state = JobState.WAITING if started is None else JobState.RUNNING
        return _make(parts.job, state, started)
    if lost := _find_preemption(parts):
        return ServiceJob(
            id=str(parts.job["id"]),
            name=str(parts.job["id"]),
            state=JobState.RECLAIMED,
            started_at=started or _find_task_start(parts.tasks) or lost,
            ended_at=lost if parts.nodes_wanted == 1 else None,
            preempted=True,
            reason="Azure reclaimed a spot machine; Cavvy ends the job, so that Azure Batch does "
            "not restart the task",
        )
    if broken := _find_broken(parts.nodes):
        return _make(parts.job, JobState.RECLAIMED, started, broken)
    done = [each for each in parts.tasks if each["state"] == "completed"]
    if len(done) >= parts.nodes_wanted:
        start = started or _find_task_start(parts.tasks)
        return _make(parts.job, JobState.RECLAIMED, start, _describe_failure(done))
    if missing := _find_resize_error(parts):
        job = _make(parts.job, JobState.RECLAIMED, started, missing)
        return replace(job, no_capacity=True)
    job = _make(parts.job, JobState.WAITING if started is None else JobState.RUNNING, started)
    return replace(job, waits=_tell_wait(parts))


def read_ended(job: Json, tasks: Sequence[Json], started: datetime | None) -> ServiceJob:
    """Return the state of a job that has ended. `started` is the time from which Azure bills the
    job. If `started` is None because Azure no longer lists the nodes, use the start of the job's
    first task instead.
    """
    told = job.get("executionInfo") or {}
    ended = _time(told.get("endTime")) or _time(job["stateTransitionTime"])
    error = told.get("schedulingError") or {}
    reason = f"{error['code']}: {error.get('message', '')}" if error.get("code") else ""
    return ServiceJob(
        id=str(job["id"]),
        name=str(job["id"]),
        state=JobState.ENDED,
        started_at=started or _find_task_start(tasks) or ended,
        ended_at=ended,
        no_capacity=error.get("code") == POOL_QUOTA,
        reason=reason or _describe_failure(tasks),
    )


def find_start(nodes: Sequence[Json]) -> datetime | None:
    """Return the time when the first node was allocated; Azure bills the node from this time."""
    times = [_time(each.get("allocationTime")) for each in nodes]
    return min((each for each in times if each is not None), default=None)


def _find_preemption(parts: JobParts) -> datetime | None:
    """Return when a spot node was reclaimed, or None if no node was reclaimed. For a reclaimed
    node, Azure Batch reports that the node is preempted, or that the node's task is waiting again.
    """
    lost = [each["stateTransitionTime"] for each in parts.nodes if each["state"] in _UNBILLED]
    for each in parts.tasks:
        told = each.get("executionInfo") or {}
        again = each["state"] in _WAITS and each.get("previousState") == "running"
        if again or told.get("requeueCount") or told.get("retryCount"):
            since = told.get("lastRequeueTime") or told.get("lastRetryTime")
            lost.append(since or each["stateTransitionTime"])
    return min((time for each in lost if (time := _time(each))), default=None)


def _find_broken(nodes: Sequence[Json]) -> str:
    """Return why one of the nodes cannot run tasks, or "" if all nodes are usable."""
    for each in nodes:
        if each["state"] in _BROKEN:
            errors = [f"{one.get('code')}: {one.get('message')}" for one in each.get("errors", ())]
            return f"the node {each['id']} is {each['state']} {'; '.join(errors)}".strip()
    return ""


def _find_resize_error(parts: JobParts) -> str:
    """Return why the pool has too few nodes, or "" if the pool is still growing or has enough
    nodes."""
    pool = parts.pool
    if pool is None or pool.get("allocationState") != "steady":
        return ""
    errors = [f"{each.get('code')}: {each.get('message')}" for each in pool.get("resizeErrors", ())]
    return "; ".join(errors)


def _tell_wait(parts: JobParts) -> str:
    """Return what the job's tasks wait for: nodes, nodes that start, or an image. Return "" if all
    tasks run.
    """
    if len(parts.nodes) < parts.nodes_wanted:
        growth = (parts.pool or {}).get("allocationState")
        state = f", and the pool is {growth}" if growth else ""
        return f"Azure Batch has allocated {len(parts.nodes)} of {parts.nodes_wanted} nodes{state}"
    for what, found, waits in (("node", parts.nodes, _BOOTS), ("task", parts.tasks, _WAITS)):
        for each in found:
            if each["state"] in waits:
                return f"Azure Batch reports: the {what} {each['id']} is {each['state']}"
    return ""


def _describe_failure(tasks: Sequence[Json]) -> str:
    """Return why the first failed task failed, or "" if no task failed."""
    for each in tasks:
        failure = (each.get("executionInfo") or {}).get("failureInfo")
        if failure:
            return f"the task {each['id']} failed: {failure.get('code')}: {failure.get('message')}"
    return ""


def _find_task_start(tasks: Sequence[Json]) -> datetime | None:
    times = [_time((each.get("executionInfo") or {}).get("startTime")) for each in tasks]
    return min((each for each in times if each is not None), default=None)


def _make(job: Json, state: JobState, started: datetime | None, reason: str = "") -> ServiceJob:
    name = str(job["id"])
    return ServiceJob(id=name, name=name, state=state, started_at=started, reason=reason)


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None
