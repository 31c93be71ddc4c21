"""The offline optimum against an exhaustive search over every second tick, and against schedules
made by hand.
"""

from functools import cache
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulation.spot_worlds import HOUR, market, random_world, terms, world

from cavvy.capabilities.simulation.traces.optimum import find_optimum
from cavvy.capabilities.simulation.traces.readers import TraceWorld
from cavvy.planner.spot.view import NOWHERE, JobTerms


def search(made: TraceWorld, job: JobTerms, tick_s: float) -> float:
    """Every schedule on a grid of ticks: what runs, how long it still loads, what is done."""
    ticks, work, load = (
        round(length / tick_s) for length in (job.deadline_s, job.work_s, job.overhead_s)
    )
    hour = tick_s / 3600

    @cache
    def cost(
        tick: int, left: int, running: tuple[int, bool] | None, home: int, loading: int
    ) -> float:
        if left == 0:
            return 0.0
        if left > ticks - tick:
            return inf
        quotes = made.quotes[made.at(tick * tick_s)]
        best = cost(tick + 1, left, None, home, 0)
        for index, quote in enumerate(quotes):
            for spot in (False, True):
                if spot and not quote.up:
                    continue
                same = running == (index, spot)
                still = loading if same else load
                rate = quote.usd_hr if spot else job.markets[index].on_demand_usd_hr
                paid = rate * hour + (0.0 if same else job.move(home, index))
                done = 0 if still > 0 else 1
                best = min(
                    best,
                    paid + cost(tick + 1, left - done, (index, spot), index, max(0, still - 1)),
                )
        return best

    return cost(0, work, None, NOWHERE, 0)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    markets=st.integers(1, 2),
    work=st.integers(1, 8),
    slack=st.integers(0, 12),
    overhead=st.integers(0, 3),
)
def test_it_is_what_an_exhaustive_search_finds(
    seed: int, markets: int, work: int, slack: int, overhead: int
) -> None:
    made = random_world(seed, markets, ticks=30, gap_s=HOUR)
    job = terms(made, work, work + overhead + slack, overhead)
    assert find_optimum(made, 0.0, job) == pytest.approx(search(made, job, HOUR))


def test_short_stays_of_spot_are_passed_over() -> None:
    made = world(market("#.#.#.#.#.########" + "." * 10))
    assert find_optimum(made, 0.0, terms(made, 6, 18, 1.0)) == pytest.approx(0.3 * 7)


def test_what_does_not_fit_is_said() -> None:
    made = world(market("#" * 10))
    with pytest.raises(ValueError, match="do not fit"):
        find_optimum(made, 0.0, terms(made, 6, 6.5, 1.0))
