"""Recommends the next step of a job with a deadline. The module converts stored observations to the
view that the policy expects, and the policy's decision to offers.
"""

from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from math import inf

from cavvy.domain.markets import Observation
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.values import Struct
from cavvy.planner.deadline.inputs import JobProgress, PolicyInputs, SteeredMarket
from cavvy.planner.deadline.policy import DeadlinePolicy, PolicyQuestion
from cavvy.planner.deadline.session import PolicySession
from cavvy.planner.markets import MarketKnowledge
from cavvy.planner.spot.view import (
    ABOUT,
    GRAIN_S,
    NOWHERE,
    MarketPolicy,
    PolicyDecision,
    PolicyMaker,
    PolicyView,
    RunMode,
    SpotQuote,
)

# While a job runs, at least this share of its work is assumed to be left, because the estimated
# running time may be too short.
_LEAST_LEFT = 0.01


class Recommendation(Struct, frozen=True, kw_only=True):
    """The recommended mode of the job. `offers` are the offers on which to start, best first.
    If `offers` is empty, the job waits or keeps its current gang.
    """

    mode: RunMode
    offers: tuple[Offer, ...] = ()
    stay: bool = False  # whether the job is already in the recommended state
    again_at: datetime | None = None
    reason: str = ""


def advise(
    inputs: PolicyInputs,
    knowledge: MarketKnowledge,
    progress: JobProgress,
    now: datetime,
    *,
    avoid: Mapping[str, datetime] | None = None,
    make: PolicyMaker = DeadlinePolicy,
) -> Recommendation:
    """Create a policy, pass it all observations of the job's markets, and return the offers that
    correspond to its decision.
    """
    policy = make(inputs.terms)
    session = _replay(policy, inputs, knowledge, progress, now)
    view = _view_of(session, inputs, progress, now, avoid or {})
    decision = policy.decide(view)
    if decision.mode is RunMode.IDLE or decision.market != view.market:
        rests = _explain_rests(session, inputs, progress, view.now_s)
        decision = decision._replace(reason="; ".join([decision.reason, *rests]))
    return _recommendation(inputs, progress, PolicyQuestion(inputs.terms, view, policy), decision)


def recall(
    policy: MarketPolicy,
    inputs: PolicyInputs,
    knowledge: MarketKnowledge,
    progress: JobProgress,
    now: datetime,
    *,
    avoid: Mapping[str, datetime] | None = None,
) -> PolicyView:
    """Pass the observations of each market to a policy. Returns the current view."""
    session = _replay(policy, inputs, knowledge, progress, now)
    return _view_of(session, inputs, progress, now, avoid or {})


def _replay(
    policy: MarketPolicy,
    inputs: PolicyInputs,
    knowledge: MarketKnowledge,
    progress: JobProgress,
    now: datetime,
) -> PolicySession:
    usd_hr = [place.spot_usd(inputs.nodes) for place in inputs.places]
    session = PolicySession(policy, usd_hr, inputs.terms.overhead_s)
    for index, seen in _observations(inputs, knowledge):
        if seen.at < now:
            place, rate = inputs.places[index], seen.rate
            usd = (
                None
                if rate is None
                else rate.micros_per_hour / 1e6 * inputs.nodes * place.run_time_ratio
            )
            at_s = (seen.at - progress.submitted_at).total_seconds()
            session.observe(at_s, index, seen.kind, usd, seen.seconds or None)
    return session


def _view_of(
    session: PolicySession,
    inputs: PolicyInputs,
    progress: JobProgress,
    now: datetime,
    avoid: Mapping[str, datetime],
) -> PolicyView:
    usable = {
        place.spot.key
        for place in inputs.places
        if place.spot is not None and avoid.get(place.spot.key, now) <= now
    }
    now_s = (now - progress.submitted_at).total_seconds()
    quotes = tuple(
        _quote(place, assumed, inputs.nodes, usable)
        for place, assumed in zip(inputs.places, session.quotes(now_s), strict=True)
    )
    return _view(inputs, progress, quotes, now_s)


def _explain_rests(
    session: PolicySession, inputs: PolicyInputs, progress: JobProgress, now_s: float
) -> list[str]:
    return [
        f"{inputs.places[market].name} took back {barren.count} launches in a row before the work "
        f"started and rests until "
        f"{progress.submitted_at + timedelta(seconds=barren.until_s):%H:%M} UTC"
        for market, barren in session.resting(now_s).items()
    ]


def _quote(
    place: SteeredMarket, assumed: SpotQuote, nodes: int, usable: Collection[str]
) -> SpotQuote:
    """Return the assumed quote of a market with the current price. If the market's spot offer
    cannot be used, spot is unavailable in this quote.
    """
    spot = place.spot
    fits = (
        spot is not None
        and spot.key in usable
        and (spot.capacity is None or spot.capacity >= nodes)
    )
    return assumed._replace(up=assumed.up and fits, usd_hr=place.spot_usd(nodes))


def _observations(
    inputs: PolicyInputs, knowledge: MarketKnowledge
) -> list[tuple[int, Observation]]:
    """Return all observations of spot in the job's markets, in order of time. Each item also
    contains the index of its market in `inputs`.
    """
    return sorted(
        (
            (index, seen)
            for index, place in enumerate(inputs.places)
            if place.spot is not None
            for seen in knowledge.recent.get(place.spot.key, ())
        ),
        key=lambda each: each[1].at,
    )


def _view(
    inputs: PolicyInputs, progress: JobProgress, quotes: tuple[SpotQuote, ...], now_s: float
) -> PolicyView:
    current, mode, loading_s, terms = progress.current, RunMode.IDLE, 0.0, inputs.terms
    market = inputs.index(current or progress.home)
    if current is not None:
        mode = RunMode.SPOT if current.purchase is Purchase.SPOT else RunMode.ON_DEMAND
        if not progress.works:
            loading_s = max(GRAIN_S, terms.overhead_s - progress.starting_for.total_seconds())
        # A gang in an unknown market is treated as if it were in the first market.
        if market == NOWHERE:
            market, loading_s = 0, loading_s if mode is RunMode.SPOT else max(GRAIN_S, loading_s)
    if mode is RunMode.SPOT:
        here = quotes[market]._replace(up=True, at_risk=progress.at_risk)
        quotes = (*quotes[:market], here, *quotes[market + 1 :])
    left = progress.budget_left
    return PolicyView(
        now_s,
        max(_LEAST_LEFT, 1 - progress.done) * terms.work_s,
        mode,
        market,
        loading_s,
        quotes,
        unsaved_s=progress.unsaved.total_seconds(),
        budget_usd=inf if left is None else left.micros / 1e6,
    )


def _spots(inputs: PolicyInputs, question: PolicyQuestion, market: int) -> tuple[Offer, ...]:
    """Return the spot offer of the chosen market, followed by the spot offers of other markets at
    about the same cost.
    """
    near = [
        index
        for index in question.near(question.spot_cost(market) * ABOUT)
        if index not in (market, question.view.market)
    ]
    return tuple(spot for i in (market, *near) if (spot := inputs.places[i].spot) is not None)


def _recommendation(
    inputs: PolicyInputs, progress: JobProgress, question: PolicyQuestion, decision: PolicyDecision
) -> Recommendation:
    mode, market, again_s, reason = decision
    view = question.view
    at = None if again_s == inf else progress.submitted_at + timedelta(seconds=again_s)
    if mode is RunMode.IDLE:
        return Recommendation(mode=mode, again_at=at, reason=reason)
    if mode is view.mode and market == view.market:
        return Recommendation(mode=mode, stay=True, again_at=at, reason=reason)
    if mode is RunMode.SPOT:
        offers = _spots(inputs, question, market)
        return Recommendation(mode=mode, offers=offers, again_at=at, reason=reason)
    order = sorted(range(len(inputs.places)), key=lambda i: (i != market, question.fixed_cost(i)))
    # A job that already runs on demand moves only to the chosen market, because moving to another
    # one may save nothing.
    if view.mode is RunMode.ON_DEMAND:
        order = order[:1]
    fixed = [offer for i in order if (offer := inputs.places[i].fixed) is not None]
    return Recommendation(mode=mode, offers=tuple(dict.fromkeys(fixed)), again_at=at, reason=reason)
