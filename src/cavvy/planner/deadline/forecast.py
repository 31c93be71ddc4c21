"""Forecasts the cost and the end of a job with a deadline before anything is rented. The forecast
simulates the job with the same policies that place real jobs. In the simulated markets, spot
appears and disappears as often as in the recorded markets. The random numbers are seeded, so equal
inputs give equal results. No I/O.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from math import inf

from cavvy.domain.values import Struct
from cavvy.planner.deadline.inputs import JobProgress, PolicyInputs
from cavvy.planner.deadline.policy import DeadlinePolicy
from cavvy.planner.deadline.recommendation import recall
from cavvy.planner.markets import MarketKnowledge
from cavvy.planner.spot import view as spot
from cavvy.planner.spot.auto import AutoPolicy
from cavvy.planner.spot.classic import OnDemandPolicy, SpotOnlyPolicy
from cavvy.planner.spot.spells import SpellLengths

RUNS = 100
IN_TIME = 0.95  # share of the runs that is in time if a way to run a job counts as safe
KINDS: Mapping[str, spot.PolicyMaker] = {
    "never": OnDemandPolicy,
    "auto": DeadlinePolicy,
    "only": SpotOnlyPolicy,
}  # the policy for each value of `resources.spot`
_HORIZON = 5.0  # a simulated run ends unfinished after this multiple of the time to the deadline
_STEPS = 20_000  # maximum steps of one run
_HOUR_S = 3600.0
_MASK = (1 << 64) - 1


class Forecast(Struct, frozen=True, kw_only=True):
    """The results of many simulated runs of one job under one policy. The dollars do not include
    the money that the job has already spent.
    """

    kind: str
    nodes: int = 1
    runs: int
    usd_mean: float
    usd_p10: float
    usd_p90: float
    in_time: float  # share of the runs that finished the work before the deadline
    hours_p50: float  # hours from now until the end
    hours_p90: float


def foresee(
    inputs: PolicyInputs,
    knowledge: MarketKnowledge,
    progress: JobProgress,
    now_s: float,
    kind: str,
    *,
    runs: int = RUNS,
    seed: int = 1,
) -> Forecast:
    """Simulate the rest of the job `runs` times. `now_s` is the current time in seconds since the
    submission.
    """
    if kind == "never":
        runs = 1  # All runs are equal, because on-demand is always granted.
    learned, now = AutoPolicy(inputs.terms), progress.submitted_at + timedelta(seconds=now_s)
    recall(learned, inputs, knowledge, progress, now)
    ends = []
    for run in range(runs):
        policy = KINDS[kind](inputs.terms)
        view = recall(policy, inputs, knowledge, progress, now)
        dice = _Dice(seed * 1_000_003 + run)
        ends.append(_Run(inputs, policy, view, learned.spells(), dice).play())
    usd = sorted(cost for cost, _, _ in ends)
    hours = sorted((end - now_s) / _HOUR_S for _, end, _ in ends)
    return Forecast(
        kind=kind,
        nodes=inputs.nodes,
        runs=runs,
        usd_mean=sum(usd) / runs,
        usd_p10=_share(usd, 0.1),
        usd_p90=_share(usd, 0.9),
        in_time=sum(done and end <= inputs.terms.deadline_s + spot.GRAIN_S for _, end, done in ends)
        / runs,
        hours_p50=_share(hours, 0.5),
        hours_p90=_share(hours, 0.9),
    )


def find_cheapest_in_time(forecasts: Sequence[Forecast], share: float = IN_TIME) -> Forecast | None:
    """Return the forecast with the lowest expected cost of those whose runs were in time at least
    as often as `share`; None if there is none."""
    safe = [each for each in forecasts if each.in_time >= share]
    return min(safe, key=lambda each: (each.usd_mean, each.hours_p50), default=None)


def _share(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class _Dice:
    """Pseudo-random numbers by the algorithm splitmix64. Modules without I/O must not import the
    standard library's `random`.
    """

    __slots__ = ("_state",)

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def roll(self) -> float:
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((mixed ^ (mixed >> 31)) >> 11) / (1 << 53)


def _draw(spells: SpellLengths, dice: _Dice) -> float:
    """Return a random spell length in hours: choose two adjacent recorded lengths at random, and
    then a random length between the two. A spell is a period in which spot stays available, or
    stays unavailable.
    """
    chance, sums = dice.roll(), spells.sums
    index = next(i for i, longer in enumerate(sums.longer) if longer <= chance)
    low = sums.lengths[index - 1] if index else 0.0
    return max(0.02, low + (sums.lengths[index] - low) * dice.roll())


class _Run:
    """One simulated run of the job."""

    def __init__(
        self,
        inputs: PolicyInputs,
        policy: spot.MarketPolicy,
        view: spot.PolicyView,
        spells: Sequence[tuple[SpellLengths, SpellLengths]],
        dice: _Dice,
    ) -> None:
        self._terms, self._left_at_launch_s = inputs.terms, view.left_s
        self._policy, self._view, self._spells, self._dice = policy, view, spells, dice
        self._quotes = list(view.quotes)
        self._changes = [
            view.now_s + _draw((stays if quote.up else away).beyond(0.5), dice) * _HOUR_S
            if place.spot is not None
            else inf
            for (stays, away), quote, place in zip(spells, view.quotes, inputs.places, strict=True)
        ]
        self._usd = 0.0
        left_s = max(inputs.terms.deadline_s - view.now_s, inputs.terms.work_s)
        self._last = view.now_s + left_s * _HORIZON

    def play(self) -> tuple[float, float, bool]:
        """Simulate the run to its end. Returns the run's cost in dollars, its end in seconds since
        the submission, and whether the work was finished.
        """
        for _ in range(_STEPS):
            if self._view.left_s <= 0 or self._view.now_s >= self._last:
                break
            self._policy.learn(self._view.now_s, self._quotes)
            self._step(self._policy.decide(self._view))
        return self._usd, self._view.now_s, self._view.left_s <= 0

    def _step(self, decision: spot.PolicyDecision) -> None:
        mode, market, again_s, _ = decision
        view, spent = self._view, self._usd
        loading = 0.0 if mode is spot.RunMode.IDLE else view.loading_s
        if mode is not spot.RunMode.IDLE and (mode is not view.mode or market != view.market):
            self._usd += self._terms.move(view.market, market)
            loading, self._left_at_launch_s = self._terms.overhead_s, view.left_s
        until = min(min(self._changes), max(again_s, view.now_s + 1.0), self._last)
        left, where = view.left_s, view.market if mode is spot.RunMode.IDLE else market
        if mode is not spot.RunMode.IDLE:
            until = min(until, view.now_s + loading + left)
            span = until - view.now_s
            rate = self._rate(mode, market)
            self._usd += rate * span / _HOUR_S
            left -= max(0.0, span - loading)
            loading = max(0.0, loading - span)
        mode = self._change(until, mode, market)
        self._view = spot.PolicyView(
            until,
            self._keep(left, decision.mode is not mode),
            mode,
            where,
            loading if mode is not spot.RunMode.IDLE else 0.0,
            tuple(self._quotes),
            budget_usd=view.budget_usd - (self._usd - spent),
        )

    def _keep(self, left_s: float, preempted: bool) -> float:
        """Return the remaining work in seconds. A preempted gang must repeat its work since its
        last checkpoint.
        """
        if preempted:
            left_s = min(left_s + self._terms.again_s, self._left_at_launch_s)
        return left_s if left_s >= spot.GRAIN_S else 0.0

    def _rate(self, mode: spot.RunMode, market: int) -> float:
        if mode is spot.RunMode.SPOT:
            return self._quotes[market].usd_hr
        return self._terms.markets[market].on_demand_usd_hr

    def _change(self, now_s: float, mode: spot.RunMode, market: int) -> spot.RunMode:
        """Update the set of markets that have spot. Returns the job's mode after the update: the
        job is idle if the spot capacity that it used became unavailable.
        """
        for index, at in enumerate(self._changes):
            if at > now_s:
                continue
            quote = self._quotes[index]
            self._quotes[index] = spot.SpotQuote(not quote.up, quote.usd_hr)
            stays, away = self._spells[index]
            self._changes[index] = now_s + _draw(away if quote.up else stays, self._dice) * _HOUR_S
            if mode is spot.RunMode.SPOT and index == market and quote.up:
                mode = spot.RunMode.IDLE
        return mode
