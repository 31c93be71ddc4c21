"""The configured providers as commands ask them: the settings, the providers that they name,
what nodes would call.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cavvy.cli.view.failure import CommandFailure

if TYPE_CHECKING:
    from cavvy.providers.base import NodeEndpoint, Provider
    from cavvy.settings import Settings

ASK_TIMEOUT_S = 30  # for each provider
SILENT = f"no answer within {ASK_TIMEOUT_S} s"


def load_settings() -> "Settings":
    """What this installation is set to. Raises CommandFailure."""
    from cavvy import settings

    try:
        return settings.load()
    except settings.SettingsError as error:
        raise CommandFailure(error.message, error.hint, exit_code=2) from error


def load_providers() -> "Mapping[str, Provider]":
    """Those that are configured, to be asked for offers alone. Raises CommandFailure."""
    from cavvy.providers import registry
    from cavvy.providers.base import ProviderError

    known = load_settings()
    try:
        # Only offers are asked for; nothing that a provider starts could carry this installation's
        # name.
        return registry.load(
            known.providers,
            installation="plan",
            home=known.home / "providers",
            node_endpoint=foresee_node_endpoint(known),
        )
    except ProviderError as error:
        raise CommandFailure(
            str(error), "`cavvy check` says what each provider needs", exit_code=2
        ) from error


def foresee_node_endpoint(settings: "Settings") -> "NodeEndpoint | None":
    """What nodes would call, as the settings say; nothing can be launched by it. Raises
    CommandFailure.
    """
    if not settings.text("server.tls_listen"):
        return None
    from cavvy.api.node_listener.listener import read_listen, told_address
    from cavvy.api.state_dir import StateDirError
    from cavvy.providers.base import NodeEndpoint

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
