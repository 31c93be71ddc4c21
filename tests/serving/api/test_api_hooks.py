"""Webhooks over HTTP: without a token, signed, each delivery once."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.api.api_state import Api, open_api

from cavvy.api.hook_limits import IN_PROGRESS_EACH, WRONG_ALL, WRONG_EACH
from cavvy.capabilities.serving.call_rows import calls_of
from cavvy.capabilities.serving.decide.webhook_calls import sign_standard
from cavvy.capabilities.serving.queued_calls import MOST_BYTES

SERVICE = "/v1/projects/default/services/chat"
SECRET = "a secret of the sender"
TEXT = """
name: chat
run: serve
resources: {cpu: 0.1}
service:
  port: 80
  events:
    - {webhook: in, secret: HOOK, path: /in}
    - {webhook: other, secret: HOOK}
    - {webhook: slack, secret: HOOK, signature: slack}
"""
EVENT = {"specversion": "1.0", "id": "1", "source": "/a", "type": "t", "data": {"n": 1}}
CLOUD = {"content-type": "application/cloudevents+json"}


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    values = {"CAVVY_PROVIDERS_LOCAL_ENABLED": "true"}
    async with open_api("memory", tmp_path, values=values) as api:
        missing = (await api.http.put(SERVICE, json={"text": TEXT, "user": "ada"})).json()
        assert missing["code"] == "secret-missing"
        await api.http.put("/v1/projects/default/secrets/HOOK", json={"value": SECRET})
        served = await api.http.put(SERVICE, json={"text": TEXT, "user": "ada"})
        assert served.status_code == 200, served.text
        yield api


@pytest.mark.parametrize("value", ["tiny", "dGlueQ=="])  # the second is "tiny" in base64
async def test_a_service_with_a_secret_that_is_too_short_for_its_webhook_is_refused(
    api: Api, value: str
) -> None:
    await api.http.put("/v1/projects/default/secrets/HOOK", json={"value": value})
    refused = await api.http.put(SERVICE, json={"text": TEXT, "user": "ada"})
    assert (refused.status_code, refused.json()["code"]) == (422, "secret-too-short")
    assert "HOOK" in refused.json()["message"]
    assert value not in refused.text


async def post(
    api: Api,
    body: bytes,
    headers: Mapping[str, str] | None = None,
    *,
    delivery: str = "d",
    secret: str = SECRET,
    place: str = "default/chat/in",
    age: timedelta = timedelta(0),
) -> httpx.Response:
    signed = sign_standard(secret, delivery, api.app_state.now() - age, body)
    transport = httpx.ASGITransport(app=api.app)  # type: ignore[arg-type]  # it is one
    async with httpx.AsyncClient(transport=transport, base_url="http://cavvy") as http:
        return await http.post(
            f"/hooks/v1/{place}", content=body, headers={**signed, **(headers or {})}
        )


async def count(api: Api) -> int:
    counts = await calls_of(api.app_state.store).count("default", "chat")
    return sum(number for state, number in counts.items() if state != "forgotten")


async def test_each_signed_delivery_is_one_call(api: Api) -> None:
    answers = [await post(api, b"{}"), await post(api, b"{}"), await post(api, b"{}", delivery="e")]
    assert [each.status_code for each in answers] == [202, 202, 202]
    assert [each.json() for each in answers] == [
        {"calls": 1, "new": 1},
        {"calls": 1, "new": 0},
        {"calls": 1, "new": 1},
    ]
    listed = (await api.http.get(f"{SERVICE}/calls")).json()["calls"]
    assert {(each["path"], each["source"]) for each in listed} == {("/in", "webhook")}
    assert (await post(api, b"{}", CLOUD, delivery="e")).status_code == 422
    together = await asyncio.gather(*(post(api, b"{}", delivery="f") for _ in range(8)))
    assert sum(each.json()["new"] for each in together) == 1
    entries = (await api.http.get("/v1/audit-log")).json()
    assert "hooks" not in json.dumps(entries), "the queue is the record of deliveries"


async def test_each_event_is_one_call_in_every_mode(api: Api) -> None:
    text = json.dumps(EVENT).encode()
    batch = {"content-type": "application/cloudevents-batch+json"}
    binary = {f"ce-{k}": str(v) for k, v in EVENT.items() if k != "data"}
    assert (await post(api, text, CLOUD)).json() == {"calls": 1, "new": 1}
    assert (await post(api, b"x", binary, delivery="e")).json() == {"calls": 1, "new": 0}
    both = json.dumps([EVENT, {**EVENT, "id": "2"}]).encode()
    assert (await post(api, both, batch, delivery="f")).json() == {"calls": 2, "new": 1}
    # a request that was seen comes again with other headers, which are not signed
    for forged in ({}, binary | {"ce-id": "3"}, CLOUD):
        answer = await post(api, text, forged)
        assert (answer.status_code, answer.json()["new"]) == (202, 0), forged
    wrong = await post(api, json.dumps({**EVENT, "id": ""}).encode(), CLOUD, delivery="g")
    assert (wrong.status_code, wrong.json()["code"]) == (422, "invalid-request")
    assert await count(api) == 2


async def test_hostile_requests_are_refused_alike_and_change_nothing(api: Api) -> None:
    late = timedelta(minutes=6)
    hostile: list[dict[str, Any]] = [
        {"secret": "another secret"},
        {"secret": ""},
        {"age": late},
        {"age": -late},
        {"place": "default/chat/none"},
        {"place": "default/none/in"},
        {"place": "none/chat/in"},
        {"headers": {"webhook-signature": ""}},
        {"headers": {"webhook-id": "other"}},
    ]
    answers = [await post(api, b"{}", **each) for each in hostile]
    assert {(each.status_code, each.text) for each in answers} == {(401, answers[0].text)}
    huge = await post(api, bytes(MOST_BYTES + 1))
    assert (huge.status_code, huge.json()["code"]) == (413, "too-large")
    assert await count(api) == 0
    await api.http.delete("/v1/projects/default/secrets/HOOK")
    assert (await post(api, b"{}")).status_code == 401, "its secret was deleted"
    assert (await api.http.get(SERVICE)).status_code == 200, "tokens of users work as before"


async def test_wrong_signatures_and_open_requests_are_limited(api: Api) -> None:
    for _ in range(WRONG_EACH):
        assert (await post(api, b"{}", secret="wrong secret")).status_code == 401
    refused = await post(api, b"{}")
    assert (refused.status_code, refused.json()["code"]) == (429, "too-many-deliveries")
    assert 1 <= int(refused.headers["retry-after"]) <= 61
    other = await post(api, b"{}", place="default/chat/other")
    assert other.status_code == 202, "a sender's wrong secret stopped the webhooks of others"
    limits = api.app_state.hook_limits
    for number in range(WRONG_ALL - WRONG_EACH):
        limits.count_wrong("127.0.0.1", f"default/guess/{number // 10}")
    assert (await post(api, b"{}", place="default/chat/other")).status_code == 429
    now = api.app_state.now() + timedelta(minutes=2)
    with limits.enter("127.0.0.1", "", now):
        pass
    held = [limits.enter("127.0.0.1", "", now) for _ in range(IN_PROGRESS_EACH)]
    for each in held:
        each.__enter__()
    assert (await post(api, b"{}")).status_code == 429
    for each in held:
        each.__exit__(None, None, None)
    assert (await post(api, b"{}")).status_code in (202, 429)


async def test_a_full_queue_refuses_deliveries_but_knows_older_ones(api: Api) -> None:
    full = TEXT.replace("  port: 80\n", "  port: 80\n  queue: {waiting: 2}\n")
    served = await api.http.put(SERVICE, json={"text": full, "user": "ada"})
    assert served.status_code == 200, served.text
    event = json.dumps(EVENT).encode()
    assert (await post(api, b"{}")).json() == {"calls": 1, "new": 1}
    assert (await post(api, event, CLOUD, delivery="e")).json() == {"calls": 1, "new": 1}
    refused = await post(api, b"{}", delivery="f")
    assert (refused.status_code, refused.json()["code"]) == (429, "queue-full")
    assert int(refused.headers["retry-after"]) > 0
    again = [await post(api, b"{}"), await post(api, event, CLOUD, delivery="e")]
    assert [each.json() for each in again] == [{"calls": 1, "new": 0}] * 2
    assert await count(api) == 2


async def test_a_call_whose_result_was_deleted_is_not_shown(api: Api) -> None:
    await post(api, b"{}")
    (call,) = (await api.http.get(f"{SERVICE}/calls")).json()["calls"]
    assert (await api.http.delete(f"{SERVICE}/calls?state=waiting")).json() == {"calls": 1}
    missing = await api.http.get(f"{SERVICE}/calls/{call['id']}")
    assert (missing.status_code, missing.json()["code"]) == (404, "call-not-found")
    assert "no longer stored" in missing.json()["message"]
    retried = await api.http.post(f"{SERVICE}/calls/{call['id']}/retry")
    assert (retried.status_code, retried.json()["code"]) == (404, "call-not-found")


async def test_an_ended_service_has_no_webhooks_and_slack_can_check_one(api: Api) -> None:
    body = b'{"type": "url_verification", "challenge": "3eZb"}'
    stamp = str(int(api.app_state.now().timestamp()))
    import hmac

    made = hmac.digest(SECRET.encode(), b"v0:" + stamp.encode() + b":" + body, "sha256").hex()
    slack = {"x-slack-request-timestamp": stamp, "x-slack-signature": f"v0={made}"}
    answer = await post(api, body, slack, place="default/chat/slack")
    assert (answer.status_code, answer.json()) == (200, {"challenge": "3eZb"})
    assert await count(api) == 0
    await api.http.delete(SERVICE)
    assert (await post(api, b"{}")).status_code == 401


async def test_a_sender_of_events_may_ask_before_it_sends(api: Api) -> None:
    async def ask(place: str = "default/chat/in", **asked: str) -> httpx.Response:
        transport = httpx.ASGITransport(app=api.app)  # type: ignore[arg-type]  # it is one
        headers = {f"WebHook-Request-{name}": value for name, value in asked.items()}
        async with httpx.AsyncClient(transport=transport, base_url="http://cavvy") as http:
            return await http.options(f"/hooks/v1/{place}", headers=headers)

    answer = await ask(Origin="eventgrid.azure.net", Rate="120", Callback="https://other.example")
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["allow"] == "OPTIONS, POST"
    assert answer.headers["webhook-allowed-origin"] == "eventgrid.azure.net"
    assert answer.headers["webhook-allowed-rate"] == "120"
    none = await ask("none/none/none", Origin="eventgrid.azure.net", Rate="120")
    assert none.headers == answer.headers, "nobody learns which webhooks exist"
    assert await count(api) == 0
    for _ in range(WRONG_EACH):
        await post(api, b"{}", secret="wrong secret")
    assert (await ask(Origin="eventgrid.azure.net")).status_code == 429
