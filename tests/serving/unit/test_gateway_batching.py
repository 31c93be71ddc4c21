"""Which requests form a batch, when it starts, and how bodies are joined and divided."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cavvy.capabilities.serving.gateway.batching import (
    ArrivalGaps,
    BatchPart,
    BatchTimes,
    WaitingRequest,
    average_fits,
    choose_size,
    find_start,
    join_bodies,
    pays_to_wait,
    read_body,
    split_response,
)

SLOPE, BASE = 0.001, 0.02


def learn(slope: float = SLOPE, base: float = BASE, sizes: tuple[int, ...] = (1, 2, 4, 8, 16)):
    times = BatchTimes()
    for size in sizes * 4:
        times.add(size, slope * size + base)
    return times


def requests(*due_at: float) -> list[WaitingRequest]:
    return [WaitingRequest(1, each) for each in due_at]


def test_the_fit_finds_both_parts_of_the_time() -> None:
    dice, times = random.Random(1), BatchTimes()
    for _ in range(300):
        size = dice.randint(1, 16)
        times.add(size, (SLOPE * size + BASE) * dice.uniform(0.9, 1.1))
    assert times.fit() == (pytest.approx(SLOPE, rel=0.2), pytest.approx(BASE, rel=0.1))
    times.add(8, 10.0)
    assert times.expect_s(8) < 0.035, "one slow batch changes little"
    for _ in range(60):
        size = dice.randint(1, 16)
        times.add(size, 3 * (SLOPE * size + BASE))
    assert times.expect_s(8) == pytest.approx(3 * (SLOPE * 8 + BASE), rel=0.25)


@pytest.mark.parametrize("sizes", [(1,), (7,)])
def test_batches_of_one_size_promise_nothing_of_larger_ones(sizes: tuple[int, ...]) -> None:
    times = learn(sizes=sizes)
    slope, base = times.fit()
    assert (slope, base) == (pytest.approx(SLOPE + BASE / sizes[0]), 0.0)
    assert not pays_to_wait(1, 1, 1e-6, times)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(0, 0.2)), min_size=1, max_size=40),
    st.integers(2, 32),
    st.integers(1, 4),
)
def test_no_request_that_can_be_in_time_is_late(
    rows: list[tuple[int, float]], most: int, free: int
) -> None:
    times = learn()
    waiting = [WaitingRequest(*each) for each in rows]
    size = choose_size(waiting, times, most, free, 0.0)
    assert 1 <= size <= len(waiting)
    batch = waiting[:size]
    total = sum(each.instances for each in batch)
    assert size == 1 or total <= most
    if size > 1:
        for each in batch:
            alone_s = max(times.bound_s(1), times.bound_s(each.instances))
            assert alone_s > each.due_at or times.bound_s(total) <= each.due_at


def test_a_request_that_cannot_be_in_time_holds_no_others_back() -> None:
    times = learn()
    late = WaitingRequest(30, times.bound_s(8))
    assert choose_size([late, *requests(9.0, 9.0)], times, 64, 1, 0.0) == 3


def test_batches_of_a_new_replica_grow() -> None:
    assert choose_size(requests(*[9.0] * 40), BatchTimes(), 16, 1, 0.0) == 2
    times = BatchTimes()
    sizes = []
    for _ in range(5):
        sizes.append(choose_size(requests(*[9.0] * 40), times, 16, 1, 0.0))
        times.add(sizes[-1], SLOPE * sizes[-1] + BASE)
    assert sizes == [2, 4, 8, 16, 16]


def test_free_replicas_share_the_waiting_requests() -> None:
    assert choose_size(requests(*[9.0] * 6), learn(), 16, 3, 0.0) == 2


def test_a_request_that_is_late_anyway_has_no_say() -> None:
    waiting = requests(0.001, *[9.0] * 7)
    assert choose_size(waiting, learn(), 16, 1, 0.0) == 8
    waiting = requests(BASE + 4.9 * SLOPE, *[9.0] * 7)
    assert choose_size(waiting, learn(), 16, 1, 0.0) == 4


@given(st.integers(1, 20), st.floats(1e-4, 0.1), st.floats(1e-5, 0.01), st.floats(0, 0.1))
def test_waiting_is_chosen_exactly_if_it_lowers_the_sum_of_latencies(
    count: int, gap_s: float, slope: float, base: float
) -> None:
    times = learn(slope, base)
    slope, base = times.fit()

    def t(n: int) -> float:
        return slope * n + base

    at_once = count * t(count) + t(count) + t(1) - gap_s
    later = (count + 1) * t(count + 1) + count * gap_s
    if abs(at_once - later) > 1e-9:
        assert pays_to_wait(count, 1, gap_s, times) is (later < at_once)


def test_a_batch_waits_only_as_long_as_it_may() -> None:
    gaps, times = ArrivalGaps(0.1), learn()
    for number in range(200):
        gaps.add(1, number * 0.002)
    now = gaps.last_at

    def start(*due_at: float, wait_s: float = 1.0, most: int = 16) -> float:
        return find_start(requests(*due_at), now, gaps, times, most, wait_s, now) - now

    assert start(now + 9) == pytest.approx(0.006), "three gaps"
    assert start(now + 9, wait_s=0.004) == pytest.approx(0.004)
    assert start(now + times.bound_s(2) + 0.003) == pytest.approx(0.003)
    assert start(now + 0.001) == 0
    assert start(*[now + 9] * 2, most=2) == 0, "it is full"
    assert start(*[now + 9] * 9) == 0, "nine would wait for one"
    gaps.add(1, now + 50)
    assert start(now + 59) == 0, "the next request is not expected soon"


def test_work_is_counted_as_in_full_batches() -> None:
    times = learn()
    full_s = SLOPE + BASE / 16
    assert times.count_work_s(2, times.expect_s(2), 16, 9.0) == pytest.approx(2 * full_s)
    assert times.count_work_s(16, times.expect_s(16), 16, 9.0) == pytest.approx(16 * full_s)
    bounded_s = SLOPE + BASE / 4
    assert times.count_work_s(2, 0.022, 16, BASE + 4.5 * SLOPE) == pytest.approx(2 * bounded_s)
    assert BatchTimes().count_work_s(2, 0.5, 16, 9.0) == 0.5


def test_the_models_of_replicas_are_averaged_for_requests() -> None:
    replicas = [learn(), learn(base=3 * BASE), BatchTimes()]  # the last one is new
    fit = average_fits(replicas, 2.0, 16, 9.0)
    assert fit is not None
    assert fit.slope_s == pytest.approx(2 * SLOPE), "a request has two instances"
    assert (fit.base_s, fit.most) == (pytest.approx(2 * BASE), 8.0)
    bounded = average_fits(replicas, 2.0, 16, 2 * BASE + 4.5 * SLOPE)
    assert bounded is not None
    assert bounded.most == 2.0, "four instances end in time"
    assert average_fits([BatchTimes()], 1.0, 16, 9.0) is None


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(st.lists(VALUES, min_size=1, max_size=4), min_size=1, max_size=5), VALUES)
def test_joined_bodies_are_divided_as_they_were(rows: list[list[object]], other: object) -> None:
    bodies = [
        read_body(json.dumps({"instances": each, "other": other}).encode(), "instances")
        for each in rows
    ]
    found = [each for each in bodies if each is not None]
    assert len({each.others for each in found}) == 1
    joined = json.loads(join_bodies(found, "instances"))
    assert joined == {"other": other, "instances": [each for row in rows for each in row]}
    counts = [len(each) for each in rows]
    body = json.dumps({"predictions": joined["instances"], "other": other}).encode()
    parts = split_response(body, "predictions", counts)
    assert parts is not None
    assert [json.loads(each) for each in parts] == [
        {"predictions": each, "other": other} for each in rows
    ]
    parts = split_response(json.dumps(joined["instances"]).encode(), "predictions", counts)
    assert parts is not None
    assert [json.loads(each) for each in parts] == rows


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"[1]", b"{", b'{"instances": []}', b'{"instances": 1}', b'{"other": [1]}'),
        *(b"\xff", b'{"instances": [1], "stream": true}'),
    ],
)
def test_other_bodies_are_not_joined(body: bytes) -> None:
    assert read_body(body, "instances") is None


def test_numbers_keep_their_digits() -> None:
    body = read_body(b'{"instances": [0.10000000000000000555, 1e400]}', "instances")
    assert body is not None
    assert join_bodies([body], "instances") == b'{"instances":[0.10000000000000000555,1e400]}'


@pytest.mark.parametrize(
    "body",
    [b"{}", b'{"predictions": [1]}', b'{"predictions": {"a": 1}}', b"[1,2,3]", b"no", b"\xff"],
)
def test_other_responses_are_not_divided(body: bytes) -> None:
    assert split_response(body, "predictions", [1, 1]) is None


def test_a_slow_body_does_not_make_gaps_negative() -> None:
    gaps = ArrivalGaps(0.1)
    for now in (100.0, 100.01, 40.0, 100.02):  # the third one arrived first, with a slow body
        gaps.add(1, now)
    assert 0 <= gaps.mean_s <= 0.1
    assert gaps.last_at == 100.02


def test_the_ids_of_a_large_batch_fit_into_a_field() -> None:
    body = read_body(b'{"instances": [1]}', "instances")
    assert body is not None
    heads = [b"POST /p HTTP/1.1\r\nX-Request-Id: %032d\r\n\r\n" % n for n in range(256)]
    first, *others = (BatchPart(body, head) for head in heads)
    head, _, joined = first.write(others, "instances").partition(b"\r\n\r\n")
    assert len(json.loads(joined)["instances"]) == 256
    assert max(len(line) for line in head.split(b"\r\n")) < 8190
    ids = head.partition(b"Cavvy-Batch-Requests: ")[2].partition(b"\r\n")[0].split(b",")
    assert len(ids) > 100
    assert {len(each) for each in ids} == {32}, "an ID was cut"
