"""Response types of the routes for encryption keys, and client functions that call these routes."""

from cavvy.client.answers import read_answer
from cavvy.client.client import ApiClient
from cavvy.client.wire import Answer


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
