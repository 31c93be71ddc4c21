"""Watches the pods of one context: reports changed gangs, and keeps a tunnel to each running
pod.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from cavvy.providers.base import ProviderError
from cavvy.providers.kubernetes import pods
from cavvy.providers.kubernetes.calls.api import ApiServerRefused
from cavvy.providers.kubernetes.context import ClusterContext

Object = dict[str, Any]

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.2, 10.0
_OVER = ("Succeeded", "Failed")


class PodWatch:
    """Runs a task that watches the pods until `close` is called. When the API server ends a watch,
    the task starts a new watch.
    """

    def __init__(self, cluster: ClusterContext, mark: str, changed: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._mark = mark
        self._changed = changed
        self._carrying = False
        self._known: dict[str, Object] = {}
        self._task = asyncio.create_task(self._run())

    def relay(self) -> None:
        """From now on, keep a tunnel to each running pod, including the pods that are already
        known.
        """
        self._carrying = True
        for pod in self._known.values():
            self._follow(pod)

    def stop_relaying(self) -> None:
        self._carrying = False
        for name in self._known:
            self._cluster.tunnels.let_go(name)

    async def close(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        pause = _FIRST_PAUSE_S
        while True:
            try:
                async for _ in self._watch():
                    pause = _FIRST_PAUSE_S
            except (ProviderError, ApiServerRefused, OSError):
                # until the next watch, the regular polls find changes
                pause = min(_LAST_PAUSE_S, pause * 2)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await asyncio.Event().wait()

    async def _watch(self) -> "Any":
        """List all pods, then watch them. Yields once after the initial list, and then after every
        change."""
        path = f"/api/v1/namespaces/{self._cluster.api.context.namespace}/pods"
        query = {"labelSelector": f"{pods.INSTALLATION}={self._mark}"}
        listed = await self._cluster.api.get(path, query)
        found = {pod["metadata"]["name"]: pod for pod in listed.get("items") or ()}
        for name in set(self._known) - set(found):
            self._take(self._known[name], gone=True)
        for pod in found.values():
            self._take(pod, gone=False)
        yield len(found)
        version = listed["metadata"]["resourceVersion"]
        async for event in self._cluster.api.watch(
            path, {**query, "resourceVersion": version, "timeoutSeconds": "600"}
        ):
            if event["type"] == "ERROR":
                return  # the resource version is too old for a watch, so list the pods again
            if event["type"] in ("ADDED", "MODIFIED", "DELETED"):
                self._take(event["object"], gone=event["type"] == "DELETED")
            yield 1

    def _take(self, pod: Object, *, gone: bool) -> None:
        name = pod["metadata"]["name"]
        self._cluster.note(pod, gone=gone)
        before = self._known.pop(name, None)
        if not gone:
            self._known[name] = pod
        if gone or before is None or _mark_of(before) != _mark_of(pod):
            self._follow(pod, gone=gone)
            self._changed(pod["metadata"]["labels"][pods.GANG])

    def _follow(self, pod: Object, *, gone: bool = False) -> None:
        if not self._carrying:
            return
        name = pod["metadata"]["name"]
        if gone or (pod.get("status") or {}).get("phase") in _OVER:
            self._cluster.tunnels.let_go(name)
        elif pod["spec"].get("nodeName"):
            self._cluster.tunnels.follow(
                name, runs=(pod.get("status") or {}).get("phase") == "Running"
            )


def _mark_of(pod: Object) -> object:
    """Return the fields of a pod that are compared to detect changes."""
    status = pod.get("status") or {}
    states = [
        sorted((each.get("state") or {}).keys()) for each in status.get("containerStatuses") or ()
    ]
    waits = [
        (each.get("type"), each.get("status"), each.get("reason"))
        for each in status.get("conditions") or ()
    ]
    return (
        status.get("phase"),
        status.get("reason"),
        states,
        waits,
        pod["spec"].get("nodeName"),
        pod["metadata"].get("deletionTimestamp"),
    )
