"""Asks the configured providers for their offers; used by `cavvy offers` and `cavvy plan`."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from cavvy.catalog.fit import match_offers
from cavvy.catalog.query import OfferMatches
from cavvy.cli.reach.providers import ASK_TIMEOUT_S, SILENT, load_providers
from cavvy.domain.allocations import Host, VolumeLocation
from cavvy.domain.offers import Offer, Readiness
from cavvy.domain.tasks import ResourceSpec
from cavvy.domain.values import Struct, replace
from cavvy.planner.candidates import list_omissions
from cavvy.providers import registry
from cavvy.providers.abilities import (
    CLOSEABLE,
    HAS_PARTS,
    HOLDS_VOLUMES,
    SHARES_HOSTS,
    WHO_AM_I,
    ability,
)
from cavvy.providers.base import Provider, ProviderError
from cavvy.providers.objections import refuses_all
from cavvy.scheduler.packing import hosts_of


class ProviderAnswer(Struct, frozen=True):
    offers: Sequence[Offer]
    hosts: Sequence[Host]
    volumes: Sequence[VolumeLocation] = ()
    blind: str = ""  # why the provider's volumes cannot be located
    silent: Sequence[
        str
    ] = ()  # clusters, regions or hosts of the provider that did not answer, with the reason
    problem: str = ""  # why the provider cannot be used, as `cavvy check` shows it


class LiveMatches(Struct, frozen=True, kw_only=True):
    """The current offers that match the filters, from the configured providers."""

    matches: Mapping[str, OfferMatches]  # keyed by provider
    offers: Sequence[Offer]  # number of all offers, including those that do not match
    problems: Sequence[str]  # one message for each provider whose answer is missing or incomplete
    readiness: Callable[[Offer], Readiness]


def match_configured(
    need: ResourceSpec, names: Collection[str] | None, *, ready: bool = False
) -> LiveMatches:
    """Query the configured providers, or only the providers in `names`. If `ready` is set, only
    offers that can be used match. Raises CommandFailure.
    """
    providers = load_providers(names)
    matches, problems = dict[str, OfferMatches](), list[str]()
    usable, failing = set[tuple[str, str]](), set[str]()
    offers: list[Offer] = []
    for name, answer in asyncio.run(ask_all(providers)).items():
        if isinstance(answer, str):
            problems.append(say_unanswered(name, answer))
            failing.add(name)
        else:
            problems += [*list_problems(name, answer, need)]
            offers += answer.offers
            fails = list_failing(name, answer)
            some = [each for each in answer.offers if not (fails & {name, each.key})]
            matches[name] = match_offers(some if ready else answer.offers, need)
            usable |= list_usable(providers[name], answer)
            failing |= fails
    readiness = make_judge(usable, failing)
    return LiveMatches(matches=matches, offers=offers, problems=problems, readiness=readiness)


def list_usable(provider: Provider, answer: ProviderAnswer) -> set[tuple[str, str]]:
    """Return the regions of the provider's offers. Returns no regions if the provider cannot run
    even a minimal task.
    """
    if refuses_all(provider):
        return set()
    return {(offer.provider, offer.region) for offer in answer.offers}


def say_unanswered(name: str, why: str) -> str:
    return f"{name} could not be queried: {why}; `cavvy check {name}` shows more"


def list_failing(name: str, answer: ProviderAnswer) -> set[str]:
    """Return the provider's name if `cavvy check` reports that the provider cannot be used.
    Otherwise return the keys of the offers whose hosts are all unable to accept work.
    """
    if answer.problem:
        return {name}
    if all(host.ready for host in answer.hosts):
        return set()
    pairs = [(offer, hosts_of(offer, answer.hosts)) for offer in answer.offers if offer.shared]
    return {offer.key for offer, hosts in pairs if hosts and not any(each.ready for each in hosts)}


def list_problems(name: str, answer: ProviderAnswer, need: ResourceSpec) -> Sequence[str]:
    """Return messages about the provider, or the parts, hosts or requested accelerators of it, that
    cannot be used.
    """
    hint = f"`cavvy check {name}` shows more"
    if answer.problem:
        return [f"{name} cannot be used: {answer.problem}; {hint}"]
    hosts = [f"{host.name} cannot be used: {host.problem}; {hint}" for host in answer.hosts]
    failing = [text for host, text in zip(answer.hosts, hosts, strict=True) if not host.ready]
    omitted = [f"{each}; {hint}" for each in list_omissions(need, answer.hosts)]
    silent = [f"{name} answered only partly: {each}" for each in answer.silent]
    return [*silent, *failing, *omitted]


def make_judge(
    usable: Collection[tuple[str, str]], failing: Collection[str]
) -> Callable[[Offer], Readiness]:
    return partial(
        registry.judge_readiness, usable=usable, installed=registry.list_known(), failing=failing
    )


async def ask_all(providers: Mapping[str, Provider]) -> dict[str, ProviderAnswer | str]:
    """Return the answer of each provider, or the reason why it did not answer."""
    answers = await asyncio.gather(*(_ask(provider) for provider in providers.values()))
    return dict(zip(providers, answers, strict=True))


async def _ask(provider: Provider) -> ProviderAnswer | str:
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


async def _find_problem(provider: Provider) -> str:
    """Return why the provider cannot be used although it reports offers, as `cavvy check` does, or
    "" if it can be used.
    """
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


async def _with_volumes(provider: Provider, answer: ProviderAnswer) -> ProviderAnswer:
    """Return the provider's answer, extended by the provider's volumes. If the volumes cannot be
    read, only tasks without volumes fit.
    """
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
