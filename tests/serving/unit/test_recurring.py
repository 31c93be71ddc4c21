"""Bursts that come again: they are recorded, expected only if they are regular, and prepared."""

from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cavvy.capabilities.serving.autoscaler.aims import AimCause, find_missed_aim
from cavvy.capabilities.serving.autoscaler.decide import ColdStart, ScalingState, ServedSums, decide
from cavvy.capabilities.serving.autoscaler.recurring import (
    BurstRecord,
    ExpectedBurst,
    SeenBurst,
    expect_rate,
    record_bursts,
)
from cavvy.capabilities.serving.autoscaler.terms import (
    MarketObservation,
    ScaleReason,
    ScalingTerms,
    ServiceObservation,
)
from cavvy.domain.services import TargetKind
from cavvy.domain.values import replace

STEP_S = 5
HOUR_S = 3600
TERMS = ScalingTerms(concurrency=4, cold_start_s=60.0, service_s=8.0)


def follow(
    rate: Callable[[int], float], until_s: int, *, record: BurstRecord | None = None, seed: int = 0
) -> tuple[BurstRecord, list[tuple[int, float]]]:
    """Return the record after requests that arrive at random with this rate, and at each decision
    for which a burst was expected within 82 s, its rate."""
    random, due = Random(seed), []
    record = record or BurstRecord()
    for now_s in range(STEP_S, until_s, STEP_S):
        counts = [
            sum(random.random() < rate(now_s - STEP_S + second) / 8 for _ in range(8))
            for second in range(STEP_S)
        ]
        record = record_bursts(record, counts, float(now_s))
        if expected := expect_rate(record, now_s, 82.0):
            due.append((now_s, expected))
    return record, due


def burst_every(
    period_s: int, length_s: int, height: float, base: float = 1.0
) -> Callable[[int], float]:
    return lambda at: base * (height if at % period_s >= period_s - length_s else 1.0)


@pytest.mark.parametrize(
    ("period_s", "length_s", "height"),
    [(2400, 240, 4.0), (1200, 120, 4.0), (900, 60, 7.0), (3600, 600, 3.0), (5400, 300, 3.0)],
)
def test_bursts_at_equal_distances_are_expected(
    period_s: int, length_s: int, height: float
) -> None:
    record, due = follow(burst_every(period_s, length_s, height), 5 * period_s)
    assert len(record.bursts) == 4
    for each in record.bursts:
        assert each.height / each.base == pytest.approx(height, rel=0.35)
        assert each.at_s % period_s == pytest.approx(period_s - length_s, abs=30)
    assert any(each.period_s == pytest.approx(period_s, rel=0.03) for each in record.expected)
    # prepared from the third burst on, for at most three minutes before each
    for number in (3, 4, 5):
        begins_s = number * period_s - length_s
        assert any(begins_s - 180 < at <= begins_s for at, _ in due)
    early = [at for at, _ in due if (at % period_s) < period_s - length_s - 180]
    assert len(early) * STEP_S <= 0.05 * 5 * period_s


def test_the_next_height_follows_the_base_or_stays() -> None:
    seen = [
        SeenBurst(at_s=1000.0 * n, length_s=60, height=4.0 * n, base=1.0 * n) for n in (1, 2, 3, 4)
    ]
    fixed = [replace(each, height=9.0) for each in seen]
    for bursts, rate in ((seen, 20.0), (fixed, 9.0)):
        record = BurstRecord(
            base=5.0 * 200, base_span_s=200.0, bursts=tuple(bursts), known_s=4900.0
        )
        record = record_bursts(record, [5], 4900.0)
        assert expect_rate(record, 4950.0, 82.0) == pytest.approx(rate, rel=0.02)


@pytest.mark.parametrize("seed", range(3))
def test_bursts_at_random_times_are_not_expected(seed: int) -> None:
    random = Random(seed)
    starts, at = [], 0.0
    while at < 6 * HOUR_S:
        at += random.expovariate(1 / 2400) + 300
        starts.append(at)
    rate = lambda at: 4.0 if any(each <= at < each + 240 for each in starts) else 1.0  # noqa: E731
    _, due = follow(rate, 6 * HOUR_S, seed=seed)
    assert len(due) * STEP_S < 0.05 * 6 * HOUR_S


def test_steady_requests_have_no_bursts() -> None:
    record, due = follow(lambda at: 1.0 + at / 20_000, 6 * HOUR_S)
    assert (record.bursts, due) == ((), [])


def test_hours_without_requests_do_not_end_a_sequence() -> None:
    bursts = burst_every(2400, 240, 4.0)
    record, _ = follow(lambda at: bursts(at) if not 4 <= at // HOUR_S < 10 else 0.0, 12 * HOUR_S)
    assert len(record.quiet) == 1
    assert any(each.period_s == pytest.approx(2400, abs=20) for each in record.expected)


def test_a_burst_at_the_same_time_of_each_day_is_expected_on_the_third_day() -> None:
    def rate(at: int) -> float:
        return 3.0 if at % (24 * HOUR_S) // 300 == 9 * 12 else 0.5

    record = BurstRecord(base=100.0, base_span_s=200.0)
    for hour in range(2 * 24 + 9):
        for minute in range(0, 60, 5):
            at = hour * HOUR_S + minute * 60
            counts = [int(rate(at) * (s + 1)) - int(rate(at) * s) for s in range(300)]
            record = record_bursts(record, counts, float(at + 300))
    assert [each.at_s // HOUR_S for each in record.bursts] == [9, 33]
    (expected,) = record.expected
    assert expected.at_s == pytest.approx(57 * HOUR_S, abs=60)


def test_a_sequence_that_ends_is_expected_no_more() -> None:
    bursts = burst_every(1200, 120, 4.0)
    record, _ = follow(bursts, 6 * HOUR_S)
    assert record.expected
    record, _ = follow(lambda at: 1.0, 8 * HOUR_S, record=replace(record, known_s=1e6))
    assert record.expected == ()


def observe(now_s: float, ready: int, arrived: int = 1) -> ServiceObservation:
    market = MarketObservation(name="a", ready_s=(900.0,) * ready)
    return ServiceObservation(
        now_s=now_s,
        arrivals=(arrived,) * STEP_S,
        started=arrived * STEP_S,
        completed=arrived * STEP_S,
        completed_s=8.0 * arrived * STEP_S,
        in_flight=8 * arrived,
        in_flight_s=32.0 * arrived,
        markets=(market,),
    )


def prepare(kind: TargetKind = TargetKind.QUEUE_WAIT, late: float = 0.0) -> ScalingState:
    """A service with one request a second, which expects four times as many at 1,000 s."""
    expected = ExpectedBurst(at_s=1000.0, spread_s=20.0, period_s=600.0, height=4.0)
    terms, state = (
        replace(TERMS, kind=kind),
        ScalingState(cold_starts={"a": ColdStart(mean_s=60, high_s=70)}),
    )
    for now_s in range(300, 800, STEP_S):
        _, state = decide(terms, state, observe(now_s, 4))
    record = replace(
        state.bursts, expected=(expected,), judged_s=800.0, base=200.0, base_span_s=200.0
    )
    return replace(state, bursts=record, served=ServedSums(started=1000.0, late=late))


@pytest.mark.parametrize("kind", [TargetKind.QUEUE_WAIT, TargetKind.CONCURRENCY, TargetKind.RATE])
def test_replicas_are_ready_when_the_burst_is_due(kind: TargetKind) -> None:
    state, terms, reasons = prepare(kind), replace(TERMS, kind=kind), {}
    for now_s in range(800, 1100, STEP_S):
        decision, state = decide(terms, state, observe(now_s, 4))
        reasons[now_s] = decision.reason, decision.wanted
    # 70 s to start, 10 s before, give or take 20 s
    assert reasons[895][0] is not ScaleReason.EXPECTED
    assert all(reasons[at][0] is ScaleReason.EXPECTED for at in range(905, 1060, STEP_S))
    assert reasons[905][1] >= 2 * reasons[895][1]
    assert reasons[1095][1] == reasons[895][1], "no burst came: the replicas end at once"


def test_a_burst_that_may_be_late_needs_no_replicas() -> None:
    state = replace(prepare(), budget=10_000.0)
    state = replace(state, load=replace(state.load, slow=1e9))  # so many late ones are permitted
    decision, _ = decide(replace(TERMS, most=9), state, observe(950.0, 4))
    assert decision.reason is not ScaleReason.EXPECTED


def test_a_missed_aim_says_why_and_what_it_takes() -> None:
    late = prepare(late=140.0)
    random = [SeenBurst(at_s=each, length_s=60, height=4.0, base=1.0) for each in (100.0, 330.0)]
    start = replace(late, bursts=replace(late.bursts, expected=()))
    irregular = replace(start, bursts=replace(start.bursts, bursts=tuple(random)))
    learnt = replace(late, bursts=replace(late.bursts, bursts=tuple(random)))
    at_most = replace(start, wanted=3)
    for state, terms, cause in (
        (start, TERMS, AimCause.START),
        (irregular, TERMS, AimCause.IRREGULAR),
        (learnt, TERMS, AimCause.LEARNT),
        (at_most, replace(TERMS, most=3), AimCause.MOST),
        (learnt, replace(TERMS, most=8), AimCause.MOST),
    ):
        found = find_missed_aim(terms, state, 800.0)
        assert found is not None
        assert (found.cause, found.aim, found.wait_s) == (cause, 0.95, 10.0)
        assert found.on_time == pytest.approx(0.86)
        assert found.start_s == 60.0
        # 4/s of 8 s with 4 slots each: 8 replicas have no slot free
        assert found.needed > (3 if cause is AimCause.START or state is at_most else 8)
    assert find_missed_aim(TERMS, prepare(late=40.0), 800.0) is None
    assert find_missed_aim(replace(TERMS, kind=TargetKind.RATE), start, 800.0) is None


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 10**9), max_size=30),
    st.lists(st.floats(0, 1e12), max_size=40),
    st.floats(0, 1e13),
)
def test_any_record_is_judged(
    arrivals: Sequence[int], starts: Sequence[float], known_s: float
) -> None:
    bursts = tuple(
        SeenBurst(at_s=each, length_s=1.0, height=2.0, base=0.0) for each in sorted(starts)
    )
    record = BurstRecord(bursts=bursts, known_s=known_s)
    record = record_bursts(record, arrivals, 1e12)
    assert expect_rate(record, 1e12, 60.0) >= 0
