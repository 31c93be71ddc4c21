"""Request and response types of the routes for projects' provider credentials, and client functions
that call these routes."""

from datetime import datetime

from msgspec import field
from msgspec.json import encode

from cavvy.client.client import ApiClient
from cavvy.client.paths import project_path
from cavvy.client.wire import Answer, Ask


class CredentialAsk(Ask, frozen=True, kw_only=True):
    """The provider's settings, and the contents of its key files, keyed by the name of the setting
    for each file.
    """

    settings: dict[str, str | int | float | bool] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)


class CredentialRow(Answer, frozen=True, kw_only=True):
    """A credential without its content, which the API never returns. `problem` is the reason why
    the credential cannot be used, or "".
    """

    provider: str
    updated_at: datetime
    problem: str


def list_credentials(client: ApiClient, project: str) -> list[CredentialRow]:
    return client.ask(f"{project_path(project)}/credentials", list[CredentialRow])


def put_credential(client: ApiClient, project: str, provider: str, ask: CredentialAsk) -> None:
    """Send a credential, which the server tests and then stores. Raises ApiError
    `credential-in-use`, `provider-refused`, `provider-unreachable`.
    """
    client.send("PUT", _path(project, provider), encode(ask), wait_s=120)


def remove_credential(client: ApiClient, project: str, provider: str) -> None:
    """Remove a credential. Raises ApiError `credential-not-found`, `credential-in-use`."""
    client.send("DELETE", _path(project, provider), wait_s=120)


def _path(project: str, provider: str) -> str:
    return f"{project_path(project)}/credentials/{provider}"
