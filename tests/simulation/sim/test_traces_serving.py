"""Serving on spot: the driver's accounts by hand, promises of the policies, and the published
figures.
"""

import json
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.public_data import data

pytest.importorskip("cavvy.capabilities.serving", reason="simulates its rules")

from cavvy.capabilities.serving.autoscaler.placement import (
    PlacementPolicy,
    ReplicaPlacement,
    ServiceTerms,
    ServiceView,
    SpotHedge,
    SteadyPlacement,
)
from cavvy.capabilities.simulation.traces.serving import read_capacity, serve, window

THREE = ServiceTerms(replicas=3, zones=3, cold_start_s=120, tick_s=30)


class Fixed:
    """Wants the same always, and keeps what it was shown."""

    def __init__(self, placement: ReplicaPlacement) -> None:
        self._placement = placement
        self.seen: list[ServiceView] = []

    def place(self, seen: ServiceView) -> ReplicaPlacement:
        self.seen.append(seen)
        return self._placement


def test_replicas_are_ready_after_the_cold_start_and_paid_from_their_launch() -> None:
    served = serve([[9] * 24, [9] * 24, [9] * 24], THREE, Fixed(ReplicaPlacement((1, 1, 1), 0)))
    assert served.cost == pytest.approx(1 / 3)
    assert served.availability == 1.0
    assert served.floor == pytest.approx(1 / 3)


def test_capacity_that_goes_takes_the_youngest_and_is_told() -> None:
    policy = Fixed(ReplicaPlacement((2, 1, 0), 0))
    served = serve([[9] * 10 + [1] * 5 + [9] * 9, [9] * 24, [9] * 24], THREE, policy)
    assert [seen.lost for seen in policy.seen[10:13]] == [(0, 0, 0), (1, 0, 0), (0, 0, 0)]
    assert [seen.failed for seen in policy.seen[10:16]] == [(0, 0, 0), (0, 0, 0), *[(1, 0, 0)] * 4]
    # short from tick 10 until the one launched at tick 15 is ready at 19
    assert served.availability == pytest.approx(1 - 9 / 20)


def test_on_demand_costs_its_ratio() -> None:
    served = serve(
        [[0] * 24] * 3, THREE, Fixed(ReplicaPlacement((0, 0, 0), 3)), on_demand_ratio=4.0
    )
    assert served.cost == pytest.approx(1.0)
    assert served.floor == pytest.approx(1.0)


def test_steady_gives_up_its_spare_when_what_it_has_lasts() -> None:
    placement = ReplicaPlacement((0, 0, 0), 0)
    policy = SteadyPlacement(THREE)
    spares = []
    for tick in range(2880):
        ages = tuple((tick * 30.0,) * count for count in placement.spot)
        placement = policy.place(
            ServiceView(tick * 30.0, ages, (0, 0, 0), (0, 0, 0), sum(map(len, ages)), 0)
        )
        spares.append(sum(placement.spot) - 3)
    assert max(spares[10:100]) >= 1
    assert spares[-1] == 0


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    zones=st.integers(1, 5),
    make=st.sampled_from([SteadyPlacement, SpotHedge]),
)
def test_every_placement_is_sound(
    seed: int, zones: int, make: type[SteadyPlacement] | type[SpotHedge]
) -> None:
    random = Random(seed)
    capacity = [[random.choice((0, 1, 2, 9))] * 40 for _ in range(zones)]
    capacity = [
        [count for _ in range(10) for count in [random.choice((0, 1, 2, 9))] * 40] for _ in capacity
    ]
    service = ServiceTerms(replicas=3, zones=zones, cold_start_s=120, tick_s=30)
    inner = make(service)

    class Checked:
        def place(self, seen: ServiceView) -> ReplicaPlacement:
            placement = inner.place(seen)
            assert len(placement.spot) == zones
            assert all(count >= 0 for count in placement.spot)
            assert 0 <= placement.on_demand <= 3
            assert seen.ready + placement.on_demand >= 3
            return placement

    served = serve(capacity, service, Checked())
    assert served.cost >= served.floor - 1e-9


# SkyServe (EuroSys'25): cost with on-demand = 100, and availability in %, of SpotHedge; then our
# bars
PUBLISHED = {
    "AWS1": ((51, 99.3), (48, 99.3)),
    "AWS2": ((57, 97.6), (52, 97.6)),
    "AWS3": ((46, 99.7), (42, 99.7)),
    "GCP1": ((46, 99.8), (42, 99.8)),
}


def mean(
    name: str, make: type[SteadyPlacement] | type[SpotHedge], windows: int
) -> tuple[float, float]:
    capacity = read_capacity(
        data(f"traces/spothedge/{name}"), tick_s=30.0, unlimited=name == "AWS3"
    )
    random = Random(f"{name}/1")
    costs = availabilities = 0.0
    for _ in range(windows):
        part = window(capacity, random.randrange(capacity.ticks - 2880), 2880)
        service = ServiceTerms(
            replicas=3,
            zones=len(part),
            cold_start_s=120,
            tick_s=30,
            availability=PUBLISHED[name][1][1] / 100,
            regions=capacity.regions,
        )
        policy: PlacementPolicy = make(service)
        served = serve(part, service, policy)
        costs += served.cost
        availabilities += served.availability
    return 100 * costs / windows, 100 * availabilities / windows


@pytest.mark.parametrize("name", PUBLISHED)
def test_spothedge_comes_out_again_and_ours_costs_less(name: str) -> None:
    published, bar = PUBLISHED[name]
    cost, availability = mean(name, SpotHedge, 20)
    assert cost == pytest.approx(published[0], abs=5)
    assert availability == pytest.approx(published[1], abs=1.2)
    ours, kept = mean(name, SteadyPlacement, 20)
    # the bars are for many windows, in docs/measured/policies.md: twenty scatter by about a point
    assert ours < min(cost - 2, bar[0] + 1)
    assert kept > bar[1] - 0.3


def test_a_trace_that_is_short_is_said() -> None:
    capacity = read_capacity(data("traces/spothedge/GCP1"), tick_s=30.0)
    assert capacity.ticks == 770 * 5
    assert json.dumps(capacity.regions)
    with pytest.raises(ValueError, match="ticks"):
        window(capacity, 2000, 2880)
