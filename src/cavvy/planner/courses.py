"""A job with a deadline and the offers it may use -> the deadline policy's terms and view, and its
answer as offers.

A market here is one machine type in one place: its spot offer if there is one, and what it costs on
demand there. Work is counted in seconds of one reference machine; a faster one is taken as no
faster but cheaper, so that every promise about time errs on the safe side, and slower ones are left
out. Pure.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from math import inf

from cavvy.domain.jobs import Attempt
from cavvy.domain.markets import Sight
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import SpotPolicy, Task
from cavvy.domain.units import Money
from cavvy.planner.markets import Knowledge
from cavvy.planner.risk import SPOT_PREEMPTIONS_PER_HOUR, chosen_interval
from cavvy.planner.spot.auto import Auto
from cavvy.planner.spot.spells import Spells
from cavvy.planner.spot.view import (
    NOWHERE,
    Decision,
    Market,
    Mode,
    Policy,
    PolicyMaker,
    Quote,
    Terms,
    View,
)
from cavvy.planner.work import estimate

MOST_MARKETS = 8  # that a policy weighs against each other at a time
_ALIKE = 1.02  # machines whose running times differ by no more are of one speed
_ABOUT = 1.1  # prices of spot this close are as good as the same
_LEAST_LEFT = 0.01  # of the work: an estimate may be short, and work that runs is not done
_SETUP_PRIOR = timedelta(seconds=60)  # of a task with a setup that has not run yet
_SPARE = timedelta(seconds=60)  # kept before the deadline for what takes a moment longer
_SPARE_SHARE = 0.01  # of the work, for the same
_HOUR_S = 3600.0
_LONG_WAIT_S = (
    3600.0  # a gang that works is given back for a wait of that much, or of ten starts, and no less
)
_MIB, _GB = 1 << 20, 10**9
_BUCKETS = {"s3": "aws", "gs": "gcp", "az": "azure"}  # whose a storage is, by its URL
AHEAD = "the place says that this gang is at risk, and spot is there for about the same price"
NOT_AHEAD = (
    "the place says that this gang is at risk, but no other spot is there for about the same price"
)
_WORTH_MOVING = (
    0.05  # of what the rest of the work costs on demand: that much a move elsewhere has to save
)
_FAR = datetime(9999, 1, 1, tzinfo=UTC)
_MEANS = {
    Sight.GRANTED: True,
    Sight.BOOTED: True,
    Sight.ENDED: True,
    Sight.REFUSED: False,
    Sight.TAKEN: False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Standpoint:
    """Where a job stands: what is done of it, and what it has now."""

    submitted_at: datetime
    deadline: datetime
    done: float = 0.0  # share of the work that is done, saved or in the gang that works
    current: Offer | None = None  # what it has, or is getting
    works: bool = False  # the current gang is past its start
    starting_for: timedelta = timedelta(0)  # how long the current gang has been coming
    unsaved: timedelta = timedelta(0)  # work of the current gang since its newest checkpoint
    at_risk: bool = False  # the place said that it may soon take the current gang back
    home: Offer | None = None  # where it was last
    setup: timedelta | None = None  # how long its setup took; None: it has not run
    budget_left: Money | None = None
    saved_bytes: int = 0  # that a move carries
    egress: Mapping[str, Money] = field(
        default_factory=dict
    )  # price per GB by provider, or "provider/region"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to be from now on. `offers` are where to start, best first; none of them means to
    wait or to stay.
    """

    mode: Mode
    offers: tuple[Offer, ...] = ()
    stay: bool = False  # what the job has is what it should have
    again_at: datetime | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """One market with its offers. `hours` is its running time over the reference's, at most
    about 1.
    """

    name: str
    spot: Offer | None
    fixed: Offer | None
    pace: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Everything that a policy for this job is made from."""

    places: tuple[Place, ...]
    terms: Terms
    nodes: int
    run_time: timedelta = field(default=timedelta(0))  # of the whole work on the reference machine
    start: timedelta = field(
        default=timedelta(0)
    )  # from a launch until work goes on, where none has to be done again


def find_setting(
    task: Task,
    offers: Sequence[Offer],
    knowledge: Knowledge,
    standpoint: Standpoint,
    *,
    floor: bool = True,
    most: int = MOST_MARKETS,
) -> Setting | None:
    """The markets and terms of a job that is to end in time at the least cost; None where nothing
    can be promised.

    That is so where the task wants no mixture of spot and on-demand, the running time is not known,
    no machine that stays can be had, or (with `floor`) even the fastest of them would be late.
    """
    if task.resources.spot is not SpotPolicy.AUTO:
        return None
    times = {
        offer.key: length
        for offer in offers
        if not offer.shared and (length := run_time_on(task, offer))
    }
    fixed = [
        offer for offer in offers if offer.key in times and offer.purchase is Purchase.ON_DEMAND
    ]
    if not fixed or all(offer.purchase is not Purchase.SPOT for offer in offers):
        return None
    room = standpoint.deadline - standpoint.submitted_at
    in_time = [offer for offer in fixed if times[offer.key] < room]
    if not in_time and floor:
        return None
    cheapest = min(in_time or fixed, key=lambda offer: (_cost(offer, times[offer.key]), offer.key))
    if not in_time:
        cheapest = min(fixed, key=lambda offer: (times[offer.key], offer.rate, offer.key))
    reference = times[cheapest.key]
    places = _places(
        [offer for offer in offers if times.get(offer.key, timedelta.max) <= reference * _ALIKE],
        times,
    )
    places = _nearest(places, standpoint, most)
    start = _start(task, places, knowledge, standpoint)
    overhead = start + _again(task, reference)
    spare = _SPARE + reference * _SPARE_SHARE
    terms = Terms(
        work_s=reference.total_seconds(),
        deadline_s=(room - spare).total_seconds(),
        overhead_s=overhead.total_seconds(),
        markets=tuple(
            Market(
                name=place.name,
                region=place.name.rpartition("/")[0],
                on_demand_usd_hr=_fixed_usd(place, task.nodes),
            )
            for place in places
        ),
        move_usd=_moves(task, places, standpoint),
    )
    return Setting(
        places=tuple(places), terms=terms, nodes=task.nodes, run_time=reference, start=start
    )


def advise(
    setting: Setting,
    knowledge: Knowledge,
    standpoint: Standpoint,
    now: datetime,
    *,
    avoid: Mapping[str, datetime] | None = None,
    make: PolicyMaker = Auto,
) -> Advice:
    """What the policy wants now, as offers; it has been shown first all that was seen of these
    markets before.
    """

    def shown() -> Policy:
        policy = make(setting.terms)
        _replay(policy, setting, knowledge, standpoint.submitted_at, now)
        return policy

    policy = shown()
    view = _view(setting, knowledge, standpoint, now, avoid or {})
    decision = policy.decide(view)
    if (
        decision.mode is Mode.IDLE
        and view.mode is Mode.ON_DEMAND
        and not _waits_long(setting, view, shown())
    ):
        decision = Decision(
            Mode.ON_DEMAND,
            view.market,
            reason="no spot, and too little slack left to wait long for it",
        )
    if (urgent := _last_moment(setting, standpoint, view)) is not None:
        decision = urgent
    decision = _sooner(setting, view, decision)
    decision = _not_dearer(setting, view, decision)
    decision = _ahead(setting, standpoint, view, decision)
    decision = _cheaper(setting, standpoint, view, decision)
    decision = _within_budget(setting, standpoint, view, decision)
    return _advice(setting, standpoint, view, decision)


def run_time_on(task: Task, offer: Offer) -> timedelta | None:
    """How long the work runs there undisturbed: by its `work`, else the longest that it is
    allowed to run.
    """
    if task.work is not None:
        return estimate(task, offer).run_time
    return task.limits.duration


def share_done(task: Task, attempts: Sequence[Attempt], now: datetime, current: int) -> float:
    """The share of the work that attempts have done: each until its last checkpoint, the current
    one until now.
    """
    done = 0.0
    for attempt in attempts:
        whole = run_time_on(task, attempt.offer)
        if attempt.running_at is None or not whole:
            continue
        until = attempt.checkpoint_at if task.checkpoint is not None else None
        if attempt.number == current and attempt.finished_at is None:
            until = now
        if until is not None and until > attempt.running_at:
            done += (until - attempt.running_at) / whole
    return min(done, 1.0)


def _cost(offer: Offer, length: timedelta) -> float:
    return offer.rate.micros_per_hour * length.total_seconds()


def _places(offers: Sequence[Offer], times: Mapping[str, timedelta]) -> list[Place]:
    """Spot offers, each with the machine of its kind that stays, and then the kinds without
    spot.
    """
    fixed: dict[tuple[object, ...], Offer] = {}
    for offer in offers:
        if offer.purchase is Purchase.ON_DEMAND:
            for zone in {offer.zone, None}:
                known = fixed.get((*_kind(offer), zone))
                if known is None or offer.rate < known.rate:
                    fixed[(*_kind(offer), zone)] = offer
    places: list[Place] = []
    paired: set[str] = set()
    reference = max(times[offer.key] for offer in offers)
    for offer in offers:
        if offer.purchase is Purchase.SPOT:
            mate = fixed.get((*_kind(offer), offer.zone)) or fixed.get((*_kind(offer), None))
            paired.add(mate.key if mate else "")
            places.append(Place(_name(offer), offer, mate, times[offer.key] / reference))
    for offer in offers:
        if offer.purchase is Purchase.ON_DEMAND and offer.key not in paired:
            places.append(Place(_name(offer), None, offer, times[offer.key] / reference))
    return places


def _kind(offer: Offer) -> tuple[object, ...]:
    return offer.provider, offer.region, offer.instance_type, offer.accelerator_count


def _name(offer: Offer) -> str:
    return offer.key.rpartition("/")[0]


def _nearest(places: list[Place], standpoint: Standpoint, most: int) -> list[Place]:
    """The cheapest few by spot, the cheapest on demand, and where the job is; a policy weighs
    each against each.
    """

    def by_spot(place: Place) -> tuple[float, str]:
        return (place.spot.rate.micros_per_hour * place.pace if place.spot else inf), place.name

    def by_fixed(place: Place) -> tuple[float, str]:
        return (place.fixed.rate.micros_per_hour * place.pace if place.fixed else inf), place.name

    chosen = sorted(places, key=by_spot)[:most]
    best = min(places, key=by_fixed)
    here = [
        p
        for p in places
        for o in (standpoint.current, standpoint.home)
        if o is not None and p.name == _name(o)
    ]
    for place in (best, *here):
        if place not in chosen:
            chosen.append(place)
    return chosen


def _fixed_usd(place: Place, nodes: int) -> float:
    """A place without a machine that stays is one where on-demand is never worth its price."""
    return place.fixed.rate.micros_per_hour / 1e6 * nodes * place.pace if place.fixed else 1e6


def _moves(
    task: Task, places: Sequence[Place], standpoint: Standpoint
) -> tuple[tuple[float, ...], ...]:
    """The dollars that bringing the checkpoint from one place to another costs; () where no move
    costs any.

    The cloud that the bytes leave takes the money: the one of the bucket if there is one, else the
    one of the gang.
    """
    stated = task.checkpoint.size_mib if task.checkpoint is not None else None
    size_gb = (standpoint.saved_bytes or (stated or 0) * _MIB) / _GB
    if task.checkpoint is None or not size_gb or not standpoint.egress:
        return ()
    bucket = _BUCKETS.get((task.checkpoint.storage or "").partition("://")[0])

    def price(source: Place, target: Place) -> float:
        left, here = _region(source), _region(target)
        if (
            left == here or bucket == here[0]
        ):  # a bucket is taken to be in the region where its cloud's nodes are
            return 0.0
        at = (bucket, "") if bucket else left
        per_gb = standpoint.egress.get("/".join(at), standpoint.egress.get(at[0]))
        return per_gb.micros / 1e6 * size_gb if per_gb else 0.0

    moves = tuple(tuple(price(source, target) for target in places) for source in places)
    return moves if any(any(row) for row in moves) else ()


def _region(place: Place) -> tuple[str, str]:
    offer = place.spot or place.fixed
    assert offer is not None
    return offer.provider, offer.region


def _start(
    task: Task, places: Sequence[Place], knowledge: Knowledge, standpoint: Standpoint
) -> timedelta:
    """From a launch until the work begins: boot and setup, with care."""
    keys = [
        offer.key for place in places for offer in (place.spot, place.fixed) if offer is not None
    ]
    boot = max(knowledge.of(key).boot for key in keys)
    return boot + (
        standpoint.setup
        if standpoint.setup is not None
        else _SETUP_PRIOR
        if task.setup
        else timedelta(0)
    )


def _again(task: Task, reference: timedelta) -> timedelta:
    """How long a gang that follows another works until it is where that had stopped: what was not
    yet saved, with care.

    Without a checkpoint everything done is lost: half of the work, twice over, is what the policy
    then keeps free.
    """
    if task.checkpoint is None:
        return reference / 2
    every, write = chosen_interval(task.checkpoint, SPOT_PREEMPTIONS_PER_HOUR * task.nodes)
    return min((every or timedelta(0)) + write, reference / 2)


def observed(
    policy: Policy, setting: Setting, knowledge: Knowledge, standpoint: Standpoint
) -> list[tuple[Spells, Spells]]:
    """Show a policy what was seen of the markets, and tell how long spot stays and stays away in
    each of them.
    """
    _replay(policy, setting, knowledge, standpoint.submitted_at, _FAR)
    learned = Auto(setting.terms)
    _replay(learned, setting, knowledge, standpoint.submitted_at, _FAR)
    return learned.spells()


def standing_view(
    setting: Setting, knowledge: Knowledge, standpoint: Standpoint, now_s: float
) -> View:
    """What a policy is shown `now_s` seconds after the submission."""
    return _view(
        setting, knowledge, standpoint, standpoint.submitted_at + timedelta(seconds=now_s), {}
    )


def _replay(
    policy: Policy, setting: Setting, knowledge: Knowledge, began: datetime, now: datetime
) -> None:
    """Show the policy how each market's spot came and went, from what was seen of its launches
    and lives.
    """
    learn: Callable[[float, Sequence[Quote]], None] | None = getattr(policy, "learn", None)
    if learn is None:
        return
    signs: list[tuple[datetime, int, bool | None, float | None]] = []
    for index, place in enumerate(setting.places):
        for seen in knowledge.recent.get(place.spot.key, ()) if place.spot else ():
            if seen.at < now:
                usd = (
                    None
                    if seen.rate is None
                    else seen.rate.micros_per_hour / 1e6 * setting.nodes * place.pace
                )
                signs.append((seen.at, index, _MEANS.get(seen.sight), usd))
    quotes = [Quote(False, _spot_usd(place, setting.nodes)) for place in setting.places]
    for at, index, up, usd in sorted(signs, key=lambda sign: sign[0]):
        old = quotes[index]
        quotes[index] = Quote(old.up if up is None else up, old.usd_hr if usd is None else usd)
        learn((at - began).total_seconds(), quotes)


def _spot_usd(place: Place, nodes: int) -> float:
    return place.spot.rate.micros_per_hour / 1e6 * nodes * place.pace if place.spot else 1e6


def _view(
    setting: Setting,
    knowledge: Knowledge,
    standpoint: Standpoint,
    now: datetime,
    avoid: Mapping[str, datetime],
) -> View:
    current, mode, loading = standpoint.current, Mode.IDLE, 0.0
    if current is not None:
        mode = Mode.SPOT if current.purchase is Purchase.SPOT else Mode.ON_DEMAND
        if not standpoint.works:
            loading = max(0.0, setting.terms.overhead_s - standpoint.starting_for.total_seconds())
    market = _index(setting, current or standpoint.home)
    if current is not None and market == NOWHERE:
        market = 0
    quotes = [_quote(place, setting.nodes, knowledge, now, avoid) for place in setting.places]
    if mode is Mode.SPOT:
        quotes[market] = Quote(True, quotes[market].usd_hr)
    left = max(_LEAST_LEFT, 1 - standpoint.done) * setting.terms.work_s
    now_s = (now - standpoint.submitted_at).total_seconds()
    return View(now_s, left, mode, market, loading, tuple(quotes))


def _index(setting: Setting, offer: Offer | None) -> int:
    if offer is None:
        return NOWHERE
    return next(
        (i for i, place in enumerate(setting.places) if place.name == _name(offer)), NOWHERE
    )


def _quote(
    place: Place, nodes: int, knowledge: Knowledge, now: datetime, avoid: Mapping[str, datetime]
) -> Quote:
    """Spot is taken to be there unless the place says that it is not, or said so a moment ago."""
    spot = place.spot
    if spot is None or (spot.capacity is not None and spot.capacity < nodes):
        return Quote(False, _spot_usd(place, nodes))
    until = max(
        (at for at in (knowledge.resting_until(spot.key), avoid.get(spot.key)) if at is not None),
        default=now,
    )
    return Quote(until <= now, _spot_usd(place, nodes))


def _waits_long(setting: Setting, view: View, policy: Policy) -> bool:
    """Whether a gang that is given back now would not be wanted again so soon that its new start
    costs more.
    """
    long = max(_LONG_WAIT_S, 10 * setting.terms.overhead_s)
    later = view._replace(now_s=view.now_s + long, mode=Mode.IDLE, loading_s=0.0)
    return policy.decide(later).mode is not Mode.ON_DEMAND


def _last_moment(setting: Setting, standpoint: Standpoint, view: View) -> Decision | None:
    """A gang on spot that does not come up, or saves nothing, must not use up the time that
    on-demand needs.
    """
    if view.mode is not Mode.SPOT:
        return None
    overhead, risk = setting.terms.overhead_s, 0.0
    if standpoint.works:
        risk = standpoint.unsaved.total_seconds()
        if risk <= overhead:  # which has the usual time between two checkpoints in it
            return None
    slack = setting.terms.deadline_s - view.now_s - view.left_s
    if slack - risk > overhead:
        return None
    what = "spot has not come up" if not standpoint.works else "nothing was saved for too long"
    return Decision(
        Mode.ON_DEMAND, _cheapest_fixed(setting, view), inf, f"{what}, and this is the last moment"
    )


def _sooner(setting: Setting, view: View, decision: Decision) -> Decision:
    """Waiting for spot at home, with spot of about the same price elsewhere, saves nothing: go
    there now.
    """
    terms = setting.terms
    slack = terms.deadline_s - view.now_s - view.left_s
    if decision.mode is not Mode.IDLE or view.mode is not Mode.IDLE or slack < 2 * terms.overhead_s:
        return decision
    home = _spot_cost(setting, view, view.market) if view.market != NOWHERE else inf
    costs = {
        index: _spot_cost(setting, view, index)
        for index, quote in enumerate(view.quotes)
        if quote.up
    }
    up = [index for index, cost in costs.items() if cost <= home * _ABOUT]
    if not up:
        return decision
    best = min(up, key=costs.__getitem__)
    return Decision(Mode.SPOT, best, inf, "spot is there for about the price of where it was")


def _not_dearer(setting: Setting, view: View, decision: Decision) -> Decision:
    """Where spot costs no less than on-demand, there is nothing to wait for."""
    if view.mode is Mode.SPOT or decision.mode is Mode.ON_DEMAND:
        return decision
    fixed = view.market if view.mode is Mode.ON_DEMAND else _cheapest_fixed(setting, view)
    usable = [index for index, place in enumerate(setting.places) if place.spot]
    if any(
        _spot_cost(setting, view, index) < _fixed_cost(setting, view, fixed) for index in usable
    ):
        return decision
    return Decision(Mode.ON_DEMAND, fixed, inf, "on-demand costs no more than spot")


def _ahead(setting: Setting, standpoint: Standpoint, view: View, decision: Decision) -> Decision:
    """Spot that is at risk is left while it lasts for spot of about the same price: the way there
    costs no time then.

    It is not left for on-demand: the time for that is kept free all along, and the gang may not be
    taken at all.
    """
    stays = decision.mode is Mode.SPOT and decision.market == view.market
    if not standpoint.at_risk or not standpoint.works or view.mode is not Mode.SPOT or not stays:
        return decision
    most = _spot_cost(setting, view, view.market) * _ABOUT
    costs = {
        i: _spot_cost(setting, view, i)
        for i, quote in enumerate(view.quotes)
        if quote.up and i != view.market
    }
    best = min(costs, key=costs.__getitem__, default=None)
    if best is None or costs[best] > most:
        return Decision(Mode.SPOT, view.market, decision.again_s, NOT_AHEAD)
    return Decision(Mode.SPOT, best, inf, AHEAD)


def _cheaper(setting: Setting, standpoint: Standpoint, view: View, decision: Decision) -> Decision:
    """On demand that goes on is left for on-demand that is cheaper elsewhere, with the
    checkpoint's way there.
    """
    slack = setting.terms.deadline_s - view.now_s - view.left_s
    goes_on = (
        decision.mode is Mode.ON_DEMAND
        and view.mode is Mode.ON_DEMAND
        and decision.market == view.market
    )
    known = standpoint.current is not None and _index(setting, standpoint.current) == view.market
    if not goes_on or not known or not standpoint.works or slack < setting.terms.overhead_s:
        return decision
    best = _cheapest_fixed(setting, view)
    stay = setting.terms.markets[view.market].on_demand_usd_hr * view.left_s / _HOUR_S
    if best == view.market or _fixed_cost(setting, view, best) > stay * (1 - _WORTH_MOVING):
        return decision
    return Decision(
        Mode.ON_DEMAND, best, inf, "on-demand is cheaper elsewhere, the way there included"
    )


def is_about_as_cheap(task: Task, offer: Offer, other: Offer) -> bool:
    """Whether the whole work on the offer costs about as much as on the other, or less."""
    lengths = run_time_on(task, offer), run_time_on(task, other)
    one = _cost(offer, lengths[0]) if lengths[0] and lengths[1] else offer.rate.micros_per_hour
    two = _cost(other, lengths[1]) if lengths[0] and lengths[1] else other.rate.micros_per_hour
    return one <= two * _ABOUT


def _spot_cost(setting: Setting, view: View, index: int) -> float:
    """Of the rest of the work on this spot, with the way there."""
    hours = (view.left_s + setting.terms.overhead_s) / _HOUR_S
    return view.quotes[index].usd_hr * hours + setting.terms.move(view.market, index)


def _fixed_cost(setting: Setting, view: View, index: int) -> float:
    """Of the rest of the work on demand there, with the way there."""
    hours = (view.left_s + setting.terms.overhead_s) / _HOUR_S
    return setting.terms.markets[index].on_demand_usd_hr * hours + setting.terms.move(
        view.market, index
    )


def _cheapest_fixed(setting: Setting, view: View) -> int:
    return min(range(len(setting.places)), key=lambda index: _fixed_cost(setting, view, index))


def _within_budget(
    setting: Setting, standpoint: Standpoint, view: View, decision: Decision
) -> Decision:
    """On-demand that the budget does not pay for to the end is no way to end in time; spot may
    be one.
    """
    if standpoint.budget_left is None or decision.mode is not Mode.ON_DEMAND:
        return decision
    hours = (view.left_s + setting.terms.overhead_s) / _HOUR_S
    left = standpoint.budget_left.micros / 1e6
    stays = (
        view.mode is Mode.ON_DEMAND and view.market == decision.market
    )  # it pays for no other start
    needed = (view.left_s + view.loading_s) / _HOUR_S if stays else hours
    if setting.terms.markets[decision.market].on_demand_usd_hr * needed <= left:
        return decision
    up = [
        index
        for index, quote in enumerate(view.quotes)
        if quote.up and quote.usd_hr * hours <= left
    ]
    if not up:
        return decision
    best = min(up, key=lambda index: view.quotes[index].usd_hr)
    return Decision(
        Mode.SPOT,
        best,
        inf,
        f"the budget does not pay for on-demand to the end ({decision.reason})",
    )


def _spots(setting: Setting, view: View, market: int) -> tuple[Offer, ...]:
    """The spot that was chosen, and after it what is there for about the same price: the next
    best, or a rival.
    """
    costs = {
        index: _spot_cost(setting, view, index)
        for index, quote in enumerate(view.quotes)
        if quote.up
    }
    most = _spot_cost(setting, view, market) * _ABOUT
    near = sorted(
        (i for i in costs if i not in (market, view.market) and costs[i] <= most),
        key=costs.__getitem__,
    )
    return tuple(spot for i in (market, *near) if (spot := setting.places[i].spot) is not None)


def _advice(setting: Setting, standpoint: Standpoint, view: View, decision: Decision) -> Advice:
    mode, market, again_s, reason = decision
    at = None if again_s == inf else standpoint.submitted_at + timedelta(seconds=again_s)
    if mode is Mode.IDLE:
        return Advice(mode=mode, again_at=at, reason=reason)
    if mode is view.mode and market == view.market:
        return Advice(mode=mode, stay=True, again_at=at, reason=reason)
    if mode is Mode.SPOT:
        return Advice(mode=mode, offers=_spots(setting, view, market), again_at=at, reason=reason)
    order = sorted(
        range(len(setting.places)), key=lambda i: (i != market, _fixed_cost(setting, view, i))
    )
    order = (
        order[:1] if view.mode is Mode.ON_DEMAND else order
    )  # a move is made to where it pays, or not at all
    fixed = [
        place.fixed
        for place in (setting.places[index] for index in order)
        if place.fixed is not None
    ]
    return Advice(mode=mode, offers=tuple(dict.fromkeys(fixed)), again_at=at, reason=reason)
