"""Objectives of language models: the speeds that are measured, and the replicas that follow."""

from datetime import timedelta
from random import Random

import msgspec
import pytest

from cavvy.capabilities.serving.autoscaler.decide import ScalingState, decide
from cavvy.capabilities.serving.autoscaler.load import LoadRecord, ServiceLoad, add_to_hour
from cavvy.capabilities.serving.autoscaler.objectives import estimate_goals, find_speeds
from cavvy.capabilities.serving.autoscaler.terms import (
    MarketObservation,
    ScaleReason,
    ScalingTerms,
    ServiceObservation,
)
from cavvy.capabilities.serving.decide.traffic import (
    GatewayCount,
    GatewayTotals,
    ServiceTraffic,
    add_reports,
)
from cavvy.capabilities.serving.gateway.answer_times import AnswerTimes, FirstToken
from cavvy.capabilities.serving.gateway.kept_counts import KeptCounts
from cavvy.capabilities.serving.gateway.work import ReplicaWork
from cavvy.capabilities.serving.loads import TokenTimes
from cavvy.capabilities.serving.services_command import _show_objective, _show_speed
from cavvy.capabilities.serving.wire import ObjectiveView, TokenSpeedView
from cavvy.domain.services import LatencyGoal, ReplicaRole
from cavvy.domain.values import replace
from cavvy.spec import SpecError
from cavvy.task_files import parse_file

PROMPT_S, BASE_S, GAP_S, RUNNING_S = 0.0002, 0.02, 0.02, 0.001


def measure(
    answers: int, most_running: int = 16, seed: int = 1, limit_s: float = 1.0
) -> TokenTimes:
    """The times of one replica's answers, as the gateway measures them."""
    random, times, now = Random(seed), AnswerTimes(limit_s, 0.03), 100.0
    work = ReplicaWork(KeptCounts())
    for _ in range(answers):
        running, prompt = random.randint(1, most_running), round(random.lognormvariate(7, 0.8))
        gap_s = GAP_S + RUNNING_S * running
        for _ in range(running):
            work.begin("", now)
        sent_at = now
        work.change_prompts(1, now)
        now += BASE_S + PROMPT_S * prompt
        work.change_prompts(-1, now)
        first = FirstToken(sent_at - 0.1, sent_at, work, now)
        now += 199 * gap_s
        times.add(prompt, 200, first, now)
        for _ in range(running):
            work.end("", now)
    return times.describe()


def terms(ttft_ms: int | None, gap_ms: int | None, most: int = 100) -> ScalingTerms:
    goals = [
        None if each is None else LatencyGoal(limit=timedelta(milliseconds=each))
        for each in (ttft_ms, gap_ms)
    ]
    return ScalingTerms(concurrency=64, most=most, ttft=goals[0], token_gap=goals[1])


def load(rate: float) -> ServiceLoad:
    return ServiceLoad(rate=rate, service_s=5.0, unevenness=1.5, burst=False)


def test_the_speed_of_a_model_is_measured_from_its_answers() -> None:
    speeds = find_speeds(measure(500))
    assert speeds is not None
    assert speeds.prompt_s == pytest.approx(PROMPT_S, rel=0.02)
    assert speeds.base_s == pytest.approx(BASE_S, rel=0.05)
    assert speeds.gap_s == pytest.approx(GAP_S, rel=0.02)
    assert speeds.running_s == pytest.approx(RUNNING_S, rel=0.02)
    assert speeds.completion == pytest.approx(200)
    assert find_speeds(measure(19)) is None


def test_a_gap_that_was_measured_at_one_number_of_requests_is_assumed_to_grow() -> None:
    speeds = find_speeds(measure(200, most_running=1))
    assert speeds is not None
    assert speeds.running_s == pytest.approx(0.02 * (GAP_S + RUNNING_S))


def test_answers_that_miss_an_objective_are_counted() -> None:
    assert measure(100, limit_s=0.1).late == 100, "the requests waited for 0.1 s"
    some = measure(100, limit_s=10.0)
    assert 0 < some.late < 100, "the gap is above its limit if more than 10 requests run"


def test_the_lengths_of_the_last_hour_count() -> None:
    before = add_to_hour(TokenTimes(), TokenTimes(answers=100, prompt=100_000), 0)
    after = add_to_hour(before, TokenTimes(answers=100, prompt=900_000), 3 * 3600)
    assert 8000 < after.prompt / after.answers < 9000


@pytest.mark.parametrize(("ttft_ms", "gap_ms"), [(1500, None), (None, 26), (1500, 26)])
def test_replicas_follow_the_load_and_the_objectives(
    ttft_ms: int | None, gap_ms: int | None
) -> None:
    times, asked = measure(500), terms(ttft_ms, gap_ms)
    needed = []
    for rate in (0.5, 2.0, 8.0, 32.0):
        found = estimate_goals(times, load(rate), asked, 1.0)
        assert found is not None
        needed.append(found.needed)
        assert asked.ttft is None or found.ttft_s <= 1.5
        assert asked.token_gap is None or found.gap_s <= 0.026
        stricter = estimate_goals(times, load(rate), asked, 0.2)
        assert stricter is not None
        assert stricter.needed >= found.needed
    assert needed == sorted(needed)
    assert needed[-1] > 10


def test_groups_with_roles_do_not_get_replicas_for_the_work_of_the_others() -> None:
    times, asked = measure(500), replace(terms(1500, 26), concurrency=8)

    def need(role: ReplicaRole | None, **goals: None) -> int:
        found = estimate_goals(times, load(32.0), replace(asked, role=role, **goals), 1.0)
        assert found is not None
        return found.needed

    prefill = need(ReplicaRole.PREFILL, token_gap=None)
    decode = need(ReplicaRole.DECODE, ttft=None)
    assert 1 < prefill < need(None, token_gap=None)
    assert 1 < decode < need(None, ttft=None)


def test_an_objective_out_of_reach_is_said_and_adds_few_replicas() -> None:
    found = estimate_goals(measure(500), load(8.0), terms(100, 10), 0.01)
    assert found is not None
    assert found.best_ttft_s > 0.1
    assert found.best_gap_s > 0.01
    assert found.needed < 30
    idle = estimate_goals(measure(500), load(0.0), terms(100, 10), 1.0)
    assert idle is not None
    assert idle.needed == 0


def test_the_autoscaler_keeps_the_replicas_that_an_objective_needs() -> None:
    seen = ServiceObservation(
        now_s=900.0,
        arrivals=(8,) * 5,
        tokens=measure(500),
        markets=(MarketObservation(name="a", ready_s=(900.0,)),),
    )
    record = LoadRecord(slow=1200.0, slow_span_s=150.0, fast=240.0, fast_span_s=30.0)
    state = ScalingState(began_s=0.0, wanted=1, load=record)
    decision, after = decide(terms(1500, 26), state, seen)
    assert decision.reason is ScaleReason.OBJECTIVE
    assert after.goals is not None
    assert decision.wanted == after.goals.needed > 1
    again = msgspec.json.decode(msgspec.json.encode(after), type=ScalingState)
    assert again == after
    bounded, _ = decide(terms(1500, 26, most=2), state, seen)
    assert (bounded.wanted, bounded.reason) == (2, ScaleReason.MOST)
    without, plain = decide(replace(terms(1500, 26), ttft=None, token_gap=None), state, seen)
    assert (without.wanted, plain.goals) == (1, None)


def test_the_times_of_several_gateways_add_up() -> None:
    reports = {
        name: GatewayCount(
            version=1, traffic=ServiceTraffic(at_s=1.0, arrivals=9, tokens=measure(50, seed=seed))
        )
        for name, seed in (("a", 1), ("b", 2))
    }
    totals = add_reports(GatewayTotals(), reports, 1.0, whole=True)
    again = add_reports(totals, reports, 2.0, whole=True)
    assert again.sum is not None
    assert again.sum.tokens.answers == 100


@pytest.mark.parametrize(
    ("slo", "said"),
    [
        ("{ttft: {p95: 0}}", "'0' is too short"),
        ("{ttft: {p97: 1s}}", "did you mean `p99`?"),
        ("{ttft: {}}", "no percentile is given"),
        ("{ttft: {p95: 1s, p99: 2s}}", "p95 and p99 are given"),
        ("{ttft: 800ms}", "write, for example, `ttft: {p95: 800ms}`"),
        ("{tpot: {p95: 60ms}}", "write `token_gap`"),
    ],
)
def test_odd_objectives_get_a_clear_error(slo: str, said: str) -> None:
    text = f"run: x\nservice: {{models: [m], slo: {slo}}}\n"
    with pytest.raises(SpecError) as raised:
        parse_file(text)
    assert said in str(raised.value)


def test_what_is_expected_of_an_objective_is_said() -> None:
    asked = ObjectiveView(name="ttft", share=0.95, limit_s=0.8)
    assert "95% within 0.8 s; not measured yet" in _show_objective(asked, 8)
    known = replace(asked, needed=5, expected_s=0.74, best_s=0.41)
    said = "95% within 0.8 s; 0.74 s expected with 5 replicas, at best 0.41 s"
    assert _show_objective(known, 8) == said
    assert _show_objective(known, 4) == f"{said}; `replicas.max` permits only 4"
    missed = _show_objective(replace(known, best_s=0.9), 8)
    assert "no number of replicas meets this: the best is 0.9 s" in missed
    speed = TokenSpeedView(
        prompt_s=2e-4, base_s=0.02, gap_s=0.02, running_s=1e-3, prompt=1506.2, completion=200.0
    )
    assert _show_speed(speed) == (
        "20 ms for a prompt and 0.2 ms more for each of its tokens; 20 ms between tokens and 1 ms "
        "more for each running request; 1,506 tokens in a prompt and 200 in an answer on average"
    )
    assert _show_speed(replace(speed, base_s=1e-16)).startswith("0 ms for a prompt and 0.2 ms")


def test_objectives_for_tokens_need_a_model() -> None:
    with pytest.raises(SpecError, match="joined requests are not streamed"):
        parse_file("run: x\nservice: {models: m, batch: 8, slo: {ttft: {p95: 1s}}}\n")
    with pytest.raises(SpecError, match="`ttft` is for language models"):
        parse_file("run: x\nservice: {slo: {ttft: {p95: 1s}}}\n")
    with pytest.raises(SpecError, match="800 seconds is no objective") as refused:
        parse_file("run: x\nservice: {models: m, slo: {ttft: {p95: 800}}}\n")
    assert "write 800ms, or 800s if you mean seconds" in str(refused.value)
    (task,) = parse_file("service: {engine: vllm, model: m, slo: {ttft: {p99: 1s}}}\n").tasks
    assert task.service is not None
    assert task.service.slo.ttft == LatencyGoal(share=0.99, limit=timedelta(seconds=1))
