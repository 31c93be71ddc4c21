"""Chooses the markets in which the replicas of a service run."""

from collections.abc import Sequence

from cavvy.autoscaler.cold_starts import expect_cold_start
from cavvy.autoscaler.observations import MarketObservation, ServiceObservation
from cavvy.autoscaler.state import ScalingState
from cavvy.autoscaler.terms import ScalingTerms
from cavvy.domain.values import replace
from cavvy.planner.spot.serving import (
    NEVER_S,
    ServiceTerms,
    ServiceView,
    SteadyPlacement,
    SteadyRecord,
)

# how long the spot policy assumes that a lost replica is not replaced: after a loss or a refusal,
# nothing is ordered in the same market for this time
_TICK_S = 30.0


def place_replicas(
    wanted: int, terms: ScalingTerms, state: ScalingState, seen: ServiceObservation
) -> tuple[tuple[int, ...], SteadyRecord | None]:
    """Return the number of replicas for each market in `seen`, in the same order as `seen.markets`,
    and the new record of the spot policy.

    The spot policy spreads replicas over the spot markets and adds spares while the risk requires
    them. Replicas for which spot has no capacity run in the cheapest market on demand. Starting
    replicas do not count as ready: on-demand replicas serve until the spot replicas are ready.
    """
    spot = [number for number, market in enumerate(seen.markets) if market.spot]
    demand = [number for number, market in enumerate(seen.markets) if not market.spot]
    placed = [0] * len(seen.markets)
    if not spot:
        _fill(placed, demand, seen.markets, wanted)
        return tuple(placed), state.spot
    policy = _make_policy(wanted, terms, state, seen.markets)
    placement = policy.place(_view(seen))
    for number, count in zip(spot, placement.spot, strict=True):
        placed[number] = count
    if demand:
        cheapest = min(demand, key=lambda number: seen.markets[number].rate)
        placed[cheapest] = placement.on_demand
    return tuple(placed), policy.record


def _make_policy(
    wanted: int,
    terms: ScalingTerms,
    state: ScalingState,
    markets: Sequence[MarketObservation],
) -> SteadyPlacement:
    spot = [market for market in markets if market.spot]
    service = ServiceTerms(
        replicas=wanted,
        zones=len(spot),
        cold_start_s=expect_cold_start(state.cold_starts, markets, terms.cold_start_s),
        tick_s=_TICK_S,
        availability=terms.availability,
        regions=tuple(market.region or market.name for market in spot),
    )
    return SteadyPlacement(service, record=_carry_over(state, spot))


def _carry_over(state: ScalingState, markets: Sequence[MarketObservation]) -> SteadyRecord | None:
    """Return the record of the spot policy, adapted to the current markets: offers may have
    appeared or disappeared since the last decision.
    """
    record, names = state.spot, tuple(market.name for market in markets)
    if record is None or names == state.spot_markets:
        return record
    known = {name: number for number, name in enumerate(state.spot_markets)}

    def pick(values: tuple[float, ...], otherwise: float) -> tuple[float, ...]:
        return tuple(values[known[name]] if name in known else otherwise for name in names)

    return replace(
        record,
        losses=pick(record.losses, 0.0),
        held_hr=pick(record.held_hr, 0.0),
        failed_s=pick(record.failed_s, NEVER_S),
        lost_s=pick(record.lost_s, NEVER_S),
    )


def _view(seen: ServiceObservation) -> ServiceView:
    spot = [market for market in seen.markets if market.spot]
    return ServiceView(
        seen.now_s,
        tuple(market.ready_s + market.starting_s for market in spot),
        tuple(market.lost for market in spot),
        tuple(market.refused for market in spot),
        sum(len(market.ready_s) for market in spot),
        sum(len(market.ready_s) for market in seen.markets if not market.spot),
    )


def _fill(
    placed: list[int], numbers: list[int], markets: tuple[MarketObservation, ...], wanted: int
) -> None:
    """Keep all replicas in their markets, and add or remove replicas by price: new replicas are
    added in the cheapest market, and the most expensive replicas are stopped first.
    """
    order = sorted(numbers, key=lambda number: markets[number].rate)
    left = wanted
    for number in order:
        placed[number] = min(left, markets[number].held)
        left -= placed[number]
    if order:
        placed[order[0]] += left
