"""Queued calls: how often they are sent, when they are repeated, and what objects cause."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from cavvy.capabilities.serving.control.reconciler import service_key
from cavvy.capabilities.serving.decide.queued_calls import (
    call_for_objects,
    count_at_once,
    make_object_event,
    revive,
    settle,
)
from cavvy.capabilities.serving.queued_calls import (
    MOST_BYTES,
    CallAnswer,
    CallState,
    QueuedCall,
    StoredObject,
)
from cavvy.capabilities.serving.stored_services import StoredService
from cavvy.control.share import lease_of
from cavvy.control.worklist import calls_key
from cavvy.domain.services import (
    BatchRule,
    EventTrigger,
    QueueTerms,
    ReplicaCount,
    ServiceSpec,
)
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import replace
from cavvy.spec.fields.places import names_parent

NOW = datetime(2026, 1, 1, tzinfo=UTC)
TERMS = QueueTerms(attempts=3, backoff=timedelta(seconds=10))
CALL = QueuedCall(project="p", service="s", id="a", submitted_at=NOW, due_at=NOW)
SERVICE = StoredService(
    project="p", name="s", id="i", created_at=NOW, task=TaskSpec(name="s", run="x")
)


def answer(status: int | None, **headers: str) -> CallAnswer:
    return CallAnswer(status=status, headers={"retry-after": headers.get("retry", "")})


@pytest.mark.parametrize(
    ("status", "state", "tries", "pause_s"),
    [
        (200, CallState.DONE, 1, 0),
        (302, CallState.DONE, 1, 0),
        (400, CallState.DEAD, 1, 0),
        (500, CallState.WAITING, 1, 10),
        (None, CallState.WAITING, 1, 10),
        (409, CallState.WAITING, 1, 10),
        (429, CallState.WAITING, 0, 10),
        (402, CallState.WAITING, 0, 10),
    ],
)
def test_a_status_decides_what_happens_next(
    status: int | None, state: CallState, tries: int, pause_s: int
) -> None:
    settled = settle(CALL, answer(status), TERMS, NOW)
    assert (settled.state, settled.tries) == (state, tries)
    assert settled.due_at - NOW == timedelta(seconds=pause_s)
    ended = state is not CallState.WAITING
    assert settled.expires_at == (NOW + TERMS.keep if ended else None)
    assert bool(settled.problem) == (state is not CallState.DONE)


def test_pauses_double_and_the_last_failure_is_the_end() -> None:
    call, pauses = CALL, []
    while call.state is CallState.WAITING:
        call = settle(call, answer(503), TERMS, NOW)
        pauses.append((call.due_at - NOW).total_seconds())
    assert (call.state, call.tries, pauses[:2]) == (CallState.DEAD, 3, [10, 20])
    again = revive(call, NOW)
    assert (again.state, again.tries, again.expires_at) == (CallState.WAITING, 0, None)
    waits = settle(CALL, answer(503, retry="60"), TERMS, NOW)
    assert waits.due_at - NOW == timedelta(seconds=60), "the service knows better"
    late = replace(CALL, tries=90)
    often = settle(late, answer(500), replace(TERMS, attempts=100), NOW)
    assert often.due_at - NOW == timedelta(hours=1)


def test_an_answer_that_is_too_large_is_not_repeated() -> None:
    large = CallAnswer(status=200, body=bytes(MOST_BYTES + 1))
    assert settle(CALL, large, TERMS, NOW).state is CallState.DEAD


def test_more_calls_are_sent_than_the_replicas_can_work_on() -> None:
    spec = ServiceSpec(port=80, concurrency=4, replicas=ReplicaCount(most=3))
    assert count_at_once(spec) == 24
    assert count_at_once(replace(spec, queue=QueueTerms(at_once=5))) == 5
    assert count_at_once(replace(spec, concurrency=1000)) == 256
    joined = replace(spec, concurrency=1, batch=BatchRule(most=16))
    assert count_at_once(joined) == 96, "the batches of all replicas are full"
    assert count_at_once(replace(joined, queue=QueueTerms(at_once=5))) == 5


def test_each_version_of_an_object_is_one_call() -> None:
    trigger = EventTrigger(bucket="s3://b/in/", path="/new")
    found = [
        StoredObject(url="s3://b", key=key, tag=tag, size=3)
        for key, tag in (("in/", ""), ("in/a", "1"), ("in/a", "2"), ("in/b", "1"))
    ]
    calls = call_for_objects(SERVICE, trigger, found, NOW)
    again = call_for_objects(SERVICE, trigger, found, NOW + timedelta(hours=1))
    assert len({each.id for each in calls}) == 3
    assert [each.id for each in calls] == [each.id for each in again]
    event = json.loads(make_object_event(calls[0], "http://signed"))
    for name in ("specversion", "id", "source", "type"):  # what CloudEvents 1.0 requires
        assert event[name]
    assert (event["subject"], event["data"]["url"]) == ("in/a", "http://signed")
    assert calls[0].path == "/new"


@pytest.mark.parametrize("path", ["/a/../b", "/..", "/%2e%2E/b", "/a\\..\\b"])
def test_a_path_does_not_lead_to_another_service(path: str) -> None:
    assert names_parent(path)
    assert not names_parent(path.replace("..", ".a").replace("%2e%2E", "a"))


def test_the_queue_belongs_to_the_lease_of_its_service() -> None:
    key = service_key("p", "s")
    assert lease_of(calls_key(key)) == lease_of(key)
