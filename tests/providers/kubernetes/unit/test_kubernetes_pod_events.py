"""What users are told about a pod that has a node but does not start."""

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.providers.kubernetes.unit.test_kubernetes_calls import (
    PODS,
    Server,
    make_provider,
    make_server,
)
from tests.providers.kubernetes.unit.test_kubernetes_pools import RECORDS
from tests.providers.kubernetes.unit.test_kubernetes_reading import NOW, make_pod_seen

from cavvy.domain.gangs import GangState
from cavvy.providers.kubernetes.pods import GANG, INSTALLATION

Object = dict[str, Any]
EVENTS = PODS.replace("pods", "events")
SANDBOX = "FailedCreatePodSandBox"
TIMEOUT = "Unable to attach or mount volumes"


def make_event(reason: str, message: str, **times: Any) -> Object:
    return {"type": "Warning", "reason": reason, "message": message, **times}


def say(
    tmp_path: Path, events: object, pod: Object, answer: "tuple[int, Any] | None" = None
) -> tuple[Server, str]:
    """The server, and the reason that a gang of one pod has; the pod's node has these events."""
    server = make_server()

    async def scenario() -> str:
        async with server.serving():
            provider = make_provider(tmp_path, server.port)
            labels = {INSTALLATION: provider.mark, GANG: "g"}
            metadata = {"name": "g", "uid": "r", "labels": labels}
            asked = (NOW - timedelta(minutes=10)).isoformat()
            record = {"metadata": metadata, "data": {"nodes": "1", "asked_at": asked}}
            server.answers["GET", RECORDS] = 200, {"items": [record]}
            pod["metadata"]["labels"] = {**pod["metadata"]["labels"], **labels}
            server.answers["GET", PODS] = 200, {"items": [pod]}
            server.answers["GET", EVENTS] = answer or (200, {"items": events})
            (seen,) = await provider.gangs()
            await provider.close()
            assert seen.state in (GangState.STARTING, GangState.RUNNING)
            return seen.reason

    return server, asyncio.run(scenario())


CREATING = {"waiting": {"reason": "ContainerCreating"}}


@pytest.mark.parametrize("state", [CREATING, {"waiting": {"reason": "PodInitializing"}}, {}])
def test_the_latest_failure_of_a_placed_pod_is_told(tmp_path: Path, state: Object) -> None:
    events = [
        make_event("FailedMount", "no secret", lastTimestamp="2026-05-01T11:58:00Z"),
        make_event(SANDBOX, "no image\n  localhost/pause:1", eventTime="2026-05-01T11:59:00.12Z"),
        make_event("FailedMount", "older", series={"lastObservedTime": "2026-05-01T11:57:00Z"}),
        make_event("FailedOddly", "no time at all"),
        make_event("MissingClusterDNS", "no IP", lastTimestamp="2026-05-01T11:59:40Z"),
        make_event("FailedMount", f"{TIMEOUT}: [a]", lastTimestamp="2026-05-01T11:59:30Z"),
    ]
    server, reason = say(tmp_path, events, make_pod_seen("Pending", state))
    assert reason == f"{SANDBOX}: no image localhost/pause:1"
    assert server.asked.count(("GET", EVENTS)) == 1


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([], ""),
        ([make_event("FailedMount", "")], "FailedMount"),
        ([{}], ""),
        ([make_event("FailedMount", f"{TIMEOUT}: [a]")], f"FailedMount: {TIMEOUT}: [a]"),
        (
            [make_event(SANDBOX, f'no network for "{"0a" * 32}": full')],
            f"{SANDBOX}: no network for …: full",
        ),
        ([make_event("Long", "é" * 9000)], "Long: " + "é" * 393 + "…"),
    ],
)
def test_events_may_lack_or_exceed_anything(tmp_path: Path, events: object, reason: str) -> None:
    assert say(tmp_path, events, make_pod_seen("Pending", CREATING))[1] == reason


@pytest.mark.parametrize(("status", "body"), [(403, {}), (500, {}), (200, b"no JSON")])
def test_a_pod_whose_events_cannot_be_listed_just_starts(
    tmp_path: Path, status: int, body: object
) -> None:
    server, reason = say(tmp_path, [], make_pod_seen("Pending", CREATING), (status, body))
    assert (reason, ("GET", EVENTS) in server.asked) == ("", True)


@pytest.mark.parametrize(
    "pod",
    [
        make_pod_seen("Running", {"running": {"startedAt": "2026-05-01T11:50:05Z"}}),
        make_pod_seen("Pending", {"waiting": {"reason": "ErrImagePull", "message": "none"}}),
        make_pod_seen("Pending", CREATING, status={"startTime": "2026-05-01T11:59:50Z"}),
        make_pod_seen("Pending", CREATING, status={"startTime": None}),
    ],
    ids=["runs", "says why", "new", "not seen by the kubelet"],
)
def test_no_events_are_asked_for_if_nothing_is_unclear(tmp_path: Path, pod: Object) -> None:
    server, _ = say(tmp_path, [make_event("FailedMount", "x")], pod)
    assert ("GET", EVENTS) not in server.asked
