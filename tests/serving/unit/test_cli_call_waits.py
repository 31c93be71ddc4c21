"""What `cavvy serve` says about calls of a service, and `cavvy call` while its request waits."""

from datetime import UTC, datetime
from typing import Any

import pytest

from cavvy.capabilities.serving.answers import find_model, say_problem
from cavvy.capabilities.serving.reach import list_advice, list_waits
from cavvy.capabilities.serving.wire import ServedView
from cavvy.client.service_wire import ReplicaView


def make_service(**facts: Any) -> ServedView:
    known: dict[str, Any] = {
        "name": "echo",
        "project": "default",
        "user": "ada",
        "url": "http://127.0.0.1:1/default/echo",
        "models": [],
        "revision": 1,
        "created_at": datetime(2026, 1, 2, tzinfo=UTC),
        "target": 1,
        "why": "load",
        "least": 0,
        "most": 1,
        "replicas": [],
        "problem": "",
        "traffic": None,
        "spent_micros": 0,
    }
    return ServedView(**{**known, **facts})


def make_replica(reason: str, start_s: dict[str, float]) -> ReplicaView:
    return ReplicaView(
        job="a",
        number=3,
        revision=1,
        state="starting",
        reason=reason,
        place="local",
        port=43071,
        ordered_at=datetime(2026, 1, 2, tzinfo=UTC),
        ready_at=None,
        ended_at=None,
        in_flight=None,
        start_s=start_s,
    )


def test_each_new_reason_of_a_wait_is_said_once() -> None:
    starting = make_service(state="starting", ready=0, problem="an earlier one")
    failing = make_service(state="failing", ready=0, problem="the task ended with exit code 3")
    ready = make_service(state="ready", ready=1, problem="the task ended with exit code 3")
    looks = iter([starting, starting, failing, failing, ready])
    answered = iter([False] * 5 + [True])
    assert list(list_waits(lambda: next(looks), lambda: next(answered))) == [
        "still waiting; service echo is starting",
        "still waiting; service echo is failing: the task ended with exit code 3",
    ]


def test_a_program_that_does_not_answer_is_told_its_port() -> None:
    replica = make_replica(reason="", start_s={"queue": 0.1, "prepare": 0.2})
    found = make_service(state="starting", ready=0, replicas=[replica])
    answered = iter([False, True])
    assert list(list_waits(lambda: found, lambda: next(answered))) == [
        "still waiting; service echo is starting; the program of replica 3 runs, but does not answer "
        "on port 43071 (PORT); see `cavvy logs a`"
    ]


def test_the_step_of_a_start_is_said() -> None:
    replica = make_replica(reason="starts at local: the setup has not ended yet", start_s={})
    found = make_service(state="starting", ready=0, replicas=[replica])
    answered = iter([False, True])
    assert list(list_waits(lambda: found, lambda: next(answered))) == [
        "still waiting; service echo is starting; replica 3 starts at local: the setup has not "
        "ended yet"
    ]


def test_nothing_is_said_if_the_answer_comes_first() -> None:
    assert list(list_waits(make_service, lambda: True)) == []


@pytest.mark.parametrize(
    ("facts", "base"),
    [
        ({}, "http://127.0.0.1:1/v1"),
        ({"project": "lab", "url": "http://127.0.0.1:1/lab/echo"}, "http://127.0.0.1:1/lab/v1"),
        ({"url": "https://echo.example"}, "https://echo.example/v1"),
    ],
)
def test_a_started_language_model_says_the_base_url_for_clients(
    facts: dict[str, Any], base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CAVVY_PROJECT", raising=False)
    (plain,) = list_advice(make_service(ready=0, state="idle", **facts))
    assert plain.startswith("call the service: cavvy call echo ")
    model = list_advice(make_service(ready=0, state="idle", models=["m", "lora"], **facts))
    assert model[0].startswith("call the service: cavvy chat echo ")
    assert model[1] == f"OpenAI's clients: base_url {base}, model m"


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b'{"object": "list", "data": [{"id": "org/m"}, {"id": "lora"}]}', "org/m"),
        (b'{"data": []}', ""),
        (b"[1]", ""),
        (b"<html>", ""),
        (b'{"data": [{"id": "\xff"}]}', ""),
    ],
)
def test_chat_takes_the_first_model_that_a_program_lists(body: bytes, model: str) -> None:
    assert find_model(body) == model


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error": {"message": "no such model", "code": 404}}', "no such model"),
        (b'{"object": "error", "message": "no such model"}', "no such model"),  # older engines
        (b'{"error": "overloaded"}', '{"error": "overloaded"}'),
        (b"[]", "[]"),
        (b"502 \xff", "502 \N{REPLACEMENT CHARACTER}"),
        (b'{"error": "\xff"}', '{"error": "\N{REPLACEMENT CHARACTER}"}'),
        (b"[" * 2000, "[" * 2000),
    ],
)
def test_chat_says_the_message_of_an_error(body: bytes, said: str) -> None:
    assert say_problem(body) == said
