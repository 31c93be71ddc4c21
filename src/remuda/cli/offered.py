"""What can be had for a task: the shipped catalog and what the configured providers offer now; used by plan."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from remuda.catalog.fit import match_offers
from remuda.catalog.query import Matches
from remuda.cli.session import Failure
from remuda.domain.offers import Offer
from remuda.domain.tasks import Task
from remuda.planner.explain import Rejection
from remuda.planner.placements import Situation

if TYPE_CHECKING:
    from remuda.domain.units import Money
    from remuda.providers.base import Provider

ASK_TIMEOUT_S = 30  # for each provider


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """Offers that fit one node of the task, and an account of all that were looked at."""

    offers: Sequence[Offer]
    matches: Sequence[Matches]
    refused: Sequence[Rejection]
    live: Sequence[str]  # providers that are configured here
    problems: Sequence[str]  # who could not be asked, and why
    situation: Situation


def gather(task: Task, *, anywhere: bool, output_mib: int | None) -> Offered:
    """Ask the configured providers and, with `anywhere`, the catalog. Raises Failure."""
    live = _ask_providers(task)
    matches, egress = list(live.matches), dict[str, "Money"]()
    if anywhere:
        known, egress = _ask_catalog(task)
        matches.append(known)
    return Offered(
        offers=[offer for offer in (*live.fitting, *(matches[-1].offers if anywhere else ()))],
        matches=matches,
        refused=live.refused,
        live=live.names,
        problems=live.problems,
        situation=Situation(output_mib=output_mib, egress=egress),
    )


@dataclass(slots=True)
class _Live:
    names: list[str]
    matches: list[Matches]
    fitting: list[Offer]
    refused: list[Rejection]
    problems: list[str]


def _ask_providers(task: Task) -> _Live:
    from remuda import settings
    from remuda.providers import registry
    from remuda.providers.base import ProviderError

    live = _Live([], [], [], [], [])
    try:
        known = settings.load()
        # Only offers are asked for; nothing that a provider starts could carry this installation's name.
        providers = registry.load(known.providers, installation="plan", home=known.home / "providers")
    except settings.SettingsError as error:
        raise Failure(error.message, error.hint, exit_code=2) from error
    except ProviderError as error:
        raise Failure(str(error), "`remuda check` says what each provider needs", exit_code=2) from error
    live.names = sorted(providers)
    for name, answer in asyncio.run(_ask_all(providers)).items():
        if isinstance(answer, str):
            live.problems.append(f"{name} could not be asked: {answer}")
            continue
        matches = match_offers(answer, task.resources)
        live.matches.append(matches)
        reasons = _refusals(providers[name], task)
        if reasons and matches.matched:
            field = reasons[0].partition(":")[0]
            live.refused.append(Rejection(reason=f"{name} cannot: {reasons[0]}", count=matches.matched, field=field))
        else:
            live.fitting += matches.offers
    return live


async def _ask_all(providers: Mapping[str, "Provider"]) -> dict[str, Sequence[Offer] | str]:
    """Each provider's offers, or why there are none."""
    answers = await asyncio.gather(*(_ask(provider) for provider in providers.values()))
    return dict(zip(providers, answers, strict=True))


async def _ask(provider: "Provider") -> Sequence[Offer] | str:
    from remuda.providers.base import Closes, ProviderError

    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            return await provider.offers()
    except TimeoutError:
        return f"no answer within {ASK_TIMEOUT_S} s"
    except ProviderError as error:
        return str(error)
    finally:
        if isinstance(provider, Closes):
            await provider.close()


def _refusals(provider: "Provider", task: Task) -> list[str]:
    """What the provider cannot honour of the task, each as "field: reason"."""
    from remuda.providers.base import ChecksTasks
    from remuda.spec.honoured import refusals

    lacks = {str(feature): reason for feature, reason in provider.manifest.lacks.items()}
    own = provider.check(task) if isinstance(provider, ChecksTasks) else ()
    return [*refusals(task, lacks), *own]


def _ask_catalog(task: Task) -> tuple[Matches, dict[str, "Money"]]:
    from remuda.store.snapshot import Snapshot

    with Snapshot.open() as snapshot:
        return snapshot.match(task.resources), {}
