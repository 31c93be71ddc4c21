"""Finds Kueue's API in the cluster, and checks whether a local queue admits pods."""

from collections.abc import Mapping
from typing import Any

from cavvy.providers.base import NoCapacity, Refused
from cavvy.providers.kubernetes.calls.api import ApiServerRefused, KubernetesApi

_GATE = "kueue.x-k8s.io/admission"
_SETTING = "the setting `queue` of [providers.kubernetes]"


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
