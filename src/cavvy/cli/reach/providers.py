"""Loads the settings and the configured providers, for commands that query providers without the
server.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from cavvy.cli.view.failure import CommandFailure

if TYPE_CHECKING:
    from cavvy.domain.offers import Offer
    from cavvy.providers.base import NodeEndpoint, Provider
    from cavvy.settings import Settings

ASK_TIMEOUT_S = 30  # maximum seconds that a command waits for each provider
SILENT = f"no answer within {ASK_TIMEOUT_S} s"


def load_settings() -> "Settings":
    """Return this installation's settings. Raises CommandFailure."""
    from cavvy import settings

    try:
        return settings.load()
    except settings.SettingsError as error:
        raise CommandFailure(error.message, error.hint, exit_code=2) from error


def load_providers(only: Collection[str] | None = None) -> "Mapping[str, Provider]":
    """Load the configured providers, or only the providers named in `only`. The result can be used
    only to read offers. Raises CommandFailure.
    """
    from cavvy.providers.installed import NotInstalled, list_enabled

    known, hint = load_settings(), "`cavvy check` shows what each provider needs"
    try:
        on = list_enabled(known.providers)
    except NotInstalled as error:
        raise CommandFailure(str(error), hint, exit_code=2) from error
    wanted = [each for each in on if only is None or each.name in only]
    if not wanted:
        return {}
    from cavvy.providers import registry
    from cavvy.providers.base import ProviderContext, ProviderError

    try:
        # No node is launched, so the installation's name does not matter.
        context = ProviderContext(
            installation="plan",
            home=known.home / "providers",
            node_endpoint=foresee_node_endpoint(known),
            find_instance=find_instance,
            list_instance=list_instance,
            list_prices=list_prices,
        )
        return {
            each.name: registry.make(each, known.providers.get(each.name, {}), context)
            for each in wanted
        }
    except ProviderError as error:
        raise CommandFailure(str(error), hint, exit_code=2) from error


def list_prices(provider: str) -> "Sequence[Offer]":
    """Return a provider's prices from the catalog. The catalog is opened only if a provider calls
    this function.
    """
    from cavvy.store.snapshot import reader

    return reader.list_prices(provider)


def list_instance(provider: str, instance: str) -> "Sequence[Offer]":
    """Return the catalog's offers of an instance type, the cheapest first."""
    from cavvy.store.snapshot import reader

    return reader.list_instance(provider, instance)


def find_instance(provider: str, instance: str) -> "Offer | None":
    """Return the catalog's cheapest offer of an instance type, or None if the type is unknown."""
    return next(iter(list_instance(provider, instance)), None) if instance else None


def foresee_node_endpoint(settings: "Settings") -> "NodeEndpoint | None":
    """Return the endpoint that nodes would use according to the settings. The endpoint has no keys,
    so it cannot be used to launch nodes. Raises CommandFailure.
    """
    if not settings.text("server.tls_listen"):
        return None
    from cavvy.providers.base import NodeEndpoint
    from cavvy.server.node_listener import read_listen, told_address
    from cavvy.server.state_dir import StateDirError

    try:
        address = told_address(settings, *read_listen(settings))
    except StateDirError as error:
        raise CommandFailure(
            f"{settings.file}: {error.message}", error.hint, exit_code=2
        ) from error
    return NodeEndpoint(
        address=address,
        pin="",
        key_pin="",
        agent=str,
        pythons=dict,
        publish=lambda content: "",
        claim_token=lambda gang, rank: "",
    )
