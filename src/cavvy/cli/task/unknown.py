"""Finds unknown names of providers, regions, instance types and options and suggests known names.
`cavvy offers`, `plan` and `run` use this module.
"""

from typing import TYPE_CHECKING

from cavvy.domain.offers import list_sellers

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterable, Iterator

    from cavvy.domain.offers import Offer
    from cavvy.domain.tasks import ProviderOptions, ResourceSpec
    from cavvy.store.snapshot import CatalogSnapshot

# What the message suggests if no known name is similar.
_LISTS = {
    "provider": "`cavvy check` lists the providers",
    "region": "`cavvy offers -o wide` lists regions",
    "instance type": "`cavvy offers` lists instance types",
}
# how much a name resembles a known one, from 0 to 1, if it is probably misspelt
_TYPO = 0.85
# function platforms that have no GPUs, with the page that lists what a function may have; Lambda's
# has memory, and CPUs in proportion to it (read 2026-11-24)
_WITHOUT_GPUS = {
    "aws-lambda": "https://docs.aws.amazon.com/lambda/latest/dg/gettingstarted-limits.html"
}

# Kubernetes services of clouds, with the command that adds a cluster to the kubeconfig
_CLUSTERS = {
    "gke": "gcloud container clusters get-credentials CLUSTER",
    "aks": "az aks get-credentials --resource-group GROUP --name CLUSTER",
    "eks": "aws eks update-kubeconfig --name CLUSTER",
    "coreweave": "CoreWeave's console, as a file to download",
}


def explain_cluster(name: str) -> str:
    """Return how to use a Kubernetes service whose name stands for a provider, or "" for other
    names."""
    command = _CLUSTERS.get(name.lower())
    if command is None:
        return ""
    source = command if " as a file" in command else f"`{command}`"
    return (
        f"clusters of {name.lower()} are used by the provider kubernetes: add the cluster to your "
        f"kubeconfig ({source}) and enable [providers.kubernetes]; `cavvy check {name.lower()}` "
        "then shows its machines with their prices"
    )


def unknown_names(
    snapshot: "CatalogSnapshot",
    need: "ResourceSpec",
    providers: "Iterable[str]" = (),
    live: "Collection[Offer]" = (),
) -> str:
    """Return one line for each unknown name in `need`, with a suggestion.

    `providers` are names of configured providers that the catalog lacks. `live` are offers that the
    catalog lacks, such as the offers of this machine.
    """
    from difflib import get_close_matches

    from cavvy.catalog.tables import find_retired

    lines = []
    retired = find_retired(need.instance) if need.instance else None
    if retired:
        lines.append(f"{retired.instance_type} is retired; its successor is {retired.successor}.")
    for what, name, known in _list_named(snapshot, need, providers, live):
        if (what == "instance type" and retired) or name.lower() in {
            each.lower() for each in known
        }:
            continue
        if what == "provider" and name in _WITHOUT_GPUS:
            lines.append(_explain_functions(name))
            continue
        if what == "provider" and (explained := explain_cluster(name)):
            if not list_sellers((name.lower(),)) & {*providers, *(each.provider for each in live)}:
                lines.append(f"{explained}.")
            continue
        if what == "provider" and _is_installed(name):
            lines.append(_explain_unlisted(name))
            continue
        if what == "region" and (silent := list_silent(snapshot, need, live)):
            lines += [_explain_unlisted(each) for each in silent]
            continue
        close = get_close_matches(name, known, n=1)
        lines.append(
            f"the catalog has no {what} {name!r}; "
            + (f"did you mean {close[0]}?" if close else _LISTS[what])
        )
    return "\n".join(dict.fromkeys(lines))


def misspelt_options(options: "Iterable[ProviderOptions]") -> list[str]:
    """Return a line for each unknown provider or option whose name resembles a known name, because
    it is probably misspelt. Other unknown names have no line. The provider itself checks its
    options, and an unknown provider may be installed on the server.
    """
    import json

    from cavvy.providers import registry
    from cavvy.spec.problems import nearest

    lines, installed = [], registry.list_known()
    for each in options:
        name = each.provider
        if name not in installed:
            if close := nearest(name, installed):
                hint = f"there is no provider {name!r}; did you mean {close}?"
                lines.append(f"resources.options.{name}: {hint}")
            continue
        known = registry.manifest_of(installed[name]).options
        lines += [
            f"resources.options.{name}.{option}: {name} has no such option; did you mean {close}?"
            for option in json.loads(each.values)
            if option not in known and (close := nearest(option, known))
        ]
    return lines


def _list_named(
    snapshot: "CatalogSnapshot",
    need: "ResourceSpec",
    providers: "Iterable[str]",
    live: "Collection[Offer]",
) -> "Iterator[tuple[str, str, Collection[str]]]":
    """Yield three values for each name in `need`: the kind of the name, the name, and the known
    names of this kind.
    """
    from cavvy.catalog.regions import AREAS, is_known_place, region_of_zone

    located = snapshot.regions()
    own = {name for offer in live for name in (offer.region, offer.zone or offer.region)}
    for name in need.providers:
        yield "provider", name, {*providers, *(provider for provider, _, _ in located)}
    regions = {*AREAS, "europe", *snapshot.zones(), *own, *(region for _, region, _ in located)}
    for name in need.regions:
        if not is_known_place(name) and region_of_zone(name.lower()) not in regions:
            yield "region", name.lower(), {region.lower() for region in regions}
    if need.instance:
        types = {*snapshot.instance_types(), *(offer.instance_type for offer in live)}
        yield "instance type", need.instance, types


def list_unlisted(
    snapshot: "CatalogSnapshot", need: "ResourceSpec", configured: "Container[str]"
) -> list[str]:
    """Return the regions and the instance type of `need` that the price list lacks, but that the
    named providers may have: none of them is configured, and each name has a digit, as those of
    regions and types have, and is not a known one misspelt.
    """
    from difflib import get_close_matches

    sellers = list_sellers(need.providers)
    if not sellers or any(each in configured for each in sellers):
        return []
    found = []
    for what, name, known in _list_named(snapshot, need, (), ()):
        names = [each.lower() for each in known]
        if what == "provider" or name.lower() in names:
            continue
        close = get_close_matches(name.lower(), names, n=1, cutoff=_TYPO)
        if close or not any(map(str.isdigit, name)):
            return []
        found.append(f"{what} {name}")
    return found


def list_silent(
    snapshot: "CatalogSnapshot", need: "ResourceSpec", live: "Collection[Offer]"
) -> list[str]:
    """Return the providers in `need` whose regions cannot be listed: they have no published prices,
    and they are not configured or did not answer.
    """
    heard = {provider for provider, _, _ in snapshot.regions()}
    heard |= {offer.provider for offer in live}
    return [each for each in need.providers if each not in heard and _is_installed(each)]


def _is_installed(provider: str) -> bool:
    from cavvy.providers import registry

    return provider in registry.list_known()


def _explain_functions(platform: str) -> str:
    """Return a message for a function platform without GPUs."""
    return (
        f"{platform} runs functions, which have no GPUs ({_WITHOUT_GPUS[platform]}); name another "
        f"provider. `cavvy services queue trigger {platform}` prints a function that calls a "
        "service."
    )


def _explain_unlisted(provider: str) -> str:
    """Return a message for a provider without published prices."""
    return (
        f"the catalog has no provider {provider!r}: its offers come from your own account or "
        f"cluster, once it is configured. `cavvy check {provider}` shows the provider's state "
        f"and the settings of [providers.{provider}]."
    )
