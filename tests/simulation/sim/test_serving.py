"""The simulator of services: its accounts by hand, what no rule can break, the readers of traces,
and the rules of other systems against their sources.
"""

import csv
import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.public_data import data

pytest.importorskip("cavvy.capabilities.serving", reason="simulates its rules")

from cavvy.capabilities.serving.autoscaler.terms import ScalingTerms
from cavvy.capabilities.simulation.serving.comparison import bound_replica_hours
from cavvy.capabilities.simulation.serving.requests import (
    RequestOptions,
    RequestTrace,
    TokenSpeed,
    read_requests,
)
from cavvy.capabilities.simulation.serving.rules import (
    RULES,
    AibrixRule,
    DstackRule,
    KedaRule,
    KnativeRule,
    LoadHistory,
    LoadView,
    RayServeRule,
    RuleState,
    ScalingRule,
    SkyServeRule,
)
from cavvy.capabilities.simulation.serving.run import (
    AutoscalerController,
    RuleController,
    ServingScore,
    run_service,
)
from cavvy.capabilities.simulation.serving.service import (
    ReplicaMarket,
    ServiceSetting,
    SimulatedService,
)
from cavvy.capabilities.simulation.traces.readers import TraceError
from cavvy.domain.services import TargetKind

SETTING = ServiceSetting(concurrency=2, cold_start_s=30.0, cold_spread=0.0, slo_wait_s=5.0)


def trace(arrivals_s: Sequence[float], service_s: float = 10.0) -> RequestTrace:
    return RequestTrace(
        name="made-up",
        arrivals_s=tuple(arrivals_s),
        services_s=(service_s,) * len(arrivals_s),
    )


class FixedController:
    """Orders the same at every second."""

    interval_s, holds = 1, True

    def __init__(self, *counts: int) -> None:
        self._counts = counts

    def order(self, service: SimulatedService) -> Sequence[int]:
        return self._counts

    def watch(self, service: SimulatedService) -> None:
        pass


def run(
    requests: RequestTrace, *counts: int, markets: Sequence[ReplicaMarket] = ()
) -> ServingScore:
    return run_service("fixed", requests, SETTING, FixedController(*counts), markets, warm=False)


def test_requests_wait_for_the_cold_start_and_replicas_are_paid_from_their_order() -> None:
    # ordered at 1 s, ready at 31 s; two slots, so the third request starts when the first ends
    score = run(trace([0.0, 0.0, 0.0]), 1)
    assert score.wait_s == (31.0, 41.0, 41.0)
    assert score.on_time == 0.0
    assert score.replica_hours * 3600 == pytest.approx(50.0)
    assert score.usd == pytest.approx(50.0 / 3600 * 3.0)


@pytest.mark.parametrize(
    ("kind", "target", "concurrency", "most", "longest_s"),
    [
        (TargetKind.CONCURRENCY, 2.0, 4, 7, 15.0),
        # nobody knows the length of the requests when they arrive, so replicas are added one by one
        (TargetKind.QUEUE_WAIT, 10.0, 1, 12, 60.0),
    ],
)
def test_long_requests_get_replicas_before_any_of_them_has_ended(
    kind: TargetKind, target: float, concurrency: int, most: int, longest_s: float
) -> None:
    """Twelve requests of five minutes arrive at a service that has had only one short request."""
    requests = RequestTrace(
        name="made-up", arrivals_s=(1.0, *[60.0] * 12), services_s=(0.2, *[300.0] * 12)
    )
    terms = ScalingTerms(kind=kind, target=target, concurrency=concurrency, cold_start_s=10.0)
    controller = AutoscalerController(terms, interval_s=1)
    setting = ServiceSetting(concurrency=concurrency, cold_start_s=10.0)
    score = run_service("own", requests, setting, controller, warm=False, ready=1)
    assert score.wait_s[-1] <= longest_s
    assert max(decision.wanted for _, decision in controller.decisions) <= most


def test_a_drained_replica_finishes_its_requests() -> None:
    service = SimulatedService(
        trace([0.0, 0.0]),
        SETTING,
        [ReplicaMarket(name="a", region="", spot=False, usd_hr=3.0)],
        holds=True,
    )
    service.start_warm(0, 1)
    service.advance(1.0)
    service.order([0])
    assert (service.count_held(0), service.in_flight) == (0, 2)
    service.advance(20.0)
    assert service.done
    assert service.replica_s == pytest.approx(10.0)


def test_a_lost_replica_gives_its_requests_back_once() -> None:
    """Capacity for 60 s, then none for 30 s: the requests start again; those that are lost a second
    time have failed.
    """
    spot = ReplicaMarket(
        name="a", region="", spot=True, usd_hr=1.0, capacity=(1, 1, 0, 1, 1, 1, 1), step_s=30.0
    )
    score = run(trace([55.0], service_s=20.0), 1, markets=[spot])
    assert (score.lost, score.failed, score.on_time) == (1, 0, 0.0)
    again = ReplicaMarket(
        name="a", region="", spot=True, usd_hr=1.0, capacity=(1, 1, 0, 1, 1, 0, 0), step_s=30.0
    )
    twice = run(trace([55.0], service_s=90.0), 1, markets=[again])
    assert (twice.lost, twice.failed) == (2, 1)


def test_a_gateway_that_does_not_hold_requests_fails_them() -> None:
    rule = RuleController(SkyServeRule(), 1.0)
    score = run_service("skyserve", trace([0.0, 1.0, 100.0]), SETTING, rule, warm=False)
    assert score.failed == 2


@settings(max_examples=25, deadline=None)
@given(
    gaps=st.lists(st.floats(0, 30), min_size=1, max_size=60),
    name=st.sampled_from([*RULES, "cavvy"]),
    warm=st.booleans(),
)
def test_every_request_is_served_once_or_failed_and_nothing_beats_the_bound(
    gaps: list[float], name: str, warm: bool
) -> None:
    arrivals, at = [], 0.0
    for gap in gaps:
        at += gap
        arrivals.append(at)
    requests = trace(arrivals, service_s=7.0)
    controller = (
        AutoscalerController(ScalingTerms(concurrency=2, cold_start_s=30.0))
        if name == "cavvy"
        else RuleController(RULES[name], 7.0)
    )
    score = run_service(name, requests, SETTING, controller, warm=warm)
    served = 1 - score.failed / score.requests
    assert 0 <= score.on_time <= served + 1e-9
    assert score.replica_hours >= bound_replica_hours(requests, SETTING) * served - 1e-9


def view(now_s: float, history: LoadHistory, ready: int, starting: int = 0) -> LoadView:
    return LoadView(now_s, ready, starting, history, 4, 1.0)


def constant(requests: int, per_s: int, seconds: int) -> LoadHistory:
    history = LoadHistory()
    for second in range(seconds):
        history.add(per_s * (second + 1), requests)
    return history


@pytest.mark.parametrize(
    ("rule", "requests", "per_s", "expected"),
    [
        (KnativeRule(), 28, 28, 10),  # 28 / (4 * 0.7)
        (KedaRule(), 28, 28, 10),
        (RayServeRule(upscale_s=0.0), 28, 28, 18),  # 28 / (4 * 0.4)
        (SkyServeRule(upscale_s=0.0), 28, 28, 10),
        (DstackRule(upscale_s=0.0), 28, 28, 10),
        (AibrixRule(), 28, 28, 10),
    ],
)
def test_each_rule_divides_the_load_by_its_target(
    rule: ScalingRule, requests: int, per_s: int, expected: int
) -> None:
    history = constant(requests, per_s, 600)
    wanted, _ = rule.decide(RuleState(), view(600.0, history, 5))
    assert wanted == expected


def test_knative_panics_at_twice_the_ready_replicas_and_does_not_shrink_in_panic() -> None:
    history = constant(4, 4, 60)
    for second in range(6):
        history.add(240 + second, 100)
    rule = KnativeRule()
    wanted, state = rule.decide(RuleState(), view(66.0, history, 2))
    assert wanted == 36
    for second in range(20):
        history.add(300 + second, 0)
    kept, state = rule.decide(state, view(86.0, history, 36))
    assert kept == 36
    for second in range(60):
        history.add(400 + second, 4)
    calm, _ = rule.decide(state, view(160.0, history, 36))
    assert calm < 36


def test_skyserve_waits_for_its_delays() -> None:
    rule, state = SkyServeRule(), RuleState()
    history = constant(40, 40, 600)
    counts = []
    for step in range(20):
        wanted, state = rule.decide(state, view(600.0 + 20 * step, history, 2))
        counts.append(wanted)
    assert counts[:15] == [2] * 15
    assert counts[15] == 15


def test_the_readers_know_the_public_formats(tmp_path: Path) -> None:
    options = RequestOptions(speed=TokenSpeed(prompt_ms=1.0, answer_ms=10.0), service_s=5.0)
    files = {
        "plain.csv": "arrival_s,service_s\n3,2\n1,4\n",
        "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,1000,100\n2023-11-16 18:15:48.6805900,2000,0\n",
        "burst.csv": "Timestamp,Model,Request tokens,Response tokens\n5,m,1000,100\n7,m,2000,0\n",
        "pictures.csv": "gmt_create,exec_time_seconds\n2024-11-15 16:57:50,2\n"
        "2024-11-15 16:57:52,2\n2024-11-15 16:57:53,\n",
    }
    read = {}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        read[name] = read_requests(tmp_path / name, options)
        assert read[name].arrivals_s == (0.0, pytest.approx(2.0))
    assert read["plain.csv"].services_s == (4.0, 2.0)
    assert read["azure.csv"].services_s == read["burst.csv"].services_s == (2.0, 2.0)
    lines = [
        {"timestamp": at, "input_length": 1000, "output_length": 100} for at in (0, 0, 3000, 6000)
    ]
    (tmp_path / "moon.jsonl.gz").write_bytes(
        gzip.compress("\n".join(map(json.dumps, lines)).encode())
    )
    moon = read_requests(tmp_path / "moon.jsonl.gz", options)
    assert len(moon.arrivals_s) == 4
    assert set(moon.services_s) == {2.0}


@pytest.mark.parametrize(
    "text", ["", "a,b\n1,2\n", "arrival_s,service_s\n", "arrival_s,service_s\nx,1\n"]
)
def test_a_file_that_is_no_trace_is_said(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"bad\.csv"):
        read_requests(path)


TOKENS = "arrival_s,prompt_tokens,answer_tokens\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n\n2024-01-01,\n", "one request in each row"),
        ("ContextTokens,GeneratedTokens,TIMESTAMP\n3,4\n", "a value is missing"),
        ("timestamp_anon,value,request_type\n3,4\n", "a value is missing"),
        ("timestamp_anon,value,request_type\n3,inf,Generative\n", "inf requests"),
        ("start_s,requests\n0,4000000000\n", "4e[+]09 requests, more than"),
        ("start_s,requests\n0,-4\n60,5\n", "negative"),
        ("arrival_s,service_s\n0,-4\n1,2\n", "-4 s"),
        ("arrival_s,service_s\n0,1e999\n1,2\n", "inf s"),
        (TOKENS + "nan,1,1\n0,1,1\n", "nan s"),
        (TOKENS + "1e999,1,1\n0,1,1\n", "inf s"),
        (TOKENS + "0,1,1\n1700000000,1,1\n", "at most a year, not 19,676 days"),
        (TOKENS + "0,1e12,1\n", "at most a year"),
        (TOKENS + "0," + "1" * 200_000 + ",5\n", "field larger than"),
        ('{"timestamp":1' + "0" * 400 + ',"input_length":1,"output_length":1}', "too large"),
        ('{"timestamp":1,"input_length":1,"output_length":1}\n[1]\n', "a value is missing"),
        ('{"timestamp":' + "[" * 100_000, "recursion"),
    ],
)
def test_odd_values_of_a_trace_are_said(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "odd.csv"
    path.write_text(text)
    csv.field_size_limit(1 << 24)  # as the readers of bills and of batches leave it
    with pytest.raises(TraceError, match=rf"odd\.csv: .*{says}"):
        read_requests(path)


def test_a_trace_may_begin_with_a_mark_but_not_end_early(tmp_path: Path) -> None:
    text = "\ufeff" + TOKENS + "".join(f"{at},{at % 7},{at % 5}\n" for at in range(5000))
    (tmp_path / "marked.csv").write_text(text)
    assert len(read_requests(tmp_path / "marked.csv").tokens) == 5000
    packed = gzip.compress(text.encode())
    (tmp_path / "marked.csv.gz").write_bytes(packed)
    assert len(read_requests(tmp_path / "marked.csv.gz").tokens) == 5000
    for wrong in (packed[:-20], packed[:10] + b"x" * 40):
        for name in ("cut.csv.gz", "cut.tar.gz"):
            (tmp_path / name).write_bytes(wrong)
            with pytest.raises(TraceError, match="cannot be read"):
                read_requests(tmp_path / name)


@pytest.mark.parametrize(
    ("path", "count"),
    [
        ("traces/azure/AzureLLMInferenceTrace_code.csv", 8819),
        ("traces/mooncake/conversation_trace.jsonl.gz", 12031),
        ("traces/genai2026/lora_request_trace.csv", 26793),
    ],
)
def test_the_public_traces_are_read(path: str, count: int) -> None:
    found = read_requests(data(path))
    assert len(found.arrivals_s) == count
    assert found.arrivals_s[0] == 0.0


def test_cavvy_needs_fewer_replica_hours_than_the_defaults_of_others() -> None:
    """One public trace; benchmarks/autoscaling.py compares with the best parameters on all."""
    requests = read_requests(data("traces/azure/AzureLLMInferenceTrace_conv.csv"))
    setting = ServiceSetting()
    service_s = requests.work_s / len(requests.services_s)
    own = run_service(
        "cavvy",
        requests,
        setting,
        AutoscalerController(ScalingTerms(concurrency=4, service_s=service_s)),
    )
    assert own.on_time > 0.95
    for name, rule in RULES.items():
        other = run_service(name, requests, setting, RuleController(rule, service_s))
        assert own.replica_hours < other.replica_hours
