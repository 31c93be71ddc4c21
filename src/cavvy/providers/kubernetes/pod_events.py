"""Reads from Kubernetes' events why a placed pod does not start."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from cavvy.providers.base import ProviderError
from cavvy.providers.kubernetes import status
from cavvy.providers.kubernetes.calls.api import ApiServerRefused, KubernetesApi

Object = dict[str, Any]

# A kubelet starts most pods within this time, so younger pods need no request.
_PATIENCE = timedelta(seconds=15)
_EARLIEST = datetime.min.replace(tzinfo=UTC)
_LONGEST = 400  # characters; some runtimes return pages of text
# The kubelet reports this beside the actual cause, with the volumes in random order.
_TIMEOUT = "Unable to attach or mount volumes"
# Each attempt to create a sandbox has a new ID.
_SANDBOX_ID = re.compile(r'"?\b[0-9a-f]{64}\b"?')


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
