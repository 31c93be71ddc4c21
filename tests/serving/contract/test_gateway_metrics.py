"""What Prometheus reads from the gateway's process."""

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.contract.engine_stand_in import EngineStandIn
from tests.contract.gateway_process import GatewayProcess, wait_for
from tests.contract.gateway_suite import of_models
from tests.contract.http_talk import Background, Reply, Talk, ask
from tests.system.ports import free_port
from tests.waits import START_S

TOKEN = "a-token-of-a-test"
HOSTILE = 'odd"} 1\nspent_dollars{x="\\'
NARROW = {"concurrency": 1, "queue_max": 1, "late_s": 0.001, "slow_s": 0.001}
SERVICES: list[dict[str, Any]] = [
    {
        **{"name": "llm", "label": "chat", "project": "site", "hosts": ["llm.example"]},
        **{"models": ["org/tiny"], "routing": {"by": "cache"}},
    },
    {"name": "narrow", "label": "tight", "hosts": ["narrow.example"], **NARROW},
    {
        **{"name": "cold", "label": "cold", "hosts": ["cold.example"], "fallback_s": 0.01},
        "fallbacks": [{"id": "other", "label": "service/tight", "service": "narrow"}],
    },
    {"name": "odd", "label": HOSTILE, "hosts": ["odd.example"], "closed": "the budget is spent"},
]


@pytest.fixture
def engine() -> Iterator[EngineStandIn]:
    made = EngineStandIn("e1")
    made.start()
    yield made
    made.stop()


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[GatewayProcess]:
    file = tmp_path / "metrics.token"
    file.write_text(f"{TOKEN}\n")
    metrics = {"host": "127.0.0.1", "port": free_port(), "token_file": str(file)}
    made = GatewayProcess(services=SERVICES, metrics=metrics)
    yield made
    made.remove()


def get(
    gateway: GatewayProcess, path: str = "/metrics", method: str = "GET", **fields: str
) -> Reply:
    fields = {"host": "localhost", "authorization": f"Bearer {TOKEN}", **fields}
    return ask(gateway.config["metrics"]["port"], method, path, **fields)


def scrape(gateway: GatewayProcess) -> dict[tuple[str, str, str], float]:
    """Return the values by sample, service and the last further label."""
    reply = get(gateway)
    assert (reply.status, reply.headers["connection"]) == (200, "close")
    found = {}
    for family in text_string_to_metric_families(reply.body.decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            service, _ = labels.pop("service", ""), labels.pop("project", "")
            found[sample.name, service, "".join(labels.values())] = sample.value
    return found


def chat(gateway: GatewayProcess, text: str) -> int:
    content = {"model": "org/tiny", "messages": [{"role": "user", "content": text}]}
    body = json.dumps(content).encode()
    path = "/v1/chat/completions"
    return ask(gateway.port, "POST", path, body, host="llm.example").status


@of_models
def test_each_metric_of_the_page_moves(gateway: GatewayProcess, engine: EngineStandIn) -> None:
    before = scrape(gateway)
    prompt = "the same long beginning of a prompt " * 200
    cold = Background(chat, gateway, prompt)
    wait_for(lambda: gateway.facts("llm")["backlog"])
    gateway.set_replicas("llm", [engine])
    assert cold.result() == 200
    assert chat(gateway, prompt + "and an end") == 200

    gateway.set_replicas("narrow", [engine])
    narrow = {"host": "narrow.example"}
    held = Background(ask, gateway.port, "GET", "/hold", **narrow)
    wait_for(lambda: gateway.facts("narrow")["in_flight"])
    with Talk(gateway.port) as leaving:
        leaving.send(b"GET /echo HTTP/1.1\r\nHost: narrow.example\r\n\r\n")
        wait_for(lambda: gateway.facts("narrow")["backlog"])
        during = scrape(gateway)
        assert ask(gateway.port, "GET", "/echo", **narrow).status == 429
    wait_for(lambda: gateway.facts("narrow")["aborted"])
    waiting = Background(ask, gateway.port, "GET", "/echo", **narrow)
    wait_for(lambda: gateway.facts("narrow")["backlog"])
    engine.release.set()
    assert (held.result().status, waiting.result().status) == (200, 200)
    assert ask(gateway.port, "GET", "/die", **narrow).status == 502  # also at its second try
    assert ask(gateway.port, "GET", "/echo", host="odd.example").status == 402

    assert ask(gateway.port, "GET", "/echo", host="cold.example").status == 200

    found = scrape(gateway)
    assert found["cavvy_gateway_fallbacks_total", "cold", "service/tight"] == 1
    assert found["cavvy_gateway_requests_total", "chat", "answered"] == 2
    assert found["cavvy_gateway_request_seconds_count", "chat", ""] == 2
    assert found["cavvy_gateway_request_seconds_bucket", "chat", "+Inf"] == 2
    assert found["cavvy_gateway_request_seconds_sum", "chat", ""] > 0
    assert found["cavvy_gateway_cold_starts_total", "chat", ""] == 1
    assert found["cavvy_gateway_routed_prompts_total", "chat", "hit"] == 1
    assert found["cavvy_gateway_routed_prompts_total", "chat", "miss"] == 1
    for kind in ("prompt", "cached", "completion"):
        assert found["cavvy_gateway_tokens_total", "chat", kind] == engine.tokens[kind]
    assert found["cavvy_gateway_requests_total", "tight", "aborted"] == 1
    assert found["cavvy_gateway_requests_total", "tight", "unserved"] == 1
    assert found["cavvy_gateway_requests_total", "tight", "lost"] == 1
    assert found["cavvy_gateway_requests_total", HOSTILE, "refused"] == 1
    assert during["cavvy_gateway_in_flight", "tight", ""] == 1
    assert during["cavvy_gateway_waiting", "tight", ""] == 1

    page = (Path(__file__).parents[3] / "docs/reference/metrics.md").read_text()
    moved = {
        re.sub("_(total|count|sum|bucket)$", "", name)
        for samples in (during, found)
        for (name, *labels), value in samples.items()
        if value != before.get((name, *labels), 0)
    }
    listed = {name.removesuffix("_total") for name in re.findall(r"`(cavvy_gateway_\w+)`", page)}
    assert listed - moved == set()
    exported = {name for name, *_ in found if name.startswith("cavvy_")}
    assert {re.sub("_(total|count|sum|bucket)$", "", name) for name in exported} == listed


def test_only_readers_with_the_token_get_the_figures(gateway: GatewayProcess) -> None:
    for stated in ("", "Bearer ", f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}"):
        reply = get(gateway, authorization=stated)
        assert reply.status == 401, stated
        assert TOKEN not in reply.body.decode()
        assert b"cavvy_" not in reply.body
    assert get(gateway, "/metrics?project=x").status == 200
    assert get(gateway, "/").status == 404
    assert get(gateway, method="POST").status == 405
    assert ask(gateway.port, "GET", "/metrics", host="localhost").status == 404
    Path(gateway.config["metrics"]["token_file"]).write_text("another")
    assert get(gateway).status == 401
    assert get(gateway, authorization="Bearer another").status == 200
    Path(gateway.config["metrics"]["token_file"]).write_text("")
    assert get(gateway, authorization="Bearer ").status == 401


@pytest.mark.parametrize("sent", [b"\r\n\r\n", b"x" * 20_000, b"GET /metrics\r\n", b"\0:\r\n\r\n"])
def test_odd_readers_are_cut_off(gateway: GatewayProcess, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", gateway.config["metrics"]["port"])) as odd:
        odd.sendall(sent)
        odd.shutdown(socket.SHUT_WR)
        with odd.makefile("rb") as answer:
            assert answer.read()[:12] in (b"", b"HTTP/1.1 404")
    assert get(gateway).status == 200


def test_a_used_port_is_named_with_its_setting(gateway: GatewayProcess, tmp_path: Path) -> None:
    file = tmp_path / "second.json"
    config = {**gateway.config, "control": str(tmp_path / "control")}
    file.write_text(json.dumps({**config, "counts": "", "state": str(tmp_path)}))
    command = [sys.executable, "-m", "cavvy.capabilities.serving.gateway", str(file)]
    second = subprocess.run(command, capture_output=True, timeout=START_S, check=False)
    assert second.returncode == 1
    said = json.loads(second.stdout)["problem"]
    assert said.endswith("or change services.metrics_listen"), said
