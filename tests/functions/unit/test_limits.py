"""Limits of calls by a key, priorities, and turns between callers, without a server."""

import heapq
import json
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import count
from pathlib import PurePosixPath
from random import Random
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cavvy
from cavvy.capabilities.functions.limits import (
    MOST_LIMITS,
    CallLimit,
    find_key,
    make_keys,
    read_limits,
    write_key,
)
from cavvy.capabilities.functions.on_node import waiting, windows
from cavvy.capabilities.functions.on_node.waiting import Limit, LimitSlot, WaitingCalls
from cavvy.capabilities.functions.on_node.windows import StoredWindows
from cavvy.sdk.errors import CavvyError, InvalidArgument


class Clock:
    """The time, and what was asked to happen at times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        fake = SimpleNamespace(monotonic=lambda: self.now, time=lambda: 1.7e9 + self.now)
        for each in (waiting, windows):
            monkeypatch.setattr(each, "time", fake)

    def call_at(self, at: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (at, next(self._numbers), call))

    def go(self, seconds: float) -> None:
        until = self.now + seconds
        while self._timers and self._timers[0][0] <= until:
            self.now, _, call = heapq.heappop(self._timers)
            call()
        self.now = until


class Call:
    """A call as the broker has it."""

    def __init__(self, function: "Queue", turn: str, rank: int, slots: list[LimitSlot]) -> None:
        self.function, self.turn, self.rank, self.slots = function, turn, rank, slots
        self.turns, self.over = None, False
        for each in slots:
            each.users += 1


class Queue:
    """A function with waiting calls."""

    def __init__(self, clock: Clock) -> None:
        self.told: list[str] = []
        self.waiting = WaitingCalls(
            clock.call_at, lambda call, slot: self.told.append(slot.limit.say(slot.key))
        )

    def add(self, call: Call) -> None:
        self.waiting.add(call)

    def call(self, turn: str = "", rank: int = 0, *slots: LimitSlot | None) -> Call:
        made = Call(self, turn, rank, [each for each in slots if each is not None])
        self.waiting.add(made)
        return made

    def end(self, call: Call) -> None:
        call.over = True
        self.waiting.stop(call)
        self.waiting.leave(call)

    def take_all(self) -> list[Call]:
        found = []
        while (call := self.waiting.take()) is not None:
            found.append(call)
        return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def queue(clock: Clock) -> Queue:
    return Queue(clock)


def make_limit(count: int, per_s: float | None = None, key: str = "tenant") -> Limit:
    return Limit({"id": "f/0", "count": count, "per_s": per_s, "key": key})


def test_a_long_map_lets_other_calls_pass(queue: Queue) -> None:
    long = [queue.call("map 1") for _ in range(500)]
    single, urgent = queue.call("2"), queue.call("map 1", 5)
    assert queue.take_all() == [urgent, long[0], single, *long[1:]]


def test_no_more_calls_of_a_key_run_than_the_limit_says(queue: Queue) -> None:
    limit = make_limit(2)
    first = [queue.call("1", 0, limit.find("a")) for _ in range(4)]
    other = queue.call("1", 0, limit.find("b"))
    assert queue.waiting.count == 3  # processes are started for what can run
    assert queue.take_all() == [*first[:2], other]
    assert queue.told == ["the limit of 2 calls at a time with tenant a"] * 2
    queue.end(first[1])
    assert queue.take_all() == [first[2]]
    first[3].over = True
    queue.waiting.leave(first[3])  # it is cancelled while it waits
    for each in (first[0], first[2], other):
        queue.end(each)
    assert not queue.take_all()
    assert not limit.slots  # nothing is kept of keys that nobody uses


def test_no_more_calls_start_in_a_window_than_the_limit_says(queue: Queue, clock: Clock) -> None:
    limit = make_limit(3, per_s=60)
    starts: list[float] = []
    for _ in range(10):
        queue.call("1", 0, limit.find("a"))
    for _ in range(400):
        for call in queue.take_all():
            starts.append(clock.now)
            queue.end(call)
        clock.go(0.7)
    assert len(starts) == 10
    for at in starts:
        assert sum(at <= each < at + 60 for each in starts) <= 3
    assert starts[-1] - starts[0] < 3 * 62  # and not many fewer


def test_a_more_urgent_call_of_a_key_is_next(queue: Queue) -> None:
    limit = make_limit(1)
    first, second = queue.call("1", 0, limit.find("a")), queue.call("1", 0, limit.find("a"))
    urgent = queue.call("1", 9, limit.find("a"))
    assert queue.take_all() == [urgent]
    queue.end(urgent)
    assert queue.take_all() == [first]
    queue.end(first)
    assert queue.take_all() == [second]


def test_functions_share_a_limit_with_a_name(clock: Clock) -> None:
    one, two = Queue(clock), Queue(clock)
    limit = make_limit(1, key="")
    first, second = one.call("1", 0, limit.find("")), two.call("1", 0, limit.find(""))
    assert one.take_all() == [first]
    assert two.take_all() == []
    assert one.waiting.take_all() == []  # those of the other function stay
    one.end(first)
    assert two.take_all() == [second]


def test_a_new_deploy_changes_the_limit_of_calls_that_run(queue: Queue) -> None:
    limit = make_limit(1)
    running, *others = [queue.call("1", 0, limit.find("a")) for _ in range(4)]
    assert queue.take_all() == [running]
    limit.describe({"id": "f/0", "count": 3, "per_s": None, "key": "tenant"})
    for call in queue.waiting.take_all():
        queue.add(call)
    assert queue.take_all() == others[:2]
    limit.describe({"id": "f/0", "count": 1, "per_s": None, "key": "tenant"})
    queue.end(running)
    assert queue.take_all() == []
    for each in others[:2]:
        queue.end(each)
    assert queue.take_all() == others[2:]


def test_too_many_keys_are_refused(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MOST_KEYS", 3)
    limit = make_limit(1)
    for each in "abc":
        queue.call("1", 0, limit.find(each))
    assert limit.find("d") is None
    assert limit.find("a") is not None


def test_keys_whose_window_is_over_make_room_for_others(
    queue: Queue, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "MOST_KEYS", 1)
    limit = make_limit(1, per_s=20)
    call = queue.call("1", 0, limit.find("a"))
    assert queue.take_all() == [call]
    queue.end(call)
    assert limit.find("b") is None
    clock.go(20)
    assert limit.find("b") is not None


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.integers(0, 9)), max_size=14),
    st.integers(0, 1 << 30),
)
@settings(deadline=None, max_examples=60)
def test_every_call_runs_once_and_none_over_its_limits(
    asked: list[tuple[str, int, int]], seed: int
) -> None:
    chance = Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(patch)
        queue = Queue(clock)
        by_key, together = make_limit(1), make_limit(2, key="")
        often = make_limit(2, per_s=10)
        running: list[tuple[str, Call]] = []
        starts: dict[str, list[float]] = defaultdict(list)
        done: Counter[Call] = Counter()
        calls: list[tuple[str, Call]] = []
        for key, rank, pause in asked:
            slots = (by_key.find(key), together.find(""), often.find(key))
            calls.append((key, queue.call(key, rank, *slots)))
            clock.go(pause / 10)
        cancelled = [call for _, call in calls if chance.random() < 0.1]
        for call in cancelled:
            call.over = True
            queue.waiting.leave(call)
        names = {call: key for key, call in calls}
        for _ in range(20 * len(calls)):
            for call in queue.take_all():
                running.append((names[call], call))
                starts[names[call]].append(clock.now)
            assert len(running) <= 2
            assert len({key for key, _ in running}) == len(running)
            if running:
                _, call = running.pop(chance.randrange(len(running)))
                done[call] += 1
                queue.end(call)
            clock.go(0.5)
        assert set(done) == {call for _, call in calls if call not in cancelled}
        assert set(done.values()) <= {1}
        for times in starts.values():
            assert all(sum(at <= each < at + 10 for each in times) <= 2 for at in times)


def test_keys_of_calls() -> None:
    def send(tenant: str, order: dict[str, Any], *, region: str = "eu", **more: int) -> None: ...

    limits = [
        CallLimit(1),
        CallLimit(1, key="tenant"),
        CallLimit(1, key=["order.customer.id", "region"]),
        CallLimit(1, key=lambda tenant, order, **_: tenant[0]),
        CallLimit(1, key="order.missing.0"),
    ]
    order = {"customer": {"id": 7}}
    by_place = make_keys("send", send, limits, ("acme", order), {}, bound=False)
    assert by_place == ["", "acme", '[7, "eu"]', "a", "null"]
    named = {"order": order, "tenant": "acme", "region": "eu"}
    assert make_keys("send", send, limits, (), named, bound=False) == by_place
    assert find_key("send", ["order.customer.id", "region"], named) == '[7, "eu"]'
    assert find_key("send", ["order.1"], {"order": ["a"]}) == "null"
    with pytest.raises(TypeError, match="send: missing a required argument"):
        make_keys("send", send, limits, (), {}, bound=False)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a", "a"),
        (5, "5"),
        (None, "null"),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (PurePosixPath("/a"), "/a"),
        ("\ud800", "?"),
        ("\0\n", "\0\n"),
    ],
)
def test_keys_as_text(value: object, text: str) -> None:
    assert write_key("f", value) == text


def test_equal_values_are_the_same_key() -> None:
    assert write_key("f", {"b": 1, "a": 2}) == write_key("f", {"a": 2, "b": 1})


def test_hostile_keys() -> None:
    assert write_key("f", "x" * 200) == "x" * 200
    long = write_key("f", "x" * 1_000_000)
    assert len(long) < 256
    assert long != write_key("f", "x" * 1_000_001)
    nested: list[Any] = []
    nested.append(nested)
    for value in (object(), nested):
        with pytest.raises(InvalidArgument, match="no key of a limit"):
            write_key("f", value)


def test_the_largest_limits() -> None:
    assert (
        read_limits("f", [CallLimit(1, per="31d")] * MOST_LIMITS)
        == (CallLimit(1, per="31d"),) * MOST_LIMITS
    )
    with pytest.raises(InvalidArgument, match="at most 8 limits"):
        read_limits("f", [1] * (MOST_LIMITS + 1))


@pytest.mark.parametrize(
    "keys",
    [
        {"count": 0},
        {"count": True},
        {"count": 1.5},
        {"count": 1, "per": "soon"},
        {"count": 1, "per": 0},
        {"count": 1, "per": "400d"},
        {"count": 1, "key": "a b"},
        {"count": 1, "key": ["a", 1]},
        {"count": 1, "name": "a/b"},
    ],
)
def test_wrong_limits_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        CallLimit(**keys)


def test_a_limit_of_a_parameter_that_is_missing() -> None:
    app = cavvy.App("limited")
    with pytest.raises(InvalidArgument, match="'tenant' of a limit is none of its parameters"):

        @app.function(limit=cavvy.Limit(1, key="tenant"))
        def f(user: str) -> None: ...

    with pytest.raises(InvalidArgument, match="limit="):
        app.function(limit="many")(lambda: None)
    with pytest.raises(InvalidArgument, match="priority=1000"):
        app.function(priority=1000)(lambda: None)


class Values:
    """A dict of the server, which may be unreachable."""

    def __init__(self) -> None:
        self.stored: dict[str, Any] = {}
        self.fails = False

    def update(self, entries: dict[str, Any]) -> None:
        if self.fails:
            raise CavvyError("the server is full")
        self.stored |= json.loads(json.dumps(entries))

    def items(self) -> Any:
        return self.stored.items()


async def test_the_next_broker_counts_what_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    queue, limit, values = Queue(clock), make_limit(3, per_s=3600), Values()
    first = StoredWindows({limit.id: limit}, values)
    for key in "aab":
        queue.call("1", 0, limit.find(key))
    queue.take_all()
    values.fails = True
    await first.store()
    assert values.stored == {}
    values.fails = False
    await first.close()
    values.stored["f/0/1"] = {"c": [["x"]]}  # others may write into the dict, too
    values.stored["f/0/2"] = {"d": [[1e308, 1e308, 3]]}
    values.stored["f/0/3"] = "anything"
    values.stored["f/0/4"] = {"e": [[1.0, 1.0, 3]]}  # long ago
    values.stored["g/0/3"] = {"a": [[1.0, 1.0, 3]]}

    after = make_limit(2, per_s=3600)  # the new code has a smaller one
    next_queue = Queue(clock)
    assert await StoredWindows({after.id: after}, values).load() == ""
    clock.go(10)
    assert {key: slot.count_room(clock.now) for key, slot in after.slots.items()} == {
        "a": 0,
        "b": 1,
        "d": -1,
    }
    next_queue.call("1", 0, after.find("a"))
    assert next_queue.take_all() == []
    clock.go(3600)
    assert after.slots["d"].count_room(clock.now) == 2, "no start counts for longer than the window"


@pytest.mark.parametrize(("per_s", "stored"), [(9.9, False), (10.0, True)])
def test_only_long_windows_are_stored(
    per_s: float, stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAVVY_NOTICE", "/nowhere")
    limit = make_limit(1, per_s=per_s)
    assert (StoredWindows.open("app", {limit.id: limit}) is not None) == stored
