"""Runs one service over one trace: with the production autoscaler, or with the rule of another
system.

A service without any ready replica at the start begins with a cold start. If a service starts warm,
every rule begins with the same number of replicas: the number at which the first five minutes' load
uses 80 % of their capacity.
"""

from bisect import bisect_right
from collections.abc import Sequence
from math import ceil
from typing import Protocol

from cavvy.capabilities.serving.autoscaler.decide import ScalingState, decide
from cavvy.capabilities.serving.autoscaler.objectives import GoalEstimate
from cavvy.capabilities.serving.autoscaler.placement import (
    PlacementPolicy,
    ServiceTerms,
    ServiceView,
    SpotHedge,
)
from cavvy.capabilities.serving.autoscaler.terms import (
    MarketObservation,
    ScaleReason,
    ScalingDecision,
    ScalingTerms,
    ServiceObservation,
)
from cavvy.capabilities.serving.loads import PromptSums, TokenTimes
from cavvy.capabilities.simulation.serving.requests import RequestTrace
from cavvy.capabilities.simulation.serving.rules import (
    LoadHistory,
    LoadView,
    RuleState,
    ScalingRule,
)
from cavvy.capabilities.simulation.serving.service import (
    EngineAnswers,
    ReplicaMarket,
    ServiceSetting,
    SimulatedService,
)
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import Struct, combine

_WARM_S, _WARM_USE = 300.0, 0.8
_WARM_PROMPTS = 0.5  # the share of time that engines of language models spend on prompts
_MICROS = 1_000_000
# the autoscaler decides this often
DECISION_S = 5


class ServingScore(Struct, frozen=True, kw_only=True):
    """The cost of one run and the results of its requests. `on_time` is the share of all requests
    that did not fail and waited at most as long as the service allows. `wait_s` contains the
    percentiles 50, 90 and 99 of the waits. `history` contains (time, ready replicas, starting
    replicas, waiting requests) once a minute.
    """

    rule: str
    trace: str
    requests: int
    on_time: float
    failed: int
    wait_s: tuple[float, float, float]
    replica_hours: float
    usd: float
    launches: int
    most: int
    lost: int
    history: tuple[tuple[float, int, int, int], ...] = ()


class Controller(Protocol):
    """Decides every `interval_s` seconds how many replicas of a service run in each market."""

    interval_s: int
    holds: bool

    def order(self, service: SimulatedService) -> Sequence[int]: ...

    def watch(self, service: SimulatedService) -> None:
        """Called once a second."""
        ...


class AutoscalerController:
    """The production autoscaler, which receives its state as a value and
    returns the next state with each decision."""

    holds = True

    def __init__(self, terms: ScalingTerms, interval_s: int = DECISION_S) -> None:
        self.interval_s = interval_s
        self.decisions: list[tuple[float, ScalingDecision]] = []
        self._terms, self._state = terms, ScalingState()
        self._arrivals: list[int] = []
        self._arrived = self._limited = 0
        self._before = (0, 0, 0, 0.0)
        self._tokens, self._prompts = TokenTimes(), PromptSums()
        self.answers: EngineAnswers
        self.goals: GoalEstimate | None = None  # of the last decision
        self._lost: list[int] = []
        self._refused: list[int] = []
        self._cold_starts = 0

    def watch(self, service: SimulatedService) -> None:
        self._arrivals.append(service.arrived - self._arrived)
        self._arrived = service.arrived

    def order(self, service: SimulatedService) -> Sequence[int]:
        decision, self._state = decide(self._terms, self._state, self._observe(service))
        self.decisions.append((service.now_s, decision))
        self._limited += decision.reason is ScaleReason.MOST
        self.goals = self._state.goals or self.goals
        return decision.placement

    @property
    def limited(self) -> float:
        """The share of the decisions that wanted more replicas than the service may have."""
        return self._limited / max(1, len(self.decisions))

    def _observe(self, service: SimulatedService) -> ServiceObservation:
        started, late, completed, completed_s = self._before
        self._before = (service.started, service.late, service.completed, service.completed_s)
        self.answers = service.answers
        before, self._tokens = self._tokens, service.answers.describe()
        prompts, self._prompts = self._prompts, service.prompts
        seen = ServiceObservation(
            now_s=service.now_s,
            arrivals=tuple(self._arrivals),
            started=service.started - started,
            late=service.late - late,
            tokens=combine(self._tokens, before, -1),
            prompts=combine(self._prompts, prompts, -1),
            backlog_size=service.backlog_size,
            completed=service.completed - completed,
            completed_s=service.completed_s - completed_s,
            in_flight=service.in_flight,
            in_flight_s=service.in_flight_s,
            backlog=len(service.queue),
            markets=self._observe_markets(service),
        )
        self._arrivals = []
        self._lost, self._refused = service.lost.copy(), service.refused.copy()
        self._cold_starts = len(service.cold_starts)
        return seen

    def _observe_markets(self, service: SimulatedService) -> tuple[MarketObservation, ...]:
        none = [0] * len(service.markets)
        lost, refused = self._lost or none, self._refused or none
        recent, now_s = service.cold_starts[self._cold_starts :], service.now_s
        return tuple(
            MarketObservation(
                name=market.name,
                region=market.region,
                spot=market.spot,
                rate=HourlyRate(round(market.usd_hr * _MICROS)),
                starting_s=tuple(
                    sorted((now_s - each.launched_s for each in service.starting[at]), reverse=True)
                ),
                ready_s=tuple(
                    sorted((now_s - each.launched_s for each in service.ready[at]), reverse=True)
                ),
                lost=service.lost[at] - lost[at],
                refused=service.refused[at] - refused[at],
                cold_starts_s=tuple(length_s for where, length_s in recent if where == at),
            )
            for at, market in enumerate(service.markets)
        )


class RuleController:
    """Scales the simulated service by the rule of another system. The rule's replicas run on
    demand, or on spot capacity that SpotHedge selects.
    """

    def __init__(self, rule: ScalingRule, service_s: float, hedge: bool = False) -> None:
        self.interval_s, self.holds = rule.interval_s, rule.holds
        self._rule, self._service_s, self._hedge = rule, service_s, hedge
        self._state, self._history = RuleState(), LoadHistory()
        self._placement: tuple[int, PlacementPolicy] | None = None
        self._lost: list[int] = []
        self._refused: list[int] = []

    def watch(self, service: SimulatedService) -> None:
        self._history.add(service.arrived, service.in_flight + len(service.queue))

    def order(self, service: SimulatedService) -> Sequence[int]:
        ready, starting = sum(map(len, service.ready)), sum(map(len, service.starting))
        if self._placement is not None:
            # The rule counts neither spare replicas nor the replicas that stand in for starting
            # spot replicas.
            ready = min(ready, self._placement[0])
            starting = self._placement[0] - ready
        view = LoadView(
            service.now_s,
            ready,
            starting,
            self._history,
            service.setting.concurrency,
            self._service_s,
        )
        wanted, self._state = self._rule.decide(self._state, view)
        wanted = min(wanted, service.setting.most_replicas)
        if not self._hedge:
            demand = next(at for at, each in enumerate(service.markets) if not each.spot)
            return [wanted if at == demand else 0 for at in range(len(service.markets))]
        return self._place(service, wanted)

    def _place(self, service: SimulatedService, wanted: int) -> Sequence[int]:
        spot = [at for at, market in enumerate(service.markets) if market.spot]
        if self._placement is None or self._placement[0] != wanted:
            terms = ServiceTerms(
                replicas=wanted,
                zones=len(spot),
                cold_start_s=service.setting.cold_start_s,
                tick_s=self.interval_s,
                regions=tuple(service.markets[at].region for at in spot),
            )
            self._placement = wanted, SpotHedge(terms)
        placed = self._placement[1].place(self._view(service, spot))
        counts = [placed.on_demand] * len(service.markets)
        for at, count in zip(spot, placed.spot, strict=True):
            counts[at] = count
        # SpotHedge decides for a fixed number of replicas and removes none.
        for _ in range(sum(placed.spot) - wanted - 1):
            fullest = max(spot, key=lambda at: counts[at])
            counts[fullest] -= 1
        return counts

    def _view(self, service: SimulatedService, spot: Sequence[int]) -> ServiceView:
        none, now_s = [0] * len(service.markets), service.now_s
        lost, refused = self._lost or none, self._refused or none
        self._lost, self._refused = service.lost.copy(), service.refused.copy()
        held = [service.ready[at] + service.starting[at] for at in spot]
        return ServiceView(
            now_s,
            tuple(tuple(now_s - each.launched_s for each in zone) for zone in held),
            tuple(service.lost[at] - lost[at] for at in spot),
            tuple(service.refused[at] - refused[at] for at in spot),
            sum(len(service.ready[at]) for at in spot),
            0,
        )


def run_service(
    name: str,
    trace: RequestTrace,
    setting: ServiceSetting,
    controller: Controller,
    markets: Sequence[ReplicaMarket] = (),
    *,
    warm: bool = True,
    ready: int = 0,
) -> ServingScore:
    """Run the service until its last request has ended. The run begins with `ready` replicas or, if
    `warm` is true, with the replicas that the initial load needs.
    """
    service = SimulatedService(
        trace, setting, markets or [on_demand_market(setting)], holds=controller.holds
    )
    if ready:
        service.start_warm(_find_demand(service), ready)
    elif warm:
        _start_warm(service)
    history = []
    second = 0
    while not service.done:
        second += 1
        service.advance(second)
        controller.watch(service)
        if second % controller.interval_s == 0:
            service.order(controller.order(service))
        if second % 60 == 0:
            ready, starting = sum(map(len, service.ready)), sum(map(len, service.starting))
            history.append((float(second), ready, starting, len(service.queue)))
    service.finish()
    return _score(name, service, tuple(history))


def on_demand_market(setting: ServiceSetting) -> ReplicaMarket:
    """Return the market of a service without spot."""
    return ReplicaMarket(name="on-demand", region="", spot=False, usd_hr=setting.on_demand_usd_hr)


def _start_warm(service: SimulatedService) -> None:
    trace = service.trace
    first = bisect_right(trace.arrivals_s, _WARM_S)
    slots = service.setting.concurrency * _WARM_USE
    count = max(1, ceil(sum(trace.services_s[:first]) / _WARM_S / slots))
    if (speed := service.setting.speed) is not None:
        prompts_s = sum(speed.service_s(prompt, 0) for prompt, _ in trace.tokens[:first])
        count = max(count, ceil(prompts_s / _WARM_S / _WARM_PROMPTS))
    service.start_warm(_find_demand(service), count)


def _find_demand(service: SimulatedService) -> int:
    return next(at for at, market in enumerate(service.markets) if not market.spot)


def _score(
    name: str, service: SimulatedService, history: tuple[tuple[float, int, int, int], ...]
) -> ServingScore:
    waits, failed = service.record.waits_s, service.record.failed
    limit_s = service.setting.slo_wait_s
    served = sorted(
        wait for number, wait in enumerate(waits) if wait is not None and number not in failed
    )
    percentiles = [
        served[min(len(served) - 1, int(share * len(served)))] if served else 0.0
        for share in (0.5, 0.9, 0.99)
    ]
    return ServingScore(
        rule=name,
        trace=service.trace.name,
        requests=len(waits),
        on_time=bisect_right(served, limit_s) / len(waits),
        failed=len(failed),
        wait_s=(percentiles[0], percentiles[1], percentiles[2]),
        replica_hours=service.replica_s / 3600.0,
        usd=service.usd,
        launches=service.launches,
        most=service.most,
        lost=sum(service.lost),
        history=history,
    )
