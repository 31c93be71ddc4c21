"""The queue of a service over HTTP."""

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.api.api_state import Api, open_api, until

from cavvy.capabilities.serving.call_rows import calls_of
from cavvy.capabilities.serving.queued_calls import CallState
from cavvy.domain.values import replace

SERVICE = "/v1/projects/default/services/chat"
TEXT = "{name: chat, run: serve, resources: {cpu: 0.1}, service: {port: 80, queue: {attempts: 1}}}"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(
        "memory", tmp_path, values={"CAVVY_PROVIDERS_LOCAL_ENABLED": "true"}
    ) as api:
        yield api


async def submit(api: Api, **ask: Any) -> Any:
    return await api.http.post(f"{SERVICE}/calls", json=ask)


async def test_a_call_is_queued_once_sent_retried_and_purged(api: Api) -> None:
    assert (await submit(api)).json()["code"] == "service-not-found"
    listed = await api.http.get(f"{SERVICE}/calls")
    assert listed.json()["code"] == "service-not-found", "no service and no calls"
    for asked in (
        api.http.post(f"{SERVICE}/calls/retry"),
        api.http.delete(f"{SERVICE}/calls?state=done"),
    ):
        assert (await asked).json()["code"] == "service-not-found"
    missing = (await api.http.get(f"{SERVICE}/calls/one")).json()
    assert missing["message"] == "project default has no service named chat"
    await api.http.put(SERVICE, json={"text": TEXT, "user": "ada"})
    body = base64.b64encode(b"hello").decode()
    # the gateway itself answers 504, because the service has no replica within the time
    ask = {"id": "one", "body": body, "path": "/x", "headers": {"Content-Type": "text/plain"}}
    assert [(await submit(api, **ask)).status_code for _ in range(2)] == [201, 200]
    reused = (await submit(api, **ask | {"path": "/y"})).json()
    assert (reused["code"], reused["hint"]) == ("key-reused", "give this call another ID")
    assert len((await submit(api)).json()["id"]) > 10, "the server makes an ID"

    calls = calls_of(api.app_state.store)
    listed = (await api.http.get(f"{SERVICE}/calls?state=waiting")).json()
    assert listed["counts"] == {"waiting": 2}
    found = await calls.get("default", "chat", "one")
    assert await calls.bodies(found) == (b"hello", b"")

    await calls.put(replace(found, state=CallState.DEAD, tries=1, status=400), b"bad")
    shown = (await api.http.get(f"{SERVICE}/calls/one")).json()
    assert (shown["call"]["state"], base64.b64decode(shown["body"])) == ("dead", b"bad")
    assert (await api.http.post(f"{SERVICE}/calls/one/retry")).json() == {"calls": 1}
    assert (await api.http.post(f"{SERVICE}/calls/retry")).json() == {"calls": 0}
    assert (await api.http.post(f"{SERVICE}/calls/none/retry")).status_code == 404
    assert (await calls.get("default", "chat", "one")).tries == 0
    assert (await api.http.delete(f"{SERVICE}/calls?state=waiting")).json() == {"calls": 2}
    assert (await api.http.get(f"{SERVICE}/calls/one")).json()["code"] == "call-not-found"


async def test_a_full_queue_accepts_only_calls_that_it_has(api: Api) -> None:
    await api.http.put(SERVICE, json={"text": TEXT.replace("attempts: 1", "waiting: 2")})
    assert [(await submit(api, id=each)).status_code for each in ("one", "two")] == [201, 201]
    refused = await submit(api, id="three")
    assert (refused.status_code, refused.json()["code"]) == (429, "queue-full")
    assert int(refused.headers["retry-after"]) > 0
    assert (await submit(api, id="two")).status_code == 200
    assert (await submit(api, id="two", path="/y")).json()["code"] == "key-reused"
    assert (await api.http.delete(f"{SERVICE}/calls?state=waiting")).json() == {"calls": 2}
    assert (await submit(api, id="three")).status_code == 201


async def test_a_call_that_is_at_the_gateway_is_not_sent_again(api: Api) -> None:
    await api.http.put(SERVICE, json={"text": TEXT.replace("attempts: 1", "at_once: 9")})

    async def count_arrivals() -> int:
        traffic = (await api.http.get(SERVICE)).json()["traffic"]
        return int(traffic["arrivals"]) if traffic else 0

    for number in range(1, 5):  # each submission is a reason to look at all calls that are due

        async def have_arrived(number: int = number) -> bool:
            return await count_arrivals() >= number

        await submit(api, id=f"call-{number}")
        await until(have_arrived)
    assert await count_arrivals() == 4
    assert (await api.http.get(SERVICE)).json()["queue"] == {
        "waiting": 4,
        "running": 4,
        "done": 0,
        "dead": 0,
    }
    listed = (await api.http.get(f"{SERVICE}/calls")).json()["calls"]
    assert [(each["state"], each["running"]) for each in listed] == [("waiting", True)] * 4


async def test_the_answer_of_the_gateway_is_a_failure_of_the_call(api: Api) -> None:
    await api.http.put(
        SERVICE, json={"text": TEXT.replace("port: 80", "port: 80, timeouts: {queue: 10ms}")}
    )
    await submit(api, id="late")

    async def is_dead() -> Any:
        found = (await api.http.get(f"{SERVICE}/calls/late")).json()["call"]
        return found if found["state"] == "dead" else None

    found = await until(is_dead)
    assert (found["status"], found["tries"]) == (504, 1)


@pytest.mark.parametrize(
    "ask",
    [
        {"path": "/../other"},
        {"path": "x"},
        {"id": "a/b"},
        {"method": "GET /"},
        {"headers": {"X": "a\r\nY: b"}},
        {"headers": {"X Y": "a"}},
    ],
)
async def test_what_cannot_be_sent_is_refused(api: Api, ask: Any) -> None:
    assert (await submit(api, **ask)).json()["code"] == "invalid-request"
