"""The one place where offers of the catalog and current offers of the configured providers meet.
`cavvy offers`, `plan` and `run` use it, and what the server has observed of spot markets, with
forecasts of the cost of tasks with a deadline.

A provider that answers replaces the catalog for the regions of its offers. The catalog's offers
with a commitment stay, because providers report none.
"""

from typing import TYPE_CHECKING

from cavvy.cli.reach.providers import ASK_TIMEOUT_S, SILENT, load_providers
from cavvy.domain.offers import Purchase, list_sellers
from cavvy.domain.values import Struct, field, replace

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from datetime import datetime

    from cavvy.catalog.fit import OfferMatches
    from cavvy.client.wire import MarketListing
    from cavvy.domain.allocations import Host, VolumeLocation
    from cavvy.domain.offers import Offer, Readiness
    from cavvy.domain.tasks import ResourceSpec, TaskSpec
    from cavvy.domain.units import Money
    from cavvy.planner.deadline.forecast import Forecast
    from cavvy.planner.markets import MarketKnowledge
    from cavvy.providers.base import Provider
    from cavvy.store.snapshot import CatalogSnapshot


class ProviderAnswer(Struct, frozen=True):
    offers: "Sequence[Offer]"
    hosts: "Sequence[Host]"
    volumes: "Sequence[VolumeLocation]" = ()
    blind: str = ""  # why the provider's volumes cannot be located
    # clusters, regions or hosts of the provider that did not answer, with the reason
    silent: "Sequence[str]" = ()
    problem: str = ""  # why the provider cannot be used, as `cavvy check` shows it


class LiveMarket(Struct, frozen=True, kw_only=True):
    """The answers of the configured providers, by provider."""

    providers: "Mapping[str, Provider]" = field(
        default_factory=dict
    )  # the providers that were asked
    answers: "Mapping[str, ProviderAnswer]" = field(default_factory=dict)
    silent: "Mapping[str, str]" = field(default_factory=dict)  # why each other provider is missing
    usable: "frozenset[tuple[str, str]]" = frozenset()  # see `judge_readiness`
    failing: "frozenset[str]" = frozenset()  # see `judge_readiness`
    # why the price, memory or number of accelerators of an offer is probably wrong, by its key
    doubts: "Mapping[str, str]" = field(default_factory=dict)

    @property
    def offers(self) -> "Sequence[Offer]":
        return [offer for answer in self.answers.values() for offer in answer.offers]

    def match(self, need: "ResourceSpec", *, ready: bool = False) -> "dict[str, OfferMatches]":
        """Match each provider's offers, or only those that a job can use now."""
        from cavvy.catalog.fit import match_offers, names_instance

        def is_wanted(offer: "Offer") -> bool:
            doubted = offer.key in self.doubts and not names_instance(need, offer)
            usable = self.failing.isdisjoint((offer.provider, offer.key)) and not doubted
            return not ready or usable

        return {
            name: match_offers(filter(is_wanted, answer.offers), need)
            for name, answer in self.answers.items()
        }

    def complete(self, found: "OfferMatches") -> "OfferMatches":
        """Return the catalog's matches without the offers that providers themselves report."""

        def is_replaced(offer: "Offer") -> bool:
            answered = (offer.provider, offer.region) in self.usable
            return answered and offer.purchase is not Purchase.RESERVED

        offers = [each for each in found.offers if not is_replaced(each)]
        spare = len(found.offers) - len(offers)
        return replace(
            found, offers=offers, matched=found.matched - spare, total=found.total - spare
        )

    def list_problems(self, need: "ResourceSpec") -> list[str]:
        """Return a message for each provider whose answer is missing or incomplete."""
        missing = [_say_unanswered(name, why) for name, why in self.silent.items()]
        partly = [_list_problems(name, answer, need) for name, answer in self.answers.items()]
        return missing + [problem for each in partly for problem in each]

    def list_blind(self) -> "Collection[str]":
        """Return the providers that did not report the locations of their volumes."""
        from cavvy.providers.abilities import HOLDS_VOLUMES, ability

        silent = {name for name in self.silent if ability(self.providers[name], HOLDS_VOLUMES)}
        return silent | {name for name, answer in self.answers.items() if answer.blind}

    def make_judge(self) -> "Callable[[Offer], Readiness]":
        """Return the function that judges whether a job can run on an offer."""
        from functools import partial

        from cavvy.providers.installed import judge_readiness, list_known

        return partial(
            judge_readiness,
            usable=self.usable,
            installed=list_known(),
            failing=self.failing | self.doubts.keys(),
        )


def ask_market(names: "Collection[str] | None" = None) -> LiveMarket:
    """Ask the configured providers, or only the providers in `names`, for their current offers.
    Raises CommandFailure.
    """
    providers = load_providers(names)
    if not providers:
        return LiveMarket()
    import asyncio

    answers, silent = dict[str, ProviderAnswer](), dict[str, str]()
    usable, failing = set[tuple[str, str]](), set[str]()
    for name, answer in asyncio.run(_ask_all(providers)).items():
        if isinstance(answer, str):
            silent[name] = answer
            failing.add(name)
        else:
            answers[name] = answer
            usable |= _list_usable(providers[name], answer)
            failing |= _list_failing(name, answer)
    return LiveMarket(
        providers=providers,
        answers=answers,
        silent=silent,
        usable=frozenset(usable),
        failing=frozenset(failing),
        doubts=find_doubts(
            offer
            for name, answer in answers.items()
            if not providers[name].manifest.test_double
            for offer in answer.offers
        ),
    )


def find_doubts(offers: "Iterable[Offer]") -> "Mapping[str, str]":
    """Return why offers are in doubt, compared with the catalog. Own machines, which are not, need
    no catalog."""
    from cavvy.store.snapshot import CatalogSnapshot
    from cavvy.store.snapshot.layout import SnapshotError

    rented = [each for each in offers if each.accelerator and not each.owned and not each.shared]
    if not rented:
        return {}
    try:
        with CatalogSnapshot.open() as snapshot:
            judge = snapshot.make_judge()
    except SnapshotError:
        return {}  # the server trusts all offers then, too
    return {offer.key: doubt for offer in rented if (doubt := judge.doubt(offer))}


def merge(found: "Iterable[OfferMatches]") -> "OfferMatches":
    """Return all matches together, the cheapest first."""
    from collections import Counter

    from cavvy.catalog.fit import OfferMatches

    parts = list(found)
    return OfferMatches(
        offers=sorted(
            (offer for each in parts for offer in each.offers),
            key=lambda offer: offer.rate.micros_per_hour,
        ),
        matched=sum(each.matched for each in parts),
        total=sum(each.total for each in parts),
        rejected=sum((Counter(each.rejected) for each in parts), Counter()),
    )


def _list_usable(provider: "Provider", answer: ProviderAnswer) -> set[tuple[str, str]]:
    """Return the regions of the provider's offers. Returns no regions if the provider cannot run
    even a minimal task.
    """
    from cavvy.providers.objections import refuses_all

    if refuses_all(provider):
        return set()
    return {(offer.provider, offer.region) for offer in answer.offers}


def _say_unanswered(name: str, why: str) -> str:
    return f"{name} could not be queried: {why}; `cavvy check {name}` shows more"


def _list_failing(name: str, answer: ProviderAnswer) -> set[str]:
    """Return the provider's name if `cavvy check` reports that the provider cannot be used.
    Otherwise return the keys of the offers whose hosts are all unable to accept work.
    """
    from cavvy.scheduler.packing import HostIndex

    if answer.problem:
        return {name}
    if all(host.ready for host in answer.hosts):
        return set()
    index = HostIndex(answer.hosts)
    pairs = [(offer, index.find(offer)) for offer in answer.offers if offer.shared]
    return {offer.key for offer, hosts in pairs if hosts and not any(each.ready for each in hosts)}


def _list_problems(name: str, answer: ProviderAnswer, need: "ResourceSpec") -> list[str]:
    """Return messages about the provider, or the parts, hosts or requested accelerators of it, that
    cannot be used.
    """
    from cavvy.planner.candidates import list_omissions

    hint = f"`cavvy check {name}` shows more"
    if answer.problem:
        return [f"{name} cannot be used: {answer.problem}; {hint}"]
    hosts = [f"{host.name} cannot be used: {host.problem}; {hint}" for host in answer.hosts]
    failing = [text for host, text in zip(answer.hosts, hosts, strict=True) if not host.ready]
    omitted = [f"{each}; {hint}" for each in list_omissions(need, answer.hosts)]
    silent = [f"{name} answered only partly: {each}" for each in answer.silent]
    return [*silent, *failing, *omitted]


async def _ask_all(providers: "Mapping[str, Provider]") -> dict[str, ProviderAnswer | str]:
    """Return the answer of each provider, or the reason why it did not answer."""
    import asyncio

    answers = await asyncio.gather(*(_ask(provider) for provider in providers.values()))
    return dict(zip(providers, answers, strict=True))


async def _ask(provider: "Provider") -> ProviderAnswer | str:
    import asyncio

    from cavvy.providers.abilities import CLOSEABLE, HAS_PARTS, SHARES_HOSTS, ability
    from cavvy.providers.base import ProviderError

    shares, parts = ability(provider, SHARES_HOSTS), ability(provider, HAS_PARTS)
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            hosts = await shares.hosts() if shares else ()
            offers, problem = await asyncio.gather(provider.offers(), _find_problem(provider))
        silent = parts.silent() if parts else ()
        answer = ProviderAnswer(offers=offers, hosts=hosts, silent=silent, problem=problem)
        return await _with_volumes(provider, answer)
    except TimeoutError:
        return SILENT
    except ProviderError as error:
        return str(error)
    finally:
        if closeable := ability(provider, CLOSEABLE):
            await closeable.close()


async def _find_problem(provider: "Provider") -> str:
    """Return why the provider cannot be used although it reports offers, as `cavvy check` does, or
    "" if it can be used.
    """
    from cavvy.providers.abilities import WHO_AM_I, ability
    from cavvy.providers.base import ProviderError
    from cavvy.providers.objections import refuses_all

    if refusal := refuses_all(provider):
        return refusal
    identity = ability(provider, WHO_AM_I)
    if identity is None:
        return ""
    try:
        await identity.whoami()
    except ProviderError as error:
        return str(error)
    return ""


async def _with_volumes(provider: "Provider", answer: ProviderAnswer) -> ProviderAnswer:
    """Return the provider's answer, extended by the provider's volumes. If the volumes cannot be
    read, only tasks without volumes fit.
    """
    import asyncio

    from cavvy.providers.abilities import HOLDS_VOLUMES, ability
    from cavvy.providers.base import ProviderError

    holder = ability(provider, HOLDS_VOLUMES)
    if holder is None:
        return answer
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            return replace(answer, volumes=await holder.volumes())
    except TimeoutError:
        return replace(answer, blind=SILENT)
    except ProviderError as error:
        return replace(answer, blind=str(error))


def list_offers(need: "ResourceSpec") -> "Sequence[Offer]":
    """Return the matching offers of the catalog, also those with a commitment, and of the
    configured providers, the cheapest first. Raises CommandFailure.
    """

    from cavvy.catalog.fit import PURCHASES
    from cavvy.cli.view.failure import CommandFailure, note_out
    from cavvy.store.snapshot import CatalogSnapshot
    from cavvy.store.snapshot.layout import SnapshotError

    try:
        with CatalogSnapshot.open() as snapshot:
            purchases = (*PURCHASES[need.spot], Purchase.RESERVED)
            listed = snapshot.match(need, misses=0, purchases=purchases)
            names = {provider for provider, _, _ in snapshot.regions()}
    except SnapshotError as error:
        raise CommandFailure(str(error)) from error
    market = ask_market(list_sellers(need.providers) or names)
    for problem in market.list_problems(need):
        note_out(problem)
    own = [*market.match(need).values()] if market.answers else []
    return merge([market.complete(listed), *own]).offers


_TIMEOUT_S = (
    5.0  # maximum seconds for one answer; if there is no answer, the plan uses no observations
)
# number of markets in a forecast, the cheapest first; more would take seconds and change the result
# little
_MARKETS = 3


def seen_here() -> "dict[str, MarketListing]":
    """Return the observations of the offers that this installation used, by offer key. The result
    is empty if no server runs.
    """
    from cavvy.client.contexts import may_have_server
    from cavvy.client.errors import ApiError
    from cavvy.client.state import default_home

    try:
        if not may_have_server(default_home()):
            return {}
        from cavvy.cli.reach.session import make_patience
        from cavvy.client import connect

        with connect(start=False, timeout_s=_TIMEOUT_S, patience=make_patience(0)) as client:
            return {row.market: row for row in client.markets()}
    except (ApiError, OSError):
        return {}


def describe_seen(seen: "Sequence[MarketListing]") -> str | None:
    """Return a summary such as "granted 9 of 12 launches, reclaimed 3 times in 41.0 h, boots
    in 95 s", or None.
    """
    if not seen:
        return None
    granted, refused = sum(row.granted for row in seen), sum(row.refused for row in seen)
    parts = [f"granted {granted} of {granted + refused} launches"]
    if any(row.lives for row in seen):
        hours = sum(row.node_hours for row in seen)
        parts.append(f"reclaimed {sum(row.taken for row in seen)} times in {hours:.1f} h")
    if boots := sum(row.boots for row in seen):
        parts.append(f"boots in {sum(row.boots * row.boot_s for row in seen) / boots:.0f} s")
    return ", ".join(parts)


def tell_forecast(
    task: "TaskSpec", offers: "Sequence[Offer]", now: "datetime", egress: "Mapping[str, Money]"
) -> "Sequence[Forecast]":
    """Return one forecast for each value of `resources.spot` and, for an elastic task, for its
    least and most nodes and one number between them. The result is empty if the task has no
    deadline or the deadline policy cannot be used.
    """
    from cavvy.planner.placements import deadline_of

    deadline = deadline_of(task, now)
    if deadline is None:
        return ()
    from cavvy.planner.deadline.forecast import KINDS, foresee
    from cavvy.planner.deadline.inputs import JobProgress, find_inputs

    knowledge = _knowledge(seen_here())
    progress = JobProgress(submitted_at=now, deadline=deadline, egress=egress)
    sizes, found = task.elastic, []
    for nodes in (task.nodes,) if sizes is None else sizes.list_samples():
        # of several sizes, those that cannot be in time are shown as such
        each, floor = replace(task, nodes=nodes), sizes is None
        inputs = find_inputs(each, offers, knowledge, progress, floor=floor, most=_MARKETS)
        if inputs is not None:
            found += [foresee(inputs, knowledge, progress, 0.0, kind) for kind in KINDS]
    return found


def _knowledge(rows: "dict[str, MarketListing]") -> "MarketKnowledge":
    from cavvy.domain.markets import Observation, ObservationKind
    from cavvy.domain.units import HourlyRate
    from cavvy.planner.markets import MarketKnowledge, MarketRecord

    standings = {
        key: MarketRecord(
            market=key,
            granted=row.granted,
            refused=row.refused,
            refused_at=row.refused_at,
            boots=row.boots,
            boot_s=row.boot_s * row.boots,
            lives=row.lives,
            taken=row.taken,
            failed=row.failed,
            node_hours=row.node_hours,
        )
        for key, row in rows.items()
    }
    recent = {
        key: [
            Observation(
                market=key,
                kind=ObservationKind(seen.kind),
                at=seen.at,
                seconds=seen.seconds,
                rate=None
                if seen.rate_micros_per_hour is None
                else HourlyRate(seen.rate_micros_per_hour),
            )
            for seen in row.recent
        ]
        for key, row in rows.items()
    }
    return MarketKnowledge(standings=standings, recent=recent)


def list_lacking_prices(
    snapshot: "CatalogSnapshot", wanted: "Collection[Purchase]", providers: "Collection[str]"
) -> list[str]:
    """Return how many types of each of these providers (all if empty) have no price for a wanted
    purchase option in the catalog, and why."""
    from cavvy.catalog.tables import list_unlisted_reasons

    missing = snapshot.unpriced() if wanted else {}
    return [
        f"{provider}: {missing[provider, purchase][0]} of {missing[provider, purchase][1]} "
        f"accelerated instance types have no {purchase} price in the catalog: {reason}"
        for (provider, purchase), reason in list_unlisted_reasons().items()
        if purchase in wanted and (provider, purchase) in missing
        if not providers or provider in providers
    ]
