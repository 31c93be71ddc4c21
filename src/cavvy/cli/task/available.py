"""Finds offers for a task in the catalog and from the configured providers; used by `cavvy
plan`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from shlex import quote

from cavvy.catalog.fit import OfferMatches, names_instance
from cavvy.cli.reach.providers import load_settings
from cavvy.cli.task.market import LiveMarket, ask_market
from cavvy.cli.task.unknown import unknown_names
from cavvy.cli.view.failure import CommandFailure
from cavvy.domain.offers import Offer, Purchase, Readiness, list_sellers
from cavvy.domain.tasks import CheckpointPolicy, Objection, SpotPolicy, TaskSpec
from cavvy.domain.units import Money, format_rate, format_usd
from cavvy.domain.values import Struct, field, replace
from cavvy.planner import shared_hosts
from cavvy.planner.explain import Rejection
from cavvy.planner.objections import (
    explain_misplaced,
    explain_unsuitable,
)
from cavvy.planner.placements import (
    Objective,
    Placement,
    PlanCounts,
    PlanningContext,
    RankingView,
    deadline_of,
)
from cavvy.planner.rank import plan
from cavvy.planner.shortlist import shorten
from cavvy.planner.transfers import group_places
from cavvy.providers import registry
from cavvy.providers.objections import list_makers, list_objections, list_unlisted
from cavvy.scheduler.packing import HostIndex
from cavvy.store.snapshot import CatalogSnapshot
from cavvy.store.snapshot.layout import SnapshotError

# This is more than the number shown, because near misses of providers that can run jobs are shown
# first.
_MISSES = 20


class AvailableOffers(Struct, frozen=True, kw_only=True):
    """The offers that fit one node of the task, and statistics of all examined offers."""

    offers: Sequence[Offer]
    matches: Sequence[OfferMatches]
    refused: Sequence[Rejection]
    live: Sequence[str]  # names of the providers that are configured on this installation
    here: Sequence[Offer]  # the offers in `offers` that come from configured providers
    problems: Sequence[str]  # the reason for each provider that did not answer
    situation: PlanningContext
    readiness: Callable[[Offer], Readiness]
    # for a spot-only task that states its work: the offers for `spot: never`
    fixed: Sequence[Offer] = ()
    others: PlanCounts = PlanCounts()  # fitting offers of the catalog that were not read
    spots: Collection[str] = ()  # the providers of all fitting spot offers
    market: LiveMarket = LiveMarket()  # the answers of the configured providers
    answered: frozenset[str] = frozenset()  # the configured providers that reported offers
    unknown: str = ""  # names in the task that neither the catalog nor a configured provider has


class PlanRequest(Struct, frozen=True, kw_only=True):
    """The part of a plan that is wanted: its order and its first placements."""

    now: datetime
    by: Objective = Objective.COST
    view: RankingView


def gather(
    task: TaskSpec,
    *,
    anywhere: bool,
    output_mib: int | None,
    only: PlanRequest | None = None,
    market: LiveMarket | None = None,
) -> AvailableOffers:
    """Collect offers from the configured providers and, with `anywhere`, from the catalog. With
    `only`, offers of the catalog that cannot be in this part of the plan are only counted. With
    `market`, the providers are not asked again. Raises CommandFailure.
    """
    rival, market = _rival(task), market or ask_market()
    live = _sort_offers(task, market)
    found = _FromCatalog()
    if anywhere:
        found = _ask_catalog(task, market, rival, output_mib, only)
    matches = [*live.matches, found.matches] if found.matches else list(live.matches)
    offers = [*live.fitting, *found.offers]
    fixed = [] if rival is None else list(_sort_offers(rival, market).fitting)
    return AvailableOffers(
        offers=offers,
        matches=matches,
        refused=live.refused,
        live=sorted(market.providers),
        here=live.fitting,
        problems=_list_problems(
            task, market, found.matches is not None and bool(found.matches.matched)
        ),
        situation=PlanningContext(
            output_mib=output_mib, egress=found.egress, notices=_notices(task)
        ),
        readiness=market.make_judge(),
        fixed=[*fixed, *found.fixed],
        answered=frozenset(offer.provider for offer in market.offers),
        unknown=found.unknown,
        others=found.others,
        market=market,
        spots=found.spots | {each.provider for each in offers if each.purchase is Purchase.SPOT},
    )


def _list_problems(task: TaskSpec, market: LiveMarket, from_catalog: bool) -> Sequence[str]:
    """Return why the offers may be incomplete, or were not checked completely. `from_catalog`
    states whether the catalog has fitting offers.
    """
    problems = market.list_problems(task.resources)
    problems += [
        f"the volumes of {name} could not be read: {answer.blind}"
        for name, answer in market.answers.items()
        if answer.blind
    ]
    if from_catalog and task.resources.disk_type is not None:
        problems.append(
            "the catalog has no disk types, so resources.disk.type was not checked for its offers"
        )
    return problems


def _rival(task: TaskSpec) -> TaskSpec | None:
    """Return a copy of the task for on-demand capacity, to compare the costs. Returns None unless
    the task is spot-only and states its work.
    """
    if task.resources.spot is not SpotPolicy.ONLY or task.work is None:
        return None
    return replace(task, resources=replace(task.resources, spot=SpotPolicy.NEVER))


def _notices(task: TaskSpec) -> dict[str, timedelta]:
    """Return the preemption notice of each provider. The result is empty if the task does not state
    the size of its checkpoint.
    """
    from cavvy.catalog.tables import SPOT_NOTICES

    if task.checkpoint is None or task.checkpoint.size_mib is None:
        return {}
    return {
        **SPOT_NOTICES,
        **{each.name: each.notice for each in registry.manifests() if each.notice is not None},
    }


class _LiveOffers(Struct):
    """The offers of configured providers, sorted by whether the task can use them."""

    matches: list[OfferMatches] = field(default_factory=list)
    fitting: list[Offer] = field(default_factory=list)
    refused: list[Rejection] = field(default_factory=list)


def _sort_offers(task: TaskSpec, market: LiveMarket) -> _LiveOffers:
    live, found = _LiveOffers(), market.match(task.resources)
    for name in market.answers:
        _add(live, task, market, name, found[name])
    doubted = [
        offer.key
        for offer in live.fitting
        if offer.key in market.doubts and not names_instance(task.resources, offer)
    ]
    if doubted:
        live.fitting = [offer for offer in live.fitting if offer.key not in doubted]
        reason = market.doubts[doubted[0]]
        live.refused.append(
            Rejection(reason=reason, count=len(doubted), field="resources.instance")
        )
    return live


def _add(
    live: _LiveOffers, task: TaskSpec, market: LiveMarket, name: str, matches: OfferMatches
) -> None:
    """Add a provider's offers to `live`, as fitting offers or as offers that the provider
    refuses.
    """
    answer = market.answers[name]
    # A larger offer of a shared host contains the same devices, so it is counted neither as fitting
    # nor as rejected.
    wanted = shared_hosts.smallest_shares(task, matches.offers, answer.hosts)
    spare = matches.matched - len(wanted)
    live.matches.append(
        replace(matches, offers=wanted, matched=len(wanted), total=matches.total - spare)
    )
    if reasons := list_objections(task, market.providers[name]):
        live.refused += [_reject(name, reasons[0], len(wanted))] if wanted else []
        return
    if shared := [why for offer in wanted if (why := shared_hosts.object_to_share(task, offer))]:
        live.refused.append(Rejection(reason=shared[0], count=len(shared), field="resources.gpu"))
        wanted = [offer for offer in wanted if not shared_hosts.object_to_share(task, offer)]
    index = HostIndex(answer.hosts)
    apart = {
        offer.key: why
        for offer in wanted
        if (why := shared_hosts.object_to_topology(task, offer, index.find(offer), answer.hosts))
    }
    if apart:
        reason = next(iter(apart.values()))
        live.refused.append(Rejection(reason=reason, count=len(apart), field="topology"))
        wanted = [offer for offer in wanted if offer.key not in apart]
    large = [
        offer
        for offer in wanted
        if not offer.shared or shared_hosts.fits_empty(task, offer, answer.hosts)
    ]
    _add_fitting(live, task, name, large, market)
    if small := len(wanted) - len(large):
        reason = (
            f"{name}: not enough free capacity for {task.nodes} of these nodes at the same time"
        )
        live.refused.append(Rejection(reason=reason, count=small, field="nodes"))


def _add_fitting(
    live: _LiveOffers, task: TaskSpec, name: str, offers: Sequence[Offer], market: LiveMarket
) -> None:
    """Add each offer to the fitting or to the rejected offers. An offer fits if the quotas allow
    the offer, its nodes can reach the task's volumes, the number of hosts matches the number of
    nodes, and the task states the options that the offer requires.
    """
    misplaced = partial(
        explain_misplaced,
        volumes=[each for answer in market.answers.values() for each in answer.volumes],
        blind=market.list_blind(),
        unlisted=list_unlisted(market.providers),
        makers=list_makers(market.providers),
    )
    rejected = {
        offer.key: objection
        for offer in offers
        if (objection := misplaced(task, offer) or explain_unsuitable(task, offer))
    }
    live.fitting += [offer for offer in offers if offer.key not in rejected]
    for objection, count in Counter(rejected.values()).items():
        live.refused.append(_reject(name, objection, count))


def _reject(provider: str, objection: Objection, count: int) -> Rejection:
    return Rejection(reason=f"{provider}: {objection.reason}", count=count, field=objection.field)


class _FromCatalog(Struct, frozen=True, kw_only=True):
    """What the catalog has for a task; the fields are those of `AvailableOffers`."""

    matches: OfferMatches | None = None
    offers: Sequence[Offer] = ()
    fixed: Sequence[Offer] = ()
    egress: Mapping[str, Money] = field(default_factory=dict)
    unknown: str = ""
    others: PlanCounts = PlanCounts()
    spots: frozenset[str] = frozenset()


def _ask_catalog(
    task: TaskSpec,
    market: LiveMarket,
    rival: TaskSpec | None,
    output_mib: int | None,
    only: PlanRequest | None,
) -> _FromCatalog:
    try:
        with CatalogSnapshot.open() as snapshot:
            egress = snapshot.egress()
            stays = (
                market.complete(snapshot.match(rival.resources)).offers if rival is not None else ()
            )
            if only is None or not _is_short(task, only, rival):
                known = market.complete(snapshot.match(task.resources, misses=_MISSES))
                found = _FromCatalog(matches=known, offers=known.offers)
            else:
                situation = PlanningContext(output_mib=output_mib, egress=egress)
                found = _read_best(snapshot, task, market, situation, only)
            matched = found.matches is not None and found.matches.matched
            unknown = (
                ""
                if matched
                else unknown_names(snapshot, task.resources, market.providers, market.offers)
            )
            return replace(found, egress=egress, fixed=stays, unknown=unknown)
    except SnapshotError as error:
        raise CommandFailure(str(error), "--here does not use the catalog") from error


def _is_short(task: TaskSpec, only: PlanRequest, rival: TaskSpec | None) -> bool:
    """Return whether the first offers of the plan are enough. A forecast of a task with a deadline
    that may use spot, and the comparison of spot with on-demand, need all offers.
    """
    foreseen = task.resources.spot is SpotPolicy.AUTO and deadline_of(task, only.now) is not None
    return rival is None and not foreseen


def _read_best(
    snapshot: CatalogSnapshot,
    task: TaskSpec,
    market: LiveMarket,
    situation: PlanningContext,
    only: PlanRequest,
) -> _FromCatalog:
    """Read the offers of the catalog that can be in this part of the plan, and count the others."""
    group = group_places(task, situation.egress, sends=situation.output_mib is not None)
    found = snapshot.match_lots(task.resources, misses=_MISSES, skip=market.usable, group=group)
    lots, others = shorten(
        task, found.lots, now=only.now, by=only.by, situation=situation, view=only.view
    )
    return _FromCatalog(
        matches=found.found,
        offers=snapshot.read_lots(found, lots),
        others=others,
        spots=frozenset(
            lot.sample.provider for lot in found.lots if lot.sample.purchase is Purchase.SPOT
        ),
    )


def advise_spot(
    task: TaskSpec,
    best: Placement | None,
    now: datetime,
    *,
    anywhere: bool = True,
    output_mib: int | None = None,
    market: LiveMarket | None = None,
) -> str:
    """Return what the task would cost on spot with checkpoints, and what to write for it: its total
    or, if the task states no work and has an accelerator, the price of an hour. Returns "" if this
    saves nothing, or if the task has both. `best` is the first placement of the task's plan.
    """
    saves, spot = task.checkpoint is not None, task.resources.spot is not SpotPolicy.NEVER
    if best is None or task.service is not None or (saves and spot):
        return ""
    if not best.rate.micros_per_hour or (best.cost is None and not task.resources.accelerators):
        return ""
    other = replace(
        task,
        checkpoint=task.checkpoint or CheckpointPolicy(path="checkpoints"),
        resources=replace(task.resources, spot=SpotPolicy.AUTO),
    )
    only = PlanRequest(now=now, view=RankingView(limit=1))
    offered = gather(other, anywhere=anywhere, output_mib=output_mib, only=only, market=market)
    made = plan(
        other,
        offered.offers,
        now=now,
        situation=offered.situation,
        view=only.view,
        others=offered.others,
    )
    first = next(iter(made.placements), None)
    prices = None if first is None else _compare_prices(first, best)
    if first is None or prices is None:
        return ""
    changes = ["`checkpoint: {path: checkpoints}` (a folder where the task saves its state)"]
    changes = [] if saves else changes
    changes += [] if spot else ["`spot: auto` under `resources`"]
    return (
        f"with {' and '.join(changes)}, {prices}, on {first.offer.purchase} at "
        f"{first.offer.provider} ({first.offer.instance_type})"
    )


def _compare_prices(first: Placement, best: Placement) -> str | None:
    """Say how much less `first` costs than `best`; returns None if it does not cost less."""
    if first.cost is not None and best.cost is not None:
        less, cost, old = first.cost < best.cost, format_usd(first.cost), format_usd(best.cost)
        return f"the expected total is {cost} instead of {old}" if less else None
    if first.rate >= best.rate:
        return None
    return f"the price is {format_rate(first.rate)} instead of {format_rate(best.rate)}"


def suggest_offer(task: TaskSpec, file: str, *, is_file: bool = True) -> str:
    """Return a hint for a task that no configured provider can run. The hint names the cheapest
    offer of a provider that can be set up, and the command that sets it up. `is_file` is false if
    `file` is a command or standard input instead of a task file.
    """
    installed = registry.list_known()
    wanted, driven = task.resources.choices, list[Offer]()
    try:
        with CatalogSnapshot.open() as snapshot:
            fits = any(snapshot.match(need, limit=1, misses=0).matched for need in wanted)
            unknown = ["" if fits else unknown_names(snapshot, need, installed) for need in wanted]
            for need in wanted:
                names = [name for name in installed if name in (need.providers or installed)]
                able = replace(need, providers=tuple(names))
                driven += snapshot.match(able, limit=1, misses=0).offers if names else ()
    except SnapshotError:
        fits, unknown = False, []
    if any(unknown):
        return "\n".join(filter(None, unknown))
    if driven:
        return _say_set_up(min(driven, key=lambda offer: offer.rate.micros_per_hour))
    named, configured = (
        {each for need in wanted for each in list_sellers(need.providers)},
        load_settings(),
    )
    missing = sorted(named & {*installed} - {*configured.providers})
    if missing and not fits:
        setups = ", ".join(f"`cavvy setup {each}`" for each in missing)
        return f"{', '.join(missing)}: not configured; {setups} sets it up"
    plan = f"`cavvy plan {file}`" if is_file else "`cavvy plan` with the same arguments"
    return (
        f"no provider that Cavvy can use has such an offer; {plan} compares the prices of "
        "providers that have one, and `cavvy setup PROVIDER` sets one up"
        if fits
        else f"{plan} shows the nearest misses"
    )


def _say_set_up(offer: Offer) -> str:
    """Return a sentence that describes the offer and gives the command that sets up its
    provider.
    """
    name, known = offer.provider, load_settings()
    where = f"{offer.instance_type} at {name} ({offer.region}) for {format_rate(offer.rate)}"
    start = f"the cheapest offer of a provider that you can set up is {where}"
    if name in known.providers:
        return f"{start}; `cavvy check {name}` shows why the provider cannot be used"
    settings = registry.manifest_of(registry.list_known()[name]).settings
    regions = any(setting.name == "regions" for setting in settings)
    where = f" --set regions={quote(offer.region)}" if regions else ""
    return f"{start}: cavvy setup {name}{where}"
