"""Ways to run a service are compared on the same requests."""

from collections.abc import Sequence

import pytest

pytest.importorskip("cavvy.capabilities.serving", reason="simulates its rules")

from cavvy.capabilities.serving.autoscaler.terms import ScalingTerms
from cavvy.capabilities.simulation.serving.comparison import (
    MONTH_HOURS,
    ComparisonTerms,
    LoadCosts,
    ServingWay,
    WayCost,
    compare_ways,
    find_busy_s,
    find_crossings,
    find_steady,
    scale_load,
)
from cavvy.capabilities.simulation.serving.requests import RequestTrace
from cavvy.capabilities.simulation.serving.service import ReplicaMarket, ServiceSetting

HOUR = 3600.0


def trace(arrivals_s: Sequence[float], service_s: float) -> RequestTrace:
    services = (service_s,) * len(arrivals_s)
    return RequestTrace(name="made-up", arrivals_s=tuple(arrivals_s), services_s=services)


TERMS = ComparisonTerms(
    scaling=ScalingTerms(wait_s=5.0, concurrency=1, cold_start_s=30.0, service_s=10.0, most=8),
    setting=ServiceSetting(
        concurrency=1, cold_start_s=30.0, cold_spread=0.0, slo_wait_s=5.0, on_demand_usd_hr=2.0
    ),
    spot=[ReplicaMarket(name="spot", region="", spot=True, usd_hr=0.5)],
)
# two requests at once every ten minutes for an hour, each of ten seconds
PAIRS = trace([600.0 * step for step in range(7) for _ in range(2)], 10.0)


def test_always_on_has_the_fewest_replicas_that_are_in_time() -> None:
    assert find_steady(PAIRS, TERMS).most == 2, "the second of a pair would wait for ten seconds"
    found = compare_ways(PAIRS, TERMS)
    costs = {each.way: each for each in found.costs}
    assert costs[ServingWay.ALWAYS_ON].usd_month == pytest.approx(2 * 2.0 * MONTH_HOURS)
    to_zero, kept = costs[ServingWay.TO_ZERO], costs[ServingWay.ONE_KEPT]
    assert to_zero.usd_month is not None
    assert kept.usd_month is not None
    assert to_zero.usd_month < 2.0 * MONTH_HOURS <= kept.usd_month
    assert (costs[ServingWay.MANAGED].usd_month, costs[ServingWay.SERVERLESS].usd_month) == (
        None,
        None,
    )
    assert found.per_day == 14


def test_stated_prices_are_used() -> None:
    terms = ComparisonTerms(
        scaling=TERMS.scaling, setting=TERMS.setting, managed_usd_hr=3.0, serverless_usd_hr=6.0
    )
    costs = {each.way: each.usd_month for each in compare_ways(PAIRS, terms).costs}
    assert costs[ServingWay.MANAGED] == pytest.approx(2 * 3.0 * MONTH_HOURS)
    # 140 seconds of work a day
    assert costs[ServingWay.SERVERLESS] == pytest.approx(140 / 3600 * 6.0 * MONTH_HOURS / 24)
    assert costs[ServingWay.SPOT_MIX] is None


def test_replicas_work_as_long_as_they_have_requests() -> None:
    apart = trace([0.0, 100.0], 10.0)
    assert find_busy_s(apart, 8) == 20, "one request keeps a whole replica"
    assert find_busy_s(trace([0.0, 5.0], 10.0), 8) == 15
    assert find_busy_s(trace([0.0, 5.0], 10.0), 1) == 20


def test_a_load_is_scaled() -> None:
    load = trace([float(each) for each in range(1000)], 1.0)
    assert len(scale_load(load, 3.0, 0).arrivals_s) == 3000
    assert 200 < len(scale_load(load, 0.25, 0).arrivals_s) < 300
    more = scale_load(load, 2.5, 0)
    assert list(more.arrivals_s) == sorted(more.arrivals_s)
    assert 0 <= more.arrivals_s[0] <= more.arrivals_s[-1] <= load.length_s


def costs(per_day: float, serverless: float, always: float) -> LoadCosts:
    ways = [
        WayCost(way=ServingWay.SERVERLESS, usd_month=serverless),
        WayCost(way=ServingWay.ALWAYS_ON, usd_month=always),
        WayCost(way=ServingWay.MANAGED, usd_month=None),
    ]
    return LoadCosts(factor=1.0, per_day=per_day, costs=ways)


def test_a_crossing_is_where_the_costs_are_equal() -> None:
    loads = [costs(10_000, 1000.0, 100.0), costs(100, 10.0, 100.0), costs(10, 1.0, 100.0)]
    [found] = find_crossings(loads)
    assert (found.below, found.above) == (ServingWay.SERVERLESS, ServingWay.ALWAYS_ON)
    assert found.per_day == pytest.approx(1000)
    assert find_crossings(loads[1:]) == []
