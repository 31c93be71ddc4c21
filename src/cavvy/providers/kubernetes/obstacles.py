"""Finds out what keeps pods from starting: the local queue of Kueue that has not admitted them, or
what Kubernetes' events say about a placed pod.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from cavvy.providers.base import NoCapacity, ProviderError, Refused
from cavvy.providers.kubernetes import status
from cavvy.providers.kubernetes.api import ApiServerRefused, KubernetesApi

Object = dict[str, Any]

_GATE = "kueue.x-k8s.io/admission"
_SETTING = "the setting `queue` of [providers.kubernetes]"
# A kubelet starts most pods within this time, so younger pods need no request.
_PATIENCE = timedelta(seconds=15)
_EARLIEST = datetime.min.replace(tzinfo=UTC)
_LONGEST = 400  # characters; some runtimes return pages of text
# The kubelet reports this beside the actual cause, with the volumes in random order.
_TIMEOUT = "Unable to attach or mount volumes"
# Each attempt to create a sandbox has a new ID.
_SANDBOX_ID = re.compile(r'"?\b[0-9a-f]{64}\b"?')


async def find_kueue(api: KubernetesApi) -> str:
    """Return the path of Kueue's API in its preferred version. Raises ApiServerRefused, with status
    404 if the cluster has no Kueue.
    """
    told = await api.get("/apis/kueue.x-k8s.io")
    return f"/apis/{told['preferredVersion']['groupVersion']}"


def is_gated(pod: Mapping[str, Any]) -> bool:
    """Return whether the pod waits for Kueue's admission."""
    gates = pod["spec"].get("schedulingGates") or ()
    return any(each.get("name") == _GATE for each in gates)


async def explain_wait(api: KubernetesApi, group: str) -> str:
    """Return why Kueue has not admitted the pods of this group yet, or "" if Kueue or the user's
    rights do not tell.
    """
    try:
        version = await find_kueue(api)
        path = f"{version}/namespaces/{api.context.namespace}/workloads/{group}"
        found = await api.find(path) or {}
    except ApiServerRefused:
        return ""
    conditions = (found.get("status") or {}).get("conditions") or []
    waits = {each["type"]: each for each in conditions if each.get("status") == "False"}
    told = waits.get("QuotaReserved") or waits.get("Admitted") or {}
    return str(told.get("message") or told.get("reason") or "")


async def probe_queue(api: KubernetesApi, queue: str) -> None:
    """Check that pods submitted to this local queue can start.

    Raises Refused if the cluster has no such queue (pods would wait forever) or no Kueue (pods
    would bypass the queue). Raises NoCapacity while Kueue reports the queue as inactive, and
    ApiServerRefused if the user has no permission to read the queue.
    """
    namespace = api.context.namespace
    try:
        version = await find_kueue(api)
    except ApiServerRefused as error:
        if error.status != 404:
            raise
        raise Refused(
            f"{_SETTING} names {queue}, but this cluster has no Kueue: install Kueue, or remove "
            "the setting"
        ) from error
    found = await api.find(f"{version}/namespaces/{namespace}/localqueues/{queue}")
    if found is None:
        raise Refused(
            f"{_SETTING} names {queue}, but namespace {namespace} has no Kueue local queue "
            f"with this name, so jobs would wait forever: `kubectl -n {namespace} get "
            "localqueues` lists the existing queues; name one of them, or create this one"
        )
    for condition in (found.get("status") or {}).get("conditions") or []:
        if condition.get("type") == "Active" and condition.get("status") == "False":
            why = f"{condition.get('reason', '')}: {condition.get('message', '')}".strip(": ")
            raise NoCapacity(
                f"the queue {queue} admits no jobs now: {why or 'Kueue gives no reason'}; "
                f"`kubectl -n {namespace} describe localqueue {queue}` shows more"
            )


async def find_obstacle(
    api: KubernetesApi, path: str, pods: Sequence[Object], now: datetime
) -> str:
    """Return the warning that best explains why the first placed pod has not started, or "" if
    there is no such pod or warning. `path` is the API path of the namespace's events.

    The status of such a pod states only `ContainerCreating`. The kubelet reports the cause, such as
    a secret that cannot be mounted or a sandbox that cannot be created, as an event. If the
    events cannot be listed, for example without permission, the cause remains unknown.
    """
    waiting = next((pod for pod in pods if _is_waiting(pod, now)), None)
    if waiting is None:
        return ""
    query = {"fieldSelector": f"involvedObject.uid={waiting['metadata']['uid']},type=Warning"}
    try:
        found = await api.items(path, query)
    except (ApiServerRefused, ProviderError):  # the gang's state is known without its cause
        return ""
    if not found:
        return ""
    worst = max(found, key=_rank)
    parts = (worst.get("reason"), worst.get("message"))
    text = ": ".join(" ".join(part.split()) for part in parts if part)
    text = _SANDBOX_ID.sub("…", text)  # so that the reason does not change with each attempt
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _is_waiting(pod: Object, now: datetime) -> bool:
    """Return whether a pod has had a node for a while but has neither started nor ended."""
    since = status.read_time((pod.get("status") or {}).get("startTime"))
    rank = status.read_pod(pod, {}, now)
    started = rank.started_at is not None or rank.ended_at is not None
    return bool(rank.node) and not started and since is not None and now - since >= _PATIENCE


def _rank(event: Object) -> tuple[bool, bool, datetime]:
    """Return the sort key of an event: failures are greater than other warnings, causes are greater
    than timeouts, and later events are greater than earlier ones.
    """
    failure = (event.get("reason") or "").startswith("Failed")  # unlike MissingClusterDNS
    cause = not (event.get("message") or "").startswith(_TIMEOUT)
    series = event.get("series") or {}
    # Newer API servers set only `eventTime` or `series`.
    times = (event.get("lastTimestamp"), series.get("lastObservedTime"), event.get("eventTime"))
    at = next((at for each in times if (at := status.read_time(each))), _EARLIEST)
    return failure, cause, at
