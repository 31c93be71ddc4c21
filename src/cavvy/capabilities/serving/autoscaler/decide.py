"""The autoscaler's rule.

    N       = the replicas that the load needs (`load.py`), if the share `late` of requests may
              wait longer than the service permits:
    late    = (1 - on_time) * exp(thrift * budget / allowed)
    budget  = the allowed late requests minus the actual ones, at most `allowed` and at
              least -debt * allowed, where allowed = (1 - on_time) * rate * budget_s

    backlog = the work of waiting requests + rate * D * S - the work that the replicas do within D,
    in seconds of a slot. D is the time until a replica that is requested now is ready. A ready
    replica does `concurrency` seconds of work per second; a starting replica does so once its own
    cold start has ended. If backlog / (concurrency * N) exceeds the service's maximum wait, N is at
    least rate * S / concurrency + backlog / (concurrency * drain), where drain = drain_s *
    exp(budget / allowed). These replicas never have more slots than there are requests until D.

S and the work of waiting requests follow from the sizes of prompts: the time of service is fitted
to the sizes of the last hour's requests, and added up over the requests that arrive and wait.

If the service has objectives for the tokens of a language model, N is at least the number that
meets them (`objectives.py`).

A service with a request that runs or waits needs at least one replica.

A few more replicas, at most a fifth, start only if N has asked for more for `rise_s`, unless there
is a burst or a backlog, or requests run longer than others did: the estimate varies, and a replica
that starts in vain is billed.

Starting replicas count as ready replicas, so that no replica is requested twice. Replicas end only
after N was lower than the number of replicas for several minutes in a row; `count_agreeing` returns
the number of minutes. Replicas that were requested for a backlog end when the backlog has been
processed. After `idle_s` without a request, `least` replicas remain.

Chooses the markets in which the replicas of a service run.

The state of the autoscaler for a service between two decisions.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, exp
from statistics import fmean

from cavvy.capabilities.serving.autoscaler.load import (
    LoadRecord,
    ServiceLoad,
    add_to_hour,
    count_agreeing,
    count_replicas,
    estimate_load,
    record_load,
)
from cavvy.capabilities.serving.autoscaler.objectives import GoalEstimate, estimate_goals
from cavvy.capabilities.serving.autoscaler.placement import (
    NEVER_S,
    ServiceTerms,
    ServiceView,
    SteadyPlacement,
    SteadyRecord,
)
from cavvy.capabilities.serving.autoscaler.recurring import BurstRecord, expect_rate, record_bursts
from cavvy.capabilities.serving.autoscaler.terms import (
    MarketObservation,
    ScaleReason,
    ScalingDecision,
    ScalingTerms,
    ServiceObservation,
)
from cavvy.capabilities.serving.loads import TokenTimes
from cavvy.domain.services import TargetKind
from cavvy.domain.values import Struct, field, replace


class ColdStart(Struct, frozen=True, kw_only=True):
    """The mean and the 90th percentile of the last cold starts of a market."""

    mean_s: float
    high_s: float


class ServedSums(Struct, frozen=True, kw_only=True):
    """Over about the last hour: the requests that replicas started, and those that waited too long
    before."""

    started: float = 0.0
    late: float = 0.0


_MINUTE_S = 60.0
_ENOUGH = 2.0  # with so many times the late requests of a burst permitted, it is not prepared
_READY_BEFORE_S = 10.0  # replicas for an expected burst should be ready so long before it
_BY_LOAD = (TargetKind.QUEUE_WAIT, TargetKind.CONCURRENCY, TargetKind.RATE)
_FEW = 0.2  # of the replicas: so many more may wait for `rise_s`
_MEASURED_REQUESTS = 100  # from so many on, the measured time of service is used

# how long the spot policy assumes that a lost replica is not replaced: after a loss or a refusal,
# nothing is ordered in the same market for this time
_TICK_S = 30.0


class ScalingState(Struct, frozen=True, kw_only=True):
    """The autoscaler's record of one service. A program that stores the record can restart without
    losing the service's state.

    `began_s` is the time of the first decision, and `wanted` is the result of the last decision.
    `budget` is the number of requests that may still be late; it is negative if too many requests
    were late. `needs` contains a pair for each recorded minute, oldest first: the minute, and the
    number of replicas that were needed at the end of the minute. If the target is not a wait, the
    number is the highest in the minute. `idle_since_s` is the time when the service last became
    idle, or None if it is not idle. `cold_starts` are stored by market.
    `spot` is the record of the spot policy, for the markets `spot_markets`. `tokens` are sums over
    about the last hour's answers of a language model, and `goals` is what they say about the
    service's objectives. `higher_since_s` is the time since which the load needs a few more
    replicas than are wanted, or None. `bursts` are the service's bursts and those that are
    expected, and `served` says how many requests were late in about the last hour.
    """

    began_s: float | None = None
    wanted: int | None = None
    load: LoadRecord = LoadRecord()
    budget: float = 0.0
    needs: tuple[tuple[int, int], ...] = ()
    idle_since_s: float | None = None
    cold_starts: dict[str, ColdStart] = field(default_factory=dict)
    spot: SteadyRecord | None = None
    spot_markets: tuple[str, ...] = ()
    tokens: TokenTimes = TokenTimes()
    goals: GoalEstimate | None = None
    higher_since_s: float | None = None
    bursts: BurstRecord = BurstRecord()
    served: ServedSums = ServedSums()


def decide(
    terms: ScalingTerms, state: ScalingState, seen: ServiceObservation
) -> tuple[ScalingDecision, ScalingState]:
    """Return the wanted replicas in each market, and the state for the next decision."""
    terms = _learn(terms, state)
    state = _record(terms, state, seen)
    load = estimate_load(state.load, seen, terms)
    surplus = state.budget / _allow(terms, state)
    late = min(terms.weights.most_late, (1 - terms.on_time) * exp(terms.weights.thrift * surplus))
    need = max(count_replicas(load, seen, terms, late), min(1, seen.present))
    goals = estimate_goals(state.tokens, load, terms, late / (1 - terms.on_time))
    wished = 0 if goals is None else goals.needed
    agreeing = count_agreeing(load, terms)
    state = replace(state, goals=goals)
    state = replace(state, needs=_record_need(terms, state, seen, max(need, wished), agreeing))
    before = seen.held if state.wanted is None else state.wanted
    since_s = None
    if wished <= before and _may_pass(terms, load, before, need):
        since_s = seen.now_s if state.higher_since_s is None else state.higher_since_s
    state = replace(state, higher_since_s=since_s)
    wanted, reason = _agree(terms, state, seen, load, max(need, wished), surplus, agreeing)
    if wanted == wished > need and (reason is ScaleReason.LOAD or wanted > before):
        reason = ScaleReason.OBJECTIVE
    if (expected := _count_expected(terms, state, seen, load, late)) > wanted:
        wanted, reason = expected, ScaleReason.EXPECTED
    wanted, reason = _bound(terms, wanted, reason)
    placement, spot = place_replicas(wanted, terms, state, seen)
    decision = ScalingDecision(wanted=wanted, reason=reason, placement=placement)
    names = tuple(market.name for market in seen.markets if market.spot)
    return decision, replace(state, wanted=wanted, spot=spot, spot_markets=names)


def _learn(terms: ScalingTerms, state: ScalingState) -> ScalingTerms:
    """Return the terms with the measured service time, if enough requests were measured. The
    assumed service time of one second is too long for services whose requests take milliseconds.
    """
    if state.load.completed < _MEASURED_REQUESTS:
        return terms
    return replace(terms, service_s=state.load.service_s)


def _record(terms: ScalingTerms, state: ScalingState, seen: ServiceObservation) -> ScalingState:
    """Return the state, extended by the observations since the last decision."""
    load = record_load(state.load, seen, terms)
    cold_starts = dict(state.cold_starts)
    for market in seen.markets:
        measured = record_cold_starts(cold_starts.get(market.name), market.cold_starts_s)
        if measured is not None:
            cold_starts[market.name] = measured
    busy = any(seen.arrivals) or seen.backlog or seen.in_flight
    idle_since_s = seen.now_s if state.idle_since_s is None else state.idle_since_s
    state = replace(
        state,
        began_s=seen.now_s if state.began_s is None else state.began_s,
        load=load,
        served=add_to_hour(
            state.served,
            ServedSums(started=seen.started, late=seen.late),
            len(seen.arrivals),
        ),
        bursts=record_bursts(state.bursts, seen.arrivals, seen.now_s),
        tokens=add_to_hour(state.tokens, seen.tokens, len(seen.arrivals)),
        cold_starts=cold_starts,
        idle_since_s=None if busy else idle_since_s,
    )
    allowed = _allow(terms, state)
    started, late = float(seen.started), float(seen.late)
    if terms.has_objectives:
        started, late = seen.tokens.answers, seen.tokens.late
    budget = state.budget + (1 - terms.on_time) * started - late
    return replace(state, budget=min(allowed, max(-terms.weights.debt * allowed, budget)))


def _allow(terms: ScalingTerms, state: ScalingState) -> float:
    """Return the number of late requests that are allowed in `budget_s`."""
    return max(1.0, (1 - terms.on_time) * state.load.rate * terms.weights.budget_s)


def _record_need(
    terms: ScalingTerms, state: ScalingState, seen: ServiceObservation, need: int, agreeing: int
) -> tuple[tuple[int, int], ...]:
    minute = int(seen.now_s // _MINUTE_S)
    needs = dict(state.needs)
    # The formula for waits follows averages and already has a margin. Other needs change at once.
    if terms.kind is not TargetKind.QUEUE_WAIT:
        need = max(need, needs.get(minute, 0))
    needs[minute] = need
    return tuple(each for each in needs.items() if each[0] > minute - agreeing)


def _may_pass(terms: ScalingTerms, load: ServiceLoad, before: int, need: int) -> bool:
    """Return whether the need for more replicas may be a variation of the estimate: they are few,
    and neither a burst nor requests that already run longer than others ask for them.
    """
    if terms.kind is not TargetKind.QUEUE_WAIT or load.burst or load.completed_s is not None:
        return False
    return before < need <= before + _FEW * before


def _agree(
    terms: ScalingTerms,
    state: ScalingState,
    seen: ServiceObservation,
    load: ServiceLoad,
    need: int,
    surplus: float,
    agreeing: int,
) -> tuple[int, ScaleReason]:
    """Return the wanted number of replicas before the service's limits are applied."""
    if state.idle_since_s is not None and seen.now_s - state.idle_since_s >= terms.idle_s:
        return 0, ScaleReason.IDLE
    # Replicas that the spot policy added as spares are not part of what the load needs.
    before = seen.held if state.wanted is None else state.wanted
    drained = _count_for_backlog(terms, state, seen, load, max(need, before), surplus)
    if drained > max(need, before):
        return drained, ScaleReason.BACKLOG
    since_s = state.higher_since_s
    if since_s is not None and seen.now_s - since_s < terms.weights.rise_s:
        return before, ScaleReason.LOAD
    if need >= before:
        return need, ScaleReason.BURST if load.burst else ScaleReason.LOAD
    young = seen.now_s - (state.began_s or 0.0) < agreeing * _MINUTE_S
    highest = max(max(need for _, need in state.needs), drained, 1)
    if young or highest >= before:
        return before, ScaleReason.HELD
    return highest, ScaleReason.LOAD if highest == need else ScaleReason.HELD


def _count_expected(
    terms: ScalingTerms,
    state: ScalingState,
    seen: ServiceObservation,
    load: ServiceLoad,
    late: float,
) -> int:
    """Return the number of replicas for a burst that is expected while a replica would start, or 0
    if there is none, or if enough requests are on time without these replicas.
    """
    if terms.kind not in _BY_LOAD:
        return 0
    known = [
        _estimate(state.cold_starts, each, seen.markets, terms.cold_start_s).high_s
        for each in seen.markets
    ]
    ahead_s = max(known, default=terms.cold_start_s) + _READY_BEFORE_S
    rate = expect_rate(state.bursts, seen.now_s, ahead_s)
    if rate <= load.rate or state.budget > _ENOUGH * (rate - load.rate) * ahead_s:
        return 0
    return count_replicas(replace(load, rate=rate, burst=False, latest=0.0), seen, terms, late)


def _count_for_backlog(
    terms: ScalingTerms,
    state: ScalingState,
    seen: ServiceObservation,
    load: ServiceLoad,
    replicas: int,
    surplus: float,
) -> int:
    """Return the number of replicas that process the backlog in time, or 0 if `replicas` replicas
    answer every request in time.
    """
    if not seen.backlog:
        return 0
    service_s, slots = load.service_s, terms.concurrency
    known, assumed_s = state.cold_starts, terms.cold_start_s
    ahead_s = expect_cold_start(known, seen.markets, assumed_s)
    starts_s = list_starts(known, seen.markets, assumed_s)
    served_s = seen.ready * ahead_s + sum(max(0.0, ahead_s - start_s) for start_s in starts_s)
    backlog_s = load.backlog_s + state.load.rate * ahead_s * service_s - served_s * slots
    if backlog_s <= terms.wait_s * slots * max(1, replicas):
        # Replicas that drain a backlog are kept until the backlog alone would make no request late.
        waits_s = load.backlog_s / (slots * max(1, seen.ready))
        return replicas if waits_s > terms.wait_s / 2 else 0
    drain_s = terms.drain_s * exp(surplus)
    drained = ceil(load.erlangs / slots + backlog_s / (slots * drain_s))
    # More replicas than requests would be of no use.
    return min(drained, ceil((seen.present + state.load.rate * ahead_s) / slots))


def _bound(terms: ScalingTerms, wanted: int, reason: ScaleReason) -> tuple[int, ScaleReason]:
    if wanted > terms.most:
        return terms.most, ScaleReason.MOST
    if wanted < terms.least:
        return terms.least, ScaleReason.LEAST
    return wanted, reason


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


# the weight of the newest measurement, and the step by which the high quantile follows it
_NEWEST = 0.2
_QUANTILE, _STEP = 0.9, 0.1


def record_cold_starts(before: ColdStart | None, measured_s: tuple[float, ...]) -> ColdStart | None:
    """Return the record `before`, updated with new measurements. The mean is weighted
    exponentially. The quantile increases in large steps and decreases in small steps.
    """
    for each_s in measured_s:
        if before is None:
            before = ColdStart(mean_s=each_s, high_s=each_s)
            continue
        step_s = _STEP * before.mean_s
        above = each_s > before.high_s
        before = ColdStart(
            mean_s=before.mean_s + _NEWEST * (each_s - before.mean_s),
            high_s=before.high_s + step_s * (_QUANTILE if above else _QUANTILE - 1),
        )
    return before


def expect_cold_start(
    measured: Mapping[str, ColdStart], markets: Sequence[MarketObservation], assumed_s: float
) -> float:
    """Return the expected time in seconds until a replica that is ordered now is ready. The result
    is the mean over all markets, because the spot policy chooses the market of a replica by its
    losses and refusals, and not by its speed.
    """
    if not markets:
        return assumed_s
    return fmean(_estimate(measured, each, markets, assumed_s).mean_s for each in markets)


def list_starts(
    measured: Mapping[str, ColdStart], markets: Sequence[MarketObservation], assumed_s: float
) -> list[float]:
    """Return the number of seconds after which each starting replica will be ready. A replica is
    omitted if it has been starting for more than twice the 90th percentile of cold starts, because
    the replica may never be ready.
    """
    found = []
    for market in markets:
        expected = _estimate(measured, market, markets, assumed_s)
        longest_s = 2 * expected.high_s
        found += [
            max(0.0, expected.mean_s - age_s) for age_s in market.starting_s if age_s <= longest_s
        ]
    return found


def _estimate(
    measured: Mapping[str, ColdStart],
    market: MarketObservation,
    markets: Sequence[MarketObservation],
    assumed_s: float,
) -> ColdStart:
    """Return the measured cold start of the market. If none was measured, the result is the boot
    time of the market's machines, plus the time that the service itself needs. The latter is the
    mean over the measured markets, or the assumed time if no market was measured.
    """
    if (known := measured.get(market.name)) is not None:
        return known
    near = list(_find_nearest(measured, market, markets))
    if not near:
        return ColdStart(mean_s=market.boot_s + assumed_s, high_s=market.boot_s + assumed_s)
    return ColdStart(
        mean_s=market.boot_s + fmean(max(0.0, each.mean_s - boot_s) for each, boot_s in near),
        high_s=market.boot_s + fmean(max(0.0, each.high_s - boot_s) for each, boot_s in near),
    )


def _find_nearest(
    measured: Mapping[str, ColdStart],
    market: MarketObservation,
    markets: Sequence[MarketObservation],
) -> Iterator[tuple[ColdStart, float]]:
    """Yield the measured cold starts that are most similar to those of the market, each with the
    boot time of its market: the ones in its region, otherwise the ones of its provider, otherwise
    all. Images, networks and disks differ less within a region than between providers.
    """
    known = {each.name: each for each in markets if each.name in measured}
    region, provider = market.region, market.region.partition("/")[0]
    nearest = (
        [name for name, each in known.items() if region and each.region == region]
        or [
            name
            for name, each in known.items()
            if provider and each.region.partition("/")[0] == provider
        ]
        or list(measured)
    )
    for name in nearest:
        yield measured[name], known[name].boot_s if name in known else 0.0
