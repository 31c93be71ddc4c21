"""The spans of requests, as a collector of OpenTelemetry gets them from the gateway."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from tests.contract.gateway_process import GatewayProcess, wait_for
from tests.contract.http_talk import Talk, ask
from tests.contract.replica_stand_in import ReplicaStandIn

pytest.importorskip("opentelemetry.sdk", reason="`make setup-dev` installs OpenTelemetry's SDK")
from tests.contract.otlp_stand_in import OtlpStandIn, attributes

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SERVICES: list[dict[str, Any]] = [
    {"name": "svc", "label": "chat", "project": "site", "hosts": ["svc.example"]},
    {"name": "none", "hosts": ["none.example"], "wait_s": 0.1},
]


@pytest.fixture
def collector() -> Iterator[OtlpStandIn]:
    made = OtlpStandIn()
    yield made
    made.close()
    assert made.broken == []


@pytest.fixture
def replica() -> Iterator[ReplicaStandIn]:
    made = ReplicaStandIn("r1").start()
    yield made
    made.stop()


@pytest.fixture
def gateway(
    collector: OtlpStandIn, replica: ReplicaStandIn, monkeypatch: pytest.MonkeyPatch
) -> Iterator[GatewayProcess]:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20of-the-collector")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    made = GatewayProcess(services=SERVICES)
    made.set_replicas("svc", [replica])
    yield made
    made.remove()


def test_a_request_continues_the_trace_of_its_client(
    gateway: GatewayProcess, collector: OtlpStandIn, replica: ReplicaStandIn
) -> None:
    stated = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    assert ask(gateway.port, "POST", "/echo", b"x", **stated).status == 200
    [span] = wait_for(lambda: collector.spans)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    got = [value for name, value in replica.seen[0].headers if name.lower() == "traceparent"]
    assert got == [f"00-{TRACE}-{span.span_id.hex()}-01"]
    assert replica.seen[0].get("tracestate") == "vendor=1"
    found = attributes(span)
    assert (found["cavvy.project"], found["cavvy.service"]) == ("site", "chat")
    assert (found["http.request.method"], found["http.response.status_code"]) == ("POST", 200)
    assert [each.name for each in span.events] == ["replica"]
    assert collector.fields[0]["authorization"] == "Bearer of-the-collector"
    resource = collector.requests[0].resource_spans[0].resource
    assert attributes(resource)["service.name"] == "cavvy-gateway"


def test_other_requests_begin_a_trace(
    gateway: GatewayProcess, collector: OtlpStandIn, replica: ReplicaStandIn
) -> None:
    """An invalid context is not passed on, nor is the state that belongs to it."""
    odd = ("", "x", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{PARENT}", "00-" + "f" * 9000)
    for value in odd:
        stated = {"traceparent": value, "tracestate": "vendor=1"}
        assert ask(gateway.port, "GET", "/echo", **stated).status == 200
    spans = wait_for(lambda: len(collector.spans) == len(odd) and collector.spans)
    assert len({span.trace_id for span in spans}) == len(odd)
    for seen, span in zip(replica.seen, spans, strict=True):
        assert not span.parent_span_id
        begin, _, flags = (seen.get("traceparent") or "").rpartition("-")
        assert begin == f"00-{span.trace_id.hex()}-{span.span_id.hex()}"
        assert int(flags, 16) & 1, "sampled"
        assert seen.get("tracestate") is None


def test_a_client_that_asks_for_no_trace_gets_none(
    gateway: GatewayProcess, collector: OtlpStandIn, replica: ReplicaStandIn
) -> None:
    unsampled = f"00-{TRACE}-{PARENT}-00"
    assert ask(gateway.port, "GET", "/echo", traceparent=unsampled).status == 200
    assert replica.seen[0].get("traceparent") == unsampled
    assert ask(gateway.port, "GET", "/echo").status == 200
    assert len(wait_for(lambda: collector.spans)) == 1


def test_each_end_of_a_request_ends_its_span(
    gateway: GatewayProcess, collector: OtlpStandIn, replica: ReplicaStandIn
) -> None:
    def find(problem: str) -> Any:
        found = [each for each in collector.spans if attributes(each).get("error.type") == problem]
        return found[0] if found else None

    assert ask(gateway.port, "GET", "/echo", host="none.example").status == 504
    span = wait_for(lambda: find("no-replica-in-time"))
    assert attributes(span)["http.response.status_code"] == 504
    assert ask(gateway.port, "GET", "/die").status == 502
    assert wait_for(lambda: find("replica-lost"))
    with Talk(gateway.port) as talk:
        talk.send(b"GET /hold HTTP/1.1\r\nHost: svc.example\r\n\r\n")
        wait_for(lambda: gateway.facts("svc")["in_flight"])
    assert wait_for(lambda: find("aborted"))
    with Talk(gateway.port) as talk, pytest.raises(EOFError):
        talk.ask("GET", "/partial")
    assert wait_for(lambda: find("cut"))
    assert ask(gateway.port, "GET", "/status?code=503").status == 503
    assert wait_for(lambda: find("replica"))
