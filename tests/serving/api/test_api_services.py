"""Services over HTTP: started, given a new revision, shown and ended, with the real gateway."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tests.api.api.test_api_accounts import add, call, code
from tests.api.api_state import Api, open_api, until
from tests.contract.engine_stand_in import EngineStandIn

from cavvy.capabilities.serving.autoscaler.decide import ScalingState
from cavvy.capabilities.serving.autoscaler.load import LoadRecord
from cavvy.capabilities.serving.control import reconciler
from cavvy.capabilities.serving.decide.service_figures import count_minute
from cavvy.capabilities.serving.decide.traffic import ServiceTraffic
from cavvy.capabilities.serving.gateway.extensions import UNCOUNTED, ServiceMeters
from cavvy.capabilities.serving.keeper import find_requests
from cavvy.capabilities.serving.routes import keys
from cavvy.capabilities.serving.server.front import GatewayFront
from cavvy.capabilities.serving.service_rows import services_of
from cavvy.capabilities.serving.stored_services import StoredService
from cavvy.client.state import host_name
from cavvy.domain.values import replace

SERVICE = "/v1/projects/default/services/chat"
TEXT = "{name: other, run: serve, resources: {cpu: 0.1}, service: {port: 80}}"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(
        "memory", tmp_path, values={"CAVVY_PROVIDERS_LOCAL_ENABLED": "true"}
    ) as api:
        yield api


async def count_results(api: Api) -> dict[str, float]:
    """The requests of the service by their result, as Prometheus reads them."""
    text = (await api.http.get("/metrics")).text
    line = re.compile(r'^cavvy_service_requests_total{.*result="(\w+)".*} (\S+)$', re.M)
    return {result: float(count) for result, count in line.findall(text)}


async def put(api: Api, text: str) -> Any:
    return await api.http.put(SERVICE, json={"text": text, "user": "ada"})


async def test_a_service_is_started_revised_shown_and_ended(api: Api) -> None:
    assert (await put(api, TEXT)).json()["revision"] == 1

    async def find_url() -> str:
        found: str = (await api.http.get(SERVICE)).json()["url"]
        return found

    url = await until(find_url)
    assert url.endswith("/default/chat")
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"{url}/", headers={"Prefer": "wait=0"})
        assert answer.json()["error"]["code"] == "no-replica-in-time", (
            "the gateway knows the service"
        )
    refused = {"answered": 0.0, "lost": 0.0, "refused": 1.0}

    async def is_counted() -> bool:
        return await count_results(api) == refused

    await until(is_counted)
    assert (await put(api, TEXT)).json()["revision"] == 1, "nothing has changed"
    revised = (await put(api, TEXT.replace("80", "81"))).json()
    assert (revised["revision"], revised["name"], revised["user"]) == (2, "chat", "ada")
    [listed] = (await api.http.get("/v1/services?project=default")).json()
    assert (listed["name"], listed["spent_micros"]) == ("chat", 0)
    assert (await api.http.get("/v1/services?project=other")).json() == []
    assert (await api.http.delete(SERVICE)).json()["state"] == "ending"

    async def is_gone() -> bool:
        return (await api.http.get(SERVICE)).status_code == 404

    await until(is_gone)
    assert (await api.http.delete(SERVICE)).json()["code"] == "service-not-found"
    await until(api.app_state.control_plane.idle)  # the server may stop
    records = [json.loads(each.text) for each in await api.app_state.store.audit_records()]
    route = "/v1/projects/{project}/services/{name}"
    assert [each["action"] for each in records] == [*[f"PUT {route}"] * 3, f"DELETE {route}"]
    assert records[2]["after"]["name"] == "chat"
    assert len(records[2]["after"]["file_sha256"]) == 64


async def test_requests_are_figures_over_time(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = datetime.now(UTC)

    def count_fast(minute: Any, service: Any, before: Any, traffic: Any, now: datetime) -> Any:
        return count_minute(minute, service, before, traffic, begun + (now - begun) * 40)

    monkeypatch.setattr(reconciler, "count_minute", count_fast)
    await put(api, TEXT)

    async def find_url() -> str:
        found: str = (await api.http.get(SERVICE)).json()["url"]
        return found

    url = await until(find_url)
    async with httpx.AsyncClient() as client:
        for _ in range(3):
            await client.get(f"{url}/", headers={"Prefer": "wait=0"})
    figures = f"{SERVICE}/figures"
    period = {
        "since": (begun - timedelta(hours=1)).isoformat(),
        "until": (begun + timedelta(days=2)).isoformat(),
        "points": 1500,
    }

    async def find_failures() -> bool:
        found = (await api.http.get(figures, params=period)).json()
        series = {each["name"]: each for each in found["series"]}
        assert all((each["attempt"], each["rank"]) == (0, 0) for each in series.values())
        return any(each for each in series.get("failed_per_s", {"mean": []})["mean"])

    assert await until(find_failures)
    for wrong in ({"points": 1}, {"since": "0001-01-01T00:00:00Z"}, {"until": "2026"}):
        assert (await api.http.get(figures, params=wrong)).json()["code"] == "invalid-request"
    for other in (SERVICE.replace("chat", "none"), SERVICE.replace("default", "none")):
        assert (await api.http.get(f"{other}/figures")).json()["code"] == "service-not-found"


async def test_a_job_with_the_name_of_a_service_names_the_service(api: Api) -> None:
    await put(api, TEXT)
    for path in ("", "/logs", "/events"):
        answer = (await api.http.get(f"/v1/projects/default/jobs/chat{path}")).json()
        assert answer["code"] == "job-not-found"
        assert "chat is a service, which `cavvy status chat` shows" in answer["hint"]


async def test_a_candidate_is_shown_until_the_old_file_comes_again(api: Api) -> None:
    await put(api, TEXT)
    tried = (
        await put(api, TEXT.replace("80", "81, update: {strategy: canary, weight: 5%}"))
    ).json()
    assert (tried["revision"], tried["trial"]["revision"], tried["trial"]["end"]) == (1, 2, "")
    assert (tried["trial"]["weight"], tried["trial"]["asked"]) == (5, 2000)
    await put(api, TEXT)

    async def find_end() -> str:
        found: str = (await api.http.get(SERVICE)).json()["trial"]["end"]
        return found

    assert await until(find_end) == "withdrawn"
    at_once = (await put(api, TEXT.replace("80", "82, update: blue-green"))).json()
    assert at_once["trial"]["revision"] == 3

    async def is_newest() -> bool:
        return bool((await api.http.get(SERVICE)).json()["revision"] == 3)

    await until(is_newest)
    assert (await api.http.get(SERVICE)).json()["trial"]["end"] == "ready"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{run: serve}", "describes a job, not a service"),
        (
            "{run: s, service: {port: 80, hosts: [a.example.com]}}",
            "service.hosts: a.example.com is not below one of the domains in services.domains",
        ),
        (
            "{run: s, service: {port: 80, budget: $1/h}}",
            "service.budget: Cavvy cannot limit a price per hour; `cavvy cost budget set NAME DOLLARS --service",
        ),
        (
            "{run: s, service: {port: 80, regions: [us-east-1], residency: eu}}",
            "service.regions: us-east-1 is in us, outside the residency eu",
        ),
        (
            "{run: s, service: {port: 80, regions: [eu-nowhere-1], residency: eu}}",
            "service.regions: Cavvy does not know the region eu-nowhere-1",
        ),
        (
            "{run: s, resources: {regions: [us-east-1]}, service: {residency: eu}}",
            "resources.regions: us-east-1 is in us, outside the residency eu",
        ),
        (
            "{run: s, service: {port: 80, fallback: none}}",
            "service.fallback: the project has no service none; start it first",
        ),
        (
            "{run: s, service: {port: 80, fallback: {openai: {model: m, key: NONE}}}}",
            "project default has no secret NONE",
        ),
    ],
)
async def test_what_cannot_be_served_is_refused(api: Api, text: str, said: str) -> None:
    answer = await put(api, text)
    assert answer.status_code == 422
    assert said in answer.json()["message"]


async def test_a_model_without_keys_belongs_to_one_service_of_its_project(api: Api) -> None:
    text = "{run: s, service: {port: 80, models: [tiny, large]}}"
    assert (await put(api, text)).json()["revision"] == 1
    assert (await put(api, text.replace("80", "81"))).json()["revision"] == 2
    other = SERVICE.replace("chat", "other")

    async def put_other(text: str) -> Any:
        return await api.http.put(other, json={"text": text, "user": "ada"})

    refused = await put_other(text.replace("tiny, large", "large"))
    assert refused.status_code == 422
    assert (
        "service.models: the service chat already has the model large without keys"
        in (refused.json()["message"])
    )
    assert (await put_other(text.replace("port", "keys: true, port"))).status_code == 200
    elsewhere = SERVICE.replace("default", "research")
    assert (await api.http.put(elsewhere, json={"text": text, "user": "bob"})).status_code == 200


async def test_a_waiting_request_orders_a_replica_where_it_must_stay(api: Api) -> None:
    await put(api, TEXT)

    async def find_url() -> str:
        found = (await api.http.get(SERVICE)).json()
        return found["url"] if found["traffic"] else ""

    url = await until(find_url)

    async def find_replica() -> str:
        stored = await services_of(api.app_state.store).get("default", "chat")
        return stored.replicas[0].id if stored.replicas else ""

    async with httpx.AsyncClient() as client:
        headers = {"Cavvy-Residency": "eu", "Prefer": "wait=60"}
        waiting = asyncio.create_task(client.get(f"{url}/", headers=headers))
        replica = await until(find_replica)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    stored = await services_of(api.app_state.store).get("default", "chat")
    assert [each.bound_to for each in stored.replicas] == [("eu",)]
    assert (await api.app_state.store.job(replica)).task.resources.regions == ("eu",)
    await api.http.delete(SERVICE)
    await until(api.app_state.control_plane.idle)


async def test_a_key_is_made_used_listed_and_revoked(api: Api) -> None:
    await put(api, TEXT)
    assert (await api.http.post(f"{SERVICE}/keys", json={})).json()["code"] == "service-open"
    await put(api, TEXT.replace("port: 80", "port: 80, keys: true, rate: 1000"))

    async def find_url() -> str:
        found = (await api.http.get(SERVICE)).json()
        return found["url"] if found["traffic"] else ""

    url = await until(find_url)
    nowhere = await api.http.post(f"{SERVICE}/keys", json={"residency": "eu-west-1"})
    assert "must be an area such as eu" in nowhere.json()["message"]
    asked = {"label": "ada", "expires_s": 60, "residency": "UK"}
    made = (await api.http.post(f"{SERVICE}/keys", json=asked)).json()
    key, key_id = made["key"], made["view"]["id"]
    async with httpx.AsyncClient(headers={"Prefer": "wait=0"}) as client:

        async def call(**headers: str) -> int:
            return (await client.get(f"{url}/", headers=headers)).status_code

        assert await call() == 401
        assert await call(Authorization=f"Bearer {key}") == 504, "it waited for a replica"
        never = {"X-API-Key": key, "Cavvy-Residency": "atlantis"}
        assert await call(**never) == 403, "no replica may ever be there"
        [listed] = (await api.http.get(f"{SERVICE}/keys")).json()
        assert (listed["id"], listed["label"], listed["residency"]) == (key_id, "ada", "gb")
        assert listed["used_at"] is not None
        assert key not in (await api.http.get(f"{SERVICE}/keys")).text
        assert (await api.http.delete(f"{SERVICE}/keys/{key_id}")).status_code == 204
        assert await call(Authorization=f"Bearer {key}") == 401
    wrong = await api.http.delete(f"{SERVICE}/keys/xx")
    assert wrong.json()["message"] == "key: 'xx' may contain only 0-9 and a-f"
    gone = await api.http.delete(f"{SERVICE}/keys/{key_id}")
    assert gone.json()["code"] == "service-key-not-found"
    stored = await services_of(api.app_state.store).get("default", "chat")
    assert stored.revision == 2, "keys make no revision"
    await api.http.delete(SERVICE)
    await until(api.app_state.control_plane.idle)  # no replica goes on
    for each in await api.app_state.store.audit_records():
        assert key not in each.text


class CountingMeters(ServiceMeters):
    counts_tokens = True


async def test_a_key_has_no_limit_of_tokens_that_nothing_counts(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(api, TEXT.replace("port: 80", "port: 80, keys: true"))
    for meters in (ServiceMeters, CountingMeters):
        monkeypatch.setattr(keys, "find_meters", lambda found=meters: found)
        answer = await api.http.post(f"{SERVICE}/keys", json={"tokens_per_min": 9})
        told = answer.json()
        if meters is CountingMeters:
            assert answer.status_code == 201, told
        else:
            assert (answer.status_code, told["code"]) == (422, "invalid-request")
            assert told["message"].startswith(f"`tokens_per_min`: {UNCOUNTED}")
    assert len((await api.http.get(f"{SERVICE}/keys")).json()) == 1


async def test_a_key_is_revoked_before_the_answer_though_the_gateway_is_not_reached(
    api: Api,
) -> None:
    """As in the moment after a restart of the server, whose gateway has gone on serving."""
    await put(api, TEXT.replace("port: 80", "port: 80, keys: true"))
    made = (await api.http.post(f"{SERVICE}/keys", json={})).json()
    front = find_requests(api.app_state)._front
    assert isinstance(front, GatewayFront)

    async def is_linked() -> bool:
        return front._link is not None

    await until(is_linked)
    url = (await api.http.get(SERVICE)).json()["url"]
    async with httpx.AsyncClient() as client:
        headers = {"Prefer": "wait=0", "Authorization": f"Bearer {made['key']}"}
        assert (await client.get(f"{url}/", headers=headers)).status_code == 504
        front._link, link = None, front._link
        front._done.clear()
        assert link is not None
        asyncio.get_running_loop().call_later(0.3, link.close)  # what opens the next link
        assert (await api.http.delete(f"{SERVICE}/keys/{made['view']['id']}")).status_code == 204
        assert (await client.get(f"{url}/", headers=headers)).status_code == 401
    await api.http.delete(SERVICE)
    await until(api.app_state.control_plane.idle)


async def test_a_cold_service_is_answered_by_an_api_whose_key_is_in_no_file(
    api: Api, tmp_path: Path
) -> None:
    secret = "sk-secret"  # of nobody
    await api.http.put("/v1/projects/default/secrets/KEY", json={"value": secret})
    engine = EngineStandIn("e1")
    engine.start()
    own = f"{{openai: {{model: big, base_url: 'http://127.0.0.1:{engine.port}/v1'}}}}"
    other = "{openai: {model: big, base_url: 'https://127.0.0.1:1/v1', key: KEY}}"
    terms = f"timeouts: {{fallback: 10ms}}, models: [tiny], fallback: [{other}, {own}]"
    assert (await put(api, f"{{run: sleep 9, service: {{port: 80, {terms}}}}}")).status_code == 200
    front = find_requests(api.app_state)._front
    assert isinstance(front, GatewayFront)

    async def is_told() -> bool:
        return front._told is not None

    await until(is_told)
    assert front._told is not None
    assert front._told[1].values == {"default/": "", "default/KEY": secret}
    url = (await api.http.get(SERVICE)).json()["url"]
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    async with httpx.AsyncClient() as client:
        reply = await client.post(f"{url}/v1/chat/completions", json=body)
    assert (reply.status_code, reply.json()["model"]) == (200, "big")
    assert reply.headers["cavvy-served-by"] == f"127.0.0.1:{engine.port}"

    async def list_fallbacks() -> list[dict[str, Any]]:
        found = (await api.http.get(SERVICE)).json()["fallbacks"]
        return found if any(each["answered"] for each in found) else []

    hosts = ("127.0.0.1:1", f"127.0.0.1:{engine.port}")
    rows = zip(hosts, (0, 1), strict=True)
    wanted = [{"name": a, "model": "big", "answered": n, "spent_micros": None} for a, n in rows]
    assert await until(list_fallbacks) == wanted
    files = [each for each in tmp_path.rglob("*") if each.is_file()]
    assert any(each.name == "gateway.json" for each in files)
    assert not any(secret.encode() in each.read_bytes() for each in files)
    await api.http.delete(SERVICE)
    await until(api.app_state.control_plane.idle)
    engine.stop()


@pytest.mark.parametrize("target", ["concurrency: 1", "queue_wait: 10s"])
async def test_twelve_long_requests_get_their_replicas_at_the_next_decision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """The gateway reports them. That requests take a minute is known from earlier ones."""
    record = LoadRecord(slow=0.01, slow_span_s=150.0, completed=500, service_s=60.0)
    known = msgspec.json.encode(ScalingState(began_s=0.0, load=record)).decode()
    decided: list[tuple[int, int]] = []
    scale_replicas = reconciler.scale_replicas

    def scale(service: StoredService, before: Any, traffic: ServiceTraffic, *more: Any) -> Any:
        if not service.scaling:
            service = replace(service, scaling=known)
        service = scale_replicas(service, before, traffic, *more)
        decided.append((traffic.backlog, service.target))
        return service

    monkeypatch.setattr(reconciler, "scale_replicas", scale)
    terms = f"{{port: 80, concurrency: 1, replicas: {{min: 0, max: 20, target: {{{target}}}}}}}"
    async with open_api("memory", tmp_path) as api:
        await put(api, f"{{run: serve, resources: {{cpu: 1}}, service: {terms}}}")

        async def find_url() -> str:
            found = (await api.http.get(SERVICE)).json()
            return found["url"] if found["traffic"] else ""

        async def is_decided() -> bool:
            return any(backlog == 12 for backlog, _ in decided)

        url = await until(find_url)
        async with httpx.AsyncClient() as client:
            calls = [asyncio.create_task(client.get(f"{url}/", timeout=60)) for _ in range(12)]
            await until(is_decided)
            for each in calls:
                each.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        first = next(wanted for backlog, wanted in decided if backlog == 12)
        assert 12 <= first <= 20
        await api.http.delete(SERVICE)
        await until(api.app_state.control_plane.idle)


async def test_webhooks_and_cron_lines_are_shown_with_their_url_and_next_time(api: Api) -> None:
    events = "{cron: 0 3 * * *, path: /night}, {webhook: push, secret: hook, signature: github}"
    text = TEXT.replace("80", f"80, events: [{events}]")
    await api.http.put("/v1/projects/default/secrets/hook", json={"value": "0123456789"})
    assert (await put(api, text)).status_code == 200
    found = (await api.http.get(SERVICE)).json()
    path = "/hooks/v1/default/chat/push"
    assert found["webhooks"] == [{"name": "push", "url": path, "signature": "github"}]
    api.app_state.listen = "https://0.0.0.0:8443"
    [hook] = (await api.http.get(SERVICE)).json()["webhooks"]
    assert hook["url"] == f"https://{host_name()}:8443{path}"
    [cron] = found["crons"]
    assert (cron["cron"], cron["time_zone"], cron["path"]) == ("0 3 * * *", "UTC", "/night")
    assert cron["next_at"].endswith("T03:00:00Z")
    assert found["queue"] == {"waiting": 0, "running": 0, "done": 0, "dead": 0}


async def test_an_update_must_not_number_the_adapters_of_llama_cpp_anew(api: Api) -> None:
    def write(adapters: str) -> str:
        engine = f"{{engine: llama.cpp, model: /m/base.gguf, adapters: {{{adapters}}}}}"
        return f"{{name: other, resources: {{cpu: 0.1}}, service: {engine}}}"

    first, second, third = (f"{name}: /m/{name}.gguf" for name in "abc")
    assert (await put(api, write(f"{first}, {second}"))).status_code == 200
    assert (await put(api, write(f"{first}, {second}, {third}"))).status_code == 200
    assert (await put(api, write(first))).status_code == 200
    refused = await put(api, write(f"{second}, {first}"))
    assert (refused.status_code, refused.json()["code"]) == (422, "invalid-task")
    assert "a would get another number" in refused.json()["message"]


async def test_who_may_not_enrol_devices_may_not_take_their_requests(api: Api) -> None:
    member = await add(api, "ada", ("default", "member"))
    operator = await add(api, "olga", ("default", "operator"))

    def with_edge(edge: str, port: int = 80) -> dict[str, str]:
        text = TEXT.replace("port: 80", f"port: {port}, edge: {edge}")
        return {"text": text, "user": "ada"}

    path, edge = SERVICE.removeprefix("/v1"), "[{site: lyon, model: m}]"
    refused = await call(api, member, "PUT", path, with_edge(edge))
    assert code(refused) == (403, "role-needed")
    for token, ask, status in (
        (operator, with_edge(edge), 200),
        (member, with_edge(edge, 81), 403),  # another program for the same devices
        (operator, with_edge(edge, 81), 200),
        (member, with_edge("[{site: lyon, model: m, below: 0.6}]"), 403),
        (member, with_edge("[{model: m}]"), 403),
    ):
        found = await call(api, token, "PUT", path, ask)
        assert found.status_code == status, found.text
    for rule in ("{model: m}", "{site: lyon, model: m}"):
        found = await call(api, operator, "PUT", f"{path}-2", with_edge(f"[{rule}]"))
        assert "belong to service chat" in found.json()["message"]
    found = await call(api, operator, "PUT", f"{path}-2", with_edge("[{site: oslo, model: m}]"))
    assert found.status_code == 200
