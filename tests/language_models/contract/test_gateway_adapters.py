"""LoRA adapters: engines load them on demand, and requests go to the replica that has theirs."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.contract.engine_stand_in import EngineStandIn
from tests.contract.gateway_process import GatewayProcess, wait_for
from tests.contract.http_talk import Reply, ask
from tests.contract.replica_stand_in import Seen

BASE = "org/base"
SLOTS = 2
RANK_MAX = 16
SOURCES = {
    **{name: f"/adapters/{name}" for name in ("one", "two", "three", "four", "five", "large")},
    "lost": "/nowhere",
}


@dataclass
class LoraEngine(EngineStandIn):
    """An engine with adapters, as strict as vLLM or SGLang: it refuses an adapter that it has, one
    that it cannot find, one of too high a rank, and one more than it has slots for."""

    api: str = "vllm"
    slots: int = SLOTS
    has: dict[str, str] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)
    loads: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)  # what a gateway must never do
    broken_loads: bool = False
    load_s: float = 0.0
    unload_s: float = 0.0
    refuses: str = ""  # why it refuses all prompts
    lies: int = 0  # adapters that it lists and does not have

    def restart(self) -> None:
        self.has.clear()

    async def _do_load_lora_adapter(self, request: Seen, _: dict[str, str], reader, writer) -> bool:
        asked = json.loads(request.body)
        name, path = asked["lora_name"], asked["lora_path"]
        if request.path.startswith("/v1/") is not (self.api == "vllm"):
            return self._refuse(writer, b"404 Not Found", "Not Found")
        if name in self.has:
            self.faults.append(f"{name} was loaded twice")
            return self._refuse(writer, b"400 Bad Request", f"{name} has already been loaded")
        if self.broken_loads or path == "/nowhere":
            return self._refuse(writer, b"404 Not Found", f"No adapter found for {path}")
        if path.endswith("large"):
            text = f"LoRA rank 64 is greater than max_lora_rank {RANK_MAX}."
            return self._refuse(writer, b"400 Bad Request", text)
        await asyncio.sleep(self.load_s)
        if len(self.has) >= self.slots:
            self.faults.append(f"{name} has no slot")
            return self._refuse(writer, b"400 Bad Request", "too many adapters")
        self.has[name] = path
        self.loads.append(name)
        return self._write(writer, b"text/plain", b"Success: LoRA adapter added")

    async def _do_unload_lora_adapter(
        self, request: Seen, _: dict[str, str], reader, writer
    ) -> bool:
        name = json.loads(request.body)["lora_name"]
        await asyncio.sleep(self.unload_s)
        if name not in self.has:
            return self._refuse(writer, b"404 Not Found", f"{name} cannot be found")
        if self.used.get(name):
            self.faults.append(f"{name} was unloaded while it was used")
        del self.has[name]
        return self._write(writer, b"text/plain", b"Success: LoRA adapter removed")

    async def _do_models(self, request: Seen, _: dict[str, str], reader, writer) -> bool:
        base = {"id": BASE, "root": BASE, "parent": None}
        rows = [{"id": name, "root": path, "parent": BASE} for name, path in self.has.items()]
        rows += [{"id": f"lie-{number}", "parent": BASE} for number in range(self.lies)]
        return self._answer(writer, {"object": "list", "data": [base, *rows]})

    async def _do_completions(self, request: Seen, _: dict[str, str], reader, writer) -> bool:
        asked = json.loads(request.body)
        name = asked.get("lora_path") if self.api == "sglang" else asked["model"]
        if name not in (None, BASE) and name not in self.has:
            status = b"404 Not Found" if self.api == "vllm" else b"400 Bad Request"
            return self._refuse(writer, status, f"The model {name} does not exist.")
        if self.refuses:
            return self._refuse(writer, b"400 Bad Request", self.refuses)
        self.used[name] = self.used.get(name, 0) + 1
        try:
            return await super()._do_completions(request, _, reader, writer)
        finally:
            self.used[name] -= 1

    def _refuse(self, writer, status: bytes, text: str) -> bool:
        return self._answer(writer, {"error": {"message": text, "code": 400}}, status)


def describe(api: str = "vllm", **more: Any) -> dict[str, Any]:
    sources = more.pop("sources", SOURCES)
    terms = {"api": api, "sources": sources, "slots": SLOTS, "load_s": 5}
    return {
        **{"name": "lora", "prefix": "/default/lora", "models": [BASE, *sources]},
        **{"routing": {"by": "cache"}, "adapters": terms, "concurrency": 8, **more},
    }


@pytest.fixture(scope="module")
def process() -> Iterator[GatewayProcess]:
    made = GatewayProcess(services=[describe()])
    yield made
    made.remove()


@pytest.fixture
def engines() -> Iterator[list[LoraEngine]]:
    made = [LoraEngine(f"e{number}") for number in (1, 2)]
    for each in made:
        each.start()
    yield made
    for each in made:
        assert not each.faults
        each.stop()


@pytest.fixture
def gateway(process: GatewayProcess, engines: list[LoraEngine]) -> GatewayProcess:
    process.set_services(describe())
    process.set_replicas("lora", engines)
    wait_for(lambda: all(each.seen and not each.in_flight for each in engines))
    return process


def send(
    gateway: GatewayProcess, model: str, path: str = "/v1/chat/completions", **more: Any
) -> Reply:
    body = {"messages": [{"role": "user", "content": "a b"}], "model": model, **more}
    data = json.dumps(body).encode()
    head = {"content-type": "application/json", "host": "any.example"}
    return ask(gateway.port, "POST", path, data, **head)


def count_prompts(engines: list[LoraEngine]) -> int:
    return sum(each.path.endswith("completions") for engine in engines for each in engine.seen)


def test_adapters_are_models_that_are_loaded_when_they_are_needed(
    gateway: GatewayProcess, engines: list[LoraEngine]
) -> None:
    rows = ask(gateway.port, "GET", "/v1/models", host="any.example").json["data"]
    assert [(each["id"], each["root"], each["parent"]) for each in rows] == sorted(
        [(BASE, BASE, None), *((name, name, BASE) for name in SOURCES)]
    ), "without the sources, which may be private"
    for path in ("/default/lora/v1/models", "/default/lora//v1/%6dodels/"):
        assert ask(gateway.port, "GET", path, host="any.example").json["data"] == rows
    one = ask(gateway.port, "GET", "/default/lora/v1/models/one", host="any.example").json
    assert one in rows
    unknown = ask(gateway.port, "GET", "/default/lora/v1/models/x", host="any.example")
    assert (unknown.status, unknown.json["error"]["code"]) == (404, "model_not_found")
    for path in ("/v1/chat/completions", "/default/lora/v1/chat/completions"):
        for model in ("one", "two", BASE):
            for _ in range(3):
                reply = send(gateway, model, path)
                assert (reply.status, reply.json["model"]) == (200, model)
    assert sorted([engines[0].loads, engines[1].loads]) == [["one"], ["two"]], "free slots first"
    facts = gateway.facts("lora")
    assert sorted(name for each in facts["replicas"] for name in each["adapters"]) == ["one", "two"]
    tokens = facts["work"]
    assert {"one", "two", BASE} <= {
        model for each in tokens.values() for key in each.values() for model in key["tokens"]
    }


def test_the_least_recently_used_adapter_makes_room(
    gateway: GatewayProcess, engines: list[LoraEngine]
) -> None:
    gateway.set_replicas("lora", engines[:1])
    for model in ("one", "two", "one", "three", "one"):
        assert send(gateway, model).status == 200
    assert engines[0].loads == ["one", "two", "three"]
    assert set(engines[0].has) == {"one", "three"}


def test_requests_wait_for_a_slot_and_no_used_adapter_is_unloaded(
    gateway: GatewayProcess, engines: list[LoraEngine]
) -> None:
    for each in engines:
        each.pause_s, each.load_s = 0.005, 0.01
    models = ["one", "two", "three", "four", "five", BASE] * 8
    with ThreadPoolExecutor(16) as pool:
        done = list(pool.map(lambda model: send(gateway, model, stream=True).status, models))
    assert done == [200] * len(models)
    assert all(len(each.has) <= SLOTS for each in engines)


def test_a_request_waits_while_its_adapter_is_unloaded(
    gateway: GatewayProcess, engines: list[LoraEngine]
) -> None:
    gateway.set_replicas("lora", engines[:1])
    (engine,) = engines[:1]
    assert [send(gateway, each).status for each in ("one", "two")] == [200, 200]
    engine.unload_s, engine.pause_s = 0.2, 0.1
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(send, gateway, "three")
        wait_for(lambda: "unload" in engine.seen[-1].path)
        second = pool.submit(send, gateway, "one", stream=True)
        assert (first.result().status, second.result().status) == (200, 200)
    assert engine.loads == ["one", "two", "three", "one"]


def test_a_hot_adapter_gets_a_second_copy(
    gateway: GatewayProcess, engines: list[LoraEngine]
) -> None:
    assert send(gateway, "one").status == 200
    for each in engines:
        each.mute = True
    with ThreadPoolExecutor(12) as pool:
        sent = [pool.submit(send, gateway, "one") for _ in range(12)]
        wait_for(lambda: sum(each.in_flight for each in engines) == 12)
        assert all("one" in each.has for each in engines), "8 fill a replica"
        for each in engines:
            each.release.set()
        assert {each.result().status for each in sent} == {200}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/default/lora/v1/chat/completions"])
def test_an_unknown_model_is_refused(
    gateway: GatewayProcess, engines: list[LoraEngine], path: str
) -> None:
    reply = send(gateway, "unknown", path)
    assert (reply.status, reply.json["error"]["code"]) == (404, "model_not_found")
    assert not count_prompts(engines)


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/load_lora_adapter", "//v1/unload%5flora_adapter"),
        *("/lora-adapters", "/x/../lora%2Dadapters"),
    ],
)
def test_clients_cannot_change_what_is_loaded(
    gateway: GatewayProcess, engines: list[LoraEngine], path: str
) -> None:
    assert send(gateway, "one", f"/default/lora{path}").status == 403
    assert not any("lora" in each.path for engine in engines for each in engine.seen)


def test_another_replica_serves_a_request_whose_adapter_cannot_be_loaded(
    gateway: GatewayProcess, engines: list[LoraEngine]
) -> None:
    engines[0].broken_loads = True
    for model in ("one", "two", "one", "two"):
        assert send(gateway, model).status == 200
    assert not engines[0].has
    for model, why in (
        ("lost", "No adapter found for its source"),
        ("large", f"LoRA rank 64 is greater than max_lora_rank {RANK_MAX}"),
    ):
        gateway.set_replicas("lora", engines[1:])
        error = send(gateway, model).json["error"]
        assert (error["code"], error["type"]) == ("adapter-not-loaded", "server_error")
        assert f"the adapter '{model}' could not be loaded" in error["message"]
        assert why in error["message"]
    asked = sum(each.path.endswith("load_lora_adapter") for each in engines[1].seen)
    assert send(gateway, "large").status == 502
    assert sum(each.path.endswith("load_lora_adapter") for each in engines[1].seen) == asked


def test_a_restarted_replica_loads_again(
    gateway: GatewayProcess, engines: list[LoraEngine]
) -> None:
    gateway.set_replicas("lora", engines[:1])
    for stream in (False, True):
        assert send(gateway, "one").status == 200
        engines[0].restart()
        reply = send(gateway, "one", stream=stream)
        assert (reply.status, b"word" in reply.body) == (200, True)
    assert engines[0].loads == ["one"] * 3


def test_a_refusal_for_another_reason_is_passed_on_after_one_more_try(
    gateway: GatewayProcess, engines: list[LoraEngine]
) -> None:
    gateway.set_services()
    gateway.set_services(describe("sglang"))
    gateway.set_replicas("lora", engines[:1])
    engine = engines[0]
    engine.api = "sglang"
    assert send(gateway, "one").status == 200
    engine.refuses = "the prompt is too long"
    before = count_prompts(engines)
    reply = send(gateway, "one")
    assert (reply.status, reply.json["error"]["message"]) == (400, engine.refuses)
    assert count_prompts(engines) == before + 2
    assert engine.loads == ["one"]


def test_a_request_that_no_fallback_answers_gets_its_adapter(
    gateway: GatewayProcess, engines: list[LoraEngine]
) -> None:
    engine, api = engines  # which refuses the model
    url = f"http://127.0.0.1:{api.port}/v1"
    target = {"id": "api-1", "label": "api", "url": url, "model": "big"}
    allowed = {"type": "credentials", "values": {}, "private_targets": "127.0.0.1"}
    assert gateway.control(**allowed) == {}
    gateway.set_services(describe(fallbacks=[target], fallback_s=0.01, wait_s=20))
    gateway.set_replicas("lora", [])
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(send, gateway, "one")
        wait_for(lambda: count_prompts([api]) and gateway.facts("lora")["backlog"])
        gateway.set_replicas("lora", [engine])
        assert waits.result().status == 200
    assert engine.loads == ["one"]


def test_two_gateways_share_the_slots_of_a_replica(
    gateway: GatewayProcess, engines: list[LoraEngine]
) -> None:
    other = GatewayProcess(services=[describe()])
    try:
        for each in (gateway, other):
            each.set_replicas("lora", engines[:1])
        for model in ("one", "two", "three", "one", "three", "four"):
            for each in (gateway, other):
                assert send(each, model).status == 200
    finally:
        other.remove()
    assert len(engines[0].has) == SLOTS


def test_an_engine_that_lists_many_adapters_is_bounded(
    gateway: GatewayProcess, engines: list[LoraEngine]
) -> None:
    gateway.set_replicas("lora", engines[:1])
    engines[0].lies = 50_000
    assert send(gateway, "one").status == 200
    assert engines[0].loads == ["one"]
    assert len(engines[0].seen) < 120, "each listed adapter is unloaded with a call"
    assert len(gateway.facts("lora")["replicas"][0]["adapters"]) < 120


def test_an_update_removes_and_changes_adapters(
    gateway: GatewayProcess, engines: list[LoraEngine]
) -> None:
    for name in ("one", "two", "three"):
        assert send(gateway, name).status == 200
    engines[0].mute = engines[1].mute = True
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(send, gateway, "one")
        wait_for(lambda: count_prompts(engines) == 4)
        gateway.set_services(describe(sources={"two": "/adapters/two", "three": "/adapters/new"}))
        assert send(gateway, "one").status == 404
        for each in engines:
            each.release.set()
        assert running.result().status == 200
    engines[0].mute = engines[1].mute = False
    for name in ("two", "three"):
        assert send(gateway, name).status == 200
    sources = {**engines[0].has, **engines[1].has}
    assert (sources["two"], sources["three"]) == ("/adapters/two", "/adapters/new")
    assert engines[0].loads.count("two") + engines[1].loads.count("two") == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_name_the_adapter_as_the_engine_expects_it(
    gateway: GatewayProcess, engines: list[LoraEngine], stream: bool, chunked: bool
) -> None:
    gateway.set_replicas("lora", engines[:1])
    engine = engines[0]
    for api, expected in (
        ("sglang", {"lora_path": "two"}),
        ("llama.cpp", {"lora": [{"id": 1, "scale": 1.0}]}),
        ("tgi", {}),
    ):
        engine.api = api
        engine.has = {} if api == "sglang" else dict(SOURCES)
        gateway.set_services(describe(api))
        body = {"model": "two", "messages": [{"role": "user", "content": "a"}], "stream": stream}
        data = json.dumps(body).encode()
        head = {"content-type": "application/json", "host": "any.example"}
        if chunked:
            head["transfer-encoding"] = "chunked"
            data = b"5\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (data[:5], len(data) - 5, data[5:])
        for _ in range(2):
            assert ask(gateway.port, "POST", "/v1/chat/completions", data, **head).status == 200
        sent = json.loads(engine.seen[-1].body)
        assert {key: sent.get(key) for key in ("lora_path", "lora") if key in sent} == expected
        assert (sent["model"], sent["messages"]) == ("two", body["messages"])
        gateway.set_services()
        gateway.set_services(describe(api))
        gateway.set_replicas("lora", engines[:1])
    assert engine.loads == ["two"]
