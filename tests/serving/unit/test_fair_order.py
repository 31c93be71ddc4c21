"""Waiting requests of several keys start in an order that is fair by tokens."""

from collections import Counter
from random import Random

import pytest

from cavvy.capabilities.serving.gateway.fair_order import FairOrder


class Request:
    def __init__(self, key_id: str, prompt: int = 10, completion: int = 100) -> None:
        self.key_id, self.prompt, self.completion = key_id, prompt, completion


def serve(order: FairOrder[Request], rounds: int, slots: int = 4) -> Counter[str]:
    """Serve waiting requests in some slots, and list the tokens of each key that were served."""
    served: Counter[str] = Counter()
    running: list[tuple[Request, float]] = []
    for _ in range(rounds):
        if len(running) == slots:
            done, counted = running.pop(0)
            order.end(done.key_id, counted, done.prompt, done.completion)
            served[done.key_id] += done.prompt + 2 * done.completion
        request = next(order.list_first())
        order.leave(request)
        running.append((request, order.start(request.key_id, request.prompt)))
    return served


def wait(order: FairOrder[Request], key: str, count: int, **size: int) -> None:
    for _ in range(count):
        order.enter(Request(key, **size))


def test_a_key_with_long_requests_gets_as_many_tokens_as_one_with_short_ones() -> None:
    order = FairOrder[Request]({})
    wait(order, "long", 900, prompt=2000, completion=500)
    wait(order, "short", 900, prompt=100, completion=50)
    served = serve(order, 600)
    assert served["long"] == pytest.approx(served["short"], rel=0.1)


def test_a_key_with_twice_the_weight_gets_twice_the_tokens() -> None:
    order = FairOrder[Request]({"a": 2.0, "b": 1.0})
    for key in "ab":
        wait(order, key, 900)
    served = serve(order, 600)
    assert served["a"] == pytest.approx(2 * served["b"], rel=0.1)


def test_a_key_that_was_served_alone_does_not_starve_when_another_comes() -> None:
    order = FairOrder[Request]({})
    for _ in range(1000):  # without a queue
        order.end("early", order.start("early", 10), 10, 100)
    wait(order, "late", 50)
    wait(order, "early", 50)
    served = serve(order, 44)
    assert served["early"] == pytest.approx(served["late"], rel=0.2)


def test_a_key_does_not_save_up_service() -> None:
    order = FairOrder[Request]({})
    wait(order, "busy", 500)
    serve(order, 300)
    wait(order, "idle", 100)
    served = serve(order, 60)
    assert served["busy"] == pytest.approx(served["idle"], rel=0.2)


def test_within_a_key_requests_start_in_the_order_of_their_arrival() -> None:
    order, random = FairOrder[Request]({}), Random(1)
    waiting = [Request(random.choice("abc")) for _ in range(50)]
    for each in waiting:
        order.enter(each)
    again = Request("a")
    order.enter(again, first=True)
    found = list(order.list_next())
    assert len(found) == 51
    for key in "abc":
        mine = [each for each in found if each.key_id == key]
        assert mine == [again] * (key == "a") + [each for each in waiting if each.key_id == key]
    new = FairOrder[Request]({"a": 1.0})
    new.adopt(order, waiting)
    assert set(new.list_first()) == set(waiting)
    for each in waiting:
        new.leave(each)
        new.leave(each)
    assert not list(new.list_next())


def test_what_counts_from_the_start_is_replaced_at_the_end() -> None:
    order = FairOrder[Request]({})
    for _ in range(3):  # the mean of completions counts from the start
        order.end("a", order.start("a", 10), 10, 100)
    for _ in range(60):
        order.end("b", order.start("b", 10), 10, 5)
    wait(order, "a", 1)
    wait(order, "b", 1)
    assert order.start("a", 10) == 10 + 2 * 100
    assert next(order.list_first()).key_id == "b", "what `a` has begun counts"


def test_a_new_route_keeps_what_keys_were_served() -> None:
    old = FairOrder[Request]({"a": 1.0, "b": 1.0})
    for _ in range(50):
        old.end("a", old.start("a", 10), 10, 100)
    new = FairOrder[Request]({"a": 1.0, "b": 1.0, "c": 1.0})
    new.adopt(old, ())
    wait(new, "c", 30)  # begins where `a` is now, and not before all it was served
    wait(new, "a", 30)
    served = serve(new, 40)
    assert served["c"] == pytest.approx(served["a"], rel=0.2)


def test_a_key_waits_only_for_its_part_of_a_long_line() -> None:
    order = FairOrder[Request]({"heavy": 1.0, "small": 1.0, "double": 2.0})
    assert order.share_ahead("small") == 0
    wait(order, "heavy", 99)
    assert order.share_ahead("heavy") == 1
    assert order.share_ahead("small") == pytest.approx(1 / 99)
    assert order.share_ahead("double") == pytest.approx(0.5 / 99)
    wait(order, "small", 9)
    assert order.share_ahead("small") == pytest.approx((9 + 10) / 108)


def test_a_higher_priority_starts_first_and_its_keys_share_fairly() -> None:
    priorities = {"low": 0, "usual": 1, "first": 2, "second": 2}
    order = FairOrder[Request]({"second": 2.0}, priorities)
    for key in priorities:
        wait(order, key, 60)
    assert [order.share_ahead(key) for key in ("low", "usual")] == [1, 0.75]
    assert order.share_ahead("first") == pytest.approx(120 / 240)
    served = serve(order, 94)
    assert served["second"] == pytest.approx(2 * served["first"], rel=0.15)
    assert set(served) == {"first", "second"}
    assert {each.key_id for each in list(order.list_next())[:26]} <= {"first", "second"}
    assert next(reversed(list(order.list_next()))).key_id == "low"


def test_the_last_request_of_the_lowest_priority_makes_place() -> None:
    order = FairOrder[Request]({}, {"low": 0, "high": 2})
    assert order.find_lower("high") is None
    wait(order, "usual", 2)
    assert order.find_lower("usual") is None
    found = order.find_lower("high")
    assert found is not None
    assert found.key_id == "usual"
    wait(order, "low", 2)
    last = Request("low")
    order.enter(last)
    assert order.find_lower("usual") is last
    assert order.find_lower("low") is None


def test_a_key_of_a_priority_begins_where_its_peers_are() -> None:
    order = FairOrder[Request]({}, {"a": 2, "b": 2, "low": 0})
    wait(order, "low", 5)
    wait(order, "a", 60)
    serve(order, 50)
    wait(order, "b", 30)
    served = serve(order, 14)
    assert served["a"] == pytest.approx(served["b"], rel=0.3)


def test_a_changed_route_does_not_forget_who_was_served() -> None:
    old = FairOrder[Request]({"new": 1.0, "served": 1.0})
    old.end("served", old.start("served", 10), 10, 5000)
    order = FairOrder[Request]({"new": 1.0, "served": 1.0})
    order.adopt(old, [Request(key) for key in ["new"] * 20 + ["served"] * 20])
    assert set(serve(order, 16)) == {"new"}
