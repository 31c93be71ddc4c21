"""Request and response types of the routes for projects' provider credentials and for encryption
keys, and client functions that call these routes.
"""

from datetime import datetime

from msgspec import field
from msgspec.json import encode

from cavvy.client.answers import read_answer
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


class SecretKeyRow(Answer, frozen=True, kw_only=True):
    """A key that encrypts the data keys of secrets and files. `secrets` and `files` count the
    secrets and the files' data keys that the key protects. `place` is None if the server does not
    have the key. `id` is empty if the row counts secrets from an older version of Cavvy, which have
    no data key.
    """

    id: str
    place: str | None
    current: bool
    secrets: int
    files: int = 0


class UnreadableSecret(Answer, frozen=True, kw_only=True):
    """A secret that could not be decrypted."""

    project: str
    name: str
    reason: str


class RotationView(Answer, frozen=True, kw_only=True):
    """The result of a key rotation. `files` is the number of data keys that encrypt files."""

    id: str
    place: str
    encrypted: int
    files: int = 0
    unreadable: list[UnreadableSecret]


def list_keys(client: ApiClient) -> list[SecretKeyRow]:
    return client.ask("/v1/secret-keys", list[SecretKeyRow])


def rotate_key(client: ApiClient) -> RotationView:
    """Encrypt all secrets again. Raises ApiError `database-unusable`, `disk-full`."""
    return read_answer(client.send("POST", "/v1/secret-keys/rotate", wait_s=600), RotationView)
