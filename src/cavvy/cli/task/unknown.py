"""Names in a request that neither the catalog nor a provider knows, and what may be meant; for
offers, plan and run.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cavvy.domain.tasks import Resources
    from cavvy.store.snapshot import CatalogSnapshot


def unknown_names(
    snapshot: "CatalogSnapshot",
    need: "Resources",
    providers: "Iterable[str]" = (),
    regions: "Iterable[str]" = (),
) -> str:
    """What was asked for that the catalog has never heard of, with what may be meant.

    `providers` and `regions` are those that are known without it, such as this machine's.
    """
    from difflib import get_close_matches

    from cavvy.catalog.regions import AREAS, is_known_place
    from cavvy.catalog.retired import find_retired

    lines = []
    places = snapshot.regions()
    names = (
        {region.lower() for _, region, _ in places}
        | {*AREAS, "europe"}
        | {region.lower() for region in regions}
    )
    asked = [
        ("provider", name, {*providers, *(provider for provider, _, _ in places)})
        for name in need.providers
    ]
    asked += [("region", name.lower(), names) for name in need.regions if not is_known_place(name)]
    if need.instance:
        retired = find_retired(need.instance)
        if retired:
            lines.append(
                f"{retired.instance_type} is retired; its successor is {retired.successor}."
            )
        else:
            asked.append(("instance type", need.instance, set(snapshot.instance_types())))
    for what, name, known in asked:
        if name.lower() not in {item.lower() for item in known}:
            if what == "provider" and _is_installed(name):
                lines.append(_say_own(name))
                continue
            close = get_close_matches(name, known, n=1)
            lines.append(
                f"The catalog has no {what} {name!r}"
                + (f"; did you mean {close[0]}?" if close else ".")
            )
    return "\n".join(lines)


def _is_installed(provider: str) -> bool:
    from cavvy.providers import registry

    return provider in registry.list_known()


def _say_own(provider: str) -> str:
    """What to do about a provider of which nobody publishes prices."""
    return (
        f"The catalog has no provider {provider!r}: what it offers is asked of your own, where it "
        "is configured. "
        f"`cavvy check {provider}` says whether it is, and what [providers.{provider}] in the "
        "settings takes."
    )
