"""Kueue's local queues, where gangs go through one: where Kueue's objects are, and whether a
queue takes work.
"""

from cavvy.providers.base import NoCapacity, Refused
from cavvy.providers.kubernetes.calls.api import ApiServerRefused, KubernetesApi

_SETTING = "the setting `queue` of [providers.kubernetes]"


async def find_kueue(api: KubernetesApi) -> str:
    """Where Kueue's objects are: its versions come and go. Raises ApiServerRefused, 404 where there
    is none.
    """
    told = await api.get("/apis/kueue.x-k8s.io")
    return f"/apis/{told['preferredVersion']['groupVersion']}"


async def probe_queue(api: KubernetesApi, queue: str) -> None:
    """Whether pods that are submitted to this local queue can ever start.

    Raises Refused where there is no such queue (its pods would wait for ever, or, without Kueue, go
    past it), NoCapacity while Kueue says that it takes no work, and ApiServerRefused where it may
    or can not be looked at.
    """
    namespace = api.context.namespace
    try:
        version = await find_kueue(api)
    except ApiServerRefused as error:
        if error.status != 404:
            raise
        raise Refused(
            f"{_SETTING} names {queue}, but this cluster has no Kueue: install it there, or take "
            "the setting out"
        ) from error
    found = await api.find(f"{version}/namespaces/{namespace}/localqueues/{queue}")
    if found is None:
        raise Refused(
            f"{_SETTING} names {queue}, but namespace {namespace} has no such local queue of "
            "Kueue, and jobs would "
            f"wait for ever: `kubectl -n {namespace} get localqueues` lists those there are; name "
            "one of them, or have "
            "this one made"
        )
    for condition in (found.get("status") or {}).get("conditions") or []:
        if condition.get("type") == "Active" and condition.get("status") == "False":
            why = f"{condition.get('reason', '')}: {condition.get('message', '')}".strip(": ")
            raise NoCapacity(
                f"the queue {queue} takes no work now: {why or 'Kueue does not say why'}; "
                f"`kubectl -n {namespace} describe localqueue {queue}` tells more"
            )
