"""The traffic of a service whose requests come through the gateways of several servers."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cavvy.capabilities.serving.bills import KeyWork, merge_work
from cavvy.capabilities.serving.decide.traffic import (
    GatewayCount,
    GatewayTotals,
    ServiceTraffic,
    add_reports,
)
from cavvy.capabilities.serving.loads import BatchFit, PlaceLoad, PromptSums
from cavvy.capabilities.serving.replicas import RevisionTraffic
from cavvy.domain.service_updates import RevisionSums


def tell(arrivals: int, at_s: float = 1.0, fresh: bool = False, **more: Any) -> GatewayCount:
    traffic = ServiceTraffic(at_s=at_s, arrivals=arrivals, **more)
    return GatewayCount(version=1, traffic=traffic, fresh=fresh)


def add(totals: GatewayTotals, at_s: float = 1.0, **reports: GatewayCount) -> GatewayTotals:
    return add_reports(totals, reports, at_s, whole=True)


def count(totals: GatewayTotals) -> int:
    assert totals.sum is not None
    return totals.sum.arrivals


def test_levels_are_added_and_counters_only_grow() -> None:
    totals = add(
        GatewayTotals(),
        a=tell(10, backlog=1, replicas={"r1": 2}, keys_used={"k": 5.0}, p95_s=0.1),
        b=tell(20, backlog=2, replicas={"r1": 1, "r2": 1}, keys_used={"k": 7.0}, p95_s=0.3),
    )
    found = totals.sum
    assert found is not None
    assert (found.arrivals, found.backlog, found.p95_s) == (30, 3, 0.3)
    assert (found.replicas, found.keys_used) == ({"r1": 3, "r2": 1}, {"k": 7.0})
    totals = add(totals, a=tell(3, at_s=0.5), b=tell(25))  # a's gateway was started again
    assert count(totals) == 38
    totals = add(totals, b=tell(25))  # a's server is gone
    assert count(totals) == 38


def test_of_several_fits_the_slowest_is_used() -> None:
    fast = BatchFit(slope_s=0.1, base_s=1.0, most=8)
    slow = BatchFit(slope_s=0.1, base_s=0.9, most=16)
    totals = add(GatewayTotals(), a=tell(1, batch=fast), b=tell(1, batch=slow), c=tell(1))
    assert totals.sum is not None
    assert totals.sum.batch == slow
    totals = add(GatewayTotals(), a=tell(1))
    assert totals.sum is not None
    assert totals.sum.batch is None


def test_the_work_of_each_gateway_is_kept_apart() -> None:
    """Of two reports with the same epoch, one is older: its server was killed."""
    worked = {"r1": {"key": KeyWork(requests=1, work_us=7)}}
    totals = add(GatewayTotals(), a=tell(1, work={"a1": worked}), b=tell(1, work={"b1": worked}))
    assert totals.sum is not None
    assert totals.sum.work == {"a1": worked, "b1": worked}
    more = {"r1": {"key": KeyWork(requests=3, work_us=9)}, "r2": worked["r1"]}
    for parts in ([{"a1": worked}, {"a1": more}], [{"a1": more}, {"a1": worked}]):
        assert merge_work(parts) == {"a1": more}


def test_a_gateway_that_counted_before_its_server_came_does_not_count_twice() -> None:
    totals = add(GatewayTotals(), a=tell(10))
    assert count(add(totals, a=tell(10), b=tell(7, fresh=True))) == 17
    found = add(totals, a=tell(10), b=tell(1000))
    assert count(found) == 10
    assert count(add(found, a=tell(10), b=tell(1001))) == 11


def test_a_gateway_that_does_not_answer_for_a_while_counts_once() -> None:
    totals = add(GatewayTotals(), a=tell(1000, fresh=True), b=tell(10, fresh=True))
    totals = add(totals, b=tell(10, fresh=True))  # a loaded machine: no answer in time
    totals = add(totals, a=tell(1005, fresh=True), b=tell(10, fresh=True))
    assert count(totals) == 1015


def test_a_gateway_that_began_again_and_counted_as_much_counts_in_full() -> None:
    totals = add(GatewayTotals(), a=tell(3, process="first", fresh=True))
    totals = add(totals, a=tell(5, at_s=2.0, process="second", fresh=True))
    assert count(totals) == 8


def test_a_canary_counts_from_its_own_start_in_each_gateway() -> None:
    def tried(revision: int, requests: int) -> RevisionTraffic:
        sums = RevisionSums(requests=requests)
        return RevisionTraffic(revision=revision, old=sums, new=sums)

    totals = add(GatewayTotals(), a=tell(1, tried=tried(2, 50)), b=tell(1))
    totals = add(totals, a=tell(1, tried=tried(2, 60)), b=tell(1, tried=tried(2, 5)))
    assert totals.sum is not None
    assert totals.sum.tried == tried(2, 65)
    totals = add(totals, a=tell(1, tried=tried(3, 4)), b=tell(1, tried=tried(2, 9)))
    assert totals.sum is not None
    assert totals.sum.tried == tried(3, 4), "the older revision counts no longer"


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9)), max_size=20))
def test_no_arrival_is_lost_or_counted_twice(steps: list[tuple[str, int]]) -> None:
    counted = dict.fromkeys("ab", 0)
    totals = add(GatewayTotals(), **{name: tell(0) for name in counted})
    for name, more in steps:
        counted[name] += more
        totals = add(totals, **{each: tell(number) for each, number in counted.items()})
    assert count(totals) == sum(counted.values())


def test_sizes_of_prompts_latencies_and_answers_of_fallbacks_are_added_up() -> None:
    totals = GatewayTotals()
    for count in (1, 3):
        parts = {
            name: tell(
                count,
                prompts=PromptSums(arrived=10.0 * count),
                backlog_size=5,
                fallbacks={name: count, "both": count},
                latency={7: count, 90: 1},
                shed=count,
            )
            for name in "ab"
        }
        totals = add(totals, **parts)
    found = totals.sum
    assert found is not None
    assert found.prompts.arrived == 60.0
    assert (found.backlog_size, found.shed) == (10, 6)
    assert found.fallbacks == {"a": 3, "b": 3, "both": 6}
    assert found.latency == {7: 6, 90: 2}


def test_requests_that_wait_for_a_place_are_added_up() -> None:
    parts = [
        tell(1, places={"eu": PlaceLoad(waiting=2, asked_at=5.0)}),
        tell(1, places={"eu": PlaceLoad(waiting=3, asked_at=4.0), "": PlaceLoad(waiting=1)}),
    ]
    found = add(GatewayTotals(), a=parts[0], b=parts[1]).sum
    assert found is not None
    assert found.places == {
        "eu": PlaceLoad(waiting=5, asked_at=5.0),
        "": PlaceLoad(waiting=1),
    }
